"""All parts together: one stream of the moves, and one report of what is late or broken."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from penstock.overview.client import OverviewClient
from penstock.overview.contract import Part
from penstock.overview.events import PART_OF
from tests.app.scenarios.test_openapi import WITH_TOKENS, token
from tests.harvest.stepper import FEED, feed
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness
from tests.services.postgres import module_database
from tests.support.processes import Result, Up, penstock
from tests.support.settings import write_config
from tests.support.sse import parse_event
from tests.support.types import Json
from tests.support.wait import until

FILE, TENANT, RUN = "2026-11-17.events", "acme", "nightly"


@pytest.fixture(scope="module")
def databases() -> Iterator[list[str]]:
    """Three databases: of the platform, of tracking and of refdata."""
    with module_database() as platform, module_database() as tracking, module_database() as refdata:
        yield [platform, tracking, refdata]


class OverviewHarness:
    """A server with authentication and journals in three databases, in which every part has made moves."""

    def __init__(self, up: Up, folder: Path, databases: list[str]) -> None:
        self._up = up
        self._folder = folder
        self._databases = databases
        self.operator = token(tenant_id=None)

    def get(self, path: str, headers: Json | None = None, **params: Any) -> httpx.Response:
        given = self.operator if headers is None else headers
        return httpx.get(f"{self._up.api}/api/v1{path}", params=params, headers=given, timeout=30)

    def post(self, path: str, body: Json, headers: Json | None = None) -> Json:
        response = httpx.post(f"{self._up.api}{path}", json=body, headers=headers or self.operator, timeout=30)
        assert response.is_success, response.text
        document: Json = response.json()
        return document

    def events(self, headers: Json | None = None, **params: Any) -> list[tuple[str, Json]]:
        """Return the ids and the documents of all events so far."""
        self.settle()
        response = self.get("/events", {**self.operator, **(headers or {})}, follow="false", **params)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [parse_event(block) for block in response.text.split("\n\n") if block.startswith("event: move")]
        return [(event["id"], json.loads(event["data"])) for event in events]

    def settle(self) -> None:
        """Wait until all moves are visible: transactions of other databases on the server delay them too."""
        query = "SELECT coalesce(max(tx) < pg_snapshot_xmin(pg_current_snapshot()), true) FROM journal"

        async def is_settled(url: str) -> bool:
            connection = await asyncpg.connect(url)
            try:
                return bool(await connection.fetchval(query))
            finally:
                await connection.close()

        for url in self._databases:
            until(lambda url=url: asyncio.run(is_settled(url)), "no older transaction writes any more")  # type: ignore[misc]

    def issues(self) -> dict[str, list[Json]]:
        status = self.get("/status").json()
        return {part["part"]: part["issues"] for part in status["parts"] if part["issues"]}

    def command(self, *args: str) -> Result:
        bearer = self.operator["authorization"].removeprefix("Bearer ")
        return penstock(*args, "--url", self._up.api, cwd=self._folder, env={"PENSTOCK_TOKEN": bearer})

    def live(self) -> "httpx._client.StreamContextManager":  # type: ignore[name-defined]
        return httpx.stream("GET", f"{self._up.api}/api/v1/events", headers=self.operator, timeout=30)


@pytest.fixture(scope="module")
def harness(databases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverviewHarness]:
    folder = tmp_path_factory.mktemp("harness")
    platform, tracking, refdata = databases
    parts = urlsplit(refdata)
    ingest = IngestHarness(folder / "root", KEYED)
    write_config(
        folder,
        {
            "database": {"url": platform},
            "tracking": {"database": {"url": tracking}},
            "refdata": {
                "dictionaries": [{"code": "RATES"}],
                "postgres": {
                    "jdbcUrl": f"jdbc:{refdata}",
                    "username": parts.username,
                    **({"passwordFromEnv": "DB_PASSWORD"} if parts.password else {}),
                },
            },
            "ingest": {"root": str(ingest.root), "poll": 0.2},
            "harvest": {"retry_after": 0.05, "feeds": {FEED: feed("http://127.0.0.1:1")}},
        },
    )
    with Up(folder, env={**WITH_TOKENS, "DB_PASSWORD": parts.password or ""}) as up:
        harness = OverviewHarness(up, folder, databases)
        _make_moves(harness, ingest)
        yield harness


def _make_moves(harness: OverviewHarness, ingest: IngestHarness) -> None:
    harness.post("/api/v1/pipeline/files/register", {"filename": FILE, "shards": [0, 1]})
    harness.post("/api/v1/pipeline/stages/event-ingest/fail", {"filename": FILE})
    item = {"key": "EUR", "payload": {"rate": 1.1}}
    update = {"dictCode": "RATES", "eventType": "DELTA", "items": [item]}
    harness.post(
        f"/v1/tenants/{TENANT}/updates?consistencyMode=WAIT_COMMIT&timeoutMs=1000", update, token(tenant_id=TENANT)
    )
    harness.post(
        "/api/v1/flow_runs", {"runId": RUN, "steps": {"gone": {"kind": "python", "inputs": {"call": "no:no"}}}}
    )
    ingest.drop(b"what is this\n")
    harness.post(f"/api/v1/harvest/feeds/{FEED}/runs", {})
    moves: set[tuple[str, str]] = set()

    def have_all_failed() -> bool:
        moves.update((event["machine"], event["to"]) for _, event in harness.events(last=1000))
        return {("ingest.run", "FAIL"), ("harvest.plan", "failed"), ("flows.run", "FAILED")} <= moves

    until(have_all_failed, "a run of ingest, a run of harvest and a run of flows have failed")


def test_one_stream_has_the_moves_of_every_part(harness: OverviewHarness) -> None:
    """T17, F18: a move has its part, subject, actor and reason, whichever database its journal is in."""
    events = harness.events(last=1000)
    assert {event["part"] for _, event in events} == set(Part)
    assert {event["part"] for _, event in events if event["part"] != PART_OF[event["machine"]]} == set()
    (failed,) = [event for _, event in events if event["subject"] == f"{FILE}/1" and event["to"] == "failed"]
    assert (failed["machine"], failed["from"]) == ("tracking.event-ingest", "started")
    assert (failed["reason"], failed["fence"], failed["actor"]) == (None, 0, "ann")
    assert all(len(event_id.split(".")) == 3 for event_id, _ in events)  # a position in each of three journals


def test_a_client_that_reconnects_misses_nothing(harness: OverviewHarness) -> None:
    """T17: after any event id the stream has all later events, each once."""
    events = harness.events(last=1000)
    ids = [event_id for event_id, _ in events]
    assert len(set(ids)) == len(ids)
    for index in range(0, len(events), 3):
        assert harness.events({"last-event-id": ids[index]}) == events[index + 1 :]


def test_events_can_be_filtered(harness: OverviewHarness) -> None:
    """T17: by part, by prefix of the subject, and by number."""
    everything = [event for _, event in harness.events(last=1000)]
    for part in Part:
        assert [event for _, event in harness.events(last=1000, part=part)] == [
            event for event in everything if event["part"] == part
        ]
    assert {event["subject"] for _, event in harness.events(last=1000, subject=f"{TENANT}/RATES")} == {
        event["subject"] for event in everything if event["part"] == "refdata"
    }
    assert [event["to"] for _, event in harness.events(last=1, part="flows")] == ["FAILED"]
    rates = [event for event in everything if event["subject"].startswith(f"{TENANT}/RATES")]
    assert [event for _, event in harness.events(last=1, subject=f"{TENANT}/RATES")] == rates[-1:]
    assert harness.events() == []


def test_new_moves_are_streamed_as_they_are_made(harness: OverviewHarness) -> None:
    """T17: a stream that is followed continues with new moves."""
    with harness.live() as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(": moves of")
        harness.post("/api/v1/pipeline/stages/event-ingest/retry", {"filename": FILE})
        moved = next(json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        assert (moved["part"], moved["from"], moved["to"]) == ("tracking", "failed", "new")
    harness.post("/api/v1/pipeline/stages/event-ingest/fail", {"filename": FILE})


@pytest.mark.parametrize("event_id", ["", "1-2-3", "1-2-3.4-5-6", "1-2-3.4-5-6.7-8-x", "1-2-3.4-5-6.7-8-9.0-0-0"])
def test_an_invalid_event_id_is_refused(harness: OverviewHarness, event_id: str) -> None:
    """T9: status 422 with a hint."""
    response = harness.get("/events", {**harness.operator, "last-event-id": event_id}, follow="false")
    assert (response.status_code, response.json()["code"]) == (422, "BAD_EVENT_ID")


def test_the_overview_is_for_operators_only(harness: OverviewHarness) -> None:
    """R28: a tenant sees nothing of the server and of other tenants; without a token nothing is visible."""
    for path in ("/events", "/status"):
        assert harness.get(path, {}).status_code == 401
        refused = harness.get(path, token(tenant_id=TENANT))
        assert (refused.status_code, refused.json()["code"]) == (403, "OPERATOR_ONLY")


def test_an_issue_has_the_next_step(harness: OverviewHarness) -> None:
    """T16, F18: exactly the parts with a problem report issues."""
    issues = harness.issues()
    assert set(issues) == {"bus", "tracking", "ingest", "harvest", "flows"}
    assert [(issue["severity"], issue["subject"], issue["problem"]) for issue in issues["tracking"]] == [
        ("BROKEN", "event-ingest", "2 shards failed")
    ]
    (supplier,), (feed,), (run,) = issues["ingest"], issues["harvest"], issues["flows"]
    assert [(issue["severity"], issue["subject"]) for issue in issues["bus"]] == [("BROKEN", "harvest.plans")]
    assert (supplier["subject"], feed["subject"], run["subject"]) == (SUPPLIER, FEED, RUN)
    assert "COLUMNS_MISSING; nothing is published yet" in supplier["problem"]
    assert "127.0.0.1:1" in feed["problem"]
    assert run["hint"] == f"penstock flow show {RUN}; then penstock flow retry {RUN}"


@pytest.mark.full
def test_the_commands_print_the_same(harness: OverviewHarness) -> None:
    """T16: `status` has exit code 1 while there is an issue; `events` prints one line per move."""
    for act in ("retry", "fail"):
        harness.post(f"/api/v1/pipeline/stages/event-ingest/{act}", {"filename": FILE})
    status = harness.command("status")
    assert status.code == 1
    assert status.out.startswith("BROKEN  Penstock ")
    for line in ("BROKEN  tracking  event-ingest: 2 shards failed", f"BROKEN  flows  {RUN}: run failed"):
        assert line in status.out
    assert json.loads(harness.command("status", "--json").out)["status"] == "BROKEN"
    harness.settle()
    result = harness.command("events", "--part", "tracking", "--last", "2")
    assert result.code == 0
    assert [line.split()[1:] for line in result.out.splitlines()] == [
        ["tracking.event-ingest", f"{FILE}/{shard}", "new", "→", "failed", "by", "ann"] for shard in (0, 1)
    ]
    events = [json.loads(line) for line in harness.command("events", "--json", "--last", "1000").out.splitlines()]
    assert {event["part"] for event in events} == set(Part)


def test_a_server_that_is_down_has_no_status(tmp_path: Path) -> None:
    """T16: exit code 7 and a hint."""
    for command in ("status", "events"):
        done = penstock(command, "--url", "http://127.0.0.1:1", cwd=tmp_path)
        assert (done.code, done.out) == (7, "")
        assert "hint: `penstock up` starts a server" in done.err


def test_a_follower_reconnects_after_an_interruption(harness: OverviewHarness, tmp_path: Path) -> None:
    """T17: an interrupted stream resumes after the last event, without a gap and without a repetition."""
    events = harness.events(last=1000)
    chunks = [_encode_events(events[:3]), b"", _encode_events(events[3:6])]
    requested: list[str | None] = []

    class InterruptingHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.headers["last-event-id"])
            self.send_response(200 if chunks else 503)
            self.end_headers()
            self.wfile.write(chunks.pop(0) if chunks else b"")

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    async def follow(url: str) -> list[Json]:
        received = []
        async with OverviewClient(url) as client:
            async for event in client.events(last=1000):
                received.append(event)
                if len(received) == 6:
                    break
        return received

    server = ThreadingHTTPServer(("127.0.0.1", 0), InterruptingHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        received = asyncio.run(follow(f"http://127.0.0.1:{server.server_address[1]}"))
    finally:
        server.shutdown()
        server.server_close()
    assert received == [event for _, event in events[:6]]
    assert requested == [None, events[2][0], events[2][0]]


def _encode_events(events: list[tuple[str, Json]]) -> bytes:
    text = "".join(f"event: move\nid: {event_id}\ndata: {json.dumps(event)}\n\n" for event_id, event in events)
    return text.encode()
