"""Refdata roles as processes that crash at chosen points, and the invariants to check afterwards."""

import asyncio
import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import httpx
import msgspec
import psutil
from ruamel.yaml import YAML

from penstock.app.factories import make_bus, make_invalidations
from penstock.kernel.bus import Bus, BusMessage
from penstock.kernel.db.database import Database
from penstock.kernel.signals import Signal, Signals
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.settings import Settings
from tests.refdata.harness import DOCUMENT, OTHER, chunk, command, create_schemas, dictionaries, upsert
from tests.refdata.scenarios.crash_points import order, run
from tests.services.kafka import Kafka
from tests.services.redis import RedisServer
from tests.support.fork_server import FORKED
from tests.support.types import Json
from tests.support.wait import WITHIN, becomes

ROLES = ("command-api", "apply", "relay", "kafka-adapter")
TENANTS = ("acme", "globex")
# One row per application: whatever is applied twice is here twice.
_APPLIED = "CREATE TABLE applied (tenant_id text, code text, key text, version bigint)"


def _ledger(code: str) -> Json:
    """A dictionary whose statements only add rows."""
    put = f"insert into applied select :tenantId, '{code}', :key, :eventVersion"
    everything = (
        f"select :tenantId, '{code}', item ->> 'key', :eventVersion from jsonb_array_elements(:snapshotJson) item"
    )
    found = f"from applied where tenant_id = :tenantId and code = '{code}'"
    return {
        "code": code,
        "loadSql": f"select key as k, to_jsonb(version) as v {found}",
        "apply": {
            "mode": "SQL_TEMPLATE",
            "upsertSql": put,
            "deleteSql": put,
            "snapshotReplaceSql": f"insert into applied {everything}",
        },
    }


class SentCommand(NamedTuple):
    """A command that was sent, with its expected end."""

    tenant: str
    event_id: UUID
    body: bytes
    must_fail: bool = False


def load() -> list[SentCommand]:
    """Return commands for every kind of dictionary, including a snapshot in chunks; some cannot be applied."""
    sent: list[SentCommand] = []
    for tenant in TENANTS:
        for number in range(5):
            sent.append(_delta(tenant, "LEDGER", uuid4().hex, number))
            sent.append(_delta(tenant, "LOOSE", f"k{number}", number))
        sent.append(_delta(tenant, "COUNTRY", "NO", {"name": "Norway"}))
        sent.append(_delta(tenant, "CURRENCY", "NOK", {"name": "Krone", "digits": 2}))
        sent.append(_delta(tenant, "CURRENCY", "EUR", {"name": "Euro", "digits": 9}, must_fail=True))
        sent.append(_delta(tenant, "CURRENCY", "SEK", {"name": "Krona", "digits": 2}))
    return sent + snapshot("acme")


def make_delta(tenant: str) -> SentCommand:
    """Return a command for a dictionary that no other command uses."""
    return _delta(tenant, "LOOSE", "alone", 1)


def snapshot(tenant: str) -> list[SentCommand]:
    """Return the three chunks of a snapshot."""
    snapshot_id, sent = uuid4(), []
    for index in (3, 1, 2):
        event_id = uuid4()
        items = [upsert(uuid4().hex, index) for _ in range(2)]
        sent.append(SentCommand(tenant, event_id, chunk("WHOLE", snapshot_id, index, 3, *items, eventId=str(event_id))))
    return sent


def _delta(tenant: str, code: str, key: str, payload: Any, *, must_fail: bool = False) -> SentCommand:
    event_id = uuid4()
    return SentCommand(tenant, event_id, command(code, upsert(key, payload), eventId=str(event_id)), must_fail)


