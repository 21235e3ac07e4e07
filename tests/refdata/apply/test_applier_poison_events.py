"""Commands that can never be applied, on both buses: each ends with its reason and blocks no command behind it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest

from penstock.refdata.contract import COMMAND_LIMIT
from penstock.settings import Settings
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    RefdataHarness,
    command,
    create_schemas,
    delete,
    dictionaries,
    on_bus,
    opened,
    refdata_settings,
    upsert,
)
from tests.support.types import Json

SECOND = timedelta(seconds=1)
TRAPS = """
CREATE TABLE trap (
    tenant_id text, code text, n int NOT NULL CHECK (n >= 0), word text, parent text,
    PRIMARY KEY (tenant_id, code),
    UNIQUE (tenant_id, word),
    FOREIGN KEY (tenant_id, parent) REFERENCES trap DEFERRABLE INITIALLY DEFERRED
);
CREATE FUNCTION spring(how text, n int) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    CASE how
        WHEN 'divide' THEN RETURN n / 0;
        WHEN 'raise' THEN RAISE EXCEPTION 'no change on a %', E'Sunday \\x7f';
        WHEN 'function' THEN EXECUTE 'SELECT no_such_function()';
        WHEN 'commit' THEN COMMIT;
        WHEN 'twice' THEN CREATE TEMP TABLE once_per_transaction ON COMMIT DROP AS SELECT 1;
        WHEN 'slow' THEN PERFORM pg_sleep(60);
        ELSE NULL;
    END CASE;
    RETURN n;
