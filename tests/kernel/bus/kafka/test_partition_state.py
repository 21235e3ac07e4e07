"""The state of a partition: its commit metadata, and the plan of deliveries."""

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
def test_commit_metadata_is_preserved(mark: CommitMetadata) -> None:
    """The next owner reads the metadata unchanged, and it fits into the limit of a broker, 4096 bytes."""
    assert CommitMetadata.load(mark.dump()) == mark
    assert len(mark.dump()) < 4_096


@given(st.none() | st.text())
def test_metadata_of_other_programs_is_ignored(text: str | None) -> None:
    """Tools that reset offsets write their own metadata, which does not mean that a worker died."""
    assert CommitMetadata.load(text) == CommitMetadata()


def make_state(partition: int, count: int, mark: CommitMetadata | None = None) -> KafkaPartition:
    """Return a partition with *count* fetched messages and the commit of its previous owner at the first."""
    state = KafkaPartition(partition)
    state.load_committed(0, (mark or CommitMetadata()).dump())
    for offset in range(count):
        state.add(Record(topic="t", partition=partition, offset=offset, key=b"k", value=b"v"))
    return state


def test_a_suspect_is_planned_alone() -> None:
    """A message that was delivered when its worker died is delivered alone, when it has waited longest."""
    sound, suspect = make_state(0, 5), make_state(1, 5, CommitMetadata(out_upto=2))
    assert plan([sound, suspect], 10, NOW) == [(sound, 5)]
    sound.taken_at = 1.0
    assert plan([sound, suspect], 10, NOW) == [(suspect, 1)]


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 100))
def test_a_plan_divides_the_limit(counts: list[int], limit: int) -> None:
    """A plan never exceeds the limit, and leaves no message out below the limit."""
    shares = plan([make_state(number, count) for number, count in enumerate(counts)], limit, NOW)
    taken = sum(share for _, share in shares)
    assert taken == min(limit, sum(counts))
    assert all(0 < share <= len(state.waiting) for state, share in shares)


def test_prefetched_messages_are_limited() -> None:
    state = make_state(0, FULL_COUNT - 1)
    assert not state.is_full
    state.add(Record(offset=FULL_COUNT, value=b""))
    assert state.is_full
    assert not state.needs_messages
