"""A turn that came after all."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.fetch.worker import Fetcher
from penstock.harvest.maintenance import RESCUES
from tests.harvest.scripted_source import ScriptedSource, make_turn, partitions, scripted_harvest, stones


async def test_a_partition_that_moved_on_is_not_given_up(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: a turn that came after all, between the look and the end of patience, counts."""
    fail = Fetcher.fail
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200)), pages_per_turn=1) as one:
        run_id = await one.planned()

        async def move_on_first(self: Fetcher, run_id: UUID, name: str, *args: Any, **told: Any) -> None:
            await make_turn(one, run_id, name)
            await fail(self, run_id, name, *args, **told)

        monkeypatch.setattr(Fetcher, "fail", move_on_first)
        query = (
            "UPDATE partition_progress SET rescues = $1, updated_at = now() - interval '1 day' WHERE partition_id = $2"
        )
        await one.db.execute(query, RESCUES, "partition-0")
        await one.rescuer.look()
        part = (await partitions(one, run_id))["partition-0"]
        assert (part["status"], part["rescues"], part["next_offset"]) == ("running", 0, 30)
        await one.finish()
        assert (await one.run(run_id))["state"] == "completed"
