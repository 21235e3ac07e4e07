"""The configuration of a supplier, etl_ops/config/<supplier>.yaml: quality, format, columns, guards and targets."""

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
_MAX_HOURS = 1_000_000  # hours: more than a century
CATEGORY = "category_key"  # allowed in `key`, like a field of the payload
LARGEST = 2**53 - 1

Name = Annotated[str, Field(min_length=1, max_length=200)]
# A header, or the number of a column; the first column is 1.
ColumnReference = Annotated[int, Field(ge=1, le=16_384)] | Name
Encoding = Literal[
    "auto", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "windows-1251", "windows-1252", "koi8-r", "cp866"
]


class DictionaryTarget(Section):
    """I23: a dictionary of refdata that receives each publication, with the supplier's key as its key."""

    tenant: Name = Field(description="Tenant of the dictionary.")
    code: Name = Field(description="Code of the dictionary.")
    url: Url = Field("http://127.0.0.1:8080", description="URL of the API of refdata.")
    token: SecretRef | None = Field(None, description="Bearer token for the API.")


class FlowTarget(Section):
    """I23: a flow that each publication starts once, unless a newer publication has replaced it."""

    name: Annotated[str, Field(pattern=NAME)] = Field(description="Name of the flow.")
    scope: dict[str, Any] = Field(
        default_factory=dict,
        description="Values in the scope of the run, in addition to `supplier`, `runId`, `fence` and `facts`.",
    )
    url: Url = Field("http://127.0.0.1:8080", description="URL of the API of flows.")
    token: SecretRef | None = Field(None, description="Bearer token for the API.")


class WebhookTarget(Section):
    """I23: a URL that receives a request for every publication, at least once."""

    url: Url = Field(description="URL that receives a POST request for every publication.")
    secret: SecretRef | None = Field(
        None, description="Secret that signs the body with HMAC-SHA256, in the header X-Penstock-Signature."
    )


class DeliveryTarget(Section):
    """I23: a receiver of publications."""

    dictionary: DictionaryTarget | None = None
    flow: FlowTarget | None = None
    webhook: WebhookTarget | None = None

    @property
    def name(self) -> str:
        """The name of the target in messages."""
        if self.dictionary is not None:
            return f"dictionary {self.dictionary.tenant}/{self.dictionary.code} at {self.dictionary.url}"
        if self.flow is not None:
            return f"flow {self.flow.name} at {self.flow.url}"
        # The query of the URL may contain a token.
        return f"webhook {self.webhook.url.partition('?')[0] if self.webhook else ''}"

    @property
    def digest(self) -> str:
        """The identifier of the target in file names."""
        url = self.webhook.url if self.webhook else ""
        return hashlib.sha256(f"{self.name} {url}".encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.dictionary, self.flow, self.webhook].count(None) != 2:
            raise ValueError("must have exactly one of `dictionary`, `flow` and `webhook`")
        return self


def _check_pattern(pattern: str) -> str:
    import polars as pl

    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError as error:
        reason = next((line[7:] for line in str(error).splitlines() if line.startswith("error: ")), "invalid syntax")
        raise ValueError(f"{pattern!r} is not a regular expression: {reason}") from None
    return pattern


def _check_format(form: str) -> str:
    """Return *form*; ValueError if it is not a format that reads the dates which it writes."""
    if zone := re.search(r"%(?:[:#]*[zZ]|\+)", form.replace("%%", "")):
        raise ValueError(f"{zone[0]} is a time zone, which is not supported: remove it from the text with `replace`")
    if not _is_reversible(form):
        needs = "it needs day, month and year, as %d.%m.%Y, and minutes if it has hours"
        raise ValueError(f"{form!r} cannot read a date: {needs}")
    return form


@lru_cache
def _is_reversible(form: str) -> bool:
    import polars as pl

    moments = pl.Series([datetime(2024, 11, 23, 21, 34, 56), datetime(2025, 3, 4, 5, 6, 7)])  # noqa: DTZ001 - without a zone
    try:
        parsed = moments.dt.strftime(form).str.to_datetime(form, strict=False, time_unit="us")
    except pl.exceptions.PolarsError:
        return False
    return any(parsed.equals(moments.dt.truncate(unit)) for unit in ("1d", "1m", "1s"))


