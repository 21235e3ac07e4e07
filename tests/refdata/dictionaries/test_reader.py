"""Reads of the tables of a dictionary: one snapshot, with unique keys."""

import pytest

from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Corrupt
from penstock.refdata import store
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.model import DictionaryKey, VersionStamp
from tests.refdata.harness import RefdataHarness, upsert


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


@pytest.mark.parametrize(
    ("rows", "problem"), [("(null::text, '1'), ('a', '2')", "a null key"), ("('a', '1'), ('a', '2')", "more than once")]
)
async def test_a_load_with_bad_keys_fails(harness: RefdataHarness, rows: str, problem: str) -> None:
    """R3: a null or duplicate k fails the load with a clear error."""
    sql = f"select k, v::jsonb as v from (values {rows}) as t (k, v) where :tenantId <> ''"
    catalogue = DictionaryCatalogue(RefdataSection.model_validate({"dictionaries": [{"code": "BAD", "loadSql": sql}]}))
    target = DictionaryKey("acme", "BAD")
    with pytest.raises(Corrupt, match=problem):
        await catalogue.get(target).provider.load_all(harness.db, target)


async def test_version_and_rows_are_of_one_snapshot(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: a commit during a load is neither in the version nor in the rows of the load."""
    await harness.send("LOOSE", upsert("n", 1))
    await harness.apply()
    target = DictionaryKey("acme", "LOOSE")
    provider = harness.refdata.catalogue.get(target).provider
    read = store.read_stamp

    async def and_then_a_commit(connection: Connection, asked: DictionaryKey) -> tuple[VersionStamp, str | None] | None:
        stamp = await read(connection, asked)
        await harness.send("LOOSE", upsert("n", 2))
        await harness.apply()
        return stamp

    monkeypatch.setattr(store, "read_stamp", and_then_a_commit)
    loaded = await provider.load_all(harness.db, target)
    monkeypatch.undo()
    assert (loaded.version, dict(loaded.items)) == (1, {"n": "1"})
    assert await harness.version("LOOSE") == 2


async def test_a_null_payload_fails_the_load(harness: RefdataHarness) -> None:
    """R3: a null v is rejected."""
    sql = "select :tenantId as k, null::jsonb as v"
    catalogue = DictionaryCatalogue(RefdataSection.model_validate({"dictionaries": [{"code": "BAD", "loadSql": sql}]}))
    with pytest.raises(Corrupt, match="null v"):
        await catalogue.get(DictionaryKey("acme", "BAD")).provider.load_all(harness.db, DictionaryKey("acme", "BAD"))
