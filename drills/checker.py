"""What was promised, held against what happened. Pure: a forged history is judged like a real one."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drills.recorder import Outcome, Read, Struck, Write

EXAMPLES = 5
SEED = 0  # the sequence of what was there before the first write


@dataclass(frozen=True)
class Evidence:
    """All that can be held against each other when a drill is over."""

    base: int  # the version under which every key was first written, with sequence 0
    settled: int  # the last version when nothing was under way any more
    reads: Sequence[Read]
    writes: Sequence[Write]
    history: Sequence[tuple[int, str]]  # (version, event id) after base, in order, as the primary tells
    finals: Mapping[str, Mapping[int, "Held"]]  # pod -> key -> what it has; a pod that could not be asked is missing
    audits: Mapping[str, str]  # pod -> "" when it agrees with the primary, else what it said
    faults: Sequence[Struck] = ()
    chosen: Sequence[str] = ()  # the faults that were to be struck
    unreached: Sequence[str] = ()  # pods that could not be asked at the end
    no_history: str = ""  # why the history is not known


class Held(NamedTuple):
    """What a pod answers for a key: the write, None when it is of none of ours, as of which version."""

    version: int
    sequence: int | None


@dataclass(frozen=True)
class Finding:
    """One promise: whether it held, on how much, and some of what broke it."""

    promise: str
    is_held: bool
    detail: str
    examples: list[str] = field(default_factory=list)


def judge(evidence: Evidence) -> list[Finding]:
    """Every promise."""
    truth = _Truth(evidence)
    settled = [write for write in evidence.writes if write.outcome is not Outcome.UNKNOWN]
    named = sum(read.least is not None and read.status == 200 for read in evidence.reads)
    answered = sum(read.status == 200 for read in evidence.reads)
    findings = [
        _finding("it was used", _idle(evidence), f"{answered:,} reads and {len(settled):,} writes were answered"),
        _finding("no read is older than it asked for", _too_old(evidence), f"{named:,} reads named a version"),
        _finding("a read is what its version holds", truth.lies(), f"{answered:,} reads compared"),
        _finding("nothing acknowledged is lost", truth.lost(), f"{len(settled):,} writes looked for"),
        _finding("nothing is doubled, no version is missing", truth.doubled(), f"{len(evidence.history):,} versions"),
        _finding("a later write has a later version", _disorder(evidence.writes), f"{len(settled):,} writes in order"),
        _finding("the last write of a key wins, in every pod", truth.wrong_ends(), f"{len(evidence.finals)} pods"),
        _finding("the pods agree with the primary", _disagreements(evidence), f"{len(evidence.audits)} audits"),
    ]
    if evidence.chosen:
        struck = f"{sum(fault.is_judged for fault in evidence.faults)} of {len(evidence.chosen)} faults"
        findings.append(_finding("every chosen fault was struck and judged", _not_struck(evidence), struck))
    if evidence.faults:
        well = sum(fault.well is not None for fault in evidence.faults)
        told = f"{well} of {len(evidence.faults)} faults"
        findings.append(_finding("well again in time after every fault", _unwell(evidence.faults), told))
    return findings


def _finding(promise: str, breaches: Iterator[str], detail: str) -> Finding:
    found = list(breaches)
    return Finding(promise, not found, f"{len(found):,} times broken; {detail}" if found else detail, found[:EXAMPLES])


class _Truth:
    """What each version is, by the primary's own history."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._last = max((version for version, _ in evidence.history), default=evidence.base)
        self._versions: dict[str, list[int]] = {}
        for version, event_id in evidence.history:
            self._versions.setdefault(event_id, []).append(version)
        self._by_key: dict[int, list[tuple[int, int]]] = {}
        made = ((v, write) for write in evidence.writes for v in self._versions.get(write.event_id, ()))
        for version, write in sorted(made, key=lambda one: one[0]):
            self._by_key.setdefault(write.key, []).append((version, write.sequence))

    def sequence_at(self, key: int, version: int) -> int:
        made = self._by_key.get(key, [])
        place = bisect_right(made, version, key=lambda one: one[0])
        return made[place - 1][1] if place else SEED

    def lies(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for read in self._evidence.reads:
            if read.error:
                continue
            about = f"read of key {read.key} at {read.ended:.3f} s"
            if read.status != 200 or read.version is None:
                yield f"{about}: status {read.status} for what is there"
            elif not self._evidence.base <= read.version <= self._last:
                yield f"{about}: version {read.version} was never committed"
            elif read.sequence != (true := self.sequence_at(read.key, read.version)):
                yield f"{about}: write {read.sequence} as version {read.version}, which holds write {true}"

    def lost(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for write in self._evidence.writes:
            versions = self._versions.get(write.event_id, [])
            about = f"write {write.sequence} of key {write.key}, {write.outcome.value} at {write.ended:.3f} s"
            if write.outcome is not Outcome.UNKNOWN and not versions:
                yield f"{about}: in no version"
            elif write.version is not None and write.version not in versions:
                yield f"{about} as version {write.version}: it is version {versions[0]}"

    def doubled(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for event_id, versions in self._versions.items():
            if len(versions) > 1:
                yield f"event {event_id} made versions {', '.join(map(str, versions))}"
        told = Counter(version for version, _ in self._evidence.history)
        for version in range(self._evidence.base + 1, self._last + 1):
            if told[version] != 1:
                yield f"version {version} is told {told[version]} times"

    def wrong_ends(self) -> Iterator[str]:
        yield from self._evidence.unreached
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for pod, held in self._evidence.finals.items():
            for key, (version, sequence) in held.items():
                if not self._evidence.settled <= version <= self._last:
                    yield f"{pod} answers as version {version}, the last is {self._last}"
                elif sequence != (true := self.sequence_at(key, version)):
                    yield f"{pod} has write {sequence} of key {key} as version {version}, which holds write {true}"


def _idle(evidence: Evidence) -> Iterator[str]:
    if not any(read.status == 200 for read in evidence.reads):
        yield "no read was answered"
    if evidence.writes and not any(write.outcome is Outcome.ACKNOWLEDGED for write in evidence.writes):
        yield "no write was acknowledged"


def _too_old(evidence: Evidence) -> Iterator[str]:
    for read in evidence.reads:
        if read.error or read.least is None:
            continue
        if read.status == 409 or (read.version is not None and read.version < read.least):
            said = "409" if read.status == 409 else f"version {read.version}"
            yield f"read of key {read.key} at {read.ended:.3f} s: {said}, asked for {read.least}, which was committed"


def _disorder(writes: Sequence[Write]) -> Iterator[str]:
    """Whoever writes after an acknowledgement comes after it."""
    known = sorted(((w.ended, w.version, w.sequence) for w in writes if w.version is not None), key=lambda one: one[0])
    highest, first, place = 0, 0, 0
    for write in sorted(writes, key=lambda write: write.sent):
        while place < len(known) and known[place][0] < write.sent:
            highest, first = max((highest, first), (known[place][1], known[place][2]))
            place += 1
        if write.version is not None and write.version < highest:
            yield f"write {write.sequence} is version {write.version}, write {first} before it version {highest}"


def _disagreements(evidence: Evidence) -> Iterator[str]:
    for pod, said in evidence.audits.items():
        if said:
            yield f"{pod}: {said}"


def _not_struck(evidence: Evidence) -> Iterator[str]:
    for number, name in enumerate(evidence.chosen):
        if number >= len(evidence.faults):
            yield f"{name} was not struck"
        elif not evidence.faults[number].is_judged:
            yield f"{name} was struck, and not judged"


def _unwell(faults: Sequence[Struck]) -> Iterator[str]:
    for fault in faults:
        if fault.failure:
            yield f"{fault.name} at {fault.began:.1f} s could not be done: {fault.failure}"
        elif fault.is_judged and fault.well is None:
            yield f"{fault.name} at {fault.began:.1f} s: not well again"
