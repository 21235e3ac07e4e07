"""The `harvest` section of penstock.yaml: feeds, and who is told when one is in trouble."""

import re
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from penstock.harvest.contract import NAME
from penstock.kernel.config.loader import SecretRef, Section
from penstock.kernel.config.sections import Duration, Options, Secrets, Url
from penstock.refdata.contract import NAME as DICTIONARY

Positive = Annotated[Duration, Field(gt=timedelta(0))]
FieldPath = Annotated[str, StringConstraints(pattern=r"^[^.\s]+(\.[^.\s]+){0,9}$", max_length=200)]
FieldName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,62}$")]
FeedName = Annotated[str, StringConstraints(pattern=NAME)]
Ratio = Annotated[float, Field(ge=0, le=1)]
_DIGITS = 12


class CallSection(Section):
    """H15: how the source is called, by all workers of the feed together."""

    timeout: Positive = Field(timedelta(seconds=30), description="For one request, with its answer.")
    attempts: int = Field(3, ge=1, le=10, description="Tries of one request, before its work item is put back.")
    rate: float | None = Field(None, gt=0, le=10_000, description="Requests a second; unlimited when not set.")
    burst: int = Field(10, ge=1, le=1_000, description="Requests that may come at once under a rate.")
    at_once: int = Field(32, ge=1, le=1_000, description="Requests under way at once in one process.")
    longest_pause: Positive = Field(timedelta(minutes=10), description="The most a Retry-After is heeded.")
    break_after: int = Field(20, ge=1, description="Failures in a row, of all workers, that stop all requests.")
    break_for: Positive = Field(timedelta(seconds=30), description="For how long; then one request tries.")
    page_bytes: int = Field(20_000_000, ge=1_000, description="The most an answer may have.")


def _is_http(url: str) -> str:
    if not re.match(r"https?://[^/\s]", url):
        raise ValueError("an address begins with http:// or https://")
    return url


HttpUrl = Annotated[Url, AfterValidator(_is_http)]


def _apart(*paths: str | None) -> None:
    """No path may lead into what another one names."""
    given = [path for path in paths if path]
    for path in given:
        if inner := [other for other in given if other.startswith(f"{path}.")]:
            raise ValueError(f"{inner[0]} lies within {path}")


class SourceSection(Section):
    """What every source has."""

    url: HttpUrl = Field(description="Where the API is.")
    call: CallSection = CallSection()


class NivodaSourceSection(SourceSection):
    """H14: Nivoda's GraphQL API."""

    kind: Literal["nivoda"] = Field(description="Nivoda's API.")
    username: str = Field(min_length=1, description="Who we are there.")
    password: SecretRef = Field(description="Of that user.")
    token_for: Positive = Field(timedelta(hours=5, minutes=30), description="How long a token is used.")


class PagingSection(StrEnum):
    """How a REST API is asked for the next page."""

    OFFSET = "offset"
    PAGE = "page"
    CURSOR = "cursor"


class RestSourceSection(SourceSection):
    """H14: a REST API that answers with JSON. Names of parameters and paths into answers are its own."""

    kind: Literal["rest"] = Field(description="Any REST API.")
    path: str = Field("/", description="Where records are listed.")
    count_path: str | None = Field(None, description="Where they are counted; the listing itself when not set.")
    headers: Options = Field(default_factory=dict, description="Sent with every request.")
    secret_headers: Secrets = Field(default_factory=dict, description="By reference: Authorization: env:TOKEN")
    params: Options = Field(default_factory=dict, description="Sent with every request.")
    paging: PagingSection = Field(PagingSection.OFFSET, description="How the next page is asked for.")
    first_page: int = Field(1, ge=0, le=1, description="The number of the first page.")
    offset_param: str = Field("offset", description="Of `paging: offset`.")
    page_param: str = Field("page", description="Of `paging: page`.")
    cursor_param: str = Field("cursor", description="Of `paging: cursor`.")
    limit_param: str = Field("limit", description="How many records a page has.")
    lower_param: str = Field("price_from", description="At least; in minor units, unless `decimals`.")
    upper_param: str = Field("price_below", description="Below.")
    null_param: str | None = Field(
        "price_null", description="`true` asks for records without a value; null: it cannot."
    )
    decimals: int = Field(0, ge=0, le=6, description="2: the source is asked in 12.34 where we count 1234.")
    after_param: str | None = Field("updated_after", description="Changed after; not set: no incremental runs.")
    upto_param: str | None = Field("updated_upto", description="Changed not after.")
    records: FieldPath = Field("items", description="Where an answer has its records.")
    total: FieldPath | None = Field("total", description="Where an answer tells how many there are.")
    next_cursor: FieldPath = Field("nextCursor", description="Where it tells the cursor of the next page.")
    has_more: FieldPath | None = Field(None, description="Where it tells whether more follow.")
    short_page_ends: bool = Field(False, description="H16: a page that is not full is the last.")

    @model_validator(mode="after")
    def _counts(self) -> "RestSourceSection":
        if self.count_path is None and self.total is None:
            raise ValueError("without count_path, `total` says where an answer tells how many records there are")
        if (self.after_param is None) != (self.upto_param is None):
            raise ValueError("after_param and upto_param go together")
        _apart(self.records, self.total, self.next_cursor, self.has_more)
        return self


