"""What an inspection found, for programs and for people."""

import io
from dataclasses import asdict, dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

_TABLES_SHOWN = 2
_WIDTH = 100
_INLINE = 4  # items of a list that fit on its line


def yaml_of(config: dict[str, Any], comments: dict[str, str], heading: str) -> str:
    """*config* as text; *comments* are of columns."""
    document = CommentedMap({key: _styled(value) for key, value in config.items()})
    columns = document.get("columns", {})
    for name, comment in comments.items():
        if name in columns:
            columns.yaml_add_eol_comment(_one_line(comment), name, column=len(name) + 5)
    document.yaml_set_start_comment(heading)
    out = io.StringIO()
    writer = YAML()
    writer.width = 4096  # a text folded over lines is hard to read
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump(document, out)
    return out.getvalue()


def heading_of(name: str, file: str, warnings: list[str]) -> str:
    lines = [
        f"etl_ops/config/{name}.yaml, proposed by `penstock ingest inspect {file}`.",
        "Read it over: `from` are headers, the comments show what stands below them, and how much of it is read.",
        *(f"! {warning}" for warning in warnings),
    ]
    return "\n".join(_one_line(line) for line in lines)


def summary_of(found: dict[str, Any]) -> str:
    """What was found, the first tables in full."""
    facts = {"format": found["format"], "encoding": found["encoding"], "delimiter": found["delimiter"]}
    facts |= {"records": found["records"]}
    told = ", ".join(f"{key} {_visible(value)}" for key, value in facts.items() if value)
    read = [table for table in found["tables"] if not table["is_skipped"]]
    skipped = len(found["tables"]) - len(read)
    noun = "table" if len(read) == 1 else "tables"
    lines = [f"{found['file']}: {told}; {len(read)} {noun} to read, {skipped} skipped"]
    for table in read[:_TABLES_SHOWN]:
        lines += ["", *_table(table)]
    if len(read) > _TABLES_SHOWN:
        lines += ["", f"… and {len(read) - _TABLES_SHOWN} more tables like these"]
    key = found["config"].get("key")
    lines += ["", f"key: {', '.join(key)}" if key else "key: none"]
    if found["warnings"]:
        lines += ["", "To look at:", *(f"  - {warning}" for warning in found["warnings"])]
    return "\n".join(lines) + "\n"


def _table(table: dict[str, Any]) -> list[str]:
    name = f"sheet {table['name']!r}: " if table["name"] else ""
    rows = f"{table['rows']} rows{'' if table['is_whole'] else ' or more'}, {table['rows_looked_at']} looked at"
    numbers = table["header_rows"]
    ends = [numbers[0], numbers[-1]] if len(numbers) > 1 else numbers
    span = "–".join(str(row) for row in ends)
    header = f", header in row {span}" if span else ""
    totals = f", totals in row {', '.join(map(str, table['totals'][:5]))}" if table["totals"] else ""
    lines = [f"{name}{rows}{header}{totals}"]
    lines += [f"  above it: {' | '.join(table['preamble'])}"[:_WIDTH]] if table["preamble"] else []
    width = max((len(column["header"]) for column in table["columns"]), default=0)
    return lines + [_column(column, min(width, 30)) for column in table["columns"]]


def _column(column: dict[str, Any], width: int) -> str:
    if column["field"] is None:
        return f"  {column['header'][:width]:<{width}}  left out"
    share = f"{percent(column['read'])} read" + (f", {column['empty']:.0%} empty" if column["empty"] else "")
    share += ", unique" if column["is_unique"] else ""
    shown = ", ".join(column["examples"])
    return f"  {column['header'][:width]:<{width}}  {column['field']}: {column['type']} ({share})  {shown}"


def percent(share: float) -> str:
    """Rounded down: not quite all is not all."""
    return f"{int(share * 1000) / 10:g}%"


def _styled(value: Any) -> Any:
    if isinstance(value, dict):
        return CommentedMap({key: _styled(inner) for key, inner in value.items()})
    if isinstance(value, list):
        items = CommentedSeq(_styled(inner) for inner in value)
        if len(value) <= _INLINE and sum(len(str(item)) for item in value) < _WIDTH:
            items.fa.set_flow_style()
        return items
    return value


def _visible(text: str) -> str:
    return text if len(text) > 1 else repr(text)


def _one_line(text: str) -> str:
    """Without what would end a comment, or make its file unreadable."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


@dataclass(frozen=True)
class InspectedColumn:
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
class InspectedTable:
    """A sheet, or a whole file. Row numbers count from 1."""

    name: str
    rows_looked_at: int
    rows: int
    is_whole: bool
    is_skipped: bool
    header_rows: list[int]
    preamble: list[str]
    totals: list[int]
    columns: list[InspectedColumn]


@dataclass(frozen=True)
class Inspection:
    """What a file holds, and the configuration of a supplier that would send such files."""

    file: str
    name: str
    format: str
    encoding: str | None
    delimiter: str | None
    records: str | None
    tables: list[InspectedTable]
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
