"""event-ingest: takes raw event files, makes them part of the pipeline, and says when each is complete.

It may die at any point and be started again: registering twice is a success, a file is written whole or not at all,
and one that is done is left alone.
"""

import asyncio
import signal
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.kernel.tasks.wait import wait_event
from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import Stage, StageStatus

from . import options
from .events import BadLine, line_of, read_events
from .files import ingested_file, write_whole

STAGE = Stage.EVENT_INGEST
log = structlog.get_logger(stage=STAGE.value)


@dataclass
class Ingest:
    """The producer: one look at the raw files after another."""

    client: PipelineClient
    raw: Path
    folder: Path
    shards: int
    worker: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _done: set[str] = field(default_factory=set)

    async def look(self) -> None:
        """Take in every raw file that is not done yet; Transient when the server is away."""
        for path in sorted(self.raw.glob("[!.]*.jsonl")):
            if self.stopping.is_set():
                return
            if path.stem not in self._done:
                await self._take_or_tell(path)

    async def _take_or_tell(self, path: Path) -> None:
        try:
            await self._take(path)
        except Transient:
            raise
        except PenstockError as error:  # one file the server refuses must not hold up the others
            log.warning("refused", filename=path.stem, code=error.code, error=error.message)

    async def _take(self, path: Path) -> None:
        name = path.stem
        status = await self._status(name)
        if status is StageStatus.DONE:
            self._done.add(name)
        elif status is not StageStatus.FAILED:  # a failed file waits for a retry by an operator
            await self._begin(name, status)
            await self._bring_in(path, name)

    async def _status(self, name: str) -> StageStatus | None:
        """Return the status of the file; None if it is not registered."""
        try:
            known = await self.client.file(name)
        except NotFound:
            return None
        return StageStatus(known["shards"][0]["event_ingest_status"])

    async def _begin(self, name: str, status: StageStatus | None) -> None:
        await self.client.register(name, range(self.shards), worker=self.worker)
        if status is StageStatus.NEW:  # it failed before and was set back
            await self.client.move(STAGE, "start", name, worker=self.worker)

    async def _bring_in(self, path: Path, name: str) -> None:
        try:
            await asyncio.to_thread(copy_checked, path, ingested_file(self.folder, name))
        except BadLine as error:
            await self.client.move(STAGE, "fail", name, worker=self.worker, error=str(error))
            log.warning("failed", filename=name, error=str(error))
        else:
            # Last: from here on the splitter may ask for the file.
            await self.client.move(STAGE, "done", name, worker=self.worker)
            self._done.add(name)
            log.info("done", filename=name)


def copy_checked(raw: Path, target: Path) -> None:
    """Write all events of *raw* to *target*, or raise BadLine and write nothing."""
    write_whole(target, (line_of(event.fields) for event in read_events(raw)))


async def run(given: Namespace) -> None:
    async with PipelineClient(given.url, token=options.token()) as client:
        ingest = Ingest(client, given.raw, given.folder, given.shards, given.worker)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ingest.stopping.set)
        if given.once:
            await ingest.look()
            return
        while not ingest.stopping.is_set():
            try:
                await ingest.look()
            except Transient as error:
                log.warning("server_away", code=error.code, error=error.message)
            await wait_event(ingest.stopping, given.every)


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--raw", type=Path, required=True, help="where raw files appear, as NAME.jsonl, by a rename")
    parser.add_argument("--shards", type=int, default=2, help="how many shards there are (%(default)s)")
    parser.add_argument("--every", type=float, default=1, help="seconds between two looks (%(default)s)")
    parser.add_argument("--once", action="store_true", help="take what is there, and end")
    # The name stays the same after a restart: only who began a file may end it.
    parser.set_defaults(worker=STAGE.value)
    given = parser.parse_args()
    if given.raw.resolve() == given.folder.resolve():
        parser.error("--raw and --folder must differ: the stages leave files with the same ending")
    configure_logging()
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
