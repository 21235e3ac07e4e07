"""The status report of the bus: topics with dead letters."""

from datetime import timedelta

from penstock.kernel.bus import BusDelivery, BusMessage, DeliveryPolicy
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.status import IssueSeverity, PartReport
from penstock.kernel.tasks.outcome import Failed
from penstock.overview import dead_letters
from penstock.overview.dead_letters import BusTopic, report_dead_letters

DAY = timedelta(days=1)


async def fail(bus: PostgresBus, topic: str, number: int) -> None:
    """Make *number* messages of *topic* dead letters."""
    await bus.publish([BusMessage(topic, "key", b"")] * number)
    async with bus.subscribe(topic, worker="w", policy=DeliveryPolicy()) as subscription:
        failed: list[BusDelivery] = []
        while len(failed) < number:
            taken = await subscription.take(number)
            await subscription.settle([(delivery, Failed("MALFORMED: not JSON")) for delivery in taken])
            failed += taken


async def test_dead_letters_are_an_issue(database_url: str, clock: ManualClock) -> None:
    """R10: recent dead letters are reported by topic, with their number, the age of the oldest and the next step."""
    async with Database.open(database_url, clock=clock) as db:
        bus = PostgresBus(db)
        topics = [
            BusTopic(bus, "theirs", "fix the mapping"),
            BusTopic(bus, "commands", "see the updates", IssueSeverity.LATE, DAY),
            BusTopic(bus, "quiet", "nothing to do"),
        ]

        async def report() -> PartReport:
            return await report_dead_letters(topics, clock.now())

        assert await report() == PartReport("0 dead letters in 3 topics", [])
        started = clock.now()
        await fail(bus, "theirs", 2)
        clock.advance(timedelta(hours=3))
        await fail(bus, "commands", 1)
        first = await report()
        assert first.summary == "3 dead letters in 3 topics"
        theirs, commands = first.issues
        assert (theirs.severity, theirs.subject, theirs.since) == (IssueSeverity.BROKEN, "theirs", started)
        assert theirs.problem == "2 dead letters within 7 days, the oldest 3 hours ago"
        assert theirs.hint == f"fix the mapping; {dead_letters.RUNBOOK}"
        assert (commands.severity, commands.subject) == (IssueSeverity.LATE, "commands")
        clock.advance(2 * DAY)
        assert [issue.subject for issue in (await report()).issues] == ["theirs"]
        clock.advance(5 * DAY)
        assert await report() == PartReport("0 dead letters in 3 topics", [])
