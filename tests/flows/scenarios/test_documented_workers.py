"""The workers of docs/flows.md work as they are written."""

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


async def test_the_requests_of_a_worker_are_answered_so(harness: FlowsHarness) -> None:
    """F17: each curl of docs/flows.md gives what is written below it."""
    if shutil.which("curl") is None:
        require("curl")
    (block,) = [one for one in blocks("console") if "flow_steps/claim" in one]
    async with on_a_port(harness) as address:
        for command, expected in re.findall(r"^\$ (curl .*?)\n(\{.*?\})$", block, re.DOTALL | re.MULTILINE):
            process = await asyncio.create_subprocess_shell(
                command.replace(ADDRESS, address), stdout=asyncio.subprocess.PIPE
            )
            told, _ = await process.communicate()
            assert _timeless(told.decode()) == _timeless(expected)
    assert await harness.statuses("card-1") == {"greet": "SUCCEEDED"}


async def test_the_worker_of_the_document_works(
    harness: FlowsHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F17: what docs/flows.md has for a worker in Python does its steps."""
    monkeypatch.setattr(registered, "handlers", {})
    (tmp_path / "greeter.py").write_text(blocks("python")[1])
    load_module(str(tmp_path / "greeter.py"))
    workers, stop = Workers(), asyncio.Event()
    workers.add(registered)
    async with on_a_port(harness) as address:
        working = asyncio.create_task(serve(workers, stop, url=address))
        await _greeted(harness)
        stop.set()
        await working


async def test_the_worker_in_node_works(harness: FlowsHarness, tmp_path: Path) -> None:
    """F17: what docs/flows.md has for a worker in another language does its steps."""
    if shutil.which("node") is None:
        require("node")
    (program,) = blocks("js")
    (tmp_path / "worker.mjs").write_text(program)
    async with on_a_port(harness) as address:
        environment = {**os.environ, "PENSTOCK_URL": address}
        process = await asyncio.create_subprocess_exec("node", str(tmp_path / "worker.mjs"), env=environment)
        try:
            await _greeted(harness)
        finally:
            process.kill()
            await process.wait()


async def _greeted(harness: FlowsHarness) -> None:
    """Two runs: one whose step is done, and one whose step cannot be."""
    for run_id, name in (("ada", "world"), ("nobody", "")):
        await harness.create({"greet": {"kind": "GREET", "inputs": {"name": name}}}, run_id)

    async def ended() -> bool:
        return [(await harness.run(run_id))["status"] for run_id in ("ada", "nobody")] == ["SUCCEEDED", "FAILED"]

    await becomes(ended, "both runs have ended")
    assert (await harness.run("ada"))["steps"]["greet"]["outputs"] == {"greeting": "hello world"}
    assert (await harness.run("nobody"))["steps"]["greet"]["error"]["code"] == "NAME_EMPTY"


def _timeless(answer: str) -> Any:
    return json.loads(re.sub(r'"leaseUntil":"[^"]*"', '"leaseUntil":null', answer))
