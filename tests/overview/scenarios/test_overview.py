"""All parts together: one stream of every move, one answer to what is late or broken."""

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
    """One for the platform, one for tracking, one for refdata."""
    with module_database() as platform, module_database() as tracking, module_database() as refdata:
        yield [platform, tracking, refdata]


class OverviewHarness:
    """A Penstock with tokens whose journals are in three databases, and in which every part has moved something."""

    def __init__(self, up: Up, folder: Path, databases: list[str]) -> None:
        self._up = up
        self._folder = folder
        self._databases = databases
        self.operator = token(tenant_id=None)

    def get(self, path: str, headers: Json | None = None, **params: Any) -> httpx.Response:
        given = self.operator if headers is None else headers
        return httpx.get(f"{self._up.api}/api/v1{path}", params=params, headers=given, timeout=30)

    def post(self, path: str, body: Json, headers: Json | None = None) -> Json:
        answer = httpx.post(f"{self._up.api}{path}", json=body, headers=headers or self.operator, timeout=30)
        assert answer.is_success, answer.text
        told: Json = answer.json()
        return told

    def events(self, headers: Json | None = None, **params: Any) -> list[tuple[str, Json]]:
        """All that was noted until now: ids and events."""
        self.settle()
        answer = self.get("/events", {**self.operator, **(headers or {})}, follow="false", **params)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [parse_event(block) for block in answer.text.split("\n\n") if block.startswith("event: move")]
        return [(event["id"], json.loads(event["data"])) for event in events]

    def settle(self) -> None:
        """Wait until what was noted is told: transactions of other databases on the server hold it up too."""
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
        return {part["part"]: part["issues"] for part in status["parts"] if part["findings"]}

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
        _move_everything(harness, ingest)
        yield harness


def _move_everything(harness: OverviewHarness, ingest: IngestHarness) -> None:
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
    found: set[tuple[str, str]] = set()

    def have_all_ended() -> bool:
        found.update((event["machine"], event["to"]) for _, event in harness.events(last=1000))
        return {("ingest.run", "FAIL"), ("harvest.plan", "failed"), ("flows.run", "FAILED")} <= found

    until(have_all_ended, "a run of ingest, one of harvest and one of flows have failed")


def test_every_part_is_told_in_one_stream(harness: OverviewHarness) -> None:
    """T17, F18: each move with its part, its subject, who and why, whichever database it was noted in."""
    told = harness.events(last=1000)
    assert {event["part"] for _, event in told} == set(Part)
    assert {event["part"] for _, event in told if event["part"] != PART_OF[event["machine"]]} == set()
    (failed,) = [event for _, event in told if event["subject"] == f"{FILE}/1" and event["to"] == "failed"]
    assert (failed["machine"], failed["from"]) == ("tracking.event-ingest", "started")
    assert (failed["reason"], failed["fence"], failed["actor"]) == (None, 0, "ann")
    assert all(len(name.split(".")) == 3 for name, _ in told)  # how far each of three journals was told


def test_whoever_comes_back_misses_nothing(harness: OverviewHarness) -> None:
    """T17: from any event on, all that come after it are told, each once."""
    told = harness.events(last=1000)
    names = [name for name, _ in told]
    assert len(set(names)) == len(names)
    for place in range(0, len(told), 3):
        assert harness.events({"last-event-id": names[place]}) == told[place + 1 :]


def test_one_may_ask_for_less(harness: OverviewHarness) -> None:
    """T17: some parts, some subjects, the last so many."""
    everything = [event for _, event in harness.events(last=1000)]
    for part in Part:
        assert [event for _, event in harness.events(last=1000, part=part)] == [
            event for event in everything if event["part"] == part
        ]
    assert {event["subject"] for _, event in harness.events(last=1000, subject=f"{TENANT}/RATES")} == {
        event["subject"] for event in everything if event["part"] == "refdata"
    }
    assert [event["to"] for _, event in harness.events(last=1, part="flows")] == ["FAILED"]
    assert harness.events() == []


