"""What is asked at the end: in time, and again where the answer came too early."""

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
    """A write is pending when first asked for; another one lands after the history was read once."""

    def __init__(self) -> None:
        self.pending = [["a"], []]
        self.histories = [[(11, "a")], [(12, "b"), (11, "a")]]

    async def updates(self, _tenant: str, **_asked: Any) -> dict[str, Any]:
        return {"updates": [{"eventId": one} for one in self.pending.pop(0)], "next": None}

    async def history(self, _tenant: str, _code: str, **_asked: Any) -> dict[str, Any]:
        assert not self.pending, "asked before all was settled"
        told = self.histories.pop(0)
        return {"versions": [{"version": version, "eventId": one} for version, one in told], "next": None}


class StubPod:
    async def items(self, _tenant: str, _code: str, names: list[str], *, min_version: int) -> HttpResponse:
        assert min_version == 11
        return HttpResponse(200, {"X-Dict-Version": "12"}, json.dumps({"items": {names[0]: {"sequence": 2}}}).encode())

    async def audit(self, _tenant: str, _code: str) -> dict[str, Any]:
        return {"matches": True}


async def test_the_history_covers_what_the_pods_answer_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: an unanswered write that lands late does not fail a healthy drill."""
    monkeypatch.setattr(evidence, "_TRY_AGAIN", 0)
    recorder = Recorder(["pod"])
    recorder.writes = [
        Write(1, 0, "a", 1.0, 1.0, 2.0, 1, Outcome.ACCEPTED),
        Write(2, 0, "b", 2.0, 2.0, 3.0, 1, Outcome.UNKNOWN),
    ]
    recorder.reads = [Read(1.0, 1.0, 0, 0, None, 1.1, 200, 11, True, 1)]
    target = Target("http://x", {"pod": "http://x"}, "a", "b")
    inspector = Inspector(target, cast("RefdataClient", Commands()), {"pod": cast("PodClient", StubPod())})
    found = await inspector.evidence(Keys("r", 1), 10, recorder, 5)
    assert found.history == [(11, "a"), (12, "b")]
    assert [one.promise for one in judge(found) if not one.is_held] == ["it was used"], "nothing was acknowledged"
