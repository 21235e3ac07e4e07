"""The folder and the processes of the demo."""

from pathlib import Path

import pytest

from penstock.demo.workspace import DemoWorkspace
from penstock.kernel.db import datadir
from penstock.kernel.errors import Conflict
from tests.support.processes import penstock


def test_demo_takes_no_setting_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the demo does not see the variables that may name a production database."""
    monkeypatch.setenv("PENSTOCK__DATABASE__URL", "postgresql://penstock@db.internal/production")
    monkeypatch.setenv("PENSTOCK_CONFIG", "/etc/penstock.yaml")
    with DemoWorkspace.create(tmp_path / "demo") as workspace:
        _, shown = workspace.start_penstock("config", "show")
    assert shown["database"]["url"] == "embedded"


def test_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    """A folder with other files, or with a running demo, is refused and not emptied."""
    (tmp_path / "thesis.txt").write_text("three years of work")
    done = penstock("demo", "--folder", ".", cwd=tmp_path)
    assert (done.code, done.out) == (6, "")
    assert "files that are not from a demo\nhint: choose another folder with --folder" in done.err
    assert (tmp_path / "thesis.txt").exists()
    with (
        DemoWorkspace.create(tmp_path / "demo") as running,
        datadir.lock_data_dir(running.folder / ".penstock", "up"),
        pytest.raises(Conflict, match="is running"),
        DemoWorkspace.create(running.folder),
    ):
        pass
    with DemoWorkspace.create(tmp_path / "demo"):
        pass
