"""What each part finds late or broken: what it takes, and what it does not take."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.flows import status as flows
from penstock.flows.api.queries import FlowViews
from penstock.harvest import status as harvest
from penstock.harvest.api.schemas import Feed, Run
from penstock.ingest import status as ingest
from penstock.ingest.model import Alert
from penstock.ingest.model import Standing as Supplier
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.kernel.findings import Finding, Report, late
from penstock.kernel.http.app import services_of
from penstock.kernel.http.health import Pulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.overview import status
from penstock.overview.status import StatusBoard
from penstock.refdata import status as refdata
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import Catalogue
from penstock.tracking import status as tracking
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.flows.harness import flows_harness

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
WORKER = Stage.SHARD_SPLITTER


def found(report: Report) -> list[tuple[str, str, str]]:
    return [(one.severity.value, one.subject, one.what) for one in report.findings]


async def test_shards_that_wait_too_long(database_url: str, clock: ManualClock) -> None:
    """T16: a queue nobody takes from is late; a stage that is paused says so in its place."""
    metrics = TrackingMetrics(Telemetry().registry)
    async with (
        Database.open(database_url, clock=clock) as db,
        Tracking.open(db, TrackingSection(), metrics) as pipeline,
    ):
        assert found(await tracking.look(pipeline)) == []
        await pipeline.register("f", [0, 1], worker=None, actor="test")
        await pipeline.move(Stage.EVENT_INGEST, "done", "f", None, worker=None, actor="test")
        clock.advance(tracking.WAITS_TOO_LONG)
        assert found(await tracking.look(pipeline)) == []
        clock.advance(MINUTE)
        waits = "2 shards waiting, the oldest for 11 minutes"
        assert found(await tracking.look(pipeline)) == [("LATE", WORKER, waits)]
        await pipeline.pause(WORKER, actor="ann", reason="a bad release")
        clock.advance(2 * HOUR)
        paused = "paused for 2 hours by ann: a bad release"
        assert found(await tracking.look(pipeline)) == [("LATE", WORKER, paused)]
        assert (await tracking.look(pipeline)).summary == "2 shards: 0 done, 0 under way, 0 failed"


async def test_dictionaries(database_url: str, clock: ManualClock) -> None:
    """R7: what waits for apply or for the relay is late; what failed within a day is broken, by dictionary."""
    async with Database.open(database_url, clock=clock) as db:
        section = RefdataSection.model_validate({"dictionaries": [{"code": "RATES"}]})
        service = Refdata(db, None, None, Catalogue(section), section)  # type: ignore[arg-type]
        assert found(await refdata.look(service)) == []
        now = clock.now()
        request = """
            INSERT INTO update_request (tenant_id, event_id, dict_code, status, error_code, created_at, updated_at)
            VALUES ('acme', $1, 'RATES', $2, $3, $4, $4)
        """
        await db.execute(request, uuid4(), "PENDING", None, now - refdata.PENDING_TOO_LONG - MINUTE)
        for code, ago in (("SQL_ERROR", 2 * HOUR), ("STALE_REVISION", HOUR), ("SQL_ERROR", timedelta(days=2))):
            await db.execute(request, uuid4(), "FAILED", code, now - ago)
        await db.execute(
            "INSERT INTO outbox_event (tenant_id, event_id, dict_code, version, payload,"
            " event_type, source, items, created_at)"
            " VALUES ('acme', $1, 'RATES', 1, '{}', 'DELTA', 'REST', 1, $2)",
            UUID(int=1),
            now - refdata.UNTOLD_TOO_LONG - MINUTE,
        )
        assert found(await refdata.look(service)) == [
            ("LATE", "apply", "1 update waiting, the oldest for 3 minutes"),
            ("LATE", "relay", "versions waiting to be announced, the oldest for 2 minutes"),
            ("BROKEN", "acme/RATES", "2 updates failed, the last 60 minutes ago: STALE_REVISION"),
        ]


FINE = Supplier("brinex", "run", 3, NOW, 60.0, 100, [], [], 0, 0, 0, {"run_id": "run", "status": "PASS"}, None, [], [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"alerts": [Alert.STATE_LOST]}, [("BROKEN", "its published state is damaged or gone")]),
        (
            {"alerts": [Alert.CONFIG_BROKEN], "config": "line 3"},
            [("BROKEN", "its configuration cannot be used: line 3")],
        ),
        ({"alerts": [Alert.REPEATED_FAIL], "fails": 3}, [("BROKEN", "3 runs in a row failed")]),
        ({"alerts": [Alert.STATE_OLD], "age_seconds": 90_000.0}, [("LATE", "its state is 25 hours old")]),
        ({"alerts": [Alert.SAME_FILE_AGAIN], "equal_shas": 5}, [("LATE", "sends the same file, 5 times now")]),
        ({"alerts": [Alert.UNDELIVERED], "undelivered": ["webhook: DOWN"]}, [("LATE", "not delivered: webhook: DOWN")]),
        (
            {"last": {"run_id": "r2", "status": "FAIL", "failure_code": "MAX_DROP", "finished_at": NOW.isoformat()}},
            [("BROKEN", "its last run failed: MAX_DROP; the state before it is served")],
        ),
    ],
)
def test_suppliers(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """I13: every alert there is, and a run that failed."""
    told = ingest._of(replace(FINE, **changes))
    assert [(one.severity.value, one.what) for one in told] == expected
    assert all(one.subject == "brinex" and one.hint and "{" not in one.hint for one in told)


def test_every_alert_of_suppliers_is_told() -> None:
    """I13: a new alert without words here would crash the look."""
    assert set(ingest._ALERTS) == set(Alert)


def feed(**changes: Any) -> Feed:
    fine = {"feed": "stones", "source": "rest", "url": "http://x", "watermark": NOW - HOUR, "every_seconds": 3600.0}
    more = {"overlap_seconds": 600.0, "paused_until": None, "pending": 0, "last_run": None}
    return Feed.model_construct(**{**fine, **more, **changes})


def run(state: str, **more: Any) -> Run:
    told = {
        "run_id": UUID(int=7),
        "feed": "stones",
        "state": state,
        "requested_at": NOW,
        "started_at": NOW,
        "error": None,
    }
    return Run.model_construct(**{**told, **more})


RETRY = f"penstock harvest partitions {UUID(int=7)}; then penstock harvest retry {UUID(int=7)}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"watermark": NOW - 3 * HOUR - 40 * MINUTE}, []),  # three runs, half an hour, and the overlap
        ({"watermark": NOW - 5 * HOUR, "every_seconds": None}, []),
        ({"watermark": NOW - 4 * HOUR}, [("LATE", "known only up to 4 hours ago, and due every 60 minutes")]),
        ({"watermark": NOW - MINUTE, "every_seconds": 30.0, "overlap_seconds": 60.0}, []),
        ({"last_run": run("completed")}, []),
        ({"last_run": run("failed", error="no disk")}, [("BROKEN", "its last run failed: no disk")]),
        (
            {"last_run": run("consolidation_skipped")},
            [("BROKEN", "its last run was not consolidated: partitions failed")],
        ),
        (
            {"paused_until": NOW + 5 * MINUTE, "paused_because": "429"},
            [("LATE", "its source is left alone for 5 minutes: 429")],
        ),
    ],
)
def test_feeds(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """H13: a source that is left alone, and a watermark that stands, are late."""
    assert [(one.severity.value, one.what) for one in harvest._of(feed(**changes), NOW)] == expected


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        (run("failed"), RETRY),
        (run("consolidation_skipped"), RETRY),
        (run("failed", started_at=None), "mend the cause, then penstock harvest run stones"),
    ],
)
def test_the_next_step_of_a_run_that_failed(last: Run, hint: str) -> None:
    """H11: one that never began cannot be retried."""
    assert [one.hint for one in harvest._of(feed(last_run=last), NOW)] == [hint]


async def test_steps_nobody_takes(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    """F18: late when they wait longer than a worker takes to come back, by kind."""
    async with flows_harness(database_url, tmp_path, clock=clock) as harness:
        views = services_of(harness.app).get(FlowViews)
        await harness.create({"a": {"kind": "work"}, "b": {"kind": "work"}, "c": {"kind": "other", "dependsOn": ["a"]}})
        clock.advance(flows.WAITS_TOO_LONG)
        report = await flows.look(views)
        assert (report.summary, found(report)) == ("1 run under way, 2 steps wait", [])
        clock.advance(MINUTE)
        told = found(await flows.look(views))
        assert told == [("LATE", "work", "2 steps waiting for a worker, the oldest for 6 minutes")]


async def test_runs_that_failed(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    """F18: by when they failed, not when they were made; runs within another leave room for it."""
    async with flows_harness(database_url, tmp_path, clock=clock) as harness:
        views = services_of(harness.app).get(FlowViews)
        for run_id in ("outer", *(f"inner-{number}" for number in range(8))):
            await harness.create({"a": {"kind": "work"}}, run_id)
        within = "UPDATE flow_run SET parent_run = (SELECT id FROM flow_run WHERE run_id = 'outer'), parent_n = 0"
        await views._db.execute(f"{within} WHERE run_id <> 'outer'")
        clock.advance(timedelta(days=2))
        for item in await harness.claim():
            await harness.report(item, "FAILED", error={"code": "NO", "message": "no"})
        told = [one for one in found(await flows.look(views)) if one[0] == "BROKEN"]
        assert [subject for _, subject, _ in told] == ["outer"]
        clock.advance(timedelta(days=1, minutes=1))
        assert [one for one in found(await flows.look(views)) if one[0] == "BROKEN"] == []


def board(**looks: Callable[[], Awaitable[Report]]) -> StatusBoard:
    return StatusBoard(Pulse({}, needs=[]), looks, lambda: NOW)


async def test_a_part_that_cannot_answer_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T16: it is broken itself, and what the others tell is told; the worst of it is the whole's."""
    monkeypatch.setattr(status, "_PATIENCE", 0.05)

    async def fine() -> Report:
        return Report("fine", [late("x", "slow")])

    async def down() -> Report:
        raise Transient("DATABASE_DOWN", "no PostgreSQL", hint="start it")

    async def crashes() -> Report:
        raise ZeroDivisionError

    async def hangs() -> Report:
        await asyncio.Event().wait()
        raise AssertionError

    assert (await board().status()).status == "OK"
    assert (await board(fine=fine).status()).status == "LATE"
    told = await board(fine=fine, down=down, crashes=crashes, hangs=hangs).status()
    assert told.status == "BROKEN"
    assert {part.part: [one.what for one in part.findings] for part in told.parts} == {
        "platform": [],
        "fine": ["slow"],
        "down": ["DATABASE_DOWN: no PostgreSQL"],
        "crashes": ["the look at it failed: ZeroDivisionError"],
        "hangs": ["no answer within 0.05 s"],
    }


async def test_a_component_that_is_down_is_broken() -> None:
    """R23: told with its code and what to do."""

    async def down() -> None:
        raise Transient("REDIS_DOWN", "no Redis", hint="start it")

    told = await StatusBoard(Pulse({"signals": down}, needs=[]), {}, lambda: NOW).status()
    (platform,) = told.parts
    assert platform.summary == "0 of 1 component up"
    (one,) = platform.findings
    assert Finding(one.severity, one.subject, one.what, one.hint) == Finding(
        one.severity.BROKEN, "signals", "does not work: REDIS_DOWN", "start it"
    )
