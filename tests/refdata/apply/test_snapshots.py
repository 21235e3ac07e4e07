"""Snapshots in chunks: chunks that belong together, and repeated snapshots."""

from typing import Any
from uuid import uuid4

import pytest

from penstock.refdata.contract import UpdateState, decode_command
from tests.refdata.harness import RefdataHarness, chunk, upsert
from tests.refdata.retention import RetentionHarness


@pytest.mark.parametrize("totals", [(2, 1), (1, 2)])
async def test_a_snapshot_names_one_number_of_chunks(retention: RetentionHarness, totals: tuple[int, int]) -> None:
    """R13: a chunk with another chunksTotal than the set is FAILED, also if either is 1."""
    snapshot_id = uuid4()
    await retention.send_chunk(snapshot_id, 1, totals[0], upsert("a", 1))
    other = await retention.send_chunk(snapshot_id, 1, totals[1], upsert("b", 1))
    await retention.harness.apply()
    assert (await retention.harness.update(other)).error_code == "CHUNKS_TOTAL_DIFFERS"


@pytest.mark.parametrize("numbers", [{}, {"chunkIndex": 1, "chunksTotal": 1}])
async def test_a_snapshot_in_one_piece_counts_once(retention: RetentionHarness, numbers: dict[str, int]) -> None:
    """R13: a snapshot repeated under its snapshotId undoes no later change; with other content it is rejected."""
    harness, options = (
        retention.harness,
        dict[str, Any]({"event_type": "SNAPSHOT", "snapshotId": str(uuid4()), **numbers}),
    )
    await harness.send("LOOSE", upsert("a", 1), **options)
    await harness.send("LOOSE", upsert("a", 2))
    again = await harness.send("LOOSE", upsert("a", 1), **options)
    other = await harness.send("LOOSE", upsert("a", 3), **options)
    await harness.apply()
    assert (await harness.update(again)).committed_version == 1
    assert (await harness.update(other)).error_code == "CHUNK_CONFLICT"
    assert (await harness.items("LOOSE"), await harness.version("LOOSE")) == ({"a": 2}, 2)


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_a_snapshot_with_too_many_items_ends_at_once(harness: RefdataHarness) -> None:
    """R13: a snapshot with too many items is rejected at the chunk that exceeds the limit, not at the last."""
    whole = uuid4()
    first = await harness.refdata.submit(
        "acme", decode_command(chunk("LOOSE", whole, 1, 3, upsert("a", 1), upsert("b", 2)))
    )
    await harness.apply(max_items=1)
    update = await harness.update(first.event_id)
    assert (update.status, update.error_code) == (UpdateState.FAILED, "SNAPSHOT_TOO_LARGE")
    late = await harness.refdata.submit("acme", decode_command(chunk("LOOSE", whole, 2, 3, upsert("c", 1))))
    await harness.apply()
    assert (await harness.update(late.event_id)).error_code == "SNAPSHOT_TOO_LARGE"
