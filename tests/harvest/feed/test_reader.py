"""Records are stored as the source sent them; records that cannot be stored are rejected with a reason."""

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
from penstock.harvest.feed.reader import KEY_LIMIT, RecordReader, StoredRecord, keep_newest
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper

LATER, EARLIER = "2024-05-02T10:00:00Z", "2024-05-01T10:00:00Z"
MINIMAL = {"source": {"kind": "rest", "url": "http://source.test"}, "key": "id", "updated_at": "updatedAt"}


class ByteSource:
    """A source that sends the given bytes as records, all in one range."""

    def __init__(self) -> None:
        self.url = ""
        self.records: list[bytes] = []

    def put(self, *records: bytes | Mapping[str, Any]) -> None:
        self.records = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]

    async def page(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        items = b",".join(self._select(request)[offset : offset + limit])
        return web.Response(body=b'{"items": [' + items + b"]}", content_type="application/json")

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response({"total": len(self._select(request))})

    def _select(self, request: web.Request) -> list[bytes]:
        return [] if "price_null" in request.query else self.records


@asynccontextmanager
async def run_byte_source() -> AsyncIterator[ByteSource]:
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
    async with run_byte_source() as source:
        yield source


@asynccontextmanager
async def open_stepper(
    byte_source: ByteSource, url: str, folder: Path, **changes: Any
) -> AsyncIterator[HarvestStepper]:
    """Open a stepper over *byte_source*, with one partition and pages of four records."""
    source = {"kind": "rest", "url": byte_source.url, "path": "/records", "count_path": "/count"}
    call = {"attempts": 1, "timeout": 5}
    settings = {
        "source": {**source, "after_param": None, "upto_param": None, "call": call},
        "partitions": {"count": 1, "min_records": 1_000},
        "page_size": 4,
        "fields": {"name": {"path": "name"}},
        "cost": {"path": "price"},
        **changes,
    }
    async with harvest_stepper(url, folder, records=0, **settings) as stepper:
        yield stepper


@pytest.fixture
async def stepper(byte_source: ByteSource, database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with open_stepper(byte_source, database_url, tmp_path) as stepper:
        yield stepper


async def run_once(stepper: HarvestStepper) -> asyncpg.Record:
    run_id = await stepper.plan_run()
    await stepper.finish()
    return await stepper.run(run_id)


async def read_raw(stepper: HarvestStepper) -> dict[str, asyncpg.Record]:
    return {row["key"]: row for row in await stepper.db.fetch("SELECT * FROM raw_record")}


async def read_rejects(stepper: HarvestStepper, run_id: UUID) -> dict[str | None, str]:
    """Return the reasons of the rejects of a run, by their payload."""
    rows = await stepper.db.fetch("SELECT payload, reason FROM harvest_reject WHERE run_id = $1", run_id)
    return {row["payload"]: row["reason"] for row in rows}


def make_reader(**changes: Any) -> RecordReader:
    return RecordReader(FeedSection.model_validate({**MINIMAL, **changes}))


def read_one(raw: bytes, **changes: Any) -> StoredRecord:
    (record,), rejected = make_reader(**changes).read([raw])
    assert rejected == []
    return record


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{}", "the key (id) must be text of 1 to 500 characters: None"),
        (b'{"id": null}', "the key (id) must be text of 1 to 500 characters: None"),
        (b'{"id": ""}', "the key (id) must be text of 1 to 500 characters: ''"),
        (b'{"id": true}', "the key (id) must be text of 1 to 500 characters: True"),
        (b'{"id": 1.5}', "the key (id) must be text of 1 to 500 characters: 1.5"),
        (b'{"id": ["a"]}', "the key (id) must be text of 1 to 500 characters: ['a']"),
        (b'{"id": {"a": 1}}', "the key (id) must be text of 1 to 500 characters: {'a': 1}"),
        (b'{"id": "' + b"x" * 501 + b'"}', "the key (id) must be text of 1 to 500 characters: 'xxx"),
        (b'{"id": "a\\u0000"}', "the key (id) must be text of 1 to 500 characters: 'a\\x00'"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "the record is not valid JSON: "),
        (b'{"id": ' + b"[" * 900 + b"]" * 900 + b"}", "the key (id) must be text of 1 to 500 characters: [[["),
        (b'{"id": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "the record is not valid JSON: "),
        (b'{"id": "a", "x": "\\ud800"}', "the record is not valid JSON: "),
        (b'{"id": "\xff"}', "the record is not valid JSON: "),
        (b'{"id": "a"', "the record is not valid JSON: "),
        (b"[1]", "the record is not valid JSON: "),
        (b"7", "the record is not valid JSON: "),
        (b"null", "the record is not valid JSON: "),
        (b"", "the record is not valid JSON: "),
    ],
)
def test_invalid_records_are_rejected(raw: bytes, reason: str) -> None:
    """H4: a missing key, an invalid key, or no object: each has its reason, and the records around it are read."""
    records, (rejected,) = make_reader().read([b'{"id": "before"}', raw, b'{"id": "after"}'])
    assert [record.key for record in records] == ["before", "after"]
    assert rejected.reason.startswith(reason)
    assert rejected.key is None


def test_too_large_records_are_rejected() -> None:
    """H4: a record above limits.record_bytes is rejected with its beginning only."""
    raw = b'{"id": "a", "x": "' + b"x" * 1_000 + b'"}'
    _, (rejected,) = make_reader(limits={"record_bytes": 1_000}).read([raw])
    assert rejected.reason == f"the record has {len(raw):,} bytes, more than limits.record_bytes (1,000)"
    assert rejected.text == raw[:200].decode()
    assert read_one(raw).key == "a"


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
    """H4: the key is text, or the digits of a whole number; the text of the record does not change."""
    record = read_one(raw)
    assert (record.key, record.text) == (key, raw.decode())


@pytest.mark.parametrize(
    ("text", "time"),
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
def test_time_of_change(text: str, time: datetime | None) -> None:
    """H4: the time is in ISO 8601, in UTC without a zone; an invalid time is unknown, and the record is stored."""
    assert read_one(f'{{"id": "a", "updatedAt": {text}}}'.encode()).updated_at == time


def test_nested_paths() -> None:
    """H4: key and time may be nested; a record without the path has no key."""
    deep = {"key": "a.b.id", "updated_at": "a.b.at"}
    record = read_one(b'{"a": {"b": {"id": 5, "at": "2024-05-01T10:00:00Z"}}}', **deep)
    assert (record.key, record.updated_at) == ("5", datetime(2024, 5, 1, 10, tzinfo=UTC))
    for raw in (b'{"a": null}', b'{"a": {"b": 7}}', b'{"a": []}', b"{}"):
        _, (rejected,) = make_reader(**deep).read([raw])
        assert rejected.reason


def test_newest_duplicate_wins() -> None:
    """H16: the newest record of each key, in the order of keys; with equal or unknown age, the last record."""
    early, late = datetime(2024, 5, 1, tzinfo=UTC), datetime(2024, 5, 2, tzinfo=UTC)
    records = [
        StoredRecord("b", "late", late),
        StoredRecord("b", "early", early),
        StoredRecord("a", "first", early),
        StoredRecord("a", "second", early),
        StoredRecord("c", "known", late),
        StoredRecord("c", "unknown", None),
    ]
    assert [(record.key, record.text) for record in keep_newest(records)] == [
        ("a", "second"),
        ("b", "late"),
        ("c", "unknown"),
    ]


async def test_bad_records_do_not_affect_the_rest_of_their_page(
    byte_source: ByteSource, stepper: HarvestStepper
) -> None:
    """H4: every good record is stored and consolidated, and every bad record has a reason."""
    good = [{"id": f"good-{number}", "name": "x", "price": number} for number in range(9)]
    good.append({"id": "deep", "x": json.loads("[" * 90 + "]" * 90)})
    bad = [b'{"id": null, "n": 1}', b'{"id": true}', b'{"name": "no key"}', b'{"id": "' + b"x" * 501 + b'"}']
    bad.append(b'{"id": "huge", "x": 1' + b"0" * 140_000 + b"}")
    mixed: list[bytes | Mapping[str, Any]] = [record for pair in zip(good, bad, strict=False) for record in pair]
    byte_source.put(*mixed, *good[len(bad) :])
    run = await run_once(stepper)
    assert run["state"] == "completed"
    assert (await stepper.read_canonical()).keys() == {str(record["id"]) for record in good}
    rejects = await read_rejects(stepper, run["run_id"])
    assert len(rejects) == len(bad)
    assert [reason for payload, reason in rejects.items() if payload and payload.startswith('{"id": "huge"')] != []
    assert all(rejects.values())


async def test_bad_record_is_counted_once(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H13: after several passes, the run still counts one rejected record."""
    byte_source.put({"id": "a", "price": 1}, b'{"id": null}', {"id": "b", "price": 2})
    run = await run_once(stepper)
    views = HarvestViews(stepper.db, stepper.storage, stepper.section)
    assert (await views.read_run(run["run_id"])).rejected == 1


@pytest.mark.parametrize("garbage", [b"[1, 2]", b"7", b'{"id": "deep", "x": ' + b"[" * 9_000 + b"]" * 9_000 + b"}"])
async def test_page_with_other_values_than_objects_is_invalid(
    byte_source: ByteSource, stepper: HarvestStepper, garbage: bytes
) -> None:
    """H14: a value that is not an object, or nested too deeply, makes the response invalid."""
    byte_source.put({"id": "a", "price": 1}, garbage, {"id": "b", "price": 2})
    run = await run_once(stepper)
    assert run["state"] == "consolidation_skipped"
    errors = await stepper.db.fetch("SELECT error_message FROM worker_runs WHERE status = 'failed'")
    assert [row["error_message"].partition(":")[0] for row in errors] == ["SOURCE_INVALID_RESPONSE"]
    byte_source.put({"id": "a", "price": 1}, {"id": "b", "price": 2})
    await stepper.harvest.retry(run["run_id"], "ann")
    await stepper.finish()
    assert (await stepper.read_canonical()).keys() == {"a", "b"}


async def test_unstorable_characters_are_replaced(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H4: a NUL or half a surrogate pair is replaced, and the record is stored."""
    byte_source.put(
        b'{"id": "a", "name": "x\\u0000y"}', b'{"id": "b", "name": "\\ud800!"}', b'{"id": "c", "name": "\xff"}'
    )
    run = await run_once(stepper)
    assert run["state"] == "completed"
    names = {key: row["fields"]["name"] for key, row in (await stepper.read_canonical()).items()}
    assert names == {"a": "x\ufffdy", "b": "\ufffd!", "c": "\ufffd"}


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00Z"])
async def test_time_out_of_range_is_unknown(byte_source: ByteSource, stepper: HarvestStepper, time: str) -> None:
    """H4: a time that the database cannot store is unknown; the record and its page are stored."""
    byte_source.put({"id": "a", "updatedAt": time, "price": 1}, {"id": "b", "updatedAt": LATER, "price": 2})
    assert (await run_once(stepper))["state"] == "completed"
    assert (await stepper.read_canonical()).keys() == {"a", "b"}


async def test_large_numbers_keep_every_digit(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H7, H13: numbers of any size are stored, priced and shown with all digits."""
    byte_source.put(b'{"id": "a", "price": 12345678901234567890.123456789, "x": 1e400, "name": 0.10}')
    assert (await run_once(stepper))["state"] == "completed"
    assert (await stepper.read_canonical())["a"]["cost"] == Decimal("12345678901234567890.123456789")
    record = await HarvestViews(stepper.db, stepper.storage, stepper.section).read_record(FEED, "a")
    view = json.loads(record.model_dump_json(by_alias=True))
    assert view["canonical"]["cost"] == "12345678901234567890.123456789"
    assert view["payload"]["price"] == "12345678901234567890.123456789"
    assert view["payload"]["x"] == "1" + "0" * 400
    assert (view["payload"]["name"], view["payload"]["id"]) == (0.1, "a")


async def test_duplicates_on_one_page_and_on_several(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H16: the newest record of a key is stored, on whatever page it is, and counted once."""
    old, new = {"id": "a", "updatedAt": EARLIER, "price": 1}, {"id": "a", "updatedAt": LATER, "price": 2}
    others = [{"id": f"b{number}", "updatedAt": EARLIER, "price": 9} for number in range(20)]
    byte_source.put(new, old, *others, old)
    run = await run_once(stepper)
    records = await read_raw(stepper)
    assert (run["state"], len(records), run["consolidated"]) == ("completed", 21, 21)
    assert (records["a"]["payload"]["price"], records["a"]["version"]) == (2, 1)


async def test_older_record_never_overwrites_a_newer_one(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H16: an older record is only marked as seen, and an equal one changes nothing; a newer record is stored."""
    byte_source.put({"id": "a", "updatedAt": LATER, "price": 2})
    await run_once(stepper)
    byte_source.put({"id": "a", "updatedAt": EARLIER, "price": 1})
    older = await run_once(stepper)
    row = (await read_raw(stepper))["a"]
    assert (row["payload"]["price"], row["version"], row["seen_run"]) == (2, 1, older["run_id"])
    assert older["consolidated"] == 0
    byte_source.put({"id": "a", "updatedAt": "2024-05-03T00:00:00Z", "price": 3})
    assert (await run_once(stepper))["consolidated"] == 1
    row = (await read_raw(stepper))["a"]
    assert (row["payload"]["price"], row["version"]) == (3, 2)
    assert (await stepper.read_canonical())["a"]["cost"] == 3


async def test_record_of_unknown_age_counts_as_newer(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H16: without a valid time, a record that differs counts as newer."""
    byte_source.put({"id": 7, "updatedAt": "soon", "price": 2})
    await run_once(stepper)
    byte_source.put({"id": "7", "price": 1})
    await run_once(stepper)
    row = (await read_raw(stepper))["7"]
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
async def test_too_many_rejects_fail_the_run(
    byte_source: ByteSource, database_url: str, tmp_path: Path, limits: Mapping[str, Any], state: str
) -> None:
    """H7: the limit is the larger one of rejects_allowed and max_reject_ratio; here three of ten are rejected."""
    byte_source.put(*({"id": f"k{number}", "price": 1} for number in range(7)), *BAD)
    async with open_stepper(byte_source, database_url, tmp_path, limits=limits) as stepper:
        assert (await run_once(stepper))["state"] == state


async def test_force_ignores_the_limit_of_rejects(byte_source: ByteSource, database_url: str, tmp_path: Path) -> None:
    """H5, H7, H12: too many rejects fail the run at once, with an alert; a retry fails again, and a force completes."""
    byte_source.put({"id": "a", "price": 1}, *BAD)
    async with open_stepper(byte_source, database_url, tmp_path, limits={"rejects_allowed": 1}) as stepper:
        run = await run_once(stepper)
        run_id = run["run_id"]
        assert (run["state"], run["watermark_after"]) == ("failed", None)
        assert run["error"] == "3 of 4 records could not be stored or mapped; limits.max_reject_ratio is 0.01"
        codes = [row["code"] for row in await stepper.db.fetch("SELECT code FROM harvest_alert")]
        assert codes == ["CONSOLIDATION_FAILED"]
        await stepper.harvest.retry(run_id, "ann")
        await stepper.drain(CONSOLIDATIONS)
        assert (await stepper.run(run_id))["state"] == "failed"
        await stepper.harvest.force(run_id, "ann", "known errors")
        await stepper.drain(CONSOLIDATIONS)
        assert (await stepper.run(run_id))["state"] == "completed"
        assert (await stepper.read_canonical()).keys() == {"a"}


async def test_rejected_record_is_mapped_after_its_correction(
    byte_source: ByteSource, database_url: str, tmp_path: Path
) -> None:
    """H7: a record without a required field is rejected with its key; it is served once the source corrects it."""
    fields = {"name": {"path": "name", "required": True}}
    async with open_stepper(byte_source, database_url, tmp_path, fields=fields) as stepper:
        byte_source.put({"id": "a", "name": "x", "price": 1}, {"id": "b", "price": 1})
        run = await run_once(stepper)
        assert (run["state"], run["rejected"], run["consolidated"]) == ("completed", 1, 1)
        row = await stepper.db.fetchrow("SELECT key, reason FROM harvest_reject")
        assert row is not None
        assert (row["key"], "name" in row["reason"]) == ("b", True)
        byte_source.put({"id": "a", "name": "x", "price": 1}, {"id": "b", "name": "y", "price": 1})
        assert (await run_once(stepper))["rejected"] == 0
        assert (await stepper.read_canonical()).keys() == {"a", "b"}


async def test_rejects_are_counted_during_the_fetch(byte_source: ByteSource, stepper: HarvestStepper) -> None:
    """H13: an active run shows the records that are rejected so far."""
    byte_source.put({"id": "a", "price": 1}, b'{"id": null}')
    run_id = await stepper.plan_run()
    await stepper.drain(WORK_ITEMS)
    views = HarvestViews(stepper.db, stepper.storage, stepper.section)
    run = await views.read_run(run_id)
    assert (run.state, run.rejected) == ("consolidating", 1)
