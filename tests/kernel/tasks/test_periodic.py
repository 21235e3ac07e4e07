"""Periodic tasks: run repeatedly, also after a failed round, and ended with the block."""

import asyncio
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from penstock.kernel.errors import Transient
from penstock.kernel.tasks.periodic import run_periodically

AT_ONCE = timedelta(0)
HOUR = timedelta(hours=1)


async def test_a_failing_round_does_not_stop_later_ones() -> None:
    """A PenstockError is a warning, a crash is an error with its traceback, and the next round runs."""
    failures = [Transient("DOWN", "down"), RuntimeError("a bug"), TimeoutError()]
    recovered = asyncio.Event()

    async def run() -> None:
        if failures:
            raise failures.pop(0)
        recovered.set()

    with capture_logs() as logs:
        async with run_periodically("sweep", run, AT_ONCE):
            await recovered.wait()
    assert [(log["event"], log["log_level"], log["task"]) for log in logs] == [
        ("periodic_task_failed", "warning", "sweep"),
        ("periodic_task_crashed", "error", "sweep"),
        ("periodic_task_crashed", "error", "sweep"),
    ]


async def test_the_first_round_runs_at_once_and_the_next_waits() -> None:
    """An hourly task also runs at the start."""
    rounds = 0
    started = asyncio.Event()

    async def run() -> None:
        nonlocal rounds
        rounds += 1
        started.set()

    async with run_periodically("sweep", run, HOUR):
        await started.wait()
        for _ in range(10):
            await asyncio.sleep(0)
    assert rounds == 1


async def test_the_end_of_the_block_cancels_a_running_round() -> None:
    """The end of the block cancels the task and waits for its end."""
    started, ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with run_periodically("sweep", run, AT_ONCE):
        await started.wait()
    assert ended.is_set()


async def test_an_error_in_the_block_passes_unchanged() -> None:
    """The task ends, and the error of the block is raised."""

    async def run() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        async with run_periodically("sweep", run, AT_ONCE):
            await asyncio.sleep(0)
            _ = 1 / 0


async def test_a_program_that_is_cancelled_while_it_waits_for_a_task_is_cancelled() -> None:
    """A second Ctrl-C, while a task takes long to end, is not swallowed."""
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async def program() -> None:
        async with run_periodically("sweep", run, AT_ONCE):
            await asyncio.sleep(0)

    running = asyncio.create_task(program())
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    may_end.set()
    await asyncio.sleep(0)
