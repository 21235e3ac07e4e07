"""R18, R29: random loads, changes and freeing of memory with concurrent readers, compared with plain dicts."""

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
LONG = ["k" * 481, "k" * 481 + "é", "ключ" * 100, "\U0001f600" * 130]  # stored by their hash
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
    "reload_an_earlier_version": (TARGET, NUMBER),
    "fail_a_load": (ITEMS,),
    "mark_stale": (TARGET,),
    "drop": (st.sampled_from(TARGETS[1:]),),
    "pass_time": (st.sampled_from([0.0, 1.0, 25.0, 59.0, 61.0]), st.integers(0, 4)),
    "free_everything": (),
    "renew": (),
    "begin_pages": (TARGET, NUMBER),
    "read_next_page": (NUMBER, st.integers(1, 6), st.sampled_from([1, 600, 6_000, 10**6]), st.integers(1, 9)),
    "forge_pages": (TARGET, TARGET, NUMBER, st.binary(max_size=4)),
    "begin_all": (TARGET,),
    "read_all": (NUMBER,),
    "follow": (TARGET, st.integers(-2, 12)),
}
OFTEN = ["change"] * 3 + ["renew", "begin_pages", "read_next_page", "follow"]
ACT = st.one_of([st.tuples(st.just(name), *ACTS[name]) for name in [*ACTS, *OFTEN]])


@dataclass
class Moment:
    """The content of a dictionary at one version, with its generation and the time of its replacement."""

    items: Items
    load: int
    read_replacement_time: float | None = None


class Step(NamedTuple):
    at: float
    since: int
    version: int
    keys: list[str]


@dataclass
class ExpectedDictionary:
    """The expected state of one dictionary in memory."""

    moments: dict[VersionStamp, Moment] = field(default_factory=dict)
    loads: int = 0
    mark: VersionStamp | None = None  # None: there is no item
    stale_since: float = 0.0
    steps: list[Step] = field(default_factory=list)  # the changes stored for its generation

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
        (layout.decode_key(*item).decode(), layout.read_body(layout.decode_response(*item)).decode()) for item in found
    ]


