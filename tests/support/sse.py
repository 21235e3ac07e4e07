"""Read server-sent events (SSE)."""

import asyncio
import json

import httpx

from tests.support.types import Json

_TIMEOUT = 20  # seconds until the next event must have come


def parse_event(text: str) -> dict[str, str]:
    """Return the fields of one event by name."""
    fields: dict[str, str] = {}
    for line in text.strip().split("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    return fields


class EventStream:
    """Read the moves that a streaming response sends as server-sent events."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Json]:
        """Return the id and the data of the next move, skipping comments."""
        while True:
            event = parse_event(await self._block())
            if event.get("event") == "move":
                return event["id"], json.loads(event["data"])

    async def _block(self) -> str:
        lines: list[str] = []
        async with asyncio.timeout(_TIMEOUT):
            while line := await anext(self._lines):
                lines.append(line)
        return "\n".join(lines)
