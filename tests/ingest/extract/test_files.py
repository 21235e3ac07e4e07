"""Tests with random bytes: a file becomes tables or is rejected, without any other error."""

import gzip
import io
import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ingest.extract.files import open_tables
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extract.test_workbook import ROWS, WRITERS

STARTS = [
    b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b\x08\x00", b"PK", b"PK\x05\x06", b"[{", b"{",
    b"<?xml ?><a>", b"sku,qty\n", b'{"a":1}\n{', b"<", b"MZ", b"\0", b'"',
]  # fmt: skip
LIMITS = SupplierLimits(workbook_memory=400_000_000, workbook_seconds=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
FORMATS = ["auto", "csv", "json", "ndjson", "xml"]


def read_outcome(content: bytes, **source: Any) -> str:
    """Return the result of reading a file of these bytes to its end."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "any.bin"
        file.write_bytes(content)
        try:
            for table in open_tables(file, SupplierSource.model_validate(source), LIMITS):
                for batch in table.batches:
                    assert batch.frame.height
                    assert batch.first_row >= 1
        except RunFailed as failed:
            return "refused" if "any.bin" in failed.message and failed.hint else failed.message
        return "read"


@given(st.sampled_from(STARTS), st.binary(max_size=200), st.sampled_from(FORMATS))
@example(b"\xfe\xff", b"\xfe\xff", "auto")
@settings(max_examples=150)
def test_any_bytes(start: bytes, rest: bytes, form: str) -> None:
    """I6: any bytes become tables or a rejection that names the file, for any configured format."""
    assert read_outcome(start + rest, format=form) in ("read", "refused")


@given(st.text(st.sampled_from('{}[]":,0123456789.eE-+\\ubtrfalsn \n'), max_size=60), st.booleans())
@settings(max_examples=100)
def test_text_like_json(text: str, is_lines: bool) -> None:
    """I6: text similar to JSON becomes tables or a rejection."""
    assert read_outcome(text.encode(), format="ndjson" if is_lines else "json") in ("read", "refused")


@given(NESTED)
@settings(max_examples=60)
def test_any_json(document: Any) -> None:
    """I17: any JSON document is read, or contains no records."""
    assert read_outcome(json.dumps(document).encode(), format="json") in ("read", "refused")


@given(
    st.lists(st.sampled_from(["<a>", "</a>", "<b x='1'>", "</b>", "t", "&amp;", "&x;", "<!-- c -->", "<c/>", "<?p?>"]))
)
@settings(max_examples=150)
def test_text_like_xml(parts: list[str]) -> None:
    """I6: text similar to XML becomes tables or a rejection."""
    assert read_outcome(f"<r>{''.join(parts)}</r>".encode()) in ("read", "refused")


def archives() -> list[bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("шины.csv", "sku,qty\nA,1\n" * 20)
        archive.writestr("b.json", '[{"sku": "A"}]')
    return [buffer.getvalue(), gzip.compress(b"sku,qty\nA,1\n" * 20, mtime=0)]


DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@given(st.sampled_from(archives()), DAMAGE, st.floats(0.2, 1))
@settings(max_examples=150)
def test_damaged_archives(archive_bytes: bytes, damage: list[tuple[float, int]], share: float) -> None:
    """I6: archives with wrong bytes, truncated at any position, become tables or a rejection."""
    content = bytearray(archive_bytes)
    for place, byte in damage:
        content[int(place * len(content))] = byte
    assert read_outcome(bytes(content[: int(len(content) * share)])) in ("read", "refused")


@given(st.sampled_from(sorted(WRITERS)), DAMAGE)
@settings(max_examples=25)
def test_damaged_workbooks(kind: str, damage: list[tuple[float, int]]) -> None:
    """I6: damaged workbooks become tables or a rejection; a crash of the reader does not affect the process."""
    with TemporaryDirectory() as folder:
        content = bytearray(WRITERS[kind](Path(folder) / "w", {"s": ROWS}).read_bytes())
    for place, byte in damage:
        content[int(place * len(content))] = byte
    assert read_outcome(bytes(content)) in ("read", "refused")
