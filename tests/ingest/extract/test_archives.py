"""Tests of packed files: gzip and zip, with one or several files, damaged, encrypted, or with an excessive size."""

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
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal

PLAIN = b"sku,qty,price\nA,1,10.50\nB,2,7\n"
MORE = b"sku;qty;price\nC;3;1\n"
C = {"sku": "C", "qty": 3, "price_minor": 100}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.zip"


def in_zip(**sheets: object) -> Supplier:
    return make_supplier(STOCK, source={"sheets": sheets})


def test_a_gzip(tmp_path: Path) -> None:
    """I17: a gzip file is unpacked while it is read; all members of a file with several are read."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(PLAIN))
    assert extract_file(file).rows == [(2, A), (3, B)]
    file.write_bytes(gzip.compress(PLAIN[:20]) + gzip.compress(PLAIN[20:]))
    assert extract_file(file).rows == [(2, A), (3, B)]


@pytest.mark.parametrize("length", [2, 9, 15, -1, -5])
def test_a_gzip_that_was_cut(tmp_path: Path, length: int) -> None:
    """I6: a truncated gzip file is rejected."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(PLAIN * 100)[:length])
    read_refusal(file)


def test_a_gzip_that_is_damaged(tmp_path: Path) -> None:
    """I6: a gzip file with a wrong checksum is rejected, wherever it is damaged."""
    file = tmp_path / "stock.json.gz"
    for content in (b"[" + b'{"sku":"A","qty":1,"price":1},' * 9000 + b"{}]", PLAIN + b"C,1,1\n" * 50_000):
        packed = bytearray(gzip.compress(content))
        packed[-6] ^= 0xFF
        file.write_bytes(packed)
        assert "CRC" in read_refusal(file)


def test_a_gzip_of_nothing(tmp_path: Path) -> None:
    """I6: a gzip file of an empty file is empty."""
    file = tmp_path / "stock.csv.gz"
    file.write_bytes(gzip.compress(b""))
    read_refusal(file, code=FailureCode.FILE_EMPTY)


def test_a_zip_of_one_file(file: Path) -> None:
    """I17: a zip of a file is read as that file; entries that an operating system adds are ignored."""
    beside = {"__MACOSX/._stock.csv": b"\0\1", "data/": b"", "data/.DS_Store": b"\0"}
    extracted = extract_file(zipped(file, {**beside, "data/stock.csv": PLAIN}))
    assert extracted.rows == [(2, A), (3, B)]
    assert "category_key" not in extracted.facts[0]


def test_a_zip_of_several_files(file: Path) -> None:
    """I17: each file of a zip is a category, in any format."""
    records = b'[{"sku": "C", "qty": 3, "price": 1}]'
    extracted = extract_file(zipped(file, {"tyres.csv": PLAIN, "rims.csv": MORE, "batteries.json": records}))
    assert extracted.of("tyres") == [(2, A), (3, B)]
    assert extracted.of("rims") == [(2, C)]
    assert extracted.of("batteries") == [(1, C)]


def test_files_are_selected_like_sheets(file: Path) -> None:
    """I17: `only`, `skip` and `category: number` also apply to the files of an archive."""
    zipped(file, {"a.csv": PLAIN, "b.csv": MORE, "readme.txt": b"call us"})
    assert [fact["category_key"] for fact in extract_file(file, in_zip(skip=["readme"])).facts] == ["a", "a", "b"]
    assert [fact["category_key"] for fact in extract_file(file, in_zip(only=["b.csv"])).facts] == ["b"]
    numbered = extract_file(file, in_zip(only=["b"], category="number"))
    assert numbered.of("sheet2") == [(2, C)]
    for sheets in ({"only": ["c"]}, {"skip": ["a", "b", "readme"]}):
        assert "a.csv, b.csv" in read_refusal(file, in_zip(**sheets), FailureCode.FORMAT_UNKNOWN)
    read_refusal(file, in_zip(), FailureCode.COLUMNS_MISSING)


def test_files_of_one_name_in_several_folders(file: Path) -> None:
    """I17: files with the same name in different folders are different categories."""
    extracted = extract_file(zipped(file, {"msk/stock.csv": PLAIN, "spb/stock.csv": MORE}))
    assert extracted.of("msk/stock.csv") == [(2, A), (3, B)]
    assert extracted.of("spb/stock.csv") == [(2, C)]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_workbook_in_a_zip(tmp_path: Path, file: Path, kind: str) -> None:
    """I17: a packed workbook is read as a workbook; of several workbooks, each sheet of each is a category."""
    inner = WRITERS[kind](tmp_path / "price", {"s": ROWS, "t": ROWS}).read_bytes()
    assert extract_file(zipped(file, {f"price.{kind}": inner}), in_zip(only=["t"])).of("t") == [(2, A), (3, B)]
    extracted = extract_file(zipped(file, {f"a.{kind}": inner, f"b.{kind}": inner}))
    assert extracted.of("b / s") == [(2, A), (3, B)]
    assert list(extracted.stats.categories) == ["a / s", "a / t", "b / s", "b / t"]
    file.write_bytes(gzip.compress(inner))
    assert extract_file(file).of("t") == [(2, A), (3, B)]


def test_a_zip_with_a_password(file: Path) -> None:
    """I6: an encrypted archive is rejected."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN}, zipfile.ZIP_STORED).read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + place] |= 1
    file.write_bytes(content)
    assert "stock.csv" in read_refusal(file)
    assert "password" in read_refusal(file)


def test_a_zip_with_an_unknown_compression(file: Path) -> None:
    """I6: an unknown compression method is rejected."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN}, zipfile.ZIP_STORED).read_bytes())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(mark) + place] = 97
    file.write_bytes(content)
    read_refusal(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_STORED])
