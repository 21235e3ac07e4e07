"""Drills on the embedded setup, on an existing cluster, and with an unreachable cluster."""

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
from drills.limits import MAX_LATE

from penstock.cli.main import run_program
from tests.support.processes import Up, penstock
from tests.support.types import Json

ROOT = Path(__file__).parents[2]
UNREACHABLE = "http://127.0.0.1:9"
TIMEOUT = 240  # a drill starts six programs and waits for the healthy state
SECRET = "a secret of the tests, of thirty-two bytes or more"
CONFIG = """
auth: {jwt: {algorithms: [HS256], secret: "env:DRILL_SECRET"}}
refdata: {dictionaries: [{code: RATES}]}
"""


def drills(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "drills", *args]
    env = {**os.environ, "DRILL_TOKEN": token()}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT - 20, check=False)


def broken(summary: Json) -> list[str]:
    """Return the violated guarantees, except that of the client, which depends on the load of this machine."""
    client = f"the client sends at most {MAX_LATE:g} % late"
    results = summary["guarantees"]
    return [result["guarantee"] for result in results if not result["is_kept"] and result["guarantee"] != client]


def token() -> str:
    return jwt.encode({"tenant_id": "acme", "sub": "drill", "exp": time.time() + 600}, SECRET, algorithm="HS256")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Return an existing Penstock with one dictionary and authentication."""
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
    """R27: a failover drill ends with a verdict, figures, and a chart with the faults."""
    faults = ["--fault", "kill-pod", "--fault", "kill-apply", "--settle", "0.5", "--lease", "1"]
    done = drills(
        "failover", "--pods", "2", "--reads", "50", "--writes", "10", *faults, "--out", str(tmp_path), "--json"
    )
    summary = json.loads((tmp_path / "report.json").read_text())
    assert broken(summary) == [], done.stdout + done.stderr
    is_late = summary["figures"]["sent_late_percent"] > MAX_LATE
    assert done.returncode == is_late
    assert json.loads(done.stdout)["verdict"] == summary["verdict"] == ("failed" if is_late else "passed")
    assert [fault["name"] for fault in summary["faults"]] == ["kill-pod", "kill-apply"]
    assert all(fault["seconds"] > 0 for fault in summary["faults"]), "every kill has an effect"
    assert summary["figures"]["reads"]["failed_first"] > 0, "readers used the killed pod"
    assert summary["figures"]["reads"]["with_version"] > 0
    assert summary["figures"]["writes"]["acknowledged"] == summary["figures"]["writes"]["count"] > 0
    assert summary["figures"]["freshness"]["p99"] is not None
    picture = (tmp_path / "picture.svg").read_text()
    assert "kill-pod: recovered after" in picture
    assert picture in (tmp_path / "report.html").read_text()
    with (tmp_path / "reads.csv").open() as file:
        assert len(list(csv.DictReader(file))) == summary["figures"]["reads"]["count"]


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_given_cluster_is_left_as_it_was(cluster: Up, tmp_path: Path) -> None:
    """R27: faults of an existing cluster are commands; a failed command is reported, and the keys are deleted."""
    touched = tmp_path / "touched"
    faults = ["--fault", f"touch=touch {touched}", "--fault", "broken=echo no such pod; exit 3", "--settle", "0.2"]
    faults += ["--recover-within", "20"]
    done = drills(
        "failover", *given(cluster), *faults, "--reads", "20", "--writes", "5", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert touched.exists()
    summary = json.loads((tmp_path / "out" / "report.json").read_text())
    assert broken(summary) == ["the target recovered in time after every fault"]
    assert "ended with 3: no such pod" in done.stdout
    asked = ["dict", "items", "acme", "RATES", "--query-url", cluster.query, "--json"]
    left = penstock(*asked, cwd=tmp_path, env={"PENSTOCK_TOKEN": token()})
    assert "drill-" not in left.out + left.err
    assert left.code == 0, left.err


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_stopped_drill_has_not_passed(cluster: Up, tmp_path: Path) -> None:
    """R27: after Ctrl-C the verdict is `stopped`, the exit code is 130, and the keys are deleted."""
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
        output, _ = drill.communicate(timeout=TIMEOUT - 20)
    assert drill.returncode == 130, output
    assert "failover stopped" in output
    summary = json.loads((tmp_path / "out" / "report.json").read_text())
    assert summary["verdict"] == "stopped"
    assert "prove nothing" in (tmp_path / "out" / "report.html").read_text()
    asked = ["dict", "items", "acme", "RATES", "--query-url", cluster.query, "--json"]
    assert "drill-" not in penstock(*asked, cwd=tmp_path, env={"PENSTOCK_TOKEN": token()}).out


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT)
def test_a_cluster_that_does_not_come_back_is_reported(tmp_path: Path) -> None:
    """R27: the report is written, no more faults are injected, and keys that may remain are reported."""
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    with Up(tmp_path, env={"DRILL_SECRET": SECRET}) as up:
        faults = ["--fault", f"gone=kill -9 {up.pid}", "--fault", "never=false", "--settle", "0"]
        out = str(tmp_path / "out")
        args = ["--recover-within", "2", "--reads", "20", "--writes", "5", "--out", out]
        done = drills("failover", *given(up), *faults, *args)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [fault["name"] for fault in summary["faults"]] == ["gone"]
    assert "history could not be read" in done.stdout
    assert "never was not injected" in done.stdout
    remaining = next(result["detail"] for result in summary["guarantees"] if "deleted" in result["guarantee"])
    assert "keys drill-" in remaining


@pytest.mark.full
def test_an_unknown_dictionary_is_an_error(cluster: Up, tmp_path: Path) -> None:
    """R27: exit code 5 with a hint, and no report."""
    done = drills("load", *given(cluster, "NONE"), "--out", str(tmp_path / "out"))
    assert done.returncode == 5, done.stderr
    assert "--dict" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_an_unreachable_cluster_is_an_error(tmp_path: Path) -> None:
    """R27: exit code 7, with a hint."""
    where = ["--command-url", UNREACHABLE, "--query-url", UNREACHABLE, "--tenant", "acme", "--dict", "RATES"]
    done = drills("load", *where, "--out", str(tmp_path / "out"))
    assert done.returncode == 7, done.stderr
    assert "hint: check that the server runs" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["load", "--query-url", UNREACHABLE],
        ["load", "--command-url", UNREACHABLE],
        ["failover", "--command-url", UNREACHABLE, "--query-url", UNREACHABLE, "--tenant", "a", "--dict", "b"],
        [
            "failover",
            "--command-url",
            UNREACHABLE,
            "--query-url",
            UNREACHABLE,
            "--tenant",
            "a",
            "--dict",
            "b",
            "--fault",
            "pod",
        ],
        [
            "load",
            "--command-url",
            UNREACHABLE,
            "--query-url",
            UNREACHABLE,
            "--tenant",
            "a",
            "--dict",
            "b",
            "--pods",
            "3",
        ],
        ["load", "--command-url", "http://me:hidden@x", "--query-url", UNREACHABLE, "--tenant", "a", "--dict", "b"],
    ],
    ids=["no command url", "no dictionary", "no fault", "no command", "embedded option", "password"],
)
def test_an_incomplete_description_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """R27: exit code 2 before any process is started."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["drills", *args])
        run_program(app, name="drills")
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert "hint: " in output
    assert "hidden" not in output
