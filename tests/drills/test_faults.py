"""The injection of faults, failed injections, and the commands of the guide."""

import asyncio
import re
import shlex
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from drills.cluster import Postgres
from drills.faults import Fault, Schedule, inject_faults, run_shell
from drills.limits import judge_failover, judge_load
from drills.load import Keys, Load
from drills.recorder import Incident, InjectedFault, Outcome, Read, Recorder, Write
from drills.target import Rates, Target

from drills import faults, report
from penstock.kernel.errors import TimedOut, Transient

pytestmark = pytest.mark.server  # runs the commands of the guide in a shell

GUIDE = Path(__file__).parents[2] / "docs" / "deploy" / "drills.md"
KUBECTL = """#!/bin/sh
echo "$@" >> "$KUBECTL_LOG"
case "$*" in *" get pod "*) echo pod/the-one;; esac
"""


class CountedFault:
    """A fault that counts its injections; with *lasts* the target does not recover."""

    def __init__(self, recorder: Recorder, *, lasts: bool) -> None:
        self.count = 0
        self._recorder = recorder
        self._lasts = lasts

    async def inject(self) -> None:
        self.count += 1
        if self._lasts:
            self._recorder.last_incident_at = float("inf")


async def test_faults_are_injected_only_in_a_healthy_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: an unhealthy target gets no fault, neither at the start nor after a fault without recovery."""
    monkeypatch.setattr(faults, "HEALTHY_AFTER", 0.01)
    monkeypatch.setattr(faults, "OBSERVED_FOR", 0.01)
    messages: list[str] = []
    unwell = Recorder(["pod"], last_incident_at=float("inf"))
    untouched = CountedFault(unwell, lasts=False)
    await inject_faults([Fault("one", "", untouched.inject)], Schedule(0, 0.05), unwell, messages.append)
    assert untouched.count == 0
    assert "not healthy" in messages[0]
    recorder = Recorder(["pod"])
    recorder.record_acknowledged(1)
    injected = CountedFault(recorder, lasts=True)
    both = [Fault("one", "", injected.inject), Fault("two", "", injected.inject)]
    await inject_faults(both, Schedule(0, 0.05), recorder, messages.append)
    assert injected.count == 1
    assert not any("not healthy" in line for line in messages[1:]), "the drill ends after the first fault"
    assert [fault.recovered_at for fault in recorder.faults] == [None]


async def test_a_database_that_cannot_be_restarted_is_reported(tmp_path: Path) -> None:
    """R27: a failed injection is an error of Penstock, which the report contains, not a traceback."""
    postgres = Postgres(tmp_path, start_timeout=0.01)
    with pytest.raises(Transient):
        await postgres.restart()
    (tmp_path / "data").mkdir()
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    (tmp_path / "data" / "postmaster.pid").write_text(f"{sleeper.pid}\n")
    postgres.url = "postgresql://unknown@127.0.0.1:9/none"
    with pytest.raises(TimedOut):
        await postgres.restart()
    with suppress(ProcessLookupError):  # SIGQUIT may have ended it
        sleeper.kill()
    await sleeper.wait()
    with pytest.raises(Transient):
        await postgres.restart()


async def test_the_commands_of_the_guide_run_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: every fault of the guide is a valid command of sh for the role in its name."""
    stub, log = tmp_path / "kubectl", tmp_path / "log"
    stub.write_text(KUBECTL)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECTL_LOG", str(log))
    command_line = r"\$ (\.venv/bin/python -m drills failover --command-url.*?)\n```"
    example = re.search(command_line, GUIDE.read_text(), re.DOTALL)
    assert example
    words = shlex.split(example[1])
    commands = dict(word.split("=", 1) for before, word in pairwise(words) if before == "--fault")
    assert len(commands) == 5
    for command in commands.values():
        await run_shell(command, 10)
    calls = log.read_text()
    for role in ("query", "apply", "relay"):
        assert f"get pod -l app.kubernetes.io/component={role} -o name" in calls
    assert calls.count("--force pod/the-one") == 3
    assert calls.index("rollout restart") < calls.index("rollout status")


async def test_requests_due_before_the_end_are_sent_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: requests that were due while the client was blocked are sent, even after the end of the load."""
    recorder = Recorder(["pod"])
    load = Load(Target("http://x", {"pod": "http://x"}, "a", "b"), Rates(1, 1), Keys("r", 1), recorder, 1)
    clock = iter([0.0, 0.0, 0.0])
    monkeypatch.setattr(recorder, "now", lambda: next(clock, 60.0))
    sent: list[float] = []

    async def launch(due: float) -> None:
        sent.append(due)

    await load._send_at_rate(10, 1.0, launch)
    await load._wait_for_requests()
    assert len(sent) == 10


def recording(outcome: Outcome = Outcome.ACKNOWLEDGED, late: float = 0.0) -> Recorder:
    recorder = Recorder(["pod"])
    recorder.writes = [Write(1, 0, "a", 1.0, 1.0 + late, 2.0, 1, outcome, 5)]
    recorder.reads = [Read(1.0, 1.0 + late, 0, 0, None, 2.0, 200, 5)]
    return recorder


def broken(recorder: Recorder, *, is_outside: bool = False) -> list[str]:
    judge = judge_failover if is_outside else judge_load
    return [result.detail for result in judge(recorder) if not result.is_kept]


def test_a_load_without_acknowledgements_or_of_a_slow_client_fails() -> None:
    """R27: a load fails without acknowledged writes, and if the client was too slow."""
    assert broken(recording()) == []
    assert broken(recording(Outcome.UNKNOWN)) == ["0.00 % of 1 writes"]
    assert broken(recording(late=0.5)) == ["100 % were sent late: the client was the limit"]


def test_an_error_outside_the_faults_fails_a_failover() -> None:
    """R27: errors during a fault are allowed, errors between faults are not."""
    recorder = recording()
    recorder.incidents = [Incident(5.0, "read", "refused")]
    recorder.faults = [InjectedFault("kill-pod", "", 4.5, 5.0, 5.5, is_judged=True)]
    assert broken(recorder, is_outside=True) == []
    recorder.incidents.append(Incident(7.0, "read", "refused"))
    assert broken(recorder, is_outside=True) == ["50.00 %, 1 errors"]


def test_stopped_is_a_verdict_of_its_own() -> None:
    """R27: a stopped drill has neither passed nor failed."""
    started_at = datetime(2026, 1, 1, tzinfo=UTC)
    assert report.Drill("load", started_at, {}, recording(), []).verdict == "passed"
    assert report.Drill("load", started_at, {}, recording(), [], was_stopped=True).verdict == "stopped"