Pattern = Annotated[str, AfterValidator(_check_pattern)]
Form = Annotated[str, AfterValidator(_check_format)]


class FileFormat(StrEnum):
    """I17: the format of a file."""

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
    """I18: the type of the values of a column."""

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
    """A field of the payload."""

    source: ColumnReference | Annotated[list[ColumnReference], Field(min_length=1)] = Field(
        alias="from", description="Header of the column, a list of its spellings, or the number of the column from 1."
    )
    type: ColumnType = Field(ColumnType.STRING, description="Type of the values.")
    required: bool = Field(False, description="A row with an empty cell is bad, and a file without the column fails.")
    empty: list[str] = Field(default_factory=list, description="Texts that count as an empty cell, such as '-'.")
    default: str | int | bool | None = Field(None, description="Value of an empty cell.")
    case: Literal["upper", "lower"] | None = Field(None, description="Convert the letters of the text.")
    replace: dict[Pattern, str] = Field(
        default_factory=dict, description="Regular expressions and their replacements, applied first and in order."
    )
    extract: Pattern | None = Field(None, description="Regular expression; the value is its match, or its first group.")
    pattern: Pattern | None = Field(None, description="Regular expression that the whole text must match.")
    values: dict[str, str | int | bool] | list[str] | None = Field(
        None, description="Allowed values of an enum, or a mapping of texts to values."
    )
    formats: list[Form] = Field(
        default_factory=list, description="Formats of dates, in the notation of strftime; ISO 8601 is always read."
    )
    decimal: Literal[",", "."] | None = Field(
        None, description="Decimal separator of ambiguous numbers such as 1,234, which are bad without it."
    )
    scale: int = Field(2, ge=0, le=9, description="Number of decimal places of money and decimals.")
    round: bool = Field(False, description="Round numbers with more decimal places; without it, they are bad.")
    at_least: bool = Field(False, description="Read '>10', '10+' and 'more than 10' as 10.")
    min: int | None = Field(None, description="Smallest allowed number; of money, in minor units.")
    max: int | None = Field(None, description="Largest allowed number; of money, in minor units.")
    max_length: int | None = Field(None, ge=1, description="Largest allowed number of characters of a text.")
    fill_down: bool = Field(False, description="An empty cell has the value of the cell above it, as in merged cells.")

    @field_validator("empty")
    @classmethod
    def _drop_repeated(cls, empty: list[str]) -> list[str]:
        return list(dict.fromkeys(text for text in empty if text))

    @property
    def references(self) -> list[ColumnReference]:
        return self.source if isinstance(self.source, list) else [self.source]

    def _is_possible(self, default: str | int | bool) -> bool:
        """Return whether a cell of this type could have the value *default*."""
        if self.type is ColumnType.ENUM:
            values = self.values.values() if isinstance(self.values, dict) else self.values or []
            return all(type(default) is type(value) for value in values)
        if self.type in (ColumnType.INTEGER, ColumnType.MONEY):
            return type(default) is int and abs(default) <= LARGEST
        return (
            isinstance(default, str)
            and re.fullmatch(_DEFAULTS[self.type].format(scale=self.scale), default) is not None
        )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        _require(
            self.values is None or self.type is ColumnType.ENUM,
            "values",
            f"is only for the type enum, not for {self.type.value}",
        )
        _require(self.type is not ColumnType.ENUM or bool(self.values), "values", "is required for the type enum")
        _require(
            not self.formats or self.type in (ColumnType.DATE, ColumnType.DATETIME),
            "formats",
            f"is only for the types date and datetime, not for {self.type.value}",
        )
        _require(
            not self.at_least or self.type is ColumnType.INTEGER,
            "at_least",
            f"is only for the type integer, not for {self.type.value}",
        )
        kinds = {type(value) for value in self.values.values()} if isinstance(self.values, dict) else {str}
        _require(len(kinds) <= 1, "values", "must be all texts, all numbers or all booleans")
        numbers = [number for number in (self.min, self.max) if number is not None]
        bound = "min" if self.min is not None else "max"
        _require(not numbers or self.type in _NUMBERS, bound, f"is only for numbers, not for {self.type.value}")
        for key, number in (("min", self.min), ("max", self.max)):
            _require(abs(number or 0) <= LARGEST, key, f"{number} is beyond 2^53, the limit of exact integers in JSON")
        problem = f"{self.default!r} is not a value of the type {self.type.value}"
        _require(self.default is None or self._is_possible(self.default), "default", problem)
        return self


