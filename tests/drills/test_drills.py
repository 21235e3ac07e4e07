"""Drills as anyone runs them: on the embedded set-up, and against a cluster that is there, or is not."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
from drills.__main__ import app
from drills.limits import LATE_AT_MOST

from penstock.cli.main import run_program
from tests.support.processes import Up, penstock
from tests.support.types import Json

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"
TIMEOUT = 240  # a drill starts half a dozen programs, and waits until all is well
SECRET = "a secret of the tests, of thirty-two bytes or more"
CONFIG = """
auth: {jwt: {algorithms: [HS256], secret: "env:DRILL_SECRET"}}
refdata: {dictionaries: [{code: RATES}]}
"""


def drills(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "drills", *args]
    env = {**os.environ, "DRILL_TOKEN": token()}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT - 20, check=False)


def broken(told: Json) -> list[str]:
    """The promises that were not held, but for the client's own: how late it sends says how busy this machine is."""
    client = f"the client sends at most {LATE_AT_MOST:g} % late"
    return [one["promise"] for one in told["promises"] if not one["is_held"] and one["promise"] != client]


def token() -> str:
    return jwt.encode({"tenant_id": "acme", "sub": "drill", "exp": time.time() + 600}, SECRET, algorithm="HS256")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Somebody's own Penstock, with one dictionary, for those with a token."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "penstock.yaml").write_text(CONFIG)
    with Up(folder, env={"DRILL_SECRET": SECRET}) as up:
        yield up


