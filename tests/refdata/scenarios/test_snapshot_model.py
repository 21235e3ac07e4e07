"""R11–R13: random deltas, snapshots and chunks in any order, repeated, late or missing, against a plain model."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.refdata.apply import snapshots
from penstock.refdata.apply.applier import CommandApplier
from penstock.refdata.commands.messages import parse_message
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.model import CommandVerdict, DictionaryKey
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    chunk,
    command,
    create_schemas,
    delete,
    dictionaries,
    on_bus,
    refdata_settings,
    upsert,
)
from tests.support.soak import Campaign, model_examples
from tests.support.types import Json

R = TypeVar("R")
EXPIRE_AFTER = timedelta(minutes=10)
MOST_ITEMS = 6
TARGETS = [
    DictionaryKey("acme", "LOOSE"),
    DictionaryKey("globex", "LOOSE"),
    DictionaryKey("acme", "CURRENCY"),
    DictionaryKey("globex", "CURRENCY"),
    DictionaryKey("acme", "PRODUCT"),
    DictionaryKey("globex", "PRODUCT"),
    DictionaryKey("acme", "SPARE"),
]
KEYS = {
    "LOOSE": ["a", "b:c", "ключ", "d"],
    "SPARE": ["a", "b:c", "ключ", "d"],
    "CURRENCY": ["EUR", "NOK", "JPY", "USD"],
    "PRODUCT": ["1", "20", "300", "4000"],
}
OURS = ("LOOSE", "SPARE")  # in one table, with the same keys
SNAPSHOT_IDS = [UUID(int=10**6 + number) for number in range(4)]  # few: those of one dictionary mean nothing to another
BAD = 9  # a value the tables of CURRENCY and PRODUCT refuse
TABLES = """
    TRUNCATE dictionary_meta, dictionary_item, processed_event, update_request, outbox_event, snapshot_set,
             snapshot_chunk, snapshot_event, journal, mdm_currency, acme.product, globex.product, incoming_product
    RESTART IDENTITY"""

Items = tuple[tuple[str, int | None], ...]  # key and value; None deletes
Kind = Literal["delta", "whole", "chunk", "beyond"]
ModelResult = tuple[str, int | None, str | None]  # status, version, code
TARGET = st.sampled_from(TARGETS)
VALUE = st.sampled_from([*range(5)] * 6 + [BAD])
REVISION = st.sampled_from([None, None, None, None, 1, 2, 3, 3, 4, 5])
PLACES = st.lists(st.tuples(st.integers(0, 3), st.none() | VALUE), max_size=4)
WHOLE = st.dictionaries(st.integers(0, 3), VALUE, max_size=4)


class SentEvent(NamedTuple):
    """An event as it is on the bus."""

    target: DictionaryKey
    event_id: UUID
    kind: Kind
    items: Items
    revision: int | None = None
    snapshot_id: UUID = UUID(int=0)
    place: int = 1
    total: int = 1


class Plan(NamedTuple):
    """A planned snapshot that is sent chunk by chunk."""

    target: DictionaryKey
    snapshot_id: UUID
    parts: tuple[Items, ...]
    revision: int | None


@dataclass(frozen=True)
class Delta:
    target: DictionaryKey
    places: Sequence[tuple[int, int | None]]
    revision: int | None


@dataclass(frozen=True)
class Whole:
    target: DictionaryKey
    values: dict[int, int]
    revision: int | None


@dataclass(frozen=True)
class Chunk:
    """The n-th chunk of a plan, unchanged or with one change."""

    plan: int
    place: int
    change: Literal["", "content", "total", "revision", "beyond"]


@dataclass(frozen=True)
class Again:
    """A repeated event, unchanged or with other content under its id."""

    place: int
    other: Delta | None


CHANGES = st.sampled_from(["", "", "", "content", "total", "revision", "beyond"])
DELTA = st.builds(Delta, TARGET, PLACES, REVISION)
ACT = st.one_of(
    DELTA,
    st.builds(Whole, TARGET, WHOLE, REVISION),
    st.builds(Chunk, st.integers(0, 3), st.integers(0, 3), CHANGES),
    st.builds(Again, st.integers(0, 500), st.none() | DELTA),
)
Act = Delta | Whole | Chunk | Again


@dataclass
class ModelDict:
    """The expected content of a dictionary."""

    version: int = 0
    revision: int | None = None
    items: dict[str, int] = field(default_factory=dict)

    def is_newer_than(self, revision: int | None) -> bool:
        return revision is not None and self.revision is not None and revision < self.revision

    def commit(self, items: dict[str, int], revision: int | None) -> ModelResult:
        self.items, self.version = items, self.version + 1
        self.revision = self.revision if revision is None else revision
        return "COMMITTED", self.version, None


@dataclass
class ModelSet:
    """The received chunks of a snapshot."""

    total: int
    revision: int | None
    touched: datetime
    chunks: dict[int, Items] = field(default_factory=dict)
    events: list[tuple[str, UUID]] = field(default_factory=list)
    end: ModelResult | None = None


@dataclass
class SnapshotModel:
    """R11–R13 in plain Python: sequential, without storage."""

    dicts: dict[DictionaryKey, ModelDict] = field(default_factory=lambda: {target: ModelDict() for target in TARGETS})
    sets: dict[tuple[DictionaryKey, UUID], ModelSet] = field(default_factory=dict)
    results: dict[tuple[str, UUID], ModelResult] = field(default_factory=dict)

    def judge(self, sent: SentEvent, now: datetime) -> ModelResult | None:
        """Return the result of an event; None if it was processed before."""
        key = (sent.target.tenant_id, sent.event_id)
        if key in self.results:
            return None
        if sent.kind == "beyond":
            self.results[key] = failed("BAD_CHUNK")
        elif sent.kind == "chunk":
            self.results[key] = self.judge_chunk(sent, now)
        elif self.dicts[sent.target].is_newer_than(sent.revision):
            self.results[key] = failed("STALE_REVISION")
        elif is_refused(sent.target, sent.items):
            self.results[key] = failed("SQL_ERROR")
        else:
            dictionary = self.dicts[sent.target]
            items = dict(dictionary.items) if sent.kind == "delta" else {}
            for name, value in sent.items:
                if value is None:
                    items.pop(name, None)
                else:
                    items[name] = value
            self.results[key] = dictionary.commit(items, sent.revision)
        return self.results[key]

    def judge_chunk(self, sent: SentEvent, now: datetime) -> ModelResult:
        opened = ModelSet(sent.total, sent.revision, now)
        known = self.sets.setdefault((sent.target, sent.snapshot_id), opened)
        if sent.total != known.total:
            return failed("CHUNKS_TOTAL_DIFFERS")
        if sent.revision != known.revision:
            return failed("SOURCE_REVISION_DIFFERS")
        if known.end and known.end[0] == "FAILED":
            return known.end
        if known.chunks.get(sent.place, sent.items) != sent.items:
            return failed("CHUNK_CONFLICT")
        if known.end:
            return known.end
        known.chunks[sent.place], known.touched = sent.items, now
        known.events.append((sent.target.tenant_id, sent.event_id))
        if sum(map(len, known.chunks.values())) > MOST_ITEMS:  # reported with the chunk that exceeds the limit
            return self.close(known, failed("SNAPSHOT_TOO_LARGE"))
        if len(known.chunks) < known.total:
            return "PENDING", None, None
        return self.close(known, self.complete(sent.target, known))

    def complete(self, target: DictionaryKey, known: ModelSet) -> ModelResult:
        dictionary = self.dicts[target]
        items = tuple(item for index in sorted(known.chunks) for item in known.chunks[index])
        if dictionary.is_newer_than(known.revision):
            return failed("STALE_REVISION")
        if len(dict(items)) < len(items):
            return failed("DUPLICATE_KEY")
        if is_refused(target, items):
            return failed("SQL_ERROR")
        return dictionary.commit({key: value for key, value in items if value is not None}, known.revision)

    def close(self, known: ModelSet, end: ModelResult) -> ModelResult:
        known.end = end
        self.results.update(dict.fromkeys(known.events, end))
        return end

    def expire(self, now: datetime) -> int:
        late = [
            snapshot
            for snapshot in self.sets.values()
            if snapshot.end is None and snapshot.touched < now - EXPIRE_AFTER
        ]
        for snapshot in late:
            self.close(snapshot, failed("SNAPSHOT_INCOMPLETE"))
        return len(late)


def failed(code: str) -> ModelResult:
    return "FAILED", None, code


def is_refused(target: DictionaryKey, items: Items) -> bool:
    """Return whether the table of the dictionary rejects one of *items*."""
    return target.dict_code not in OURS and any(value is not None and value > 4 for _, value in items)


def payload_of(code: str, value: int) -> Any:
    if code == "CURRENCY":
        return {"name": f"nr {value}", "digits": value}
    return {"brand": 1, "price": value if value <= 4 else -value} if code == "PRODUCT" else value


def value_of(code: str, text: str) -> int:
    """Return the value of an item as a reader loads it."""
    found = msgspec.json.decode(text)
    return int(found["digits"] if code == "CURRENCY" else found["price"] if code == "PRODUCT" else found)


def delivery_of(sent: SentEvent) -> BusDelivery:
    code = sent.target.dict_code
    items = [delete(key) if value is None else upsert(key, payload_of(code, value)) for key, value in sent.items]
    more: Json = {} if sent.revision is None else {"sourceRevision": sent.revision}
    if sent.kind == "delta":
        body = command(code, *items, **more)
    elif sent.kind == "whole":
        body = command(code, *items, event_type="SNAPSHOT", **more)
    else:
        body = chunk(code, sent.snapshot_id, sent.place, sent.total, *items, **more)
    value, key = on_bus(body, sent.target.tenant_id, sent.event_id)
    return BusDelivery(BusMessage("commands", key, value), 1, 0, 0, 0)


class SnapshotLifecycle(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.opened = Database.open(self.url, clock=self.clock, size=2, prefers_indexes=True, decodes_json=False)
        self.db = self.run(self.opened.__aenter__())
        self.run(self.db.execute(TABLES))
        known = [*dictionaries(DOCUMENT), *dictionaries(OTHER), {"code": "SPARE"}]
        self.catalogue = DictionaryCatalogue(refdata_settings(self.url, dictionaries=known).refdata)
        self.applier = CommandApplier(self.db, self.catalogue, "walker", max_items=MOST_ITEMS)
        self.model = SnapshotModel()
        self.plans: list[Plan] = []
        self.came: list[SentEvent] = []
        self.numbers = 0

    def run(self, work: Awaitable[R]) -> R:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.loop.close()

    def new_id(self) -> UUID:
        self.numbers += 1
        return UUID(int=self.numbers)

    @rule(
        whose=TARGET,
        parts=st.lists(st.lists(st.tuples(st.integers(0, 3), VALUE), max_size=3), min_size=1, max_size=4),
        snapshot_id=st.sampled_from(SNAPSHOT_IDS),
        is_tidy=st.sampled_from([True, True, True, False]),
        revision=REVISION,
    )
    def plan(
        self,
        whose: DictionaryKey,
        parts: list[list[tuple[int, int]]],
        snapshot_id: UUID,
        is_tidy: bool,
        revision: int | None,
    ) -> None:
        """Plan a snapshot: a tidy one has unique keys, others may have a key in two chunks."""
        keys, seen = KEYS[whose.dict_code], set[int]()
        made: list[Items] = []
        for part in parts:
            once = {place: value for place, value in part if not (is_tidy and place in seen)}
            seen |= once.keys()
            made.append(tuple((keys[place], value) for place, value in once.items()))
        self.plans = [*self.plans[-3:], Plan(whose, snapshot_id, tuple(made), revision)]

    @rule(acts=st.lists(ACT, min_size=1, max_size=6))
    def deliver(self, acts: list[Act]) -> None:
        self.settle([sent for act in acts if (sent := self.sent(act)) is not None])

    @precondition(lambda self: self.plans)
    @rule(
        plan=st.integers(0, 3),
        order=st.permutations(range(4)),
        lost=st.integers(0, 6),
        twist=st.tuples(st.integers(0, 4), st.integers(0, 3), CHANGES),
        between=st.lists(DELTA, max_size=2),
    )
    def deliver_a_whole_plan(
        self, plan: int, order: list[int], lost: int, twist: tuple[int, int, str], between: list[Delta]
    ) -> None:
        """Send all chunks except perhaps one, in any order, one of them twice or changed, with deltas in between."""
        planned = self.plans[plan % len(self.plans)]
        kept = [index for index in order if index < len(planned.parts) and index != lost]
        batch = [self.chunk(planned, index) for index in kept]
        batch.insert(twist[0], self.chunk(planned, *twist[1:]))
        for number, delta in enumerate(between, start=1):
            batch.insert(number, self.delta(delta, self.new_id()))
        self.settle(batch)

    @rule(seconds=st.integers(1, 900))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    @rule(seconds=st.sampled_from([0, 0, 601]))
    def expire(self, seconds: int) -> None:
        self.clock.advance(timedelta(seconds=seconds))
        assert self.run(snapshots.expire_snapshots(self.db, EXPIRE_AFTER, "walker")) == self.model.expire(
            self.clock.now()
        )

    def sent(self, act: Act) -> SentEvent | None:
        if isinstance(act, Delta):
            return self.delta(act, self.new_id())
        if isinstance(act, Whole):
            keys = KEYS[act.target.dict_code]
            items = tuple((keys[place], value) for place, value in act.values.items())
            return SentEvent(act.target, self.new_id(), "whole", items, act.revision)
        if isinstance(act, Chunk):
            return self.chunk(self.plans[act.plan % len(self.plans)], act.place, act.change) if self.plans else None
        if not self.came:
            return None
        before = self.came[act.place % len(self.came)]
        if act.other is None:
            return before
        other = self.delta(act.other, before.event_id)
        return other._replace(target=DictionaryKey(before.target.tenant_id, other.target.dict_code))

    def delta(self, act: Delta, event_id: UUID) -> SentEvent:
        keys = KEYS[act.target.dict_code]
        items = tuple((keys[place], value) for place, value in act.places)
        return SentEvent(act.target, event_id, "delta", items, act.revision)

    def chunk(self, plan: Plan, place: int, change: str = "") -> SentEvent:
        total = len(plan.parts)
        index = place % total
        items = plan.parts[index]
        sent = SentEvent(plan.target, self.new_id(), "chunk", items, plan.revision, plan.snapshot_id, index + 1, total)
        if change == "content":
            key = KEYS[plan.target.dict_code][0]
            return sent._replace(items=() if items else ((key, 1),))
        if change == "total":
            return sent._replace(total=total + 1)
        if change == "revision":
            return sent._replace(revision=(plan.revision or 0) + 1)
        return sent._replace(kind="beyond", place=total + 1) if change == "beyond" else sent

    def settle(self, batch: list[SentEvent]) -> None:
        """Apply *batch* at once, and compare the results with those of the model in sequence."""

        async def verdicts() -> list[CommandVerdict]:
            return [
                verdict
                async for verdict in self.applier.apply_messages([parse_message(delivery_of(sent)) for sent in batch])
            ]

        found = self.run(verdicts())
        assert len(found) == len(batch)
        for sent, verdict in zip(batch, found, strict=True):
            expected = self.model.judge(sent, self.clock.now())
            assert verdict.is_repeated is (expected is None)
            if expected is not None:
                code = verdict.refusal.code if verdict.refusal else None
                assert (verdict.status.value, verdict.version, code) == expected, sent
        self.came += batch

    @invariant()
    def what_readers_see_equals_the_model(self) -> None:
        """R13: items are those of all commits; nothing of an incomplete snapshot or of a failed command is visible."""
        for target, expected in self.model.dicts.items():
            loaded = self.run(self.catalogue.get(target).provider.load_all(self.db, target))
            assert {key: value_of(target.dict_code, text) for key, text in loaded.items.items()} == expected.items
            assert loaded.version == expected.version

    @invariant()
    def every_update_ended_as_the_model_says(self) -> None:
        """R7: all events of a snapshot have one version, or one error."""
        rows = self.run(self.db.fetch("SELECT * FROM update_request"))
        results = {
            (row["tenant_id"], row["event_id"]): (row["status"], row["committed_version"], row["error_code"])
            for row in rows
        }
        assert results == self.model.results
        assert all((row["error_message"] is None) == (row["status"] != "FAILED") for row in rows)

    @invariant()
    def every_version_is_announced_once_and_in_order(self) -> None:
        """R15: the outbox has versions 1 to n of each dictionary."""
        rows = self.run(self.db.fetch("SELECT tenant_id, dict_code, version FROM outbox_event ORDER BY id"))
        for target, expected in self.model.dicts.items():
            versions = [row["version"] for row in rows if (row["tenant_id"], row["dict_code"]) == target]
            assert versions == list(range(1, expected.version + 1))

    @invariant()
    def sets_equal_the_model(self) -> None:
        """R13: each set has the state of the model; the content of a final one is deleted."""
        query = """
            SELECT s.*, (SELECT count(*) FROM snapshot_chunk c
                         WHERE (c.tenant_id, c.dict_code, c.snapshot_id) = (s.tenant_id, s.dict_code, s.snapshot_id)
                           AND c.items IS NOT NULL) AS kept
            FROM snapshot_set s"""
        rows = self.run(self.db.fetch(query))
        found = {(DictionaryKey(row["tenant_id"], row["dict_code"]), row["snapshot_id"]): row for row in rows}
        assert found.keys() == self.model.sets.keys()
        for key, snapshot in self.model.sets.items():
            status, version, code = snapshot.end or ("OPEN", None, None)
            row = found[key]
            assert (row["status"], row["committed_version"], row["error_code"]) == (status, version, code)
            assert row["kept"] == (0 if snapshot.end else len(snapshot.chunks))
        assert self.run(self.db.fetchval("SELECT count(*) FROM incoming_product")) == 0


@pytest.mark.soak
async def test_dictionaries_behave_like_the_model(database_url: str, campaign: Campaign) -> None:
    """R11, R12, R13: for any input in any order, items, versions, results and outbox equal those of a plain model."""
    campaign.rounds, campaign.counts_items = model_examples(20, soak=1000), True
    await create_schemas(database_url)
    machine = type("Run", (SnapshotLifecycle,), {"url": database_url})
    await asyncio.to_thread(
        run_state_machine_as_test,
        machine,
        settings=settings(max_examples=campaign.rounds, stateful_step_count=40, deadline=None),
    )