class PartitionsSection(Section):
    """H3: how the source is cut."""

    count: int = Field(30, ge=1, le=1_000, description="Ranges at most; records without a value are one more.")
    lowest: int = Field(0, description="Below this lie few, in minor units.")
    highest: int = Field(10_000_000, description="From here on lie few: the overflow.")
    least: int = Field(1_000, ge=1, description="Fewer partitions, when they would hold less than this.")
    rounds: int = Field(5, ge=1, le=100, description="Times the parts are counted until their sum is the total.")
    tolerance: Ratio = Field(0.0, description="By how much the sum may differ all the same, as a part of the total.")

    @model_validator(mode="after")
    def _is_a_range(self) -> "PartitionsSection":
        if self.lowest >= self.highest:
            raise ValueError("lowest is below highest")
        return self


class FieldType(StrEnum):
    """What a canonical field holds."""

    TEXT = "text"
    INTEGER = "integer"
    DECIMAL = "decimal"
    BOOLEAN = "boolean"


class FieldSection(Section):
    """A canonical field."""

    path: FieldPath = Field(description="Where in a record it is.")
    type: FieldType = Field(FieldType.TEXT, description="What it has to be.")
    required: bool = Field(False, description="Whether a record without it is rejected.")


class CostSection(Section):
    """What the source asks for a record: the number prices are made of."""

    path: FieldPath = Field(description="Where in a record it is.")
    decimals: int = Field(0, ge=0, le=6, description="2: the source tells 1234 for 12.34.")


class ConditionSection(Section):
    """A field is one of some values, or a number at least `from` and below `below`; one without a value is neither."""

    any_of: list[str | int | Decimal | bool] | None = Field(
        None, min_length=1, max_length=1_000, description="The values that count."
    )
    from_: Decimal | None = Field(None, alias="from", description="The least that counts.")
    below: Decimal | None = Field(None, description="What no longer counts.")

    @model_validator(mode="after")
    def _says_something(self) -> "ConditionSection":
        ranged = self.from_ is not None or self.below is not None
        if ranged == (self.any_of is not None):
            raise ValueError("give any_of, or from and below")
        return self


