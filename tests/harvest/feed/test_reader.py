"""What a source tells is kept as it told it; what cannot be kept is set aside, with the reason."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.config import FeedSection
from penstock.harvest.contract import CONSOLIDATIONS, WORK_ITEMS
from penstock.harvest.feed.reader import KEY_LIMIT, RecordReader, StoredRecord, newest
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper

LATER, EARLIER = "2024-05-02T10:00:00Z", "2024-05-01T10:00:00Z"
MINIMAL = {"source": {"kind": "rest", "url": "http://source.test"}, "key": "id", "updated_at": "updatedAt"}


class ByteSource:
    """A source of records as they are given, byte by byte; they are all in one range."""

    def __init__(self) -> None:
        self.url = ""
        self.records: list[bytes] = []

    def put(self, *records: bytes | Mapping[str, Any]) -> None:
        self.records = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]

    async def page(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        items = b",".join(self._asked(request)[offset : offset + limit])
        return web.Response(body=b'{"items": [' + items + b"]}", content_type="application/json")

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response({"total": len(self._asked(request))})

    def _asked(self, request: web.Request) -> list[bytes]:
        return [] if "price_null" in request.query else self.records


@asynccontextmanager
async def running() -> AsyncIterator[ByteSource]:
    byte_source = ByteSource()
    app = web.Application()
    app.router.add_get("/records", byte_source.page)
    app.router.add_get("/count", byte_source.count)
    server = TestServer(app)
    await server.start_server()
    byte_source.url = str(server.make_url("")).rstrip("/")
    try:
        yield byte_source
    finally:
        await server.close()


@pytest.fixture
async def byte_source() -> AsyncIterator[ByteSource]:
    async with running() as one:
        yield one


@asynccontextmanager
async def over(byte_source: ByteSource, url: str, folder: Path, **changes: Any) -> AsyncIterator[HarvestStepper]:
    """A harvest of the shelf, in one partition, with pages of four."""
    source = {"kind": "rest", "url": byte_source.url, "path": "/records", "count_path": "/count"}
    call = {"attempts": 1, "timeout": 5}
    given = {
        "source": {**source, "after_param": None, "upto_param": None, "call": call},
        "partitions": {"count": 1, "least": 1_000},
        "page_size": 4,
        "fields": {"name": {"path": "name"}},
        "cost": {"path": "price"},
        **changes,
    }
    async with harvest_stepper(url, folder, records=0, **given) as turned:
        yield turned


@pytest.fixture
async def turned(byte_source: ByteSource, database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with over(byte_source, database_url, tmp_path) as found:
        yield found


async def ran(turned: HarvestStepper) -> asyncpg.Record:
    run_id = await turned.planned()
    await turned.finish()
    return await turned.run(run_id)


async def kept(turned: HarvestStepper) -> dict[str, asyncpg.Record]:
    return {row["key"]: row for row in await turned.db.fetch("SELECT * FROM raw_record")}


async def rejects(turned: HarvestStepper, run_id: UUID) -> dict[str | None, str]:
    """Why records were set aside, by what there is of them."""
    rows = await turned.db.fetch("SELECT payload, reason FROM harvest_reject WHERE run_id = $1", run_id)
    return {row["payload"]: row["reason"] for row in rows}


def reader(**changes: Any) -> RecordReader:
    return RecordReader(FeedSection.model_validate({**MINIMAL, **changes}))


def only(raw: bytes, **changes: Any) -> StoredRecord:
    (record,), rejected = reader(**changes).read([raw])
    assert rejected == []
    return record


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{}", "its key (id) is no text of 1 to 500: None"),
        (b'{"id": null}', "its key (id) is no text of 1 to 500: None"),
        (b'{"id": ""}', "its key (id) is no text of 1 to 500: ''"),
        (b'{"id": true}', "its key (id) is no text of 1 to 500: True"),
        (b'{"id": 1.5}', "its key (id) is no text of 1 to 500: 1.5"),
        (b'{"id": ["a"]}', "its key (id) is no text of 1 to 500: ['a']"),
        (b'{"id": {"a": 1}}', "its key (id) is no text of 1 to 500: {'a': 1}"),
        (b'{"id": "' + b"x" * 501 + b'"}', "its key (id) is no text of 1 to 500: 'xxx"),
        (b'{"id": "a\\u0000"}', "its key (id) is no text of 1 to 500: 'a\\x00'"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "it is no record: "),
        (b'{"id": ' + b"[" * 900 + b"]" * 900 + b"}", "its key (id) is no text of 1 to 500: [[["),
        (b'{"id": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "it is no record: "),
        (b'{"id": "a", "x": "\\ud800"}', "it is no record: "),
        (b'{"id": "\xff"}', "it is no record: "),
        (b'{"id": "a"', "it is no record: "),
        (b"[1]", "it is no record: "),
        (b"7", "it is no record: "),
        (b"null", "it is no record: "),
        (b"", "it is no record: "),
    ],
)
def test_what_is_no_record_is_told_why(raw: bytes, reason: str) -> None:
    """H4: no key, a key that is none, or no object: each with its reason, and the records around it are read."""
    records, (rejected,) = reader().read([b'{"id": "before"}', raw, b'{"id": "after"}'])
    assert [record.key for record in records] == ["before", "after"]
    assert rejected.reason.startswith(reason)
    assert rejected.key is None


def test_a_record_that_is_too_large() -> None:
    """H4: over limits.record_bytes it is set aside, with its beginning only."""
    raw = b'{"id": "a", "x": "' + b"x" * 1_000 + b'"}'
    _, (rejected,) = reader(limits={"record_bytes": 1_000}).read([raw])
    assert rejected.reason == f"it has {len(raw):,} bytes, more than limits.record_bytes (1,000)"
    assert rejected.text == raw[:200].decode()
    assert only(raw).key == "a"


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (b'{"id": 7}', "7"),
        (b'{"id": -7}', "-7"),
        (b'{"id": 123456789012345678901234567890}', "123456789012345678901234567890"),
        (b'{"id": "7"}', "7"),
        (('{"id": "' + "\u2666" * KEY_LIMIT + '"}').encode(), "\u2666" * KEY_LIMIT),
        (b'{"id": "a", "id": "b"}', "b"),
        (b'{"id": " a "}', " a "),
    ],
)
def test_keys(raw: bytes, key: str) -> None:
    """H4: a text as it is, a whole number by its digits; the text of the record is untouched."""
    record = only(raw)
    assert (record.key, record.text) == (key, raw.decode())


@pytest.mark.parametrize(
    ("told", "moment"),
    [
        ('"2024-05-01T10:00:00Z"', datetime(2024, 5, 1, 10, tzinfo=UTC)),
        ('"2024-05-01T12:00:00+02:00"', datetime(2024, 5, 1, 10, tzinfo=UTC)),
        ('"2024-05-01T10:00:00.123456789Z"', datetime(2024, 5, 1, 10, 0, 0, 123456, tzinfo=UTC)),
        ('"2024-05-01T10:00:00"', datetime(2024, 5, 1, 10, tzinfo=UTC)),
        ('"2024-05-01"', datetime(2024, 5, 1, tzinfo=UTC)),
        ('"yesterday"', None),
        ('""', None),
        ('"2024-13-01T10:00:00Z"', None),
        ("1714557600", None),
        ("null", None),
        ("{}", None),
    ],
)
def test_when_a_record_changed(told: str, moment: datetime | None) -> None:
    """H4: ISO 8601, UTC where it has no zone; what cannot be read is not known, and the record is kept."""
    assert only(f'{{"id": "a", "updatedAt": {told}}}'.encode()).updated_at == moment


def test_paths_lead_into_records() -> None:
    """H4: key and time may lie deep; a way that is not there is no key."""
    deep = {"key": "a.b.id", "updated_at": "a.b.at"}
    found = only(b'{"a": {"b": {"id": 5, "at": "2024-05-01T10:00:00Z"}}}', **deep)
    assert (found.key, found.updated_at) == ("5", datetime(2024, 5, 1, 10, tzinfo=UTC))
    for raw in (b'{"a": null}', b'{"a": {"b": 7}}', b'{"a": []}', b"{}"):
        _, (rejected,) = reader(**deep).read([raw])
        assert rejected.reason


def test_duplicates_collapse_to_the_newest() -> None:
    """H16: of each key the newest; of two as new, or of unknown age, the one told last; in the order of keys."""
    early, late = datetime(2024, 5, 1, tzinfo=UTC), datetime(2024, 5, 2, tzinfo=UTC)
    given = [
        StoredRecord("b", "late", late),
        StoredRecord("b", "early", early),
        StoredRecord("a", "first", early),
        StoredRecord("a", "second", early),
        StoredRecord("c", "known", late),
        StoredRecord("c", "unknown", None),
    ]
    assert [(one.key, one.text) for one in newest(given)] == [("a", "second"), ("b", "late"), ("c", "unknown")]


async def test_bad_records_are_set_aside_and_the_rest_of_their_page_is_kept(
    byte_source: ByteSource, turned: HarvestStepper
) -> None:
    """H4: whatever is among them, every good record is kept and consolidated, and every bad one has its reason."""
    good = [{"id": f"good-{number}", "name": "x", "price": number} for number in range(9)]
    good.append({"id": "deep", "x": json.loads("[" * 90 + "]" * 90)})
    bad = [b'{"id": null, "n": 1}', b'{"id": true}', b'{"name": "nobody"}', b'{"id": "' + b"x" * 501 + b'"}']
    bad.append(b'{"id": "huge", "x": 1' + b"0" * 140_000 + b"}")
    mixed: list[bytes | Mapping[str, Any]] = [one for pair in zip(good, bad, strict=False) for one in pair]
    byte_source.put(*mixed, *good[len(bad) :])
    run = await ran(turned)
    assert run["state"] == "completed"
    assert (await turned.canonical()).keys() == {str(one["id"]) for one in good}
    told = await rejects(turned, run["run_id"])
    assert len(told) == len(bad)
    assert [reason for payload, reason in told.items() if payload and payload.startswith('{"id": "huge"')] != []
    assert all(told.values())


async def test_one_bad_record_is_told_once(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H13: however many passes there were, the run tells of one record that was set aside."""
    byte_source.put({"id": "a", "price": 1}, b'{"id": null}', {"id": "b", "price": 2})
    run = await ran(turned)
    views = HarvestViews(turned.db, turned.storage, turned.section)
    assert (await views.run(run["run_id"])).rejected == 1