def test_moves_are_told_as_they_are_made(harness: OverviewHarness) -> None:
    """T17: a stream that is followed goes on with what happens next."""
    with harness.live() as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(": moves of")
        harness.post("/api/v1/pipeline/stages/event-ingest/retry", {"filename": FILE})
        moved = next(json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        assert (moved["part"], moved["from"], moved["to"]) == ("tracking", "failed", "new")
    harness.post("/api/v1/pipeline/stages/event-ingest/fail", {"filename": FILE})


@pytest.mark.parametrize("name", ["", "1-2-3", "1-2-3.4-5-6", "1-2-3.4-5-6.7-8-x", "1-2-3.4-5-6.7-8-9.0-0-0"])
def test_an_id_that_is_none_is_the_callers_mistake(harness: OverviewHarness, name: str) -> None:
    """T9: 422, and a hint."""
    answer = harness.get("/events", {**harness.operator, "last-event-id": name}, follow="false")
    assert (answer.status_code, answer.json()["code"]) == (422, "BAD_EVENT_ID")


def test_the_whole_belongs_to_no_tenant(harness: OverviewHarness) -> None:
    """R28: a tenant sees nothing of the house, nor of other tenants; without a token nobody sees anything."""
    for path in ("/events", "/status"):
        assert harness.get(path, {}).status_code == 401
        refused = harness.get(path, token(tenant_id=TENANT))
        assert (refused.status_code, refused.json()["code"]) == (403, "OPERATOR_ONLY")


def test_what_is_broken_is_told_with_the_next_step(harness: OverviewHarness) -> None:
    """T16, F18: by every part that has something to tell, and by no other."""
    found = harness.issues()
    assert set(found) == {"tracking", "ingest", "harvest", "flows"}
    assert [(one["severity"], one["subject"], one["problem"]) for one in found["tracking"]] == [
        ("BROKEN", "event-ingest", "2 shards failed")
    ]
    (supplier,), (feed,), (run,) = found["ingest"], found["harvest"], found["flows"]
    assert (supplier["subject"], feed["subject"], run["subject"]) == (SUPPLIER, FEED, RUN)
    assert "its last run failed: COLUMNS_MISSING; nothing is published yet" in supplier["problem"]
    assert "127.0.0.1:1" in feed["problem"]
    assert run["hint"] == f"penstock flow show {RUN}; then penstock flow retry {RUN}"


@pytest.mark.full
def test_the_commands_tell_the_same(harness: OverviewHarness) -> None:
    """T16: one screen, exit code 1 while something is wrong; the stream a line a move."""
    for act in ("retry", "fail"):
        harness.post(f"/api/v1/pipeline/stages/event-ingest/{act}", {"filename": FILE})
    status = harness.command("status")
    assert status.code == 1
    assert status.out.startswith("BROKEN  Penstock ")
    for line in ("BROKEN  tracking  event-ingest: 2 shards failed", f"BROKEN  flows  {RUN}: run failed"):
        assert line in status.out
    assert json.loads(harness.command("status", "--json").out)["status"] == "BROKEN"
    harness.settle()
    events = harness.command("events", "--part", "tracking", "--last", "2")
    assert events.code == 0
    assert [line.split()[2:] for line in events.out.splitlines()] == [
        ["tracking.event-ingest", f"{FILE}/{shard}", "new", "→", "failed", "by", "ann"] for shard in (0, 1)
    ]
    told = [json.loads(line) for line in harness.command("events", "--json", "--last", "1000").out.splitlines()]
    assert {event["part"] for event in told} == set(Part)


def test_a_server_that_is_away_is_no_status(tmp_path: Path) -> None:
    """T16: exit code 7, and a hint."""
    for command in ("status", "events"):
        done = penstock(command, "--url", "http://127.0.0.1:1", cwd=tmp_path)
        assert (done.code, done.out) == (7, "")
        assert "hint: is it running?" in done.err


def test_whoever_follows_comes_back_after_an_end(harness: OverviewHarness, tmp_path: Path) -> None:
    """T17: a stream that is cut goes on after the last event, without a gap and without a repetition."""
    told = harness.events(last=1000)
    cut = [b"".join(_event(*one) for one in told[:3]), b"", b"".join(_event(*one) for one in told[3:6])]
    asked: list[str | None] = []

    class Cutting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["last-event-id"])
            self.send_response(200 if cut else 503)
            self.end_headers()
            self.wfile.write(cut.pop(0) if cut else b"")

        def log_message(self, *_: Any) -> None:
            """Nothing: what was asked is kept."""

    async def follow(url: str) -> list[Json]:
        heard = []
        async with OverviewClient(url) as client:
            async for event in client.events(last=1000):
                heard.append(event)
                if len(heard) == 6:
                    break
        return heard

    server = ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        heard = asyncio.run(follow(f"http://127.0.0.1:{server.server_address[1]}"))
    finally:
        server.shutdown()
        server.server_close()
    assert heard == [event for _, event in told[:6]]
    assert asked == [None, told[2][0], told[2][0]]


def _event(name: str, event: Json) -> bytes:
    return f"event: move\nid: {name}\ndata: {json.dumps(event)}\n\n".encode()
