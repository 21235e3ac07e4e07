"""What was said of items, on its way to the server."""

import asyncio
from collections import deque
from typing import Any

import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import wait_event
from penstock.tracking.client import PipelineClient, RowResult
from penstock.tracking.contract import BATCH_LIMIT, Stage, StageReportAnswer
from penstock.tracking.sdk.item import Item


class Reporter:
    """Sends what was said of items, as much as there is in each request, for as long as it takes."""

    def __init__(self, client: PipelineClient, stage: Stage) -> None:
        self.held: set[Item] = set()
        self._client = client
        self._stage = stage
        self._said: deque[tuple[Item, RowResult]] = deque()
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: PenstockError | None = None
        self._log = structlog.get_logger().bind(stage=stage.value)

    def add(self, item: Item, how: RowResult) -> None:
        self._said.append((item, how))
        self._idle.clear()
        self._some.set()

    def complain(self) -> None:
        """Raise what the server would not take: going on would only make more of it."""
        if self._error is not None:
            raise self._error

    async def flush(self, *, within: float) -> None:
        self.complain()
        if not await wait_event(self._idle, within):
            self._log.warning("reports_unsent", reports=len(self._said))
        self.complain()

    async def run(self) -> None:
        """Send for as long as there may be something to say; an end, whatever its reason, keeps nobody waiting."""
        try:
            await self._send()
        finally:
            self._idle.set()

    async def _send(self) -> None:
        backoff = Backoff()
        while True:
            await self._some.wait()
            batch = list(self._said)[:BATCH_LIMIT]
            try:
                results = await self._client.report(self._stage, [how for _, how in batch])
            except Transient as error:
                self._log.warning("report_failed", code=error.code, error=error.message)
                await asyncio.sleep(backoff.next().total_seconds())
                continue
            except PenstockError as error:
                self._error = error
                return
            backoff.reset()
            self._settle(batch, results)

    def _settle(self, batch: list[tuple[Item, RowResult]], results: list[dict[str, Any]]) -> None:
        for (item, how), result in zip(batch, results, strict=True):
            self._said.popleft()
            self.held.discard(item)
            if result["result"] in (StageReportAnswer.SUPERSEDED, StageReportAnswer.UNKNOWN):
                item.is_lost = True
                self._log.warning("report_superseded", filename=how.filename, shard=how.shard, fence=how.fence)
        if not self._said:
            self._some.clear()
            self._idle.set()
