"""etl_ops/config/<supplier>.yaml: required quality, limits and guards, the format of files, their columns, targets."""

import hashlib
import re
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.flows.contract import NAME
from penstock.ingest.contract import FailureCode
from penstock.ingest.model import RunFailed
from penstock.kernel.config import loader
from penstock.kernel.config.loader import MisplacedKey, SecretRef, Section
from penstock.kernel.config.sections import Url
from penstock.kernel.errors import BadConfig, PenstockError
from penstock.kernel.validation import MISSING

DQ_KEYS = ("min_fact_count", "max_bad_ratio", "allow_empty_snapshot")
_AGES = 1_000_000  # hours: more than a century
CATEGORY = "category_key"  # may stand in a key beside payload fields
LARGEST = 2**53 - 1

Name = Annotated[str, Field(min_length=1, max_length=200)]
# Columns of a file without a header have numbers, the first is 1.
Place = Annotated[int, Field(ge=1, le=16_384)] | Name
Encoding = Literal[
    "auto", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "windows-1251", "windows-1252", "koi8-r", "cp866"
]


class DictionaryTarget(Section):
    """I23: a dictionary of refdata that becomes what is published, by the supplier's key."""

    tenant: Name = Field(description="Whose dictionary.")
    code: Name = Field(description="Which one.")
    url: Url = Field("http://127.0.0.1:8080", description="The API of refdata.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")


class FlowTarget(Section):
    """I23: a flow that a publication starts, once, unless a newer one took its place; the run's scope tells which."""

    name: Annotated[str, Field(pattern=NAME)] = Field(description="Which flow.")
    scope: dict[str, Any] = Field(default_factory=dict, description="Beside `supplier`, `runId`, `fence` and `facts`.")
    url: Url = Field("http://127.0.0.1:8080", description="The API of flows.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")


class WebhookTarget(Section):
    """I23: an address that is told of every publication, at least once."""

    url: Url = Field(description="Where it is posted.")
    secret: SecretRef | None = Field(None, description="Signs the body: X-Penstock-Signature, HMAC-SHA256.")


class DeliveryTarget(Section):
    """I23: who is told of a publication."""

    dictionary: DictionaryTarget | None = None
    flow: FlowTarget | None = None
    webhook: WebhookTarget | None = None

    @property
    def name(self) -> str:
        """What people know it by."""
        if self.dictionary is not None:
            return f"dictionary {self.dictionary.tenant}/{self.dictionary.code} at {self.dictionary.url}"
        if self.flow is not None:
            return f"flow {self.flow.name} at {self.flow.url}"
        # Without the query, which may carry a token.
        return f"webhook {self.webhook.url.partition('?')[0] if self.webhook else ''}"

    @property
    def digest(self) -> str:
        """What tells it from other targets."""
        url = self.webhook.url if self.webhook else ""
        return hashlib.sha256(f"{self.name} {url}".encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.dictionary, self.flow, self.webhook].count(None) != 2:
            raise ValueError("give a dictionary, a flow or a webhook")
        return self


def _compiled(pattern: str) -> str:
    import polars as pl

    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError as error:
        raise ValueError(f"not a regular expression: {str(error).splitlines()[-1].strip()}") from None
    return pattern


def _readable(form: str) -> str:
    """A format of dates reads what it writes: the day, and of the time as much as it has."""
    if zone := re.search(r"%(?:[:#]*[zZ]|\+)", form.replace("%%", "")):
        raise ValueError(f"{zone[0]} is a time zone, and none is read: cut it off with `replace`")
    if not _reads_back(form):
        raise ValueError(f"{form!r} reads no date: it needs day, month and year, as %d.%m.%Y, and hour with minute")
    return form


@lru_cache
def _reads_back(form: str) -> bool:
    import polars as pl

    moments = pl.Series([datetime(2024, 11, 23, 21, 34, 56), datetime(2025, 3, 4, 5, 6, 7)])  # noqa: DTZ001 - of no zone
    try:
        found = moments.dt.strftime(form).str.to_datetime(form, strict=False, time_unit="us")
    except pl.exceptions.PolarsError:
        return False
    return any(found.equals(moments.dt.truncate(unit)) for unit in ("1d", "1m", "1s"))


