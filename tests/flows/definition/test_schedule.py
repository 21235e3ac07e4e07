"""F16: schedules, compared with a simple model that checks every minute."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.schedule import BATCH, GRACE, list_due, list_upcoming, validate_schedule
from penstock.flows.definition.spec import ScheduleSpec
from penstock.kernel.errors import Invalid
from tests.support.soak import examples

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
ORDINARY = datetime(2026, 7, 1, tzinfo=UTC)
# The nights with a clock change, and a normal night.
NIGHTS = {
    BERLIN: [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC), ORDINARY],
    NEW_YORK: [datetime(2026, 3, 8, 6, tzinfo=UTC), datetime(2026, 11, 1, 5, tzinfo=UTC), ORDINARY],
}


def members(field: str, least: int, most: int) -> set[int]:
    """Return the numbers that a field of a cron expression matches."""
    numbers: set[int] = set()
    for part in field.split(","):
        term, _, every = part.partition("/")
        first, _, last = (f"{least}-{most}" if term == "*" else term).partition("-")
        upto = int(last) if last else most if every else int(first)
        numbers |= set(range(int(first), upto + 1, int(every or 1)))
    return numbers


def matches(cron: str, wall: datetime) -> bool:
    """Return whether the cron expression matches a minute of local time."""
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
    """Yield every minute after *after*, up to *upto*, in which cron is due."""
    is_local_time = not cron.split()[1].startswith("*") or "/" in cron.split()[1]
    moment = after.replace(second=0, microsecond=0)
    while moment <= upto:
        wall = moment.astimezone(ZoneInfo(zone))
        is_due = matches(cron, wall)
        if is_local_time:
            before = (moment - MINUTE).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
            skipped = (wall.replace(tzinfo=None) - before) // MINUTE - 1
            is_due = (is_due and not wall.fold) or any(
                matches(cron, before + MINUTE * n) for n in range(1, skipped + 1)
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
    """Return whether the date exists; a schedule for the 31st of February is refused."""
    _, _, day, month, weekday = cron.split()
    year = (date(2024, 1, 1) + timedelta(days=n) for n in range(366))
    exists = any(d.day in members(day, 1, 31) and d.month in members(month, 1, 12) for d in year)
    return exists or "*" not in (day[0], weekday[0])


# Prefer hours around clock changes, and every day.
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
    """Draw a time zone, and a period around one of its nights."""
    zone = draw(st.sampled_from([BERLIN, NEW_YORK]))
    start = draw(st.sampled_from(NIGHTS[zone])) + timedelta(seconds=draw(st.integers(-40_000, 30_000)))
    return zone, start, start + timedelta(seconds=draw(st.integers(0, 100_000)))


@settings(max_examples=examples(80, soak=20_000))
@given(CRONS, spans())
@pytest.mark.soak
def test_due_times_equal_the_model(cron: str, span: tuple[str, datetime, datetime]) -> None:
    """F16: each time is due exactly once, in every night; `last` and `none` choose among the same times."""
    zone, after, now = span
    expected = list(model(cron, zone, after, now))
    assert list_due(ScheduleSpec(cron=cron, timezone=zone, catch_up="all"), after, now) == expected[:BATCH]
    assert list_due(ScheduleSpec(cron=cron, timezone=zone, catch_up="last"), after, now) == expected[-1:]
    fresh = [time for time in expected[-1:] if now - time <= GRACE]
    assert list_due(ScheduleSpec(cron=cron, timezone=zone, catch_up="none"), after, now) == fresh
    assert list_upcoming(ScheduleSpec(cron=cron, timezone=zone), after, len(expected))[:60] == expected[:60]


@settings(max_examples=examples(60, soak=5_000))
@given(CRONS, spans(), st.lists(st.integers(0, 100_000), max_size=8))
@pytest.mark.soak
def test_due_times_do_not_depend_on_the_polls(
    cron: str, span: tuple[str, datetime, datetime], polls: list[int]
) -> None:
    """F16: many polls of a schedule return the same times as a single poll."""
    zone, after, now = span
    schedule = ScheduleSpec(cron=cron, timezone=zone, catch_up="all")
    whole = list(model(cron, zone, after, now))
    due: list[datetime] = []
    processed = after
    for poll in [*sorted({min(after + timedelta(seconds=offset), now) for offset in polls}), now]:
        while times := list_due(schedule, processed, poll):
            due += times
            processed = times[-1]
        processed = max(processed, poll)
    assert due == whole


@pytest.mark.parametrize(
    ("zone", "night", "hour", "expected"),
    [
        (BERLIN, "2026-03-29", 2, "2026-03-29T01:00:00+00:00"),  # 02:30 does not exist: due at 03:00
        (BERLIN, "2026-10-25", 2, "2026-10-25T00:30:00+00:00"),  # 02:30 is repeated: due the first time
        (NEW_YORK, "2026-03-08", 2, "2026-03-08T07:00:00+00:00"),
        (NEW_YORK, "2026-11-01", 1, "2026-11-01T05:30:00+00:00"),
    ],
)
@pytest.mark.parametrize("cron", ["30 {} * * *", "*/30 {0}-{0} * * *"])
def test_skipped_or_repeated_time_runs_once(cron: str, zone: str, night: str, hour: int, expected: str) -> None:
    """F16: a schedule in local time has one run for each time, also on days with a clock change."""
    start = datetime.fromisoformat(night).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC) + (hour - 1) * HOUR
    schedule = ScheduleSpec(cron=cron.format(hour), timezone=zone, catch_up="all")
    due = [time.isoformat() for time in list_due(schedule, start, start + 2.9 * HOUR)]
    assert due.count(expected) == 1
    assert len(due) == (2 if "*/30" in cron and night > "2026-04" else 1)


def test_hourly_schedule_ignores_clock_changes() -> None:
    """F16: an hourly schedule is due every hour of real time, also during a clock change."""
    start = datetime(2026, 10, 24, 20, tzinfo=UTC)
    for cron, every in (("0 * * * *", HOUR), ("*/15 * * * *", 15 * MINUTE)):
        due = list_due(ScheduleSpec(cron=cron, timezone=BERLIN, catch_up="all"), start, start + 12 * HOUR)
        assert due == [start + every * n for n in range(1, 12 * HOUR // every + 1)]


def test_missed_times() -> None:
    """F16: after a year of downtime no time, the last, or all times are due, in batches from the oldest."""
    processed, now = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
    minutely = ScheduleSpec(cron="* * * * *", catch_up="all")
    assert list_due(minutely, processed, now) == [processed + MINUTE * n for n in range(1, BATCH + 1)]
    assert list_due(ScheduleSpec(cron="0 0 1 1 *", catch_up="last"), processed, now) == [now - 5 * MINUTE]
    assert list_due(ScheduleSpec(cron="0 0 2 1 *", catch_up="last"), processed, now) == [
        datetime(2025, 1, 2, tzinfo=UTC)
    ]
    assert list_due(ScheduleSpec(cron="0 0 1 1 *", catch_up="none"), processed, now) == []
    assert list_due(ScheduleSpec(cron="5 0 1 1 *", catch_up="none"), processed, now + GRACE) == [now]
    assert (
        list_due(ScheduleSpec(cron="5 0 1 1 *", catch_up="none"), processed, now + GRACE + timedelta(seconds=1)) == []
    )


def test_processed_times_are_not_due_again() -> None:
    """F16: times up to the processed time, and future times, are not due."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for catch_up in ("none", "last", "all"):
        schedule = ScheduleSpec.model_validate({"cron": "0 12 * * *", "catchUp": catch_up})
        assert list_due(schedule, noon - DAY, noon) == [noon]
        assert list_due(schedule, noon, noon + MINUTE) == []
        assert list_due(schedule, noon + MINUTE, noon) == []
        assert list_upcoming(schedule, noon, 2) == [noon + DAY, noon + 2 * DAY]


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "0 * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *",
     "5-1 * * * *", "every day", "@daily", "0 0 30 2 *", "0 0 31 2,4 *", "*5 * * * *", "0 *3 * * *", "-1 * * * *"],
)  # fmt: skip
def test_invalid_cron_is_refused(cron: str) -> None:
    """F16: an expression that is invalid, or never due, raises BAD_CRON with the expression."""
    with pytest.raises(Invalid) as caught:
        validate_schedule(ScheduleSpec.model_construct(cron=cron, timezone=BERLIN))
    assert (caught.value.code, caught.value.details["cron"]) == ("BAD_CRON", cron)


@pytest.mark.parametrize("zone", ["", "Europe", "Europe/Atlantis", "../etc/passwd", "/etc/localtime", "CET+1", "\0"])
def test_invalid_time_zone_is_refused(zone: str) -> None:
    """F16: an unknown time zone raises BAD_TIMEZONE with its name."""
    with pytest.raises(Invalid) as caught:
        validate_schedule(ScheduleSpec.model_construct(cron="* * * * *", timezone=zone))
    assert (caught.value.code, caught.value.details["timezone"]) == ("BAD_TIMEZONE", zone)


@given(CRONS)
@settings(max_examples=examples(50, soak=5_000))
@pytest.mark.soak
def test_valid_cron_is_accepted(cron: str) -> None:
    """F16: every expression of the model is accepted, except dates that do not exist."""
    try:
        validate_schedule(ScheduleSpec(cron=cron, timezone=NEW_YORK))
    except Invalid as error:
        assert "day" in error.message.lower()  # noqa: PT017 - most do not raise
