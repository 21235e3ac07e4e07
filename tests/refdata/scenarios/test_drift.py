"""What is told of dictionaries whose tables others change, or which cannot work as they are configured."""

import pytest

from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Corrupt
from penstock.refdata import store
from penstock.refdata.apply import definitions
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import Catalogue
from penstock.refdata.maintenance import DriftWatch
from penstock.refdata.model import Dict, Mark
from tests.refdata.harness import RefdataHarness, upsert

DRIFTS = 'penstock_refdata_drifts_total{dict_code="COUNTRY"}'


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_a_change_past_us_is_told_and_changes_nothing(harness: RefdataHarness) -> None:
    """R5: driftCheckSql finds what was written without a version; versions and reads stay as they are."""
    watch = DriftWatch(harness.db, harness.platform.metrics)
    known = harness.refdata.catalogue.all()
    await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}))
    await harness.apply()
    assert await watch.look(known) == 0  # the first look has nothing to compare with
    await harness.send("COUNTRY", upsert("NO", {"name": "Noreg"}))
    await harness.apply()
    assert await watch.look(known) == 0  # a change of ours has a version
    await harness.db.execute("UPDATE mdm_country SET updated_at_epoch = updated_at_epoch + 1")
    assert await watch.look(known) == 1
    assert await watch.look(known) == 0  # told once
    assert await harness.version("COUNTRY") == 2
    assert f"{DRIFTS} 1.0" in harness.platform.telemetry.exposition().decode()


async def test_a_drift_check_that_fails_stops_nothing(harness: RefdataHarness) -> None:
    """R5: it is diagnostics: a statement that cannot be run is logged, the next one is asked."""
    watch = DriftWatch(harness.db, harness.platform.metrics)
    load, drift = "select :tenantId as k, '1'::jsonb as v", "select length(:tenantId) / 0"
    broken = {"code": "COUNTRY", "loadSql": load, "driftCheckSql": drift}
    await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}))
    await harness.apply()
    assert await watch.look(Catalogue(RefdataSection.model_validate({"dictionaries": [broken]})).all()) == 0


async def test_statements_are_tried_before_they_are_needed(harness: RefdataHarness) -> None:
    """R1, R3: a statement PostgreSQL would not take is named with its key, also a loadSql without k and v."""
    good = harness.refdata.catalogue.all()
    assert await definitions.check(harness.db, good) == {}
    bad = [
        {"code": "NOWHERE", "loadSql": "select a as k, b as v from nowhere where t = :tenantId"},
        {"code": "KEYLESS", "loadSql": "select :tenantId as v"},
    ]
    wrong = await definitions.check(harness.db, Catalogue(RefdataSection.model_validate({"dictionaries": bad})).all())
    assert set(wrong) == {"NOWHERE", "KEYLESS"}
    assert wrong["NOWHERE"].startswith("loadSql: ")


@pytest.mark.parametrize(
    ("rows", "said"), [("(null::text, '1'), ('a', '2')", "a null key"), ("('a', '1'), ('a', '2')", "more than once")]
)
async def test_a_load_with_bad_keys_fails(harness: RefdataHarness, rows: str, said: str) -> None:
    """R3: null or duplicate k fails the load clearly."""
    sql = f"select k, v::jsonb as v from (values {rows}) as t (k, v) where :tenantId <> ''"
    catalogue = Catalogue(RefdataSection.model_validate({"dictionaries": [{"code": "BAD", "loadSql": sql}]}))
    target = Dict("acme", "BAD")
    with pytest.raises(Corrupt, match=said):
        await catalogue.get(target).provider.load_all(harness.db, target)


async def test_version_and_rows_are_of_one_snapshot(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: what is committed while a dictionary is being loaded is in neither the version nor the rows."""
    await harness.send("LOOSE", upsert("n", 1))
    await harness.apply()
    target = Dict("acme", "LOOSE")
    provider = harness.refdata.catalogue.get(target).provider
    seen = store.standing

    async def and_then_a_commit(connection: Connection, asked: Dict) -> tuple[Mark, str | None] | None:
        standing = await seen(connection, asked)
        await harness.send("LOOSE", upsert("n", 2))
        await harness.apply()
        return standing

    monkeypatch.setattr(store, "standing", and_then_a_commit)
    loaded = await provider.load_all(harness.db, target)
    monkeypatch.undo()
    assert (loaded.version, dict(loaded.items)) == (1, {"n": "1"})
    assert await harness.version("LOOSE") == 2
