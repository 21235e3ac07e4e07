"""The load: requests are sent at a constant rate, independent of earlier responses."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from drills.faults import RESPONSE_LIMIT
from drills.http import Endpoint, RequestFailure, Response
from drills.recorder import Outcome, Read, Recorder, Write
from drills.target import Rates, Target

LATE = 0.01  # seconds after its due time from which a request counts as sent late by the client
OPEN_LIMIT = 5_000  # open requests; further ones are not sent and count as errors
BEHIND = "behind"
POLL_INTERVAL = 0.02  # seconds between two requests for the version of a pod
VISIBLE_WITHIN = 2.0
_WRITE_TIMEOUT = 3.0
_RETRY_DELAY, _MAX_RETRY_DELAY = 0.1, 2.0


@dataclass(frozen=True)
class Keys:
    """The keys of one drill, which no other drill uses."""

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
    """Readers, writers and version polls of one target."""

    def __init__(self, target: Target, rates: Rates, keys: Keys, recorder: Recorder, timeout: float) -> None:
        self._target = target
        self._rates = rates
        self._keys = keys
        self._recorder = recorder
        self._patience = timeout
        self._pods = [Endpoint(url, token=target.token) for url in target.query_urls.values()]
        self._commands = Endpoint(target.command_url, token=target.token, timeout=_WRITE_TIMEOUT)
        self._open: dict[asyncio.Task[None], float] = {}
        self._turn = 0
        self._stopping = asyncio.Event()

    async def run(self, seconds: float | None = None, *, reads: float | None = None) -> None:
        """Send requests for *seconds* or until cancelled; then wait for the open requests without further retries."""
        looking = [asyncio.create_task(self._poll_version(pod)) for pod in range(len(self._pods))]
        looking.append(asyncio.create_task(self._watch_open_requests()))
        try:
            async with asyncio.TaskGroup() as pace:
                pace.create_task(self._send_at_rate(self._rates.reads if reads is None else reads, seconds, self._read))
                pace.create_task(self._send_at_rate(self._rates.writes, seconds, self._write))
        except asyncio.CancelledError:
            self._stopping.set()
            raise
        finally:
            await self._wait_for_requests()
            await self._wait_until_visible()
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            self._stopping.clear()

    def close(self) -> None:
        for endpoint in (*self._pods, self._commands):
            endpoint.close()

    async def _send_at_rate(
        self, rate: float, seconds: float | None, launch: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        if not rate:
            return
        started_at, number = self._recorder.now(), 0
        end = None if seconds is None else started_at + seconds
        while (
            end is None or started_at + number / rate < end
        ):  # requests that were due while the client was blocked are sent late
            now = self._recorder.now()
            while (due := started_at + number / rate) <= now and (end is None or due < end):
                self._launch(due, launch)
                number += 1
            following = started_at + number / rate if end is None else min(started_at + number / rate, end)
            await asyncio.sleep(max(following - self._recorder.now(), 0))

    def _launch(self, due: float, launch: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        if len(self._open) >= OPEN_LIMIT:
            self._recorder.unsent.append(due)
            self._recorder.record_incident("client", "not sent")
            return
        task = asyncio.create_task(launch(due))
        self._open[task] = due
        task.add_done_callback(self._open.pop)

    async def _wait_for_requests(self) -> None:
        while self._open:
            await asyncio.wait(list(self._open))

    async def _wait_until_visible(self) -> None:
        """Wait until the pods return the last acknowledged version, for a short time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(VISIBLE_WITHIN):
                while self._recorder.is_any_behind():  # noqa: ASYNC110 - other processes make it so
                    await asyncio.sleep(POLL_INTERVAL)

    async def _read(self, due: float) -> None:
        recorder = self._recorder
        pod = self._turn = (self._turn + 1) % len(self._pods)
        min_version = recorder.acknowledged_version if random.random() < self._rates.barrier else None  # noqa: S311 - no secret
        key = random.randrange(self._keys.count)  # noqa: S311
        read = Read(due, recorder.now(), pod, key, min_version)
        read.first_error = read.error = await self._read_item(read, pod)
        if read.error:
            recorder.record_incident("read", read.error)
            read.error = await self._read_item(read, self._pick_other(pod))
        if read.error:
            recorder.record_incident("retried read", read.error)
        read.ended = recorder.now()
        recorder.reads.append(read)

    def _pick_other(self, pod: int) -> int:
        others = len(self._pods) - 1
        return (pod + 1 + random.randrange(others)) % len(self._pods) if others else pod  # noqa: S311

    async def _read_item(self, read: Read, pod: int) -> str:
        """Send a read and store the response in *read*; return the error, or an empty string."""
        headers = {} if read.min_version is None else {"X-Min-Version": str(read.min_version)}
        path = f"{self._target.items_path}/items/{self._keys.name(read.key)}"
        try:
            response = await self._pods[pod].request("GET", path, headers)
        except RequestFailure as error:
            return error.kind
        read.status, read.version, read.is_from_memory = response.status, response.version, response.is_from_memory
        if response.status >= 500 or response.status == 429:
            return str(response.status)
        if response.version is not None and response.is_from_memory:
            self._recorder.record_version(pod, response.version)
        if response.status == 200:
            read.sequence = parse_sequence(response.body)
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
            await asyncio.sleep(min(_RETRY_DELAY * 2 ** (write.attempts - 1), _MAX_RETRY_DELAY))
        write.ended = recorder.now()

    def _command(self, write: Write) -> bytes:
        item = {"key": self._keys.name(write.key), "op": "UPSERT", "payload": self._keys.payload(write.sequence)}
        command = {"eventId": write.event_id, "dictCode": self._target.dict_code, "eventType": "DELTA", "items": [item]}
        return orjson.dumps(command)

    async def _send(self, write: Write, body: bytes) -> bool:
        """Return whether the write was acknowledged as committed."""
        try:
            response = await self._commands.request("POST", self._target.updates_path, body=body)
        except RequestFailure as error:
            self._recorder.record_incident("write", error.kind)
            return False
        if response.status == 200:
            write.version, write.outcome = _parse_version(response), Outcome.ACKNOWLEDGED
            self._recorder.record_acknowledged(write.version)
            return True
        if response.status == 202:
            write.outcome = Outcome.ACCEPTED
        self._recorder.record_incident("write", str(response.status), is_error=response.status != 202)
        return False

    async def _poll_version(self, pod: int) -> None:
        """Poll the version of a pod, and record incidents and outages."""
        while True:
            sent = self._recorder.now()
            incident = await self._poll_once(pod, sent)
            if incident:
                self._recorder.record_incident("pod", incident, is_error=False)
            if incident and incident != BEHIND:
                self._recorder.record_outage(pod, sent)
            await asyncio.sleep(POLL_INTERVAL)

    async def _poll_once(self, pod: int, sent: float) -> str:
        """Return the problem of a pod; an empty string if it returns the versions that were acknowledged in time."""
        try:
            response = await self._pods[pod].request("GET", f"{self._target.items_path}/version")
        except RequestFailure as error:
            return error.kind
        if response.status != 200 or response.version is None:
            return str(response.status)
        self._recorder.record_version(pod, response.version)
        return BEHIND if response.version < self._recorder.acknowledged_before(sent - RESPONSE_LIMIT) else ""

    async def _watch_open_requests(self) -> None:
        """Record an incident while a request takes too long."""
        while True:
            oldest = min(self._open.values(), default=None)
            if oldest is not None and self._recorder.now() - oldest > RESPONSE_LIMIT:
                self._recorder.record_incident("client", "waiting", is_error=False)
            await asyncio.sleep(0.1)


def parse_sequence(body: bytes) -> int | None:
    """Return the sequence number of the write of an item; None if the drill did not write it."""
    try:
        return int(orjson.loads(body)["sequence"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def _parse_version(response: Response) -> int:
    return int(orjson.loads(response.body)["committedVersion"])
