"""R1: reload of dictionaries, tenants and the log level without a restart: when the file changes, and on SIGHUP."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.apply import definitions
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings, read_stamp

CHECK_INTERVAL = timedelta(seconds=1)


@asynccontextmanager
async def reload_configuration(
    settings: Settings, telemetry: Telemetry, refdata: RefdataPlatform | None = None
) -> AsyncIterator[None]:
    """Apply changes of the configuration until the end of the block; an invalid configuration changes nothing."""
    reloader = _ReloadWorker(settings, telemetry, refdata)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(RuntimeError, ValueError):  # only the main thread can handle signals
        loop.add_signal_handler(signal.SIGHUP, reloader.request_reload)
    try:
        async with run_periodically("configuration", reloader.check, CHECK_INTERVAL):
            yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGHUP, lambda: None)  # SIGHUP must not kill a process that shuts down


class _ReloadWorker:
    """Checks the file periodically, and after a request even if the file seems unchanged."""

    def __init__(self, settings: Settings, telemetry: Telemetry, refdata: RefdataPlatform | None) -> None:
        self._settings = settings
        self._stamp = settings.stamp
        self._health = telemetry.health
        self._dictionaries = _ReloadedDictionaries(refdata) if refdata else None
        self._is_requested = False
        self._problem = ""
        self._log = structlog.get_logger().bind(file=str(settings.file))

    def request_reload(self) -> None:
        """Request a reload with the next check, as SIGHUP does."""
        self._is_requested = True

    async def check(self) -> None:
        """Apply the configuration if it has changed or if a reload is requested."""
        stamp = read_stamp(self._settings.file)
        if stamp == self._stamp and not self._is_requested:
            return
        self._is_requested = False
        try:
            settings = self._settings.reread()
            problem = await self._dictionaries.find_problem(settings) if self._dictionaries else ""
            if not problem:
                await self._apply(settings)
            self._health.set_config_invalid(bool(problem))
        except Transient:  # an error of the database, not of the file: try again
            self._is_requested = True
            raise
        except PenstockError as error:
            problem = ""
            self._health.set_config_invalid(True)
            self._log.error("configuration_refused", code=error.code, error=error.message)
        if problem and problem != self._problem:
            self._log.error("configuration_refused", code="BAD_SQL", error=problem)
        # Tables may be created after the file that uses them, so failed statements are tried again, other errors not.
        self._problem, self._stamp = problem, self._stamp if problem else stamp

    async def _apply(self, settings: Settings) -> None:
        applied = await self._dictionaries.apply(settings) if self._dictionaries else {}
        LOG_LEVEL.configure(settings.telemetry.log_level)
        if _select_fixed_settings(settings) != _select_fixed_settings(self._settings):
            reason = "only refdata.dictionaries, refdata.tenants and telemetry.log_level are applied without a restart"
            self._log.warning("restart_needed", reason=reason)
        self._settings = settings
        self._log.info("configuration_reloaded", log_level=settings.telemetry.log_level, **applied)


class _ReloadedDictionaries:
    """The dictionaries of a process of refdata."""

    def __init__(self, platform: RefdataPlatform) -> None:
        self._db = platform.db
        self._catalogue = platform.refdata.catalogue

    async def find_problem(self, settings: Settings) -> str:
        """Return the errors of new or changed dictionaries, or an empty text."""
        present = {dictionary.section.code: dictionary.section for dictionary in self._catalogue.list_all()}
        changed = [
            dictionary
            for dictionary in DictionaryCatalogue(settings.refdata).list_all()
            if present.get(dictionary.section.code) != dictionary.section
        ]
        errors = await definitions.check_statements(self._db, changed)
        return "; ".join(f"{code}: {error}" for code, error in errors.items())

    async def apply(self, settings: Settings) -> dict[str, Any]:
        """Make the dictionaries of *settings* the active ones, and return their codes for the log."""
        catalogue = DictionaryCatalogue(settings.refdata)
        # First the version, then the new loadSql: in between, reads with the old loadSql fail, but never return data
        # under the wrong version.
        changed = await definitions.register_definitions(self._db, catalogue.list_all(), catalogue.tenants)
        self._catalogue.replace(settings.refdata)
        codes = [dictionary.section.code for dictionary in self._catalogue.list_all()]
        return {"dictionaries": codes, "redefined": changed}


def _select_fixed_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are read only at the start."""
    return settings.model_dump(exclude={"refdata": {"dictionaries", "tenants"}, "telemetry": {"log_level"}})
