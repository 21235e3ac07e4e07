"""The settlement of a partition: whatever the outcomes are, no message overtakes an unsettled one."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.bus import BusDelivery, BusMessage, DeliveryPolicy
from penstock.kernel.bus.settlement import PartitionSettlement, settle
from penstock.kernel.tasks.outcome import REASON_LIMIT, Done, Failed, Outcome, Retry
from tests.support.soak import examples

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAX_ATTEMPTS = 3
DELIVERING = DeliveryPolicy(max_attempts=MAX_ATTEMPTS)

Results = Sequence[tuple[BusDelivery, Outcome | None]]

waits = st.none() | st.timedeltas(min_value=timedelta(0), max_value=timedelta(hours=1))
outcomes = st.one_of(st.none(), st.builds(Done), st.builds(Failed, st.text()), st.builds(Retry, st.text(), after=waits))


@st.composite
def batches(draw: st.DrawFn) -> Results:
    """Draw a batch like that of a take: mixed partitions, each in order, only the first message tried before."""
    partitions = draw(st.lists(st.integers(0, 3), max_size=20))
    seen: set[int] = set()
    results: list[tuple[BusDelivery, Outcome | None]] = []
    for position, partition in enumerate(partitions):
        attempt = 1 if partition in seen else draw(st.integers(1, MAX_ATTEMPTS))
        seen.add(partition)
        message = BusMessage("topic", f"key {partition}", b"")
        results.append((BusDelivery(message, attempt, partition, position, fence=partition + 7), draw(outcomes)))
    return results


def ends(delivery: BusDelivery, outcome: Outcome | None) -> bool:
    """Return whether a message has ended: done, failed, or out of attempts."""
    return isinstance(outcome, Done | Failed) or (outcome is not None and delivery.attempt >= MAX_ATTEMPTS)


def unfinished(lane: PartitionSettlement, results: Results) -> list[int]:
    of_lane = [delivery.position for delivery, _ in results if delivery.partition == lane.partition]
    return [position for position in of_lane if lane.head is not None and position >= lane.head]


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_every_message_is_either_finished_or_unfinished(results: Results) -> None:
    """R9, R11: each message of a batch is one of them, and each partition is settled once, under its fence."""
    lanes = settle(results, DELIVERING, NOW)
    assert sorted(lane.partition for lane in lanes) == sorted({delivery.partition for delivery, _ in results})
    assert all(lane.fence == lane.partition + 7 for lane in lanes)
    positions = [position for lane in lanes for position in [*lane.finished, *unfinished(lane, results)]]
    assert sorted(positions) == [delivery.position for delivery, _ in results]


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_nothing_after_the_first_open_message_is_finished(results: Results) -> None:
    """R9: a partition is finished exactly up to its first message that has not ended."""
    for lane in settle(results, DELIVERING, NOW):
        of_lane = [(delivery, outcome) for delivery, outcome in results if delivery.partition == lane.partition]
        open_ones = [delivery.position for delivery, outcome in of_lane if not ends(delivery, outcome)]
        assert lane.head == (open_ones[0] if open_ones else None)
        before = [d.position for d, _ in of_lane if lane.head is None or d.position < lane.head]
        assert lane.finished == before


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_dead_letters_are_finished_and_have_a_storable_reason(results: Results) -> None:
    """H6, R10: failed messages and those out of attempts are finished; their reason is text that can be stored."""
    outcomes = {delivery.position: outcome for delivery, outcome in results}
    for lane in settle(results, DELIVERING, NOW):
        assert [d.position for d, _ in lane.dead] == [p for p in lane.finished if not isinstance(outcomes[p], Done)]
        for delivery, reason in lane.dead:
            assert "\0" not in reason
            assert len(reason.encode()) <= 4 * REASON_LIMIT
            assert isinstance(outcomes[delivery.position], Failed) or reason.startswith("failed after")


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_the_head_has_its_attempts_and_its_due_time(results: Results) -> None:
    """H6: a retry counts and has a delay; an untouched message does not count and has no delay."""
    outcomes = {delivery.position: (delivery, outcome) for delivery, outcome in results}
    for lane in settle(results, DELIVERING, NOW):
        if lane.head is None:
            assert (lane.attempts, lane.due_at) == (0, None)
            continue
        delivery, outcome = outcomes[lane.head]
        if outcome is None:
            assert (lane.attempts, lane.due_at) == (delivery.attempt - 1, None)
        else:
            assert isinstance(outcome, Retry)
            assert lane.attempts == delivery.attempt
            assert lane.due_at is not None
            assert lane.due_at == NOW + outcome.after if outcome.after is not None else lane.due_at > NOW
