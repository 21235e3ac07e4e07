"""The pipeline API from Python: a method per route, and the server's own errors."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from penstock.kernel.errors import (
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    PenstockError,
    TooLarge,
    Transient,
    Unauthorized,
)
from penstock.tracking.contract import PREFIX, Said, Stage
from penstock.tracking.model import Claimed

_KINDS: Sequence[type[PenstockError]] = (Invalid, TooLarge, Unauthorized, Forbidden, NotFound, Conflict, Transient)
_BY_STATUS = {kind.status: kind for kind in _KINDS}
_PROBLEM = ("type", "title", "status", "code", "detail", "hint")
Json = dict[str, Any]


class Ended(NamedTuple):
    """How a claimed row ended."""

    filename: str
    shard: int
    fence: int
    outcome: Said
    error: str | None = None
    retry_after_seconds: float | None = None


class PipelineClient:
    """One server's pipeline. A failure it tells is raised as the error it is; a server that is away is Transient."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        self._base = url.rstrip("/") + PREFIX
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PipelineClient":
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def register(self, filename: str, shards: Sequence[int], *, worker: str | None = None) -> Json:
        return await self._post("/files/register", filename=filename, shards=list(shards), worker=worker)

    async def move(
        self,
        stage: Stage,
        transition: str,
        filename: str,
        shard: int | None = None,
        *,
        worker: str | None = None,
        error: str | None = None,
    ) -> Json:
        """Take a step with a row, or, in event-ingest, with a whole file."""
        path = f"/stages/{stage}/{quote(transition, safe='')}"
        return await self._post(path, filename=filename, shard=shard, worker=worker, error=error)

    async def claim(
        self, stage: Stage, worker: str, *, limit: int, lease: float | None = None, wait: float = 0
    ) -> list[Claimed]:
        """Rows that are now this worker's alone; waits up to *wait* seconds for the first."""
        said = {"worker": worker, "limit": limit, "lease_seconds": lease, "wait_seconds": wait}
        asked = {name: value for name, value in said.items() if value is not None}
        body = await self._call("POST", f"/queues/{stage}/claim", asked, wait=wait)
        return [_claimed(item) for item in body["items"]]

    async def report(self, stage: Stage, ended: Iterable[Ended]) -> list[Json]:
        """How claimed rows ended; one result each, in order."""
        reports = [_said(one) for one in ended]
        results: list[Json] = (await self._call("POST", f"/stages/{stage}/report", reports))["results"]
        return results

    async def heartbeat(
        self, stage: Stage, worker: str, held: Iterable[tuple[str, int, int]], *, lease: float | None = None
    ) -> set[tuple[str, int, int]]:
        """Hold on to rows, given by filename, shard and fence; those that were lost."""
        items = [{"filename": filename, "shard": shard, "fence": fence} for filename, shard, fence in held]
        body = await self._post(f"/queues/{stage}/heartbeat", worker=worker, items=items, lease_seconds=lease)
        return {(item["filename"], item["shard"], item["fence"]) for item in body["lost"]}

    async def queue(self, stage: Stage, **params: Any) -> Json:
        return await self._get(f"/queues/{stage}", params)

    async def queues(self) -> Json:
        return await self._get("/queues")

    async def file(self, filename: str) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}")

    async def files(self, **params: Any) -> Json:
        return await self._get("/files", params)

    async def history(self, filename: str, **params: Any) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}/history", params)

    async def why(self, filename: str, shard: int) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}/{shard}/why")

    async def summary(self) -> Json:
        return await self._get("/metrics/summary")

    async def retry_failed(self, stage: Stage, **chosen: Any) -> Json:
        return await self._post(f"/stages/{stage}/retry-failed", **chosen)

    async def pause(self, stage: Stage, *, worker: str | None = None, reason: str | None = None) -> Json:
        return await self._post(f"/queues/{stage}/pause", worker=worker, reason=reason)

    async def resume(self, stage: Stage) -> Json:
        return await self._post(f"/queues/{stage}/resume")

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Json:
        given = {name: str(value) for name, value in (params or {}).items() if value is not None}
        return await self._call("GET", path, params=given)

    async def _post(self, path: str, **body: Any) -> Json:
        return await self._call("POST", path, {name: value for name, value in body.items() if value is not None})

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        wait: float = 0,
    ) -> Json:
        if self._session is None:
            raise RuntimeError("use the client in `async with`")
        address = URL(self._base + path, encoded=True).update_query(params or {})
        data = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"}
        try:
            # What the server was asked to wait is not its fault.
            limit = aiohttp.ClientTimeout(total=self._timeout + wait)
            async with self._session.request(method, address, data=data, headers=headers, timeout=limit) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            hint = "is it running? `penstock up` or `pipeline-apid` starts it; --url tells where it is"
            said = str(error) or type(error).__name__
            raise Transient("SERVER_DOWN", f"{self._base} does not answer: {said}", hint=hint) from error
        if response.status >= 400:
            raise _failure(response.status, answer)
        return _document(answer)


def _document(answer: bytes) -> Json:
    try:
        document: Json = orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        hint = "check the address: this is no Penstock"
        raise Invalid("NOT_PENSTOCK", "the server answered with something that is not JSON", hint=hint) from error
    return document


def _failure(status: int, answer: bytes) -> PenstockError:
    """What the server said went wrong, as the error it raised."""
    try:
        problem = orjson.loads(answer)
    except orjson.JSONDecodeError:
        problem = None
    told = problem if isinstance(problem, dict) else {}
    kind = _BY_STATUS.get(status, Transient if status >= 500 else Invalid)
    details = {name: value for name, value in told.items() if name not in _PROBLEM}
    code, detail = str(told.get("code", f"HTTP_{status}")), str(told.get("detail", f"the server answered {status}"))
    return kind(code, detail, hint=told.get("hint"), **details)


def _said(ended: Ended) -> Json:
    filename, shard, fence, outcome, error, after = ended
    said: Json = {"filename": filename, "shard": shard, "fence": fence, "outcome": outcome}
    if error is not None:
        said["error"] = error
    if after is not None:
        said["retry_after_seconds"] = after
    return said


def _claimed(item: Json) -> Claimed:
    created_at, until = (datetime.fromisoformat(item[name]) for name in ("created_at", "lease_until"))
    return Claimed(item["filename"], item["shard"], item["fence"], item["attempt"], created_at, until)
