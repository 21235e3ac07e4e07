"""The judge of the campaign: an honest history passes, and every kind of lie is caught."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.refdata.model import DictionaryKey
from tests.refdata.pod.scenarios.history import SLOWEST_RESPONSE, History, Hold, Read, Write

ACME, GLOBEX = DictionaryKey("acme", "LOOSE"), DictionaryKey("globex", "LOOSE")
# Version 1 is {a: 1, b: 1}, 2 is {a: 2, b: 1}, 3 is {a: 2}, 4 is {c: 4}; of the other tenant 1 is {a: 9}.
WRITES = [
    Write(ACME, {"a": 1, "b": 1}, sent_at=0, version=1, known_at=1),
    Write(ACME, {"a": 2}, sent_at=10, version=2, known_at=11),
    Write(ACME, {}, ["b"], sent_at=20, version=3, known_at=21),
    Write(ACME, {"c": 4}, is_snapshot=True, sent_at=30, version=4, known_at=31),
    Write(GLOBEX, {"a": 9}, sent_at=0, version=1, known_at=1),
]
TOO_OLD, NOT_COMMITTED, UNKNOWN = {"code": "CURSOR_TOO_OLD"}, {"code": "VERSION_NOT_COMMITTED"}, {"code": "UNKNOWN_KEY"}


def answer(what: str, body: Any, version: int | None = 2, status: int | None = 200, **more: Any) -> Read:
    """An answer at a time when version 2 is known and 3 is not sent."""
    told: dict[str, Any] = {
        "pod": 0,
        "target": ACME,
        "min_version": 2,
        "began": 12.0,
        "ended": 13.0,
        "source": "memory",
    }
    return Read(**{**told, "what": what, "body": body, "version": version, "status": status, **more})


def page(items: Mapping[str, Any], more: str | None, version: int = 2, **rest: Any) -> Read:
    listed = [{"key": key, "value": value} for key, value in items.items()]
    return answer("page", {"version": version, "items": listed, "next": more}, version, **{"walk": 1, **rest})


def lies(*reads: Read, writes: Sequence[Write] = WRITES, holds: Sequence[Hold] = ()) -> list[str]:
    return History(list(writes), list(reads), list(holds)).lies()


ITEM = answer("item", 2, keys=("a",))
ITEMS = answer("items", {"version": 2, "items": {"a": 2}, "missing": ["x"]}, keys=("a", "x"))
VERSION = answer("version", {"tenantId": "acme", "dictCode": "LOOSE", "version": 2, "items": 2, "loadedAt": "now"})
ALL = answer("all", [{"key": "a", "value": 2}, {"key": "b", "value": 1}])
MISSING = answer("item", UNKNOWN, status=404, keys=("c",))
SAME = answer("item", None, status=304, keys=("a",), holds=2)
REFUSED = answer("item", NOT_COMMITTED, 2, status=409, min_version=3, source="postgres_fallback")
SILENT = answer("item", None, None, status=None, keys=("a",))
BUSY = answer("item", {"code": "DATABASE_DOWN"}, status=503, keys=("a",))


@pytest.mark.parametrize("read", [ITEM, ITEMS, VERSION, ALL, MISSING, SAME, REFUSED, BUSY])
def test_an_honest_answer_is_believed(read: Read) -> None:
    """R21: data of the version asked for or a later one, a refusal of what is not committed, or a 503."""
    assert lies(read) == []


def test_honest_pages_are_believed() -> None:
    """R17: to the end, cut short by a refusal, and in a version that is old by now."""
    first, last = page({"a": 2}, "on"), page({"b": 1}, None, began=40.0, ended=41.0)
    assert lies(first, last) == []
    assert lies(first, replace(last, status=410, version=None, body={"code": "VERSION_EXPIRED"})) == []
    assert lies(first, replace(last, status=409, version=None, body=TOO_OLD, min_version=3)) == []


def test_a_cursor_is_refused_only_below_the_barrier() -> None:
    """R21: what is as new as was asked for is shown."""
    first = page({"a": 2}, "on")
    for read in (
        page({}, None, status=409, walk=1),
        replace(ITEM, status=409, min_version=3),
        replace(first, min_version=None),
    ):
        assert "not too old" in lies(first, replace(read, status=409, body=TOO_OLD))[0]


@pytest.mark.parametrize("read", [ITEM, ITEMS, VERSION, ALL, MISSING, SAME, page({"a": 2, "b": 1}, None)])
def test_less_than_was_asked_for_is_a_lie(read: Read) -> None:
    """R21: whatever is read, and though it is the truth about that version."""
    assert "less than was asked for" in lies(replace(read, min_version=3))[0]


@pytest.mark.parametrize(
    "read",
    [
        replace(ITEM, body=1),
        replace(ITEM, version=3, keys=("b",), body=1, began=22.0, ended=23.0),
        replace(ITEM, target=GLOBEX, min_version=1, version=1, body=1),
        replace(ITEMS, body={"version": 2, "items": {"a": 2}, "missing": []}),
        replace(ITEMS, body={"version": 3, "items": {"a": 2}, "missing": ["x"]}),
        replace(ITEMS, body={"version": 2, "items": {"a": 2, "b": 0}, "missing": []}, keys=("a", "b")),
        replace(VERSION, body={**VERSION.body, "items": 3}),
        replace(VERSION, body={**VERSION.body, "tenantId": "globex"}),
        replace(ALL, body=ALL.body[:1]),
        replace(ALL, body=ALL.body[::-1]),
        replace(MISSING, keys=("b",)),
        replace(MISSING, body={"code": "NOT_FOUND"}),
        replace(SAME, holds=1),
        replace(ITEMS, status=304),
        page({"a": 2}, None),
        page({"b": 1}, "on"),
        page({"a": 2, "b": 2}, None),
    ],
)
def test_what_is_not_of_the_version_it_names_is_a_lie(read: Read) -> None:
    """R18: torn, mislabelled, incomplete, of another tenant, or not what the caller has."""
    assert "not what version" in lies(read)[0]


def test_pages_of_several_versions_are_a_lie() -> None:
    """R17: pages together are one version."""
    assert "several versions" in lies(page({"a": 1}, "on", 1, min_version=None), page({"b": 1}, None))[0]


@pytest.mark.parametrize(
    "read",
    [replace(ITEM, version=3), replace(ITEM, version=5, min_version=None), replace(ITEM, version=-1, min_version=None)],
)
def test_a_version_that_was_not_committed_is_a_lie(read: Read) -> None:
    """R21: nobody had sent it when the answer came, or ever."""
    assert "not committed" in lies(read)[0]


@pytest.mark.parametrize(
    "read", [replace(ITEM, version=None), replace(ITEM, source=None), replace(ITEM, source="redis")]
)
def test_every_answer_tells_version_and_source(read: Read) -> None:
    """R21: an answer without its label is none."""
    assert "version and source" in lies(read)[0]


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (replace(REFUSED, min_version=2, version=1), "known to be committed"),
        (replace(REFUSED, min_version=9, version=1), "known to be committed"),
        (replace(REFUSED, version=3), "as it cannot be"),
        (replace(REFUSED, min_version=9, version=4), "as it cannot be"),
        (replace(REFUSED, min_version=None), "without a reason"),
        (replace(REFUSED, version=None), "without a reason"),
        (replace(REFUSED, body={"code": "CONFLICT"}), "without a reason"),
    ],
)
def test_a_wrong_refusal_is_a_lie(read: Read, why: str) -> None:
    """R21: whoever was told of a commit is not told that there is none."""
    assert why in lies(read)[0]


def test_no_answer_is_excused_only_while_the_pod_is_held() -> None:
    """Nobody else's hold will do, nor an earlier or a later one."""
    assert lies(SILENT, holds=[Hold(0, 12.5, 12.6)]) == lies(SILENT, holds=[Hold(0, 11.0)]) == []
    assert "no answer" in lies(SILENT)[0]
    for hold in (Hold(1, 0.0), Hold(0, 0.0, 11.9), Hold(0, 13.1)):
        assert "no answer" in lies(SILENT, holds=[hold])[0]


