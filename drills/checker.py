"""The guarantees of refdata, checked against the evidence of a drill. Pure functions without I/O."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drills.recorder import InjectedFault, Outcome, Read, Write

EXAMPLES = 5
SEED = 0  # the sequence number of the items before the first write


@dataclass(frozen=True)
class Evidence:
    """The data that is compared at the end of a drill."""

    base: int  # the version of the first write of all keys, with sequence 0
    settled: int  # the last version when no write was pending
    reads: Sequence[Read]
    writes: Sequence[Write]
    history: Sequence[tuple[int, str]]  # (version, event id) after base, in order, from the primary
    pod_items: Mapping[str, Mapping[int, "PodItem"]]  # pod -> key -> item; without pods that did not answer
    audits: Mapping[str, str]  # pod -> "" if it matches the primary, else the result of the audit
    faults: Sequence[InjectedFault] = ()
    selected: Sequence[str] = ()  # the faults to inject
    unreached: Sequence[str] = ()  # pods that did not answer at the end
    no_history: str = ""  # the error if the history could not be read


class PodItem(NamedTuple):
    """An item of a pod: its version, and the sequence of its write; None if the drill did not write it."""

    version: int
    sequence: int | None


@dataclass(frozen=True)
class GuaranteeResult:
    """A guarantee: whether it was kept, a summary, and examples of violations."""

    guarantee: str
    is_kept: bool
    detail: str
    examples: list[str] = field(default_factory=list)


def judge(evidence: Evidence) -> list[GuaranteeResult]:
    """Return the result of every guarantee."""
    reference = _Reference(evidence)
    settled = [write for write in evidence.writes if write.outcome is not Outcome.UNKNOWN]
    with_version = sum(read.min_version is not None and read.status == 200 for read in evidence.reads)
    answered = sum(read.status == 200 for read in evidence.reads)
    results = [
        _make_result(
            "the target answered",
            _find_missing_traffic(evidence),
            f"{answered:,} reads and {len(settled):,} writes were answered",
        ),
        _make_result(
            "no read is older than the version it required",
            _find_old_reads(evidence),
            f"{with_version:,} reads with a version",
        ),
        _make_result(
            "every read contains the data of its version", reference.find_wrong_reads(), f"{answered:,} reads compared"
        ),
        _make_result("no acknowledged write is lost", reference.find_lost_writes(), f"{len(settled):,} writes checked"),
        _make_result(
            "no write is repeated, no version is missing",
            reference.find_duplicates(),
            f"{len(evidence.history):,} versions",
        ),
        _make_result(
            "a later write has a later version", _find_disorder(evidence.writes), f"{len(settled):,} writes compared"
        ),
        _make_result(
            "every pod has the last write of every key", reference.find_wrong_items(), f"{len(evidence.pod_items)} pods"
        ),
        _make_result(
            "every pod has the items of the primary", _find_mismatches(evidence), f"{len(evidence.audits)} audits"
        ),
    ]
    if evidence.selected:
        injected = f"{sum(fault.is_judged for fault in evidence.faults)} of {len(evidence.selected)} faults"
        results.append(
            _make_result("every selected fault was injected and judged", _find_missing_faults(evidence), injected)
        )
    if evidence.faults:
        recovered = sum(fault.recovered_at is not None for fault in evidence.faults)
        summary = f"{recovered} of {len(evidence.faults)} faults"
        results.append(
            _make_result(
                "the target recovered in time after every fault", _find_missing_recoveries(evidence.faults), summary
            )
        )
    return results


def _make_result(guarantee: str, violations: Iterator[str], detail: str) -> GuaranteeResult:
    examples = list(violations)
    return GuaranteeResult(
        guarantee, not examples, f"{len(examples):,} violations; {detail}" if examples else detail, examples[:EXAMPLES]
    )


class _Reference:
    """The content of each version according to the history of the primary."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._last = max((version for version, _ in evidence.history), default=evidence.base)
        self._versions: dict[str, list[int]] = {}
        for version, event_id in evidence.history:
            self._versions.setdefault(event_id, []).append(version)
        self._by_key: dict[int, list[tuple[int, int]]] = {}
        commits = ((v, write) for write in evidence.writes for v in self._versions.get(write.event_id, ()))
        for version, write in sorted(commits, key=lambda commit: commit[0]):
            self._by_key.setdefault(write.key, []).append((version, write.sequence))

    def sequence_at(self, key: int, version: int) -> int:
        commits = self._by_key.get(key, [])
        index = bisect_right(commits, version, key=lambda commit: commit[0])
        return commits[index - 1][1] if index else SEED

    def find_wrong_reads(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for read in self._evidence.reads:
            if read.error:
                continue
            description = f"read of key {read.key} at {read.ended:.3f} s"
            if read.status != 200 or read.version is None:
                yield f"{description}: status {read.status} for an existing item"
            elif not self._evidence.base <= read.version <= self._last:
                yield f"{description}: version {read.version} was never committed"
            elif read.sequence != (expected := self.sequence_at(read.key, read.version)):
                yield f"{description}: write {read.sequence} as version {read.version}, which contains write {expected}"

    def find_lost_writes(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for write in self._evidence.writes:
            versions = self._versions.get(write.event_id, [])
            description = f"write {write.sequence} of key {write.key}, {write.outcome.value} at {write.ended:.3f} s"
            if write.outcome is not Outcome.UNKNOWN and not versions:
                yield f"{description}: in no version"
            elif write.version is not None and write.version not in versions:
                yield f"{description} as version {write.version}: it is version {versions[0]}"

    def find_duplicates(self) -> Iterator[str]:
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for event_id, versions in self._versions.items():
            if len(versions) > 1:
                yield f"event {event_id} created versions {', '.join(map(str, versions))}"
        counts = Counter(version for version, _ in self._evidence.history)
        for version in range(self._evidence.base + 1, self._last + 1):
            if counts[version] != 1:
                yield f"version {version} occurs {counts[version]} times"

    def find_wrong_items(self) -> Iterator[str]:
        yield from self._evidence.unreached
        if self._evidence.no_history:
            yield self._evidence.no_history
            return
        for pod, items in self._evidence.pod_items.items():
            for key, (version, sequence) in items.items():
                if not self._evidence.settled <= version <= self._last:
                    yield f"{pod} returns version {version}, the last is {self._last}"
                elif sequence != (expected := self.sequence_at(key, version)):
                    yield f"{pod} has write {sequence} of key {key} in version {version} instead of write {expected}"


def _find_missing_traffic(evidence: Evidence) -> Iterator[str]:
    if not any(read.status == 200 for read in evidence.reads):
        yield "no read was answered"
    if evidence.writes and not any(write.outcome is Outcome.ACKNOWLEDGED for write in evidence.writes):
        yield "no write was acknowledged"


def _find_old_reads(evidence: Evidence) -> Iterator[str]:
    for read in evidence.reads:
        if read.error or read.min_version is None:
            continue
        if read.status == 409 or (read.version is not None and read.version < read.min_version):
            result = "409" if read.status == 409 else f"version {read.version}"
            yield f"read of key {read.key} at {read.ended:.3f} s: {result} for committed version {read.min_version}"


def _find_disorder(writes: Sequence[Write]) -> Iterator[str]:
    """Yield writes with a lower version than a write that was acknowledged before they were sent."""
    acknowledged = sorted(
        ((w.ended, w.version, w.sequence) for w in writes if w.version is not None), key=lambda write: write[0]
    )
    highest, first, index = 0, 0, 0
    for write in sorted(writes, key=lambda write: write.sent):
        while index < len(acknowledged) and acknowledged[index][0] < write.sent:
            highest, first = max((highest, first), (acknowledged[index][1], acknowledged[index][2]))
            index += 1
        if write.version is not None and write.version < highest:
            yield f"write {write.sequence} is version {write.version}, write {first} before it version {highest}"


def _find_mismatches(evidence: Evidence) -> Iterator[str]:
    for pod, difference in evidence.audits.items():
        if difference:
            yield f"{pod}: {difference}"


def _find_missing_faults(evidence: Evidence) -> Iterator[str]:
    for number, name in enumerate(evidence.selected):
        if number >= len(evidence.faults):
            yield f"{name} was not injected"
        elif not evidence.faults[number].is_judged:
            yield f"{name} was injected but not judged"


def _find_missing_recoveries(faults: Sequence[InjectedFault]) -> Iterator[str]:
    for fault in faults:
        if fault.failure:
            yield f"{fault.name} at {fault.started_at:.1f} s could not be injected: {fault.failure}"
        elif fault.is_judged and fault.recovered_at is None:
            yield f"{fault.name} at {fault.started_at:.1f} s: not recovered"
