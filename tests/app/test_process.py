"""The process of a program: its start, its socket, and its shutdown."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from penstock.app.apis import make_app
from penstock.app.process import Process, open_process
from penstock.kernel.errors import Conflict
from penstock.kernel.http import health
from penstock.kernel.http.health import LivenessPulse
from penstock.settings import Settings

READY = "/actuator/health/readiness"


class Resources:
    """A recorder of the resources that are opened and closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @asynccontextmanager
    async def opened(self, name: str) -> AsyncIterator[str]:
        self.calls.append(f"open {name}")
        try:
            yield name
        finally:
            self.calls.append(f"close {name}")

    @contextmanager
    def entered(self, name: str) -> Iterator[str]:
        self.calls.append(f"open {name}")
        try:
            yield name
        finally:
            self.calls.append(f"close {name}")


def settings(folder: Path, *, port: int = 0) -> Settings:
    return Settings.model_validate({"data_dir": folder, "server": {"port": port, "drain_delay": 0}})


async def test_a_program_closes_what_it_opened_in_reverse(tmp_path: Path) -> None:
    """Resources are closed in reverse, also when the program fails."""
    resources = Resources()
    with pytest.raises(RuntimeError, match="broken"):
        async with open_process(settings(tmp_path), asyncio.Event()) as program:
            assert await program.open(resources.opened("database")) == "database"
            assert program.enter(resources.entered("socket")) == "socket"
            raise RuntimeError("broken")
    assert resources.calls == ["open database", "open socket", "close socket", "close database"]


async def test_a_program_answers_until_it_is_stopped(tmp_path: Path) -> None:
    """A program is ready while it serves and not ready while it drains; its port is free afterwards."""
    stop, drained, app = asyncio.Event(), asyncio.Event(), FastAPI()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    pulse = LivenessPulse({}, needs=[], on_drain=drained.set)
    async with open_process(settings(tmp_path), stop) as program:
        app.include_router(health.make_router(pulse, program.telemetry))
        serving = asyncio.create_task(program.serve(app, program.listen(), pulse, address.set_result))
        async with httpx.AsyncClient(base_url=await address) as client:
            assert (await client.get(READY)).status_code == 200
            assert not serving.done()
            stop.set()
            await drained.wait()
            assert (await client.get(READY)).status_code == 503
        await serving
    port = int(address.result().rpartition(":")[2])
    async with open_process(settings(tmp_path, port=port), stop) as program:
        assert program.listen().getsockname()[1] == port


async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    """A second program on the same port ends with a named error before it starts anything."""
    async with open_process(settings(tmp_path), asyncio.Event()) as program:
        port = program.listen().getsockname()[1]
        async with open_process(settings(tmp_path, port=port), asyncio.Event()) as second:
            with pytest.raises(Conflict) as refused:
                second.listen()
    assert refused.value.code == "PORT_IN_USE"


async def test_a_data_directory_has_one_owner(tmp_path: Path) -> None:
    """The owner locks the directory until its end; a program that does not own the directory is not refused."""

    async def start(*, owns: bool) -> Process:
        async with open_process(settings(tmp_path), asyncio.Event(), role="test", owns_data_dir=owns) as program:
            return program

    async with open_process(settings(tmp_path), asyncio.Event(), role="test", owns_data_dir=True):
        await start(owns=False)
        with pytest.raises(Conflict) as refused:
            await start(owns=True)
    assert refused.value.code == "LOCKED"
    await start(owns=True)


async def test_a_program_without_an_application_exports_no_request_metrics(tmp_path: Path) -> None:
    """R26: a pod counts its requests itself, so the metrics of applications come with the first application."""
    async with open_process(settings(tmp_path), asyncio.Event()) as program:
        assert "penstock_http_requests" not in str(list(program.telemetry.registry.collect()))
        make_app("test", program.web, LivenessPulse({}, needs=()))
        assert "penstock_http_requests" in str(list(program.telemetry.registry.collect()))