class RoleProcess:
    """A ready role in a process of its own, forked from a process that has loaded the program."""

    def __init__(self, name: str, folder: Path) -> None:
        role, order_file = name.partition(".")[0], folder / f"{name}.order"
        arguments = ["serve", role, "--port", "0"] if role == "command-api" else ["work", role]
        self._log = order_file.with_suffix(".log")
        ours, theirs = FORKED.Pipe(duplex=False)
        process_arguments = ([*arguments, "--json"], folder, order_file, theirs)
        self._process = FORKED.Process(target=run, args=process_arguments, name=name)
        self._process.start()
        theirs.close()
        with ours, os.fdopen(os.dup(ours.fileno())) as output:
            output_text = "".join(iter(lambda: "" if (line := output.readline()) == "}\n" else line, ""))
        assert output_text, self.log
        self.api = str(json.loads(output_text + "}")["api"])

    @property
    def log(self) -> str:
        """Return the end of its log."""
        return f"{self._process.name}: {self._log.read_text()[-1500:]}"

    @property
    def is_frozen(self) -> bool:
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def ended(self) -> int | None:
        """Wait for its end, and return the exit code."""
        self._process.join(WITHIN)
        return self._process.exitcode


@dataclass
class RoleProcesses:
    """Roles as processes, clients that retry, and a listener."""

    folder: Path
    settings: Settings
    db: Database
    bus: Bus
    redis: RedisServer | None
    client: httpx.AsyncClient
    running: dict[str, RoleProcess] = field(default_factory=dict)
    sent: list[SentCommand] = field(default_factory=list)
    given_up: dict[UUID, str | None] = field(default_factory=dict)
    foreign: list[tuple[str, str]] = field(default_factory=list)
    heard: set[tuple[str, str, int]] = field(default_factory=set)

    async def start(self, *names: str) -> None:
        """Start roles; several of one role have names with a suffix after a dot."""
        started = await asyncio.gather(*(asyncio.to_thread(RoleProcess, name, self.folder) for name in names))
        self.running.update(zip(names, started, strict=True))

    def order(self, name: str, point: str, nth: int = 1, how: signal.Signals = signal.SIGKILL) -> None:
        order(self.folder / f"{name}.order", point, nth, how)

    async def died(self, name: str) -> None:
        """Wait until a role was killed at its point."""
        running = self.running[name]
        assert await asyncio.to_thread(running.ended) == -signal.SIGKILL, running.log

    async def died_and_came_back(self, name: str) -> None:
        await self.died(name)
        await self.start(name)

    def is_frozen(self, name: str) -> bool:
        return self.running[name].is_frozen

    def wake(self, name: str) -> None:
        self.running[name].signal(signal.SIGCONT)

    async def stop(self, name: str) -> None:
        """Ask a role to end, as at a scale-down."""
        running = self.running.pop(name)
        running.signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.ended) == 0, running.log

    def close(self) -> None:
        for running in self.running.values():
            running.signal(signal.SIGKILL)
            running.ended()

    async def send(self, commands: Sequence[SentCommand]) -> None:
        """Send the commands of each tenant in order, tenants concurrently; retry with the same id."""
        self.sent += commands
        lanes: dict[str, list[SentCommand]] = defaultdict(list)
        for sent in commands:
            lanes[sent.tenant].append(sent)

        async def walk(lane: Sequence[SentCommand]) -> None:
            for sent in lane:
                await becomes(partial(self.ask, sent), "no answer")

        async with asyncio.TaskGroup() as group:
            for lane in lanes.values():
                group.create_task(walk(lane))

    async def ask(self, sent: SentCommand) -> bool:
        """Send a command once, and return whether there was a response."""
        try:
            url = f"{self.running['command-api'].api}/v1/tenants/{sent.tenant}/updates"
            answer = await self.client.post(url, content=sent.body)
        except httpx.TransportError:
            return False
        assert answer.status_code in (202, 503), answer.text
        return answer.status_code == 202

    async def send_once(self, sent: SentCommand, ends: str | None) -> bool:
        """Send a command once; it must end as *ends* (None: unknown). Return whether there was a response."""
        self.given_up[sent.event_id] = ends
        return await self.ask(sent)

    async def publish_foreign(self, count: int) -> None:
        """Publish messages of another system."""
        new = [(tenant, uuid4().hex) for tenant in TENANTS for _ in range(count)]
        self.foreign += new
        body = msgspec.json.encode({"amount": 1})
        topic = self.settings.refdata.kafka.external_topics[0].topic
        await self.bus.publish([BusMessage(topic, key, body, {"tenant": tenant}) for tenant, key in new])

    async def grow_old(self) -> None:
        """Set the age of pending updates to an hour, instead of waiting."""
        await self.db.execute(
            "UPDATE update_request SET created_at = created_at - interval '1 hour', probed_at = NULL"
            " WHERE status = 'PENDING'"
        )

    async def nothing_pends(self) -> None:
        """Wait until every known update has ended."""

        async def has_ended() -> bool:
            return not await self.db.fetchval("SELECT count(*) FROM update_request WHERE status = 'PENDING'")

        await becomes(has_ended, "something stays PENDING")

    async def settled(self, within: float = WITHIN) -> None:
        """Wait until no update is pending and every commit was announced."""
        await becomes(self._is_settled, "it does not come to rest", within, self._unsettled)

    async def _is_settled(self) -> bool:
        # One look at all of them: what is noted between two looks would be missed by both.
        rows = await self.db.fetch("SELECT event_id, dict_code, status FROM update_request")
        if any(row["status"] == "PENDING" for row in rows):
            return False
        known = {row["event_id"] for row in rows}
        waited_for = {sent.event_id for sent in self.sent} | {key for key, ends in self.given_up.items() if ends}
        if not waited_for <= known:
            return False
        came = sum(row["dict_code"] == "FOREIGN" for row in rows)
        waiting = await self.db.fetchval("SELECT count(*) FROM outbox_event WHERE NOT published")
        return came >= len(self.foreign) and not waiting and await self._committed() <= self.heard

    async def _unsettled(self) -> str:
        pending = await self.db.fetch("SELECT * FROM update_request WHERE status = 'PENDING'")
        unheard = await self._committed() - self.heard
        waiting = await self.db.fetchval("SELECT count(*) FROM outbox_event WHERE NOT published")
        logs = "\n".join(running.log for running in self.running.values())
        return f"pending {pending}\nunpublished {waiting}, unheard {unheard}\n{logs}"

    async def _committed(self) -> set[tuple[str, str, int]]:
        return {tuple(row) for row in await self.db.fetch("SELECT tenant_id, dict_code, version FROM outbox_event")}

    async def check(self) -> None:
        """Check the invariants that hold after any number of crashes."""
        await self._check_ends()
        await self._check_versions()
        await self._check_applications()
        self._check_stream(await self._committed())

    async def _check_ends(self) -> None:
        """Check that every event has ended once, and as expected."""
        rows = await self.db.fetch("SELECT event_id, dict_code, status, error_code FROM update_request")
        ends = {row["event_id"]: row["error_code"] or row["status"] for row in rows}
        expected = {sent.event_id: "SQL_ERROR" if sent.must_fail else "COMMITTED" for sent in self.sent}
        expected |= {event_id: end for event_id, end in self.given_up.items() if end}
        named = {row["event_id"]: ends[row["event_id"]] for row in rows if row["dict_code"] != "FOREIGN"}
        same("ends", named.items(), expected.items())
        foreign = [row["event_id"] for row in rows if row["dict_code"] == "FOREIGN"]
        same("foreign ends", (ends[event_id] for event_id in foreign), ["COMMITTED"] * len(self.foreign))
        moves = await self.db.fetch("SELECT subject FROM journal_move WHERE machine = 'refdata.update'")
        same("moves", (UUID(row["subject"].rpartition("/")[2]) for row in moves), ends)

    async def _check_versions(self) -> None:
        """Check that versions have no gap or duplicate, and that each belongs to an update."""
        heads = await self.db.fetch("SELECT tenant_id, dict_code, version FROM dictionary_meta")
        versions = [(tenant, code, number) for tenant, code, last in heads for number in range(1, last + 1)]
        announced = await self.db.fetch("SELECT tenant_id, dict_code, version FROM outbox_event")
        same("versions", map(tuple, announced), versions)
        given = await self.db.fetch(
            "SELECT tenant_id, dict_code, committed_version FROM update_request WHERE status = 'COMMITTED'"
        )
        chunks = {"WHOLE": 3}  # the events of a snapshot share its version
        same(
            "versions given",
            map(tuple, given),
            [version for version in versions for _ in range(chunks.get(version[1], 1))],
        )

    async def _check_applications(self) -> None:
        """Check that each row was added once, under the version of its update."""
        rows = await self.db.fetch("SELECT tenant_id, code, key, version FROM applied")
        known = await self.db.fetch("SELECT event_id, committed_version FROM update_request")
        version = {row["event_id"]: row["committed_version"] for row in known}
        expected = [
            (sent.tenant, body["dictCode"], item["key"], version[sent.event_id])
            for sent in self.sent
            if (body := json.loads(sent.body))["dictCode"] in ("LEDGER", "WHOLE")
            for item in body["items"]
        ]
        same("applications", (tuple(row) for row in rows if row["code"] != "FOREIGN"), expected)
        came = [(row["tenant_id"], row["key"]) for row in rows if row["code"] == "FOREIGN"]
        same("foreign applications", came, self.foreign)

    def _check_stream(self, committed: set[tuple[str, str, int]]) -> None:
        """Check that every commit was announced, and is in the stream if there is one."""
        same("heard", self.heard, committed)
        if self.redis is not None:
            key = self.settings.refdata.redis.stream_key
            entries: Any = self.redis.holder(key).xrange(key)
            same("stream", {_identify(fields["body"]) for _, fields in entries}, committed)

    async def hear(self, signals: Signals, is_listening: asyncio.Event) -> None:
        async with signals.listen(f"test-{os.getpid()}") as feed:
            is_listening.set()
            async for signal in feed:
                if isinstance(signal, Signal):
                    self.heard.add(_identify(signal.body))


