"""Facts, bad rows and changes as NDJSON: lines are built, written with their hash and read back; keys are hashed."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import orjson
import polars as pl

from penstock.ingest.contract import IngestReason
from penstock.ingest.model import RunArtifact
from penstock.ingest.supplier import CATEGORY, Supplier

PIECE = 4 << 20
_PART = 4_096  # lines
_NOWHERE = "\x01"  # JSON has no such character, so nothing is cut there
_SEEDS = (1, 2, 3)
_KEY_PART = "\x1f"


class NdjsonLines:
    """A file of lines under way; what it is in the end is told by `artifact`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._out = path.open("xb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._size = 0

    def add(self, lines: pl.Series) -> None:
        """A part at a time: what is copied stays small."""
        for begun in range(0, len(lines), _PART):
            self.write(_text(lines.slice(begun, _PART)))
            self.write(b"\n")

    def write(self, text: bytes) -> None:
        """Whole lines."""
        self._digest.update(text)
        self._out.write(text)
        self._size += len(text)

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        self._out.close()

    @property
    def artifact(self) -> RunArtifact:
        return RunArtifact(self._digest.hexdigest(), self._size)


def encode_lines(lines: pl.Series) -> bytes:
    """All of *lines* as they stand in a file, each ended."""
    return _text(lines) + b"\n" if len(lines) else b""


def _text(lines: pl.Series) -> bytes:
    text: bytes = lines.str.join("\n").cast(pl.Binary).item()
    return text


def read_lines(content: IO[bytes]) -> Iterator[pl.Series]:
    """The lines of a file, some thousands at a time."""
    left = b""
    while piece := content.read(PIECE):
        text = left + piece
        cut = text.rfind(b"\n") + 1
        left = text[cut:]
        if cut:
            yield _lines(text[:cut])
    if left:
        yield _lines(left)


def _lines(text: bytes) -> pl.Series:
    frame = pl.read_csv(
        io.BytesIO(text), has_header=False, separator=_NOWHERE, quote_char=None, schema={"line": pl.String}
    )
    return frame["line"]


def read_lines_at(content: BinaryIO, positions: pl.Series) -> Iterator[tuple[pl.Series, pl.Series]]:
    """The lines at *positions*, which are sorted, and their positions, some thousands at a time."""
    begun = 0
    for lines in read_lines(content):
        wanted = positions.filter((positions >= begun) & (positions < begun + len(lines)))
        if len(wanted):
            yield lines.gather(wanted - begun), wanted
        begun += len(lines)


def format_line_start(run_id: str, supplier: str, category: str | None) -> str:
    """How every line of one table begins."""
    known = {"run_id": run_id, "supplier": supplier, **({CATEGORY: category} if category else {})}
    return orjson.dumps(known).decode()[:-1]


def build_fact_lines(start: str, row_id: pl.Expr, row_number: pl.Expr, payload: pl.Expr) -> pl.Expr:
    begun, number, then = (pl.lit(text) for text in (f'{start},"row_id":"', '","row_number":', ',"payload":'))
    return pl.concat_str(begun, row_id, number, row_number, then, payload, pl.lit("}"))


def build_bad_lines(start: str, told: pl.DataFrame) -> pl.Series:
    """A line per row of *told*, whose columns are row_number, reason_code and what else is told."""
    return _joined(told, pl.lit(start + ","), pl.struct(pl.all()).struct.json_encode().str.slice(1))


def build_repeated_lines(start: str, row_number: pl.Series) -> pl.Series:
    """The bad rows whose key another row has."""
    reason = pl.repeat(IngestReason.KEY_DUPLICATE.value, len(row_number), dtype=pl.String, eager=True)
    return build_bad_lines(start, pl.DataFrame([row_number.alias("row_number"), reason.alias("reason_code")]))


def build_held_lines(run_id: str, supplier: str, known: pl.DataFrame, payload: pl.Series, held_from: str) -> pl.Series:
    """I20: facts of an earlier run, said again by this one; they tell which run they come from."""
    told = known.select(
        pl.lit(run_id).alias("run_id"),
        pl.lit(supplier).alias("supplier"),
        *([pl.col(CATEGORY)] if known[CATEGORY].is_not_null().any() else []),
        pl.col("row_id"),
        pl.col("held_from").fill_null(held_from),
    )
    parts = told.select(pl.struct(pl.all()).struct.json_encode().alias("told")).with_columns(payload.alias("payload"))
    start = pl.col("told").str.strip_suffix("}").str.replace(f',"{CATEGORY}":null', "", literal=True)
    return _joined(parts, start, pl.lit(',"payload":'), "payload", pl.lit("}"))


def build_changed_lines(change: str, known: pl.DataFrame, supplier: Supplier) -> pl.Series:
    """I21: a line per fact that was added, removed or changed, with its key."""
    fields = [field.alias(name) for name, field in _key_fields(supplier).items() if name != CATEGORY]
    told = [pl.lit(change).alias("change")]
    told += [pl.col(CATEGORY)] if known[CATEGORY].is_not_null().any() else []
    told += [pl.struct(fields).alias("key")] if fields else [pl.col("row_id")]
    return known.select(pl.struct(told).struct.json_encode().alias("line"))["line"]


def parse_facts(lines: pl.Series, supplier: Supplier) -> pl.DataFrame:
    """What facts say beside their payloads, and of those the fields of the key, as texts."""
    key = {name: pl.String for name in supplier.key if name != CATEGORY}
    schema = {"row_id": pl.String, "row_number": pl.Int64, CATEGORY: pl.String, "held_from": pl.String}
    whole = io.BytesIO("\n".join(lines.to_list()).encode())
    if not key:
        return pl.read_ndjson(whole, schema=schema)
    known = pl.read_ndjson(whole, schema={**schema, "payload": pl.Struct(key)})
    # By their places: to the library a field called * is all of them.
    places = [str(place) for place in range(len(key))]
    return known.with_columns(pl.col("payload").struct.rename_fields(places))


def extract_payloads(lines: pl.Series) -> pl.Series:
    """The payloads of facts, as the text they are."""
    return lines.str.extract(r'"payload":(\{.*\})\}$', 1)


def hash_keys(known: pl.DataFrame, supplier: Supplier) -> pl.DataFrame:
    """The keys of facts that were read back, hashed as `RecordEmitter` hashes them."""
    parts = [field.fill_null("") for field in _key_fields(supplier).values()]
    return known.select(hash_expressions(parts, pl.col("row_id")))


def _key_fields(supplier: Supplier) -> dict[str, pl.Expr]:
    """The fields of a key, as `parsed` gives them."""
    names = [name for name in supplier.key if name != CATEGORY]
    payload = {name: pl.col("payload").struct.field(str(place)) for place, name in enumerate(names)}
    return {name: pl.col(CATEGORY) if name == CATEGORY else payload[name] for name in supplier.key}


def hash_expressions(parts: list[pl.Expr], row_id: pl.Expr) -> list[pl.Expr]:
    """The key of *parts*, or for want of one the content, and the content as numbers.

    No two keys of a file will ever share both hashes.
    """
    first, second, content = _SEEDS
    # A field may hold what parts it from the next: with the lengths of all but the last, no two keys are one text.
    lengths = [part.str.len_bytes().cast(pl.String) for part in parts[:-1]]
    key = pl.concat_str(lengths + parts, separator=_KEY_PART) if lengths else parts[0] if parts else row_id
    return [key.hash(first).alias("a"), key.hash(second).alias("b"), row_id.hash(content).alias("r")]


def _joined(frame: pl.DataFrame, *parts: pl.Expr | str) -> pl.Series:
    return frame.select(pl.concat_str(list(parts)).alias("line"))["line"]