class SheetSelection(Section):
    """The sheets of a workbook (or the files of an archive) to read, and the names of their categories."""

    only: list[Name] | None = Field(None, description="Sheets to read; default: all visible sheets.")
    skip: list[Name] = Field(default_factory=list, description="Sheets to skip.")
    category: Literal["name", "number"] = Field(
        "name", description="Name of the category of a sheet: its name, or e.g. sheet14 for the 14th sheet."
    )


class SupplierSource(Section):
    """The form of a file. A setting `auto` is detected; `penstock ingest inspect FILE` shows the result."""

    format: FileFormat = Field(
        FileFormat.AUTO, description="Format of the file; `auto` detects it from the content, not from the name."
    )
    encoding: Encoding = Field("auto", description="Encoding of a text file; a byte order mark has priority.")
    delimiter: str = Field("auto", description="Delimiter of a CSV file: an ASCII character, or `auto`.")
    quote: str = Field('"', max_length=1, description="Quote of a CSV file; empty: quotes have no meaning.")
    header: int | Literal["auto", "none"] = Field(
        "auto", description="Row of the header from 1; `auto` searches for the headers of the columns."
    )
    header_rows: int = Field(
        1, ge=1, le=3, description="Number of rows of the header; the names of two rows are joined as 'Price / retail'."
    )
    exact: bool = Field(False, description="A column that is not mapped fails the run.")
    skip_rows: list[Pattern] = Field(
        default_factory=list,
        description="Regular expressions; rows whose first text matches, e.g. totals, are skipped.",
    )
    sheets: SheetSelection = SheetSelection()
    records: str | None = Field(
        None, description="Path of the records in JSON, e.g. data.items; name of the element in XML."
    )

    @field_validator("delimiter")
    @classmethod
    def _is_one_character(cls, delimiter: str) -> str:
        if delimiter != "auto" and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"'):
            raise ValueError(f"{delimiter!r} is not a delimiter: use an ASCII character, or `auto`")
        return delimiter

    @field_validator("quote")
    @classmethod
    def _is_a_quote(cls, quote: str) -> str:
        if not quote.isascii() or quote in tuple("\r\n\t,;|"):
            raise ValueError(f"{quote!r} is not a quote: use an ASCII character that is not a delimiter, or ''")
        return quote

    @field_validator("header")
    @classmethod
    def _check_header(cls, header: int | str) -> int | str:
        if isinstance(header, int) and header < 1:
            raise ValueError(f"{header} is not a row: rows are numbered from 1")
        return header


class PublishGuards(Section):
    """I20: limits on the difference to the current state; beyond them the run fails."""

    max_drop_percent: float | None = Field(
        None, ge=0, le=100, description="Largest allowed decrease of the number of facts, in percent."
    )
    max_vanished_keys_percent: float | None = Field(
        None, ge=0, le=100, description="Largest allowed share of missing keys of the current state, in percent."
    )
    vanished_categories: Literal["allow", "fail"] = Field(
        "allow", description="`fail`: the run fails if a category of the current state is missing."
    )


class SupplierLimits(Section):
    """Limits on the size of a file, and on the memory and time of reading it."""

    max_bytes: int = Field(20_000_000_000, ge=1, description="Largest size of the unpacked file, in bytes.")
    max_ratio: int = Field(200, ge=1, description="Largest ratio of the unpacked to the packed size.")
    workbook_memory: int = Field(2_000_000_000, ge=100_000_000, description="Memory for reading a workbook, in bytes.")
    workbook_seconds: int = Field(600, ge=1, description="Timeout of reading a workbook, in seconds.")


