"""The load: requests come when they are due, whether or not the ones before were answered."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from drills.faults import PATIENCE
from drills.http import Answer, Endpoint, NoAnswer
from drills.recorder import Outcome, Read, Recorder, Write
from drills.target import Rates, Target

LATE = 0.01  # a request sent this much after it was due: the client could not keep up
MOST_OPEN = 5_000  # requests under way; further ones are not sent, and count as errors
BEHIND = "behind"
LOOK_EVERY = 0.02  # each pod is asked for its version so often
SHOWN_WITHIN = 2.0
_WRITE_TIMEOUT = 3.0
_TRY_AGAIN, _TRY_AGAIN_AT_MOST = 0.1, 2.0


@dataclass(frozen=True)
class Keys:
    """The items of one drill: nobody else's."""

    run: str
    count: int

    @property
    def prefix(self) -> str:
        return f"drill-{self.run}-"

    def name(self, number: int) -> str:
        return f"{self.prefix}{number:05}"

    def payload(self, sequence: int) -> dict[str, object]:
        return {"drill": self.run, "sequence": sequence}


class Load:
    """Readers, writers and onlookers of one target."""

    def __init__(self, target: Target, rates: Rates, keys: Keys, recorder: Recorder, patience: float) -> None:
        self._target = target
        self._rates = rates
        self._keys = keys
        self._recorder = recorder
        self._patience = patience
        self._pods = [Endpoint(url, token=target.token) for url in target.query_urls.values()]
        self._commands = Endpoint(target.command_url, token=target.token, timeout=_WRITE_TIMEOUT)
        self._open: dict[asyncio.Task[None], float] = {}
        self._turn = 0
        self._stopping = asyncio.Event()

    async def run(self, seconds: float | None = None, *, reads: float | None = None) -> None:
        """Press for so long, or until it is cancelled: then nothing is sent again; what is under way is waited for."""
        looking = [asyncio.create_task(self._look(pod)) for pod in range(len(self._pods))]
        looking.append(asyncio.create_task(self._look_at_the_open()))
        try:
            async with asyncio.TaskGroup() as pace:
                pace.create_task(self._paced(self._rates.reads if reads is None else reads, seconds, self._read))
                pace.create_task(self._paced(self._rates.writes, seconds, self._write))
        except asyncio.CancelledError:
            self._stopping.set()
            raise
        finally:
            await self._finished()
            await self._shown()
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            self._stopping.clear()

    def close(self) -> None:
        for endpoint in (*self._pods, self._commands):
            endpoint.close()

    async def _paced(
        self, rate: float, seconds: float | None, launch: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        if not rate:
            return
        began, number = self._recorder.now(), 0
        end = None if seconds is None else began + seconds
        while end is None or began + number / rate < end:  # what was due in a stall of this client is late, not gone
            now = self._recorder.now()
            while (due := began + number / rate) <= now and (end is None or due < end):
                self._launch(due, launch)
                number += 1
            following = began + number / rate if end is None else min(began + number / rate, end)
            await asyncio.sleep(max(following - self._recorder.now(), 0))

    def _launch(self, due: float, launch: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        if len(self._open) >= MOST_OPEN:
            self._recorder.unsent.append(due)
            self._recorder.trouble("client", "not sent")
            return
        task = asyncio.create_task(launch(due))
        self._open[task] = due
        task.add_done_callback(self._open.pop)

    async def _finished(self) -> None:
        while self._open:
            await asyncio.wait(list(self._open))

    async def _shown(self) -> None:
        """Give the last writes time to be seen."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SHOWN_WITHIN):
                while self._recorder.is_any_behind():  # noqa: ASYNC110 - other processes make it so
                    await asyncio.sleep(LOOK_EVERY)

    async def _read(self, due: float) -> None:
        recorder = self._recorder
        pod = self._turn = (self._turn + 1) % len(self._pods)
        least = recorder.known if random.random() < self._rates.barrier else None  # noqa: S311 - no secret
        key = random.randrange(self._keys.count)  # noqa: S311
        read = Read(due, recorder.now(), pod, key, least)
        read.first_error = read.error = await self._ask_for(read, pod)
        if read.error:
            recorder.trouble("read", read.error)
            read.error = await self._ask_for(read, self._another(pod))
        if read.error:
            recorder.trouble("read, again", read.error)
        read.ended = recorder.now()
        recorder.reads.append(read)

    def _another(self, pod: int) -> int:
        others = len(self._pods) - 1
        return (pod + 1 + random.randrange(others)) % len(self._pods) if others else pod  # noqa: S311

    async def _ask_for(self, read: Read, pod: int) -> str:
        """Why there was no answer, or none with data; what there was is in *read*."""
        headers = {} if read.least is None else {"X-Min-Version": str(read.least)}
        path = f"{self._target.items_path}/items/{self._keys.name(read.key)}"
        try:
            answer = await self._pods[pod].ask("GET", path, headers)
        except NoAnswer as error:
            return error.kind
        read.status, read.version, read.is_from_memory = answer.status, answer.version, answer.is_from_memory
        if answer.status >= 500 or answer.status == 429:
            return str(answer.status)
        if answer.version is not None and answer.is_from_memory:
            self._recorder.saw(pod, answer.version)
        if answer.status == 200:
            read.sequence = sequence_of(answer.body)
        return ""

    async def _write(self, due: float) -> None:
        recorder = self._recorder
        key = random.randrange(self._keys.count)  # noqa: S311
        write = Write(len(recorder.writes) + 1, key, str(uuid4()), due, recorder.now())
        recorder.writes.append(write)
        body = self._command(write)
        while True:
            write.attempts += 1
            if await self._send(write, body) or recorder.now() - due > self._patience or self._stopping.is_set():
                break
            await asyncio.sleep(min(_TRY_AGAIN * 2 ** (write.attempts - 1), _TRY_AGAIN_AT_MOST))
        write.ended = recorder.now()

    def _command(self, write: Write) -> bytes:
        item = {"key": self._keys.name(write.key), "op": "UPSERT", "payload": self._keys.payload(write.sequence)}
        command = {"eventId": write.event_id, "dictCode": self._target.dict_code, "eventType": "DELTA", "items": [item]}
        return orjson.dumps(command)

    async def _send(self, write: Write, body: bytes) -> bool:
        """Whether it is known to be committed."""
        try:
            answer = await self._commands.ask("POST", self._target.updates_path, body=body)
        except NoAnswer as error:
            self._recorder.trouble("write", error.kind)
            return False
        if answer.status == 200:
            write.version, write.outcome = _version_in(answer), Outcome.ACKNOWLEDGED
            self._recorder.acknowledged(write.version)
            return True
        if answer.status == 202:
            write.outcome = Outcome.ACCEPTED
        self._recorder.trouble("write", str(answer.status), is_error=answer.status != 202)
        return False

    async def _look(self, pod: int) -> None:
        """Ask a pod for its version again and again, and note when it is away."""
        while True:
            asked = self._recorder.now()
            trouble = await self._look_once(pod, asked)
            if trouble:
                self._recorder.trouble("pod", trouble, is_error=False)
            if trouble and trouble != BEHIND:
                self._recorder.is_away(pod, asked)
            await asyncio.sleep(LOOK_EVERY)

    async def _look_once(self, pod: int, asked: float) -> str:
        """What is wrong with a pod; nothing when it answers with what was acknowledged a while ago."""
        try:
            answer = await self._pods[pod].ask("GET", f"{self._target.items_path}/version")
        except NoAnswer as error:
            return error.kind
        if answer.status != 200 or answer.version is None:
            return str(answer.status)
        self._recorder.saw(pod, answer.version)
        return BEHIND if answer.version < self._recorder.known_before(asked - PATIENCE) else ""

    async def _look_at_the_open(self) -> None:
        """What hangs is trouble before it ends."""
        while True:
            oldest = min(self._open.values(), default=None)
            if oldest is not None and self._recorder.now() - oldest > PATIENCE:
                self._recorder.trouble("client", "waiting", is_error=False)
            await asyncio.sleep(0.1)


def sequence_of(body: bytes) -> int | None:
    """Which write an item is of; None when it is of none of ours."""
    try:
        return int(orjson.loads(body)["sequence"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def _version_in(answer: Answer) -> int:
    return int(orjson.loads(answer.body)["committedVersion"])
