"""§16, the Extractor: files of every supported format as tables of texts, read in bounded memory."""

from collections.abc import Iterator
from pathlib import Path

from penstock.ingest.extract.tables import ReadProgress, SourceTable
from penstock.ingest.supplier import WORKBOOKS, FileFormat, SupplierLimits, SupplierSource


def open_tables(
    file: Path,
    source: SupplierSource,
    limits: SupplierLimits,
    wanted: list[str] | None = None,
    progress: ReadProgress | None = None,
    name: str | None = None,
) -> Iterator[SourceTable]:
    """Yield the tables of *file*, each of which must be read before the next; messages call the file *name*.

    RunFailed if the file cannot be read. Of JSON and XML only the *wanted* values are read; None means all values.
    """
    # The parsers of JSON and XML are imported only by commands that read a file.
    from penstock.ingest.extract import archives, delimited, detect, records, workbook

    for member in archives.open_members(file, limits, progress or ReadProgress(0), name, source.sheets):
        file_format = detect.detect_format(member, source.format)
        if file_format in WORKBOOKS:
            yield from workbook.open_sheets(member, source, limits)
        elif file_format is FileFormat.CSV:
            yield delimited.open_table(member, source)
        else:
            yield records.open_table(member, file_format, source, wanted)
