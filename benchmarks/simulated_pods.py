"""Pods without serving processes, many in one program: each listens, asks the primary and keeps its own memory.

What each hears and what it then holds goes to a file, a line for each: the pod, which of both, when, which version.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from penstock.app.factories import make_refdata_redis
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.kernel.telemetry.telemetry import Telemetry, configure_logging
from penstock.refdata.contract import INVALIDATIONS
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.pod.load.metrics import PodMetrics
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.settings import Settings, load_settings

HEARD, HELD = "heard", "held"
_LIMIT = 64 * 1024 * 1024
Note = Callable[[str, int], None]


class _Pod(PodLoader):
    """A loader that tells when it hears of a version before it does what there is to do."""

    note: Note
    target: DictionaryKey

    def handle_invalidation(self, body: str) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            invalidation = INVALIDATIONS.decode(body)
            if (invalidation.tenant_id, invalidation.dict_code) == self.target:  # on the channel are all dictionaries
                self.note(HEARD, invalidation.version)
        super().handle_invalidation(body)


async def run(settings: Settings, name: str, count: int, file: Path, target: DictionaryKey) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/dev/shm")))
        lines = stack.enter_context(file.open("w", buffering=1))
        opened = Database.open(settings.database.url, size=count, prefers_indexes=True, decodes_json=False)
        db = await stack.enter_async_context(opened)
        for number in range(count):
            pod = await _start(stack, settings, db, folder / str(number), f"{name}-{number}")
            seen = dict.fromkeys((HEARD, HELD), 0)

            def note(what: str, version: int, *, who: str = f"{name}-{number}", seen: dict[str, int] = seen) -> None:
                if version > seen[what]:
                    seen[what] = version
                    print(who, what, time.time(), version, file=lines)

            pod.note, pod.target = note, target
            following = asyncio.create_task(_follow(pod, target, note))
            stack.push_async_callback(cancel_and_wait, following)
        print(json.dumps({"api": name}), flush=True)
        await stopping.wait()


async def _start(stack: AsyncExitStack, settings: Settings, db: Database, folder: Path, name: str) -> _Pod:
    folder.mkdir()
    memory, telemetry, section = MemoryWriter(folder, limit=_LIMIT), Telemetry(), settings.refdata
    stack.callback(memory.close)
    signals = make_refdata_redis(settings)
    stack.push_async_callback(signals.close)
    pod = _Pod(db, DictionaryCatalogue(section), memory, section.query, PodMetrics(telemetry.registry), telemetry)
    pod.note, pod.target = (lambda _what, _version: None), DictionaryKey("", "")
    await stack.enter_async_context(pod.start(signals, name))
    await pod.is_loaded.wait()
    return pod


async def _follow(pod: PodLoader, target: DictionaryKey, note: Note) -> None:
    state = pod.ensure_state(target)
    while True:
        await state.wait_for_version(state.version + 1)
        note(HELD, state.version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    args = parser.parse_args()
    configure_logging("WARNING")
    settings = load_settings(args.config)
    section = settings.refdata
    target = DictionaryKey((section.tenants or [""])[0], section.dictionaries[0].code)
    uvloop.run(run(settings, args.name, args.count, args.file, target))


if __name__ == "__main__":
    main()
