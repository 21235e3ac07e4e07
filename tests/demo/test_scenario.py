"""The demo, as `penstock demo` runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.demo import summary
from penstock.demo.samples import FOLDER, list_samples
from penstock.demo.scenario import CheckedPromise, DemoScenario
from penstock.demo.workspace import DemoWorkspace
from penstock.kernel.db import datadir
from penstock.kernel.errors import Conflict
from tests.pages import ROOT
from tests.support.processes import penstock, penstock_here

PARTS = ("platform", "tracking", "refdata", "ingest", "harvest", "flows", "overview")
FAILED = CheckedPromise("flows", "it ends", "it did not", held=False)


def kept_demo(ports: tuple[int, int, int]) -> list[str]:
    """Return the command `penstock demo --keep` with other ports: the usual ones may be in use on this machine."""
    code = f"from penstock.cli import demo, main; demo.PORTS = {ports}; main.run()"
    return [sys.executable, "-c", code, "demo", "--keep"]


@pytest.mark.full
def test_the_demo_keeps_every_promise_and_ends(tmp_path: Path) -> None:
    """F14, I23, R2: all parts, connected by configuration alone, keep their promises, though processes are killed."""
    done = penstock("demo", cwd=tmp_path, timeout=180)
    assert done.code == 0, done.out + done.err
    assert "9 of 9 promises held" in done.out
    assert "FAIL" not in done.out
    assert all(f"\nok  {part} " in done.out for part in PARTS)
    folder = tmp_path / "penstock-demo"
    assert all((folder / "charts" / name).read_text().startswith("<svg") for name in ("days.svg", "four-hours.svg"))
    assert "Traceback" not in (folder / "log.txt").read_text()


@pytest.mark.full
def test_a_demo_that_is_kept_serves_and_tells_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: with --keep it serves until Ctrl-C, and its exit code is still the verdict; --json prints data alone."""
    with subprocess.Popen([*kept_demo((0, 0, 0)), "--json"], cwd=tmp_path, stdout=subprocess.PIPE) as kept:
        assert kept.stdout is not None
        told = ""
        while not told.endswith("\n}\n"):
            told += kept.stdout.readline().decode()
        verdict = json.loads(told)
        assert verdict["held"] is True
        assert [one["part"] for one in verdict["promises"] if one["held"]].count("ingest") == 2
        monkeypatch.setenv("PENSTOCK_URL", verdict["api"])
        assert "polaris" in penstock_here("status").out
        kept.send_signal(signal.SIGINT)
        assert (kept.stdout.read(), kept.wait(60)) == (b"", 0)


@pytest.mark.full
def test_a_demo_that_cannot_begin_says_so(tmp_path: Path) -> None:
    """Exit code 1, the reason, where the log is, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = kept_demo((port, 0, 0))
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"did not finish: penstock up did not start: cannot listen on 127.0.0.1:{port}: Address" in done.stderr
    assert "hint: penstock-demo/log.txt contains the log" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_takes_no_setting_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the demo does not see the variables that may name a production database."""
    monkeypatch.setenv("PENSTOCK__DATABASE__URL", "postgresql://penstock@db.internal/production")
    monkeypatch.setenv("PENSTOCK_CONFIG", "/etc/penstock.yaml")
    with DemoWorkspace.create(tmp_path / "demo") as workspace:
        _, shown = workspace.start_penstock("config", "show")
    assert shown["database"]["url"] == "embedded"


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    """A folder with other files, or with a demo that is running, is refused and not emptied."""
    (tmp_path / "thesis.txt").write_text("three years of work")
    done = penstock("demo", "--folder", ".", cwd=tmp_path)
    assert (done.code, done.out) == (6, "")
    assert "files that no demo made\nhint: choose another folder with --folder" in done.err
    assert (tmp_path / "thesis.txt").exists()
    with (
        DemoWorkspace.create(tmp_path / "demo") as running,
        datadir.owned(running.folder / ".penstock", "up"),
        pytest.raises(Conflict, match="is running"),
        DemoWorkspace.create(running.folder),
    ):
        pass
    with DemoWorkspace.create(tmp_path / "demo"):
        pass


def test_a_promise_that_is_broken_is_shown(tmp_path: Path) -> None:
    """The table of results shows a broken promise, and the verdict is not held."""
    held = CheckedPromise("ingest", "all is well", "it was", held=True)
    scenario = DemoScenario(DemoWorkspace(tmp_path), print, (0, 0, 0), promises=[held, FAILED])
    told = summary(scenario, 3, keep=False)
    assert "1 of 2 promises held, in 3 s" in told
    assert "FAIL  flows" in told
    assert not scenario.is_held


def test_the_next_steps_are_right_where_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` in the checkout's root, `penstock` elsewhere; what is kept is not offered again."""
    scenario = DemoScenario(DemoWorkspace(tmp_path), print, (0, 0, 0), api="http://here", query="http://there")
    bin_folder = Path(sys.prefix) / "bin"
    monkeypatch.chdir(ROOT)
    assert "next     make up " in summary(scenario, 3, keep=False)
    monkeypatch.setenv("PATH", os.defpath)
    kept = summary(scenario, 3, keep=True)
    assert "make up" not in kept
    assert f"  source {bin_folder.relative_to(ROOT)}/activate\n  penstock status" in kept
    monkeypatch.chdir(tmp_path)
    assert f"next     source {bin_folder}/activate " in summary(scenario, 3, keep=False)
    monkeypatch.setenv("PATH", str(bin_folder))
    elsewhere = summary(scenario, 3, keep=False)
    assert "next     penstock demo --keep " in elsewhere
    assert "make up" not in elsewhere
    assert "activate" not in summary(scenario, 3, keep=True)


def test_the_sample_files_are_written_into_a_new_folder(tmp_path: Path) -> None:
    """`--files` writes every sample file as it is, says which, and does not overwrite anything."""
    done = penstock_here("demo", "--files", "samples", "--json", cwd=tmp_path)
    written = [str(Path("samples") / sample) for sample in list_samples()]
    assert json.loads(done.out) == {"files": written}
    assert len(written) == 7
    for sample in list_samples():
        assert (tmp_path / "samples" / sample).read_bytes() == (FOLDER / sample).read_bytes()
    again = penstock_here("demo", "--files", "samples", cwd=tmp_path)
    assert (again.code, again.out) == (6, "")
    assert "samples is not empty" in again.err


def test_sample_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    """A folder that cannot be made gives a code, a hint and no traceback."""
    (tmp_path / "taken").write_text("a file")
    done = penstock_here("demo", "--files", str(tmp_path / "taken" / "samples"), "--json")
    assert done.code == 3
    assert json.loads(done.err)["error"]["code"] == "DEMO_FOLDER_UNUSABLE"


def test_the_candles_are_those_of_the_example() -> None:
    """The demo and examples/market-report show the same market."""
    assert (FOLDER / "files" / "candles.csv").read_bytes() == (
        ROOT / "examples" / "market-report" / "candles.csv"
    ).read_bytes()
