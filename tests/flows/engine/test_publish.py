"""F6: what attempts wrote becomes artifacts: one publishes at a time, and no late hand touches what another did."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.flows.contract import ARTIFACT_LIMIT, StepReportAnswer, StepReportKind
from penstock.flows.model import ClaimedStep
from penstock.kernel.errors import NotFound, PenstockError, Transient
from tests.flows.stepper import FlowsStepper, ProcessDied, attempt_content, flows_stepper, make_report, work
from tests.services.postgres import STOP_LOCK_HOLDERS

LATER = timedelta(minutes=1)


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path, retention=timedelta(days=1)) as one:
        yield one


class Paused:
    """The first call of something waits until the test lets it go on."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self._calls = real, 0
        self.is_there, self.may_go = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self.is_there.set()
            await self.may_go.wait()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        await self.wait()
        return await self._real(*args, **more)


class PausedStream(Paused):
    """The same, of what gives one piece after another: it waits with the last."""

    async def __call__(self, *args: Any, **more: Any) -> AsyncIterator[bytes]:  # type: ignore[override]
        pieces = [piece async for piece in self._real(*args, **more)]
        await self.wait()
        for piece in pieces:
            yield piece


async def sealed(flows: FlowsStepper, *names: str) -> ClaimedStep:
    """A report that is believed, whose process died before it published anything."""
    await flows.start({"a": work(), "b": work("a")})
    held = (await flows.claim())["a"]
    for name in names:
        await flows.write(held, name)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(held, artifacts=names)
    flows.storage.is_dying = False
    flows.clock.advance(LATER)
    return held


async def stored(flows: FlowsStepper, folder: str = "runs") -> list[str]:
    return sorted([info.path async for info in flows.storage.list(folder)])


