"""What would keep Penstock from running here: each dependency asked, nothing changed."""

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
from penstock.app.schema import known_migrations
from penstock.ingest.tree.location import make_tree
from penstock.kernel.bus import Bus
from penstock.kernel.config.sections import EMBEDDED
from penstock.kernel.db import datadir, migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import find_binaries
from penstock.kernel.db.locks import file_lock
from penstock.kernel.errors import BadConfig, Conflict, PenstockError, TimedOut
from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.signals import Signals
from penstock.settings import Settings

_PATIENCE = 15.0
_ROOM = 500_000_000
Look = Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class DoctorCheck:
    """What one look told."""

    name: str
    detail: str
    error: PenstockError | None = None

    def as_dict(self) -> dict[str, Any]:
        error = self.error.as_dict() if self.error else None
        return {"name": self.name, "ok": self.error is None, "detail": self.detail, "error": error}


async def diagnose(settings: Settings) -> list[DoctorCheck]:
    """Look at everything the settings name; a look that fails says why and the others go on."""
    findings = [await _look(name, look) for name, look in _local_looks(settings).items()]
    async with AsyncExitStack() as stack:
        db = None
        if settings.database.url == EMBEDDED and not (settings.data_dir / "postgres" / "data" / "PG_VERSION").exists():
            findings.append(DoctorCheck("database", "embedded, made at the first start"))
        else:
            try:
                async with asyncio.timeout(_PATIENCE):
                    db = await stack.enter_async_context(platform.open_database(settings))
            except (PenstockError, TimeoutError) as error:
                findings.append(_failed("database", error))
        looks = {**(_database_looks(db, settings) if db else {}), **_remote_looks(settings)}
        return findings + [await _look(name, look) for name, look in looks.items()]


def _local_looks(settings: Settings) -> dict[str, Look]:
    server = settings.server

    async def python() -> str:
        return f"Python {sys.version.split()[0]}"

    async def postgres() -> str:
        binaries = find_binaries()
        return f"PostgreSQL {binaries.major} in {binaries.folder}"

    async def access() -> str:
        make_authenticator(settings.auth)
        return "tokens" if settings.auth.jwt else f"none needed, on {server.host} only"

    looks: dict[str, Look] = {
        "python": python,
        "access": access,
        "data directory": lambda: _data_dir(settings.data_dir),
    }
    if settings.database.url == EMBEDDED:
        looks["postgres server"] = postgres
    for name, port in (("api port", server.port), ("query port", server.query_port)):
        looks[name] = lambda port=port: _port(settings, port)  # type: ignore[misc]
    return looks


def _database_looks(db: Database, settings: Settings) -> dict[str, Look]:
    async def database() -> str:
        return f"PostgreSQL {await db.check()}"

    async def schema() -> str:
        return await _schema(db, known_migrations(settings))

    return {"database": database, "schema": schema}


def _remote_looks(settings: Settings) -> dict[str, Look]:
    """What stands on servers of its own; the rest stands on the database."""
    looks: dict[str, Look] = {"storage": lambda: _storage(settings)}
    if (root := settings.ingest.root) is not None:
        looks["ingest"] = lambda: _tree(settings, root)
    if (kafka := settings.bus.kafka) is not None:
        looks["bus"] = lambda: _checked(factories.make_kafka(kafka, settings.bus.partitions, None), "Kafka")
    if (redis := settings.signals.redis) is not None:
        looks["signals"] = lambda: _checked(factories.make_redis(redis), "Redis")
    if settings.refdata.redis.nodes:
        looks["refdata signals"] = lambda: _checked(factories.make_refdata_redis(settings), "Redis")
    for name, opened, known in platform.schemas(settings)[1:]:
        looks[name] = lambda opened=opened, known=known: _database(opened, known)  # type: ignore[misc]
    return looks


async def _database(opened: AbstractAsyncContextManager[Database], known: Sequence[migrate.Migration]) -> str:
    async with opened as db:
        return f"PostgreSQL {await db.check()}, {await _schema(db, known)}"


async def _schema(db: Database, known: Sequence[migrate.Migration]) -> str:
    plan = await migrate.plan(db, known)
    found = f"{len(plan.pending)} migrations to apply" if plan.pending else "up to date"
    return f"{found}; of a newer release: {', '.join(plan.newer)}" if plan.newer else found


async def _checked(port: Bus | Signals, name: str) -> str:
    try:
        await port.check()
    finally:
        await port.close()
    return name


async def _data_dir(folder: Path) -> str:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        hint = "choose another --data-dir, or change its owner"
        raise BadConfig("DATA_DIR_UNUSABLE", f"cannot write to {existing}", hint=hint)
    datadir.check_format(folder)
    free = shutil.disk_usage(existing).free
    if free < _ROOM:
        raise BadConfig("DISK_FULL", f"only {free // 1_000_000} MB are free at {existing}", hint="make room")
    return f"{folder}, {free // 1_000_000_000} GB free"


async def _port(settings: Settings, port: int) -> str:
    if port == 0:
        return "a free one"
    try:
        family = socket.AF_INET6 if ":" in settings.server.host else socket.AF_INET
        with socket.create_server((settings.server.host, port), family=family):
            return f"{port} is free"
    except OSError as error:
        if _is_running(settings.data_dir):
            return f"{port} is in use, by the Penstock that runs here"
        hint = "stop what uses it, or choose another port"
        raise Conflict("PORT_IN_USE", f"cannot listen on {port}: {error.strerror}", hint=hint) from error


async def _storage(settings: Settings) -> str:
    if settings.storage.url is None and not (settings.data_dir / "objects").exists():
        return "a folder, made at the first start"
    await factories.make_storage(settings).check()
    return settings.storage.url or str(settings.data_dir / "objects")


async def _tree(settings: Settings, root: str) -> str:
    def look() -> str:
        with closing(make_tree(root, settings.ingest)) as tree:
            return f"{root}, {len(tree.list_suppliers())} suppliers"

    return await asyncio.to_thread(look)


def _is_running(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    try:
        with file_lock(folder / "lock", "doctor"):
            return False
    except Conflict:
        return True


async def _look(name: str, look: Look) -> DoctorCheck:
    try:
        async with asyncio.timeout(_PATIENCE):
            return DoctorCheck(name, await look())
    except (PenstockError, TimeoutError) as error:
        return _failed(name, error)


def _failed(name: str, error: PenstockError | TimeoutError) -> DoctorCheck:
    if isinstance(error, PenstockError):
        return DoctorCheck(name, error.message, error)
    late = TimedOut("TIMED_OUT", f"no answer within {_PATIENCE:g} s", hint="check that it is reachable from here")
    return DoctorCheck(name, late.message, late)