def _identify(body: str) -> tuple[str, str, int]:
    invalidation = json.loads(body)
    return invalidation["tenantId"], invalidation["dictCode"], invalidation["version"]


@asynccontextmanager
async def role_processes(
    folder: Path, url: str, kafka: Kafka | None, redis: RedisServer | None, *, is_static: bool = False, **refdata: Any
) -> AsyncIterator[RoleProcesses]:
    """Open refdata without running roles. With *is_static* a restarted role causes no rebalance in Kafka."""
    await create_schemas(url)
    document = _document(url, kafka, redis, is_static=is_static, **refdata)
    YAML(typ="safe").dump(document, folder / "penstock.yaml")
    settings = Settings.model_validate(document)
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(url, size=3))
        await db.execute(_APPLIED)
        bus = make_bus(settings, db)
        stack.push_async_callback(bus.close)
        signals = make_invalidations(settings, db)
        stack.push_async_callback(signals.close)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=10))
        harness = RoleProcesses(folder, settings, db, bus, redis, client)
        stack.callback(harness.close)
        is_listening = asyncio.Event()
        hearing = asyncio.create_task(harness.hear(signals, is_listening))
        stack.push_async_callback(cancel_and_wait, hearing)
        await is_listening.wait()
        yield harness


def _document(url: str, kafka: Kafka | None, redis: RedisServer | None, *, is_static: bool, **refdata: Any) -> Json:
    name = os.urandom(4).hex()
    known: Json = {
        "kafka": {
            "commandsTopic": f"refdata.test.{name}",
            "externalTopics": [{"topic": f"external.{name}", "tenantId": "header:tenant", "dictCode": "=FOREIGN"}],
        },
        "dictionaries": [*dictionaries(DOCUMENT), *dictionaries(OTHER), *map(_ledger, ("LEDGER", "WHOLE", "FOREIGN"))],
        "tenants": list(TENANTS),
        "apply": {"workers": 1, "lease": "PT1S", "batch": 4, "maxAttempts": 50},
    }
    if redis is not None:
        known["redis"] = {
            "mode": "single",
            "nodes": redis.addresses,
            "streamKey": f"{name}:stream",
            "pubChannel": f"{name}:pub",
        }
    bus: Json = {"partitions": 8}
    if kafka is not None:
        bus["kafka"] = {"bootstrap": kafka.bootstrap, "group_prefix": name}
        if is_static:
            bus["kafka"]["options"] = {"group.instance.id": "the-only-one"}
    return {"database": {"url": url}, "bus": bus, "refdata": {**known, **refdata}}


def same(what: str, found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Check that both contain the same values equally often, in any order."""
    have, want = Counter(list(found)), Counter(list(expected))
    assert have == want, f"{what}: too many {dict(have - want)}, missing {dict(want - have)}"