Pattern = Annotated[str, AfterValidator(_compiled)]
Form = Annotated[str, AfterValidator(_readable)]


class FileFormat(StrEnum):
    """I17: what suppliers send."""

    AUTO = "auto"
    CSV = "csv"
    XLSX = "xlsx"
    XLS = "xls"
    XLSB = "xlsb"
    ODS = "ods"
    JSON = "json"
    NDJSON = "ndjson"
    XML = "xml"


WORKBOOKS = (FileFormat.XLSX, FileFormat.XLS, FileFormat.XLSB, FileFormat.ODS)


class ColumnType(StrEnum):
    """I18: what a column's text becomes."""

    STRING = "string"
    INTEGER = "integer"
    MONEY = "money"
    DECIMAL = "decimal"
    DATE = "date"
    DATETIME = "datetime"
    ENUM = "enum"


_NUMBERS = (ColumnType.INTEGER, ColumnType.MONEY, ColumnType.DECIMAL)
_DEFAULTS = {
    ColumnType.STRING: r"[\s\S]*",
    ColumnType.DECIMAL: r"-?\d+(?:\.\d{{{scale}}})?",
    ColumnType.DATE: r"\d{{4}}-\d\d-\d\d",
    ColumnType.DATETIME: r"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d",
}


class SupplierColumn(Section):
    """One field of the payload."""

    source: Place | Annotated[list[Place], Field(min_length=1)] = Field(
        alias="from", description="The column's header, some spellings of it, or its number."
    )
    type: ColumnType = Field(ColumnType.STRING, description="What its cells become.")
    required: bool = Field(False, description="Whether a row without it is bad, and a file without the column too.")
    empty: list[str] = Field(default_factory=list, description="Texts that mean nothing is there, such as '-'.")
    default: str | int | bool | None = Field(None, description="What an empty cell becomes.")
    case: Literal["upper", "lower"] | None = Field(None, description="Letters are made so.")
    replace: dict[Pattern, str] = Field(
        default_factory=dict, description="Regular expressions replaced first, in order."
    )
    extract: Pattern | None = Field(None, description="Only what this (or its first group) finds is the value.")
    pattern: Pattern | None = Field(None, description="What a text has to match as a whole.")
    values: dict[str, str | int | bool] | list[str] | None = Field(None, description="What an enum may be.")
    formats: list[Form] = Field(
        default_factory=list, description="Of dates, as strftime writes them; ISO is always known."
    )
    decimal: Literal[",", "."] | None = Field(
        None, description="Settles what 1,234 is; without it, such a number is bad."
    )
    scale: int = Field(2, ge=0, le=9, description="Digits after the point of money and decimals.")
    round: bool = Field(False, description="Round what has more digits; without it, such a number is bad.")
    at_least: bool = Field(False, description="Read '>10', '10+' and 'больше 10' as 10.")
    min: int | None = Field(None, description="The least a number may be.")
    max: int | None = Field(None, description="The most.")
    max_length: int | None = Field(None, ge=1, description="The most characters of a text.")
    fill_down: bool = Field(False, description="An empty cell has the value of the cell above, as merged cells do.")

    @field_validator("empty")
    @classmethod
    def _once_each(cls, empty: list[str]) -> list[str]:
        return list(dict.fromkeys(text for text in empty if text))

    @property
    def places(self) -> list[Place]:
        return self.source if isinstance(self.source, list) else [self.source]

    def _fits(self, default: str | int | bool) -> bool:
        """Whether a value could be what a cell becomes."""
        if self.type is ColumnType.ENUM:
            known = self.values.values() if isinstance(self.values, dict) else self.values or []
            return all(type(default) is type(value) for value in known)
        if self.type in (ColumnType.INTEGER, ColumnType.MONEY):
            return type(default) is int and abs(default) <= LARGEST
        return (
            isinstance(default, str)
            and re.fullmatch(_DEFAULTS[self.type].format(scale=self.scale), default) is not None
        )

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        _only(self.values is None or self.type is ColumnType.ENUM, "values", "only an enum has values")
        _only(self.type is not ColumnType.ENUM or bool(self.values), "values", "an enum needs values")
        _only(
            not self.formats or self.type in (ColumnType.DATE, ColumnType.DATETIME),
            "formats",
            "only dates have formats",
        )
        _only(not self.at_least or self.type is ColumnType.INTEGER, "at_least", "only an integer can be at least")
        kinds = {type(value) for value in self.values.values()} if isinstance(self.values, dict) else {str}
        _only(len(kinds) <= 1, "values", "the values of an enum are all texts, all numbers or all booleans")
        numbers = [number for number in (self.min, self.max) if number is not None]
        _only(not numbers or self.type in _NUMBERS, "min", "only numbers have bounds")
        _only(all(abs(number) <= LARGEST for number in numbers), "max", "beyond what JSON keeps exactly")
        _only(self.default is None or self._fits(self.default), "default", f"no {self.type.value} can be that")
        return self


