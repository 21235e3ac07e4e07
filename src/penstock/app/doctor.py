"""`penstock doctor`: checks of everything that Penstock needs to run on this machine, without a change."""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.app import factories, platform
from penstock.app.schema import list_platform_migrations
from penstock.ingest.tree.location import make_tree
from penstock.kernel.bus import Bus
from penstock.kernel.config.sections import EMBEDDED
from penstock.kernel.db import datadir, migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import find_binaries
from penstock.kernel.db.locks import hold_file_lock
from penstock.kernel.errors import BadConfig, Conflict, PenstockError, TimedOut
from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.signals import Signals
from penstock.kernel.status import pluralize
from penstock.settings import Settings

_CHECK_TIMEOUT = 15.0
_MIN_FREE_BYTES = 500_000_000
RunCheck = Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check."""

    name: str
    detail: str
    error: PenstockError | None = None

    def as_dict(self) -> dict[str, Any]:
        error = self.error.as_dict() if self.error else None
        return {"name": self.name, "ok": self.error is None, "detail": self.detail, "error": error}


async def diagnose(settings: Settings) -> list[DoctorCheck]:
    """Return the results of all checks for *settings*; a failed check does not stop the others."""
    results = [await _run_check(name, check) for name, check in _make_local_checks(settings).items()]
    async with AsyncExitStack() as stack:
        db = None
        if settings.database.url == EMBEDDED and not (settings.data_dir / "postgres" / "data" / "PG_VERSION").exists():
            results.append(DoctorCheck("database", "embedded PostgreSQL, created at the first start"))
        else:
            try:
                async with asyncio.timeout(_CHECK_TIMEOUT):
                    db = await stack.enter_async_context(platform.open_database(settings))
            except (PenstockError, TimeoutError) as error:
                results.append(_make_failed_check("database", error))
        checks = {**(_make_database_checks(db, settings) if db else {}), **_make_remote_checks(settings)}
        return results + [await _run_check(name, check) for name, check in checks.items()]


def _make_local_checks(settings: Settings) -> dict[str, RunCheck]:
    server = settings.server

    async def check_python() -> str:
        return f"Python {sys.version.split()[0]}"

    async def check_postgres() -> str:
        binaries = find_binaries()
        return f"PostgreSQL {binaries.major} in {binaries.folder}"

    async def check_access() -> str:
        make_authenticator(settings.auth)
        return "with tokens" if settings.auth.jwt else f"without authentication, from this machine only ({server.host})"

    checks: dict[str, RunCheck] = {
        "python": check_python,
        "access": check_access,
        "data directory": lambda: _check_data_dir(settings.data_dir),
    }
    if settings.database.url == EMBEDDED:
        checks["postgres server"] = check_postgres
    for name, port in (("api port", server.port), ("query port", server.query_port)):
        checks[name] = lambda port=port: _check_port(settings, port)  # type: ignore[misc]
    return checks


def _make_database_checks(db: Database, settings: Settings) -> dict[str, RunCheck]:
    async def check_database() -> str:
        return f"PostgreSQL {await db.check()}"

    async def check_schema() -> str:
        return await _check_schema(db, list_platform_migrations(settings))

    return {"database": check_database, "schema": check_schema}


def _make_remote_checks(settings: Settings) -> dict[str, RunCheck]:
    """Return the checks of storage, ingest and separate servers; all other parts use the database."""
    checks: dict[str, RunCheck] = {"storage": lambda: _check_storage(settings)}
    if (root := settings.ingest.root) is not None:
        checks["ingest"] = lambda: _check_ingest_root(settings, root)
    if (kafka := settings.bus.kafka) is not None:
        checks["bus"] = lambda: _check_port_adapter(
            factories.make_kafka(kafka, settings.bus.partitions, None), "Kafka answers"
        )
    if (redis := settings.signals.redis) is not None:
        checks["signals"] = lambda: _check_port_adapter(factories.make_redis(redis), "Redis answers")
    if settings.refdata.redis.nodes:
        checks["refdata signals"] = lambda: _check_port_adapter(factories.make_refdata_redis(settings), "Redis answers")
    for name, opened, migrations in platform.list_schemas(settings)[1:]:
        checks[name] = lambda opened=opened, migrations=migrations: _check_database(opened, migrations)  # type: ignore[misc]
    return checks


async def _check_database(
    opened: AbstractAsyncContextManager[Database], migrations: Sequence[migrate.Migration]
) -> str:
    async with opened as db:
        return f"PostgreSQL {await db.check()}, {await _check_schema(db, migrations)}"


async def _check_schema(db: Database, migrations: Sequence[migrate.Migration]) -> str:
    plan = await migrate.plan(db, migrations)
    if plan.pending:
        await migrate.check_rights(db)
    status = f"{pluralize(len(plan.pending), 'migration')} to apply" if plan.pending else "up to date"
    return f"{status}; applied by a newer release: {', '.join(plan.newer)}" if plan.newer else status


async def _check_port_adapter(port: Bus | Signals, detail: str) -> str:
    try:
        await port.check()
    finally:
        await port.close()
    return detail


async def _check_data_dir(folder: Path) -> str:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        hint = "choose another folder with --data-dir, or change the owner of this one"
        raise BadConfig("DATA_DIR_UNUSABLE", f"cannot write to {existing}", hint=hint)
    datadir.check_format(folder)
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        hint = "free some space, or choose a folder on another disk with --data-dir"
        raise BadConfig("DISK_FULL", f"only {free // 2**20} MiB are free at {existing}", hint=hint)
    return f"{folder}, {free / 2**30:.1f} GiB free"


async def _check_port(settings: Settings, port: int) -> str:
    if port == 0:
        return "a free port is chosen at the start"
    try:
        family = socket.AF_INET6 if ":" in settings.server.host else socket.AF_INET
        with socket.create_server((settings.server.host, port), family=family):
            return f"{port} is free"
    except OSError as error:
        if _is_running(settings.data_dir):
            return f"{port} is in use by the running Penstock of this data directory"
        hint = "stop the program that uses the port, or choose another port"
        raise Conflict("PORT_IN_USE", f"cannot listen on {port}: {error.strerror}", hint=hint) from error


async def _check_storage(settings: Settings) -> str:
    if settings.storage.url is None and not (settings.data_dir / "objects").exists():
        return "local folder, created at the first start"
    await factories.make_storage(settings).check()
    return settings.storage.url or str(settings.data_dir / "objects")


async def _check_ingest_root(settings: Settings, root: str) -> str:
    def read() -> str:
        with closing(make_tree(root, settings.ingest)) as tree:
            return f"{root}, {len(tree.list_suppliers())} suppliers"

    return await asyncio.to_thread(read)


def _is_running(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    try:
        with hold_file_lock(folder / "lock", "doctor"):
            return False
    except Conflict:
        return True


async def _run_check(name: str, check: RunCheck) -> DoctorCheck:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT):
            return DoctorCheck(name, await check())
    except (PenstockError, TimeoutError) as error:
        return _make_failed_check(name, error)


def _make_failed_check(name: str, error: PenstockError | TimeoutError) -> DoctorCheck:
    if isinstance(error, PenstockError):
        return DoctorCheck(name, error.message, error)
    hint = "check that the server is reachable from this machine"
    timed_out = TimedOut("TIMED_OUT", f"no answer within {_CHECK_TIMEOUT:g} s", hint=hint)
    return DoctorCheck(name, timed_out.message, timed_out)
