"""A module of a user: a kind whose worker needs the configuration, a query and the clock."""

from collections.abc import Mapping
from typing import Any

from penstock.flows.sdk import FlowStep, KindContext, Workers
from penstock.kernel.errors import Invalid

KIND = "COUNT_RUNS"


def check_status(inputs: Mapping[str, Any]) -> None:
    """Raise Invalid for inputs without a status."""
    if "status" not in inputs:
        raise Invalid("BAD_INPUTS", "inputs.status: is missing", hint="e.g. status: RUNNING")


kinds = Workers()
kinds.declare(KIND, check_inputs=check_status)


def make_workers(context: KindContext) -> Workers:
    """Return the worker of COUNT_RUNS."""
    workers, query = Workers(), context.query

    @workers.worker(KIND)
    async def count_runs(step: FlowStep) -> dict[str, Any]:
        sql = "SELECT count(*) AS runs FROM flow_run WHERE status::text = $1"
        rows = await query(sql, [step.inputs["status"]], 1) if query is not None else [{"runs": None}]
        return {**rows[0], "at": context.clock.now().isoformat(), "lease": context.section.lease.total_seconds()}

    return workers