class SheetSelection(Section):
    """Which sheets of a workbook (or files of an archive) count, and how their categories are called."""

    only: list[Name] | None = Field(None, description="These; without it, all that are visible.")
    skip: list[Name] = Field(default_factory=list, description="Not these.")
    category: Literal["name", "number"] = Field("name", description="`number` calls the 14th sheet sheet14.")


class SupplierSource(Section):
    """How a file is read. What is `auto` is found out; `penstock ingest inspect` shows what it would find."""

    format: FileFormat = Field(FileFormat.AUTO, description="By content, not by name, when `auto`.")
    encoding: Encoding = Field("auto", description="Of text.")
    delimiter: str = Field("auto", description="One character, or `auto`.")
    quote: str = Field('"', max_length=1, description="Empty: quotes mean nothing.")
    header: int | Literal["auto", "none"] = Field("auto", description="The row it is in; `auto` looks for the columns.")
    header_rows: int = Field(1, ge=1, le=3, description="Two-row headers are joined as 'Price / retail'.")
    exact: bool = Field(False, description="A column that is not mapped is a mismatch.")
    skip_rows: list[Pattern] = Field(default_factory=list, description="Rows whose first text matches, such as totals.")
    sheets: SheetSelection = SheetSelection()
    records: str | None = Field(None, description="Where the records are: data.items in JSON, the element in XML.")

    @field_validator("delimiter")
    @classmethod
    def _is_one_character(cls, delimiter: str) -> str:
        if delimiter != "auto" and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"'):
            raise ValueError("a delimiter is one ASCII character, or `auto`")
        return delimiter

    @field_validator("quote")
    @classmethod
    def _is_a_quote(cls, quote: str) -> str:
        if not quote.isascii() or quote in tuple("\r\n\t,;|"):
            raise ValueError("a quote is one ASCII character that is no delimiter, or empty")
        return quote

    @field_validator("header")
    @classmethod
    def _counts_from_one(cls, header: int | str) -> int | str:
        if isinstance(header, int) and header < 1:
            raise ValueError("rows count from 1")
        return header


class PublishGuards(Section):
    """I20: how far a snapshot may be from the one before it; beyond that the run fails."""

    max_drop_percent: float | None = Field(None, ge=0, le=100, description="Facts that may be fewer.")
    max_vanished_keys_percent: float | None = Field(
        None, ge=0, le=100, description="Keys of the current state that may be missing."
    )
    vanished_categories: Literal["allow", "fail"] = Field(
        "allow", description="Whether categories of the current state may be missing."
    )


class SupplierLimits(Section):
    """What a file may cost at most."""

    max_bytes: int = Field(20_000_000_000, ge=1, description="Bytes of the file, unpacked.")
    max_ratio: int = Field(200, ge=1, description="How much larger it may get when it is unpacked.")
    workbook_memory: int = Field(2_000_000_000, ge=100_000_000, description="Bytes a workbook may take to be read.")
    workbook_seconds: int = Field(600, ge=1, description="How long that may take.")