def given(up: Up, code: str = "RATES") -> list[str]:
    where = ["--command-url", up.api, "--query-url", up.query, "--tenant", "acme", "--dict", code]
    return [*where, "--token-env", "DRILL_TOKEN"]


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_pod_and_apply_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    """R27: a failover drill that anyone can run ends with a verdict, all figures, and a picture of what was killed."""
    faults = ["--fault", "kill-pod", "--fault", "kill-apply", "--settle", "0.5", "--lease", "1"]
    done = drills(
        "failover", "--pods", "2", "--reads", "50", "--writes", "10", *faults, "--out", str(tmp_path), "--json"
    )
    told = json.loads((tmp_path / "report.json").read_text())
    assert broken(told) == [], done.stdout + done.stderr
    is_late = told["figures"]["sent_late_percent"] > LATE_AT_MOST
    assert done.returncode == is_late
    assert json.loads(done.stdout)["verdict"] == told["verdict"] == ("failed" if is_late else "passed")
    assert [fault["name"] for fault in told["faults"]] == ["kill-pod", "kill-apply"]
    assert all(fault["seconds"] > 0 for fault in told["faults"]), "a kill that nobody felt was none"
    assert told["figures"]["reads"]["failed_first"] > 0, "the killed pod was asked"
    assert told["figures"]["reads"]["named_a_version"] > 0
    assert told["figures"]["writes"]["acknowledged"] == told["figures"]["writes"]["count"] > 0
    assert told["figures"]["freshness"]["p99"] is not None
    picture = (tmp_path / "picture.svg").read_text()
    assert "kill-pod: well after" in picture
    assert picture in (tmp_path / "report.html").read_text()
    with (tmp_path / "reads.csv").open() as file:
        assert len(list(csv.DictReader(file))) == told["figures"]["reads"]["count"]


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_given_cluster_is_left_as_it_was(cluster: Up, tmp_path: Path) -> None:
    """R27: on somebody's cluster faults are their own commands, one that fails is told, and our keys are gone."""
    touched = tmp_path / "touched"
    faults = ["--fault", f"touch=touch {touched}", "--fault", "broken=echo no such pod; exit 3", "--settle", "0.2"]
    faults += ["--recover-within", "20"]
    done = drills(
        "failover", *given(cluster), *faults, "--reads", "20", "--writes", "5", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert touched.exists()
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert broken(told) == ["well again in time after every fault"]
    assert "ended with 3: no such pod" in done.stdout
    asked = ["dict", "all", "acme", "RATES", "--query-url", cluster.query, "--json"]
    left = penstock(*asked, cwd=tmp_path, env={"PENSTOCK_TOKEN": token()})
    assert "drill-" not in left.out + left.err
    assert left.code == 0, left.err


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_stopped_drill_has_not_passed(cluster: Up, tmp_path: Path) -> None:
    """R27: Ctrl-C before any fault leaves a report that says so, exit code 130, and none of our keys."""
    args = ["failover", *given(cluster), "--fault", "never=false", "--settle", "200", "--reads", "20", "--writes", "5"]
    command = [sys.executable, "-m", "drills", *args, "--out", str(tmp_path / "out")]
    env = {**os.environ, "DRILL_TOKEN": token()}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as drill:
        assert drill.stderr is not None
        for line in drill.stderr:
            if line == "reading and writing\n":
                drill.send_signal(signal.SIGINT)
                break
        said, _ = drill.communicate(timeout=TIMEOUT - 20)
    assert drill.returncode == 130, said
    assert "failover stopped" in said
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["verdict"] == "stopped"
    assert "proves nothing" in (tmp_path / "out" / "report.html").read_text()
    asked = ["dict", "all", "acme", "RATES", "--query-url", cluster.query, "--json"]
    assert "drill-" not in penstock(*asked, cwd=tmp_path, env={"PENSTOCK_TOKEN": token()}).out


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_cluster_that_does_not_come_back_is_reported(tmp_path: Path) -> None:
    """R27: the report is written, nothing else is struck, and what may be left in the dictionary is told."""
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    with Up(tmp_path, env={"DRILL_SECRET": SECRET}) as up:
        faults = ["--fault", f"gone=kill -9 {up.pid}", "--fault", "never=false", "--settle", "0"]
        out = str(tmp_path / "out")
        args = ["--recover-within", "2", "--reads", "20", "--writes", "5", "--out", out]
        done = drills("failover", *given(up), *faults, *args)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [fault["name"] for fault in told["faults"]] == ["gone"]
    assert "history could not be asked" in done.stdout
    assert "never was not struck" in done.stdout
    left = next(one["detail"] for one in told["promises"] if "left" in one["promise"])
    assert "keys drill-" in left


@pytest.mark.full
def test_a_dictionary_that_is_not_there_is_said_so(cluster: Up, tmp_path: Path) -> None:
    """R27: exit code 5, with what to name instead, and no report of nothing."""
    done = drills("load", *given(cluster, "NONE"), "--out", str(tmp_path / "out"))
    assert done.returncode == 5, done.stderr
    assert "--dict" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_cluster_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    """R27: exit code 7, with a hint."""
    where = ["--command-url", NOBODY, "--query-url", NOBODY, "--tenant", "acme", "--dict", "RATES"]
    done = drills("load", *where, "--out", str(tmp_path / "out"))
    assert done.returncode == 7, done.stderr
    assert "hint: is it up" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["load", "--query-url", NOBODY],
        ["load", "--command-url", NOBODY],
        ["failover", "--command-url", NOBODY, "--query-url", NOBODY, "--tenant", "a", "--dict", "b"],
        ["failover", "--command-url", NOBODY, "--query-url", NOBODY, "--tenant", "a", "--dict", "b", "--fault", "pod"],
        ["load", "--command-url", NOBODY, "--query-url", NOBODY, "--tenant", "a", "--dict", "b", "--pods", "3"],
        ["load", "--command-url", "http://me:hidden@x", "--query-url", NOBODY, "--tenant", "a", "--dict", "b"],
    ],
    ids=["no command url", "no dictionary", "no fault", "no command", "not ours", "password"],
)
def test_half_a_description_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """R27: exit code 2 before anything is started."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["drills", *args])
        run_program(app, name="drills")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "hint: " in said
    assert "hidden" not in said
