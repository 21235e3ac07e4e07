"""The judge of a drill can say no: planted lies, losses and doubles are found in a forged history."""

from dataclasses import replace

import pytest
from drills.checker import Evidence, Held, judge
from drills.recorder import Outcome, Read, Struck, Write

BASE = 10


def write(sequence: int, key: int, version: int | None, sent: float) -> Write:
    told = Outcome.ACKNOWLEDGED if version else Outcome.UNKNOWN
    return Write(sequence, key, f"event-{sequence}", sent, sent, sent + 0.01, 1, told, version)


def read(key: int, version: int, sequence: int, least: int | None = None) -> Read:
    return Read(5.0, 5.0, 0, key, least, 5.01, 200, version, True, sequence)


def held(version: int, **keys: int) -> dict[int, Held]:
    return {int(key[1:]): Held(version, sequence) for key, sequence in keys.items()}


WRITES = [write(1, 0, 11, 1.0), write(2, 1, 12, 2.0), write(3, 0, 13, 3.0), write(4, 1, None, 4.0)]
TRUE = Evidence(
    base=BASE,
    settled=13,
    reads=[read(0, 11, 1), read(0, 12, 1, least=12), read(1, 11, 0), read(0, 13, 3), read(2, 13, 0)],
    writes=WRITES,
    history=[(11, "event-1"), (12, "event-2"), (13, "event-3")],
    finals={"pod-1": held(13, k0=3, k1=2, k2=0), "pod-2": held(13, k0=3, k1=2, k2=0)},
    audits={"pod-1": "", "pod-2": ""},
    faults=[Struck("kill-pod", "kill -9", 1.0, 2.0, 2.5, is_judged=True)],
)


def broken(evidence: Evidence) -> list[str]:
    return [finding.promise for finding in judge(evidence) if not finding.is_held]


def test_a_true_history_is_believed() -> None:
    """R27: when every promise held, nothing is found, whether or not an unanswered write is there."""
    assert broken(TRUE) == []
    assert broken(replace(TRUE, history=[*TRUE.history, (14, "event-4")], finals={"pod-1": held(14, k0=3, k1=4)})) == []


LIES = {
    "no read is older than it asked for": replace(TRUE, reads=[read(0, 11, 1, least=12)]),
    "a read is what its version holds": replace(TRUE, reads=[read(0, 13, 1)]),
    "nothing acknowledged is lost": replace(TRUE, history=[(11, "event-1"), (12, "event-2"), (13, "somebody's")]),
    "nothing is doubled, no version is missing": replace(TRUE, history=[*TRUE.history, (14, "event-3")]),
    "a later write has a later version": replace(
        TRUE,
        writes=[write(1, 0, 12, 1.0), write(2, 1, 11, 2.0), WRITES[2]],
        history=[(11, "event-2"), (12, "event-1"), (13, "event-3")],
        reads=[read(0, 13, 3)],
    ),
    "the last write of a key wins, in every pod": replace(TRUE, finals={"pod-1": held(13, k0=1)}),
    "the pods agree with the primary": replace(TRUE, audits={"pod-1": "", "pod-2": "different: [0]"}),
    "well again in time after every fault": replace(
        TRUE, faults=[Struck("kill-pod", "kill -9", 1.0, 2.0, is_judged=True)]
    ),
    "every chosen fault was struck and judged": replace(TRUE, chosen=["kill-pod", "kill-apply"]),
    "it was used": replace(TRUE, reads=[], finals={}),
}


@pytest.mark.parametrize("promise", LIES)
def test_a_planted_breach_is_found(promise: str) -> None:
    """R27: each promise can fail, and its finding says where."""
    found = {finding.promise: finding for finding in judge(LIES[promise])}
    assert not found[promise].is_held
    assert found[promise].examples


@pytest.mark.parametrize(
    ("forged", "promise"),
    [
        (replace(TRUE.reads[0], status=404, version=13, sequence=None), "a read is what its version holds"),
        (replace(TRUE.reads[0], version=99), "a read is what its version holds"),
        (replace(TRUE.reads[0], status=409, least=12, version=11), "no read is older than it asked for"),
    ],
    ids=["not found", "never committed", "refused"],
)
def test_a_wrong_answer_is_a_lie(forged: Read, promise: str) -> None:
    """R27: an answer may fail to come, but what comes is true."""
    assert promise in broken(replace(TRUE, reads=[forged]))
    assert broken(replace(TRUE, reads=[*TRUE.reads, replace(forged, error="503")])) == []


def test_an_accepted_write_that_is_gone_is_lost() -> None:
    """R27: 202 promises as much as 200."""
    gone = replace(WRITES[3], outcome=Outcome.ACCEPTED)
    assert broken(replace(TRUE, writes=[*WRITES[:3], gone])) == ["nothing acknowledged is lost"]


def test_a_gap_between_versions_is_found() -> None:
    """R27: versions have no gap."""
    gone = [one for one in TRUE.history if one[0] != 12]
    unheard = [WRITES[0], replace(WRITES[1], outcome=Outcome.UNKNOWN, version=None), *WRITES[2:]]
    evidence = replace(TRUE, history=gone, writes=unheard, finals={}, reads=[read(0, 13, 3)])
    assert broken(evidence) == ["nothing is doubled, no version is missing"]


def test_two_writes_of_one_version_are_told_not_stumbled_over() -> None:
    """R27: a history that breaks a promise is judged like any other."""
    doubled = replace(TRUE, history=[*TRUE.history, (13, "event-4")])
    assert "nothing is doubled, no version is missing" in broken(doubled)


def test_a_write_that_lands_while_pods_are_asked_is_no_breach() -> None:
    """R27: what a pod has is held against the version it answers with, which is none from before the end."""
    late = replace(TRUE, history=[*TRUE.history, (14, "event-4")])
    mixed = {"pod-1": {0: Held(13, 3), 1: Held(14, 4)}, "pod-2": held(13, k1=2)}
    assert broken(replace(late, finals=mixed)) == []
    ends = "the last write of a key wins, in every pod"
    assert broken(replace(late, finals={"pod-1": held(12, k0=1)})) == [ends]
    assert broken(replace(late, finals={"pod-1": held(15, k0=3)})) == [ends]


def test_a_fault_that_was_struck_and_not_judged_cannot_pass() -> None:
    """R27: all that was chosen is struck and judged."""
    struck = replace(TRUE, chosen=["kill-pod"])
    assert broken(struck) == []
    open_end = replace(struck, faults=[Struck("kill-pod", "kill -9", 1.0)])
    assert broken(open_end) == ["every chosen fault was struck and judged"]


def test_what_could_not_be_asked_is_a_breach() -> None:
    """R27: a history nobody could read lets nothing pass that depends on it, and blames no read or write."""
    gone = replace(TRUE, history=[], finals={}, audits={}, no_history="the history could not be asked: it is down")
    found = [finding for finding in judge(gone) if not finding.is_held]
    assert len(found) == 4
    assert {line for finding in found for line in finding.examples} == {gone.no_history}
