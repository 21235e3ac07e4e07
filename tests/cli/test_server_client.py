"""How commands wait for what goes on at a server."""

from collections.abc import Awaitable, Callable

import pytest

from penstock.cli.server_client import poll_until, wait_for_run
from penstock.kernel.errors import TimedOut, Transient


def answering(*answers: str | Exception | None) -> Callable[[], Awaitable[str | None]]:
    """A look that finds these, one after the other."""
    left = iter(answers)

    async def look() -> str | None:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return look


async def test_one_look_is_always_taken() -> None:
    """What is there already is found, however little time there is; what is not there in time is too late."""
    assert await poll_until(answering("found"), 0, lambda: TimedOut("LATE", "too late"), interval=0) == "found"
    assert await poll_until(answering(None, "found"), 30, lambda: TimedOut("LATE", "too late"), interval=0) == "found"
    with pytest.raises(TimedOut, match="too late"):
        await poll_until(answering(None), 0, lambda: TimedOut("LATE", "too late"), interval=0)


async def test_a_server_that_is_restarted_does_not_end_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """H13: `--wait` goes on waiting and says so; only the run's own end, or the time given, ends it."""
    away = Transient("SERVER_DOWN", "it does not answer")
    assert await wait_for_run(answering(away, "ended"), "r1", 30, "penstock show r1") == "ended"
    assert capsys.readouterr().err == "it does not answer; still waiting\n"
    with pytest.raises(TimedOut, match="run r1 has not ended after 0 s") as late:
        await wait_for_run(answering(None), "r1", 0, "penstock show r1")
    assert late.value.hint == "the run continues; `penstock show r1` shows it"
