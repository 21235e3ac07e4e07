"""The demo, as `make demo` runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo.__main__ import summary
from examples.demo.place import ROOT, Broken, Place
from examples.demo.story import Found, Story

from penstock.kernel import datadir

PARTS = ("platform", "tracking", "refdata", "ingest", "harvest", "flows", "overview")


def demo(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", "--folder", str(folder)]
    given = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.full
def test_the_demo_tells_its_story_and_ends(tmp_path: Path) -> None:
    """F14, I23, R2: all parts, tied by configuration alone, keep what they promise, though processes are killed."""
    done = demo(tmp_path / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 promises held" in done.stdout
    assert "FAIL" not in done.stdout
    assert all(f"\nok  {part} " in done.stdout for part in PARTS)
    charts = tmp_path / "demo" / "charts"
    assert all((charts / name).read_text().startswith("<svg") for name in ("days.svg", "four-hours.svg"))
    assert "Traceback" not in (tmp_path / "demo" / "log.txt").read_text()


@pytest.mark.full
def test_a_demo_that_cannot_begin_says_so(tmp_path: Path) -> None:
    """Exit code 1, where to look, and no traceback."""
    done = demo(tmp_path / "demo", PENSTOCK__SERVER__HOST="nowhere.invalid")
    assert done.returncode == 1
    assert "the story did not come to its end: penstock up did not start; " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    """What is there is not emptied; nor is a demo that is running."""
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(Broken, match="not the demo's"), Place.made(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").exists()
    with (
        Place.made(tmp_path / "demo") as running,
        datadir.owned(running.folder / ".penstock", "up"),
        pytest.raises(Broken, match="is running"),
        Place.made(running.folder),
    ):
        pass
    with Place.made(tmp_path / "demo"):
        pass


def test_a_promise_that_is_broken_is_shown(tmp_path: Path) -> None:
    """The table of what happened does not hide it."""
    found = [Found("ingest", "all is well", "it was", held=True), Found("flows", "it ends", "it did not", held=False)]
    story = Story(Place(tmp_path), print, (0, 0, 0), found=found)
    told = summary(story, 3)
    assert "1 of 2 promises held, in 3 s" in told
    assert "FAIL  flows" in told
