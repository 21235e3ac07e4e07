"""I17: a look at a file nobody has seen before, and a configuration proposed for who sends it."""

from pathlib import Path

from penstock.ingest.inspect.columns import TypedField, named_by_content, shortened, typed_fields
from penstock.ingest.inspect.proposal import chosen_key, config_of, doubts_of, settled_header
from penstock.ingest.inspect.report import InspectedColumn, InspectedTable, Inspection, percent
from penstock.ingest.inspect.rows import patterns_for
from penstock.ingest.inspect.sample import FileSample, read
from penstock.ingest.inspect.tables import ShapedTable, TablePlan, planned
from penstock.ingest.inspect.vocabulary import snake

_PREAMBLE_ROWS = 12


def inspect(path: Path, name: str | None = None) -> Inspection:
    """What is in *path*, and a configuration that reads it; Failed when it is nothing the extractor can read."""
    found = read(path)
    plan = planned(found.samples)
    columns, warnings = _columns(plan)
    key = chosen_key(plan, columns)
    skipping = patterns_for([table.rows for table in plan.tables])
    config = config_of(found, plan, columns, key, skipping)
    late = settled_header(config, plan)
    told = [*plan.warnings, *late, *_unseen(found), *skipping.warnings, *doubts_of(columns, plan), *warnings]
    return Inspection(
        file=path.name,
        name=name or snake(path.name.split(".")[0]) or "supplier",
        format=found.format.value,
        encoding=found.encoding,
        delimiter=found.delimiter,
        records=found.records,
        tables=_tables(found, plan, columns),
        warnings=list(dict.fromkeys([*told, *key.warnings])),
        config=config,
        comments={column.name: _comment(column) for column in columns},
    )


def _columns(plan: TablePlan) -> tuple[list[TypedField], list[str]]:
    typed = typed_fields(plan.fields, plan.tables)
    if not plan.has_header:
        return named_by_content(typed)
    warnings = [f"column {one.header!r} only counts rows and is left out" for one in typed if one.only_counts]
    return [one for one in typed if not one.only_counts], [*warnings, *_unnamed(plan)]


def _unnamed(plan: TablePlan) -> list[str]:
    """Columns with values but without a header."""
    told = []
    for table in plan.tables:
        for column in range(table.width):
            texts = table.texts(column)
            is_named = column < len(table.names) and table.names[column]
            if not is_named and len(texts) and int((texts != "").sum()) > len(texts) * 0.2:
                shown = shortened(texts.filter(texts != "")[0])
                where = f" of sheet {table.sample.name!r}" if table.sample.name else ""
                told.append(f"column {column + 1}{where} has no header, but values such as {shown!r}: left out")
    return told[:5]


def _unseen(found: FileSample) -> list[str]:
    """What the sample cannot tell."""
    number = sum(sample.malformed for sample in found.samples)
    told = [f"{number} lines are no records and will be bad rows"] if number else []
    if not all(sample.is_whole for sample in found.samples):
        told.append("the file is large and was not read to its end: raise min_fact_count, and see that the key is one")
    return told


def _comment(one: TypedField) -> str:
    header = " | ".join(one.field.spellings[:3])
    shown = ", ".join(one.examples()) or "always empty"
    empty = f", {one.empty():.0%} empty" if one.empty() >= 0.005 else ""
    return "; ".join(part for part in (header, shown, f"{percent(one.read())} read{empty}") if part)


def _tables(found: FileSample, plan: TablePlan, columns: list[TypedField]) -> list[InspectedTable]:
    shaped = {id(one.sample): (one, number) for number, one in enumerate(plan.tables)}
    shaped |= {id(one.sample): (one, -1) for one in plan.skipped}
    known = [shaped[id(sample)] for sample in found.samples]
    return [_table(table, number, columns) for table, number in known]


def _table(table: ShapedTable, number: int, columns: list[TypedField]) -> InspectedTable:
    above = table.sample.head[: table.header.above] if table.header else []
    preamble = [" ".join(cell.strip() for cell in row if cell.strip()) for row in above]
    return InspectedTable(
        name=table.sample.name,
        rows_looked_at=table.sample.rows.height,
        rows=table.sample.total,
        is_whole=table.sample.is_whole,
        is_skipped=number < 0,
        header_rows=table.header.numbers if table.header else [],
        preamble=[shortened(text) for text in preamble if text][:_PREAMBLE_ROWS],
        totals=sorted(table.rows.totals),
        columns=_found_columns(table, number, columns) if number >= 0 else [],
    )


def _found_columns(table: ShapedTable, number: int, columns: list[TypedField]) -> list[InspectedColumn]:
    known = {column.field.columns[number]: column for column in columns if number in column.field.columns}
    names = table.names or [str(place) for place in range(1, table.width + 1)]
    return [_column(place, name, known.get(place), number) for place, name in enumerate(names) if name]


def _column(place: int, header: str, one: TypedField | None, table: int) -> InspectedColumn:
    if one is None:
        return InspectedColumn(place + 1, header, None, None, {}, None, 0.0, False, [])
    options = {key: value for key, value in one.options.items() if key != "type"}
    return InspectedColumn(
        number=place + 1,
        header=header,
        field=one.name,
        type=one.guess.type,
        options=options,
        read=round(one.read(table), 4),
        empty=round(one.empty(table), 4),
        is_unique=one.is_unique(table),
        examples=one.examples(table),
    )