class Supplier(Section):
    """The configuration of a supplier."""

    min_fact_count: int = Field(ge=0, description="Smallest allowed number of facts; with fewer the run fails.")
    max_bad_ratio: float = Field(ge=0, le=1, description="Largest allowed share of bad rows; above it the run fails.")
    allow_empty_snapshot: bool = Field(
        description="Allow the publication of a file without facts, if it has no bad rows either."
    )
    file_stability_window: float = Field(
        30, ge=0, le=86_400, description="Seconds without changes after which a file is complete."
    )
    dedup: Literal["accepted", "current"] = Field(
        "accepted", description="A file is a duplicate of any accepted file, or (`current`) only of the current one."
    )
    on_bad_row: Literal["drop", "hold_last"] = Field(
        "drop", description="`drop` publishes nothing for a bad row; `hold_last` keeps the last good fact of its key."
    )
    keep_raw: bool = Field(
        False,
        description="Store also the text of the cell of a bad row; the reason and the column are always stored.",
    )
    source: SupplierSource = SupplierSource()
    columns: dict[Name, SupplierColumn] = Field(
        default_factory=dict, description="Fields of the payload; without them, every column is read as a text."
    )
    key: list[Name] = Field(default_factory=list, description="Fields that identify a fact, and `category_key`.")
    duplicate_keys: Literal["first", "last", "fail", "keep"] = Field(
        "first", description="Of several rows with a key, read the first or the last, fail the run, or keep all."
    )
    guards: PublishGuards = PublishGuards()
    limits: SupplierLimits = SupplierLimits()
    targets: list[DeliveryTarget] = Field(default_factory=list)
    max_state_age_hours: float | None = Field(
        None,
        gt=0,
        le=_MAX_HOURS,
        description="I13: age of the current state, in hours, above which an alert is raised.",
    )

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        for index, name in enumerate(self.key):
            if self.columns and name not in self.columns and name != CATEGORY:
                raise MisplacedKey(("key", index), f"{name!r} is not in `columns`: {', '.join(self.columns)}")
        if len({target.digest for target in self.targets}) < len(self.targets):
            raise MisplacedKey(("targets",), "must not contain a target twice; a flow can be started only once")
        if any(target.dictionary for target in self.targets) and (len(self.key) != 1 or self.key == [CATEGORY]):
            raise MisplacedKey(("targets",), "a dictionary needs exactly one field in `key`")
        if any(target.dictionary for target in self.targets) and self.duplicate_keys == "keep":
            raise MisplacedKey(("duplicate_keys",), "must not be keep with a dictionary target, whose keys are unique")
        if len(set(self.key)) < len(self.key):
            raise MisplacedKey(("key",), "must not contain a field twice")
        needs_key = self.on_bad_row == "hold_last" or self.guards.max_vanished_keys_percent is not None
        if needs_key and not self.key:
            raise MisplacedKey(("key",), "is required for `on_bad_row: hold_last` and `max_vanished_keys_percent`")
        return self


def load_supplier(file: Path, shown: str | None = None) -> tuple[Supplier, str]:
    """Return the configuration in *file* and its sha256; RunFailed CONFIG_DQ_MISSING or CONFIG_INVALID.

    A message names the file, the line and the key. If *file* is a copy, messages call it *shown*.
    """
    name = shown or str(file)
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        hint = f"write it, e.g. with `penstock ingest inspect FILE > {name}`, and review it"
        raise RunFailed(FailureCode.CONFIG_DQ_MISSING, f"the configuration {name} does not exist", hint) from None
    except OSError as error:
        hint = "give the user that runs Penstock read access to it"
        raise RunFailed(FailureCode.CONFIG_INVALID, f"cannot read {name}: {error.strerror}", hint) from error
    try:
        return loader.load(Supplier, file, {}), digest
    except BadConfig as error:
        message = error.message.replace(str(file), name)
        hint = f"correct {name}; docs/ingest.md describes every key"
        raise RunFailed(_choose_code(error), message, hint) from error


def _choose_code(error: PenstockError) -> FailureCode:
    """Return CONFIG_DQ_MISSING if a setting of the required quality is missing."""
    problems: list[dict[str, Any]] = error.details.get("problems", [])
    lacks = any(problem["path"] in DQ_KEYS and problem["message"] == MISSING for problem in problems)
    return FailureCode.CONFIG_DQ_MISSING if lacks else FailureCode.CONFIG_INVALID


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise MisplacedKey((key,), message)