@pytest.mark.parametrize("garbage", [b"[1, 2]", b"7", b'{"id": "deep", "x": ' + b"[" * 9_000 + b"]" * 9_000 + b"}"])
async def test_a_page_that_is_not_one_of_objects_is_not_believed(
    byte_source: ByteSource, turned: HarvestStepper, garbage: bytes
) -> None:
    """H14: what is no object, or nested beyond reading, says that the answer is not what was asked for."""
    byte_source.put({"id": "a", "price": 1}, garbage, {"id": "b", "price": 2})
    run = await ran(turned)
    assert run["state"] == "consolidation_skipped"
    errors = await turned.db.fetch("SELECT error_message FROM worker_runs WHERE status = 'failed'")
    assert [row["error_message"].partition(":")[0] for row in errors] == ["SOURCE_INVALID_RESPONSE"]
    byte_source.put({"id": "a", "price": 1}, {"id": "b", "price": 2})
    await turned.harvest.retry(run["run_id"], "ann")
    await turned.finish()
    assert (await turned.canonical()).keys() == {"a", "b"}


async def test_text_no_database_keeps_is_replaced(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H4: a NUL or half a character in a record costs that character, not the record."""
    byte_source.put(
        b'{"id": "a", "name": "x\\u0000y"}', b'{"id": "b", "name": "\\ud800!"}', b'{"id": "c", "name": "\xff"}'
    )
    run = await ran(turned)
    assert run["state"] == "completed"
    names = {key: row["fields"]["name"] for key, row in (await turned.canonical()).items()}
    assert names == {"a": "x\ufffdy", "b": "\ufffd!", "c": "\ufffd"}


@pytest.mark.parametrize("told", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00Z"])
async def test_moments_at_the_end_of_time(byte_source: ByteSource, turned: HarvestStepper, told: str) -> None:
    """H4: a moment that no database holds is not known; the record and its page are kept."""
    byte_source.put({"id": "a", "updatedAt": told, "price": 1}, {"id": "b", "updatedAt": LATER, "price": 2})
    assert (await ran(turned))["state"] == "completed"
    assert (await turned.canonical()).keys() == {"a", "b"}


async def test_numbers_beyond_floats_keep_every_digit(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H7, H13: kept, priced and shown as they are, whatever their size."""
    byte_source.put(b'{"id": "a", "price": 12345678901234567890.123456789, "x": 1e400, "name": 0.10}')
    assert (await ran(turned))["state"] == "completed"
    assert (await turned.canonical())["a"]["cost"] == Decimal("12345678901234567890.123456789")
    record = await HarvestViews(turned.db, turned.storage, turned.section).record(FEED, "a")
    told = json.loads(record.model_dump_json(by_alias=True))
    assert told["canonical"]["cost"] == "12345678901234567890.123456789"
    assert told["payload"]["price"] == "12345678901234567890.123456789"
    assert told["payload"]["x"] == "1" + "0" * 400
    assert (told["payload"]["name"], told["payload"]["id"]) == (0.1, "a")


async def test_duplicates_of_one_page_and_of_many(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H16: the newest of all that have one key is kept, wherever they are, and counted once."""
    old, new = {"id": "a", "updatedAt": EARLIER, "price": 1}, {"id": "a", "updatedAt": LATER, "price": 2}
    others = [{"id": f"b{number}", "updatedAt": EARLIER, "price": 9} for number in range(20)]
    byte_source.put(new, old, *others, old)
    run = await ran(turned)
    records = await kept(turned)
    assert (run["state"], len(records), run["consolidated"]) == ("completed", 21, 21)
    assert (records["a"]["payload"]["price"], records["a"]["version"]) == (2, 1)


async def test_an_older_version_never_overwrites_a_newer_one(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H16: it is seen, and nothing of it is taken; the same again changes nothing; a newer one does."""
    byte_source.put({"id": "a", "updatedAt": LATER, "price": 2})
    await ran(turned)
    byte_source.put({"id": "a", "updatedAt": EARLIER, "price": 1})
    older = await ran(turned)
    row = (await kept(turned))["a"]
    assert (row["payload"]["price"], row["version"], row["seen_run"]) == (2, 1, older["run_id"])
    assert older["consolidated"] == 0
    byte_source.put({"id": "a", "updatedAt": "2024-05-03T00:00:00Z", "price": 3})
    assert (await ran(turned))["consolidated"] == 1
    row = (await kept(turned))["a"]
    assert (row["payload"]["price"], row["version"]) == (3, 2)
    assert (await turned.canonical())["a"]["cost"] == 3


async def test_where_age_is_not_told_the_last_word_counts(byte_source: ByteSource, turned: HarvestStepper) -> None:
    """H16: without a readable time a record that differs is a newer one."""
    byte_source.put({"id": 7, "updatedAt": "soon", "price": 2})
    await ran(turned)
    byte_source.put({"id": "7", "price": 1})
    await ran(turned)
    row = (await kept(turned))["7"]
    assert (row["payload"]["price"], row["version"], row["source_updated_at"]) == (1, 2, None)


BAD = [b'{"id": null, "n": %d}' % number for number in range(3)]


@pytest.mark.parametrize(
    ("limits", "state"),
    [
        ({"rejects_allowed": 2, "max_reject_ratio": 0}, "failed"),
        ({"rejects_allowed": 3, "max_reject_ratio": 0}, "completed"),
        ({"rejects_allowed": 0, "max_reject_ratio": 0.1}, "failed"),
        ({"rejects_allowed": 0, "max_reject_ratio": 0.4}, "completed"),
    ],
)
async def test_too_many_rejects_fail_a_run(
    byte_source: ByteSource, database_url: str, tmp_path: Path, limits: Mapping[str, Any], state: str
) -> None:
    """H7: over the larger of rejects_allowed and max_reject_ratio, three of ten here."""
    byte_source.put(*({"id": f"k{number}", "price": 1} for number in range(7)), *BAD)
    async with over(byte_source, database_url, tmp_path, limits=limits) as turned:
        assert (await ran(turned))["state"] == state


async def test_force_passes_too_many_rejects(byte_source: ByteSource, database_url: str, tmp_path: Path) -> None:
    """H5, H7, H12: no attempt is made again by itself, somebody is told; retry fails again, force completes."""
    byte_source.put({"id": "a", "price": 1}, *BAD)
    async with over(byte_source, database_url, tmp_path, limits={"rejects_allowed": 1}) as turned:
        run = await ran(turned)
        run_id = run["run_id"]
        assert (run["state"], run["watermark_after"]) == ("failed", None)
        assert run["error"] == "3 of 4 records could not be kept or mapped"
        codes = [row["code"] for row in await turned.db.fetch("SELECT code FROM harvest_alert")]
        assert codes == ["CONSOLIDATION_FAILED"]
        await turned.harvest.retry(run_id, "ann")
        await turned.drain(CONSOLIDATIONS)
        assert (await turned.run(run_id))["state"] == "failed"
        await turned.harvest.force(run_id, "ann", "known")
        await turned.drain(CONSOLIDATIONS)
        assert (await turned.run(run_id))["state"] == "completed"
        assert (await turned.canonical()).keys() == {"a"}


async def test_what_cannot_be_mapped_is_set_aside_and_mapped_later(
    byte_source: ByteSource, database_url: str, tmp_path: Path
) -> None:
    """H7: a record without a field it must have has a reason and its key; once the source mends it, it is served."""
    fields = {"name": {"path": "name", "required": True}}
    async with over(byte_source, database_url, tmp_path, fields=fields) as turned:
        byte_source.put({"id": "a", "name": "x", "price": 1}, {"id": "b", "price": 1})
        run = await ran(turned)
        assert (run["state"], run["rejected"], run["consolidated"]) == ("completed", 1, 1)
        row = await turned.db.fetchrow("SELECT key, reason FROM harvest_reject")
        assert row is not None
        assert (row["key"], "name" in row["reason"]) == ("b", True)
        byte_source.put({"id": "a", "name": "x", "price": 1}, {"id": "b", "name": "y", "price": 1})
        assert (await ran(turned))["rejected"] == 0
        assert (await turned.canonical()).keys() == {"a", "b"}


async def test_what_is_rejected_while_it_is_fetched_counts_before_consolidation(
    byte_source: ByteSource, turned: HarvestStepper
) -> None:
    """H13: a run under way tells of what was set aside already."""
    byte_source.put({"id": "a", "price": 1}, b'{"id": null}')
    run_id = await turned.planned()
    await turned.drain(WORK_ITEMS)
    views = HarvestViews(turned.db, turned.storage, turned.section)
    told = await views.run(run_id)
    assert (told.state, told.rejected) == ("consolidating", 1)