def in_order(items: Items) -> list[tuple[str, str]]:
    """Return items in the order of their keys; long keys are at the end, in their own order."""
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
        self.expected_state = {target: ExpectedDictionary() for target in TARGETS}
        self.seen = {target: ExpectedDictionary() for target in TARGETS}
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
        """Load a dictionary in full; the version may be lower than before."""
        held = self.expected_state[whose].mark or VersionStamp(1, 0)
        self.publish(whose, self.new_mark(max(held.version - 1, 0) + version), items)

    def reload_an_earlier_version(self, whose: DictionaryKey, which: int) -> None:
        """Load the content of an earlier version in full, as after a restore or a reload without a change."""
        moments = list(self.expected_state[whose].moments.items())
        for mark, moment in moments[which % (len(moments) or 1) :][:1]:
            self.publish(whose, mark, moment.items)

    def publish(self, target: DictionaryKey, mark: VersionStamp, items: Items) -> None:
        generation, pairs = self.memory.begin_generation(), list(items.items())
        assert self.memory.fill(generation, pairs[:3]) + self.memory.fill(generation, pairs[2:]) == len(items)
        self.memory.publish(target, generation, mark, len(items))
        expected_state = self.expected_state[target]
        expected_state.replace(self.now)
        expected_state.loads += 1
        expected_state.mark, expected_state.stale_since, expected_state.steps = mark, 0.0, []
        expected_state.moments[mark] = Moment(dict(items), expected_state.loads)

    def change(self, whose: DictionaryKey, puts: Items, deletes: list[str], jump: int) -> None:
        expected_state = self.expected_state[whose]
        if expected_state.mark is None:
            return
        deletes = [key for key in deletes if key not in puts]
        items = {key: payload for key, payload in {**expected_state.items, **puts}.items() if key not in deletes}
        changed = [key for key in KEYS if expected_state.items.get(key) != items.get(key)]
        mark = self.new_mark(expected_state.mark.version + jump)
        assert sorted(self.memory.change_items(whose, mark, puts, deletes)) == sorted(changed)
        expected_state.replace(self.now)
        step = Step(self.now, expected_state.mark.version, mark.version, changed)
        expected_state.steps = [old for old in expected_state.steps if old.at >= self.now - PAGE_RETENTION] + [step]
        expected_state.mark, expected_state.stale_since, expected_state.moments[mark] = (
            mark,
            0.0,
            Moment(items, expected_state.loads),
        )

    def change_nothing(self, whose: DictionaryKey, keys: list[str]) -> None:
        expected_state = self.expected_state[whose]
        if expected_state.mark is not None:
            puts = {key: expected_state.items[key] for key in keys if key in expected_state.items}
            assert (
                self.memory.change_items(whose, expected_state.mark, puts, [key for key in keys if key not in puts])
                == []
            )
            expected_state.stale_since = 0.0

    def mark_stale(self, whose: DictionaryKey) -> None:
        self.memory.mark_stale(whose, self.now)
        if self.expected_state[whose].mark is not None:
            self.expected_state[whose].stale_since = self.expected_state[whose].stale_since or self.now

    def drop(self, whose: DictionaryKey) -> None:
        self.memory.drop(whose)
        self.expected_state[whose] = ExpectedDictionary()

    def fail_a_load(self, items: Items) -> None:
        self.memory.fill(generation := self.memory.begin_generation(), items.items())
        self.memory.discard(generation)

    def pass_time(self, seconds: float, pieces: int) -> None:
        self.now += seconds
        for _ in range(pieces):
            self.memory.free()

    def free_everything(self) -> None:
        """R29: check that everything that no reader can read is freed."""
        self.now += PAGE_RETENTION + 1
        while self.memory.free():
            pass
        there = [expected_state for expected_state in self.expected_state.values() if expected_state.mark is not None]
        expected = sum(
            2 + len(expected_state.items) + len(expected_state.steps) for expected_state in there
        )  # the header and the generation
        assert self.memory._env.stat()["entries"] == expected

    def renew(self) -> None:
        self.view.refresh()
        self.looked_at = self.now
        self.seen = {target: deepcopy(expected_state) for target, expected_state in self.expected_state.items()}

    def begin_pages(self, whose: DictionaryKey, which: int) -> None:
        """Start to read pages at a version that exists or existed."""
        moments = list(self.seen[whose].moments.items())
        for mark, moment in moments[which % (len(moments) or 1) :][:1]:
            self.reads.append(MemoryRead(whose, mark, moment.items))

    def read_next_page(self, which: int, limit: int, size: int, pages: int) -> None:
        """R17, R18: read the next page; the version must be consistent, and must not expire too early."""
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
        """Read a page with a foreign or forged cursor, which must be refused."""
        marks = list(self.seen[other].moments)
        mark = marks[which % len(marks)] if marks and other != whose else VersionStamp(which, -1)
        assert self.view.read_page(whose, PageCursor(mark, after), 5, 1_000) is None

    def begin_all(self, whose: DictionaryKey) -> None:
        """R17: start to read all items, which must stay at one version."""
        found = self.closing.enter_context(self.view.open_all(whose))
        assert (found and found[0].mark) == self.expected_state[whose].mark
        if found is not None:
            self.streams.append((found[1], in_order(self.expected_state[whose].items)))

    def read_all(self, which: int) -> None:
        if self.streams:
            items, expected = self.streams.pop(which % len(self.streams))
            assert shown(list(items)) == expected

    def follow(self, whose: DictionaryKey, back: int) -> None:
        """R31: read all changes after a version; they must be complete, or unavailable."""
        seen, header = self.seen[whose], self.view.read_header(whose)
        if seen.mark is None or header is None:
            return
        since = max(seen.mark.version - back, 0)
        steps = [step for step in seen.steps if step.version > since]
        is_known = steps[0].since <= since if steps else seen.mark.version == since
        found = self.view.read_changes(header, since)
        steps_found = [(change.since, change.version, {key.decode() for key in change.keys}) for change in found or ()]
        assert steps_found == [(change.since, change.version, set(change.keys)) for change in steps if is_known]
        assert (found is not None) == is_known

    @invariant()
    def the_writer_knows_what_there_is(self) -> None:
        assert set(self.memory.get_headers()) == {
            target for target, expected_state in self.expected_state.items() if expected_state.mark is not None
        }
        for target, header in self.memory.get_headers().items():
            expected_state = self.expected_state[target]
            assert (header.mark, header.items, header.stale_since) == (
                expected_state.mark,
                len(expected_state.items),
                expected_state.stale_since,
            )
            assert {key for key in KEYS if self.memory.has_item(target, key)} == expected_state.items.keys()

    @invariant()
    def a_view_is_consistent(self) -> None:
        """R18: check that a view contains one state of all dictionaries until it is refreshed."""
        for target, seen in self.seen.items():
            header = self.view.read_header(target)
            assert (header and header.mark) == seen.mark
            if header is not None:
                assert (header.items, header.stale_since) == (len(seen.items), seen.stale_since)
                found = {key: self.view.get(header, key.encode()) for key in KEYS}
                there = {
                    key: layout.read_body(response).decode() for key, response in found.items() if response is not None
                }
                assert there == seen.items


@pytest.mark.soak
def test_memory_behaves_like_plain_dicts(campaign: Campaign) -> None:
    """R18, R20, R29: after any sequence of writes and frees, every reader sees all items of one version."""
    rounds, steps = model_examples(40, soak=3_000), examples(12, soak=40)
    campaign.rounds = rounds
    run_state_machine_as_test(
        MemoryLifecycle, settings=settings(max_examples=rounds, stateful_step_count=steps, deadline=None)
    )
