"""A module of a user: a kind whose inputs are checked before a run, and whose success is checked by a receipt."""

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.flows.sdk import FlowStep, ReportCheck, StepError, Workers
from penstock.kernel.errors import Invalid

KIND, RECEIPT, RECEIPT_OUTPUT = "EXPORT_ROWS", "receipt.json", "receiptUri"
workers = Workers()


def check_rows(inputs: Mapping[str, Any]) -> None:
    """Raise Invalid for inputs without the number of rows, and by mistake TypeError for a text."""
    if "rows" not in inputs or inputs["rows"] < 0:
        raise Invalid("BAD_INPUTS", "inputs.rows: is missing", hint="e.g. rows: 3")


def compare_receipt(data: bytes | None, inputs: Mapping[str, Any], artifacts: frozenset[str]) -> Any:
    """Return the counted rows as an output if the receipt has as many as the inputs."""
    if data is None:
        return StepError("RECEIPT_MISSING", "the step wrote no receipt")
    counted = orjson.loads(data)["rows"]
    if counted != inputs["rows"]:
        return StepError("RECEIPT_DIFFERS", f"{counted} of {inputs['rows']} rows", sorted(artifacts))
    return {"rows": counted}


@workers.worker(KIND, check_inputs=check_rows, check_report=ReportCheck(RECEIPT, RECEIPT_OUTPUT, compare_receipt))
async def export_rows(step: FlowStep) -> dict[str, Any]:
    """Write the receipt that the inputs name, and claim success with any number of rows."""
    if (receipt := step.inputs.get("receipt")) is not None:
        await step.write(RECEIPT, receipt)
        if step.inputs.get("forgets"):
            step.artifacts.clear()
    return {"rows": 1_000_000, RECEIPT_OUTPUT: "file:///elsewhere"}
