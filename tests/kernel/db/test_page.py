"""Keyset paging over a table that changes, and cursors that cannot cause damage."""

import base64
import contextlib
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.db.database import Database
from penstock.kernel.db.page import Page, decode_cursor, decode_start, encode_cursor, make_page
from penstock.kernel.errors import Invalid

TYPES = (datetime, int, str)
TIMES = st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=5, minutes=45))))
NUMBERS = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
READ = """
SELECT at, id FROM item
WHERE $1::timestamptz IS NULL OR (at, id) > ($1::timestamptz, $2::bigint)
ORDER BY at, id LIMIT $3 + 1
"""


async def read_page(db: Database, cursor: str | None, limit: int) -> Page[Any]:
    at, id_ = decode_start(cursor, (datetime, int), (None, None))
    return make_page(await db.fetch(READ, at, id_, limit), limit, lambda row: (row["at"], row["id"]))


async def test_paging_over_a_changing_table_misses_and_repeats_nothing(db: Database) -> None:
    """T5: rows are inserted and deleted meanwhile; each row that remained is on exactly one page."""
    await db.execute("CREATE TABLE item (id bigint PRIMARY KEY, at timestamptz NOT NULL)")
    # Ten rows share each time, and the first have -infinity: the time alone is not a key.
    await db.execute(
        "INSERT INTO item SELECT n * 10, CASE WHEN n < 20 THEN '-infinity' ELSE now() + n / 10 * '1 s'::interval END"
        " FROM generate_series(1, 200) AS n"
    )
    seen: list[int] = []
    cursor: str | None = None
    while True:
        page = await read_page(db, cursor, 7)
        seen += [row["id"] for row in page.items]
        if (cursor := page.next) is None:
            break
        await db.execute("DELETE FROM item WHERE id = $1", page.items[0]["id"])  # before the next page
        await db.execute("DELETE FROM item WHERE id = $1", page.items[-1]["id"])  # the row of the cursor
        await db.execute("INSERT INTO item VALUES ($1, '-infinity')", len(seen))  # before the next page
    assert [id_ for id_ in seen if id_ % 10 == 0] == list(range(10, 2001, 10))
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(("count", "items", "more"), [(0, 0, False), (1, 1, False), (3, 3, False), (4, 3, True)])
def test_a_page_knows_whether_there_is_more(count: int, items: int, more: bool) -> None:
    """T5: `next` exists exactly when a row beyond the limit was read, and points to the last item."""
    cut = make_page(list(range(count)), 3, lambda row: (row,))
    assert len(cut.items) == items
    assert cut.next == (encode_cursor([2]) if more else None)


@settings(deadline=None)
@given(TIMES, NUMBERS, NAMES)
def test_a_cursor_preserves_its_values(at: datetime, number: int, name: str) -> None:
    """T5: the values of a decoded cursor are the encoded ones, to the microsecond."""
    assert decode_cursor(encode_cursor((at, number, name)), TYPES) == (at, number, name)


@pytest.mark.parametrize("at", [datetime.min, datetime.max])  # noqa: DTZ901 - as asyncpg reads them
def test_a_cursor_carries_the_infinities(at: datetime) -> None:
    """T5: -infinity and infinity of PostgreSQL can be the values of a cursor."""
    assert decode_cursor(encode_cursor([at]), [datetime]) == (at,)


@settings(deadline=None)
@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_an_invalid_cursor_is_refused(cursor: str) -> None:
    """T5: any text that a caller sends leads at worst to Invalid BAD_CURSOR."""
    with pytest.raises(Invalid) as refused:
        decode_cursor(cursor, TYPES)
    assert refused.value.code == "BAD_CURSOR"


def test_a_page_starts_at_the_beginning_or_after_a_cursor() -> None:
    """T5: no cursor means the first page; an empty cursor is invalid."""
    assert decode_start(None, [int, str], (0, "")) == (0, "")
    assert decode_start(encode_cursor([7, "a"]), [int, str], (0, "")) == (7, "a")
    with pytest.raises(Invalid) as refused:
        decode_start("", [int, str], (0, ""))
    assert refused.value.code == "BAD_CURSOR"


def test_a_cursor_carries_an_id() -> None:
    """T5: a UUID can be a value of a cursor."""
    assert decode_cursor(encode_cursor([UUID(int=7)]), [UUID]) == (UUID(int=7),)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | TIMES.map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.lists(JSON, max_size=4) | JSON)
def test_a_forged_cursor_has_values_of_the_right_types(values: Any) -> None:
    """T5: a forged cursor has values of exactly these types, or is refused."""
    cursor = base64.urlsafe_b64encode(orjson.dumps(values)).decode()
    with contextlib.suppress(Invalid):
        assert tuple(type(value) for value in decode_cursor(cursor, TYPES)) == TYPES


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True], int),
        ([1], bool),
        ([1.0], int),
        (["1"], int),
        ([None], str),
        ([1, 2], int),
        ([], int),
        ([1], datetime),
        (["yesterday"], datetime),
        (["2026-01-01T00:00:00"], datetime),
        (["0001-01-01T00:00:00+14:00"], datetime),
        (["9999-12-31T23:59:59-14:00"], datetime),
        ([2**63], int),
        (["a\0b"], str),
        (["a"], UUID),
        ([7], UUID),
        (["a" * 4000], str),
    ],
)
def test_a_value_of_another_type_or_too_large_for_postgresql_is_refused(values: list[Any], kind: type) -> None:
    """T5: a bool is not an int, and a value that PostgreSQL cannot store is an error of the caller."""
    with pytest.raises(Invalid) as refused:
        decode_cursor(encode_cursor(values), [kind])
    assert refused.value.code == "BAD_CURSOR"


@pytest.mark.parametrize("values", [{"a": 1}, "a", 5, None])
def test_a_cursor_that_is_not_a_list_is_refused(values: Any) -> None:
    """T5: JSON other than a list is refused, even if Python can iterate over it."""
    with pytest.raises(Invalid):
        decode_cursor(base64.urlsafe_b64encode(orjson.dumps(values)).decode(), [str])
