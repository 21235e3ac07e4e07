"""A program with workers over HTTP, run by `python -m tests.flows.sdk_worker`; also a module with workers."""

from typing import Any

from penstock.flows.sdk import Flow, FlowStep, StepFailed, run, worker

flow = Flow("greetings", scope={"name": "world"})
flow.step("greet", "GREET", inputs={"name": flow.scope.name})


@worker("GREET")
async def greet(step: FlowStep) -> dict[str, Any]:
    """Greet the name in the inputs."""
    name = step.inputs.get("name")
    if not name:
        raise StepFailed("NO_NAME", "inputs.name is missing", {"inputs": dict(step.inputs)})
    await step.log(f"greeting {name}")
    await step.write("greeting.txt", f"hello {name}")
    return {"greeted": name}


@worker("RECALL")
async def recall(step: FlowStep) -> dict[str, Any]:
    """Read the artifact of another step."""
    return {"read": (await step.read(step.inputs["step"], "greeting.txt")).decode()}


@worker("WAIT")
async def wait(step: FlowStep) -> None:
    """Wait until the step is cancelled."""
    await step.log("waiting")
    await step.cancelled.wait()


if __name__ == "__main__":
    run(concurrency=8)
