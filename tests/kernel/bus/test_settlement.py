"""What a partition's outcomes come to, as pure code: whatever they are, nothing overtakes what is not ended."""

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
    """A batch as a take gives it: some partitions mixed, each in order, only its first tried before."""
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
    """Whether a message is over: done, failed, or tried often enough."""
    return isinstance(outcome, Done | Failed) or (outcome is not None and delivery.attempt >= MAX_ATTEMPTS)


def kept(lane: PartitionSettlement, results: Results) -> list[int]:
    of_lane = [delivery.position for delivery, _ in results if delivery.partition == lane.partition]
    return [position for position in of_lane if lane.head is not None and position >= lane.head]


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_every_message_is_either_finished_or_kept(results: Results) -> None:
    """R9, R11: each message of a batch is one of the two, and each partition is settled once, under its fence."""
    lanes = settle(results, DELIVERING, NOW)
    assert sorted(lane.partition for lane in lanes) == sorted({delivery.partition for delivery, _ in results})
    assert all(lane.fence == lane.partition + 7 for lane in lanes)
    told = [position for lane in lanes for position in [*lane.finished, *kept(lane, results)]]
    assert sorted(told) == [delivery.position for delivery, _ in results]


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_nothing_after_the_first_open_message_is_finished(results: Results) -> None:
    """R9: a partition is finished exactly up to its first message that did not end."""
    for lane in settle(results, DELIVERING, NOW):
        of_lane = [(delivery, outcome) for delivery, outcome in results if delivery.partition == lane.partition]
        open_ones = [delivery.position for delivery, outcome in of_lane if not ends(delivery, outcome)]
        assert lane.head == (open_ones[0] if open_ones else None)
        before = [d.position for d, _ in of_lane if lane.head is None or d.position < lane.head]
        assert lane.finished == before


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_the_dead_are_finished_and_have_a_reason_every_store_can_keep(results: Results) -> None:
    """H6, R10: what failed, or was tried too often, is among the finished; its reason is text without surprises."""
    told = {delivery.position: outcome for delivery, outcome in results}
    for lane in settle(results, DELIVERING, NOW):
        assert [d.position for d, _ in lane.dead] == [p for p in lane.finished if not isinstance(told[p], Done)]
        for delivery, reason in lane.dead:
            assert "\0" not in reason
            assert len(reason.encode()) <= 4 * REASON_LIMIT
            assert isinstance(told[delivery.position], Failed) or reason.startswith("failed after")


@pytest.mark.soak
@settings(max_examples=examples(200, soak=5_000))
@given(batches())
def test_the_head_remembers_its_attempts_and_when_it_is_due(results: Results) -> None:
    """H6: a retry counts and waits; what was given back untouched counts for nothing and does not wait."""
    told = {delivery.position: (delivery, outcome) for delivery, outcome in results}
    for lane in settle(results, DELIVERING, NOW):
        if lane.head is None:
            assert (lane.attempts, lane.due_at) == (0, None)
            continue
        delivery, outcome = told[lane.head]
        if outcome is None:
            assert (lane.attempts, lane.due_at) == (delivery.attempt - 1, None)
        else:
            assert isinstance(outcome, Retry)
            assert lane.attempts == delivery.attempt
            assert lane.due_at is not None
            assert lane.due_at == NOW + outcome.after if outcome.after is not None else lane.due_at > NOW
