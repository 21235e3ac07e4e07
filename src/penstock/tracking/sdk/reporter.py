"""The outcomes of items, until the server has them."""

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
    """Sends the outcomes of items in batches, and retries until the server accepts them."""

    def __init__(self, client: PipelineClient, stage: Stage) -> None:
        self.items: set[Item] = set()  # claimed and not yet reported
        self._client = client
        self._stage = stage
        self._pending: deque[tuple[Item, RowResult]] = deque()
        self._has_pending = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: PenstockError | None = None
        self._log = structlog.get_logger().bind(stage=stage.value)

    def add(self, item: Item, result: RowResult) -> None:
        """Send *result* with the next request."""
        self._pending.append((item, result))
        self._idle.clear()
        self._has_pending.set()

    def raise_error(self) -> None:
        """Raise the error of a report that the server refused; further work would be refused too."""
        if self._error is not None:
            raise self._error

    async def flush(self, *, timeout: float) -> None:
        """Wait until all reports are sent, at most *timeout* seconds; raise the error of a refused report."""
        self.raise_error()
        if not await wait_event(self._idle, timeout):
            self._log.warning("reports_unsent", reports=len(self._pending))
        self.raise_error()

    async def run(self) -> None:
        """Send reports until cancelled or refused; when the sending ends for any reason, `flush` returns."""
        try:
            await self._send()
        finally:
            self._idle.set()

    async def _send(self) -> None:
        backoff = Backoff()
        while True:
            await self._has_pending.wait()
            batch = list(self._pending)[:BATCH_LIMIT]
            try:
                results = await self._client.report(self._stage, [result for _, result in batch])
            except Transient as error:
                self._log.warning("report_failed", code=error.code, error=error.message)
                await asyncio.sleep(backoff.compute_next().total_seconds())
                continue
            except PenstockError as error:
                self._error = error
                return
            backoff.reset()
            self._settle(batch, results)

    def _settle(self, batch: list[tuple[Item, RowResult]], results: list[dict[str, Any]]) -> None:
        for (item, _), result in zip(batch, results, strict=True):
            self._pending.popleft()
            self.items.discard(item)
            if result["result"] in (StageReportAnswer.SUPERSEDED, StageReportAnswer.UNKNOWN):
                item.is_lost = True
                self._log.warning("report_superseded", filename=item.filename, shard=item.shard, fence=item.fence)
        if not self._pending:
            self._has_pending.clear()
            self._idle.set()