class Supplier(Section):
    """All that is configured for one supplier."""

    min_fact_count: int = Field(ge=0, description="With fewer facts a run fails.")
    max_bad_ratio: float = Field(ge=0, le=1, description="With a larger part of bad rows a run fails.")
    allow_empty_snapshot: bool = Field(
        description="Whether no facts at all may be published, if there are no bad rows either."
    )
    file_stability_window: float = Field(30, ge=0, le=86_400, description="Seconds a file has to stay unchanged.")
    dedup: Literal["accepted", "current"] = Field(
        "accepted", description="What makes a file a duplicate: any that was accepted, or only the current one."
    )
    on_bad_row: Literal["drop", "hold_last"] = Field(
        "drop", description="`hold_last`: the last good fact of the row's key stays."
    )
    keep_raw: bool = Field(
        False,
        description="Whether bad rows also have the text of the cell; the reason and the column are always stored.",
    )
    source: SupplierSource = SupplierSource()
    columns: dict[Name, SupplierColumn] = Field(
        default_factory=dict, description="Without any, every column is a text."
    )
    key: list[Name] = Field(default_factory=list, description="What tells facts apart: columns, and `category_key`.")
    duplicate_keys: Literal["first", "last", "fail", "keep"] = Field(
        "first", description="Which of several rows with one key counts; `fail` the run, or `keep` all."
    )
    guards: PublishGuards = PublishGuards()
    limits: SupplierLimits = SupplierLimits()
    targets: list[DeliveryTarget] = Field(default_factory=list)
    max_state_age_hours: float | None = Field(
        None, gt=0, le=_AGES, description="I13: older than this, the state is told of."
    )

    @model_validator(mode="after")
    def _names_what_there_is(self) -> Self:
        for place, name in enumerate(self.key):
            if self.columns and name not in self.columns and name != CATEGORY:
                raise MisplacedKey(("key", place), f"there is no column {name!r}; columns: {', '.join(self.columns)}")
        if len({target.digest for target in self.targets}) < len(self.targets):
            raise MisplacedKey(("targets",), "a target is there twice; two runs of a flow are two flows")
        if any(target.dictionary for target in self.targets) and (len(self.key) != 1 or self.key == [CATEGORY]):
            raise MisplacedKey(("targets",), "a dictionary has one key: give `key` one column")
        if any(target.dictionary for target in self.targets) and self.duplicate_keys == "keep":
            raise MisplacedKey(("duplicate_keys",), "a dictionary has every key once: `keep` cannot go with it")
        if len(set(self.key)) < len(self.key):
            raise MisplacedKey(("key",), "a column is in it twice")
        needs_key = self.on_bad_row == "hold_last" or self.guards.max_vanished_keys_percent is not None
        if needs_key and not self.key:
            raise MisplacedKey(("key",), "hold_last and max_vanished_keys_percent need a key")
        return self


def load_supplier(file: Path, shown: str | None = None) -> tuple[Supplier, str]:
    """The configuration in *file* and its sha256; Failed CONFIG_DQ_MISSING or CONFIG_INVALID, with line numbers.

    People know the file as *shown*, should it be a copy.
    """
    name = shown or str(file)
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        hint = f"`penstock ingest inspect FILE` proposes one; put it at {name}"
        raise RunFailed(FailureCode.CONFIG_DQ_MISSING, f"there is no {name}", hint) from None
    except OSError as error:
        raise RunFailed(
            FailureCode.CONFIG_INVALID, f"cannot read {name}: {error.strerror}", "let us read it"
        ) from error
    try:
        return loader.load(Supplier, file, {}), digest
    except BadConfig as error:
        said = error.message.replace(str(file), name)
        raise RunFailed(_code(error), said, "docs/ingest.md lists all that can be set") from error


def _code(error: PenstockError) -> FailureCode:
    """A configuration that asks for no quality is none."""
    problems: list[dict[str, Any]] = error.details.get("problems", [])
    lacks = any(problem["path"] in DQ_KEYS and problem["message"] == MISSING for problem in problems)
    return FailureCode.CONFIG_DQ_MISSING if lacks else FailureCode.CONFIG_INVALID


def _only(holds: bool, key: str, message: str) -> None:
    if not holds:
        raise MisplacedKey((key,), message)
