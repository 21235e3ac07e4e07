"""The checker of a drill finds wrong reads, lost writes and repeated writes in a forged history."""

from dataclasses import replace

import pytest
from drills.checker import Evidence, PodItem, judge
from drills.recorder import InjectedFault, Outcome, Read, Write

BASE = 10


def write(sequence: int, key: int, version: int | None, sent: float) -> Write:
    outcome = Outcome.ACKNOWLEDGED if version else Outcome.UNKNOWN
    return Write(sequence, key, f"event-{sequence}", sent, sent, sent + 0.01, 1, outcome, version)


def read(key: int, version: int, sequence: int, min_version: int | None = None) -> Read:
    return Read(5.0, 5.0, 0, key, min_version, 5.01, 200, version, True, sequence)


def pod_items_at(version: int, **keys: int) -> dict[int, PodItem]:
    return {int(key[1:]): PodItem(version, sequence) for key, sequence in keys.items()}


WRITES = [write(1, 0, 11, 1.0), write(2, 1, 12, 2.0), write(3, 0, 13, 3.0), write(4, 1, None, 4.0)]
CORRECT = Evidence(
    base=BASE,
    settled=13,
    reads=[read(0, 11, 1), read(0, 12, 1, min_version=12), read(1, 11, 0), read(0, 13, 3), read(2, 13, 0)],
    writes=WRITES,
    history=[(11, "event-1"), (12, "event-2"), (13, "event-3")],
    pod_items={"pod-1": pod_items_at(13, k0=3, k1=2, k2=0), "pod-2": pod_items_at(13, k0=3, k1=2, k2=0)},
    audits={"pod-1": "", "pod-2": ""},
    faults=[InjectedFault("kill-pod", "kill -9", 1.0, 2.0, 2.5, is_judged=True)],
)


def broken(evidence: Evidence) -> list[str]:
    return [result.guarantee for result in judge(evidence) if not result.is_kept]


def test_a_correct_history_passes() -> None:
    """R27: a correct history has no violations, with or without a write that was not answered."""
    assert broken(CORRECT) == []
    assert (
        broken(
            replace(
                CORRECT, history=[*CORRECT.history, (14, "event-4")], pod_items={"pod-1": pod_items_at(14, k0=3, k1=4)}
            )
        )
        == []
    )


VIOLATIONS = {
    "no read is older than the version it required": replace(CORRECT, reads=[read(0, 11, 1, min_version=12)]),
    "every read contains the data of its version": replace(CORRECT, reads=[read(0, 13, 1)]),
    "no acknowledged write is lost": replace(CORRECT, history=[(11, "event-1"), (12, "event-2"), (13, "foreign")]),
    "no write is repeated, no version is missing": replace(CORRECT, history=[*CORRECT.history, (14, "event-3")]),
    "a later write has a later version": replace(
        CORRECT,
        writes=[write(1, 0, 12, 1.0), write(2, 1, 11, 2.0), WRITES[2]],
        history=[(11, "event-2"), (12, "event-1"), (13, "event-3")],
        reads=[read(0, 13, 3)],
    ),
    "every pod has the last write of every key": replace(CORRECT, pod_items={"pod-1": pod_items_at(13, k0=1)}),
    "every pod has the items of the primary": replace(CORRECT, audits={"pod-1": "", "pod-2": "different: [0]"}),
    "the target recovered in time after every fault": replace(
        CORRECT, faults=[InjectedFault("kill-pod", "kill -9", 1.0, 2.0, is_judged=True)]
    ),
    "every selected fault was injected and judged": replace(CORRECT, selected=["kill-pod", "kill-apply"]),
    "the target answered": replace(CORRECT, reads=[], pod_items={}),
}


@pytest.mark.parametrize("guarantee", VIOLATIONS)
def test_a_forged_violation_is_found(guarantee: str) -> None:
    """R27: each guarantee can be violated, and its result contains an example."""
    results = {result.guarantee: result for result in judge(VIOLATIONS[guarantee])}
    assert not results[guarantee].is_kept
    assert results[guarantee].examples


@pytest.mark.parametrize(
    ("forged", "guarantee"),
    [
        (
            replace(CORRECT.reads[0], status=404, version=13, sequence=None),
            "every read contains the data of its version",
        ),
        (replace(CORRECT.reads[0], version=99), "every read contains the data of its version"),
        (
            replace(CORRECT.reads[0], status=409, min_version=12, version=11),
            "no read is older than the version it required",
        ),
    ],
    ids=["not found", "never committed", "refused"],
)
def test_a_wrong_response_is_a_violation(forged: Read, guarantee: str) -> None:
    """R27: a read may fail, but a response with data must be correct."""
    assert guarantee in broken(replace(CORRECT, reads=[forged]))
    assert broken(replace(CORRECT, reads=[*CORRECT.reads, replace(forged, error="503")])) == []


def test_a_missing_accepted_write_is_lost() -> None:
    """R27: a write that was answered with 202 must not be lost, like one with 200."""
    missing = replace(WRITES[3], outcome=Outcome.ACCEPTED)
    assert broken(replace(CORRECT, writes=[*WRITES[:3], missing])) == ["no acknowledged write is lost"]


def test_a_gap_between_versions_is_found() -> None:
    """R27: a missing version is a violation."""
    history = [entry for entry in CORRECT.history if entry[0] != 12]
    unacknowledged = [WRITES[0], replace(WRITES[1], outcome=Outcome.UNKNOWN, version=None), *WRITES[2:]]
    evidence = replace(CORRECT, history=history, writes=unacknowledged, pod_items={}, reads=[read(0, 13, 3)])
    assert broken(evidence) == ["no write is repeated, no version is missing"]


def test_two_writes_of_one_version_are_a_violation() -> None:
    """R27: a history with a repeated version is judged without an error."""
    find_duplicates = replace(CORRECT, history=[*CORRECT.history, (13, "event-4")])
    assert "no write is repeated, no version is missing" in broken(find_duplicates)


def test_a_write_that_is_committed_during_the_check_is_no_violation() -> None:
    """R27: the items of a pod are compared with the version of its response, which must not be an old one."""
    late = replace(CORRECT, history=[*CORRECT.history, (14, "event-4")])
    mixed = {"pod-1": {0: PodItem(13, 3), 1: PodItem(14, 4)}, "pod-2": pod_items_at(13, k1=2)}
    assert broken(replace(late, pod_items=mixed)) == []
    ends = "every pod has the last write of every key"
    assert broken(replace(late, pod_items={"pod-1": pod_items_at(12, k0=1)})) == [ends]
    assert broken(replace(late, pod_items={"pod-1": pod_items_at(15, k0=3)})) == [ends]


def test_a_fault_that_is_not_judged_cannot_pass() -> None:
    """R27: every selected fault must be injected and judged."""
    injected = replace(CORRECT, selected=["kill-pod"])
    assert broken(injected) == []
    open_end = replace(injected, faults=[InjectedFault("kill-pod", "kill -9", 1.0)])
    assert broken(open_end) == ["every selected fault was injected and judged"]


def test_an_unreadable_history_is_a_violation() -> None:
    """R27: without the history all guarantees that depend on it fail, with the error as the only example."""
    evidence = replace(
        CORRECT, history=[], pod_items={}, audits={}, no_history="the history could not be read: connection refused"
    )
    violated = [result for result in judge(evidence) if not result.is_kept]
    assert len(violated) == 4
    assert {line for result in violated for line in result.examples} == {evidence.no_history}
