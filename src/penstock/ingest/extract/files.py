"""§16, the Extractor: a file of any known format, read as tables of texts in bounded memory."""

from collections.abc import Iterator
from pathlib import Path

from penstock.ingest.extract.tables import BatchSizer, SourceTable
from penstock.ingest.supplier import WORKBOOKS, FileFormat, SupplierLimits, SupplierSource


def open_tables(
    file: Path,
    source: SupplierSource,
    limits: SupplierLimits,
    wanted: list[str] | None = None,
    gauge: BatchSizer | None = None,
    name: str | None = None,
) -> Iterator[SourceTable]:
    """The tables of *file*, each to be read before the next; Failed when it cannot be read, which calls it *name*.

    Of JSON and XML only what is *wanted* is read, without it all of a record.
    """
    # Imports the parsers of JSON and XML, which no command but one that reads a file needs.
    from penstock.ingest.extract import archives, delimited, detect, records, workbook

    for member in archives.members(file, limits, gauge or BatchSizer(0), name, source.sheets):
        form = detect.detected(member, source.format)
        if form in WORKBOOKS:
            yield from workbook.tables(member, source, limits)
        elif form is FileFormat.CSV:
            yield delimited.table(member, source)
        else:
            yield records.table(member, form, source, wanted)
