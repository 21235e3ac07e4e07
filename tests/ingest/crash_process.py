"""Ingest runs in forked processes that die at a step or at the nth disk call, or are killed by the test."""

import ctypes
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.run.hooks import RunHooks
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.state.retention import delete_expired
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.clock import ManualClock, SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry.build import code_commit
from tests.support.crash import KillAtCall, call_at, kill_self
from tests.support.fork_server import FORKED

SUPPLIER = "acme"
_CAPABILITIES_V3 = 0x20080522
WITHIN = 60.0  # seconds; only a broken promise takes so long
DISK_CALLS = ("rename", "replace", "unlink", "rmdir", "link", "symlink", "mkdir", "fsync", "open", "chmod")

code_commit()  # asks git, once for all of them


def run_until(root: Path, step: PublishStep | None) -> None:
    """One run, dead at *step*."""
    hooks = RunHooks(on_step=call_at(step, kill_self))
    Ingestion(FolderTree(root), "crashing", hooks).run(SUPPLIER, waits=False)


def run_until_call(root: Path, number: int) -> None:
    """One run, dead before the *number*-th call that changes something on the disk."""
    _count_calls(number)
    Ingestion(FolderTree(root), "crashing").run(SUPPLIER, waits=False)


def sweep_until_call(root: Path, number: int, forward: timedelta) -> None:
    """What is too old goes, on a clock that was put *forward*; dead before the *number*-th call."""
    _count_calls(number)
    delete_expired(FolderTree(root), IngestRetentionSection(), ManualClock(SystemClock().now() + forward), "crashing")


def run_without_power(root: Path, pipe: Pipe) -> None:
    """One run by somebody who may only do what the modes of the files say; how it ended goes to *pipe*."""
    _give_up_power()
    try:
        outcome = Ingestion(FolderTree(root), "crashing").run(SUPPLIER, waits=False)
    except PenstockError as error:
        pipe.send((error.exit_code, error.code, error.hint))
    else:
        failure = outcome.manifest.failure if outcome.manifest else None
        pipe.send((0, failure.code.value if failure else None, None))


def _give_up_power() -> None:
    """root without its capabilities is an owner like any other."""
    if os.getuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(header, none) == 0


def _count_calls(number: int) -> None:
    count = KillAtCall(number)

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **options: object) -> object:
            count()
            return call(*args, **options)

        return called

    for name in DISK_CALLS:
        setattr(os, name, counted(getattr(os, name)))


def started(target: Callable[..., None], *args: object) -> ForkServerProcess:
    process = FORKED.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def answered(target: Callable[..., None], *args: object) -> tuple[int, str | None, str | None]:
    """What a process sent that was to tell how it ended."""
    ours, theirs = FORKED.Pipe(duplex=False)
    with ours:
        with theirs:
            process = started(target, *args, theirs)
        assert not was_killed(process)
        answer: tuple[int, str | None, str | None] = ours.recv()
    return answer


def was_killed(process: ForkServerProcess) -> bool:
    """Whether it died, once it has ended; when it was not killed, it has done all it was to do."""
    process.join(WITHIN)
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def killed_at(target: Callable[..., None], *args: object) -> bool:
    return was_killed(started(target, *args))
