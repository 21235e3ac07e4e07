"""F17: workers in other languages over plain HTTP: the examples."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.flows.harness import BASE, FlowsHarness
from tests.support.require import require
from tests.support.wait import becomes

EXAMPLES = Path(__file__).parents[3] / "examples" / "flows-http"
SHELL, NODE = str(EXAMPLES / "worker.sh"), str(EXAMPLES / "worker.mjs")


@asynccontextmanager
async def running_worker(url: str, *command: str, lease: float = 30) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a worker in its own process."""
    for program in ("curl", "node") if command[0] == "node" else ("curl",):
        if shutil.which(program) is None:
            require(program)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    env = {**kept, "PENSTOCK_URL": url, "LEASE": str(lease)}
    process = await asyncio.create_subprocess_exec(*command, env=env, start_new_session=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_program_as_a_worker(harness: FlowsHarness, url: str) -> None:
    """F17: with curl and bash: inputs on standard input, an artifact, the log, and the exit code as the outcome."""
    await harness.create({"a": {"kind": "SAY", "inputs": {"who": "world"}}})
    command = 'grep -o \'"who":"[a-z]*"\'; echo "half \\"way\\"" >&2'
    async with running_worker(url, SHELL, "--once", "SAY", "bash", "-c", command) as worker:
        assert await worker.wait() == 0
    step = (await harness.run())["steps"]["a"]
    assert (step["status"], step["outputs"], step["error"]) == ("SUCCEEDED", {"exitCode": 0}, None)
    assert step["worker"].startswith("bash@")
    answer = await harness.http.get("/flow_runs/r1/steps/a/artifacts/output.txt")
    assert answer.text == '"who":"world"\n'
    logs = await harness.get("/flow_runs/r1/steps/a/logs")
    assert [line["message"] for line in logs["lines"]] == ['half "way"']


async def test_failed_program_fails_its_step(harness: FlowsHarness, url: str) -> None:
    """F17: the exit code is the error code, the last line of standard error its message; the output is logged."""
    await harness.create({"a": {"kind": "SAY"}})
    async with running_worker(
        url, SHELL, "--once", "SAY", "bash", "-c", "echo partly; echo no disk >&2; exit 3"
    ) as worker:
        assert await worker.wait() == 0
    step = (await harness.run())["steps"]["a"]
    assert step["status"] == "FAILED"
    assert step["error"] == {"code": "EXIT_3", "message": "no disk", "details": None}
    assert (await harness.http.get("/flow_runs/r1/steps/a/artifacts/output.txt")).text == "partly\n"


async def test_cancelled_run_stops_its_program(harness: FlowsHarness, url: str, tmp_path: Path) -> None:
    """F9: the worker ends the program after a heartbeat, and reports CANCELLED."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    await harness.create({"a": {"kind": "WAIT"}})
    async with running_worker(url, SHELL, "--once", "WAIT", "cat", str(pipe), lease=0.6) as worker:

        async def is_running() -> bool:
            return await harness.statuses() == {"a": "RUNNING"}

        await becomes(is_running, "the step begins")
        await harness.post("/flow_runs/r1/cancel")
        assert await worker.wait() == 0
    assert await harness.statuses() == {"a": "CANCELLED"}


async def test_javascript_worker(harness: FlowsHarness, url: str) -> None:
    """F17: Node without dependencies: claim, artifact, log, report; an error has a code and details."""
    steps = {
        "good": {"kind": "WORD_COUNT", "inputs": {"text": "a b a"}},
        "bad": {"kind": "WORD_COUNT", "dependsOn": ["good"], "inputs": {}},
    }
    await harness.create(steps)
    async with running_worker(url, "node", NODE) as worker:
        run = await harness.wait_for_end()
        worker.send_signal(signal.SIGTERM)
        await harness.create({"last": {"kind": "WORD_COUNT", "inputs": {"text": "x"}}}, "r2")
        assert await worker.wait() == 0
    good, bad = run["steps"]["good"], run["steps"]["bad"]
    assert (good["status"], good["outputs"]) == ("SUCCEEDED", {"words": 3})
    assert [artifact["name"] for artifact in good["artifacts"]] == ["words.json"]
    assert (await harness.http.get("/flow_runs/r1/steps/good/artifacts/words.json")).json() == {"a": 2, "b": 1}
    assert bad["error"] == {"code": "NO_TEXT", "message": "inputs.text must be a text", "details": {"inputs": {}}}
    assert (await harness.get("/flow_runs/r1/steps/good/logs"))["lines"][0]["message"] == "2 different words"


def test_examples_use_the_prefix_of_the_api() -> None:
    """F17: the README uses the prefix of the server."""
    text = (EXAMPLES / "README.md").read_text()
    assert text.count(BASE) >= 4
