"""The way in of refdata: from the bus to the stream, on a real PostgreSQL with durable commits.

Timed is everything from the first command that is published to the last version that is announced, by one publisher and
the roles `apply` and `relay` in one process. Latencies are those of one client that waits for each commit, over HTTP.
"""

import itertools
import json
import os
import statistics
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec

from benchmarks.harness import Bench, Group
from benchmarks.kernel import KAFKA
from benchmarks.servers import served
from benchmarks.session import Session
from penstock.app.parts import open_refdata
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.tasks.wait import wait_event
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.client import RefdataClient
from penstock.refdata.commands.commit_waiter import COMMITS
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.contract import Command, CommandItem, CommandSource, EventType
from penstock.refdata.item_files import make_snapshot_commands
from penstock.refdata.model import CommandEvent, DictionaryKey
from penstock.refdata.runtime import RefdataPlatform, run_apply, run_relay
from penstock.settings import Settings

TENANTS = 20
_numbers = itertools.count()
TABLE = """
CREATE TABLE mdm_country (
    tenant_id text, code text, name text NOT NULL, updated_at_epoch bigint NOT NULL, deleted boolean NOT NULL,
    PRIMARY KEY (tenant_id, code)
)"""
COUNTRY = {
    "code": "COUNTRY",
    "loadSql": "select code as k, to_jsonb(t) as v from mdm_country t where t.tenant_id = :tenantId and not t.deleted",
    "apply": {
        "upsertSql": """
            insert into mdm_country(tenant_id, code, name, updated_at_epoch, deleted)
            values (:tenantId, :key, cast(:payload->>'name' as text), :eventEpoch, false)
            on conflict (tenant_id, code) do update
            set name = excluded.name, updated_at_epoch = excluded.updated_at_epoch, deleted = false""",
        "deleteSql": """
            update mdm_country set deleted = true, updated_at_epoch = :eventEpoch
            where tenant_id = :tenantId and code = :key""",
        "snapshotStageSql": """
            insert into mdm_country
            select :tenantId, item->>'key', item->'payload'->>'name', :eventEpoch, false
            from jsonb_array_elements(:snapshotJson) as item
            on conflict (tenant_id, code) do update
            set name = excluded.name, updated_at_epoch = excluded.updated_at_epoch, deleted = false""",
        "snapshotFinalizeSql": """
            update mdm_country set deleted = true
            where tenant_id = :tenantId and updated_at_epoch < :eventEpoch and not deleted""",
    },
}


