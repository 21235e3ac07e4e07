"""The evidence at the end of a drill is read when the writes are settled, and again if it is too old."""

import json
from typing import Any, cast

import pytest
from drills.checker import judge
from drills.evidence import Inspector
from drills.load import Keys
from drills.recorder import Outcome, Read, Recorder, Write
from drills.target import Target

from drills import evidence
from penstock.kernel.http.client import HttpResponse
from penstock.refdata.client import PodClient, RefdataClient


class Commands:
    """A command API where a write is pending at first, and another is committed after the first read of the history."""

    def __init__(self) -> None:
        self.pending = [["a"], []]
        self.histories = [[(11, "a")], [(12, "b"), (11, "a")]]

    async def updates(self, _tenant: str, **_query: Any) -> dict[str, Any]:
        return {"updates": [{"eventId": event_id} for event_id in self.pending.pop(0)], "next": None}

    async def history(self, _tenant: str, _code: str, **_query: Any) -> dict[str, Any]:
        assert not self.pending, "the history was read before the writes were settled"
        history = self.histories.pop(0)
        return {"versions": [{"version": version, "eventId": event_id} for version, event_id in history], "next": None}


class StubPod:
    async def items(self, _tenant: str, _code: str, names: list[str], *, min_version: int) -> HttpResponse:
        assert min_version == 11
        return HttpResponse(200, {"X-Dict-Version": "12"}, json.dumps({"items": {names[0]: {"sequence": 2}}}).encode())

    async def audit(self, _tenant: str, _code: str) -> dict[str, Any]:
        return {"matches": True}


async def test_the_history_covers_the_versions_of_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: a write without a response that is committed late does not fail a healthy drill."""
    monkeypatch.setattr(evidence, "_RETRY_DELAY", 0)
    recorder = Recorder(["pod"])
    recorder.writes = [
        Write(1, 0, "a", 1.0, 1.0, 2.0, 1, Outcome.ACCEPTED),
        Write(2, 0, "b", 2.0, 2.0, 3.0, 1, Outcome.UNKNOWN),
    ]
    recorder.reads = [Read(1.0, 1.0, 0, 0, None, 1.1, 200, 11, True, 1)]
    target = Target("http://x", {"pod": "http://x"}, "a", "b")
    inspector = Inspector(target, cast("RefdataClient", Commands()), {"pod": cast("PodClient", StubPod())})
    collected = await inspector.evidence(Keys("r", 1), 10, recorder, 5)
    assert collected.history == [(11, "a"), (12, "b")]
    violated = [result.guarantee for result in judge(collected) if not result.is_kept]
    assert violated == ["the target answered"], "no write was acknowledged"
