"""A client of the API of flows: one method per route; errors are those of the server."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote

from penstock.flows.contract import PREFIX
from penstock.kernel.http.client import ApiClient, Download, Json


class FlowClient(ApiClient):
    """The flows and runs of one server."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def create(self, request: Mapping[str, Any]) -> Json:
        """F2: create a run; *request* has `flow` or `steps`, and optional members of the route."""
        return await self._call("POST", "/flow_runs", dict(request))

    async def runs(self, **params: Any) -> Json:
        return await self._get("/flow_runs", params)

    async def run(self, run_id: str, *, steps: bool = True) -> Json:
        return await self._get(_make_run_path(run_id), {"steps": str(steps).lower()})

    async def history(self, run_id: str, **params: Any) -> Json:
        return await self._get(f"{_make_run_path(run_id)}/history", params)

    async def cancel(self, run_id: str, reason: str | None = None) -> Json:
        return await self._post(f"{_make_run_path(run_id)}/cancel", reason=reason)

    async def retry(self, run_id: str, step_id: str | None = None) -> Json:
        """F10: retry a step, or all failed steps."""
        return await self._post(
            f"{_make_run_path(run_id) if step_id is None else _make_step_path(run_id, step_id)}/retry"
        )

    async def resume(self, run_id: str, step_id: str, new_run_id: str | None = None) -> Json:
        return await self._post(f"{_make_run_path(run_id)}/resume", **{"from": step_id, "runId": new_run_id})

    async def skip(self, run_id: str, step_id: str, reason: str | None = None) -> Json:
        return await self._post(f"{_make_step_path(run_id, step_id)}/skip", reason=reason)

    async def why(self, run_id: str, step_id: str) -> Json:
        return await self._get(f"{_make_step_path(run_id, step_id)}/why")

    async def logs(self, run_id: str, step_id: str, **params: Any) -> Json:
        return await self._get(f"{_make_step_path(run_id, step_id)}/logs", params)

    async def run_logs(self, run_id: str, **params: Any) -> Json:
        """F18: return log lines of all steps of a run, oldest first."""
        return await self._get(f"{_make_run_path(run_id)}/logs", params)

    async def flows(self) -> Json:
        return await self._get("/flows")

    async def flow(self, name: str) -> Json:
        return await self._get(f"/flows/{_quote(name)}")

    async def pause(self, name: str) -> Json:
        return await self._post(f"/flows/{_quote(name)}/schedule/pause")

    async def unpause(self, name: str) -> Json:
        return await self._post(f"/flows/{_quote(name)}/schedule/resume")

    async def claim(
        self, worker: str, kinds: Sequence[str], *, limit: int, lease: float | None = None, wait: float = 0
    ) -> list[Json]:
        """F4: claim steps for *worker*; wait up to *wait* seconds for the first one."""
        request: Json = {"worker": worker, "kinds": list(kinds), "limit": limit, "waitSeconds": wait}
        if lease is not None:
            request["leaseSeconds"] = lease
        items: list[Json] = (await self._call("POST", "/flow_steps/claim", request, wait=wait))["items"]
        return items

    async def heartbeat(self, claims: Iterable[tuple[str, str, int]], *, lease: float | None = None) -> list[Json]:
        """F9: extend the leases of *claims* (run, step and fence), and return the state of each."""
        items = [{"runId": run_id, "stepId": step_id, "fence": fence} for run_id, step_id, fence in claims]
        states: list[Json] = (await self._post("/flow_steps/heartbeat", items=items, leaseSeconds=lease))["items"]
        return states

    async def report(self, reports: Sequence[Json], worker: str | None = None) -> list[Json]:
        """F5: report the outcomes of steps, and return one result each, in order."""
        results: list[Json] = (await self._post("/flow_steps/report", worker=worker, items=list(reports)))["items"]
        return results

    async def log(self, run_id: str, step_id: str, fence: int, lines: Iterable[tuple[str, str]]) -> Json:
        entries = [{"level": level, "message": message} for level, message in lines]
        return await self._post(f"{_make_step_path(run_id, step_id)}/logs", fence=fence, lines=entries)

    async def write(self, run_id: str, step_id: str, fence: int, name: str, data: bytes) -> None:
        """F6: write an artifact of an attempt."""
        path, binary = (
            f"{_make_step_path(run_id, step_id)}/artifacts/{quote(name)}",
            {"content-type": "application/octet-stream"},
        )
        await self._send("PUT", path, data, params={"fence": str(fence)}, headers=binary)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        """F6: return the content of an artifact."""
        return (await self._send("GET", f"{_make_step_path(run_id, step_id)}/artifacts/{quote(name)}")).body

    def download(self, run_id: str, step_id: str, name: str) -> AbstractAsyncContextManager[Download]:
        """F6: open an artifact as a stream."""
        return self._download(f"{_make_step_path(run_id, step_id)}/artifacts/{quote(name)}")


def _make_run_path(run_id: str) -> str:
    return f"/flow_runs/{_quote(run_id)}"


def _make_step_path(run_id: str, step_id: str) -> str:
    return f"{_make_run_path(run_id)}/steps/{_quote(step_id)}"


def _quote(text: str) -> str:
    return quote(text, safe="")
