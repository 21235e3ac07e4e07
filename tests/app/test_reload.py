"""What is taken over of a configuration that changes while the program runs."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
import structlog.testing

from penstock.app.reload import _ReloadWorker
from penstock.kernel.errors import Transient
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.settings import load_settings
from tests.refdata.definitions_in_process import (
    CURRENCY,
    NOK,
    in_process,
    other_connections,
    redefined,
    waiting_for_a_lock,
    write_definitions,
)
from tests.refdata.harness import RefdataHarness, create_schemas


@pytest.fixture
async def schemas(database_url: str) -> str:
    await create_schemas(database_url)
    return database_url


async def test_a_reload_the_database_interrupted_is_made_up_for(schemas: str, tmp_path: Path) -> None:
    """R1: a connection lost in the middle of a take-over delays the new version, it does not lose it."""
    async with (
        in_process(tmp_path, schemas, CURRENCY) as (platform, file),
        other_connections(schemas) as (holder, looker),
    ):
        harness = RefdataHarness(platform)
        reloader = _ReloadWorker(load_settings(file, {}), platform.telemetry, platform)
        await harness.send("CURRENCY", NOK)
        await harness.apply()
        write_definitions(file, schemas, redefined(CURRENCY))
        async with holder.transaction():
            await holder.execute("SELECT FROM dictionary_definition FOR UPDATE")
            looking = asyncio.create_task(reloader.look())
            await looker.execute("SELECT pg_terminate_backend($1)", await waiting_for_a_lock(looker))
            with pytest.raises(Transient):
                await looking
        await reloader.look()  # as it does every second
        assert await harness.version("CURRENCY") == 2


async def test_a_wrong_file_is_refused_in_process(schemas: str, tmp_path: Path) -> None:
    """R1: a wrong file changes nothing, is logged and counted; a good one is taken over with its log level."""
    async with in_process(tmp_path, schemas, CURRENCY) as (platform, file):
        reloader = _ReloadWorker(load_settings(file, {}), platform.telemetry, platform)
        good, catalogue = json.loads(file.read_text()), platform.refdata.catalogue

        def is_refused() -> float | None:
            return platform.telemetry.registry.get_sample_value("penstock_config_invalid")

        file.write_text("telemetry: {log_level: loud}")
        with structlog.testing.capture_logs() as logged:
            await reloader.look()
        assert [(entry["event"], entry["kept"]) for entry in logged] == [("configuration_refused", "the one before")]
        assert ([one.section.code for one in catalogue.all()], is_refused()) == (["CURRENCY"], 1)
        dictionaries = [*good["refdata"]["dictionaries"], {"code": "FRESH"}]
        refdata = {**good["refdata"], "dictionaries": dictionaries}
        file.write_text(json.dumps({**good, "telemetry": {"log_level": "WARNING"}, "refdata": refdata}))
        before = logging.getLogger().level
        try:
            await reloader.look()
            assert LOG_LEVEL.number == logging.WARNING
        finally:
            LOG_LEVEL.configure("INFO")
            logging.getLogger().setLevel(before)
        assert ([one.section.code for one in catalogue.all()], is_refused()) == (["CURRENCY", "FRESH"], 0)
