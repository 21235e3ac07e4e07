"""The API of flows from Python: a method per route."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote

from penstock.flows.contract import PREFIX
from penstock.kernel.http.client import ApiClient, Download, Json


class FlowClient(ApiClient):
    """One server's flows and runs."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def create(self, request: Mapping[str, Any]) -> Json:
        """F2: a run of what is asked for: `flow` or `steps`, and what else there is."""
        return await self._call("POST", "/flow_runs", dict(request))

    async def runs(self, **params: Any) -> Json:
        return await self._get("/flow_runs", params)

    async def run(self, run_id: str, *, steps: bool = True) -> Json:
        return await self._get(_run(run_id), {"steps": str(steps).lower()})

    async def history(self, run_id: str, **params: Any) -> Json:
        return await self._get(f"{_run(run_id)}/history", params)

    async def cancel(self, run_id: str, reason: str | None = None) -> Json:
        return await self._post(f"{_run(run_id)}/cancel", reason=reason)

    async def retry(self, run_id: str, step_id: str | None = None) -> Json:
        """F10: a step, or all that failed."""
        return await self._post(f"{_run(run_id) if step_id is None else _step(run_id, step_id)}/retry")

    async def resume(self, run_id: str, step_id: str, new_run_id: str | None = None) -> Json:
        return await self._post(f"{_run(run_id)}/resume", **{"from": step_id, "runId": new_run_id})

    async def skip(self, run_id: str, step_id: str, reason: str | None = None) -> Json:
        return await self._post(f"{_step(run_id, step_id)}/skip", reason=reason)

    async def why(self, run_id: str, step_id: str) -> Json:
        return await self._get(f"{_step(run_id, step_id)}/why")

    async def logs(self, run_id: str, step_id: str, **params: Any) -> Json:
        return await self._get(f"{_step(run_id, step_id)}/logs", params)

    async def run_logs(self, run_id: str, **params: Any) -> Json:
        """F18: return log lines of all steps of a run, oldest first."""
        return await self._get(f"{_run(run_id)}/logs", params)

    async def flows(self) -> Json:
        return await self._get("/flows")

    async def flow(self, name: str) -> Json:
        return await self._get(f"/flows/{_name(name)}")

    async def pause(self, name: str) -> Json:
        return await self._post(f"/flows/{_name(name)}/schedule/pause")

    async def unpause(self, name: str) -> Json:
        return await self._post(f"/flows/{_name(name)}/schedule/resume")

    async def claim(
        self, worker: str, kinds: Sequence[str], *, limit: int, lease: float | None = None, wait: float = 0
    ) -> list[Json]:
        """F4: steps that are now this worker's alone; waits up to *wait* seconds for the first."""
        asked: Json = {"worker": worker, "kinds": list(kinds), "limit": limit, "waitSeconds": wait}
        if lease is not None:
            asked["leaseSeconds"] = lease
        items: list[Json] = (await self._call("POST", "/flow_steps/claim", asked, wait=wait))["items"]
        return items

    async def heartbeat(self, held: Iterable[tuple[str, str, int]], *, lease: float | None = None) -> list[Json]:
        """F9: hold on to steps, given by run, name and fence; how each is held."""
        items = [{"runId": run_id, "stepId": step_id, "fence": fence} for run_id, step_id, fence in held]
        found: list[Json] = (await self._post("/flow_steps/heartbeat", items=items, leaseSeconds=lease))["items"]
        return found

    async def report(self, reports: Sequence[Json], worker: str | None = None) -> list[Json]:
        """F5: how steps ended; one result each, in order."""
        found: list[Json] = (await self._post("/flow_steps/report", worker=worker, items=list(reports)))["items"]
        return found

    async def log(self, run_id: str, step_id: str, fence: int, lines: Iterable[tuple[str, str]]) -> Json:
        told = [{"level": level, "message": message} for level, message in lines]
        return await self._post(f"{_step(run_id, step_id)}/logs", fence=fence, lines=told)

    async def write(self, run_id: str, step_id: str, fence: int, name: str, data: bytes) -> None:
        """F6: write under an attempt."""
        path, binary = f"{_step(run_id, step_id)}/artifacts/{quote(name)}", {"content-type": "application/octet-stream"}
        await self._send("PUT", path, data, params={"fence": str(fence)}, headers=binary)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """F6: an artifact."""
        return (await self._send("GET", f"{_step(run_id, step_id)}/artifacts/{quote(name)}")).body

    def download(self, run_id: str, step_id: str, name: str) -> AbstractAsyncContextManager[Download]:
        """F6: open an artifact as a stream."""
        return self._download(f"{_step(run_id, step_id)}/artifacts/{quote(name)}")


def _run(run_id: str) -> str:
    return f"/flow_runs/{_name(run_id)}"


def _step(run_id: str, step_id: str) -> str:
    return f"{_run(run_id)}/steps/{_name(step_id)}"


def _name(text: str) -> str:
    return quote(text, safe="")
