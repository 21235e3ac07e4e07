"""Tests of the lines of facts in canonical JSON, and of their keys."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ingest.transform import ndjson as lines
from tests.ingest.transform import reference
from tests.ingest.transform.pipeline_runs import processed, supplier_of

# A file with a NUL in it is no text, and refused.
_any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(_any_text.filter(bool), _any_text, min_size=1, max_size=6),
    st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=1),
)
@example({"\U0001f600": "a", "\uffee": "b", 'quo"te': "\x01\x1f\x7f", "\u2028": '\\/"\b\f\n\r\t'}, [0])
def test_a_row_id_is_the_hash_of_canonical_json(texts: dict[str, str], numbers: list[int]) -> None:
    """I8: row_id is the sha256 of the payload in the form of RFC 8785, for any content."""
    payload: dict[str, Any] = {name: reference.strip_cell(text) or None for name, text in texts.items()}
    payload |= {f"number {place}": number for place, number in enumerate(numbers)}
    columns = {name: {"from": f"c{place}"} for place, name in enumerate(texts)}
    columns |= {f"number {place}": {"from": f"n{place}", "type": "integer"} for place in range(len(numbers))}
    # A file of little more than control characters is no text, so there is some.
    header = [*(str(column["from"]) for column in columns.values()), "text" * 10_000]
    with tempfile.TemporaryDirectory() as folder:
        output = processed([header, [*texts.values(), *map(str, numbers)]], supplier_of(columns), Path(folder))
        line = output.facts.path.read_bytes()
    canonical = rfc8785.dumps(payload)
    assert line.endswith(b',"row_number":2,"payload":' + canonical + b"}\n")
    assert f'"row_id":"{hashlib.sha256(canonical).hexdigest()}"'.encode() in line


@given(*(st.lists(st.text("a1\x1f", max_size=4), min_size=3, max_size=3) for _ in range(2)))
@example(["a\x1f", "b", ""], ["a", "\x1fb", ""])
def test_keys_of_different_fields_differ(first: list[str], second: list[str]) -> None:
    """I18, I19: keys with different fields have different hashes, for any content."""
    keys = pl.DataFrame([first, second], schema=["x", "y", "z"], orient="row")
    hashes = keys.select(lines.hash_expressions([pl.col("x"), pl.col("y"), pl.col("z")], pl.lit("")))
    assert (hashes.row(0) == hashes.row(1)) == (first == second)
