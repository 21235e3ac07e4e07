"""Waits: works that run at once, and what happens to the others when one fails."""

import asyncio

import pytest

from penstock.kernel.tasks.wait import gather_or_cancel


async def test_results_are_in_the_order_of_the_works() -> None:
    """The order of the results does not depend on which work ends first."""
    first_may_end = asyncio.Event()

    async def first() -> int:
        await first_may_end.wait()
        return 1

    async def second() -> int:
        first_may_end.set()
        return 2

    assert await gather_or_cancel([first(), second()]) == [1, 2]


async def test_a_failure_leaves_no_other_work_running() -> None:
    """When one work fails, the others are cancelled and have ended before the failure is raised."""
    ended = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("endless")

    async def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await gather_or_cancel([endless(), failing()])
    assert ended == ["endless"]