def test_a_late_answer_is_excused_only_while_the_pod_is_held() -> None:
    """And what it says is judged all the same."""
    late = replace(ITEM, ended=ITEM.began + SLOWEST_RESPONSE + 1)
    assert "an answer after" in lies(late)[0]
    assert lies(late, holds=[Hold(0, 12.0, 14.0)]) == []
    assert "not what version" in lies(replace(late, body=1), holds=[Hold(0, 12.0, 14.0)])[0]


def test_whoever_names_no_version_is_served() -> None:
    """R23: from memory, however the primary is; an earlier version will do."""
    assert lies(replace(ITEM, min_version=None, version=1, body=1)) == []
    assert "named no version" in lies(replace(BUSY, min_version=None))[0]


@pytest.mark.parametrize("status", [400, 410, 422, 500, 502])
def test_other_answers_are_lies(status: int) -> None:
    """R21: data, 409 or 503; nothing else is an answer to an honest question."""
    assert f"status {status}" in lies(answer("item", {}, None, status, keys=("a",)))[0]


def test_versions_without_gaps() -> None:
    """R11: each commit has a version of its own, and none is left out."""
    assert "gaps" in lies(writes=WRITES[1:])[0]
    assert "gaps" in lies(writes=[*WRITES, replace(WRITES[0])])[0]
