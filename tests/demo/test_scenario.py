"""The demo, as `penstock demo` runs it."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import penstock, penstock_here

PARTS = ("platform", "tracking", "refdata", "ingest", "harvest", "flows", "overview")


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
