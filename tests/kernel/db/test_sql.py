"""SQL files: split by name, with the states of machines filled in."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.kernel.db import sql
from tests.tracking.jobs import JOB

SOURCES = Path(str(files("penstock")))
FILES = sorted(
    str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.sql") if path.parent.name not in ("migrations", "db")
)
TEXT = """
-- name: one
-- The first.
SELECT 1;

-- name: two
SELECT '-- name: no', status FROM job WHERE status IN {job.open};
"""


def test_statements_are_split_by_name() -> None:
    """A file is split at its `-- name:` lines only."""
    assert sql.parse(TEXT, {"job": JOB}) == {
        "one": "-- The first.\nSELECT 1;",
        "two": "SELECT '-- name: no', status FROM job WHERE status IN ('new', 'started');",
    }


def test_a_duplicate_name_is_refused() -> None:
    """Two statements with one name are an error, because one of them would be lost."""
    with pytest.raises(ValueError, match="named twice"):
        sql.parse(TEXT + TEXT, {"job": JOB})


@pytest.mark.parametrize(
    ("body", "filled"),
    [
        ("status = {job.NEW}", "status = 'new'"),
        ("{job.done} {job.to_FAILED} {job.open}", "('started') ('new', 'started') ('new', 'started')"),
        ("'{}'::jsonb || '{a}' || '{\"a\": {}}'", "'{}'::jsonb || '{a}' || '{\"a\": {}}'"),
        ("'{Job.NEW}' '{1.2}' '{job.}'", "'{Job.NEW}' '{1.2}' '{job.}'"),
    ],
)
def test_words_of_machines_are_filled_in_and_other_braces_remain(body: str, filled: str) -> None:
    """`{machine.WORD}` is replaced by the literal of the machine; JSON and arrays in SQL are unchanged."""
    assert sql.fill(body, {"job": JOB}) == filled


@pytest.mark.parametrize("body", ["{jab.NEW}", "{job.NEWER}", "{job.new}"])
def test_an_unknown_machine_or_word_is_an_error(body: str) -> None:
    """An unknown machine or word fails when the file is loaded."""
    with pytest.raises(LookupError):
        sql.fill(body, {"job": JOB})


@pytest.mark.parametrize("file", FILES)
def test_every_statement_has_a_name_and_a_description(file: str) -> None:
    """Every `-- name:` line is read by the loader, and every statement has a comment."""
    text = (SOURCES / file).read_text(encoding="utf-8")
    statements = sql.parse(re.sub(r"\{[a-z]\w*\.\w+\}", "(NULL)", text), {})
    assert text.startswith("-- name: ")
    assert len(statements) == len(re.findall(r"^\s*--\s*name", text, re.MULTILINE)) > 0
    assert [name for name, body in statements.items() if not body.startswith("-- ")] == []


def test_a_file_is_loaded_from_its_package() -> None:
    """`load` reads the file next to the code, also from a wheel."""
    assert set(sql.load("penstock.kernel.states", file="journal.sql")) >= {"append", "history", "tail", "prune"}