def test_compression_methods(file: Path, method: int) -> None:
    """I17: all common compression methods of zip are supported, and damage is detected in each."""
    content = zipped(file, {"stock.csv": PLAIN + b"C,1,1\n" * 20_000}, method).read_bytes()
    assert len(extract_file(file).facts) == 20_002
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 0xFF
    file.write_bytes(damaged)
    read_refusal(file)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
def test_a_zip_that_was_cut(file: Path, part: float) -> None:
    """I6: an archive without its end is rejected."""
    content = zipped(file, {"a.csv": PLAIN * 50, "b.csv": PLAIN}).read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    read_refusal(file)


def test_an_empty_zip(file: Path) -> None:
    """I6: an archive without files, or with folders only, is rejected with a reason."""
    for contents in ({}, {"data/": b""}):
        assert "without files" in read_refusal(zipped(file, contents), code=FailureCode.FORMAT_UNKNOWN)
    read_refusal(zipped(file, {"stock.csv": b""}), code=FailureCode.FILE_EMPTY)


def test_an_archive_in_an_archive(tmp_path: Path, file: Path) -> None:
    """I6: an archive inside an archive is not unpacked."""
    inner = zipped(tmp_path / "inner.zip", {"stock.csv": PLAIN}).read_bytes()
    assert "inner.zip" in read_refusal(zipped(file, {"inner.zip": inner}), code=FailureCode.FORMAT_UNKNOWN)
    read_refusal(zipped(file, {"a.csv.gz": gzip.compress(PLAIN)}), code=FailureCode.FORMAT_UNKNOWN)
    read_refusal(zipped(file, {"inner.zip": inner[:50]}), code=FailureCode.FORMAT_UNKNOWN)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\..\\boot.csv", "a" * 300 + ".xlsx", "a:b|c*"])
def test_names_with_other_folders(tmp_path: Path, file: Path, name: str) -> None:
    """I17: a name in an archive is never used as a path on the disk."""
    workbook = WRITERS["xlsx"](tmp_path / "price.xlsx", {"s": ROWS}).read_bytes()
    before = set(tmp_path.rglob("*"))
    extracted = extract_file(zipped(file, {name: workbook, "b.csv": PLAIN}))
    assert len(extracted.facts) == 4
    assert set(tmp_path.rglob("*")) - before == {file}


def test_names_in_a_dos_code_page(file: Path) -> None:
    """I17: names in the DOS code page of Windows Explorer are decoded."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("XXXX.csv", PLAIN)
        archive.writestr("b.csv", MORE)
    file.write_bytes(buffer.getvalue().replace(b"XXXX", "Шины".encode("cp866")))
    assert extract_file(file).of("Шины") == [(2, A), (3, B)]


@pytest.mark.parametrize("kind", ["zip", "gz"])
def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """I19: a file that unpacks to hundreds of times its size is rejected while it is read."""
    monkeypatch.setattr(archives, "_ALWAYS_ALLOWED", 1 << 20)
    file, content = tmp_path / f"bomb.{kind}", PLAIN + b"A" * (30 << 20)
    if kind == "zip":
        zipped(file, {"stock.csv": content})
    else:
        file.write_bytes(gzip.compress(content, 9))
    read_refusal(file, make_supplier(STOCK, limits={"max_ratio": 20}), FailureCode.FILE_TOO_LARGE)
    workbook = b"PK\x03\x04" + content
    file.write_bytes(gzip.compress(workbook, 9))
    read_refusal(file, make_supplier(STOCK, limits={"max_ratio": 20}), FailureCode.FILE_TOO_LARGE)


def test_a_zip_with_a_wrong_size(file: Path) -> None:
    """I19: the size that an archive declares is not used."""
    content = bytearray(zipped(file, {"stock.csv": PLAIN * 1000}).read_bytes())
    size = len(PLAIN * 1000).to_bytes(4, "little")
    file.write_bytes(bytes(content).replace(size, (60).to_bytes(4, "little")))
    read_refusal(file)


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_a_file_beyond_the_limit(tmp_path: Path, kind: str) -> None:
    """I19: `limits.max_bytes` applies to every file, packed or not."""
    file = tmp_path / "large.csv"
    file.write_bytes(PLAIN * 100 if kind == "plain" else gzip.compress(PLAIN * 100))
    config = make_supplier(STOCK, limits={"max_bytes": 1000})
    assert "1,000 bytes" in read_refusal(file, config, FailureCode.FILE_TOO_LARGE)


@pytest.mark.full
@pytest.mark.parametrize("limits", [{"max_ratio": 2}, {"max_bytes": 3_000_000}])
def test_the_files_of_an_archive_count_together(
    file: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """I19: the limits apply to the sum of all files of an archive."""
    monkeypatch.setattr(archives, "_ALWAYS_ALLOWED", 1 << 20)
    content = PLAIN + b"C,1,1\n" * 100_000
    config = make_supplier(STOCK, limits=limits)
    zipped(file, {"a.csv": content})
    assert len(extract_file(file, config).facts) == 100_002
    zipped(file, {f"{name}.csv": content for name in "abcdef"})
    message = read_refusal(file, config, FailureCode.FILE_TOO_LARGE)
    assert "stock.zip unpacks to more than" in message


def test_content_that_is_read_twice_counts_once(file: Path) -> None:
    """I19: the search for the records does not count towards the limits."""
    content = json.dumps({"none": ["x" * 100] * 5000, "items": [{"sku": "C", "qty": 3, "price": 1}]}).encode()
    assert extract_file(
        zipped(file, {"a.json": content}), make_supplier(STOCK, limits={"max_bytes": len(content)})
    ).rows == [(1, C)]
