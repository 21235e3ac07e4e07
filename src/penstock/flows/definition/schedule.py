"""F16: the times of a schedule: cron expressions, time zones and missed times; without I/O."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from penstock.flows.definition.spec import ScheduleSpec
from penstock.kernel.errors import Invalid

BATCH = 1_000  # missed times that are returned together
GRACE = timedelta(seconds=60)  # a time within this period was not missed
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
# Periods in which the last missed time is searched, the shortest first, to avoid iterating over the minutes of years.
_SEARCH_PERIODS = [
    timedelta(hours=1),
    timedelta(days=1),
    timedelta(days=32),
    timedelta(days=366),
    timedelta(days=366 * 9),
]
_FULL_RANGES = ("0-59", "0-23")


def validate_schedule(schedule: ScheduleSpec) -> None:
    """Raise Invalid BAD_CRON or BAD_TIMEZONE if the schedule is not valid or never due."""
    zone = _load_zone(schedule.timezone)
    try:
        is_ever_due = any(True for _ in CronSim(_normalize_cron(schedule.cron), _EPOCH.astimezone(zone)))
    except CronSimError as error:
        raise _make_cron_error(schedule.cron, str(error)) from error
    if not is_ever_due:
        raise _make_cron_error(schedule.cron, "the date does not exist")


def list_due(schedule: ScheduleSpec, processed_until: datetime, now: datetime) -> Sequence[datetime]:
    """Return the times after *processed_until*, up to *now*, that need a run according to `catchUp`; in order.

    For `all`, at most the first BATCH times are returned; call again with the last of them to get the rest.
    """
    if schedule.catch_up == "all":
        return list(islice(_iterate_between(schedule, processed_until, now), BATCH))
    last = _find_last(schedule, processed_until, now)
    if last is None or (schedule.catch_up == "none" and now - last > GRACE):
        return []
    return [last]


def list_upcoming(schedule: ScheduleSpec, now: datetime, count: int) -> Sequence[datetime]:
    """Return the next *count* times after *now*."""
    return list(islice(_iterate_after(schedule, now), count))


def _find_last(schedule: ScheduleSpec, processed_until: datetime, now: datetime) -> datetime | None:
    """Return the last time after *processed_until*, up to *now*."""
    for span in [*(span for span in _SEARCH_PERIODS if now - span > processed_until), now - processed_until]:
        last = None
        for last in _iterate_between(schedule, now - span, now):  # noqa: B007 - only the last value is used
            pass
        if last is not None:
            return last
    return None


def _iterate_between(schedule: ScheduleSpec, after: datetime, upto: datetime) -> Iterator[datetime]:
    for moment in _iterate_after(schedule, after):
        if moment > upto:
            return
        yield moment


def _iterate_after(schedule: ScheduleSpec, after: datetime) -> Iterator[datetime]:
    for moment in CronSim(_normalize_cron(schedule.cron), after.astimezone(_load_zone(schedule.timezone))):
        # In the repeated hour of a clock change, cronsim may start with a time before *after*.
        if (time := moment.astimezone(UTC)) > after:
            yield time


def _normalize_cron(cron: str) -> str:
    """Return *cron* in a form that cronsim evaluates in local time, except if it is due every hour.

    In local time, a time that a clock change skips is due once, right after the change, and a repeated time is due
    only the first time. cronsim does so if neither the minutes nor the hours begin with a star.
    """
    fields = cron.split()
    if len(fields) != 5:
        raise CronSimError("it needs five fields: minute, hour, day of month, month, day of week")
    if fields[1] not in ("*", "*/1"):
        fields[:2] = [_expand_star(field, whole) for field, whole in zip(fields, _FULL_RANGES, strict=False)]
    return " ".join(fields)


def _expand_star(field: str, whole: str) -> str:
    return ",".join(whole + part[1:] if part.startswith("*") else part for part in field.split(","))


def _load_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # OSError: the name of a folder of zones
        hint = "use a name of the IANA database, e.g. Europe/Berlin"
        raise Invalid("BAD_TIMEZONE", f"time zone {name!r} does not exist", hint=hint, timezone=name) from error


def _make_cron_error(cron: str, problem: str) -> Invalid:
    hint = "use minute, hour, day of month, month and day of week, e.g. `30 6 * * MON-FRI`"
    return Invalid("BAD_CRON", f"{cron!r} is not a valid cron expression: {problem}", hint=hint, cron=cron)
