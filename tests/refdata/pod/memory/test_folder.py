"""The folders of pods: what dead ones left is removed, and nothing else."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.refdata.pod.memory import folder
from penstock.refdata.pod.memory.folder import pod_folder

DYING_POD = """
import sys
from pathlib import Path

from penstock.refdata.pod.memory.folder import pod_folder

with pod_folder(Path(sys.argv[1]), Path(sys.argv[1]), "dying") as made:
    print(made, flush=True)
    sys.stdin.read()
"""


def test_what_dead_pods_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """R29: the memory of a pod that was killed is given back by the next one; that of a living one is its own."""
    other = tmp_path / "somebody-elses"
    other.mkdir()
    command = [sys.executable, "-c", DYING_POD, str(tmp_path)]
    with (
        pod_folder(tmp_path, tmp_path, "living") as living,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying,
    ):
        assert dying.stdout is not None
        left = Path(dying.stdout.readline().strip())
        with pod_folder(tmp_path, tmp_path, "third") as third:
            assert all(one.is_dir() for one in (left, living, third))
        assert not third.exists()
        dying.kill()
        dying.communicate()
        assert left.is_dir()
        with pod_folder(tmp_path, tmp_path, "fourth") as fourth:
            assert {*tmp_path.iterdir()} == {living, fourth, other}
    assert {*tmp_path.iterdir()} == {other}


def test_pods_that_start_at_once_do_not_take_each_other_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R29: a folder that is just being locked is nobody's leftover."""
    lock, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            folder._remove_abandoned(tmp_path)  # another pod starts at this very moment
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pod_folder(tmp_path, tmp_path, "starting") as made:
        assert (made / "lock").exists()
