"""F6: publication of artifacts: one process at a time; a process without its lock changes nothing."""

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
    async with flows_stepper(database_url, tmp_path, retention=timedelta(days=1)) as stepper:
        yield stepper


class PausedCall:
    """A call that waits, the first time, until the test lets it continue."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self._calls = real, 0
        self.has_started, self.may_continue = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self.has_started.set()
            await self.may_continue.wait()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        await self.wait()
        return await self._real(*args, **more)


class PausedStream(PausedCall):
    """A paused call of a stream: it waits with its last piece."""

    async def __call__(self, *args: Any, **more: Any) -> AsyncIterator[bytes]:  # type: ignore[override]
        pieces = [piece async for piece in self._real(*args, **more)]
        await self.wait()
        for piece in pieces:
            yield piece


async def seal_step(flows: FlowsStepper, *names: str) -> ClaimedStep:
    """Report a step in a process that dies before it publishes the artifacts."""
    await flows.start({"a": work(), "b": work("a")})
    claimed = (await flows.claim())["a"]
    for name in names:
        await flows.write(claimed, name)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(claimed, artifacts=names)
    flows.storage.is_dying = False
    flows.clock.advance(LATER)
    return claimed


async def stored(flows: FlowsStepper, folder: str = "runs") -> list[str]:
    return sorted([info.path async for info in flows.storage.list(folder)])


async def test_concurrent_maintenance_publishes_once(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: while one process publishes slowly, another skips the step; the published artifacts stay."""
    await seal_step(flows, "out.txt")
    slow = PausedCall(flows.engine.publisher.publish)
    monkeypatch.setattr(flows.engine.publisher, "publish", slow)
    first = asyncio.create_task(flows.maintenance.publish_sealed())
    await slow.has_started.wait()
    await flows.maintenance.publish_sealed()
    assert (await flows.step("a"))["status"] == "RUNNING"
    slow.may_continue.set()
    await first
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "READY"}
    assert await flows.engine.read_artifact("r", "a", "out.txt") == b"r/a/1"


@pytest.mark.parametrize(("where", "left"), [("stream", "out.txt"), ("list", "other.txt")])
async def test_process_without_its_lock_changes_nothing(
    flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch, where: str, left: str
) -> None:
    """F6: a process that was paused while another one ended and retried its step neither writes nor deletes."""
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
    await slow.has_started.wait()
    async with flows.db.connection() as connection:
        assert len(await connection.fetch(STOP_LOCK_HOLDERS)) == 1
    flows.clock.advance(LATER)
    await flows.maintenance.publish_sealed()
    await flows.operations.retry("r", "tester")
    winner = (await flows.claim())["a"]
    await flows.write(winner)
    assert await flows.report(winner, artifacts=["out.txt"]) is StepReportAnswer.SETTLED
    slow.may_continue.set()
    with pytest.raises((PenstockError, asyncpg.InterfaceError, asyncpg.PostgresError, OSError)):
        await losing
    data = await flows.engine.read_artifact("r", "a", "out.txt")
    [kept] = (await flows.step("a"))["artifacts"]
    assert (data, hashlib.sha256(data).hexdigest()) == (attempt_content(winner), kept["sha256"])


