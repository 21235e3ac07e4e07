"""refdata.publish: a dictionary is published once, also if workers die."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.app.bridges import RefdataAdapter
from penstock.flows.kinds.platform.refdata import make_refdata_handler
from penstock.flows.step import FlowStep
from penstock.refdata import contract
from penstock.refdata.model import DictionaryKey
from tests.flows.kinds.platform.running_steps import assert_stops, running_step
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


def make_publish_step(
    attempt: int = 1, step_io: MemoryStepIO | None = None, mode: str = "SNAPSHOT", **more: Any
) -> FlowStep:
    inputs = {"tenant": "acme", "dictionary": "LOOSE", "mode": mode, **more}
    return make_step("refdata.publish", inputs, attempt=attempt, step_io=step_io)


def make_items(count: int) -> list[Json]:
    return [{"key": f"k{number}", "payload": {"n": number}} for number in range(count)]


async def wait_for_commands(refdata: RefdataHarness, count: int = 1) -> None:
    """Wait until *count* commands are on the bus."""

    async def is_so() -> bool:
        return await refdata.bus.count_backlog(refdata.topic) >= count

    await becomes(is_so, f"{count} commands are on the bus")


async def test_dictionary_is_published(refdata: RefdataHarness) -> None:
    """F14: a SNAPSHOT replaces all items, a DELTA some; the outputs have the committed version."""
    worker = make_refdata_handler(RefdataAdapter(refdata.refdata))
    for mode, inputs, version, left in (
        ("SNAPSHOT", make_items(2), 1, {"k0": {"n": 0}, "k1": {"n": 1}}),
        ("DELTA", [{"key": "k0", "op": "DELETE"}, upsert("k2", 5)], 2, {"k1": {"n": 1}, "k2": 5}),
        ("SNAPSHOT", make_items(1), 3, {"k0": {"n": 0}}),
    ):
        async with running_step(worker, make_publish_step(mode=mode, items=inputs)) as task:
            await wait_for_commands(refdata)
            await refdata.apply()
            outputs = await task
        assert outputs == {"tenantId": "acme", "dictCode": "LOOSE", "version": version, "items": len(inputs)}
        assert await refdata.items("LOOSE") == left


@pytest.mark.parametrize("mode", ["SNAPSHOT", "DELTA"])
async def test_dictionary_is_published_once(
    refdata: RefdataHarness, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """F14: with several chunks, and workers that die between them, the versions are the same."""
    monkeypatch.setattr(contract, "_ITEMS_LIMIT", 70)  # bytes: two items
    worker = make_refdata_handler(RefdataAdapter(refdata.refdata))
    async with running_step(worker, make_publish_step(items=make_items(5), mode=mode)):
        await wait_for_commands(refdata)
    async with running_step(worker, make_publish_step(2, items=make_items(5), mode=mode)) as task:

        async def is_published() -> bool:
            await refdata.apply()
            return task.done()

        await becomes(is_published, "all commands are applied")
        outputs = await task
    assert outputs["version"] == (1 if mode == "SNAPSHOT" else 3)
    assert await run_step(worker, make_publish_step(3, items=make_items(5), mode=mode)) == outputs
    assert await refdata.items("LOOSE") == {item["key"]: item["payload"] for item in make_items(5)}
    assert len((await refdata.refdata.list_versions(LOOSE, before=99, limit=9)).items) == outputs["version"]
    assert await refdata.bus.count_backlog(refdata.topic) == 0


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n"])
@pytest.mark.parametrize("is_list", [True, False])
async def test_dictionary_is_published_from_an_artifact(refdata: RefdataHarness, is_list: bool, end: str) -> None:
    """F14: from JSON lines or a JSON list of an earlier step, with all digits."""
    first, second = '{"key": "a", "payload": 0.10000000000000000001}', '{"payload": [1], "key": "b"}'
    step_io = MemoryStepIO(
        artifacts={
            ("before", "rates"): (f"[{first},\n{second}]{end}" if is_list else f"{first}\n{second}{end}").encode()
        }
    )
    worker = make_refdata_handler(RefdataAdapter(refdata.refdata))
    inputs: Json = {"from": {"step": "before", "artifact": "rates"}}
    step = make_publish_step(step_io=step_io, **inputs)
    async with running_step(worker, step) as task:
        await wait_for_commands(refdata)
        await refdata.apply()
        assert (await task)["items"] == 2
    loaded = await refdata.refdata.catalogue.get(LOOSE).provider.load_all(refdata.db, LOOSE)
    assert loaded.items == {"a": "0.10000000000000000001", "b": "[1]"}


async def test_refused_command_fails_the_step(refdata: RefdataHarness) -> None:
    """F10, F14: the step has the error of refdata; after the fix, a second attempt sends another command."""
    worker = make_refdata_handler(RefdataAdapter(refdata.refdata))
    first = asyncio.create_task(run_failing_step(worker, make_publish_step(items=make_items(3))))
    await wait_for_commands(refdata)
    await refdata.apply(max_items=2)
    error = await first
    assert error.error.code == "SNAPSHOT_TOO_LARGE"
    assert "3 items" in error.error.message
    async with running_step(worker, make_publish_step(2, items=make_items(3))) as task:
        await wait_for_commands(refdata)
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
async def test_invalid_items_are_not_sent(refdata: RefdataHarness, more: Json, code: str) -> None:
    """F14: an error in the items or the names is final, and reported before a command is sent."""
    error = await run_failing_step(make_refdata_handler(RefdataAdapter(refdata.refdata)), make_publish_step(**more))
    assert (error.error.code, error.retryable) == (code, False)
    assert await refdata.bus.count_backlog(refdata.topic) == 0


async def test_waiting_step_stops(refdata: RefdataHarness) -> None:
    """F9, F14: without an apply worker, a cancelled step does not wait without limit."""
    await assert_stops(make_refdata_handler(RefdataAdapter(refdata.refdata)), make_publish_step(items=make_items(1)))
