"""A changed loadSql is a new version: registration of definitions, and checks of their statements."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.errors import PenstockError
from penstock.refdata.apply import definitions
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.model import DictionaryKey
from penstock.settings import load_settings
from tests.refdata.definitions_in_process import (
    COUNTRY,
    CURRENCY,
    NOK,
    TENANTS,
    in_process,
    other_connections,
    redefined,
    waiting_for_a_lock,
    write_definitions,
)
from tests.refdata.harness import RefdataHarness, upsert


async def test_a_first_definition_makes_no_version(schemas: str, tmp_path: Path) -> None:
    """R1: a dictionary that is registered for the first time gets no new version, also if it has versions already."""
    async with in_process(tmp_path, schemas, CURRENCY) as (platform, _):
        harness = RefdataHarness(platform)
        await harness.send("CURRENCY", NOK)
        await harness.apply()
        await harness.db.execute("DELETE FROM dictionary_definition")
        assert await definitions.register_definitions(harness.db, harness.refdata.catalogue.list_all()) == 0
        assert await harness.version("CURRENCY") == 1


async def test_many_registrations_at_once_bump_once(schemas: str, tmp_path: Path) -> None:
    """R1: eight concurrent registrations make one version, and lose none."""
    async with in_process(tmp_path, schemas, CURRENCY, COUNTRY) as (platform, file):
        harness = RefdataHarness(platform)
        await harness.send("CURRENCY", NOK)
        await harness.apply()
        write_definitions(file, schemas, redefined(CURRENCY), COUNTRY)
        known = DictionaryCatalogue(load_settings(file, {}).refdata).list_all()
        async with Database.open(schemas, size=8) as db:
            changed = await asyncio.gather(*(definitions.register_definitions(db, known) for _ in range(8)))
        assert sorted(changed) == [0] * 7 + [1]
        assert await harness.version("CURRENCY") == 2


async def test_a_registration_locks_in_the_appliers_order(schemas: str, tmp_path: Path) -> None:
    """R11: a change of two dictionaries cannot deadlock with an applier that locks several."""
    async with (
        in_process(tmp_path, schemas, CURRENCY, COUNTRY) as (platform, file),
        other_connections(schemas) as (applier, looker),
    ):
        harness = RefdataHarness(platform)
        for tenant in TENANTS:
            await harness.send("CURRENCY", NOK, tenant=tenant)
            await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}), tenant=tenant)
        await harness.apply()
        write_definitions(file, schemas, redefined(CURRENCY), redefined(COUNTRY))
        lock = "SELECT FROM dictionary_meta WHERE tenant_id = $1 AND dict_code = $2 FOR UPDATE"
        await applier.execute("SET deadlock_timeout = '1min'")  # so that the other transaction is the victim
        async with applier.transaction():
            await applier.execute(lock, "acme", "CURRENCY")
            known = DictionaryCatalogue(load_settings(file, {}).refdata).list_all()
            registering = asyncio.create_task(definitions.register_definitions(harness.db, known))
            await waiting_for_a_lock(looker)
            await applier.execute(lock, "globex", "COUNTRY")  # the next in an applier's order
        assert await registering == 2


async def test_two_ways_to_read_never_have_one_version(schemas: str, tmp_path: Path) -> None:
    """R1: a process with the old configuration must not return its items under the version of the new one."""
    async with in_process(tmp_path, schemas, CURRENCY) as (platform, file):
        harness, target = RefdataHarness(platform), DictionaryKey("acme", "CURRENCY")
        await harness.send("CURRENCY", NOK)
        await harness.apply()
        write_definitions(
            file, schemas, {**CURRENCY, "loadSql": CURRENCY["loadSql"].replace("ccy as k", "lower(ccy) as k")}
        )
        new = DictionaryCatalogue(load_settings(file, {}).refdata)
        assert await definitions.register_definitions(harness.db, new.list_all()) == 1
        loaded = await new.get(target).provider.load_all(harness.db, target)
        assert (loaded.version, set(loaded.items)) == (2, {"nok"})
        with contextlib.suppress(PenstockError):  # to say that it cannot know would do
            late = await harness.refdata.catalogue.get(target).provider.load_all(harness.db, target)
            assert late.version != loaded.version or late.items == loaded.items


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_statements_are_tried_before_they_are_needed(harness: RefdataHarness) -> None:
    """R1, R3: a statement that PostgreSQL rejects is named with its setting, also a loadSql without k and v."""
    good = harness.refdata.catalogue.list_all()
    assert await definitions.check_statements(harness.db, good) == {}
    bad = [
        {"code": "NOWHERE", "loadSql": "select a as k, b as v from nowhere where t = :tenantId"},
        {"code": "KEYLESS", "loadSql": "select :tenantId as v"},
    ]
    wrong = await definitions.check_statements(
        harness.db, DictionaryCatalogue(RefdataSection.model_validate({"dictionaries": bad})).list_all()
    )
    assert set(wrong) == {"NOWHERE", "KEYLESS"}
    assert wrong["NOWHERE"].startswith("loadSql: ")


async def test_a_read_only_dictionary_has_versions(harness: RefdataHarness) -> None:
    """R1: a changed loadSql of a read-only dictionary is a new version, for configured tenants and those with data."""
    brand = DictionaryKey("acme", "BRAND")
    assert (await harness.refdata.catalogue.get(brand).provider.load_all(harness.db, brand)).version == 0
    known = harness.refdata.catalogue.list_all()
    assert await definitions.register_definitions(harness.db, known, ["globex"]) == 0
    other = {
        "code": "BRAND",
        "loadSql": "select label as k, to_jsonb(id) as v from acme.brand where :tenantId = 'acme'",
    }
    changed = DictionaryCatalogue(RefdataSection.model_validate({"dictionaries": [other]}))
    assert await definitions.register_definitions(harness.db, changed.list_all(), ["globex"]) == 1
    loaded = await changed.get(brand).provider.load_all(harness.db, brand)
    assert (loaded.version, set(loaded.items)) == (1, {"Anvil", "Rocket"})
    assert await harness.version("BRAND", "globex") == 1
