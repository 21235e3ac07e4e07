"""The example pipeline as its users run it: real files, four daemons, two shards, and senders that are killed."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import Stage
from tests.examples.daemons import Daemons, ExampleDaemon, Shards
from tests.examples.tcp_proxy import TcpProxy
from tests.services.mariadb import mariadb_binary, running_mariadb
from tests.support.processes import PipelineApid
from tests.support.require import require
from tests.support.wait import becomes

SHARDS = 2
KILLS = (1, 3, 2)  # in each round the sender dies when it has started so many
FILES_A_ROUND = 3  # more than it can have finished by then
EVENTS = 150
BAD, RUBBISH, LATE = "20250101090000", "20250101100000", "20250101110000"
# Attempts are no limit here: on a slow machine a short lease may run out by itself, too.
SETTINGS = {"PENSTOCK__TRACKING__MAX_ATTEMPTS": "1000"}


class Row(NamedTuple):
    """An event as its shard must hold it."""

    event_id: str
    user_id: str
    kind: str
    amount_cents: int
    at: datetime

    @property
    def shard(self) -> int:
        return zlib.crc32(self.user_id.encode()) % SHARDS


class EventSource:
    """Makes event files, and remembers what must be in the shards when all is done."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self._random = Random(18)
        self.rows: list[Row] = []
        self.names: list[str] = []

    def make(self, name: str) -> None:
        rows = [self._row(f"{name}-{n}") for n in range(EVENTS)]
        self._daemons.put(name, "".join(self._line(row) for row in rows))
        self.rows += rows
        self.names.append(name)

    def make_bad(self, name: str) -> int:
        """A file with one line that makes no sense, deep inside; the shard that line belongs to."""
        rows = [self._row(f"{name}-{n}") for n in range(EVENTS)]
        bad = rows[EVENTS // 2]
        lines = [self._line(row, amount_cents="a lot") if row is bad else self._line(row) for row in rows]
        self._daemons.put(name, "".join(lines))
        self.rows += [row for row in rows if row.shard != bad.shard]
        return bad.shard

    def _row(self, event_id: str) -> Row:
        random = self._random
        at = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(microseconds=random.randrange(10**11))
        kind = random.choice(["order", "refund", "visit"])
        return Row(event_id, f"user-{random.randrange(1000)}", kind, random.randrange(-(10**6), 10**9), at)

    def _line(self, row: Row, **changes: Any) -> str:
        """The event as a source may tell it: in its own time zone, with its own idea of a number."""
        zone = timezone(timedelta(hours=self._random.randrange(-11, 12)))
        event = {
            **row._asdict(),
            "kind": self._random.choice([row.kind, row.kind.upper(), f" {row.kind}"]),
            "amount_cents": self._random.choice([row.amount_cents, str(row.amount_cents)]),
            "at": row.at.astimezone(zone).isoformat(),
            "not asked for": True,
        }
        return json.dumps({**event, **changes}) + "\n"


@pytest.fixture
def daemons(tmp_path: Path, database_url: str) -> Iterator[Daemons]:
    """A `pipeline-apid` of the test's own, and what starts daemons for it."""
    with (
        PipelineApid(tmp_path, "--database", database_url, env=SETTINGS) as apid,
        Daemons.running(apid.api, tmp_path) as daemons,
    ):
        yield daemons


@pytest.fixture
def shards() -> Iterator[Shards]:
    if mariadb_binary() is None:
        require("mariadb", "no mariadbd on this machine")
    with running_mariadb() as socket:
        yield Shards(socket, SHARDS)


@pytest.mark.full
async def test_killed_senders_lose_and_double_nothing(daemons: Daemons, shards: Shards) -> None:
    """T18: every event is in its shard exactly once, whenever senders die; a bad line is reported with its reason."""
    source = EventSource(daemons)
    daemons.start("event_ingest", "--raw", str(daemons.raw), "--shards", str(SHARDS), "--every", "0.1")
    daemons.start("shard_splitter")
    daemons.start("shard_worker")
    bad_shard = source.make_bad(BAD)
    daemons.put(RUBBISH, "this is no event\n")
    async with PipelineClient(daemons.url) as client, TcpProxy(daemons.url) as proxy:
        await kill_at_work(daemons, shards, source)
        (await send_all(daemons, shards, source, client)).kill()
        source.make(LATE)
        await kill_in_transaction(daemons, shards)
        await kill_before_report(daemons, shards, client, proxy)
        last = await send_all(daemons, shards, source, client)
        assert await last.stop() == 0
        assert (LATE, 0) in [(line["filename"], line["shard"]) for line in last.logged("was_sent_before")]
        check_shards(shards, source)
        for name in source.names:
            await check_done_once(client, name)
        await check_bad_files(client, bad_shard)


async def kill_at_work(daemons: Daemons, shards: Shards, source: EventSource) -> None:
    """Let senders die wherever they happen to be."""
    for number, started in enumerate(KILLS):
        for n in range(FILES_A_ROUND):
            source.make(f"2025010{number + 2}00000{n}")
        sender = start_sender(daemons, shards)

        async def has_started(sender: ExampleDaemon = sender, started: int = started) -> bool:
            return len(sender.logged("sending")) >= started

        await becomes(has_started, "the sender starts")
        sender.kill()


async def kill_in_transaction(daemons: Daemons, shards: Shards) -> None:
    """Let a sender die between the ledger's row and the events: neither stays."""
    with shards.held_up(0):
        sender = start_sender(daemons, shards)
        await becomes(shards.is_blocked, "a sender waits for the lock")
        sender.kill()
    await becomes(shards.is_disconnected, "all connections are closed")
    assert not shards.has_sent(LATE, 0)


async def kill_before_report(daemons: Daemons, shards: Shards, client: PipelineClient, proxy: TcpProxy) -> None:
    """Let a sender die after its commit and before the server knows of it: the row comes again."""

    async def is_sent() -> bool:
        return shards.has_sent(LATE, 0)

    with shards.held_up(0):
        sender = start_sender(daemons, shards, url=proxy.url)
        await becomes(shards.is_blocked, "a sender waits for the lock")
        proxy.cut()
    await becomes(is_sent, "it is not sent")
    sender.kill()
    row = (await client.file(LATE))["shards"][0]
    assert row["mysql_sender_status"] != "done"


async def send_all(daemons: Daemons, shards: Shards, source: EventSource, client: PipelineClient) -> ExampleDaemon:
    """Wait until a sender has sent all there is; the sender."""
    sender = start_sender(daemons, shards)
    all_good = len(source.names) * SHARDS + 1  # and one shard of the bad file

    async def is_all_sent() -> bool:
        return bool((await client.summary())["by_stage"]["mysql_sender"]["done"] == all_good)

    await becomes(is_all_sent, "not all of it is sent")
    return sender


def start_sender(daemons: Daemons, shards: Shards, *, url: str | None = None) -> ExampleDaemon:
    # A short lease, so that what a dead one held comes back soon.
    return daemons.start("mysql_sender", "--lease", "2", "--batch", "2", "--mysql", *shards.addresses, url=url)


def check_shards(shards: Shards, source: EventSource) -> None:
    """Each shard holds its events and nothing else, and its ledger agrees."""
    for number, name in enumerate(shards.names):
        kept = shards.ask(f"SELECT event_id, user_id, kind, amount_cents, at FROM {name}.event")
        wanted = [row._replace(at=row.at.replace(tzinfo=None)) for row in source.rows if row.shard == number]
        assert sorted(kept) == sorted(map(tuple, wanted))
        assert shards.ask(f"SELECT sum(`rows`) FROM {name}.sent_file") == [(len(wanted),)]
        others = f"SELECT count(*) FROM {name}.sent_file WHERE shard <> {number}"
        assert shards.ask(others) == [(0,)]


async def check_done_once(client: PipelineClient, name: str) -> None:
    """All four stages of all shards are done, and each became so once."""
    for row in (await client.file(name))["shards"]:
        assert {row[f"{stage.field}_status"] for stage in Stage} == {"done"}
    moves = (await client.history(name))["moves"]
    done = Counter((move["shard"], move["stage"]) for move in moves if move["to"] == "done")
    assert done == {(shard, stage): 1 for shard in range(SHARDS) for stage in Stage}


async def check_bad_files(client: PipelineClient, bad_shard: int) -> None:
    bad = await client.why(BAD, bad_shard)
    assert (bad["stage"], bad["status"]) == ("shard-worker", "failed")
    assert f"of {BAD}.shard-{bad_shard}.jsonl: amount_cents is a whole number, not 'a lot'" in bad["why"]
    assert (await client.why(BAD, 1 - bad_shard))["stage"] is None
    rubbish = await client.why(RUBBISH, 0)
    assert (rubbish["stage"], rubbish["status"]) == ("event-ingest", "failed")
    assert f"line 1 of {RUBBISH}.jsonl" in rubbish["why"]


@pytest.mark.full
async def test_a_producer_that_died_goes_on(daemons: Daemons) -> None:
    """T18: wherever event-ingest died, the next process ingests each file once; a corrected file can be retried."""
    source = EventSource(daemons)
    for name in ("new", "registered", "written"):
        source.make(name)
    daemons.put("rubbish", "[]\n")
    (daemons.work / "written.event-ingest.txt").write_text("what a producer left before it could say so")
    async with PipelineClient(daemons.url) as client:
        for name in ("registered", "written"):
            await client.register(name, range(SHARDS), worker="event-ingest")
        assert await ingest_once(daemons) == 0
        assert await ingest_once(daemons) == 0
        for name in source.names:
            assert await ingest_moves(client, name) == ["started", "done"]
            kept = (daemons.work / f"{name}.event-ingest.txt").read_text()
            assert kept.count("\n") == EVENTS
        assert await ingest_moves(client, "rubbish") == ["started", "failed"]
        assert not (daemons.work / "rubbish.event-ingest.txt").exists()

        source.make("rubbish")
        await client.move(Stage.EVENT_INGEST, "retry", "rubbish")
        assert await ingest_once(daemons) == 0
        assert await ingest_moves(client, "rubbish") == ["started", "failed", "new", "started", "done"]


async def ingest_once(daemons: Daemons) -> int:
    return await daemons.start("event_ingest", "--raw", str(daemons.raw), "--once").ends()


async def ingest_moves(client: PipelineClient, name: str) -> list[str]:
    """What happened to the first shard of a file in event-ingest."""
    moves = (await client.history(name))["moves"]
    return [move["to"] for move in moves if move["shard"] == 0]
