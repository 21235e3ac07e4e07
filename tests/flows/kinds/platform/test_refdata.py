"""refdata.publish: a dictionary is published once, whichever worker dies on the way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.app.bridges import RefdataAdapter
from penstock.flows.kinds.platform.refdata import refdata_worker
from penstock.flows.step import FlowStep
from penstock.refdata import contract
from penstock.refdata.model import DictionaryKey
from tests.flows.kinds.platform.running_steps import is_stopped, under_way
from tests.flows.memory_step_io import MemoryStepIO, make_step, run_failing_step, run_step
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings, upsert
from tests.support.types import Json
from tests.support.wait import becomes

LOOSE = DictionaryKey("acme", "LOOSE")


@pytest.fixture
async def refdata(database_url: str) -> AsyncIterator[RefdataHarness]:
    await create_schemas(database_url)
    async with opened(refdata_settings(database_url)) as refdata:
        yield refdata


def publish(attempt: int = 1, step_io: MemoryStepIO | None = None, mode: str = "SNAPSHOT", **more: Any) -> FlowStep:
    inputs = {"tenant": "acme", "dictionary": "LOOSE", "mode": mode, **more}
    return make_step("refdata.publish", inputs, attempt=attempt, step_io=step_io)


def items(count: int) -> list[Json]:
    return [{"key": f"k{number}", "payload": {"n": number}} for number in range(count)]


async def on_the_bus(refdata: RefdataHarness, count: int = 1) -> None:
    """Back when so many commands wait."""

    async def is_so() -> bool:
        return await refdata.bus.backlog(refdata.topic) >= count

    await becomes(is_so, f"{count} commands are on the bus")


async def test_a_dictionary_is_published(refdata: RefdataHarness) -> None:
    """F14: a SNAPSHOT replaces all, a DELTA some; the step ends with the version that is committed."""
    worker = refdata_worker(RefdataAdapter(refdata.refdata))
    for mode, given, version, left in (
        ("SNAPSHOT", items(2), 1, {"k0": {"n": 0}, "k1": {"n": 1}}),
        ("DELTA", [{"key": "k0", "op": "DELETE"}, upsert("k2", 5)], 2, {"k1": {"n": 1}, "k2": 5}),
        ("SNAPSHOT", items(1), 3, {"k0": {"n": 0}}),
    ):
        async with under_way(worker, publish(mode=mode, items=given)) as task:
            await on_the_bus(refdata)
            await refdata.apply()
            outputs = await task
        assert outputs == {"tenantId": "acme", "dictCode": "LOOSE", "version": version, "items": len(given)}
        assert await refdata.items("LOOSE") == left


@pytest.mark.parametrize("mode", ["SNAPSHOT", "DELTA"])
async def test_a_dictionary_is_published_once_whoever_dies(
    refdata: RefdataHarness, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """F14: in chunks, with a worker that died between them and one after, it is the same versions and no more."""
    monkeypatch.setattr(contract, "_ITEM_ROOM", 70)  # bytes: two items
    worker = refdata_worker(RefdataAdapter(refdata.refdata))
    async with under_way(worker, publish(items=items(5), mode=mode)):
        await on_the_bus(refdata)
    async with under_way(worker, publish(2, items=items(5), mode=mode)) as task:

        async def is_published() -> bool:
            await refdata.apply()
            return task.done()

        await becomes(is_published, "all commands are applied")
        outputs = await task
    assert outputs["version"] == (1 if mode == "SNAPSHOT" else 3)
    assert await run_step(worker, publish(3, items=items(5), mode=mode)) == outputs
    assert await refdata.items("LOOSE") == {item["key"]: item["payload"] for item in items(5)}
    assert len((await refdata.refdata.list_versions(LOOSE, before=99, limit=9)).items) == outputs["version"]
    assert await refdata.bus.backlog(refdata.topic) == 0


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n"])
@pytest.mark.parametrize("is_list", [True, False])
async def test_a_dictionary_is_published_from_an_artifact(refdata: RefdataHarness, is_list: bool, end: str) -> None:
    """F14: JSON lines or a list, as a step before wrote them, to the last digit."""
    one, two = '{"key": "a", "payload": 0.10000000000000000001}', '{"payload": [1], "key": "b"}'
    step_io = MemoryStepIO(
        artifacts={("before", "rates"): (f"[{one},\n{two}]{end}" if is_list else f"{one}\n{two}{end}").encode()}
    )
    worker = refdata_worker(RefdataAdapter(refdata.refdata))
    given: Json = {"from": {"step": "before", "artifact": "rates"}}
    step = publish(step_io=step_io, **given)
    async with under_way(worker, step) as task:
        await on_the_bus(refdata)
        await refdata.apply()
        assert (await task)["items"] == 2
    loaded = await refdata.refdata.catalogue.get(LOOSE).provider.load_all(refdata.db, LOOSE)
    assert loaded.items == {"a": "0.10000000000000000001", "b": "[1]"}


async def test_what_refdata_refuses_fails_the_step_and_the_next_attempt_sends_it_anew(refdata: RefdataHarness) -> None:
    """F10, F14: the reason is the step's error; once it is mended, a second attempt is a command of its own."""
    worker = refdata_worker(RefdataAdapter(refdata.refdata))
    first = asyncio.create_task(run_failing_step(worker, publish(items=items(3))))
    await on_the_bus(refdata)
    await refdata.apply(max_items=2)
    error = await first
    assert error.error.code == "SNAPSHOT_TOO_LARGE"
    assert "3 items" in error.error.message
    async with under_way(worker, publish(2, items=items(3))) as task:
        await on_the_bus(refdata)
        await refdata.apply()
        assert (await task)["version"] == 1


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"dictionary": "NONE", "items": []}, "UNKNOWN_DICTIONARY"),
        ({"items": [{"key": "a"}]}, "MALFORMED"),
        ({"items": [{"key": "a", "payload": 1}] * 2}, "DUPLICATE_KEY"),
        ({"items": [{"key": "", "payload": 1}]}, "BAD_ITEMS"),
        ({"items": ["a"]}, "BAD_ITEMS"),
        ({"items": [{"key": "a", "payload": "x" * 900_000}]}, "COMMAND_TOO_LARGE"),
        ({"from": {"step": "before", "artifact": "none"}}, "ARTIFACT_MISSING"),
    ],
)
async def test_what_cannot_be_published_is_not_sent(refdata: RefdataHarness, more: Json, code: str) -> None:
    """F14: a mistake in the items or the names is final, and told before anything is sent."""
    error = await run_failing_step(refdata_worker(RefdataAdapter(refdata.refdata)), publish(**more))
    assert (error.error.code, error.retryable) == (code, False)
    assert await refdata.bus.backlog(refdata.topic) == 0


async def test_a_step_that_waits_for_a_commit_can_be_stopped(refdata: RefdataHarness) -> None:
    """F9, F14: nobody applies, and the step does not wait for ever."""
    await is_stopped(refdata_worker(RefdataAdapter(refdata.refdata)), publish(items=items(1)))
