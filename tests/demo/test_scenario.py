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


def demo_command(ports: tuple[int, int, int]) -> list[str]:
    """Return the command `penstock demo --keep` with other ports: the default ports may be in use on this machine."""
    code = f"from penstock.cli import demo, main; demo.PORTS = {ports}; main.run()"
    return [sys.executable, "-c", code, "demo", "--keep"]


@pytest.mark.full
def test_demo_keeps_every_promise_and_ends(tmp_path: Path) -> None:
    """F14, I23, R2: all parts, connected only by configuration, keep their promises although processes are killed."""
    done = penstock("demo", cwd=tmp_path, timeout=180)
    assert done.code == 0, done.out + done.err
    assert "9 of 9 guarantees held" in done.out
    assert "FAIL" not in done.out
    assert all(f"\nok  {part} " in done.out for part in PARTS)
    folder = tmp_path / "penstock-demo"
    assert all((folder / "charts" / name).read_text().startswith("<svg") for name in ("days.svg", "four-hours.svg"))
    assert "Traceback" not in (folder / "log.txt").read_text()


@pytest.mark.full
def test_demo_with_keep_serves_and_reports_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: with --keep the demo serves until Ctrl-C and its exit code is the result; --json prints only data."""
    with subprocess.Popen([*demo_command((0, 0, 0)), "--json"], cwd=tmp_path, stdout=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        output = ""
        while not output.endswith("\n}\n"):
            output += demo.stdout.readline().decode()
        verdict = json.loads(output)
        assert verdict["passed"] is True
        assert [promise["part"] for promise in verdict["promises"] if promise["passed"]].count("ingest") == 2
        monkeypatch.setenv("PENSTOCK_URL", verdict["api"])
        assert "polaris" in penstock_here("status").out
        demo.send_signal(signal.SIGINT)
        assert (demo.stdout.read(), demo.wait(60)) == (b"", 0)


@pytest.mark.full
def test_demo_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    """A demo that cannot start exits with 1, the reason and the path of the log, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = demo_command((port, 0, 0))
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"did not finish: penstock up did not start: cannot listen on 127.0.0.1:{port}: Address" in done.stderr
    assert "hint: penstock-demo/log.txt contains the log" in done.stderr
    assert "Traceback" not in done.stderr
