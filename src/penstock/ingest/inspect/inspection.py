"""I17: the inspection of an unknown file, and the proposal of a configuration for its supplier."""

from pathlib import Path

from penstock.ingest.inspect.columns import TypedField, name_by_content, shorten, type_fields
from penstock.ingest.inspect.proposal import build_config, choose_key, list_doubts, settle_header
from penstock.ingest.inspect.report import InspectedColumn, InspectedTable, Inspection, format_percent
from penstock.ingest.inspect.rows import propose_skip_rules
from penstock.ingest.inspect.sample import FileSample, read_sample
from penstock.ingest.inspect.tables import ShapedTable, TablePlan, plan_tables
from penstock.ingest.inspect.vocabulary import to_snake_case
from penstock.kernel.status import pluralize

_PREAMBLE_ROWS = 12


def inspect_file(path: Path, name: str | None = None) -> Inspection:
    """Describe the content of *path* and propose a configuration; RunFailed if the file cannot be read."""
    sample = read_sample(path)
    plan = plan_tables(sample.samples)
    columns, warnings = _type_columns(plan)
    key = choose_key(plan, columns)
    skipping = propose_skip_rules([table.rows for table in plan.tables])
    config = build_config(sample, plan, columns, key, skipping)
    header_warnings = settle_header(config, plan)
    all_warnings = [
        *plan.warnings,
        *header_warnings,
        *_report_sample_limits(sample),
        *skipping.warnings,
        *list_doubts(columns, plan),
        *warnings,
        *key.warnings,
    ]
    return Inspection(
        file=path.name,
        name=name or to_snake_case(path.name.split(".")[0]) or "supplier",
        format=sample.format.value,
        encoding=sample.encoding,
        delimiter=sample.delimiter,
        records=sample.records,
        tables=_list_tables(sample, plan, columns),
        warnings=list(dict.fromkeys(all_warnings)),
        config=config,
        comments={column.name: _describe_column(column) for column in columns},
    )


def _type_columns(plan: TablePlan) -> tuple[list[TypedField], list[str]]:
    typed = type_fields(plan.fields, plan.tables)
    if not plan.has_header:
        return name_by_content(typed)
    warnings = [
        f"column {column.header!r} only numbers the rows: it is not read" for column in typed if column.is_row_number
    ]
    return [column for column in typed if not column.is_row_number], [*warnings, *_report_unnamed(plan)]


def _report_unnamed(plan: TablePlan) -> list[str]:
    """Return a warning for each column that has values but no header."""
    warnings = []
    for table in plan.tables:
        for column in range(table.width):
            texts = table.select_texts(column)
            is_named = column < len(table.names) and table.names[column]
            if not is_named and len(texts) and int((texts != "").sum()) > len(texts) * 0.2:
                example = shorten(texts.filter(texts != "")[0])
                sheet = f" of sheet {table.sample.name!r}" if table.sample.name else ""
                problem = f"column {column + 1}{sheet} has values such as {example!r}, but no header"
                warnings.append(f"{problem}: it is not read; to read it, map it by its number, `from: {column + 1}`")
    return warnings[:5]


def _report_sample_limits(sample: FileSample) -> list[str]:
    """Return the warnings about malformed lines, and about a file that was not read completely."""
    number = sum(table.malformed for table in sample.samples)
    warnings = [f"{pluralize(number, 'line')} cannot be read as a record: bad rows"] if number else []
    if not all(table.is_whole for table in sample.samples):
        warnings.append(
            "the file is large and was not read to its end: raise `min_fact_count`, and check that `key` is unique"
        )
    return warnings


def _describe_column(column: TypedField) -> str:
    header = " | ".join(column.field.spellings[:3])
    examples = ", ".join(column.list_examples()) or "always empty"
    empty = f", {column.measure_empty():.0%} empty" if column.measure_empty() >= 0.005 else ""
    share = f"{format_percent(column.measure_read())} read{empty}"
    return "; ".join(part for part in (header, examples, share) if part)


def _list_tables(sample: FileSample, plan: TablePlan, columns: list[TypedField]) -> list[InspectedTable]:
    shaped = {id(table.sample): (table, number) for number, table in enumerate(plan.tables)}
    shaped |= {id(table.sample): (table, -1) for table in plan.skipped}
    in_order = [shaped[id(table)] for table in sample.samples]
    return [_describe_table(table, number, columns) for table, number in in_order]


def _describe_table(table: ShapedTable, number: int, columns: list[TypedField]) -> InspectedTable:
    above = table.sample.head[: table.header.above] if table.header else []
    preamble = [" ".join(cell.strip() for cell in row if cell.strip()) for row in above]
    return InspectedTable(
        name=table.sample.name,
        rows_sampled=table.sample.rows.height,
        rows=table.sample.total,
        is_whole=table.sample.is_whole,
        is_skipped=number < 0,
        header_rows=table.header.numbers if table.header else [],
        preamble=[shorten(text) for text in preamble if text][:_PREAMBLE_ROWS],
        totals=sorted(table.rows.totals),
        columns=_list_columns(table, number, columns) if number >= 0 else [],
    )


def _list_columns(table: ShapedTable, number: int, columns: list[TypedField]) -> list[InspectedColumn]:
    mapped = {column.field.columns[number]: column for column in columns if number in column.field.columns}
    names = table.names or [str(column) for column in range(1, table.width + 1)]
    return [_inspect_column(index, name, mapped.get(index), number) for index, name in enumerate(names) if name]


def _inspect_column(index: int, header: str, column: TypedField | None, table: int) -> InspectedColumn:
    if column is None:
        return InspectedColumn(index + 1, header, None, None, {}, None, 0.0, False, [])
    options = {key: value for key, value in column.options.items() if key != "type"}
    return InspectedColumn(
        number=index + 1,
        header=header,
        field=column.name,
        type=column.guess.type,
        options=options,
        read=round(column.measure_read(table), 4),
        empty=round(column.measure_empty(table), 4),
        is_unique=column.is_unique(table),
        examples=column.list_examples(table),
    )