async def test_slow_publication_completes(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5, F6: the process ends its step itself, and with it the other steps of its batch."""
    await flows.start({"a": work(), "b": work()})
    claimed = await flows.claim()
    for name in ("1", "2"):
        await flows.write(claimed["a"], name)
    await flows.write(claimed["b"])
    slow = PausedCall(flows.storage.put_file)
    monkeypatch.setattr(flows.storage, "put_file", slow)
    batch = [make_report(claimed["a"], artifacts=["1", "2"]), make_report(claimed["b"], artifacts=["out.txt"])]
    telling = asyncio.create_task(flows.engine.report(batch))
    await slow.has_started.wait()
    flows.clock.advance(LATER)
    await flows.maintenance.publish_sealed()
    slow.may_continue.set()
    assert await telling == [StepReportAnswer.SETTLED, StepReportAnswer.SETTLED]
    assert await stored(flows) == ["runs/r/a/1", "runs/r/a/2", "runs/r/b/out.txt"]
    assert await flows.status() == "SUCCEEDED"


async def test_artifact_name_may_become_a_folder(flows: FlowsStepper) -> None:
    """F6: the artifacts of a failed attempt are deleted before those of the next attempt are published."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]
    await flows.write(claimed, "out")
    await flows.report(claimed, StepReportKind.FAILED, artifacts=["out"])
    assert await stored(flows) == ["runs/r/a/out"]
    await flows.operations.retry("r", "tester")
    claimed = (await flows.claim())["a"]
    await flows.write(claimed, "out/x.json")
    assert await flows.report(claimed, artifacts=["out/x.json"]) is StepReportAnswer.SETTLED
    assert (await stored(flows), await flows.status()) == (["runs/r/a/out/x.json"], "SUCCEEDED")


async def test_failed_publication_does_not_delay_others(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: the maintenance publishes the next step after a failure."""
    await flows.start({"a": work()}, "r0")
    claimed = (await flows.claim())["a"]
    await flows.write(claimed)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(claimed, artifacts=["out.txt"])
    await seal_step(flows, "out.txt")
    put_file = flows.storage.put_file

    async def away_for_one(path: str, source: Path, **more: Any) -> Any:
        if path.startswith("runs/r0/"):
            raise Transient("STORE_AWAY", "not there")
        return await put_file(path, source, **more)

    monkeypatch.setattr(flows.storage, "put_file", away_for_one)
    await flows.maintenance.publish_sealed()
    assert ((await flows.steps("r0"))["a"], (await flows.steps("r"))["a"]) == ("RUNNING", "SUCCEEDED")


async def test_failure_with_missing_artifacts_ends_the_step(flows: FlowsStepper) -> None:
    """F6: a reported failure that names missing artifacts ends with the existing artifacts."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]
    await flows.write(claimed)
    names = ["out.txt", *(f"none{n:03}" for n in range(40))]
    assert await flows.report(claimed, StepReportKind.FAILED, artifacts=names) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED"}
    assert [artifact["name"] for artifact in (await flows.step("a"))["artifacts"]] == ["out.txt"]


async def test_invalid_report_fails_only_its_step(flows: FlowsStepper) -> None:
    """F5: too many artifacts fail one step; the other reports are settled, and prefetched steps are returned."""
    await flows.start({"bad": work(required=False), "leaves": work(), "p": work(), "q": work("p")})
    claimed = await flows.claim()
    await flows.write(claimed["leaves"])
    many = tuple(f"f{n}" for n in range(ARTIFACT_LIMIT + 1))
    batch = [
        (claimed["p"], make_report(claimed["p"])),
        (claimed["bad"], make_report(claimed["bad"], artifacts=many)),
        (claimed["leaves"], make_report(claimed["leaves"], artifacts=("out.txt",))),
    ]
    answers, prefetched = await flows.work_source.settle("w", batch, ["work"], 10)
    assert (answers, [step.step_id for step in prefetched]) == ([StepReportAnswer.SETTLED] * 3, ["q"])
    assert await flows.steps() == {"bad": "SKIPPED", "leaves": "SUCCEEDED", "p": "SUCCEEDED", "q": "RUNNING"}
    assert (await flows.step("bad"))["error"]["code"] == "TOO_MANY_ARTIFACTS"


async def test_unavailable_store_loses_nothing(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3, F11: the worker repeats the batch; prefetched steps come with the second answer, not with the lost one."""
    await flows.start({"leaves": work(), "p": work(), "q": work("p", retry={"maxAttempts": 1})})
    claimed = await flows.claim()
    await flows.write(claimed["leaves"])
    batch = [
        (claimed["p"], make_report(claimed["p"])),
        (claimed["leaves"], make_report(claimed["leaves"], artifacts=("out.txt",))),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(flows.storage, "put_file", _fail_transiently)
        with pytest.raises(Transient):
            await flows.work_source.settle("w", batch, ["work"], 10)
    assert (await flows.steps())["q"] == "PENDING"
    answers, prefetched = await flows.work_source.settle("w", batch, ["work"], 10)
    assert (set(answers), [step.step_id for step in prefetched]) == (
        {StepReportAnswer.SETTLED, StepReportAnswer.UNCHANGED},
        ["q"],
    )
    assert (await flows.steps())["leaves"] == "SUCCEEDED"


async def test_artifacts_are_deleted_before_their_run(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: if the store is unavailable the run is retained, and deleted the next time."""
    await flows.start({"a": work()})
    claimed = (await flows.claim())["a"]
    await flows.write(claimed)
    await flows.engine.log("r", "a", claimed.fence, [("info", "hello")])
    await flows.report(claimed, artifacts=["out.txt"])
    flows.clock.advance(timedelta(days=2))
    await flows.start({"b": work()}, "fresh")
    with monkeypatch.context() as patch:
        patch.setattr(flows.storage, "delete", _fail_transiently)
        with pytest.raises(Transient):
            await flows.maintenance.delete_old_runs()
    await flows.maintenance.delete_old_runs()
    assert await stored(flows) == []
    assert [row["run_id"] for row in await flows.db.fetch("SELECT run_id FROM flow_run")] == ["fresh"]
    left = "SELECT (SELECT count(*) FROM flow_step), (SELECT count(*) FROM flow_log)"
    assert tuple(await flows.db.fetchrow(left) or ()) == (1, 0)


async def test_resumed_run_retains_its_source_run(flows: FlowsStepper) -> None:
    """F6, F19: a run whose artifacts are reused is not deleted before the resumed run."""
    await flows.start({"a": work(), "b": work("a")})
    claimed = (await flows.claim())["a"]
    await flows.write(claimed)
    await flows.report(claimed, artifacts=["out.txt"])
    await flows.work()
    await flows.operations.resume("r", "b", "tester", "again")
    flows.clock.advance(timedelta(days=2))
    await flows.maintenance.delete_old_runs()
    assert await flows.engine.read_artifact("again", "a", "out.txt") == b"r/a/1"
    await flows.work()
    flows.clock.advance(timedelta(days=2))
    await flows.maintenance.delete_old_runs()
    assert (await stored(flows), await flows.db.fetchval("SELECT count(*) FROM flow_run")) == ([], 0)


async def _fail_transiently(*_args: Any, **_more: Any) -> Any:
    raise Transient("STORE_AWAY", "not there for a moment")


async def test_artifacts_are_those_of_the_accepted_attempt(flows: FlowsStepper) -> None:
    """F6: an attempt with a lost lease publishes nothing, neither before nor after the accepted attempt."""
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


async def test_success_with_a_missing_artifact_is_a_failure(flows: FlowsStepper) -> None:
    """F6: a success is accepted only if the artifacts that it names were written."""
    await flows.start({"a": work()})
    assert await flows.report((await flows.claim())["a"], artifacts=["out.txt"]) is StepReportAnswer.SETTLED
    assert (await flows.step("a"))["error"]["code"] == "ARTIFACT_MISSING"
    assert await flows.status() == "FAILED"


async def test_death_during_publication_loses_nothing(flows: FlowsStepper) -> None:
    """F6: the accepted report stays; no other worker gets the step, and another process publishes its artifacts."""
    await flows.start({"a": work(), "b": work("a")})
    claimed = (await flows.claim())["a"]
    await flows.write(claimed)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.report(claimed, artifacts=["out.txt"])
    flows.storage.is_dying = False
    assert await flows.expire_leases() == 0
    assert await flows.claim() == {}
    assert await flows.report(claimed, StepReportKind.FAILED) is StepReportAnswer.CONFLICT
    assert await flows.work_source.settle("w", [(claimed, make_report(claimed))], [], 0) == (
        [StepReportAnswer.CONFLICT],
        [],
    )
    await flows.maintenance.publish_sealed()
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "READY"}
    assert await flows.engine.read_artifact("r", "a", "out.txt") == attempt_content(claimed)
    assert await flows.report(claimed, artifacts=["out.txt"]) is StepReportAnswer.UNCHANGED
