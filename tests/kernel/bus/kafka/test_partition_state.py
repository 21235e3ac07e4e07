"""A partition that is held: its mark, and what is planned of what was fetched."""

from datetime import UTC, datetime

from confluent_kafka import Message as Record
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.bus.kafka.partition_state import FULL_COUNT, CommitMetadata, KafkaPartition, plan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
offsets = st.none() | st.integers(0, 2**62)
marks = st.builds(
    CommitMetadata,
    st.integers(0, 2**62),
    st.integers(0, 100),
    offsets,
    offsets,
    st.none() | st.datetimes(timezones=st.just(UTC)),
)


@given(marks)
def test_a_mark_is_read_as_it_was_written(mark: CommitMetadata) -> None:
    """What the next holder learns is what the last one knew; and it fits into what a broker keeps, 4096 bytes."""
    assert CommitMetadata.load(mark.dump()) == mark
    assert len(mark.dump()) < 4_096


@given(st.none() | st.text())
def test_a_mark_of_somebody_else_means_nothing(text: str | None) -> None:
    """Tools that move a group's position leave their own text; that is no death of a worker."""
    assert CommitMetadata.load(text) == CommitMetadata()


def place(partition: int, count: int, mark: CommitMetadata | None = None) -> KafkaPartition:
    """A partition with *count* messages fetched, its last holder's mark at the first."""
    made = KafkaPartition(partition)
    made.load_committed(0, (mark or CommitMetadata()).dump())
    for offset in range(count):
        made.add(Record(topic="t", partition=partition, offset=offset, key=b"k", value=b"v"))
    return made


def test_a_suspect_is_planned_alone() -> None:
    """A message that was out when its worker died goes alone when it has waited longest; until then it waits."""
    sound, suspect = place(0, 5), place(1, 5, CommitMetadata(out_upto=2))
    assert plan([sound, suspect], 10, NOW) == [(sound, 5)]
    sound.taken_at = 1.0
    assert plan([sound, suspect], 10, NOW) == [(suspect, 1)]


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 100))
def test_a_plan_shares_out_what_was_asked_for(counts: list[int], limit: int) -> None:
    """Nobody is given more than asked for, and nothing is left while there is room."""
    shares = plan([place(number, count) for number, count in enumerate(counts)], limit, NOW)
    taken = sum(share for _, share in shares)
    assert taken == min(limit, sum(counts))
    assert all(0 < share <= len(held.waiting) for held, share in shares)


def test_what_is_fetched_ahead_is_bounded() -> None:
    held = place(0, FULL_COUNT - 1)
    assert not held.is_full
    held.add(Record(offset=FULL_COUNT, value=b""))
    assert held.is_full
    assert not held.needs_messages
