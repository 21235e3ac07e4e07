"""Duplicate, late and badly timed events, on the bus of PostgreSQL only; Kafka behaves the same."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.outcome import Retry
from penstock.refdata import store
from penstock.refdata.apply import snapshot_store
from penstock.refdata.apply.applier import CommandApplier
from penstock.refdata.commands.external_topics import TopicMapping, make_adapter_handler
from penstock.refdata.commands.messages import ParsedMessage
from penstock.refdata.config import ExternalTopicSection
from penstock.refdata.contract import UpdateState
from penstock.refdata.dictionaries.provider import ItemTableProvider
from penstock.refdata.model import CommandId, CommandRefusal, CommandVerdict, DictionaryKey
from tests.refdata.commands.test_external_topics import PLAIN, delivery
from tests.refdata.harness import RefdataHarness, delete, upsert
from tests.refdata.retention import RetentionHarness

SECOND = timedelta(seconds=1)
LOOSE = DictionaryKey("acme", "LOOSE")
DOWN = Transient("BUS_DOWN", "no answer", hint="wait")
ENDS = [CommandVerdict(7), CommandVerdict(refusal=CommandRefusal("NO_GOOD", "it is not"))]


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


@pytest.fixture
def retention(harness: RefdataHarness, clock: ManualClock) -> RetentionHarness:
    harness.db.clock = clock
    return RetentionHarness(harness, clock)


async def refused(*_: Any, **__: Any) -> None:
    """Raise the error of a bus that is down."""
    raise DOWN


def stumbling(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[Exception]:
    """Make the table of items fail *times* times, and return the remaining failures."""
    original, left = ItemTableProvider.apply_delta, [error] * times

    async def stumble(self: ItemTableProvider, tx: Any, changes: Sequence[Any]) -> None:
        if left:
            raise left.pop()
        await original(self, tx, changes)

    monkeypatch.setattr(ItemTableProvider, "apply_delta", stumble)
    return left


async def unsent(retention: RetentionHarness) -> UUID:
    """Store an update whose command did not reach the bus."""
    event_id, now = uuid4(), retention.clock.now()
    async with retention.harness.db.connection() as connection:
        await store.open_updates(connection, [(LOOSE, event_id, b"")], now=now)
    return event_id


async def count_announced_keys(harness: RefdataHarness) -> list[int | None]:
    """Return the number of keys in the announcement of each version, oldest first; None without `keys`."""
    query = "SELECT jsonb_array_length(payload -> 'keys') FROM outbox_event ORDER BY id"
    return [row[0] for row in await harness.db.fetch(query)]


async def test_the_events_epoch_is_when_it_occurred(harness: RefdataHarness) -> None:
    """R3: `:eventEpoch` is occurredAt in milliseconds, in upsertSql and deleteSql."""
    epochs = []
    for item, at in ((upsert("NO", {"name": "Norway"}), "01:46:40Z"), (delete("NO"), "01:46:41.5Z")):
        await harness.send("COUNTRY", item, occurredAt=f"2001-09-09T{at}")
        await harness.apply()
        epochs.append(await harness.db.fetchval("SELECT updated_at_epoch FROM mdm_country"))
    assert epochs == [1_000_000_000_000, 1_000_000_001_500]


@pytest.mark.parametrize(
    ("count", "text", "announced"),
    [(100, "k", 100), (101, "k", None), (11, "k" * 509, 11), (12, "k" * 509, None), (20, "k" * 509, None),
     (10, "é" * 400, None)],
)  # fmt: skip
async def test_few_changed_keys_are_announced(
    harness: RefdataHarness, count: int, text: str, announced: int | None
) -> None:
    """R15: an announcement names up to 100 keys of up to 6,000 bytes; with more it has no `keys`."""
    await harness.send("LOOSE", *(upsert(f"{text}{number:03}", 1) for number in range(count)))
    await harness.apply()
    assert await count_announced_keys(harness) == [announced]
    assert await harness.relay() == 1


async def test_a_snapshot_names_no_keys(retention: RetentionHarness) -> None:
    """R15: a snapshot names no keys, in one command or in two chunks."""
    snapshot_id = uuid4()
    await retention.harness.send("LOOSE", upsert("a", 1), event_type="SNAPSHOT")
    for index in (1, 2):
        await retention.send_chunk(snapshot_id, index, 2, upsert(str(index), 1))
    await retention.harness.apply()
    assert await count_announced_keys(retention.harness) == [None, None]
    assert await retention.harness.relay() == 2


@pytest.mark.parametrize(("first", "second"), [ENDS, ENDS[::-1]], ids=["committed", "failed"])
async def test_an_update_ends_once(retention: RetentionHarness, first: CommandVerdict, second: CommandVerdict) -> None:
    """R7: a final update does not change, and a second result makes no journal entry."""
    event_id, seen = await unsent(retention), []
    for verdict in (first, second):
        retention.clock.advance(SECOND)
        async with retention.harness.db.transaction() as tx:
            await store.finish_updates(
                tx, [(CommandId(LOOSE, event_id, "REST"), verdict)], actor="me", now=retention.clock.now()
            )
        seen.append((await retention.harness.update(event_id), await retention.count("journal")))
    assert seen[0] == seen[1]
    assert (seen[0][0].status, seen[0][1]) == (first.status, 1)


@pytest.mark.parametrize(("first", "second"), [ENDS, ENDS[::-1]], ids=["committed", "failed"])
async def test_a_snapshot_ends_once(retention: RetentionHarness, first: CommandVerdict, second: CommandVerdict) -> None:
    """R13: a final snapshot does not change, and a second result makes no journal entry."""
    snapshot_id, seen = uuid4(), []
    async with retention.harness.db.transaction() as tx:
        await snapshot_store.open_set(tx, LOOSE, snapshot_id, 2, None, now=retention.clock.now())
    for verdict in (first, second):
        retention.clock.advance(SECOND)
        async with retention.harness.db.transaction() as tx:
            await snapshot_store.close_set(tx, LOOSE, snapshot_id, verdict, actor="me", now=retention.clock.now())
        seen.append((await retention.harness.db.fetch("SELECT * FROM snapshot_set"), await retention.count("journal")))
    assert seen[0] == seen[1]
    assert (seen[0][0][0]["status"], seen[0][1]) == (first.status.value, 1)


async def test_a_bus_that_is_down_puts_off_the_look(
    retention: RetentionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: after an error of the bus the next sweep probes again, not only after ten minutes."""
    await unsent(retention)
    retention.clock.advance(retention.harness.refdata.section.give_up_after + SECOND)
    with monkeypatch.context() as patched:
        patched.setattr(retention.harness.bus, "publish", refused)
        with pytest.raises(Transient, match="no answer"):
            await retention.upkeep.probe_updates()
    assert await retention.count("update_request", "probed_at IS NULL") == 1
    assert [await retention.upkeep.probe_updates() for _ in range(2)] == [1, 0]


