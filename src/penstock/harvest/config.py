"""Settings of the section `harvest`: feeds and alerts."""

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
    """H15: limits of the requests to the source, shared by all workers of the feed."""

    timeout: Positive = Field(timedelta(seconds=30), description="Timeout of one request, including its response.")
    attempts: int = Field(
        3, ge=1, le=10, description="Attempts of one request before its work item is returned to the queue."
    )
    rate: float | None = Field(
        None, gt=0, le=10_000, description="Requests per second, in all processes. Default: no limit."
    )
    burst: int = Field(10, ge=1, le=1_000, description="Requests that may be sent at the same moment if `rate` is set.")
    concurrency: int = Field(32, ge=1, le=1_000, description="Concurrent requests of one process.")
    max_pause: Positive = Field(
        timedelta(minutes=10), description="Longest pause that a Retry-After header of the source can cause."
    )
    break_after: int = Field(
        20, ge=1, description="Consecutive failed requests, in all processes, that open the circuit breaker."
    )
    break_for: Positive = Field(
        timedelta(seconds=30),
        description="Time without requests after the circuit breaker opens. Then one request probes.",
    )
    page_bytes: int = Field(20_000_000, ge=1_000, description="Maximum size of a response in bytes.")


def _is_http(url: str) -> str:
    if not re.match(r"https?://[^/\s]", url):
        raise ValueError("must start with http:// or https://")
    return url


HttpUrl = Annotated[Url, AfterValidator(_is_http)]


def _check_disjoint(*paths: str | None) -> None:
    """Raise ValueError if one of *paths* is inside of another."""
    present = [path for path in paths if path]
    for path in present:
        if inner := [other for other in present if other.startswith(f"{path}.")]:
            raise ValueError(f"the path {inner[0]} is inside of the path {path}; they must be separate values")


class SourceSection(Section):
    """Settings of every kind of source."""

    url: HttpUrl = Field(description="Base URL of the API, without credentials.")
    call: CallSection = CallSection()


class NivodaSourceSection(SourceSection):
    """H14: Nivoda's GraphQL API."""

    kind: Literal["nivoda"] = Field(description="Nivoda's GraphQL API.")
    username: str = Field(min_length=1, description="User name of the account.")
    password: SecretRef = Field(description="Password of `username`, as env:NAME or file:/path.")
    token_for: Positive = Field(
        timedelta(hours=5, minutes=30), description="Time after which the client requests a new access token."
    )


class PagingSection(StrEnum):
    """Parameter that selects the next page of a REST API."""

    OFFSET = "offset"
    PAGE = "page"
    CURSOR = "cursor"


