"""F17: workers of other languages over plain HTTP: the examples, as they are."""

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
async def working(url: str, *command: str, lease: float = 30) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in a process of its own."""
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


async def test_any_program_is_a_worker(harness: FlowsHarness, url: str) -> None:
    """F17: with curl and bash: the step on standard input, an artifact, the log, and the exit code as the outcome."""
    await harness.create({"a": {"kind": "SAY", "inputs": {"who": "world"}}})
    command = 'grep -o \'"who":"[a-z]*"\'; echo "half \\"way\\"" >&2'
    async with working(url, SHELL, "--once", "SAY", "bash", "-c", command) as worker:
        assert await worker.wait() == 0
    step = (await harness.run())["steps"]["a"]
    assert (step["status"], step["outputs"], step["error"]) == ("SUCCEEDED", {"exitCode": 0}, None)
    assert step["worker"].startswith("bash@")
    answer = await harness.http.get("/flow_runs/r1/steps/a/artifacts/output.txt")
    assert answer.text == '"who":"world"\n'
    logs = await harness.get("/flow_runs/r1/steps/a/logs")
    assert [line["message"] for line in logs["lines"]] == ['half "way"']


async def test_a_program_that_fails_fails_its_step(harness: FlowsHarness, url: str) -> None:
    """F17: the exit code is the error's code, the last complaint its message; what was printed is kept."""
    await harness.create({"a": {"kind": "SAY"}})
    async with working(url, SHELL, "--once", "SAY", "bash", "-c", "echo partly; echo no disk >&2; exit 3") as worker:
        assert await worker.wait() == 0
    step = (await harness.run())["steps"]["a"]
    assert step["status"] == "FAILED"
    assert step["error"] == {"code": "EXIT_3", "message": "no disk", "details": None}
    assert (await harness.http.get("/flow_runs/r1/steps/a/artifacts/output.txt")).text == "partly\n"


async def test_a_program_is_stopped_when_its_run_is_cancelled(harness: FlowsHarness, url: str, tmp_path: Path) -> None:
    """F9: its worker hears it at a heartbeat, ends the program, and says so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    await harness.create({"a": {"kind": "WAIT"}})
    async with working(url, SHELL, "--once", "WAIT", "cat", str(pipe), lease=0.6) as worker:

        async def is_running() -> bool:
            return await harness.statuses() == {"a": "RUNNING"}

        await becomes(is_running, "the step begins")
        await harness.post("/flow_runs/r1/cancel")
        assert await worker.wait() == 0
    assert await harness.statuses() == {"a": "CANCELLED"}


async def test_a_worker_in_javascript(harness: FlowsHarness, url: str) -> None:
    """F17: Node without dependencies: claims, writes an artifact, logs, reports; an error has code and details."""
    steps = {
        "good": {"kind": "WORD_COUNT", "inputs": {"text": "a b a"}},
        "bad": {"kind": "WORD_COUNT", "dependsOn": ["good"], "inputs": {}},
    }
    await harness.create(steps)
    async with working(url, "node", NODE) as worker:
        run = await harness.wait_for_end()
        worker.send_signal(signal.SIGTERM)
        await harness.create({"last": {"kind": "WORD_COUNT", "inputs": {"text": "x"}}}, "r2")
        assert await worker.wait() == 0
    good, bad = run["steps"]["good"], run["steps"]["bad"]
    assert (good["status"], good["outputs"]) == ("SUCCEEDED", {"words": 3})
    assert [one["name"] for one in good["artifacts"]] == ["words.json"]
    assert (await harness.http.get("/flow_runs/r1/steps/good/artifacts/words.json")).json() == {"a": 2, "b": 1}
    assert bad["error"] == {"code": "NO_TEXT", "message": "inputs.text must be a text", "details": {"inputs": {}}}
    assert (await harness.get("/flow_runs/r1/steps/good/logs"))["lines"][0]["message"] == "2 different words"


def test_the_examples_name_the_api_there_is() -> None:
    """F17: what the README tells is under the prefix the server has."""
    told = (EXAMPLES / "README.md").read_text()
    assert told.count(BASE) >= 4
