"""What is packed: gzip and zip, one file or several, broken, locked, or made to burst."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import archives
from penstock.ingest.supplier import Supplier
from tests.ingest.extract.test_workbook import ROWS, WRITERS, A, B
from tests.ingest.extract.workbooks import zipped
from tests.ingest.extraction import STOCK, made, refused, supplier

PLAIN = b"sku,qty,price\nA,1,10.50\nB,2,7\n"
MORE = b"sku;qty;price\nC;3;1\n"
C = {"sku": "C", "qty": 3, "price_minor": 100}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.zip"


def in_zip(**sheets: object) -> Supplier:
    return supplier(STOCK, source={"sheets": sheets})


def test_a_gzip(tmp_path: Path) -> None:
    """I17: it is read as it is unpacked; of two parts in a row both."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(PLAIN))
    assert made(file).rows == [(2, A), (3, B)]
    file.write_bytes(gzip.compress(PLAIN[:20]) + gzip.compress(PLAIN[20:]))
    assert made(file).rows == [(2, A), (3, B)]


@pytest.mark.parametrize("kept", [2, 9, 15, -1, -5])
def test_a_gzip_that_was_cut(tmp_path: Path, kept: int) -> None:
    """I6: half a download is not readable."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(PLAIN * 100)[:kept])
    refused(file)


def test_a_gzip_that_is_damaged(tmp_path: Path) -> None:
    """I6: what does not add up is not published, wherever it breaks."""
    file = tmp_path / "stock.json.gz"
    for content in (b"[" + b'{"sku":"A","qty":1,"price":1},' * 9000 + b"{}]", PLAIN + b"C,1,1\n" * 50_000):
        packed = bytearray(gzip.compress(content))
        packed[-6] ^= 0xFF
        file.write_bytes(packed)
        assert "CRC" in refused(file)


def test_a_gzip_of_nothing(tmp_path: Path) -> None:
    """I6: nothing, packed, is empty."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(b""))
    refused(file, code=FailureCode.FILE_EMPTY)


def test_a_zip_of_one_file(file: Path) -> None:
    """I17: it is that file; what systems pack beside it does not count."""
    beside = {"__MACOSX/._stock.csv": b"\0\1", "data/": b"", "data/.DS_Store": b"\0"}
    found = made(zipped(file, {**beside, "data/stock.csv": PLAIN}))
    assert found.rows == [(2, A), (3, B)]
    assert "category_key" not in found.facts[0]


def test_a_zip_of_several_files(file: Path) -> None:
    """I17: each is a category, whatever its format."""
    records = b'[{"sku": "C", "qty": 3, "price": 1}]'
    found = made(zipped(file, {"шины.csv": PLAIN, "диски.csv": MORE, "акб.json": records}))
    assert found.of("шины") == [(2, A), (3, B)]
    assert found.of("диски") == [(2, C)]
    assert found.of("акб") == [(1, C)]


def test_files_are_chosen_as_sheets_are(file: Path) -> None:
    """I17: only, skip and the numbers of categories hold for the files of an archive."""
    zipped(file, {"a.csv": PLAIN, "b.csv": MORE, "readme.txt": b"call us"})
    assert [fact["category_key"] for fact in made(file, in_zip(skip=["readme"])).facts] == ["a", "a", "b"]
    assert [fact["category_key"] for fact in made(file, in_zip(only=["b.csv"])).facts] == ["b"]
    numbered = made(file, in_zip(only=["b"], category="number"))
    assert numbered.of("sheet2") == [(2, C)]
    for sheets in ({"only": ["c"]}, {"skip": ["a", "b", "readme"]}):
        assert "a.csv, b.csv" in refused(file, in_zip(**sheets), FailureCode.FORMAT_UNKNOWN)
    refused(file, in_zip(), FailureCode.COLUMNS_MISSING)


def test_files_of_one_name_in_several_folders(file: Path) -> None:
    """I17: two files are two categories, also when they are called alike."""
    found = made(zipped(file, {"msk/stock.csv": PLAIN, "spb/stock.csv": MORE}))
    assert found.of("msk/stock.csv") == [(2, A), (3, B)]
    assert found.of("spb/stock.csv") == [(2, C)]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_workbook_in_a_zip(tmp_path: Path, file: Path, kind: str) -> None:
    """I17: a workbook is one, packed once more too; of several, each sheet of each is a category."""
    inner = WRITERS[kind](tmp_path / "price", {"s": ROWS, "t": ROWS}).read_bytes()
    assert made(zipped(file, {f"price.{kind}": inner}), in_zip(only=["t"])).of("t") == [(2, A), (3, B)]
    found = made(zipped(file, {f"a.{kind}": inner, f"b.{kind}": inner}))
    assert found.of("b / s") == [(2, A), (3, B)]
    assert list(found.stats.categories) == ["a / s", "a / t", "b / s", "b / t"]
    file.write_bytes(gzip.compress(inner))
    assert made(file).of("t") == [(2, A), (3, B)]


def test_a_zip_with_a_password(file: Path) -> None:
    """I6: what is locked cannot be read."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN}, zipfile.ZIP_STORED).read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + place] |= 1
    file.write_bytes(content)
    assert "stock.csv" in refused(file)
    assert "password" in refused(file)


def test_a_zip_packed_in_a_way_nobody_knows(file: Path) -> None:
    """I6: an unknown way of packing is told of."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN}, zipfile.ZIP_STORED).read_bytes())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(mark) + place] = 97
    file.write_bytes(content)
    refused(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_STORED])
