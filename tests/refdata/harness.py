"""Harness of refdata: service and applier in this process, on a real database and a real bus."""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
from ruamel.yaml import YAML

from penstock.app.parts import open_refdata
from penstock.kernel.bus import BusMessage, DeliveryPolicy
from penstock.kernel.signals import Resync, Signal
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker
from penstock.refdata.apply.applier import CommandApplier, apply_handler
from penstock.refdata.apply.relay import OutboxRelay
from penstock.refdata.contract import decode_command, make_message_key
from penstock.refdata.model import DictionaryKey, UpdateRecord
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings
from tests.services.kafka import Kafka
from tests.support.settings import settings_document, write_config
from tests.support.types import Json

HERE = Path(__file__).parent
DOCUMENT, OTHER, SCHEMAS = HERE / "document.yaml", HERE / "other.yaml", HERE / "schemas.sql"
_numbers = itertools.count()
OFTEN = {"reconcileEvery": "PT0.2S", "auditEvery": None}


def dictionaries(file: Path) -> list[Json]:
    """Return the dictionaries of a configuration file."""
    found: list[Json] = YAML(typ="safe").load(file)["refdata"]["dictionaries"]
    return found


def refdata_settings(url: str, kafka: Kafka | None = None, **refdata: Any) -> Settings:
    """Return settings with the database of the test, optionally on Kafka, and with a new topic."""
    topic = f"refdata.test.{os.urandom(4).hex()}.{next(_numbers)}"
    known: Json = {
        "kafka": {"commandsTopic": topic},
        "dictionaries": [*dictionaries(DOCUMENT), *dictionaries(OTHER)],
        "tenants": ["acme", "globex", "tenant-a"],
    }
    return Settings.model_validate(settings_document(url, kafka, refdata={**known, **refdata}))


async def create_schemas(url: str) -> None:
    """Create the tables and functions of the dictionaries of both configurations."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(SCHEMAS.read_text())
    finally:
        await connection.close()


class RefdataHarness:
    """Refdata with short methods for tests."""

    def __init__(self, platform: RefdataPlatform) -> None:
        self.platform = platform
        self.db, self.bus, self.refdata = platform.db, platform.bus, platform.refdata
        self.topic = platform.section.kafka.commands_topic

    async def send(self, code: str, *items: Json, tenant: str = "acme", **more: Any) -> UUID:
        """Submit a DELTA as the API does, and return its id."""
        update = await self.refdata.submit(tenant, decode_command(command(code, *items, **more)))
        return update.event_id

    async def publish(self, value: bytes, key: str = "acme:LOOSE") -> None:
        """Publish any message to the commands topic."""
        await self.bus.publish([BusMessage(self.topic, key, value)])

    async def apply(self, *, name: str = "apply", max_attempts: int = 5, max_items: int = 5_000_000) -> int:
        """Apply all messages on the bus, and return their number."""
        policy = DeliveryPolicy(max_attempts=max_attempts)
        async with self.bus.subscribe(self.topic, worker=name, policy=policy) as queue:
            applier = CommandApplier(
                self.db, self.refdata.catalogue, name, max_attempts=max_attempts, max_items=max_items
            )
            telemetry = self.platform.telemetry
            handler = apply_handler(applier, self.platform.metrics, telemetry)
            worker = Worker(queue, handler, telemetry)
            total = 0
            while await self.bus.count_backlog(self.topic):
                total += await worker.drain()
                await queue.wait(0.05)
            return total

    async def relay(self) -> int:
        """Announce waiting versions, and return their number."""
        return await OutboxRelay(self.db, self.platform.signals, self.refdata.notifier, self.platform.telemetry).step()

    async def update(self, event_id: UUID, tenant: str = "acme") -> UpdateRecord:
        return await self.refdata.get_update(tenant, event_id)

    async def items(self, code: str, tenant: str = "acme") -> Json:
        """Return the items that a reader would load, key to payload."""
        target = DictionaryKey(tenant, code)
        loaded = await self.refdata.catalogue.get(target).provider.load_all(self.db, target)
        return {key: msgspec.json.decode(text) for key, text in loaded.items.items()}

    async def version(self, code: str, tenant: str = "acme") -> int:
        target = DictionaryKey(tenant, code)
        return await self.refdata.catalogue.get(target).provider.get_committed_version(self.db, target)

    async def dead(self) -> list[str]:
        """Return the reasons of the dead letters, oldest first."""
        return [letter.reason for letter in await self.bus.read_dead_letters(self.topic)]


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[RefdataHarness]:
    async with open_refdata(settings, Telemetry()) as platform:
        yield RefdataHarness(platform)


def upsert(key: str, payload: Any) -> Json:
    return {"key": key, "op": "UPSERT", "payload": payload}


def delete(key: str) -> Json:
    return {"key": key, "op": "DELETE"}


def command(code: str, *items: Json, event_type: str = "DELTA", **more: Any) -> bytes:
    """Return the body of a command; fields have the names of the JSON."""
    return msgspec.json.encode({"dictCode": code, "eventType": event_type, "items": items, **more})


def chunk(code: str, snapshot_id: UUID, index: int, total: int, *items: Json, **more: Any) -> bytes:
    """Return a chunk of a snapshot."""
    place = {"snapshotId": str(snapshot_id), "chunkIndex": index, "chunksTotal": total}
    return command(code, *items, event_type="SNAPSHOT", **place, **more)


def on_bus(body: bytes, tenant: str = "acme", event_id: UUID | None = None) -> tuple[bytes, str]:
    """Return value and key of a message with a command, for direct writes to the bus."""
    fields = msgspec.json.decode(body)
    value = msgspec.json.encode({**fields, "tenantId": tenant, "eventId": str(event_id or uuid4())})
    return value, make_message_key(tenant, fields["dictCode"])


async def published(harness: RefdataHarness, count: int) -> AsyncIterator[BusMessage]:
    """Yield the first *count* messages on the commands topic."""
    async with harness.bus.subscribe(harness.topic, worker="reader", policy=DeliveryPolicy()) as queue:
        left = count
        while left > 0:
            for delivery in await queue.take(left):
                left -= 1
                yield delivery.message
            await queue.wait(0.05)


async def heard(feed: AsyncIterator[Signal | Resync], count: int) -> AsyncIterator[Signal]:
    """Yield the next *count* signals."""
    while count:
        item = await anext(feed)
        if isinstance(item, Signal):
            count -= 1
            yield item


def environment(url: str, folder: Path, **refdata: Any) -> None:
    document: Json = {"database": {"url": url}, "telemetry": {"log_level": "DEBUG", "log_format": "json"}}
    known = {"dictionaries": [{"code": "LOOSE"}], "tenants": ["acme"], "query": OFTEN, **refdata}
    write_config(folder, {**document, "refdata": known})
