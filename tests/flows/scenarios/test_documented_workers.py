"""The workers in docs/flows.md work as documented."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.definition.loader import load_module
from penstock.flows.sdk import Workers, serve
from penstock.flows.sdk import workers as registered
from tests.flows.docs_page import blocks
from tests.flows.harness import FlowsHarness, on_a_port
from tests.support.require import require
from tests.support.wait import becomes

ADDRESS = "http://127.0.0.1:8080"


async def test_documented_requests_have_the_documented_responses(harness: FlowsHarness) -> None:
    """F17: each curl command in docs/flows.md has the documented response."""
    if shutil.which("curl") is None:
        require("curl")
    (block,) = [block for block in blocks("console") if "flow_steps/claim" in block]
    async with on_a_port(harness) as address:
        for command, expected in re.findall(r"^\$ (curl .*?)\n(\{.*?\})$", block, re.DOTALL | re.MULTILINE):
            process = await asyncio.create_subprocess_shell(
                command.replace(ADDRESS, address), stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            assert remove_times(output.decode()) == remove_times(expected)
    assert await harness.statuses("card-1") == {"greet": "SUCCEEDED"}


async def test_documented_python_worker(harness: FlowsHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F17: the Python worker in docs/flows.md executes its steps."""
    monkeypatch.setattr(registered, "handlers", {})
    (tmp_path / "greeter.py").write_text(blocks("python")[1])
    load_module(str(tmp_path / "greeter.py"))
    workers, stop = Workers(), asyncio.Event()
    workers.add(registered)
    async with on_a_port(harness) as address:
        working = asyncio.create_task(serve(workers, stop, url=address))
        await run_greetings(harness)
        stop.set()
        await working


async def test_documented_node_worker(harness: FlowsHarness, tmp_path: Path) -> None:
    """F17: the worker in another language in docs/flows.md executes its steps."""
    if shutil.which("node") is None:
        require("node")
    (program,) = blocks("js")
    (tmp_path / "worker.mjs").write_text(program)
    async with on_a_port(harness) as address:
        environment = {**os.environ, "PENSTOCK_URL": address}
        process = await asyncio.create_subprocess_exec("node", str(tmp_path / "worker.mjs"), env=environment)
        try:
            await run_greetings(harness)
        finally:
            process.kill()
            await process.wait()


async def run_greetings(harness: FlowsHarness) -> None:
    """Create two runs: one whose step succeeds, and one whose step fails."""
    for run_id, name in (("ada", "world"), ("unnamed", "")):
        await harness.create({"greet": {"kind": "GREET", "inputs": {"name": name}}}, run_id)

    async def ended() -> bool:
        return [(await harness.run(run_id))["status"] for run_id in ("ada", "unnamed")] == ["SUCCEEDED", "FAILED"]

    await becomes(ended, "both runs have ended")
    assert (await harness.run("ada"))["steps"]["greet"]["outputs"] == {"greeting": "hello world"}
    assert (await harness.run("unnamed"))["steps"]["greet"]["error"]["code"] == "NAME_EMPTY"


def remove_times(answer: str) -> Any:
    return json.loads(re.sub(r'"leaseUntil":"[^"]*"', '"leaseUntil":null', answer))