async def test_two_keepers_publish_once(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: one is slow; the other leaves it alone, and what was published stays."""
    await sealed(flows, "out.txt")
    slow = Paused(flows.engine.publisher.publish)
    monkeypatch.setattr(flows.engine.publisher, "publish", slow)
    first = asyncio.create_task(flows.maintenance.publish_sealed())
    await slow.is_there.wait()
    await flows.maintenance.publish_sealed()
    assert (await flows.step("a"))["status"] == "RUNNING"
    slow.may_go.set()
    await first
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "READY"}
    assert await flows.engine.read_artifact("r", "a", "out.txt") == b"r/a/1"


@pytest.mark.parametrize(("where", "left"), [("stream", "out.txt"), ("list", "other.txt")])
async def test_who_lost_its_lock_touches_nothing_any_more(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch, where: str, left: str
) -> None:
    """F6: it stood still while others ended its step and tried it again: it neither writes nor removes."""
    await flows.start({"a": work()})
    first = (await flows.claim())["a"]
    await flows.write(first)
    await flows.report(first, StepReportKind.FAILED, artifacts=["out.txt"])
    await flows.operations.retry("r", "tester")
    loser = (await flows.claim())["a"]
    await flows.write(loser, left)
    slow = PausedStream(getattr(flows.storage, where))
    monkeypatch.setattr(flows.storage, where, slow)
    losing = asyncio.create_task(flows.report(loser, StepReportKind.FAILED, artifacts=[left]))
    await slow.is_there.wait()
    async with flows.db.connection() as connection:
        assert len(await connection.fetch(STOP_LOCK_HOLDERS)) == 1
    flows.clock.advance(LATER)
    await flows.maintenance.publish_sealed()
    await flows.operations.retry("r", "tester")
    winner = (await flows.claim())["a"]
    await flows.write(winner)
    assert await flows.report(winner, artifacts=["out.txt"]) is StepReportAnswer.SETTLED
    slow.may_go.set()
    with pytest.raises((PenstockError, asyncpg.InterfaceError, asyncpg.PostgresError, OSError)):
        await losing
    data = await flows.engine.read_artifact("r", "a", "out.txt")
    [kept] = (await flows.step("a"))["artifacts"]
    assert (data, hashlib.sha256(data).hexdigest()) == (attempt_content(winner), kept["sha256"])


async def test_a_slow_publisher_is_waited_for(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5, F6: however long it takes, it ends its step itself, and the others of its batch with it."""
    await flows.start({"a": work(), "b": work()})
    held = await flows.claim()
    for name in ("1", "2"):
        await flows.write(held["a"], name)
    await flows.write(held["b"])
    slow = Paused(flows.storage.put_file)
    monkeypatch.setattr(flows.storage, "put_file", slow)
    batch = [make_report(held["a"], artifacts=["1", "2"]), make_report(held["b"], artifacts=["out.txt"])]
    telling = asyncio.create_task(flows.engine.report(batch))
    await slow.is_there.wait()
    flows.clock.advance(LATER)
    await flows.maintenance.publish_sealed()
    slow.may_go.set()
    assert await telling == [StepReportAnswer.SETTLED, StepReportAnswer.SETTLED]
    assert await stored(flows) == ["runs/r/a/1", "runs/r/a/2", "runs/r/b/out.txt"]
    assert await flows.status() == "SUCCEEDED"


async def test_a_name_may_be_another_attempts_folder(flows: FlowsStepper) -> None:
    """F6: what a failed attempt published makes capacity for what the next one does."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    await flows.write(held, "out")
    await flows.report(held, StepReportKind.FAILED, artifacts=["out"])
    assert await stored(flows) == ["runs/r/a/out"]
    await flows.operations.retry("r", "tester")
    held = (await flows.claim())["a"]
    await flows.write(held, "out/x.json")
    assert await flows.report(held, artifacts=["out/x.json"]) is StepReportAnswer.SETTLED
    assert (await stored(flows), await flows.status()) == (["runs/r/a/out/x.json"], "SUCCEEDED")


async def test_one_that_cannot_be_published_does_not_hold_up_the_others(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: the next of those whose process died is published all the same."""
    await flows.start({"a": work()}, "r0")
    held = (await flows.claim())["a"]
    await flows.write(held)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(held, artifacts=["out.txt"])
    await sealed(flows, "out.txt")
    put_file = flows.storage.put_file

    async def away_for_one(path: str, source: Path, **more: Any) -> Any:
        if path.startswith("runs/r0/"):
            raise Transient("STORE_AWAY", "not there")
        return await put_file(path, source, **more)

    monkeypatch.setattr(flows.storage, "put_file", away_for_one)
    await flows.maintenance.publish_sealed()
    assert ((await flows.steps("r0"))["a"], (await flows.steps("r"))["a"]) == ("RUNNING", "SUCCEEDED")


async def test_names_nobody_wrote_do_not_seal_a_step_for_ever(flows: FlowsStepper) -> None:
    """F6: a failure that names what it did not write, however much of it, is a failure with what there is."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    await flows.write(held)
    names = ["out.txt", *(f"none{n:03}" for n in range(40))]
    assert await flows.report(held, StepReportKind.FAILED, artifacts=names) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED"}
    assert [one["name"] for one in (await flows.step("a"))["artifacts"]] == ["out.txt"]


async def test_a_report_that_makes_no_sense_is_its_steps_failure(flows: FlowsStepper) -> None:
    """F5: too many artifacts fail one step; the others of the batch are settled, and what they free is handed over."""
    await flows.start({"bad": work(required=False), "leaves": work(), "p": work(), "q": work("p")})
    held = await flows.claim()
    await flows.write(held["leaves"])
    many = tuple(f"f{n}" for n in range(ARTIFACT_LIMIT + 1))
    batch = [
        (held["p"], make_report(held["p"])),
        (held["bad"], make_report(held["bad"], artifacts=many)),
        (held["leaves"], make_report(held["leaves"], artifacts=("out.txt",))),
    ]
    answers, handed = await flows.work_source.settle("w", batch, ["work"], 10)
    assert (answers, [one.step_id for one in handed]) == ([StepReportAnswer.SETTLED] * 3, ["q"])
    assert await flows.steps() == {"bad": "SKIPPED", "leaves": "SUCCEEDED", "p": "SUCCEEDED", "q": "RUNNING"}
    assert (await flows.step("bad"))["error"]["code"] == "TOO_MANY_ARTIFACTS"


async def test_a_store_that_is_away_for_a_moment_costs_nothing(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3, F11: the batch is handed in again, and what it frees comes with that answer, not with the lost one."""
    await flows.start({"leaves": work(), "p": work(), "q": work("p", retry={"maxAttempts": 1})})
    held = await flows.claim()
    await flows.write(held["leaves"])
    batch = [(held["p"], make_report(held["p"])), (held["leaves"], make_report(held["leaves"], artifacts=("out.txt",)))]
    with monkeypatch.context() as patch:
        patch.setattr(flows.storage, "put_file", _away)
        with pytest.raises(Transient):
            await flows.work_source.settle("w", batch, ["work"], 10)
    assert (await flows.steps())["q"] == "PENDING"
    answers, handed = await flows.work_source.settle("w", batch, ["work"], 10)
    assert (set(answers), [one.step_id for one in handed]) == (
        {StepReportAnswer.SETTLED, StepReportAnswer.UNCHANGED},
        ["q"],
    )
    assert (await flows.steps())["leaves"] == "SUCCEEDED"


async def test_what_a_run_left_is_forgotten_before_the_run(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: a store that is away keeps nothing for ever: the run is still known, and forgotten the next time."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    await flows.write(held)
    await flows.engine.log("r", "a", held.fence, [("info", "hello")])
    await flows.report(held, artifacts=["out.txt"])
    flows.clock.advance(timedelta(days=2))
    await flows.start({"b": work()}, "fresh")
    with monkeypatch.context() as patch:
        patch.setattr(flows.storage, "delete", _away)
        with pytest.raises(Transient):
            await flows.maintenance.delete_old_runs()
    await flows.maintenance.delete_old_runs()
    assert await stored(flows) == []
    assert [row["run_id"] for row in await flows.db.fetch("SELECT run_id FROM flow_run")] == ["fresh"]
    left = "SELECT (SELECT count(*) FROM flow_step), (SELECT count(*) FROM flow_log)"
    assert tuple(await flows.db.fetchrow(left) or ()) == (1, 0)


async def test_what_a_resumed_run_points_at_is_kept_as_long_as_it(flows: FlowsStepper) -> None:
    """F6, F19: the run it took artifacts over from is not forgotten before it is itself."""
    await flows.start({"a": work(), "b": work("a")})
    held = (await flows.claim())["a"]
    await flows.write(held)
    await flows.report(held, artifacts=["out.txt"])
    await flows.work()
    await flows.operations.resume("r", "b", "tester", "again")
    flows.clock.advance(timedelta(days=2))
    await flows.maintenance.delete_old_runs()
    assert await flows.engine.read_artifact("again", "a", "out.txt") == b"r/a/1"
    await flows.work()
    flows.clock.advance(timedelta(days=2))
    await flows.maintenance.delete_old_runs()
    assert (await stored(flows), await flows.db.fetchval("SELECT count(*) FROM flow_run")) == ([], 0)


async def _away(*_args: Any, **_more: Any) -> Any:
    raise Transient("STORE_AWAY", "not there for a moment")


async def test_artifacts_are_the_winners(flows: FlowsStepper) -> None:
    """F6: who lost the lease publishes nothing over the winner, before or after."""
    await flows.start({"a": work()})
    old = (await flows.claim())["a"]
    await flows.write(old)
    await flows.expire_leases()
    new = (await flows.claim())["a"]
    await flows.write(new)
    assert await flows.report(old, artifacts=["out.txt"]) is StepReportAnswer.SUPERSEDED
    with pytest.raises(NotFound):
        await flows.engine.read_artifact("r", "a", "out.txt")
    assert await flows.report(new, artifacts=["out.txt"]) is StepReportAnswer.SETTLED
    await flows.write(old, data=b"late")
    assert await flows.report(old, artifacts=["out.txt"]) is StepReportAnswer.SUPERSEDED
    assert await flows.engine.read_artifact("r", "a", "out.txt") == attempt_content(new)
    assert (await flows.engine.find_artifact("r", "a", "out.txt")).path == "runs/r/a/out.txt"


async def test_a_report_of_what_is_not_there_is_a_failure(flows: FlowsStepper) -> None:
    """F6: a success is believed when what it names was written."""
    await flows.start({"a": work()})
    assert await flows.report((await flows.claim())["a"], artifacts=["out.txt"]) is StepReportAnswer.SETTLED
    assert (await flows.step("a"))["error"]["code"] == "ARTIFACT_MISSING"
    assert await flows.status() == "FAILED"


async def test_a_process_that_dies_while_it_publishes_loses_nothing(flows: FlowsStepper) -> None:
    """F6: the report was believed; nobody else gets the step, and another process publishes it."""
    await flows.start({"a": work(), "b": work("a")})
    held = (await flows.claim())["a"]
    await flows.write(held)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(held, artifacts=["out.txt"])
    flows.storage.is_dying = False
    assert await flows.expire_leases() == 0
    assert await flows.claim() == {}
    assert await flows.report(held, StepReportKind.FAILED) is StepReportAnswer.CONFLICT
    assert await flows.work_source.settle("w", [(held, make_report(held))], [], 0) == ([StepReportAnswer.CONFLICT], [])
    await flows.maintenance.publish_sealed()
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "READY"}
    assert await flows.engine.read_artifact("r", "a", "out.txt") == attempt_content(held)
    assert await flows.report(held, artifacts=["out.txt"]) is StepReportAnswer.UNCHANGED