async def test_a_fresh_update_is_not_looked_for(retention: RetentionHarness) -> None:
    """R8: an update is not probed before giveUpAfter has passed."""
    await unsent(retention)
    assert await retention.upkeep.probe_updates() == 0
    retention.clock.advance(retention.harness.refdata.section.give_up_after)
    assert await retention.upkeep.probe_updates() == 0
    retention.clock.advance(SECOND)
    assert await retention.upkeep.probe_updates() == 1


async def test_what_was_sent_to_look_is_not_set_aside(retention: RetentionHarness) -> None:
    """R8: the update ends as NOT_DELIVERED; the probe is no command and no dead letter."""
    event_id = await unsent(retention)
    retention.clock.advance(retention.harness.refdata.section.give_up_after + SECOND)
    await retention.upkeep.probe_updates()
    assert await retention.harness.apply() == 1
    assert (await retention.harness.update(event_id)).error_code == "NOT_DELIVERED"
    assert await retention.harness.dead() == []


async def test_a_snapshots_time_counts_from_its_last_chunk(retention: RetentionHarness) -> None:
    """R13: a snapshot whose chunks arrive slowly, each within snapshots.expireAfter, is complete."""
    snapshot_id, last = uuid4(), uuid4()
    for index in (1, 2, 3):
        last = await retention.send_chunk(snapshot_id, index, 3, upsert(str(index), 1))
        await retention.harness.apply()
        retention.clock.advance(0.9 * retention.harness.refdata.section.snapshots.expire_after)
        assert await retention.upkeep.expire_snapshots() == 0
    assert (await retention.harness.update(last)).status is UpdateState.COMMITTED
    assert await retention.harness.items("LOOSE") == {"1": 1, "2": 1, "3": 1}


@pytest.mark.parametrize("error", [RuntimeError("a defect of Penstock"), TimeoutError("no answer")], ids=type)
async def test_our_own_trouble_is_not_the_events(
    harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """R11: a defect of Penstock, more often than max_attempts, ends with the command applied, once."""
    left = stumbling(monkeypatch, error, times=3)
    event_id = await harness.send("LOOSE", upsert("a", 1))
    await harness.apply(max_attempts=1)
    update = await harness.update(event_id)
    assert (update.status, update.committed_version, left) == (UpdateState.COMMITTED, 1, [])
    assert (await harness.version("LOOSE"), await harness.dead()) == (1, [])


async def test_a_bus_that_is_down_does_not_count_against_foreign_messages(
    harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: a whole batch is retried without limit, including messages that cannot be converted."""
    monkeypatch.setattr(harness.refdata, "submit_all", refused)
    handle = make_adapter_handler(harness.refdata, TopicMapping(ExternalTopicSection(topic="theirs", **PLAIN)))
    deliveries = [delivery(value, position=place) for place, value in enumerate((b"1", b"{rubbish", b"2"))]
    outcomes = await handle(deliveries, asyncio.Event())
    assert outcomes == [Retry("BUS_DOWN: no answer", counts=False)] * 3


async def test_a_commit_of_another_worker_is_not_rejected(
    harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: if another worker commits the command between a failed statement and its rejection, the commit stays."""
    original, verdicts = CommandApplier._refuse, []

    async def late(self: CommandApplier, case: Any, refusal: CommandRefusal) -> CommandVerdict:
        other = CommandApplier(harness.db, harness.refdata.catalogue, "other")
        verdicts.extend([verdict async for verdict in other.apply_messages([ParsedMessage(case.event)])])
        verdicts.append(await original(self, case, refusal))
        return verdicts[-1]

    stumbling(monkeypatch, asyncpg.CheckViolationError("not now"), times=1)
    monkeypatch.setattr(CommandApplier, "_refuse", late)
    event_id = await harness.send("LOOSE", upsert("a", 1))
    await harness.apply()
    update = await harness.update(event_id)
    assert verdicts == [CommandVerdict(1), CommandVerdict(1, is_repeated=True)]
    assert (update.status, update.error_code, await harness.dead()) == (UpdateState.COMMITTED, None, [])
    assert (await harness.items("LOOSE"), await harness.version("LOOSE")) == ({"a": 1}, 1)