class RestSourceSection(SourceSection):
    """H14: a REST API with JSON responses, described by its parameters and by paths into its responses."""

    kind: Literal["rest"] = Field(description="A REST API that lists records as JSON pages.")
    path: str = Field("/", description="Path of the listing, relative to `url`.")
    count_path: str | None = Field(
        None, description="Path of the count of records, relative to `url`. Default: the listing contains the total."
    )
    headers: Options = Field(default_factory=dict, description="Headers of every request.")
    secret_headers: Secrets = Field(
        default_factory=dict,
        description="Headers of every request with secret values, e.g. `Authorization: env:TOKEN`.",
    )
    params: Options = Field(default_factory=dict, description="Query parameters of every request.")
    paging: PagingSection = Field(PagingSection.OFFSET, description="Parameter that selects the next page.")
    first_page: int = Field(1, ge=0, le=1, description="Number of the first page if `paging` is page.")
    offset_param: str = Field("offset", description="Parameter for the offset if `paging` is offset.")
    page_param: str = Field("page", description="Parameter for the page number if `paging` is page.")
    cursor_param: str = Field("cursor", description="Parameter for the cursor if `paging` is cursor.")
    limit_param: str = Field("limit", description="Parameter for the number of records per page.")
    lower_param: str = Field(
        "price_from", description="Parameter for the inclusive lower bound of the partition field, in minor units."
    )
    upper_param: str = Field(
        "price_below", description="Parameter for the exclusive upper bound of the partition field, in minor units."
    )
    null_param: str | None = Field(
        "price_null",
        description="Parameter that selects, with the value true, records without a partition field. "
        "null: the source has no such parameter.",
    )
    decimals: int = Field(
        0, ge=0, le=6, description="Decimal places of the bounds in requests. 2 sends 12.34 for 1234 minor units."
    )
    after_param: str | None = Field(
        "updated_after",
        description="Parameter for the exclusive lower bound of the time of change. null: every run is a full run.",
    )
    upto_param: str | None = Field(
        "updated_upto",
        description="Parameter for the inclusive upper bound of the time of change. null if `after_param` is null.",
    )
    records: FieldPath = Field("items", description="Path of the list of records in a response.")
    total: FieldPath | None = Field("total", description="Path of the total number of records in a response.")
    next_cursor: FieldPath = Field("nextCursor", description="Path of the cursor of the next page in a response.")
    has_more: FieldPath | None = Field(
        None, description="Path of the boolean in a response that is false on the last page. Default: not used."
    )
    short_page_ends: bool = Field(
        False, description="H16: whether a page with fewer records than requested is the last page."
    )

    @model_validator(mode="after")
    def _check_paths(self) -> "RestSourceSection":
        if self.count_path is None and self.total is None:
            raise ValueError("set `total` to the path of the total number of records, or set `count_path`")
        if (self.after_param is None) != (self.upto_param is None):
            raise ValueError("after_param and upto_param must both be set, or both be null")
        _check_disjoint(self.records, self.total, self.next_cursor, self.has_more)
        return self


