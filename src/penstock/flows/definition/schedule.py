"""F16: when a flow is due by itself. A pure matter: cron, a time zone, and what became of times nobody saw."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from penstock.flows.definition.spec import ScheduleSpec
from penstock.kernel.errors import Invalid

AT_ONCE = 1_000  # missed times that are told together
GRACE = timedelta(seconds=60)  # a time that passed so long ago was not missed
_SOME_DAY = datetime(2000, 1, 1, tzinfo=UTC)
# How far back the last missed time is looked for, nearest first: nobody goes through the minutes of years.
_LOOKS = [timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=366), timedelta(days=366 * 9)]
_WHOLE = ("0-59", "0-23")


def checked(schedule: ScheduleSpec) -> None:
    """Invalid BAD_CRON or BAD_TIMEZONE when nothing could ever come of it."""
    zone = _zone(schedule.timezone)
    try:
        is_ever_due = any(True for _ in CronSim(_expression(schedule.cron), _SOME_DAY.astimezone(zone)))
    except CronSimError as error:
        raise _bad_cron(schedule.cron, str(error)) from error
    if not is_ever_due:
        raise _bad_cron(schedule.cron, "no such day ever comes")


def due(schedule: ScheduleSpec, kept_until: datetime, now: datetime) -> Sequence[datetime]:
    """The times after *kept_until*, up to *now*, a run is to be started for, as `catchUp` says; in order.

    Of `all` there are at most AT_ONCE, the earliest: whoever keeps the schedule up to the last of them gets the rest.
    """
    if schedule.catch_up == "all":
        return list(islice(_between(schedule, kept_until, now), AT_ONCE))
    last = _last(schedule, kept_until, now)
    if last is None or (schedule.catch_up == "none" and now - last > GRACE):
        return []
    return [last]


def upcoming(schedule: ScheduleSpec, now: datetime, count: int) -> Sequence[datetime]:
    """The next *count* times after *now*."""
    return list(islice(_after(schedule, now), count))


def _last(schedule: ScheduleSpec, kept_until: datetime, now: datetime) -> datetime | None:
    """The last time after *kept_until*, up to *now*."""
    for span in [*(span for span in _LOOKS if now - span > kept_until), now - kept_until]:
        last = None
        for last in _between(schedule, now - span, now):  # noqa: B007 - the last is wanted
            pass
        if last is not None:
            return last
    return None


def _between(schedule: ScheduleSpec, after: datetime, upto: datetime) -> Iterator[datetime]:
    for moment in _after(schedule, after):
        if moment > upto:
            return
        yield moment


def _after(schedule: ScheduleSpec, after: datetime) -> Iterator[datetime]:
    for moment in CronSim(_expression(schedule.cron), after.astimezone(_zone(schedule.timezone))):
        # In the hour that comes twice it may begin with the first one, although it is the second.
        if (found := moment.astimezone(UTC)) > after:
            yield found


def _expression(cron: str) -> str:
    """*cron* so that cronsim goes by the clock on the wall, unless it says every hour: that is meant as time passes.

    By the wall a time that does not exist comes once, when the clock has been put forward, and one that comes twice
    counts the first time. cronsim does so where neither minutes nor hours begin with a star.
    """
    fields = cron.split()
    if len(fields) != 5:
        raise CronSimError("it has five fields: minute, hour, day of month, month, day of week")
    if fields[1] not in ("*", "*/1"):
        fields[:2] = [_spelt_out(field, whole) for field, whole in zip(fields, _WHOLE, strict=False)]
    return " ".join(fields)


def _spelt_out(field: str, whole: str) -> str:
    return ",".join(whole + part[1:] if part.startswith("*") else part for part in field.split(","))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # a folder of zones is no zone
        hint = "a name of the IANA database, such as Europe/Berlin"
        raise Invalid("BAD_TIMEZONE", f"there is no time zone {name!r}", hint=hint, timezone=name) from error


def _bad_cron(cron: str, why: str) -> Invalid:
    hint = "such as `30 6 * * MON-FRI`: minute, hour, day of month, month, day of week"
    return Invalid("BAD_CRON", f"{cron!r} is no cron expression: {why}", hint=hint, cron=cron)