def test_ways_of_packing(file: Path, method: int) -> None:
    """I17: all that zips are made with; and damage is noticed in each."""
    whole = zipped(file, {"stock.csv": PLAIN + b"C,1,1\n" * 20_000}, method).read_bytes()
    assert len(made(file).facts) == 20_002
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    file.write_bytes(damaged)
    refused(file)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
def test_a_zip_that_was_cut(file: Path, part: float) -> None:
    """I6: an archive without its end is not readable."""
    whole = zipped(file, {"a.csv": PLAIN * 50, "b.csv": PLAIN}).read_bytes()
    file.write_bytes(whole[: int(len(whole) * part)])
    refused(file)


def test_an_empty_zip(file: Path) -> None:
    """I6: an archive of nothing, or of folders only, is told of."""
    for contents in ({}, {"data/": b""}):
        assert "without files" in refused(zipped(file, contents), code=FailureCode.FORMAT_UNKNOWN)
    refused(zipped(file, {"stock.csv": b""}), code=FailureCode.FILE_EMPTY)


def test_an_archive_in_an_archive(tmp_path: Path, file: Path) -> None:
    """I6: what is packed twice is not unpacked twice."""
    inner = zipped(tmp_path / "inner.zip", {"stock.csv": PLAIN}).read_bytes()
    assert "inner.zip" in refused(zipped(file, {"inner.zip": inner}), code=FailureCode.FORMAT_UNKNOWN)
    refused(zipped(file, {"a.csv.gz": gzip.compress(PLAIN)}), code=FailureCode.FORMAT_UNKNOWN)
    refused(zipped(file, {"inner.zip": inner[:50]}), code=FailureCode.FORMAT_UNKNOWN)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\..\\boot.csv", "a" * 300 + ".xlsx", "a:b|c*"])
def test_names_that_lead_elsewhere(tmp_path: Path, file: Path, name: str) -> None:
    """I17: a name in an archive is never a place on the disk."""
    workbook = WRITERS["xlsx"](tmp_path / "price.xlsx", {"s": ROWS}).read_bytes()
    before = set(tmp_path.rglob("*"))
    found = made(zipped(file, {name: workbook, "b.csv": PLAIN}))
    assert len(found.facts) == 4
    assert set(tmp_path.rglob("*")) - before == {file}


def test_names_as_windows_writes_them(file: Path) -> None:
    """I17: Explorer writes the names of an archive in the code page of its country."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("XXXX.csv", PLAIN)
        archive.writestr("b.csv", MORE)
    file.write_bytes(buffer.getvalue().replace(b"XXXX", "Шины".encode("cp866")))
    assert made(file).of("Шины") == [(2, A), (3, B)]


@pytest.mark.parametrize("kind", ["zip", "gz"])
def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """I19: what unpacks to hundreds of times its size is stopped on the way."""
    monkeypatch.setattr(archives, "_ALWAYS_ALLOWED", 1 << 20)
    file, content = tmp_path / f"bomb.{kind}", PLAIN + b"A" * (30 << 20)
    if kind == "zip":
        zipped(file, {"stock.csv": content})
    else:
        file.write_bytes(gzip.compress(content, 9))
    refused(file, supplier(STOCK, limits={"max_ratio": 20}), FailureCode.FILE_TOO_LARGE)
    workbook = b"PK\x03\x04" + content
    file.write_bytes(gzip.compress(workbook, 9))
    refused(file, supplier(STOCK, limits={"max_ratio": 20}), FailureCode.FILE_TOO_LARGE)


def test_a_zip_that_lies_about_its_size(file: Path) -> None:
    """I19: what an archive says of itself is not believed."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN * 1000}).read_bytes())
    size = len(PLAIN * 1000).to_bytes(4, "little")
    file.write_bytes(bytes(content).replace(size, (60).to_bytes(4, "little")))
    refused(file)


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_a_file_beyond_the_limit(tmp_path: Path, kind: str) -> None:
    """I19: limits.max_bytes holds for every file, packed or not."""
    file = tmp_path / "large.csv"
    file.write_bytes(PLAIN * 100 if kind == "plain" else gzip.compress(PLAIN * 100))
    config = supplier(STOCK, limits={"max_bytes": 1000})
    assert "1,000 bytes" in refused(file, config, FailureCode.FILE_TOO_LARGE)


@pytest.mark.full
@pytest.mark.parametrize("limits", [{"max_ratio": 2}, {"max_bytes": 3_000_000}])
def test_the_files_of_an_archive_count_together(
    file: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """I19: limits hold for what a file unpacks to; many files, none of them too large, are too much."""
    monkeypatch.setattr(archives, "_ALWAYS_ALLOWED", 1 << 20)
    one = PLAIN + b"C,1,1\n" * 100_000
    config = supplier(STOCK, limits=limits)
    zipped(file, {"a.csv": one})
    assert len(made(file, config).facts) == 100_002
    zipped(file, {f"{name}.csv": one for name in "abcdef"})
    said = refused(file, config, FailureCode.FILE_TOO_LARGE)
    assert "stock.zip unpacks to more than" in said


def test_what_is_read_twice_counts_once(file: Path) -> None:
    """I19: that records are looked for first makes a file no larger."""
    content = json.dumps({"none": ["x" * 100] * 5000, "items": [{"sku": "C", "qty": 3, "price": 1}]}).encode()
    assert made(zipped(file, {"a.json": content}), supplier(STOCK, limits={"max_bytes": len(content)})).rows == [(1, C)]
