"""Changes of the configuration that are applied while the program runs."""

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


async def test_an_interrupted_reload_is_repeated(schemas: str, tmp_path: Path) -> None:
    """R1: a connection that is lost during a reload delays the new version, and does not lose it."""
    async with (
        in_process(tmp_path, schemas, CURRENCY) as (platform, file),
        other_connections(schemas) as (holder, observer),
    ):
        harness = RefdataHarness(platform)
        reloader = _ReloadWorker(load_settings(file, {}), platform.telemetry, platform)
        await harness.send("CURRENCY", NOK)
        await harness.apply()
        write_definitions(file, schemas, redefined(CURRENCY))
        async with holder.transaction():
            await holder.execute("SELECT FROM dictionary_definition FOR UPDATE")
            checking = asyncio.create_task(reloader.check())
            await observer.execute("SELECT pg_terminate_backend($1)", await waiting_for_a_lock(observer))
            with pytest.raises(Transient):
                await checking
        await reloader.check()  # as it does every second
        assert await harness.version("CURRENCY") == 2


async def test_an_invalid_file_is_refused(schemas: str, tmp_path: Path) -> None:
    """R1: an invalid file changes nothing, is logged and sets the metric; a valid one is applied with its log level."""
    async with in_process(tmp_path, schemas, CURRENCY) as (platform, file):
        reloader = _ReloadWorker(load_settings(file, {}), platform.telemetry, platform)
        valid, catalogue = json.loads(file.read_text()), platform.refdata.catalogue

        def is_refused() -> float | None:
            return platform.telemetry.registry.get_sample_value("penstock_config_invalid")

        file.write_text("telemetry: {log_level: loud}")
        with structlog.testing.capture_logs() as logs:
            await reloader.check()
        assert [(entry["event"], entry["code"]) for entry in logs] == [("configuration_refused", "CONFIG_INVALID")]
        assert ([dictionary.section.code for dictionary in catalogue.list_all()], is_refused()) == (["CURRENCY"], 1)
        dictionaries = [*valid["refdata"]["dictionaries"], {"code": "FRESH"}]
        refdata = {**valid["refdata"], "dictionaries": dictionaries}
        file.write_text(json.dumps({**valid, "telemetry": {"log_level": "WARNING"}, "refdata": refdata}))
        before = logging.getLogger().level
        try:
            await reloader.check()
            assert LOG_LEVEL.number == logging.WARNING
        finally:
            LOG_LEVEL.configure("INFO")
            logging.getLogger().setLevel(before)
        assert ([dictionary.section.code for dictionary in catalogue.list_all()], is_refused()) == (
            ["CURRENCY", "FRESH"],
            0,
        )
