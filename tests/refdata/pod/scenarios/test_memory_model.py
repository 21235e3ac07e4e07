"""R18, R29: random loads, changes and freeing of a pod's memory while readers page, against plain dicts."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout, writer
from penstock.refdata.pod.memory.reader import PageCursor, StoredItem
from penstock.refdata.pod.memory.writer import MemoryWriter
from tests.support.soak import Campaign, examples, model_examples

PAGE_RETENTION = 60.0
TARGETS = [DictionaryKey("acme", "A"), DictionaryKey("acme", "AB"), DictionaryKey("globex", "A")]
LONG = ["k" * 481, "k" * 481 + "é", "ключ" * 100, "\U0001f600" * 130]  # their places do not tell them
KEYS = ["", "a", "a\0b", "aa", "b", "ключ", "\U0001f600", "k" * 480, *LONG]
PAYLOADS = ["1", "2", '"x"', '{"n": null}', '"' + "y" * 5_000 + '"']
Items = dict[str, str]
KEY = st.integers(0, len(KEYS) - 1).map(lambda place: KEYS[place])
PAYLOAD = st.integers(0, len(PAYLOADS) - 1).map(lambda place: PAYLOADS[place])
TARGET = st.sampled_from([0, 0, 0, 0, 1, 2]).map(lambda place: TARGETS[place])
ITEMS, FEW_ITEMS = (st.dictionaries(KEY, PAYLOAD, max_size=most) for most in (len(KEYS), 3))
SOME_KEYS = st.lists(KEY, max_size=4, unique=True)
NUMBER = st.integers(0, 200)
ACTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "change": (TARGET, FEW_ITEMS, SOME_KEYS, st.sampled_from([1, 1, 1, 2, 3])),
    "change_nothing": (TARGET, SOME_KEYS),
    "load_all": (TARGET, ITEMS, st.integers(0, 6)),
    "load_all_of_a_mark_again": (TARGET, NUMBER),
    "fail_a_load": (ITEMS,),
    "mark_stale": (TARGET,),
    "drop": (st.sampled_from(TARGETS[1:]),),
    "pass_time": (st.sampled_from([0.0, 1.0, 25.0, 59.0, 61.0]), st.integers(0, 4)),
    "free_everything": (),
    "renew": (),
    "begin_pages": (TARGET, NUMBER),
    "read_on": (NUMBER, st.integers(1, 6), st.sampled_from([1, 600, 6_000, 10**6]), st.integers(1, 9)),
    "forge_pages": (TARGET, TARGET, NUMBER, st.binary(max_size=4)),
    "begin_all": (TARGET,),
    "read_all": (NUMBER,),
    "follow": (TARGET, st.integers(-2, 12)),
}
OFTEN = ["change"] * 3 + ["renew", "begin_pages", "read_on", "follow"]
ACT = st.one_of([st.tuples(st.just(name), *ACTS[name]) for name in [*ACTS, *OFTEN]])


@dataclass
class Moment:
    """What a dictionary was at one mark, since which of its full loads, and when something else came."""

    items: Items
    load: int
    read_replacement_time: float | None = None


class Step(NamedTuple):
    at: float
    since: int
    version: int
    keys: list[str]


@dataclass
class Kept:
    """What must be in memory of one dictionary."""

    moments: dict[VersionStamp, Moment] = field(default_factory=dict)
    loads: int = 0
    mark: VersionStamp | None = None  # None: it is not there
    stale_since: float = 0.0
    steps: list[Step] = field(default_factory=list)  # those that its generation remembers

    @property
    def items(self) -> Items:
        return {} if self.mark is None else self.moments[self.mark].items

    def replace(self, now: float) -> None:
        if self.mark is not None:
            self.moments[self.mark].read_replacement_time = now


@dataclass
class MemoryRead:
    target: DictionaryKey
    mark: VersionStamp
    items: Items
    found: list[StoredItem] = field(default_factory=list)


def shown(found: list[StoredItem]) -> list[tuple[str, str]]:
    return [
        (layout.decode_key(*one).decode(), layout.read_body(layout.decode_response(*one)).decode()) for one in found
    ]


def in_order(items: Items) -> list[tuple[str, str]]:
    """Items by the bytes of their keys; those with long ones at the end, in an order of their own."""
    return sorted(items.items(), key=lambda item: layout.make_stored_key(item[0].encode()))


class MemoryLifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.looked_at = 1_000.0
        self.stamp = 0
        self.closing = ExitStack()
        patch = self.closing.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(writer, "monotonic", lambda: self.now)
        patch.setattr(writer, "_FREE_BATCH", 3)
        folder = self.closing.enter_context(tempfile.TemporaryDirectory())
        self.memory = MemoryWriter(Path(folder), limit=2**26, page_retention=PAGE_RETENTION)
        self.closing.callback(self.memory.close)
        self.view = self.memory.open_view()
        self.closing.callback(lambda: self.view.txn.abort())
        self.kept = {target: Kept() for target in TARGETS}
        self.seen = {target: Kept() for target in TARGETS}
        self.reads: list[MemoryRead] = []
        self.load_all(TARGETS[0], {}, 1)
        self.streams: list[tuple[Iterator[StoredItem], list[tuple[str, str]]]] = []

    def teardown(self) -> None:
        self.closing.close()

    def new_mark(self, version: int) -> VersionStamp:
        self.stamp += 1
        return VersionStamp(version, self.stamp)

    @rule(acts=st.lists(ACT, min_size=1, max_size=10))
    def act(self, acts: list[tuple[Any, ...]]) -> None:
        for name, *given in acts:
            getattr(self, name)(*given)

    def load_all(self, whose: DictionaryKey, items: Items, version: int) -> None:
        """A full load; its version may be lower than the one before."""
        held = self.kept[whose].mark or VersionStamp(1, 0)
        self.publish(whose, self.new_mark(max(held.version - 1, 0) + version), items)

    def load_all_of_a_mark_again(self, whose: DictionaryKey, which: int) -> None:
        """A full load of what was there at that mark: a primary restored, or loaded anew without a change."""
        moments = list(self.kept[whose].moments.items())
        for mark, moment in moments[which % (len(moments) or 1) :][:1]:
            self.publish(whose, mark, moment.items)

    def publish(self, target: DictionaryKey, mark: VersionStamp, items: Items) -> None:
        generation, pairs = self.memory.begin_generation(), list(items.items())
        assert self.memory.fill(generation, pairs[:3]) + self.memory.fill(generation, pairs[2:]) == len(items)
        self.memory.publish(target, generation, mark, len(items))
        kept = self.kept[target]
        kept.replace(self.now)
        kept.loads += 1
        kept.mark, kept.stale_since, kept.steps = mark, 0.0, []
        kept.moments[mark] = Moment(dict(items), kept.loads)

    def change(self, whose: DictionaryKey, puts: Items, deletes: list[str], jump: int) -> None:
        kept = self.kept[whose]
        if kept.mark is None:
            return
        deletes = [key for key in deletes if key not in puts]
        items = {key: payload for key, payload in {**kept.items, **puts}.items() if key not in deletes}
        changed = [key for key in KEYS if kept.items.get(key) != items.get(key)]
        mark = self.new_mark(kept.mark.version + jump)
        assert sorted(self.memory.change(whose, mark, puts, deletes)) == sorted(changed)
        kept.replace(self.now)
        step = Step(self.now, kept.mark.version, mark.version, changed)
        kept.steps = [one for one in kept.steps if one.at >= self.now - PAGE_RETENTION] + [step]
        kept.mark, kept.stale_since, kept.moments[mark] = mark, 0.0, Moment(items, kept.loads)

    def change_nothing(self, whose: DictionaryKey, keys: list[str]) -> None:
        kept = self.kept[whose]
        if kept.mark is not None:
            puts = {key: kept.items[key] for key in keys if key in kept.items}
            assert self.memory.change(whose, kept.mark, puts, [key for key in keys if key not in puts]) == []
            kept.stale_since = 0.0

    def mark_stale(self, whose: DictionaryKey) -> None:
        self.memory.mark_stale(whose, self.now)
        if self.kept[whose].mark is not None:
            self.kept[whose].stale_since = self.kept[whose].stale_since or self.now

    def drop(self, whose: DictionaryKey) -> None:
        self.memory.drop(whose)
        self.kept[whose] = Kept()

    def fail_a_load(self, items: Items) -> None:
        self.memory.fill(generation := self.memory.begin_generation(), items.items())
        self.memory.discard(generation)

    def pass_time(self, seconds: float, pieces: int) -> None:
        self.now += seconds
        for _ in range(pieces):
            self.memory.free()

    def free_everything(self) -> None:
        """R29: what nobody can read any more is really gone."""
        self.now += PAGE_RETENTION + 1
        while self.memory.free():
            pass
        there = [kept for kept in self.kept.values() if kept.mark is not None]
        expected = sum(2 + len(kept.items) + len(kept.steps) for kept in there)  # the shelf and whose it is
        assert self.memory._env.stat()["entries"] == expected

    def renew(self) -> None:
        self.view.refresh()
        self.looked_at = self.now
        self.seen = {target: deepcopy(kept) for target, kept in self.kept.items()}

    def begin_pages(self, whose: DictionaryKey, which: int) -> None:
        """Read page by page at a mark that there is or was."""
        moments = list(self.seen[whose].moments.items())
        for mark, moment in moments[which % (len(moments) or 1) :][:1]:
            self.reads.append(MemoryRead(whose, mark, moment.items))

    def read_on(self, which: int, limit: int, size: int, pages: int) -> None:
        """R17, R18: pages together are the dictionary at their mark, or it is gone, but not too early."""
        if not self.reads:
            return
        read = self.reads.pop(which % len(self.reads))
        for _ in range(pages):
            at = PageCursor(read.mark, read.found[-1][0] if read.found else b"")
            page = self.view.read_page(read.target, at, limit, size)
            if not page:
                assert page is not None or not self.must_be_kept(read)
                assert page is None or shown(read.found) == in_order(read.items)
                return
            assert len(page) <= limit
            assert sum(len(place) + len(value) for place, value in page[:-1]) < size
            read.found += page
        self.reads.append(read)

    def must_be_kept(self, read: MemoryRead) -> bool:
        seen = self.seen[read.target]
        moment = seen.moments.get(read.mark)
        is_late = (
            moment
            and moment.read_replacement_time is not None
            and moment.read_replacement_time + PAGE_RETENTION <= self.looked_at
        )
        return moment is not None and seen.loads <= moment.load + 1 and not is_late

    def forge_pages(self, whose: DictionaryKey, other: DictionaryKey, which: int, after: bytes) -> None:
        """A mark of another dictionary, or of none, leads nowhere."""
        marks = list(self.seen[other].moments)
        mark = marks[which % len(marks)] if marks and other != whose else VersionStamp(which, -1)
        assert self.view.read_page(whose, PageCursor(mark, after), 5, 1_000) is None

    def begin_all(self, whose: DictionaryKey) -> None:
        """R17: whoever reads everything sees one version, whatever comes meanwhile."""
        found = self.closing.enter_context(self.view.open_all(whose))
        assert (found and found[0].mark) == self.kept[whose].mark
        if found is not None:
            self.streams.append((found[1], in_order(self.kept[whose].items)))

    def read_all(self, which: int) -> None:
        if self.streams:
            items, expected = self.streams.pop(which % len(self.streams))
            assert shown(list(items)) == expected

    def follow(self, whose: DictionaryKey, back: int) -> None:
        """R31: every change after a version, or that they are not all remembered."""
        seen, header = self.seen[whose], self.view.header(whose)
        if seen.mark is None or header is None:
            return
        since = max(seen.mark.version - back, 0)
        steps = [step for step in seen.steps if step.version > since]
        is_known = steps[0].since <= since if steps else seen.mark.version == since
        found = self.view.read_changes(header, since)
        told = [(one.since, one.version, {key.decode() for key in one.keys}) for one in found or ()]
        assert told == [(one.since, one.version, set(one.keys)) for one in steps if is_known]
        assert (found is not None) == is_known

    @invariant()
    def the_writer_knows_what_there_is(self) -> None:
        assert set(self.memory.headers()) == {target for target, kept in self.kept.items() if kept.mark is not None}
        for target, header in self.memory.headers().items():
            kept = self.kept[target]
            assert (header.mark, header.items, header.stale_since) == (kept.mark, len(kept.items), kept.stale_since)
            assert {key for key in KEYS if self.memory.has_item(target, key)} == kept.items.keys()

    @invariant()
    def a_reader_sees_what_was_there_when_it_looked(self) -> None:
        """R18: one state of everything, until it looks again."""
        for target, seen in self.seen.items():
            header = self.view.header(target)
            assert (header and header.mark) == seen.mark
            if header is not None:
                assert (header.items, header.stale_since) == (len(seen.items), seen.stale_since)
                found = {key: self.view.get(header, key.encode()) for key in KEYS}
                there = {key: layout.read_body(one).decode() for key, one in found.items() if one is not None}
                assert there == seen.items


@pytest.mark.soak
def test_memory_behaves_like_plain_dicts(campaign: Campaign) -> None:
    """R18, R20, R29: whatever is written and freed in whatever order, every reader sees one version, and all of it."""
    rounds, steps = model_examples(40, soak=3_000), examples(12, soak=40)
    campaign.rounds = rounds
    run_state_machine_as_test(
        MemoryLifecycle, settings=settings(max_examples=rounds, stateful_step_count=steps, deadline=None)
    )