@dataclass(frozen=True)
class Sizes:
    """Events of one item, items of a snapshot, and calls that are waited for one by one."""

    events: int
    items: int
    calls: int


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open deltas, snapshots and latencies, on each bus there is."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        found: list[Bench] = []
        for name, kafka in _buses(session).items():
            settings = _settings(url, kafka)
            platform = await stack.enter_async_context(open_refdata(settings, Telemetry()))
            await platform.db.execute(TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
            found += _throughput(name, platform, sizes)
            client = await stack.enter_async_context(_served(session.folder, _settings(url, kafka)))
            found += _latency(name, client, sizes.calls)
        yield found


GROUP = Group(
    benches,
    full=Sizes(events=20_000, items=500_000, calls=300),
    smoke=Sizes(events=200, items=500, calls=5),
)


def _buses(session: Session) -> dict[str, str | None]:
    if kafka := os.environ.get(KAFKA):
        return {"PostgreSQL": None, "Kafka": kafka}
    session.leave_out("Kafka", f"{KAFKA} names none")
    return {"PostgreSQL": None}


def _settings(url: str, kafka: str | None) -> Settings:
    topic = {"commandsTopic": f"refdata.bench.{uuid.uuid4().hex}"}
    return Settings.model_validate(
        {
            "database": {"url": url},
            "bus": {"kafka": {"bootstrap": kafka}} if kafka else {},
            "refdata": {"dictionaries": [{"code": "RATES"}, COUNTRY], "kafka": topic},
        }
    )


def _throughput(bus: str, platform: RefdataPlatform, sizes: Sizes) -> list[Bench]:
    tables, found = {"own table": "COUNTRY", "dictionary_item": "RATES"}, list[Bench]()
    for table, code in tables.items():
        measure = partial(_deltas, platform, code, sizes.events)
        found.append(Bench(f"{bus}: DELTA of one item, {table}", "events", measure, 5_000))
    for table, code in tables.items():
        measure = partial(_snapshot, platform, code, sizes.items)
        found.append(Bench(f"{bus}: SNAPSHOT in chunks, {table}", "items", measure, 100_000))
    return found


async def _deltas(platform: RefdataPlatform, code: str, count: int) -> float:
    events = [_event(code, number) for number in range(count)]
    return count / await _through(platform, events)


async def _snapshot(platform: RefdataPlatform, code: str, count: int) -> float:
    """Return items a second of a snapshot of a new tenant, so that every item is new."""
    items = [CommandItem(f"key-{number:07}", payload=_payload(number)) for number in range(count)]
    target = DictionaryKey(f"snapshot-{next(_numbers)}", code)
    commands = make_snapshot_commands(code, items, uuid.uuid4(), None)
    return count / await _through(platform, [_filled(target, command) for command in commands])


async def _publish(platform: RefdataPlatform, events: Sequence[CommandEvent]) -> None:
    topic = platform.section.kafka.commands_topic
    size = 1_000 if len(events) > 1_000 else 10  # commands of one item, or of many
    for first in range(0, len(events), size):
        batch = events[first : first + size]
        await platform.bus.publish([build_command_message(topic, event) for event in batch])


async def _through(platform: RefdataPlatform, events: Sequence[CommandEvent]) -> float:
    """Seconds until *events* are published, applied and announced."""
    topic = platform.section.kafka.commands_topic
    async with run_apply(platform), run_relay(platform):
        began = perf_counter()
        await _publish(platform, events)
        while await platform.bus.count_backlog(topic):
            await wait_event(platform.refdata.notifier.get_next_event(COMMITS), 0.05)
        while await platform.db.fetchval("SELECT EXISTS (SELECT FROM outbox_event WHERE NOT published)"):
            await wait_event(platform.refdata.notifier.get_next_event(COMMITS), 0.02)
        return perf_counter() - began


def _event(code: str, number: int) -> CommandEvent:
    target = DictionaryKey(f"tenant-{number % TENANTS}", code)
    item = CommandItem(f"key-{number % 5_000:05}", payload=_payload(number))
    return _filled(target, Command(dict_code=code, event_type=EventType.DELTA, items=[item]))


def _filled(target: DictionaryKey, command: Command) -> CommandEvent:
    command.event_id, command.tenant_id, command.source = uuid.uuid4(), target.tenant_id, CommandSource.KAFKA
    return CommandEvent(target, command.event_id, CommandSource.KAFKA, command)


def _payload(number: int) -> msgspec.Raw:
    return msgspec.Raw(b'{"name":"name of %d","rate":%d.25}' % (number, number % 1000))


@asynccontextmanager
async def _served(folder: Path, settings: Settings) -> AsyncIterator[RefdataClient]:
    """A client of `serve command-api`, with `work apply` beside it, each a process of its own."""
    file = folder / f"{settings.refdata.kafka.commands_topic}.yaml"
    file.write_text(json.dumps(settings.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    program = ["-m", "penstock.cli.main"]
    async with (
        served(*program, "serve", "command-api", "--port", "0", "--json", "--config", str(file)) as api,
        served(*program, "work", "apply", "--json", "--config", str(file)),
        RefdataClient(api) as client,
    ):
        yield client


def _latency(bus: str, client: RefdataClient, calls: int) -> list[Bench]:
    async def measure(quantile: int) -> float:
        taken = sorted([await _call(client, number) for number in range(calls)])
        return 1_000 * statistics.quantiles(taken, n=100)[quantile - 1]

    return [
        Bench(f"{bus}: WAIT_COMMIT p{quantile}", "ms", lambda it=quantile: measure(it), is_duration=True)  # type: ignore[misc]
        for quantile in (50, 99)
    ]


async def _call(client: RefdataClient, number: int) -> float:
    item = CommandItem(f"key-{number}", payload=_payload(number))
    command = Command(dict_code="COUNTRY", event_type=EventType.DELTA, items=[item])
    began = perf_counter()
    response = await client.submit("latency", command, waits=True)
    assert "committedVersion" in response, response
    return perf_counter() - began
