"""Query pods as they run in production, on dictionaries of a size that is asked for."""

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from benchmarks.servers import Served, started
from penstock.app.parts import open_refdata
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

PROGRAM = ("-m", "penstock.cli.main")
_SHARED_MEMORY = Path("/dev/shm")
# Keys of 8 characters and payloads of about 40 bytes, in as many dictionaries as there are codes.
_FILL = """
INSERT INTO dictionary_item (tenant_id, dict_code, item_key, payload, updated_at)
SELECT $1, code, lpad(n::text, 8, '0'),
       jsonb_build_object('name', 'item ' || lpad(n::text, 7, '0'), 'rate', n % 1000 + 0.25), now()
FROM unnest($2::text[]) AS code, generate_series(0, $3 - 1) AS n"""
_STAND = """
INSERT INTO dictionary_meta (tenant_id, dict_code, version, updated_at)
SELECT $1, code, 1, now() FROM unnest($2::text[]) AS code"""


@dataclass(frozen=True)
class Dictionaries:
    """Dictionaries of one tenant, each with so many items."""

    tenant: str
    codes: list[str]
    items: int


@dataclass(frozen=True)
class Pod:
    """A pod that is ready, how long that took, and the folder of its memory."""

    served: Served
    seconds: float
    memory: Path

    @property
    def serving_pids(self) -> list[int]:
        children = psutil.Process(self.served.pid).children()
        return [child.pid for child in children if "penstock.refdata.pod.serve.main" in child.cmdline()]

    @property
    def memory_bytes(self) -> int:
        """What its copy of the data really takes."""
        return sum(file.stat().st_blocks * 512 for file in self.memory.rglob("*") if file.is_file())

    def url(self, tenant: str, code: str) -> str:
        return f"{self.served.api}/v1/tenants/{tenant}/dictionaries/{code}"


def settings_for(url: str, held: Dictionaries, **sections: Any) -> dict[str, Any]:
    """Return penstock.yaml of all roles of these dictionaries."""
    refdata = {"tenants": [held.tenant], "dictionaries": [{"code": code} for code in held.codes]}
    given = {"database": {"url": url}, "telemetry": {"log_level": "WARNING"}, **sections}
    return {**given, "refdata": {**refdata, **sections.get("refdata", {})}}


async def fill(url: str, *dictionaries: Dictionaries) -> None:
    """Write them into `dictionary_item`, at version 1."""
    async with open_refdata(Settings.model_validate({"database": {"url": url}}), Telemetry()) as platform:
        for held in dictionaries:
            await platform.db.execute(_FILL, held.tenant, held.codes, held.items)
            await platform.db.execute(_STAND, held.tenant, held.codes)
        await platform.db.execute("VACUUM ANALYZE dictionary_item")
        await platform.db.execute("CHECKPOINT")


@asynccontextmanager
async def query_api(
    settings: Mapping[str, Any], *args: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Pod]:
    """`penstock serve query-api`, ready, until the end."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    async with AsyncExitStack() as stack:
        memory = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=parent))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        query = {**settings["refdata"].get("query", {}), "memoryDir": str(memory)}
        file = written({**settings, "refdata": {**settings["refdata"], "query": query}}, memory)
        command = (*PROGRAM, "serve", "query-api", "--port", "0", "--json", "--config", str(file), *args)
        began = perf_counter()
        pod = await stack.enter_async_context(started(*command, env=env))
        yield Pod(pod, perf_counter() - began, memory)


def written(settings: Mapping[str, Any], folder: Path) -> Path:
    """A penstock.yaml of its own; JSON is YAML too."""
    descriptor, name = tempfile.mkstemp(suffix=".yaml", dir=folder)
    with os.fdopen(descriptor, "w") as file:
        json.dump(settings, file)
    return Path(name)
