"""R1: dictionaries, tenants and the log level are taken over while all runs: when the file changes, or on SIGHUP."""

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

EVERY = timedelta(seconds=1)


@asynccontextmanager
async def reloading(
    settings: Settings, telemetry: Telemetry, refdata: RefdataPlatform | None = None
) -> AsyncIterator[None]:
    """Take over what can be of a changed configuration, until the end; one that is wrong changes nothing."""
    reloader = _ReloadWorker(settings, telemetry, refdata)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(RuntimeError, ValueError):  # only the main thread hears signals
        loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    try:
        async with run_periodically("configuration", reloader.look, EVERY):
            yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGHUP, lambda: None)  # a process that ends is not ended by it


class _ReloadWorker:
    """Looks at the file now and then, and at once when asked."""

    def __init__(self, settings: Settings, telemetry: Telemetry, refdata: RefdataPlatform | None) -> None:
        self._settings = settings
        self._seen = settings.stamp
        self._health = telemetry.health
        self._dictionaries = _ReloadedDictionaries(refdata) if refdata else None
        self._is_asked = False
        self._wrong = ""
        self._log = structlog.get_logger().bind(file=str(settings.file))

    def ask(self) -> None:
        """SIGHUP: look again even though the file seems the same."""
        self._is_asked = True

    async def look(self) -> None:
        """Take over what changed."""
        stamp = read_stamp(self._settings.file)
        if stamp == self._seen and not self._is_asked:
            return
        self._is_asked = False
        try:
            settings = self._settings.reread()
            wrong = await self._dictionaries.wrong(settings) if self._dictionaries else ""
            if not wrong:
                await self._take_over(settings)
            self._health.set_config_invalid(bool(wrong))
        except Transient:  # the database's trouble, not the file's: look again
            self._is_asked = True
            raise
        except PenstockError as error:
            wrong = ""
            self._health.set_config_invalid(True)
            self._log.error("configuration_refused", code=error.code, error=error.message, kept="the one before")
        if wrong and wrong != self._wrong:
            self._log.error("configuration_refused", code="BAD_SQL", error=wrong, kept="the one before")
        # Tables may be made after the file that names them: so bad statements are tried again, other mistakes are not.
        self._wrong, self._seen = wrong, self._seen if wrong else stamp

    async def _take_over(self, settings: Settings) -> None:
        taken = await self._dictionaries.take_over(settings) if self._dictionaries else {}
        LOG_LEVEL.configure(settings.telemetry.log_level)
        if _fixed(settings) != _fixed(self._settings):
            why = "only refdata.dictionaries, refdata.tenants and telemetry.log_level change while running"
            self._log.warning("restart_needed", why=why)
        self._settings = settings
        self._log.info("configuration_reloaded", log_level=settings.telemetry.log_level, **taken)


class _ReloadedDictionaries:
    """Those of a process of refdata."""

    def __init__(self, platform: RefdataPlatform) -> None:
        self._db = platform.db
        self._catalogue = platform.refdata.catalogue

    async def wrong(self, settings: Settings) -> str:
        """What is wrong with those that are new or changed."""
        known = {one.section.code: one.section for one in self._catalogue.all()}
        new = [one for one in DictionaryCatalogue(settings.refdata).all() if known.get(one.section.code) != one.section]
        wrong = await definitions.check_statements(self._db, new)
        return "; ".join(f"{code}: {error}" for code, error in wrong.items())

    async def take_over(self, settings: Settings) -> dict[str, Any]:
        """Make them the ones in force, and tell which there are."""
        wanted = DictionaryCatalogue(settings.refdata)
        # First the version, then the new way to read: in between the old way is refused, not mislabelled.
        changed = await definitions.register_definitions(self._db, wanted.all(), wanted.tenants)
        self._catalogue.replace(settings.refdata)
        return {"dictionaries": [one.section.code for one in self._catalogue.all()], "redefined": changed}


def _fixed(settings: Settings) -> dict[str, Any]:
    """All that is read once, at the start."""
    return settings.model_dump(exclude={"refdata": {"dictionaries", "tenants"}, "telemetry": {"log_level"}})
