"""Where harvests are measured: one local source, asked by all, and one PostgreSQL, a fresh database each."""

import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx

from benchmarks import peers
from benchmarks.harvest_ours import PAGE, PARTITIONS, Harvested, harvest
from benchmarks.peers import harvest_env
from benchmarks.servers import served
from benchmarks.session import Session
from penstock.harvest.config import PartitionsSection
from penstock.harvest.model import PartitionKind, PartitionRange
from penstock.harvest.plan.heatmap import make_heatmap
from penstock.kernel.db.embedded import run_embedded_postgres

# What dlt's performance guide recommends, as far as it made dlt faster here.
DLT = {
    "RUNTIME__DLTHUB_TELEMETRY": "false",
    "RUNTIME__LOG_LEVEL": "CRITICAL",
    "DATA_WRITER__DISABLE_COMPRESSION": "true",
}
DLT_PARALLEL = {"EXTRACT__WORKERS": "30", "EXTRACT__MAX_PARALLEL_ITEMS": "60"}
SEED = 7
_numbers = itertools.count()
Parameters = dict[str, str]


@dataclass(frozen=True)
class Place:
    """A source of so many records, and a PostgreSQL."""

    source: str
    postgres: str
    folder: Path
    records: int
    ranges: list[Parameters]

    async def harvested(self, latency_ms: int) -> Harvested:
        """By Penstock."""
        async with self._prepared(latency_ms) as (database, folder):
            return await harvest(database, self.source, folder, self.records)

    async def harvested_by_dlt(self, latency_ms: int, *, in_parallel: bool) -> dict[str, float]:
        """By dlt: seconds in all, by its stages, and of the processors."""
        async with self._prepared(latency_ms) as (database, folder):
            order = self._order(database, folder, in_parallel=in_parallel)
            path = folder / "order.json"
            path.write_text(json.dumps(order))
            result = await peers.ask(await harvest_env.python(), harvest_env.DLT, str(path))
        if result["rows"] != self.records:
            raise RuntimeError(f"dlt harvested {result['rows']} of {self.records} records")
        return result

    def _order(self, database: str, folder: Path, *, in_parallel: bool) -> dict[str, object]:
        parts = urlsplit(database)
        workers = {"NORMALIZE__WORKERS": "2", "DATA_WRITER__FILE_MAX_ITEMS": str(self.records // 4)}
        return {
            "source": self.source,
            "sockets": parse_qs(parts.query)["host"][0],
            "database": parts.path.lstrip("/"),
            "folder": str(folder),
            "page": PAGE,
            "ranges": self.ranges if in_parallel else [],
            "settings": {**DLT, **workers, **(DLT_PARALLEL if in_parallel else {})},
        }

    @asynccontextmanager
    async def _prepared(self, latency_ms: int) -> AsyncIterator[tuple[str, Path]]:
        """Yield a new database and folder, and the source with its latency; both are deleted afterwards."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self.source}/admin/faults", json={"latency_ms": latency_ms})).raise_for_status()
        try:
            async with fresh_database(self.postgres) as database:
                yield database, folder
        finally:
            shutil.rmtree(folder)


@asynccontextmanager
async def place(session: Session, records: int) -> AsyncIterator[Place]:
    """Start the source and PostgreSQL, and yield both."""
    program = ("-m", "penstock.cli.main", "harvest", "source", "--port", "0", "--json")
    async with AsyncExitStack() as stack:
        postgres = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        source = await stack.enter_async_context(served(*program, "--records", str(records), "--seed", str(SEED)))
        yield Place(source, postgres, session.folder, records, await _ranges(source))


@asynccontextmanager
async def fresh_database(url: str) -> AsyncIterator[str]:
    """An empty one, whose files are on disk as all before them are; gone afterwards."""
    name = f"bench_{next(_numbers)}"
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.execute("CHECKPOINT")
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


async def _ranges(source: str) -> list[Parameters]:
    """The partitions Penstock makes of the source, as parameters of requests."""
    async with httpx.AsyncClient(base_url=source) as client:

        async def count(range_: PartitionRange) -> int:
            return int((await client.get("/records/count", params=_parameters(range_))).json()["total"])

        heatmap = await make_heatmap(count, PartitionsSection(count=PARTITIONS))
    return [_parameters(part.range) for part in heatmap.parts]


def _parameters(range_: PartitionRange) -> Parameters:
    if range_.kind is PartitionKind.NULL:
        return {"price_null": "true"}
    ends = {"price_from": range_.lower, "price_below": range_.upper}
    return {name: str(end) for name, end in ends.items() if end is not None}
