"""What DELTAs take on their way from the bus into PostgreSQL, by partitions and by processes that apply them."""

import asyncio
import itertools
import os
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.capacity_place import PER_THOUSAND, Measurements, Place, Spent, figures
from benchmarks.harness import Bench
from benchmarks.harvest_place import fresh_database
from benchmarks.kernel import KAFKA
from benchmarks.pods import PROGRAM, written
from benchmarks.servers import Served, processor_seconds, started
from penstock.app.parts import open_refdata
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.contract import Command, CommandItem, CommandSource, EventType
from penstock.refdata.model import CommandEvent, DictionaryKey
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import Settings

TENANTS, PUBLISHED_AT_ONCE, KEYS = 64, 500, 100_000
WAYS = ((1, 1), (4, 1), (16, 1), (16, 2))  # partitions of the topic, and processes of apply
CODE = "RATES"
WAITING = "SELECT count(*) FROM outbox_event WHERE NOT published"
LOOK = 0.02
_TRIED, _AT_ONCE = 20, 0.5
_VERSIONS = "SELECT coalesce(sum(version), 0) FROM dictionary_meta"
_COLUMNS = {"seen": "events/s", "apply": "ms for 1,000", "PostgreSQL": "ms for 1,000", "message": "bytes"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Applied:
    """What so many events took: of PostgreSQL, of the roles in ms for a thousand, and the bytes of a message."""

    events: int
    seconds: float
    spent: Spent
    apply: float
    relay: float
    message: float


def benches(place: Place) -> list[Bench]:
    """Return apply by partitions and processes, on the Kafka that is named; nothing where none is."""
    address = os.environ.get(KAFKA)
    if address is None:
        place.session.leave_out("Kafka", f"{KAFKA} names none")
        return []
    return [
        bench
        for way in WAYS
        for bench in figures(
            partial(_by_kafka, place, address, *way), {_name(*way) + column: unit for column, unit in _COLUMNS.items()}
        )
    ]


def _name(partitions: int, processes: int) -> str:
    many = "" if partitions == 1 else "s"
    return f"kafka: {partitions} partition{many}, {processes} x apply: "


async def _by_kafka(place: Place, address: str, partitions: int, processes: int) -> Measurements:
    bus = {"partitions": partitions, "kafka": {"bootstrap": address}}
    async with fresh_database(await place.url()) as url:
        result = await deltas(place, url, place.sizes.events, processes=processes, bus=bus)
    found = {"seen": result.events / result.seconds, "apply": result.apply, "message": result.message}
    found["PostgreSQL"] = result.spent.for_each(result.events)["PostgreSQL"]
    return {_name(partitions, processes) + column: value for column, value in found.items()}


async def deltas(
    place: Place, url: str, count: int, *, processes: int = 1, bus: dict[str, Any] | None = None
) -> Applied:
    """DELTAs of one item each, of many tenants, through `work apply` and `work relay`."""
    settings = {
        "database": {"url": url},
        "telemetry": {"log_level": "WARNING"},
        "bus": bus or {},
        "refdata": {
            "dictionaries": [{"code": CODE}],
            "kafka": {"commandsTopic": f"refdata.bench.{uuid.uuid4().hex}"},
        },
    }
    targets = [DictionaryKey(f"tenant-{number}", CODE) for number in range(TENANTS)]
    async with AsyncExitStack() as stack:
        platform = await stack.enter_async_context(open_refdata(Settings.model_validate(settings), Telemetry()))
        file = written(settings, place.folder)
        apply = [(await stack.enter_async_context(work("apply", file))).pid for _ in range(processes)]
        relay = [(await stack.enter_async_context(work("relay", file))).pid]
        await _join(platform, targets)
        async with place.spending(url) as spent:
            before, began = (processor_seconds(apply), processor_seconds(relay)), time.perf_counter()
            size = await _through(platform, targets, count)
            seconds = time.perf_counter() - began
            used = processor_seconds(apply) - before[0], processor_seconds(relay) - before[1]
    return Applied(count, seconds, spent, used[0] * PER_THOUSAND / count, used[1] * PER_THOUSAND / count, size)


def work(role: str, file: Path) -> AbstractAsyncContextManager[Served]:
    """`penstock work` of one role, until the end."""
    return started(*PROGRAM, "work", role, "--json", "--config", str(file))


def delta(target: DictionaryKey, keys: int) -> CommandEvent:
    """A DELTA of one item of about 40 bytes, under one of so many keys."""
    payload = msgspec.Raw(b'{"name": "item %07d", "rate": 1.25}' % next(_numbers))
    item = CommandItem(f"{random.randrange(keys):08}", payload=payload)
    command = Command(dict_code=target.dict_code, event_type=EventType.DELTA, items=[item])
    command.event_id, command.tenant_id, command.source = uuid.uuid4(), target.tenant_id, CommandSource.KAFKA
    return CommandEvent(target, command.event_id, CommandSource.KAFKA, command)


async def _join(platform: RefdataPlatform, targets: Sequence[DictionaryKey]) -> None:
    """Wait until events of all keys pass at the same time: then all members have joined, and rebalancing has ended."""
    for _ in range(_TRIED):
        began = time.perf_counter()
        await _through(platform, targets, len(targets))
        if time.perf_counter() - began < _AT_ONCE:
            return


async def _through(platform: RefdataPlatform, targets: Sequence[DictionaryKey], count: int) -> float:
    """Publish so many, and wait until they are applied and announced; bytes of a message."""
    wanted = int(await platform.db.fetchval(_VERSIONS)) + count
    topic, size = platform.section.kafka.commands_topic, 0
    for first in range(0, count, PUBLISHED_AT_ONCE):
        numbers = range(first, min(first + PUBLISHED_AT_ONCE, count))
        messages = [build_command_message(topic, delta(targets[number % len(targets)], KEYS)) for number in numbers]
        size += sum(len(message.key) + len(message.value) for message in messages)
        await platform.bus.publish(messages)
    while await platform.db.fetchval(_VERSIONS) < wanted or await platform.db.fetchval(WAITING):  # noqa: ASYNC110 - other processes do it
        await asyncio.sleep(LOOK)
    return size / count
