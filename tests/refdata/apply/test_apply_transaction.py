"""The log of commands: one line for each that is committed or failed."""

from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog

from penstock.kernel.db.database import Connection
from penstock.refdata import store
from tests.refdata.harness import RefdataHarness, on_bus, upsert
from tests.refdata.harness import command as make_command
from tests.refdata.retention import RetentionHarness

FIELDS = {"eventId", "dictCode", "version", "source", "tenantId"}
Entry = Any


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


async def apply_logged(harness: RefdataHarness) -> list[Entry]:
    """Apply all commands of the bus, and return the log entries about commands."""
    with structlog.testing.capture_logs() as logged:
        await harness.apply()
    return [entry for entry in logged if entry["event"] in ("command_committed", "command_failed")]


def show(entries: list[Entry]) -> list[tuple[str, str, Any]]:
    return [(entry["event"], entry["eventId"], entry.get("version", entry.get("code"))) for entry in entries]


async def test_a_committed_command_is_one_line(harness: RefdataHarness) -> None:
    """R26, §11.5: a committed command is one line at INFO with exactly the required fields; a repeated one is none."""
    body = make_command("LOOSE", upsert("a", 1))
    event_id = uuid4()
    for _ in range(2):
        await harness.publish(*on_bus(body, event_id=event_id))
    (entry,) = await apply_logged(harness)
    assert entry.keys() == FIELDS | {"event", "log_level"}
    assert entry == {
        "event": "command_committed",
        "log_level": "info",
        "eventId": str(event_id),
        "dictCode": "LOOSE",
        "version": 1,
        "source": "KAFKA",
        "tenantId": "acme",
    }
    await harness.publish(*on_bus(body, event_id=event_id))
    assert await apply_logged(harness) == []


async def test_a_batch_is_a_line_per_command(harness: RefdataHarness) -> None:
    """R26: each command of a batch has its own line with its own version, in order."""
    event_ids = [await harness.send("LOOSE", upsert("a", number)) for number in range(20)]
    entries = await apply_logged(harness)
    assert show(entries) == [
        ("command_committed", str(event_id), version) for version, event_id in enumerate(event_ids, start=1)
    ]
    assert {entry["source"] for entry in entries} == {"REST"}


async def test_a_failed_command_is_a_warning(harness: RefdataHarness) -> None:
    """R26: a failed command is one line at WARNING with code and error; the others of its batch are committed."""
    good = await harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 2}))
    bad = await harness.send("CURRENCY", upsert("SEK", {"name": "Krona", "digits": "two"}))
    committed, failed = sorted(await apply_logged(harness), key=lambda entry: str(entry["event"]))
    assert show([committed, failed]) == [
        ("command_committed", str(good), 1),
        ("command_failed", str(bad), "SQL_ERROR"),
    ]
    assert failed["log_level"] == "warning"
    assert "22P02" in failed["error"]
    assert (failed["tenantId"], failed["dictCode"]) == ("acme", "CURRENCY")


async def test_every_chunk_of_a_snapshot_is_logged_when_it_ends(retention: RetentionHarness) -> None:
    """R13, R26: the commands of a snapshot are committed together, each with one line, or fail together."""
    harness, snapshot_id = retention.harness, uuid4()
    chunks = [await retention.send_chunk(snapshot_id, 1, 2, upsert("a", 1))]
    assert await apply_logged(harness) == []
    chunks.append(await retention.send_chunk(snapshot_id, 2, 2, upsert("b", 1)))
    entries = await apply_logged(harness)
    assert sorted(show(entries)) == sorted(("command_committed", str(event_id), 1) for event_id in chunks)
    lost: list[UUID] = [await retention.send_chunk(uuid4(), 1, 2, upsert("a", 1))]
    await harness.apply()
    retention.clock.advance(harness.refdata.section.snapshots.expire_after * 2)
    with structlog.testing.capture_logs() as logged:
        await retention.upkeep.expire_snapshots()
    assert show([entry for entry in logged if entry["event"] == "command_failed"]) == [
        ("command_failed", str(lost[0]), "SNAPSHOT_INCOMPLETE")
    ]


async def test_a_rolled_back_command_is_not_logged(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: the line is written after the commit: a command whose transaction failed has none until it is applied."""
    event_id = await harness.send("LOOSE", upsert("a", 1))
    notify_commit, calls = store.notify_commit, 0

    async def fail_once(tx: Connection) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("the connection was lost")
        await notify_commit(tx)

    monkeypatch.setattr(store, "notify_commit", fail_once)
    assert show(await apply_logged(harness)) == [("command_committed", str(event_id), 1)]
    assert calls == 2
