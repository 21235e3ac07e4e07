"""Facts, bad rows and changes as NDJSON: building, writing, hashing and reading of lines; hashing of keys."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import orjson
import polars as pl

from penstock.ingest.contract import IngestReason
from penstock.ingest.model import RunArtifact
from penstock.ingest.supplier import CATEGORY, Supplier

PIECE = 4 << 20
_PART = 4_096  # lines
_NOWHERE = "\x01"  # a delimiter that cannot occur in JSON, so that a line is a single cell
_SEEDS = (1, 2, 3)
_KEY_PART = "\x1f"


class NdjsonLines:
    """A file of lines that is being written; `artifact` is its hash and size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._out = path.open("xb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._size = 0

    def add(self, lines: pl.Series) -> None:
        """Write *lines* in parts, so that the copies in memory stay small."""
        for start in range(0, len(lines), _PART):
            self.write(_join_lines(lines.slice(start, _PART)))
            self.write(b"\n")

    def write(self, text: bytes) -> None:
        """Write complete lines."""
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
    """Return *lines* as the bytes of a file, each with its line end."""
    return _join_lines(lines) + b"\n" if len(lines) else b""


def _join_lines(lines: pl.Series) -> bytes:
    text: bytes = lines.str.join("\n").cast(pl.Binary).item()
    return text


def read_lines(content: IO[bytes]) -> Iterator[pl.Series]:
    """Yield the lines of a file, some thousands at a time."""
    left = b""
    while piece := content.read(PIECE):
        text = left + piece
        cut = text.rfind(b"\n") + 1
        left = text[cut:]
        if cut:
            yield _parse_lines(text[:cut])
    if left:
        yield _parse_lines(left)


def _parse_lines(text: bytes) -> pl.Series:
    frame = pl.read_csv(
        io.BytesIO(text), has_header=False, separator=_NOWHERE, quote_char=None, schema={"line": pl.String}
    )
    return frame["line"]


def read_lines_at(content: BinaryIO, positions: pl.Series) -> Iterator[tuple[pl.Series, pl.Series]]:
    """Yield the lines at the sorted *positions*, and their positions, some thousands at a time."""
    start = 0
    for lines in read_lines(content):
        wanted = positions.filter((positions >= start) & (positions < start + len(lines)))
        if len(wanted):
            yield lines.gather(wanted - start), wanted
        start += len(lines)


def format_line_start(run_id: str, supplier: str, category: str | None) -> str:
    """Return the common start of all lines of a table."""
    fields = {"run_id": run_id, "supplier": supplier, **({CATEGORY: category} if category else {})}
    return orjson.dumps(fields).decode()[:-1]


def build_fact_lines(start: str, row_id: pl.Expr, row_number: pl.Expr, payload: pl.Expr) -> pl.Expr:
    """Return the expression of a line of facts.ndjson."""
    opening, number, then = (pl.lit(text) for text in (f'{start},"row_id":"', '","row_number":', ',"payload":'))
    return pl.concat_str(opening, row_id, number, row_number, then, payload, pl.lit("}"))


def build_bad_lines(start: str, rows: pl.DataFrame) -> pl.Series:
    """Return a line of bad.ndjson for each of *rows*: row_number, reason_code and any further columns."""
    return _concatenate(rows, pl.lit(start + ","), pl.struct(pl.all()).struct.json_encode().str.slice(1))


def build_repeated_lines(start: str, row_number: pl.Series, key: Sequence[str]) -> pl.Series:
    """Return the lines of bad rows that repeat the *key* of another row; their column is the columns of the key."""
    values = {"reason_code": IngestReason.KEY_DUPLICATE.value, "column": ", ".join(key)}
    columns = [pl.lit(value).alias(name) for name, value in values.items()]
    return build_bad_lines(start, row_number.alias("row_number").to_frame().with_columns(columns))


def build_held_lines(run_id: str, supplier: str, facts: pl.DataFrame, payload: pl.Series, held_from: str) -> pl.Series:
    """I20: return the lines of facts that this run repeats from an earlier run, with the id of that run."""
    fields = facts.select(
        pl.lit(run_id).alias("run_id"),
        pl.lit(supplier).alias("supplier"),
        *([pl.col(CATEGORY)] if facts[CATEGORY].is_not_null().any() else []),
        pl.col("row_id"),
        pl.col("held_from").fill_null(held_from),
    )
    parts = fields.select(pl.struct(pl.all()).struct.json_encode().alias("start")).with_columns(
        payload.alias("payload")
    )
    start = pl.col("start").str.strip_suffix("}").str.replace(f',"{CATEGORY}":null', "", literal=True)
    return _concatenate(parts, start, pl.lit(',"payload":'), "payload", pl.lit("}"))


def build_changed_lines(change: str, facts: pl.DataFrame, supplier: Supplier) -> pl.Series:
    """I21: return a line with the key of each added, removed or changed fact."""
    fields = [field.alias(name) for name, field in _make_key_fields(supplier).items() if name != CATEGORY]
    columns = [pl.lit(change).alias("change")]
    columns += [pl.col(CATEGORY)] if facts[CATEGORY].is_not_null().any() else []
    columns += [pl.struct(fields).alias("key")] if fields else [pl.col("row_id")]
    return facts.select(pl.struct(columns).struct.json_encode().alias("line"))["line"]


def parse_facts(lines: pl.Series, supplier: Supplier) -> pl.DataFrame:
    """Return the fields of facts beside their payloads, and the fields of the key, as texts."""
    key = {name: pl.String for name in supplier.key if name != CATEGORY}
    schema = {"row_id": pl.String, "row_number": pl.Int64, CATEGORY: pl.String, "held_from": pl.String}
    content = io.BytesIO("\n".join(lines.to_list()).encode())
    if not key:
        return pl.read_ndjson(content, schema=schema)
    facts = pl.read_ndjson(content, schema={**schema, "payload": pl.Struct(key)})
    # Fields are named by their position, because polars expands the name *.
    return facts.with_columns(pl.col("payload").struct.rename_fields([str(position) for position in range(len(key))]))


def extract_payloads(lines: pl.Series) -> pl.Series:
    """Return the payloads of facts as texts."""
    return lines.str.extract(r'"payload":(\{.*\})\}$', 1)


def hash_keys(facts: pl.DataFrame, supplier: Supplier) -> pl.DataFrame:
    """Return the hashed keys of facts that were read, equal to the hashes of `RecordEmitter`."""
    parts = [field.fill_null("") for field in _make_key_fields(supplier).values()]
    return facts.select(hash_expressions(parts, pl.col("row_id")))


def _make_key_fields(supplier: Supplier) -> dict[str, pl.Expr]:
    """Return the fields of the key in the result of `parse_facts`."""
    names = [name for name in supplier.key if name != CATEGORY]
    payload = {name: pl.col("payload").struct.field(str(position)) for position, name in enumerate(names)}
    return {name: pl.col(CATEGORY) if name == CATEGORY else payload[name] for name in supplier.key}


def hash_expressions(parts: list[pl.Expr], row_id: pl.Expr) -> list[pl.Expr]:
    """Return the expressions of two hashes of the key (without a key, of the content) and of a hash of the content.

    Two keys of a file share both hashes only with a negligible probability.
    """
    first, second, content = _SEEDS
    # A field may contain the separator; the lengths of all fields but the last keep the joined text unique.
    lengths = [part.str.len_bytes().cast(pl.String) for part in parts[:-1]]
    key = pl.concat_str(lengths + parts, separator=_KEY_PART) if lengths else parts[0] if parts else row_id
    return [key.hash(first).alias("a"), key.hash(second).alias("b"), row_id.hash(content).alias("r")]


def _concatenate(frame: pl.DataFrame, *parts: pl.Expr | str) -> pl.Series:
    return frame.select(pl.concat_str(list(parts)).alias("line"))["line"]
