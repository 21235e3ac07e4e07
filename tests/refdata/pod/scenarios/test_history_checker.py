"""The checker of the campaign accepts correct histories and finds every kind of violation."""

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


def respond(what: str, body: Any, version: int | None = 2, status: int | None = 200, **more: Any) -> Read:
    """Return a response at a time when version 2 is known and version 3 is not sent."""
    fields: dict[str, Any] = {
        "pod": 0,
        "target": ACME,
        "min_version": 2,
        "began": 12.0,
        "ended": 13.0,
        "source": "memory",
    }
    return Read(**{**fields, "what": what, "body": body, "version": version, "status": status, **more})


def page(items: Mapping[str, Any], more: str | None, version: int = 2, **rest: Any) -> Read:
    listed = [{"key": key, "value": value} for key, value in items.items()]
    return respond("page", {"version": version, "items": listed, "next": more}, version, **{"walk": 1, **rest})


def violations(*reads: Read, writes: Sequence[Write] = WRITES, holds: Sequence[Hold] = ()) -> list[str]:
    return History(list(writes), list(reads), list(holds)).violations()


ITEM = respond("item", 2, keys=("a",))
ITEMS = respond("items", {"version": 2, "items": {"a": 2}, "missing": ["x"]}, keys=("a", "x"))
VERSION = respond("version", {"tenantId": "acme", "dictCode": "LOOSE", "version": 2, "items": 2, "loadedAt": "now"})
ALL = respond("all", [{"key": "a", "value": 2}, {"key": "b", "value": 1}])
MISSING = respond("item", UNKNOWN, status=404, keys=("c",))
SAME = respond("item", None, status=304, keys=("a",), holds=2)
REFUSED = respond("item", NOT_COMMITTED, 2, status=409, min_version=3, source="postgres_fallback")
SILENT = respond("item", None, None, status=None, keys=("a",))
BUSY = respond("item", {"code": "DATABASE_DOWN"}, status=503, keys=("a",))


@pytest.mark.parametrize("read", [ITEM, ITEMS, VERSION, ALL, MISSING, SAME, REFUSED, BUSY])
def test_correct_responses_are_accepted(read: Read) -> None:
    """R21: data of the required version or a later one, 409 for an uncommitted version, and 503 are accepted."""
    assert violations(read) == []


def test_correct_pages_are_accepted() -> None:
    """R17: complete pages, pages that end with an error, and pages of an old version are accepted."""
    first, last = page({"a": 2}, "on"), page({"b": 1}, None, began=40.0, ended=41.0)
    assert violations(first, last) == []
    assert violations(first, replace(last, status=410, version=None, body={"code": "VERSION_EXPIRED"})) == []
    assert violations(first, replace(last, status=409, version=None, body=TOO_OLD, min_version=3)) == []


def test_a_cursor_is_refused_only_below_the_barrier() -> None:
    """R21: a refused cursor must be older than the barrier."""
    first = page({"a": 2}, "on")
    for read in (
        page({}, None, status=409, walk=1),
        replace(ITEM, status=409, min_version=3),
        replace(first, min_version=None),
    ):
        assert "not too old" in violations(first, replace(read, status=409, body=TOO_OLD))[0]


@pytest.mark.parametrize("read", [ITEM, ITEMS, VERSION, ALL, MISSING, SAME, page({"a": 2, "b": 1}, None)])
def test_a_version_below_the_barrier_is_a_violation(read: Read) -> None:
    """R21: a lower version is a violation for every kind of read, even with correct content."""
    assert "less than was asked for" in violations(replace(read, min_version=3))[0]


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
def test_wrong_content_is_a_violation(read: Read) -> None:
    """R18: mixed, mislabelled, incomplete and foreign content, and a wrong 304 are violations."""
    assert "not what version" in violations(read)[0]


def test_pages_of_several_versions_are_a_violation() -> None:
    """R17: all pages of a walk must have one version."""
    assert "several versions" in violations(page({"a": 1}, "on", 1, min_version=None), page({"b": 1}, None))[0]


@pytest.mark.parametrize(
    "read",
    [replace(ITEM, version=3), replace(ITEM, version=5, min_version=None), replace(ITEM, version=-1, min_version=None)],
)
def test_an_uncommitted_version_is_a_violation(read: Read) -> None:
    """R21: a version must not be returned before its command was sent."""
    assert "not committed" in violations(read)[0]


@pytest.mark.parametrize(
    "read", [replace(ITEM, version=None), replace(ITEM, source=None), replace(ITEM, source="redis")]
)
def test_a_response_without_version_or_source_is_a_violation(read: Read) -> None:
    """R21: every response with data has a version and a source."""
    assert "version and source" in violations(read)[0]


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
def test_a_wrong_refusal_is_a_violation(read: Read, why: str) -> None:
    """R21: a version whose commit was known must not be refused."""
    assert why in violations(read)[0]


def test_a_missing_response_needs_an_outage_of_the_pod() -> None:
    """An outage of another pod, or at another time, does not excuse a missing response."""
    assert violations(SILENT, holds=[Hold(0, 12.5, 12.6)]) == violations(SILENT, holds=[Hold(0, 11.0)]) == []
    assert "no response" in violations(SILENT)[0]
    for hold in (Hold(1, 0.0), Hold(0, 0.0, 11.9), Hold(0, 13.1)):
        assert "no response" in violations(SILENT, holds=[hold])[0]


def test_a_late_response_needs_an_outage_of_the_pod() -> None:
    """A late response is accepted during an outage, and its content is still checked."""
    late = replace(ITEM, ended=ITEM.began + SLOWEST_RESPONSE + 1)
    assert "an answer after" in violations(late)[0]
    assert violations(late, holds=[Hold(0, 12.0, 14.0)]) == []
    assert "not what version" in violations(replace(late, body=1), holds=[Hold(0, 12.0, 14.0)])[0]


def test_reads_without_a_version_are_always_served() -> None:
    """R23: a read without a version gets data from memory, possibly of an older version."""
    assert violations(replace(ITEM, min_version=None, version=1, body=1)) == []
    assert "a read without a version" in violations(replace(BUSY, min_version=None))[0]


def test_a_cursor_is_a_barrier() -> None:
    """R21, R23: a pod that is behind the version of a cursor answers 503 while the primary is unreachable."""
    first = page({"a": 2}, "on", min_version=None)
    behind = replace(BUSY, what="page", walk=1, min_version=None)
    assert violations(first, replace(behind, has_cursor=True)) == []
    assert "a read without a version" in violations(first, behind)[0]


@pytest.mark.parametrize("status", [400, 410, 422, 500, 502])
def test_other_statuses_are_violations(status: int) -> None:
    """R21: statuses other than data, 409 and 503 are violations."""
    assert f"status {status}" in violations(respond("item", {}, None, status, keys=("a",)))[0]


def test_versions_without_gaps() -> None:
    """R11: each commit has its own version, and there are no gaps."""
    assert "gaps" in violations(writes=WRITES[1:])[0]
    assert "gaps" in violations(writes=[*WRITES, replace(WRITES[0])])[0]
