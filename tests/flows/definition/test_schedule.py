"""F16: schedules, against a plain model that goes through the minutes one by one."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.schedule import AT_ONCE, GRACE, checked, due, upcoming
from penstock.flows.definition.spec import ScheduleSpec
from penstock.kernel.errors import Invalid
from tests.support.soak import examples

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
ORDINARY = datetime(2026, 7, 1, tzinfo=UTC)
# The nights the clocks are changed in, and an ordinary one.
NIGHTS = {
    BERLIN: [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC), ORDINARY],
    NEW_YORK: [datetime(2026, 3, 8, 6, tzinfo=UTC), datetime(2026, 11, 1, 5, tzinfo=UTC), ORDINARY],
}


def members(field: str, least: int, most: int) -> set[int]:
    """The numbers a field of cron stands for."""
    found: set[int] = set()
    for part in field.split(","):
        term, _, every = part.partition("/")
        first, _, last = (f"{least}-{most}" if term == "*" else term).partition("-")
        upto = int(last) if last else most if every else int(first)
        found |= set(range(int(first), upto + 1, int(every or 1)))
    return found


def is_meant(cron: str, wall: datetime) -> bool:
    """Whether cron means this minute on the wall."""
    minute, hour, day, month, weekday = cron.split()
    is_day = wall.day in members(day, 1, 31)
    is_weekday = {wall.isoweekday(), wall.isoweekday() % 7} & members(weekday, 0, 7)
    on_day = is_day and is_weekday if "*" in (day[0], weekday[0]) else is_day or is_weekday
    return (
        wall.minute in members(minute, 0, 59)
        and wall.hour in members(hour, 0, 23)
        and wall.month in members(month, 1, 12)
        and bool(on_day)
    )


def model(cron: str, zone: str, after: datetime, upto: datetime) -> Iterator[datetime]:
    """Every minute after *after*, up to *upto*, in which cron is due."""
    goes_by_the_wall = not cron.split()[1].startswith("*") or "/" in cron.split()[1]
    moment = after.replace(second=0, microsecond=0)
    while moment <= upto:
        wall = moment.astimezone(ZoneInfo(zone))
        is_due = is_meant(cron, wall)
        if goes_by_the_wall:
            before = (moment - MINUTE).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
            skipped = (wall.replace(tzinfo=None) - before) // MINUTE - 1
            is_due = (is_due and not wall.fold) or any(
                is_meant(cron, before + MINUTE * n) for n in range(1, skipped + 1)
            )
        if is_due and moment > after:
            yield moment
        moment += MINUTE


def field_of(least: int, most: int) -> st.SearchStrategy[str]:
    number = st.integers(least, most)
    pairs = st.tuples(number, number).filter(lambda ends: ends[0] < ends[1])
    spans = pairs.map(lambda ends: f"{ends[0]}-{ends[1]}")
    stepped = st.tuples(st.just("*") | spans, st.integers(2, 20)).map(lambda both: f"{both[0]}/{both[1]}")
    return st.just("*") | st.lists(number.map(str) | spans | stepped, min_size=1, max_size=3).map(",".join)


def has_a_day(cron: str) -> bool:
    """Return whether a year has such a day; a schedule for the 31st of February is refused."""
    _, _, day, month, weekday = cron.split()
    year = (date(2024, 1, 1) + timedelta(days=n) for n in range(366))
    is_found = any(one.day in members(day, 1, 31) and one.month in members(month, 1, 12) for one in year)
    return is_found or "*" not in (day[0], weekday[0])


# Hours about the time the clocks are changed come often, days are mostly all.
CRONS = (
    st.tuples(
        field_of(0, 59),
        st.sampled_from(["*", "*/2", "1", "2", "3", "1-3", "2,3", "0-23/3"]) | field_of(0, 23),
        st.just("*") | field_of(1, 31),
        st.just("*") | field_of(1, 12),
        st.just("*") | field_of(0, 7),
    )
    .map(" ".join)
    .filter(has_a_day)
)


@st.composite
def spans(draw: st.DrawFn) -> tuple[str, datetime, datetime]:
    """A zone, and some hours about a night in it, to the second."""
    zone = draw(st.sampled_from([BERLIN, NEW_YORK]))
    begin = draw(st.sampled_from(NIGHTS[zone])) + timedelta(seconds=draw(st.integers(-40_000, 30_000)))
    return zone, begin, begin + timedelta(seconds=draw(st.integers(0, 100_000)))


@settings(max_examples=examples(80, soak=20_000))
@given(CRONS, spans())
@pytest.mark.soak
def test_what_is_due_is_what_the_minutes_say(cron: str, span: tuple[str, datetime, datetime]) -> None:
    """F16: each time comes just once, in every night of the year; `last` and `none` choose among the same."""
    zone, after, now = span
    expected = list(model(cron, zone, after, now))
    assert due(ScheduleSpec(cron=cron, timezone=zone, catch_up="all"), after, now) == expected[:AT_ONCE]
    assert due(ScheduleSpec(cron=cron, timezone=zone, catch_up="last"), after, now) == expected[-1:]
    fresh = [one for one in expected[-1:] if now - one <= GRACE]
    assert due(ScheduleSpec(cron=cron, timezone=zone, catch_up="none"), after, now) == fresh
    assert upcoming(ScheduleSpec(cron=cron, timezone=zone), after, len(expected))[:60] == expected[:60]


@settings(max_examples=examples(60, soak=5_000))
@given(CRONS, spans(), st.lists(st.integers(0, 100_000), max_size=8))
@pytest.mark.soak
def test_it_does_not_matter_how_often_one_looks(
    cron: str, span: tuple[str, datetime, datetime], looks: list[int]
) -> None:
    """F16: whoever keeps a schedule in many small looks starts the same runs as in a single one."""
    zone, after, now = span
    schedule = ScheduleSpec(cron=cron, timezone=zone, catch_up="all")
    whole = list(model(cron, zone, after, now))
    found: list[datetime] = []
    kept = after
    for look in [*sorted({min(after + timedelta(seconds=one), now) for one in looks}), now]:
        while times := due(schedule, kept, look):
            found += times
            kept = times[-1]
        kept = max(kept, look)
    assert found == whole


@pytest.mark.parametrize(
    ("zone", "night", "hour", "expected"),
    [
        (BERLIN, "2026-03-29", 2, "2026-03-29T01:00:00+00:00"),  # 02:30 is not there: at 03:00
        (BERLIN, "2026-10-25", 2, "2026-10-25T00:30:00+00:00"),  # 02:30 comes twice: the first
        (NEW_YORK, "2026-03-08", 2, "2026-03-08T07:00:00+00:00"),
        (NEW_YORK, "2026-11-01", 1, "2026-11-01T05:30:00+00:00"),
    ],
)
@pytest.mark.parametrize("cron", ["30 {} * * *", "*/30 {0}-{0} * * *"])
def test_a_time_that_is_missing_or_comes_twice_runs_once(
    cron: str, zone: str, night: str, hour: int, expected: str
) -> None:
    """F16: a schedule by the clock on the wall keeps to one run of each time when that clock is changed."""
    began = datetime.fromisoformat(night).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC) + (hour - 1) * HOUR
    schedule = ScheduleSpec(cron=cron.format(hour), timezone=zone, catch_up="all")
    found = [one.isoformat() for one in due(schedule, began, began + 2.9 * HOUR)]
    assert found.count(expected) == 1
    assert len(found) == (2 if "*/30" in cron and night > "2026-04" else 1)


def test_every_hour_is_every_hour() -> None:
    """F16: what is to run each hour, or each quarter of it, does so as time passes, whatever the clocks say."""
    begin = datetime(2026, 10, 24, 20, tzinfo=UTC)
    for cron, every in (("0 * * * *", HOUR), ("*/15 * * * *", 15 * MINUTE)):
        found = due(ScheduleSpec(cron=cron, timezone=BERLIN, catch_up="all"), begin, begin + 12 * HOUR)
        assert found == [begin + every * n for n in range(1, 12 * HOUR // every + 1)]


def test_what_nobody_saw_is_caught_up_with_as_it_says() -> None:
    """F16: after a year away there is nothing, the last, or everything, a thousand at a time and from the beginning."""
    kept, now = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
    minutely = ScheduleSpec(cron="* * * * *", catch_up="all")
    assert due(minutely, kept, now) == [kept + MINUTE * n for n in range(1, AT_ONCE + 1)]
    assert due(ScheduleSpec(cron="0 0 1 1 *", catch_up="last"), kept, now) == [now - 5 * MINUTE]
    assert due(ScheduleSpec(cron="0 0 2 1 *", catch_up="last"), kept, now) == [datetime(2025, 1, 2, tzinfo=UTC)]
    assert due(ScheduleSpec(cron="0 0 1 1 *", catch_up="none"), kept, now) == []
    assert due(ScheduleSpec(cron="5 0 1 1 *", catch_up="none"), kept, now + GRACE) == [now]
    assert due(ScheduleSpec(cron="5 0 1 1 *", catch_up="none"), kept, now + GRACE + timedelta(seconds=1)) == []


def test_what_was_kept_does_not_come_again() -> None:
    """F16: the time up to which a schedule was kept is not due any more, and what is yet to come is not due."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for how in ("none", "last", "all"):
        schedule = ScheduleSpec.model_validate({"cron": "0 12 * * *", "catchUp": how})
        assert due(schedule, noon - DAY, noon) == [noon]
        assert due(schedule, noon, noon + MINUTE) == []
        assert due(schedule, noon + MINUTE, noon) == []
        assert upcoming(schedule, noon, 2) == [noon + DAY, noon + 2 * DAY]


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "0 * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *",
     "5-1 * * * *", "every day", "@daily", "0 0 30 2 *", "0 0 31 2,4 *", "*5 * * * *", "0 *3 * * *", "-1 * * * *"],
)  # fmt: skip
def test_what_is_no_cron_is_refused(cron: str) -> None:
    """F16: an expression nobody can read, or that never comes, is told by its name."""
    with pytest.raises(Invalid) as refused:
        checked(ScheduleSpec.model_construct(cron=cron, timezone=BERLIN))
    assert (refused.value.code, refused.value.details["cron"]) == ("BAD_CRON", cron)


@pytest.mark.parametrize("zone", ["", "Europe", "Europe/Atlantis", "../etc/passwd", "/etc/localtime", "CET+1", "\0"])
def test_what_is_no_time_zone_is_refused(zone: str) -> None:
    """F16: a time zone nobody knows is told by its name."""
    with pytest.raises(Invalid) as refused:
        checked(ScheduleSpec.model_construct(cron="* * * * *", timezone=zone))
    assert (refused.value.code, refused.value.details["timezone"]) == ("BAD_TIMEZONE", zone)


@given(CRONS)
@settings(max_examples=examples(50, soak=5_000))
@pytest.mark.soak
def test_what_can_be_read_is_taken(cron: str) -> None:
    """F16: every expression the model understands is taken, but for days that never come."""
    try:
        checked(ScheduleSpec(cron=cron, timezone=NEW_YORK))
    except Invalid as error:
        assert "day" in error.message.lower()  # noqa: PT017 - most do not raise
