"""The result of an inspection, as data, as a configuration file and as a summary."""

import io
from dataclasses import asdict, dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from penstock.kernel.status import pluralize

_TABLES_SHOWN = 2
_WIDTH = 100
_INLINE = 4  # items of a list that fit on its line


def format_yaml(config: dict[str, Any], comments: dict[str, str], heading: str) -> str:
    """Return *config* as YAML with *comments* at its columns."""
    document = CommentedMap({key: _set_style(value) for key, value in config.items()})
    columns = document.get("columns", {})
    for name, comment in comments.items():
        if name in columns:
            columns.yaml_add_eol_comment(_escape_line_ends(comment), name, column=len(name) + 5)
    document.yaml_set_start_comment(heading)
    out = io.StringIO()
    writer = YAML()
    writer.width = 4096  # a text folded over lines is hard to read
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump(document, out)
    return out.getvalue()


def format_heading(name: str, file: str, warnings: list[str]) -> str:
    """Return the comment at the start of a proposed configuration."""
    lines = [
        f"etl_ops/config/{name}.yaml, proposed by `penstock ingest inspect {file}`.",
        "Review it: `from` is the header of a column; the comment shows its values and the share that can be read.",
        *(f"! {warning}" for warning in warnings),
    ]
    return "\n".join(_escape_line_ends(line) for line in lines)


def format_summary(inspection: dict[str, Any]) -> str:
    """Return the summary of an inspection, with the first tables in full."""
    keys = ("format", "encoding", "delimiter", "records")
    facts = ", ".join(f"{key} {_quote_blank(inspection[key])}" for key in keys if inspection[key])
    read = [table for table in inspection["tables"] if not table["is_skipped"]]
    skipped = len(inspection["tables"]) - len(read)
    lines = [f"{inspection['file']}: {facts}; {pluralize(len(read), 'table')} to read, {skipped} skipped"]
    for table in read[:_TABLES_SHOWN]:
        lines += ["", *_format_table(table)]
    if len(read) > _TABLES_SHOWN:
        lines += ["", f"… and {pluralize(len(read) - _TABLES_SHOWN, 'more table')} with the same columns"]
    key = inspection["config"].get("key")
    lines += ["", f"key: {', '.join(key)}" if key else "key: none"]
    if inspection["warnings"]:
        lines += ["", "Check:", *(f"  - {warning}" for warning in inspection["warnings"])]
    return "\n".join(lines) + "\n"


def _format_table(table: dict[str, Any]) -> list[str]:
    name = f"sheet {table['name']!r}: " if table["name"] else ""
    rows = f"{table['rows']} rows{'' if table['is_whole'] else ' or more'}, {table['rows_sampled']} in the sample"
    numbers = table["header_rows"]
    ends = [numbers[0], numbers[-1]] if len(numbers) > 1 else numbers
    span = "–".join(str(row) for row in ends)
    header = f", header in row {span}" if span else ""
    totals = f", totals in row {', '.join(map(str, table['totals'][:5]))}" if table["totals"] else ""
    lines = [f"{name}{rows}{header}{totals}"]
    lines += [f"  above it: {' | '.join(table['preamble'])}"[:_WIDTH]] if table["preamble"] else []
    width = max((len(column["header"]) for column in table["columns"]), default=0)
    return lines + [_format_column(column, min(width, 30)) for column in table["columns"]]


def _format_column(column: dict[str, Any], width: int) -> str:
    if column["field"] is None:
        return f"  {column['header'][:width]:<{width}}  not read"
    share = f"{format_percent(column['read'])} read" + (f", {column['empty']:.0%} empty" if column["empty"] else "")
    share += ", unique" if column["is_unique"] else ""
    examples = ", ".join(column["examples"])
    return f"  {column['header'][:width]:<{width}}  {column['field']}: {column['type']} ({share})  {examples}"


def format_percent(share: float) -> str:
    """Return *share* as a percentage, rounded down so that 100% means all."""
    return f"{int(share * 1000) / 10:g}%"


def _set_style(value: Any) -> Any:
    if isinstance(value, dict):
        return CommentedMap({key: _set_style(inner) for key, inner in value.items()})
    if isinstance(value, list):
        items = CommentedSeq(_set_style(inner) for inner in value)
        if len(value) <= _INLINE and sum(len(str(item)) for item in value) < _WIDTH:
            items.fa.set_flow_style()
        return items
    return value


def _quote_blank(text: str) -> str:
    return text if len(text) > 1 else repr(text)


def _escape_line_ends(text: str) -> str:
    """Replace the characters that would end a YAML comment or make its file invalid."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


@dataclass(frozen=True)
class InspectedColumn:
    """A column of a table and its proposed field; *field* is None if the column is not read."""

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
    """A sheet, or a whole file. Row numbers start at 1."""

    name: str
    rows_sampled: int
    rows: int
    is_whole: bool
    is_skipped: bool
    header_rows: list[int]
    preamble: list[str]
    totals: list[int]
    columns: list[InspectedColumn]


@dataclass(frozen=True)
class Inspection:
    """The content of a file, and the configuration proposed for its supplier."""

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

    def format_yaml(self) -> str:
        """Return the configuration file, with a comment at each column."""
        return format_yaml(self.config, self.comments, format_heading(self.name, self.file, self.warnings))

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self)
        del document["comments"]
        return document

    def format_text(self) -> str:
        """Return the summary."""
        return format_summary(self.as_dict())
