"""R1: a new dictionary is configuration only, taken over while everything runs: when the file changes, or on SIGHUP."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import structlog

from penstock.app import RefdataPlatform
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.periodic import repeating
from penstock.refdata import definitions
from penstock.refdata.catalogue import Catalogue
from penstock.settings import Settings, stamp_of

EVERY = timedelta(seconds=1)


@asynccontextmanager
async def reloading(platform: RefdataPlatform) -> AsyncIterator[None]:
    """Take over the dictionaries of a changed configuration, until the end; one that is wrong changes nothing."""
    reloader = _Reloader(platform)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(RuntimeError, ValueError):  # only the main thread hears signals
        loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    try:
        async with repeating("configuration", reloader.look, EVERY):
            yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGHUP)


class _Reloader:
    """Looks at the file now and then, and at once when asked."""

    def __init__(self, platform: RefdataPlatform) -> None:
        self._platform = platform
        self._settings = platform.settings
        self._seen = platform.settings.stamp
        self._is_asked = False
        self._wrong = ""
        self._log = structlog.get_logger().bind(file=str(platform.settings.file))

    def ask(self) -> None:
        """SIGHUP: look again even though the file seems the same."""
        self._is_asked = True

    async def look(self) -> None:
        """Take over what changed."""
        stamp = stamp_of(self._settings.file)
        if stamp == self._seen and not self._is_asked:
            return
        self._is_asked = False
        try:
            settings = self._settings.reread()
            wrong = await self._wrong_statements(settings)
            if not wrong:
                await self._take_over(settings)
        except Transient:  # the database's trouble, not the file's: look again
            self._is_asked = True
            raise
        except PenstockError as error:
            wrong = ""
            self._log.error("configuration_refused", code=error.code, error=error.message, kept="the one before")
        if wrong and wrong != self._wrong:
            self._log.error("configuration_refused", code="BAD_SQL", error=wrong, kept="the one before")
        # Tables may be made after the file that names them: so bad statements are tried again, other mistakes are not.
        self._wrong, self._seen = wrong, self._seen if wrong else stamp

    async def _wrong_statements(self, settings: Settings) -> str:
        """What is wrong with the dictionaries that are new or changed."""
        known = {one.section.code: one.section for one in self._platform.refdata.catalogue.all()}
        new = [one for one in Catalogue(settings.refdata).all() if known.get(one.section.code) != one.section]
        wrong = await definitions.check(self._platform.db, new)
        return "; ".join(f"{code}: {error}" for code, error in wrong.items())

    async def _take_over(self, settings: Settings) -> None:
        refdata, db = self._platform.refdata, self._platform.db
        wanted = Catalogue(settings.refdata)
        # First the version, then the new way to read: in between the old way is refused, not mislabelled.
        changed = await definitions.register(db, wanted.all(), wanted.tenants)
        refdata.catalogue.replace(settings.refdata)
        if _fixed(settings) != _fixed(self._settings):
            self._log.warning("restart_needed", why="only refdata.dictionaries and .tenants change while running")
        self._settings = settings
        codes = [one.section.code for one in refdata.catalogue.all()]
        self._log.info("configuration_reloaded", dictionaries=codes, redefined=changed)


def _fixed(settings: Settings) -> dict[str, Any]:
    """All that is read once, at the start."""
    return settings.model_dump(exclude={"refdata": {"dictionaries", "tenants"}})