class PartitionsSection(Section):
    """H3: the partitions of a run."""

    count: int = Field(
        30, ge=1, le=1_000, description="Maximum number of ranges. Records without a value are one more partition."
    )
    lowest: int = Field(0, description="Lower end of the usual values, in minor units. Smaller values are few.")
    highest: int = Field(
        10_000_000, description="Upper end of the usual values, in minor units. Larger values are few."
    )
    min_records: int = Field(
        1_000, ge=1, description="Minimum average of records per partition. A small source gets fewer partitions."
    )
    rounds: int = Field(
        5, ge=1, le=100, description="Attempts to count all partitions until their sum equals the total of the source."
    )
    tolerance: Ratio = Field(
        0.0,
        description="Accepted difference between the sum and the total after the last attempt, as a part of the total.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> "PartitionsSection":
        if self.lowest >= self.highest:
            raise ValueError("lowest must be less than highest")
        return self


class FieldType(StrEnum):
    """Type of a canonical field."""

    TEXT = "text"
    INTEGER = "integer"
    DECIMAL = "decimal"
    BOOLEAN = "boolean"


class FieldSection(Section):
    """A field of canonical records."""

    path: FieldPath = Field(description="Path of the value in a record of the source.")
    type: FieldType = Field(FieldType.TEXT, description="Type of the value. A record with another value is rejected.")
    required: bool = Field(False, description="Whether a record without the value is rejected.")


class CostSection(Section):
    """The cost of a record, from which its price is computed."""

    path: FieldPath = Field(description="Path of the cost in a record of the source.")
    decimals: int = Field(
        0, ge=0, le=6, description="Decimal places that the source leaves out. 2 if the source sends 1234 for 12.34."
    )


class ConditionSection(Section):
    """A test of one field: its value is in a list or in a range. A missing value fails the test."""

    any_of: list[str | int | Decimal | bool] | None = Field(
        None, min_length=1, max_length=1_000, description="Values that pass."
    )
    from_: Decimal | None = Field(None, alias="from", description="Inclusive lower bound of the numbers that pass.")
    below: Decimal | None = Field(None, description="Exclusive upper bound of the numbers that pass.")

    @model_validator(mode="after")
    def _check_one_test(self) -> "ConditionSection":
        has_range = self.from_ is not None or self.below is not None
        if has_range == (self.any_of is not None):
            raise ValueError("set any_of, or set from, below or both")
        return self


class RuleSection(Section):
    """A pricing rule: price = cost × (100 + markup_percent) / 100 + add. The first rule that matches is used."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        description="Name of the rule, stored with each record that it prices."
    )
    when: dict[FieldName, ConditionSection] = Field(
        default_factory=dict,
        description="Conditions by field name. All must be true. Without conditions the rule always matches.",
    )
    markup_percent: Decimal = Field(
        Decimal(0), ge=-100, le=100_000, max_digits=_DIGITS, description="Markup on the cost, in percent."
    )
    add: Decimal = Field(Decimal(0), max_digits=_DIGITS, description="Amount that is added after the markup.")


class PricingSection(Section):
    """H7: pricing rules. A record that no rule matches, or without a cost, has no price."""

    rules: list[RuleSection] = Field(
        default_factory=list, max_length=1_000, description="Pricing rules in the order in which they are tried."
    )
    decimals: int = Field(
        2, ge=0, le=6, description="Decimal places of a price. Prices are rounded half away from zero."
    )

    @field_validator("rules")
    @classmethod
    def _check_names(cls, rules: list[RuleSection]) -> list[RuleSection]:
        if len({rule.name for rule in rules}) != len(rules):
            raise ValueError("each rule needs a different name")
        return rules


class ConsolidationMode(StrEnum):
    """H7: implementation of consolidation."""

    SETS = "sets"
    BATCHES = "batches"


class ConsolidationSection(Section):
    """H7: conversion of raw records to canonical records."""

    mode: ConsolidationMode = Field(
        ConsolidationMode.SETS,
        description="Implementation: `sets` maps in PostgreSQL with one statement per set, `batches` maps in Python.",
    )
    set_size: int = Field(5_000, ge=1, le=1_000_000, description="Records per statement in the mode `sets`.")
    set_concurrency: int = Field(2, ge=1, le=50, description="Concurrent statements in the mode `sets`.")
    batch_size: int = Field(2_000, ge=1, le=100_000, description="Records per batch in the mode `batches`.")
    upsert_size: int = Field(100, ge=1, le=10_000, description="Records per upsert statement in the mode `batches`.")
    upsert_concurrency: int = Field(
        5, ge=1, le=50, description="Concurrent upsert statements of one batch in the mode `batches`."
    )


class LimitsSection(Section):
    """Limits of a run. A run that exceeds a limit fails, or does not delete."""

    max_delete_ratio: Ratio = Field(
        0.2,
        description="H10: largest part of the live records that a full run may delete. Above it, nothing is deleted.",
    )
    max_reject_ratio: Ratio = Field(
        0.01, description="Largest part of the records that may be rejected. Above it, the run fails."
    )
    rejects_allowed: int = Field(
        10, ge=0, description="Number of rejected records that never fails a run, whatever `max_reject_ratio` is."
    )
    record_bytes: int = Field(
        1_000_000, ge=100, description="Maximum size of a record in bytes. Larger records are rejected."
    )
    passes: int = Field(
        5, ge=1, le=100, description="H16: maximum number of passes over a partition whose records change or move."
    )


class DictionarySinkSection(Section):
    """A dictionary that reads this feed. It gets a new version in the transaction that completes a run."""

    tenant: Annotated[str, StringConstraints(pattern=DICTIONARY)] = Field(description="Tenant of the dictionary.")
    code: Annotated[str, StringConstraints(pattern=DICTIONARY)] = Field(
        description="Code of the dictionary. The dictionary needs `loadSql` and must not have `apply`."
    )


class FeedSection(Section):
    """A paged API that is synchronised with the database."""

    source: Annotated[
        NivodaSourceSection | RestSourceSection, Field(discriminator="kind", description="API of the feed.")
    ]
    key: FieldPath = Field(description="Path of the unique key in a record.")
    updated_at: FieldPath | None = Field(
        None, description="Path of the time of the last change in a record, in ISO 8601 with a time zone."
    )
    partitions: PartitionsSection = PartitionsSection()
    page_size: int = Field(30, ge=1, le=10_000, description="Records per page. Nivoda allows up to 50.")
    pages_per_turn: int = Field(
        30, ge=1, le=1_000, description="Pages that one work item fetches and stores in one transaction."
    )
    overlap: Duration = Field(
        timedelta(minutes=1),
        description="H9: overlap of consecutive incremental runs, for clocks that differ and for delayed changes.",
    )
    fields: dict[FieldName, FieldSection] = Field(
        default_factory=dict, max_length=200, description="Fields of canonical records by name."
    )
    cost: CostSection | None = None
    pricing: PricingSection = PricingSection()
    consolidation: ConsolidationSection = ConsolidationSection()
    limits: LimitsSection = LimitsSection()
    dictionaries: list[DictionarySinkSection] = Field(
        default_factory=list,
        max_length=1_000,
        description="Dictionaries whose `loadSql` reads the table `published_record`.",
    )
    every: Positive | None = Field(None, description="Interval of scheduled runs. Default: no scheduled runs.")
    full_every: Positive = Field(
        timedelta(days=1),
        description="Interval of full runs among the scheduled runs. Only full runs find deleted records.",
    )

    @model_validator(mode="after")
    def _check_references(self) -> "FeedSection":
        _check_disjoint(self.key, self.updated_at)
        if isinstance(self.source, NivodaSourceSection) and self.page_size > 50:
            raise ValueError("page_size must be at most 50 for the source kind nivoda")
        if self.pricing.rules and self.cost is None:
            raise ValueError("pricing.rules need a cost: set cost.path to the path of the cost in a record")
        for rule in self.pricing.rules:
            if unknown := sorted(rule.when.keys() - self.fields.keys()):
                raise ValueError(f"pricing rule {rule.name!r} uses the field {unknown[0]}, which is not in `fields`")
        return self


class SmtpSection(Section):
    """H12: delivery of alerts by e-mail."""

    host: str = Field(min_length=1, description="Host of the mail server.")
    port: int = Field(25, ge=1, le=65535, description="TCP port of the mail server.")
    sender: str = Field(pattern=r"^[^\s<>]+@[^\s<>]+$", description="Sender address.")
    to: list[Annotated[str, StringConstraints(pattern=r"^[^\s<>,]+@[^\s<>,]+$")]] = Field(
        min_length=1, description="Addresses of the recipients."
    )
    username: str | None = Field(None, description="User name for authentication. Default: no authentication.")
    password: SecretRef | None = Field(None, description="Password of `username`, as env:NAME or file:/path.")
    starttls: bool = Field(False, description="Whether to encrypt the connection with STARTTLS.")


class WebhookSection(Section):
    """H12: delivery of alerts by HTTP POST."""

    url: HttpUrl = Field(description="URL that receives each alert as a JSON document.")
    secret_headers: Secrets = Field(
        default_factory=dict, description="Headers with secret values, e.g. `Authorization: env:TOKEN`."
    )


class AlertsSection(Section):
    """H12: delivery of alerts, in addition to the log."""

    email: SmtpSection | None = None
    webhooks: list[WebhookSection] = Field(
        default_factory=list, max_length=10, description="Webhooks that receive every alert."
    )


class HarvestSection(Section):
    """Synchronisation of paged APIs with the database."""

    feeds: dict[FeedName, FeedSection] = Field(default_factory=dict, description="Feeds by name.")
    alerts: AlertsSection = AlertsSection()
    workers: int = Field(4, ge=1, le=100, description="Concurrent batches of up to four partitions in one process.")
    lease: Positive = Field(
        timedelta(seconds=60), description="Time after which the work of a dead worker goes to another worker."
    )
    retry_after: Positive = Field(
        timedelta(seconds=10), description="Delay before the first retry of a plan or of a consolidation."
    )
    stalled_after: Positive = Field(
        timedelta(minutes=5), description="Time without progress after which the message of a work item is sent again."
    )
    retention: Positive = Field(timedelta(days=90), description="Retention time of runs, rejected records and alerts.")
