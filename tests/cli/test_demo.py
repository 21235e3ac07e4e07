"""What `penstock demo` shows at its end."""

import os
import sys
from pathlib import Path

import pytest

from penstock.cli.demo import format_summary
from penstock.demo.scenario import CheckedPromise, DemoScenario
from penstock.demo.workspace import DemoWorkspace
from tests.pages import ROOT

FAILED = CheckedPromise("flows", "it ends", "it did not", passed=False)


def test_a_promise_that_is_broken_is_shown(tmp_path: Path) -> None:
    """The table of results shows a broken promise, and the verdict is not held."""
    held = CheckedPromise("ingest", "all is well", "it was", passed=True)
    scenario = DemoScenario(DemoWorkspace(tmp_path), print, (0, 0, 0), promises=[held, FAILED])
    text = format_summary(scenario, 3, keep=False)
    assert "1 of 2 guarantees held, in 3 s" in text
    assert "FAIL  flows" in text
    assert not scenario.has_passed


def test_the_next_steps_are_right_where_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` in the checkout's root, `penstock` elsewhere; what is kept is not offered again."""
    scenario = DemoScenario(DemoWorkspace(tmp_path), print, (0, 0, 0), api="http://here", query="http://there")
    bin_folder = Path(sys.prefix) / "bin"
    monkeypatch.chdir(ROOT)
    assert "next   make up " in format_summary(scenario, 3, keep=False)
    monkeypatch.setenv("PATH", os.defpath)
    kept = format_summary(scenario, 3, keep=True)
    assert "make up" not in kept
    assert f"  source {bin_folder.relative_to(ROOT)}/activate\n  penstock status" in kept
    monkeypatch.chdir(tmp_path)
    assert f"next   source {bin_folder}/activate " in format_summary(scenario, 3, keep=False)
    monkeypatch.setenv("PATH", str(bin_folder))
    elsewhere = format_summary(scenario, 3, keep=False)
    assert "next   penstock demo --keep " in elsewhere
    assert "make up" not in elsewhere
    assert "activate" not in format_summary(scenario, 3, keep=True)