class RuleSection(Section):
    """The first rule whose conditions all hold makes the price: cost × (100 + markup_percent) / 100 + add."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        description="Records tell which rule priced them."
    )
    when: dict[FieldName, ConditionSection] = Field(default_factory=dict)
    markup_percent: Decimal = Field(Decimal(0), ge=-100, le=100_000, max_digits=_DIGITS, description="Put on the cost.")
    add: Decimal = Field(Decimal(0), max_digits=_DIGITS, description="Put on top of that.")


class PricingSection(Section):
    """H7: rules are data. Where none fits, or the cost is not known, a record has no price."""

    rules: list[RuleSection] = Field(default_factory=list, max_length=1_000)
    decimals: int = Field(2, ge=0, le=6, description="A price is rounded to so many, half away from zero.")

    @field_validator("rules")
    @classmethod
    def _have_names(cls, rules: list[RuleSection]) -> list[RuleSection]:
        if len({rule.name for rule in rules}) != len(rules):
            raise ValueError("two rules have one name")
        return rules


class ConsolidationMode(StrEnum):
    """H7: in Python, batch by batch, or by PostgreSQL, many at once."""

    SETS = "sets"
    BATCHES = "batches"


class ConsolidationSection(Section):
    """H7: how raw records become canonical ones."""

    mode: ConsolidationMode = Field(
        ConsolidationMode.SETS,
        description="`sets`: PostgreSQL maps many at once; `batches`: Python does, batch by batch.",
    )
    set_size: int = Field(5_000, ge=1, le=1_000_000, description="Records of one statement.")
    sets_at_once: int = Field(2, ge=1, le=50, description="Statements at the same time.")
    batch_size: int = Field(2_000, ge=1, le=100_000, description="Records of one batch.")
    upsert_size: int = Field(100, ge=1, le=10_000, description="Records written by one statement of a batch.")
    upserts_at_once: int = Field(5, ge=1, le=50, description="Such statements at the same time.")


class LimitsSection(Section):
    """What is too much."""

    max_delete_ratio: Ratio = Field(0.2, description="H10: more than this part gone is not believed.")
    max_reject_ratio: Ratio = Field(0.01, description="More records than this part that cannot be mapped fail a run,")
    rejects_allowed: int = Field(10, ge=0, description="but never so few.")
    record_bytes: int = Field(1_000_000, ge=100, description="The most a record may have; a larger one is rejected.")
    passes: int = Field(5, ge=1, le=100, description="H16: passes over a partition that does not hold still.")


class DictionarySinkSection(Section):
    """A dictionary of refdata that reads this feed: it gets a version in the transaction that completes a run."""

    tenant: Annotated[str, StringConstraints(pattern=DICTIONARY)] = Field(description="Whose dictionary.")
    code: Annotated[str, StringConstraints(pattern=DICTIONARY)] = Field(
        description="One with `loadSql` and no `apply`."
    )


class FeedSection(Section):
    """One API, kept in step."""

    source: Annotated[NivodaSourceSection | RestSourceSection, Field(discriminator="kind")]
    key: FieldPath = Field(description="Where a record tells what it is called.")
    updated_at: FieldPath | None = Field(None, description="Where it tells when it changed: ISO 8601 with a zone.")
    partitions: PartitionsSection = PartitionsSection()
    page_size: int = Field(30, ge=1, le=10_000, description="Records of a page.")
    pages_per_turn: int = Field(30, ge=1, le=1_000, description="Pages fetched and kept by one work item.")
    overlap: Duration = Field(timedelta(minutes=1), description="H9: by how much runs ask again for what is older.")
    fields: dict[FieldName, FieldSection] = Field(default_factory=dict, max_length=200)
    cost: CostSection | None = None
    pricing: PricingSection = PricingSection()
    consolidation: ConsolidationSection = ConsolidationSection()
    limits: LimitsSection = LimitsSection()
    dictionaries: list[DictionarySinkSection] = Field(
        default_factory=list, max_length=1_000, description="Dictionaries whose `loadSql` reads `published_record`."
    )
    every: Positive | None = Field(None, description="Run so often; only when asked, when not set.")
    full_every: Positive = Field(timedelta(days=1), description="Of these, so often a full one: it finds what is gone.")

    @model_validator(mode="after")
    def _fits_together(self) -> "FeedSection":
        _apart(self.key, self.updated_at)
        if isinstance(self.source, NivodaSourceSection) and self.page_size > 50:
            raise ValueError("Nivoda gives at most 50 records a page")
        if self.pricing.rules and self.cost is None:
            raise ValueError("prices are made of a cost: say where it is")
        for rule in self.pricing.rules:
            if unknown := sorted(rule.when.keys() - self.fields.keys()):
                raise ValueError(f"rule {rule.name!r} asks for {unknown[0]}, which is none of the fields")
        return self


class SmtpSection(Section):
    """H12: alerts by e-mail."""

    host: str = Field(min_length=1, description="The mail server.")
    port: int = Field(25, ge=1, le=65535, description="Its port.")
    sender: str = Field(pattern=r"^[^\s<>]+@[^\s<>]+$", description="Whom a mail is from.")
    to: list[Annotated[str, StringConstraints(pattern=r"^[^\s<>,]+@[^\s<>,]+$")]] = Field(
        min_length=1, description="Whom it goes to."
    )
    username: str | None = Field(None, description="Who we are there.")
    password: SecretRef | None = Field(None, description="Of that user.")
    starttls: bool = Field(False, description="Whether to ask for TLS.")


class WebhookSection(Section):
    """H12: alerts by POST."""

    url: HttpUrl = Field(description="Where alerts are posted.")
    secret_headers: Secrets = Field(default_factory=dict, description="By reference: Authorization: env:TOKEN")


class AlertsSection(Section):
    """H12: who is told; the log always is."""

    email: SmtpSection | None = None
    webhooks: list[WebhookSection] = Field(default_factory=list, max_length=10)


class HarvestSection(Section):
    """Harvest: paged APIs synced by partition, consolidated, watermarked."""

    feeds: dict[FeedName, FeedSection] = Field(default_factory=dict)
    alerts: AlertsSection = AlertsSection()
    workers: int = Field(4, ge=1, le=100, description="Batches of work items under way at once in one process.")
    lease: Positive = Field(timedelta(seconds=60), description="How long a dead worker's items are left alone.")
    retry_after: Positive = Field(timedelta(seconds=10), description="Before a plan or a consolidation is tried again.")
    stalled_after: Positive = Field(timedelta(minutes=5), description="A partition without a page is looked after.")
    retention: Positive = Field(timedelta(days=90), description="How long runs, rejects and alerts are kept.")
