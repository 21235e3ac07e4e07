"""A turn that is made while the rescuer fails its partition."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.fetch.worker import Fetcher
from penstock.harvest.maintenance import RESCUES
from tests.harvest.scripted_source import ScriptedSource, list_partitions, make_turn, scripted_harvest, stones


async def test_partition_with_progress_is_not_failed(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: a turn between the check of the rescuer and the failure of the partition counts."""
    fail = Fetcher.fail
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(200)), pages_per_turn=1) as stepper:
        run_id = await stepper.plan_run()

        async def make_turn_first(self: Fetcher, run_id: UUID, name: str, *args: Any, **options: Any) -> None:
            await make_turn(stepper, run_id, name)
            await fail(self, run_id, name, *args, **options)

        monkeypatch.setattr(Fetcher, "fail", make_turn_first)
        query = (
            "UPDATE partition_progress SET rescues = $1, updated_at = now() - interval '1 day' WHERE partition_id = $2"
        )
        await stepper.db.execute(query, RESCUES, "partition-0")
        await stepper.rescuer.rescue()
        part = (await list_partitions(stepper, run_id))["partition-0"]
        assert (part["status"], part["rescues"], part["next_offset"]) == ("running", 0, 30)
        await stepper.finish()
        assert (await stepper.run(run_id))["state"] == "completed"
