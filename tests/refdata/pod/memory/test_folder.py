"""R29: the folders of pods, and the removal of abandoned ones."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.refdata.pod.memory import folder
from penstock.refdata.pod.memory.folder import make_pod_folder

DYING_POD = """
import sys
from pathlib import Path

from penstock.refdata.pod.memory.folder import make_pod_folder

with make_pod_folder(Path(sys.argv[1]), Path(sys.argv[1]), "dying") as made:
    print(made, flush=True)
    sys.stdin.read()
"""


def test_only_folders_of_dead_pods_are_removed(tmp_path: Path) -> None:
    """R29: the next pod removes the folder of a killed pod, and keeps those of living pods."""
    other = tmp_path / "foreign"
    other.mkdir()
    command = [sys.executable, "-c", DYING_POD, str(tmp_path)]
    with (
        make_pod_folder(tmp_path, tmp_path, "living") as living,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying,
    ):
        assert dying.stdout is not None
        left = Path(dying.stdout.readline().strip())
        with make_pod_folder(tmp_path, tmp_path, "third") as third:
            assert all(path.is_dir() for path in (left, living, third))
        assert not third.exists()
        dying.kill()
        dying.communicate()
        assert left.is_dir()
        with make_pod_folder(tmp_path, tmp_path, "fourth") as fourth:
            assert {*tmp_path.iterdir()} == {living, fourth, other}
    assert {*tmp_path.iterdir()} == {other}


def test_simultaneous_starts_do_not_remove_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: a folder that is being locked is not removed."""
    lock, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            folder._remove_abandoned(tmp_path)  # another pod starts at this moment
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with make_pod_folder(tmp_path, tmp_path, "starting") as made:
        assert (made / "lock").exists()
