"""Temporary errors: an affected command is applied once in the end, and never FAILED."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from random import randrange
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest

from penstock.app.apis import PublicApis, make_command_api
from penstock.kernel.bus import BusMessage
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.errors import Transient
from penstock.kernel.http.auth import NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.contract import UpdateState, decode_command
from penstock.refdata.dictionaries.provider import ItemTableProvider
from penstock.refdata.maintenance import RefdataMaintenance
from penstock.refdata.model import UpdateRecord
from penstock.refdata.runtime import run_apply
from penstock.settings import Settings
from tests.kernel.db.test_embedded import servers
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    RefdataHarness,
    command,
    create_schemas,
    dictionaries,
    opened,
    refdata_settings,
    upsert,
)
from tests.services.kafka import Kafka
from tests.support.soak import Campaign, examples
from tests.support.types import Json

SECOND = timedelta(seconds=1)
STUMBLES = """
CREATE SEQUENCE tries;
CREATE TABLE written (tenant_id text, code text, try int);
CREATE TABLE pair (id int PRIMARY KEY, n int NOT NULL);
INSERT INTO pair VALUES (1, 0), (2, 0);
CREATE FUNCTION stumble(how text, times int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    try int := nextval('tries');
BEGIN
    IF try > times THEN RETURN try; END IF;
    CASE how
        WHEN 'cut' THEN PERFORM pg_terminate_backend(pg_backend_pid());
        WHEN 'wait' THEN PERFORM pg_advisory_xact_lock(42);
        WHEN 'pair' THEN
            UPDATE pair SET n = n + 1 WHERE id = 1;
            UPDATE pair SET n = n + 1 WHERE id = 2;
        WHEN 'slow' THEN PERFORM pg_sleep(0.2);
        ELSE RAISE EXCEPTION 'not now' USING ERRCODE = how;
    END CASE;
    RETURN try;
END
$$;
"""
FLAKY: Json = {
    "code": "FLAKY",
    "loadSql": "select code as k, to_jsonb(count(*)) as v from written where tenant_id = :tenantId group by code",
    "apply": {
        "upsertSql": """insert into written
            values (:tenantId, :key, stumble(:payload->>'how', (:payload->>'times')::int))""",
        "deleteSql": "delete from written where tenant_id = :tenantId and code = :key",
        "snapshotReplaceSql": """insert into written
            select :tenantId, item->>'key', stumble(item->'payload'->>'how', 1)
            from jsonb_array_elements(:snapshotJson) item""",
    },
}
DOWN = Transient("BUS_DOWN", "no answer", hint="wait")


async def flaky_settings(url: str, broker: Kafka | None, give_up_after: timedelta = SECOND) -> Settings:
    """Yield the usual dictionaries and one with temporary errors."""
    await create_schemas(url)
    connection = await asyncpg.connect(url)
    await connection.execute(STUMBLES)
    await connection.close()
    known = [*dictionaries(DOCUMENT), *dictionaries(OTHER), FLAKY]
    return refdata_settings(url, broker, dictionaries=known, apply={"lease": SECOND}, giveUpAfter=give_up_after)


@pytest.fixture
async def settings(database_url: str, bus_kind: str, request: pytest.FixtureRequest) -> Settings:
    broker = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    return await flaky_settings(database_url, broker)


@pytest.fixture
async def small(database_url: str) -> AsyncIterator[RefdataHarness]:
    """Run a test on the bus of PostgreSQL only, if both buses behave the same."""
    async with opened(await flaky_settings(database_url, None)) as harness:
        yield harness


@pytest.fixture
async def outside(database_url: str) -> "AsyncIterator[asyncpg.Connection[asyncpg.Record]]":
    """Yield a connection of another client."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def blocked(outside: "asyncpg.Connection[asyncpg.Record]") -> int:
    """Return the backend that waits for a lock, when there is one."""
    query = """SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid)
               WHERE NOT l.granted AND a.datname = current_database()"""
    async with asyncio.timeout(30):
        while (pid := await outside.fetchval(query)) is None:
            pass
    return int(pid)


async def ended(harness: RefdataHarness, event_id: UUID, within: float = 60) -> UpdateRecord:
    """Return the update, once it is no longer PENDING."""
    async with asyncio.timeout(within):
        while True:
            notified = harness.refdata.notifier.get_next_event("")
            try:
                if (update := await harness.update(event_id)).status is not UpdateState.PENDING:
                    return update
            except Transient:
                pass
            await wait_event(notified, 0.05)


async def applied_once(harness: RefdataHarness, *event_ids: UUID) -> None:
    """Check that nothing failed, nothing is a dead letter, and every version exists once."""
    updates = [await harness.update(event_id) for event_id in event_ids]
    assert [(update.status, update.error_message) for update in updates] == [(UpdateState.COMMITTED, None)] * len(
        updates
    )
    assert [update.committed_version for update in updates] == list(range(1, len(updates) + 1))
    assert await harness.dead() == []
    items = await harness.items("FLAKY")
    assert set(items.values()) == {1}
    assert len(items) == await harness.version("FLAKY") == len(updates)


@pytest.mark.parametrize(
    "how", ["cut", "40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300", "53200", "08006", "25006", "25P03"]
)
async def test_trouble_of_the_moment_is_nobodys_fault(small: RefdataHarness, how: str) -> None:
    """R11: a lost connection, a deadlock, a serialization failure …: retried without counting until it succeeds."""
    ids = [await small.send("FLAKY", upsert(key, {"how": how, "times": 2})) for key in "abc"]
    await small.apply(max_attempts=1)
    await applied_once(small, *ids)


@pytest.mark.parametrize("how", ["cut", "40001"])
async def test_trouble_of_the_moment_on_both_buses(harness: RefdataHarness, how: str) -> None:
    """R11: the commands before and behind it in the partition are applied too, on either bus; deltas and a snapshot."""
    ids = [
        await harness.send("FLAKY", upsert("a", {"times": 0})),
        await harness.send("FLAKY", upsert("b", {"how": how, "times": 3}), event_type="DELTA"),
        await harness.send("FLAKY", upsert("c", {"how": how}), event_type="SNAPSHOT"),
        await harness.send("FLAKY", upsert("d", {"times": 0})),
    ]
    await harness.apply(max_attempts=1)
    await applied_once(harness, *ids)


@pytest.mark.parametrize("state", ["57P05", "58030"])
async def test_sessions_that_were_ended_are_nobodys_fault(small: RefdataHarness, state: str) -> None:
    """R11: an idle timeout or a failing disk is not the fault of the command."""
    event_id = await small.send("FLAKY", upsert("a", {"how": state, "times": 1}))
    await small.apply(max_attempts=1)
    await applied_once(small, event_id)


async def test_a_process_that_froze_in_a_transaction(small: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: after the server ended the transaction of a stopped process, it starts again and fails nothing."""
    original, calls = ItemTableProvider.apply_delta, []

    async def freeze(self: ItemTableProvider, tx: Any, changes: Sequence[Any]) -> None:
        calls.append(1)
        if len(calls) == 1:
            # The whole process stops until the server ends its session.
            pid = tx.get_server_pid()
            with ThreadPoolExecutor() as outside:
                outside.submit(asyncio.run, _gone(small.db.dsn, pid)).result()
        await original(self, tx, changes)

    monkeypatch.setattr(ItemTableProvider, "apply_delta", freeze)
    event_id = await small.send("LOOSE", upsert("a", 1))
    await small.apply(max_attempts=1)
    update = await small.update(event_id)
    assert (update.status, update.error_message) == (UpdateState.COMMITTED, None)
    assert len(calls) == 2


async def _gone(url: str, pid: int) -> None:
    """Wait until the server has ended a session."""
    connection = await asyncpg.connect(url)
    async with asyncio.timeout(30):
        while await connection.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid):
            pass
    await connection.close()


async def test_a_connection_cut_from_outside(
    harness: RefdataHarness, outside: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """R11: the backend is terminated in a transaction; its changes are rolled back and applied again."""
    ids = [await harness.send("FLAKY", upsert(key, {"how": "wait", "times": 2})) for key in "abc"]
    await outside.execute("SELECT pg_advisory_lock(42)")
    task = asyncio.create_task(harness.apply(max_attempts=1))
    assert await outside.fetchval("SELECT pg_terminate_backend($1, 5000)", await blocked(outside))
    await outside.execute("SELECT pg_advisory_unlock(42)")
    await task
    await applied_once(harness, *ids)


async def test_a_real_deadlock(small: RefdataHarness, outside: "asyncpg.Connection[asyncpg.Record]") -> None:
    """R11: an applier that is the victim of a deadlock with another client retries."""
    event_id = await small.send("FLAKY", upsert("a", {"how": "pair", "times": 1}))
    await outside.execute("SET deadlock_timeout = '1min'")
    async with outside.transaction():
        await outside.execute("UPDATE pair SET n = n + 1 WHERE id = 2")
        task = asyncio.create_task(small.apply(max_attempts=1))
        await blocked(outside)
        await outside.execute("UPDATE pair SET n = n + 1 WHERE id = 1")
    await task
    await applied_once(small, event_id)


async def test_a_function_that_was_replaced_meanwhile(
    small: RefdataHarness, outside: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """R11: a statement whose function got another result type is prepared again; its command does not fail."""
    first = await small.send("PRODUCT", upsert("1", {"brand": 1, "price": 1}))
    await small.apply()
    source = await outside.fetchval("SELECT pg_get_functiondef('put_product'::regproc)")
    await outside.execute("DROP FUNCTION put_product CASCADE")
    await outside.execute(source.replace("RETURNS void", "RETURNS int").replace("END\n", "RETURN 1; END\n"))
    second = await small.send("PRODUCT", upsert("2", {"brand": 1, "price": 1}))
    await small.apply()
    assert [(await small.update(event_id)).error_message for event_id in (first, second)] == [None, None]


async def test_many_statements_that_take_long_together_are_not_stuck(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: fifteen statements of 0.2 s exceed the timeout of the client; the batch is split."""
    monkeypatch.setattr("penstock.kernel.db.database._CLIENT_MARGIN", 1.0)  # so it waits for two seconds
    settings = await flaky_settings(database_url, None)
    database = settings.database.model_copy(update={"statement_timeout": SECOND})
    async with opened(settings.model_copy(update={"database": database})) as harness:
        ids = [await harness.send("FLAKY", upsert(f"k{n}", {"how": "slow", "times": 99})) for n in range(15)]
        async with asyncio.timeout(50):
            await harness.apply()
        await applied_once(harness, *ids)


@pytest.mark.full
@pytest.mark.soak
async def test_postgresql_restarts_in_the_middle(tmp_path: Path, campaign: Campaign) -> None:
    """R11: PostgreSQL is killed or stopped during the application: nothing fails, is lost or is applied twice."""
    campaign.counts_items, rounds = True, examples(3, soak=100)
    async with run_embedded_postgres(tmp_path / "pg") as url:
        # Longer than a server takes to come back on a busy machine: what could not be sent meanwhile is not lost.
        settings = await flaky_settings(url, None, give_up_after=60 * SECOND)
        async with opened(settings) as harness, run_apply(harness.platform):
            ids: list[UUID] = []
            for number in range(rounds):
                striking = asyncio.create_task(_strike(tmp_path / "pg", harness, number))
                ids += [await _insist(harness, upsert(f"{number}.{n}", {"times": 0})) for n in range(10)]
                ids.append(await _insist(harness, *_WHOLE, code="LOOSE", event_type="SNAPSHOT"))
                await striking
                campaign.end_round(faults=1)
            ends = [await ended(harness, event_id) for event_id in ids]
            assert {end.status for end in ends} == {UpdateState.COMMITTED}
            assert await harness.version("LOOSE") == rounds
            await applied_once(harness, *(end.event_id for end in ends if end.dict_code == "FLAKY"))


_WHOLE = [upsert(str(n), n) for n in range(5_000)]


async def _strike(folder: Path, harness: RefdataHarness, number: int) -> None:
    """Stop the server in several ways, each time while commands of the round are pending."""
    how = (signal.SIGKILL, signal.SIGINT, signal.SIGQUIT)[number % 3]
    for _ in range(randrange(20)):
        await wait_event(harness.refdata.notifier.get_next_event(""), 0.02)
    for server in servers(folder):
        server.send_signal(how)


async def _insist(harness: RefdataHarness, *items: Json, code: str = "FLAKY", **more: Any) -> UUID:
    """Send a command with the same id until it is accepted, as a client does after 503."""
    event_id = uuid4()
    async with asyncio.timeout(60):
        while True:
            try:
                return await harness.send(code, *items, eventId=str(event_id), **more)
            except Transient:
                await wait_event(harness.refdata.notifier.get_next_event(""), 0.1)


def upkeep(harness: RefdataHarness) -> RefdataMaintenance:
    """Return the maintenance of a process whose clock is two minutes ahead."""
    harness.db.clock = ManualClock(harness.db.clock.now() + timedelta(minutes=2))
    return RefdataMaintenance(harness.db, harness.bus, harness.refdata, harness.platform.metrics, "sweeper")


async def unsent(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> UUID:
    """Store an update whose command did not reach the bus."""

    async def publish(_: Sequence[BusMessage], **__: Any) -> None:
        raise DOWN

    event_id = uuid4()
    with monkeypatch.context() as patched:
        patched.setattr(harness.bus, "publish", publish)
        with pytest.raises(Transient, match="no answer"):
            await harness.send("FLAKY", upsert("a", {"times": 0}), eventId=str(event_id))
    assert (await harness.update(event_id)).status is UpdateState.PENDING
    return event_id


async def test_a_command_the_bus_did_not_take_is_sent_again(
    harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: the same id, sent again when the bus is up, commits once."""
    event_id = await unsent(harness, monkeypatch)
    for _ in range(2):
        assert await harness.send("FLAKY", upsert("a", {"times": 0}), eventId=str(event_id)) == event_id
    await harness.apply()
    await applied_once(harness, event_id)


async def test_a_command_that_never_reached_the_bus_ends(
    harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: without a repetition the sweeper fails the update as NOT_DELIVERED; a later repetition does not change it."""
    event_id = await unsent(harness, monkeypatch)
    other = await harness.send("FLAKY", upsert("b", {"times": 0}))
    await harness.apply()
    assert await upkeep(harness).probe_updates() == 1
    assert await upkeep(harness).probe_updates() == 0
    await harness.apply()
    update = await harness.update(event_id)
    assert (update.status, update.error_code) == (UpdateState.FAILED, "NOT_DELIVERED")
    assert (await harness.update(other)).committed_version == 1
    late = await harness.refdata.submit(
        "acme", decode_command(command("FLAKY", upsert("a", {"times": 0}), eventId=str(event_id)))
    )
    assert late.status is UpdateState.FAILED
    assert list(await harness.items("FLAKY")) == ["b"]


async def test_what_only_waits_is_not_given_up(harness: RefdataHarness) -> None:
    """R8: the commands of a backlog older than giveUpAfter are probed, found and committed."""
    ids = [await harness.send("FLAKY", upsert(key, {"times": 0})) for key in "abc"]
    assert await upkeep(harness).probe_updates() == 3
    await harness.apply()
    updates = [await harness.update(event_id) for event_id in ids]
    assert [(update.status, update.committed_version) for update in updates] == [
        (UpdateState.COMMITTED, version) for version in (1, 2, 3)
    ]


async def test_a_bus_that_is_down_is_503(database_url: str) -> None:
    """R8: the response is 503 BUS_DOWN with a hint and Retry-After; the update can be requested under the sent id."""
    settings = await flaky_settings(database_url, Kafka("127.0.0.1:1", is_real=True))
    event_id = uuid4()
    async with opened(settings) as harness:
        web = PublicApis(settings, harness.platform.telemetry, NoAuthenticator())
        transport = httpx.ASGITransport(make_command_api(web, LivenessPulse({}, needs=[]), harness.refdata))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1/tenants/acme") as http:
            body = command("LOOSE", upsert("a", 1), eventId=str(event_id))
            answer = await http.post("/updates", content=body)
            status = await http.get(f"/updates/{event_id}")
    assert (answer.status_code, answer.json()["code"]) == (503, "BUS_DOWN")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "bus.kafka.bootstrap" in answer.json()["hint"]
    assert answer.headers["retry-after"]
    assert status.json()["status"] == "PENDING"
