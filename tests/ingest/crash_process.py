"""Runs in forked processes that kill themselves at a step or at the nth disk call, or are killed by the test."""

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
from penstock.kernel.telemetry.build import find_code_commit
from tests.support.crash import KillAtCall, call_at, kill_self
from tests.support.fork_server import FORKED

SUPPLIER = "acme"
_CAPABILITIES_V3 = 0x20080522
TIMEOUT = 60.0  # seconds
DISK_CALLS = ("rename", "replace", "unlink", "rmdir", "link", "symlink", "mkdir", "fsync", "open", "chmod")

find_code_commit()  # runs git once for all processes


def run_until(root: Path, step: PublishStep | None) -> None:
    """Run once; kill the process at *step*."""
    hooks = RunHooks(on_step=call_at(step, kill_self))
    Ingestion(FolderTree(root), "crashing", hooks).run(SUPPLIER, waits=False)


def run_until_call(root: Path, number: int) -> None:
    """Run once; kill the process before the *number*-th call that changes the disk."""
    _count_calls(number)
    Ingestion(FolderTree(root), "crashing").run(SUPPLIER, waits=False)


def sweep_until_call(root: Path, number: int, forward: timedelta) -> None:
    """Delete expired files on a clock that is moved *forward*; kill the process before the *number*-th call."""
    _count_calls(number)
    delete_expired(FolderTree(root), IngestRetentionSection(), ManualClock(SystemClock().now() + forward), "crashing")


def run_without_capabilities(root: Path, pipe: Pipe) -> None:
    """Run once with only the rights that the modes of the files give; send the outcome to *pipe*."""
    _drop_capabilities()
    try:
        outcome = Ingestion(FolderTree(root), "crashing").run(SUPPLIER, waits=False)
    except PenstockError as error:
        pipe.send((error.exit_code, error.code, error.hint))
    else:
        failure = outcome.manifest.failure if outcome.manifest else None
        pipe.send((0, failure.code.value if failure else None, None))


def _drop_capabilities() -> None:
    """Drop the capabilities of root, which then has the rights of an ordinary owner."""
    if os.getuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(header, none) == 0


def _count_calls(number: int) -> None:
    count = KillAtCall(number)

    def count_calls(call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            count()
            return call(*args, **options)

        return counted

    for name in DISK_CALLS:
        setattr(os, name, count_calls(getattr(os, name)))


def start_process(target: Callable[..., None], *args: object) -> ForkServerProcess:
    process = FORKED.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def run_and_receive(target: Callable[..., None], *args: object) -> tuple[int, str | None, str | None]:
    """Run a process, and return the outcome that it sent."""
    receiver, sender = FORKED.Pipe(duplex=False)
    with receiver:
        with sender:
            process = start_process(target, *args, sender)
        assert not was_killed(process)
        outcome: tuple[int, str | None, str | None] = receiver.recv()
    return outcome


def was_killed(process: ForkServerProcess) -> bool:
    """Wait for the end of a process, and return whether it was killed; otherwise it must have succeeded."""
    process.join(TIMEOUT)
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def run_and_die(target: Callable[..., None], *args: object) -> bool:
    """Run a process, and return whether it was killed."""
    return was_killed(start_process(target, *args))
