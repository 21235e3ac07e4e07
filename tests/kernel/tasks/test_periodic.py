"""Chores: done again and again, whatever happens to one round, and ended with the block."""

import asyncio
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from penstock.kernel.errors import Transient
from penstock.kernel.tasks.periodic import run_periodically

AT_ONCE = timedelta(0)
HOUR = timedelta(hours=1)


async def test_a_failing_round_does_not_stop_later_ones() -> None:
    """A known failure is a warning, a crash is an error with its traceback, and the next round comes."""
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


async def test_the_first_round_comes_at_once_and_the_next_waits() -> None:
    """A chore that is done hourly is also done at the start."""
    rounds = 0
    begun = asyncio.Event()

    async def run() -> None:
        nonlocal rounds
        rounds += 1
        begun.set()

    async with run_periodically("sweep", run, HOUR):
        await begun.wait()
        for _ in range(10):
            await asyncio.sleep(0)
    assert rounds == 1


async def test_the_block_ends_a_round_under_way() -> None:
    """Leaving the block cancels the chore and waits until it is gone."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with run_periodically("sweep", run, AT_ONCE):
        await begun.wait()
    assert ended.is_set()


async def test_a_failure_in_the_block_is_told_as_it_is() -> None:
    """The chore ends, and the block's own failure comes out."""

    async def run() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        async with run_periodically("sweep", run, AT_ONCE):
            await asyncio.sleep(0)
            _ = 1 / 0


async def test_a_program_cancelled_while_it_waits_for_a_chore_is_cancelled() -> None:
    """A second Ctrl-C, while a chore takes its time to end, is not swallowed."""
    ending, let_go = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await let_go.wait()

    async def program() -> None:
        async with run_periodically("sweep", run, AT_ONCE):
            await asyncio.sleep(0)

    running = asyncio.create_task(program())
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    let_go.set()
    await asyncio.sleep(0)
