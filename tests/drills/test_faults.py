"""Faults: when they are struck, what becomes of one that cannot be done, and the commands of the guide."""

import asyncio
import re
import shlex
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from drills.cluster import Postgres
from drills.faults import Fault, Schedule, run_shell, strike_all
from drills.limits import judge_calm, judge_load
from drills.load import Keys, Load
from drills.recorder import Outcome, Read, Recorder, Struck, Trouble, Write
from drills.target import Rates, Target

from drills import faults, report
from penstock.kernel.errors import TimedOut, Transient

GUIDE = Path(__file__).parents[2] / "docs" / "deploy" / "drills.md"
KUBECTL = """#!/bin/sh
echo "$@" >> "$KUBECTL_LOG"
case "$*" in *" get pod "*) echo pod/the-one;; esac
"""


class CountedFault:
    """Counts what is struck, and may leave trouble behind."""

    def __init__(self, recorder: Recorder, *, lasts: bool) -> None:
        self.count = 0
        self._recorder = recorder
        self._lasts = lasts

    async def strike(self) -> None:
        self.count += 1
        if self._lasts:
            self._recorder.last_trouble = float("inf")


async def test_nothing_is_struck_while_all_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: neither at first, nor after a fault that was not recovered from."""
    monkeypatch.setattr(faults, "QUIET", 0.01)
    monkeypatch.setattr(faults, "UNFELT", 0.01)
    said: list[str] = []
    unwell = Recorder(["pod"], last_trouble=float("inf"))
    untouched = CountedFault(unwell, lasts=False)
    await strike_all([Fault("one", "", untouched.strike)], Schedule(0, 0.05), unwell, said.append)
    assert untouched.count == 0
    assert "all is not well" in said[0]
    recorder = Recorder(["pod"])
    recorder.acknowledged(1)
    struck = CountedFault(recorder, lasts=True)
    both = [Fault("one", "", struck.strike), Fault("two", "", struck.strike)]
    await strike_all(both, Schedule(0, 0.05), recorder, said.append)
    assert struck.count == 1
    assert not any("all is not well" in line for line in said[1:]), "it did not wait for the second"
    assert [fault.well for fault in recorder.faults] == [None]


async def test_a_database_that_cannot_be_stopped_or_does_not_return_is_said_so(tmp_path: Path) -> None:
    """R27: a fault that cannot be done ends in the report, not in a traceback."""
    postgres = Postgres(tmp_path, start_timeout=0.01)
    with pytest.raises(Transient):
        await postgres.restart()
    (tmp_path / "data").mkdir()
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    (tmp_path / "data" / "postmaster.pid").write_text(f"{sleeper.pid}\n")
    postgres.url = "postgresql://nobody@127.0.0.1:9/none"
    with pytest.raises(TimedOut):
        await postgres.restart()
    with suppress(ProcessLookupError):  # it may be one that heeds SIGQUIT
        sleeper.kill()
    await sleeper.wait()
    with pytest.raises(Transient):
        await postgres.restart()


async def test_the_commands_of_the_guide_run_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: every fault of the guide is a command that sh understands, and names what it breaks."""
    stub, log = tmp_path / "kubectl", tmp_path / "log"
    stub.write_text(KUBECTL)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECTL_LOG", str(log))
    command_line = r"\$ (\.venv/bin/python -m drills failover --command-url.*?)\n```"
    example = re.search(command_line, GUIDE.read_text(), re.DOTALL)
    assert example
    words = shlex.split(example[1])
    given = dict(word.split("=", 1) for before, word in pairwise(words) if before == "--fault")
    assert len(given) == 5
    for command in given.values():
        await run_shell(command, 10)
    done = log.read_text()
    for role in ("query", "apply", "relay"):
        assert f"get pod -l app.kubernetes.io/component={role} -o name" in done
    assert done.count("--force pod/the-one") == 3
    assert done.index("rollout restart") < done.index("rollout status")


async def test_what_was_due_before_the_end_is_sent_though_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: a stall of the client at the end hides no request."""
    recorder = Recorder(["pod"])
    load = Load(Target("http://x", {"pod": "http://x"}, "a", "b"), Rates(1, 1), Keys("r", 1), recorder, 1)
    clock = iter([0.0, 0.0, 0.0])
    monkeypatch.setattr(recorder, "now", lambda: next(clock, 60.0))
    sent: list[float] = []

    async def launch(due: float) -> None:
        sent.append(due)

    await load._paced(10, 1.0, launch)
    await load._finished()
    assert len(sent) == 10


def recording(outcome: Outcome = Outcome.ACKNOWLEDGED, late: float = 0.0) -> Recorder:
    recorder = Recorder(["pod"])
    recorder.writes = [Write(1, 0, "a", 1.0, 1.0 + late, 2.0, 1, outcome, 5)]
    recorder.reads = [Read(1.0, 1.0 + late, 0, 0, None, 2.0, 200, 5)]
    return recorder


def broken(recorder: Recorder, *, is_calm: bool = False) -> list[str]:
    judge = judge_calm if is_calm else judge_load
    return [finding.detail for finding in judge(recorder) if not finding.is_held]


def test_a_load_without_acknowledgements_or_of_a_slow_client_fails() -> None:
    """R27: writes count as much as reads, and a client that could not keep up has measured itself."""
    assert broken(recording()) == []
    assert broken(recording(Outcome.UNKNOWN)) == ["0.00 % of 1 writes"]
    assert broken(recording(late=0.5)) == ["100 % were sent late: the client was the limit"]


def test_an_error_outside_the_faults_fails_a_failover() -> None:
    """R27: what fails while something is broken is forgiven, what fails in between is not."""
    recorder = recording()
    recorder.troubles = [Trouble(5.0, "read", "refused")]
    recorder.faults = [Struck("kill-pod", "", 4.5, 5.0, 5.5, is_judged=True)]
    assert broken(recorder, is_calm=True) == []
    recorder.troubles.append(Trouble(7.0, "read", "refused"))
    assert broken(recorder, is_calm=True) == ["50.00 %, 1 errors"]


def test_stopped_is_a_verdict_of_its_own() -> None:
    """R27: a drill that was stopped neither passed nor failed."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    assert report.Drill("load", began, {}, recording(), []).verdict == "passed"
    assert report.Drill("load", began, {}, recording(), [], was_stopped=True).verdict == "stopped"
