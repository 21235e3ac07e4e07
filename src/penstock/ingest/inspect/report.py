"""What an inspection found, for programs and for people."""

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.ingest.inspect.writing import heading_of, summary_of, yaml_of


@dataclass(frozen=True)
class ColumnFound:
    """A column of a table, and what is proposed for it; *field* is None when it is left out."""

    number: int
    header: str
    field: str | None
    type: str | None
    options: dict[str, Any]
    read: float | None
    empty: float
    is_unique: bool
    examples: list[str]


@dataclass(frozen=True)
class TableFound:
    """A sheet, or a whole file. Row numbers count from 1."""

    name: str
    rows_looked_at: int
    rows: int
    is_whole: bool
    is_skipped: bool
    header_rows: list[int]
    preamble: list[str]
    totals: list[int]
    columns: list[ColumnFound]


@dataclass(frozen=True)
class Inspection:
    """What a file holds, and the configuration of a supplier that would send such files."""

    file: str
    name: str
    format: str
    encoding: str | None
    delimiter: str | None
    records: str | None
    tables: list[TableFound]
    warnings: list[str]
    config: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)

    def yaml(self) -> str:
        """The configuration as its file should be, with a comment beside each column."""
        return yaml_of(self.config, self.comments, heading_of(self.name, self.file, self.warnings))

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["comments"]
        return found

    def text(self) -> str:
        """A short summary."""
        return summary_of(self.as_dict())