END
$$;
"""
TRAP: Json = {
    "code": "TRAP",
    "loadSql": "select code as k, to_jsonb(n) as v from trap where tenant_id = :tenantId",
    "apply": {
        "upsertSql": """
            insert into trap values (:tenantId, :key, spring(:payload->>'how', (:payload->>'n')::int),
                                     :payload->>'word', :payload->>'parent')
            on conflict (tenant_id, code) do update set n = excluded.n, word = excluded.word, parent = excluded.parent
        """,
        "deleteSql": "delete from trap where tenant_id = :tenantId and code = :key",
        "snapshotReplaceSql": "select 1 / 0, :tenantId, :snapshotJson",
    },
}
SQL_POISON = {
    "check": ({"n": -1}, "23514"),
    "not null": ({"word": "w"}, "23502"),
    "unique": ({"n": 1, "word": "taken"}, "23505"),
    "only seen at the commit": ({"n": 1, "parent": "none"}, "23503"),
    "division": ({"n": 1, "how": "divide"}, "22012"),
    "cast": ({"n": "many"}, "22P02"),
    "out of range": ({"n": 3_000_000_000}, "22003"),
    "no such function": ({"n": 1, "how": "function"}, "42883"),
    "raised": ({"n": 1, "how": "raise"}, "P0001"),
    "ends the transaction": ({"n": 1, "how": "commit"}, "2D000"),
}


@pytest.fixture
async def settings(database_url: str, bus_kind: str, request: pytest.FixtureRequest) -> Settings:
    """Yield the usual dictionaries and one whose statements fail; statements time out after a second."""
    await create_schemas(database_url)
    connection = await asyncpg.connect(database_url)
    await connection.execute(TRAPS)
    await connection.close()
    broker = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    known = refdata_settings(database_url, broker, dictionaries=[*dictionaries(DOCUMENT), *dictionaries(OTHER), TRAP])
    return known.model_copy(update={"database": known.database.model_copy(update={"statement_timeout": SECOND})})


@pytest.fixture
async def harness(settings: Settings) -> AsyncIterator[RefdataHarness]:
    async with opened(settings) as harness:
        yield harness


async def outcomes(harness: RefdataHarness, *event_ids: UUID, tenant: str = "acme") -> list[Any]:
    """Return the version of each command, or the code of its failure."""
    updates = [await harness.update(event_id, tenant) for event_id in event_ids]
    return [update.committed_version or update.error_code for update in updates]


async def versions(harness: RefdataHarness, code: str) -> list[int]:
    """Return the announced versions, in order."""
    rows = await harness.db.fetch("SELECT version FROM outbox_event WHERE dict_code = $1 ORDER BY id", code)
    return [row["version"] for row in rows]


def poison(**more: Any) -> tuple[UUID, bytes]:
    """Return a command for LOOSE as it is on the bus, with an invalid part."""
    event_id = uuid4()
    body = {"eventId": str(event_id), "tenantId": "acme", "dictCode": "LOOSE", "eventType": "DELTA", "items": []}
    return event_id, msgspec.json.encode({**body, **more})


async def test_an_unreadable_message_is_a_dead_letter(harness: RefdataHarness) -> None:
    """R11: a message without a readable identity becomes a dead letter with the reason; the others are applied."""
    unreadable = {
        b"": "MALFORMED: the body is not JSON",
        b"{": "MALFORMED: the body is not JSON",
        b"\xff\xfe": "MALFORMED: the body is not UTF-8",
        b"[]": "MALFORMED: Expected `object`",
        b"null": "MALFORMED: Expected `object`",
        b'{"items":[{"key":"a","payload":' + b"[" * 100_000: "MALFORMED: the body is not JSON",
        poison(tenantId="a/b")[1]: "MALFORMED: Expected `str` matching regex",
        poison(tenantId=None)[1]: "MALFORMED: tenantId is missing",
        poison(eventId="7")[1]: "MALFORMED: Invalid UUID - at `$.eventId`",
        poison(dictCode=7)[1]: "MALFORMED: Expected `str`, got `int` - at `$.dictCode`",
        poison(dictCode="'; DROP TABLE trap; --")[1]: "MALFORMED: Expected `str` matching regex",
        command("LOOSE", upsert("a", 1)): "MALFORMED: tenantId is missing",
        poison(items=[upsert("a", "X")])[1].replace(b"X", b"\\ud800"): "MALFORMED: the body is not JSON",
        poison(items=[upsert("X", 1)])[1].replace(b"X", b"\\udc00"): "MALFORMED: the body is not JSON",
        poison(items=[upsert("a", "X")])[1].replace(b"X", b"\0"): "MALFORMED: the body is not JSON",
    }
    good = [await harness.send("LOOSE", upsert("a", 0))]
    for number, value in enumerate(unreadable, start=1):
        await harness.publish(value)
        good.append(await harness.send("LOOSE", upsert("a", number)))
    assert await harness.apply() == len(good) + len(unreadable)
    assert await outcomes(harness, *good) == list(range(1, len(good) + 1))
    dead = await harness.dead()
    assert len(dead) == len(unreadable)
    assert [d for d, reason in zip(dead, unreadable.values(), strict=True) if not d.startswith(reason)] == []
    assert await harness.items("LOOSE") == {"a": len(unreadable)}


async def test_what_is_refused_fails_under_its_id(harness: RefdataHarness) -> None:
    """R11: an invalid message with a readable identity is FAILED with a stable code and a reason, and a dead letter."""
    far = {"key": "k" * 513, "payload": 1}
    event_id, value = poison(items=[upsert("a", "X")])
    refused = [
        ("MALFORMED", "acme:LOOSE", (event_id, value.replace(b"X", b"\xff"))),
        ("MALFORMED", "acme:LOOSE", poison(extra=1)),
        ("MALFORMED", "acme:LOOSE", poison(eventType="MERGE")),
        ("MALFORMED", "acme:LOOSE", poison(items={"key": "a"})),
        ("MALFORMED", "acme:LOOSE", poison(items=[{"key": 1, "payload": 1}])),
        ("MALFORMED", "acme:LOOSE", poison(items=[{"key": "", "payload": 1}])),
        ("MALFORMED", "acme:LOOSE", poison(items=[far])),
        ("MALFORMED", "acme:LOOSE", poison(items=[{"key": "a"}])),
        ("MALFORMED", "acme:LOOSE", poison(items=[upsert("a", "\0")])),
        ("MALFORMED", "acme:LOOSE", poison(items=[upsert("\0", 1)])),
        ("MALFORMED", "acme:LOOSE", poison(sourceRevision=2**63)),
        ("MALFORMED", "acme:LOOSE", poison(occurredAt="yesterday")),
        ("MALFORMED", "acme:LOOSE", poison(occurredAt="0001-01-01T00:00:00+01:00")),
        ("BAD_CHUNK", "acme:LOOSE", poison(chunksTotal=3)),
        ("DUPLICATE_KEY", "acme:LOOSE", poison(eventType="SNAPSHOT", items=[upsert("a", 1), upsert("a", 2)])),
        ("COMMAND_TOO_LARGE", "acme:LOOSE", poison(items=[upsert("a", "x" * (COMMAND_LIMIT + 10_000))])),
        ("UNKNOWN_DICTIONARY", "acme:NONE", poison(dictCode="NONE")),
        ("DICTIONARY_DISABLED", "acme:OFF", poison(dictCode="OFF")),
        ("DICTIONARY_READ_ONLY", "acme:BRAND", poison(dictCode="BRAND")),
        ("KEY_MISMATCH", "acme:TRAP", poison(items=[upsert("a", 1)])),
        ("KEY_MISMATCH", "acme:LOOSE:", poison(items=[upsert("a", 1)])),
    ]
    good = [await harness.send("LOOSE", upsert("a", 0))]
    for _, key, (_, value) in refused:
        await harness.publish(value, key)
        good.append(await harness.send("LOOSE", upsert("a", len(good))))
    await harness.apply()
    assert await outcomes(harness, *[event_id for _, _, (event_id, _) in refused]) == [code for code, _, _ in refused]
    messages = [(await harness.update(event_id)).error_message for _, _, (event_id, _) in refused]
    assert all(message and len(message) < 1_000 and message.isprintable() for message in messages)
    assert await outcomes(harness, *good) == await versions(harness, "LOOSE") == list(range(1, len(good) + 1))
    assert sorted(reason.partition(":")[0] for reason in await harness.dead()) == sorted(code for code, _, _ in refused)


async def test_an_unknown_tenant_fails(harness: RefdataHarness) -> None:
    """R11: a tenant that is not configured gets no data, not even a version."""
    value, key = on_bus(command("LOOSE", upsert("a", 1)), "umbrella", event_id := uuid4())
    await harness.publish(value, key)
    await harness.apply()
    assert await outcomes(harness, event_id, tenant="umbrella") == ["UNKNOWN_TENANT"]
    assert await harness.db.fetch("SELECT FROM dictionary_meta WHERE tenant_id = 'umbrella'") == []


async def test_a_name_ends_where_it_ends(harness: RefdataHarness) -> None:
    """R11: a line break after the name of a tenant does not make another name."""
    await harness.publish(poison(tenantId="acme\n")[1], "acme\n:LOOSE")
    await harness.apply()
    assert (await harness.dead())[0].startswith("MALFORMED")


async def test_failures_of_the_users_sql(harness: RefdataHarness) -> None:
    """R11: a command whose statement fails is FAILED alone, with the code and the message of PostgreSQL."""
    good = [await harness.send("TRAP", upsert("first", {"n": 0, "word": "taken"}))]
    bad: dict[str, UUID] = {}
    for name, (payload, _) in SQL_POISON.items():
        bad[name] = await harness.send("TRAP", upsert("fine", {"n": 9}), upsert(name, payload))
        good.append(await harness.send("TRAP", upsert("last", {"n": len(good)})))
    await harness.apply()
    updates = {name: await harness.update(event_id) for name, event_id in bad.items()}
    assert {name: (update.error_code, (update.error_message or "")[:5]) for name, update in updates.items()} == {
        name: ("SQL_ERROR", state) for name, (_, state) in SQL_POISON.items()
    }
    assert "no change on a Sunday" in (updates["raised"].error_message or "")
    assert await outcomes(harness, *good) == await versions(harness, "TRAP") == list(range(1, len(good) + 1))
    assert await harness.items("TRAP") == {"first": 0, "last": len(SQL_POISON)}
    assert len(await harness.dead()) == len(SQL_POISON)


async def test_a_snapshot_that_cannot_be_applied_fails(harness: RefdataHarness) -> None:
    """R11, R13: a SNAPSHOT whose statement fails changes nothing, and the next DELTA follows the last version."""
    before = await harness.send("TRAP", upsert("a", {"n": 1}))
    bad = await harness.send("TRAP", upsert("b", {"n": 1}), event_type="SNAPSHOT")
    after = await harness.send("TRAP", upsert("c", {"n": 1}))
    await harness.apply()
    assert await outcomes(harness, before, bad, after) == [1, "SQL_ERROR", 2]
    assert sorted(await harness.items("TRAP")) == ["a", "c"]


@pytest.mark.full
async def test_many_bad_ones_among_two_hundred(harness: RefdataHarness) -> None:
    """R11: in a batch of 200 every invalid command fails and every valid one commits, in order and without a gap."""
    is_bad = [number % 7 == 0 or 90 <= number < 110 for number in range(200)]
    ids = [uuid4() for _ in is_bad]
    body = [command("TRAP", upsert(f"k{n % 5}", {"n": -1 if bad else n})) for n, bad in enumerate(is_bad)]
    for event_id, value in zip(ids, body, strict=True):
        await harness.publish(*on_bus(value, event_id=event_id))
    await harness.apply()
    numbers = iter(range(1, 201))
    assert await outcomes(harness, *ids) == ["SQL_ERROR" if bad else next(numbers) for bad in is_bad]
    last = {f"k{n % 5}": n for n, bad in enumerate(is_bad) if not bad}
    assert await harness.items("TRAP") == last
    assert await harness.version("TRAP") == len(await versions(harness, "TRAP")) == 200 - sum(is_bad)


async def test_what_works_once_per_transaction_works(harness: RefdataHarness) -> None:
    """R11: a statement that cannot run twice in a transaction, e.g. for a temporary table, blocks no command."""
    ids = [await harness.send("TRAP", upsert(f"k{n}", {"n": n, "how": "twice"})) for n in range(5)]
    await harness.apply()
    assert await outcomes(harness, *ids) == [1, 2, 3, 4, 5]


async def test_injection_changes_nothing_but_data(harness: RefdataHarness) -> None:
    """R3: SQL in keys and payloads is text and is never executed."""
    nasty = ["'; DROP TABLE mdm_country; --", "$1", ":key", "\\'", '"', "$$", "%s", "{0}", "a\nb", "Ω\u202e", "/*"]
    await harness.send("COUNTRY", *[upsert(text, {"name": text}) for text in nasty])
    await harness.send("LOOSE", *[upsert(text, {text: text}) for text in nasty])
    await harness.send("LOOSE", delete("' OR '1'='1"))
    await harness.apply()
    assert {key: value["name"] for key, value in (await harness.items("COUNTRY")).items()} == {t: t for t in nasty}
    assert await harness.items("LOOSE") == {text: {text: text} for text in nasty}
    assert await harness.dead() == []


async def test_an_older_revision_is_refused(harness: RefdataHarness) -> None:
    """R12: a lower revision is FAILED STALE_REVISION, an equal one is accepted, a missing one changes nothing."""
    revisions = [5, 5, 4, None, 4, -7, 6, None, 5, 6]
    ids = []
    for n, revision in enumerate(revisions):
        more: Json = {} if revision is None else {"sourceRevision": revision}
        ids.append(await harness.send("LOOSE", upsert("a", n), **more))
    other = await harness.send("LOOSE", upsert("a", 1), tenant="globex", sourceRevision=1)
    await harness.apply()
    stale = "STALE_REVISION"
    assert await outcomes(harness, *ids) == [1, 2, stale, 3, stale, stale, 4, 5, stale, 6]
    assert await outcomes(harness, other, tenant="globex") == [1]
    assert "4 is lower than 5" in ((await harness.update(ids[2])).error_message or "")
    assert await harness.items("LOOSE") == {"a": 9}


async def test_a_statement_that_takes_too_long_fails_in_the_end(harness: RefdataHarness) -> None:
    """R11: it is tried max_attempts times, then FAILED STATEMENT_TIMEOUT; the commands behind it are applied."""
    slow = await harness.send("TRAP", upsert("slow", {"n": 1, "how": "slow"}))
    after = await harness.send("TRAP", upsert("a", {"n": 1}))
    await harness.apply(max_attempts=2)
    assert await outcomes(harness, slow, after) == ["STATEMENT_TIMEOUT", 1]
    assert [reason.partition(":")[0] for reason in await harness.dead()] == ["STATEMENT_TIMEOUT"]


async def test_what_is_before_a_slow_statement_is_not_blamed(harness: RefdataHarness) -> None:
    """R11: the commands before a slow one are committed; only the slow one is retried and dead-lettered."""
    before = [await harness.send("TRAP", upsert(f"k{n}", {"n": n})) for n in range(3)]
    slow = await harness.send("TRAP", upsert("slow", {"n": 1, "how": "slow"}))
    after = await harness.send("TRAP", upsert("a", {"n": 1}))
    async with asyncio.timeout(60):
        await harness.apply(max_attempts=2)
    assert await outcomes(harness, *before, slow, after) == [1, 2, 3, "STATEMENT_TIMEOUT", 4]
    assert [reason.partition(":")[0] for reason in await harness.dead()] == ["STATEMENT_TIMEOUT"]
