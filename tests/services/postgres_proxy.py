"""Proxy in front of PostgreSQL that can be shut, frozen or cut, while other clients use the server directly."""

import asyncio
import contextlib
import shutil
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, quote, urlsplit

_NAME = ".s.PGSQL.5432"


class PostgresProxy(AbstractAsyncContextManager["PostgresProxy"]):
    """A socket like that of the server of *url*, which forwards everything until it is paused."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._behind = str(Path(parse_qs(parts.query)["host"][0]) / _NAME)
        self._folder = Path(tempfile.mkdtemp(prefix="gate-"))
        self.url = parts._replace(query=f"host={quote(str(self._folder))}").geturl()
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._lines: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._lost: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shut()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def open(self) -> None:
        """Accept new connections."""
        self._server = await asyncio.start_unix_server(self._pass, self._folder / _NAME)

    async def shut(self) -> None:
        """Simulate a server that is down: break its connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        (self._folder / _NAME).unlink(missing_ok=True)
        for task in list(self._lines):
            task.cancel()
        if self._lines:
            await asyncio.wait(list(self._lines))

    def freeze(self) -> None:
        """Simulate a frozen server: accept connections, but send nothing."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def lose(self) -> None:
        """Simulate a server that moved: existing connections stay silent forever, new ones work."""
        self._lost.update(self._lines)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lines[task] = writer
        try:
            await self._flows.wait()
            with contextlib.suppress(OSError):
                inner, outer = await asyncio.open_unix_connection(self._behind)
                try:
                    await self._forward_both(task, (reader, outer), (inner, writer))
                finally:
                    outer.close()
        finally:
            writer.close()
            del self._lines[task]

    async def _forward_both(
        self, line: "asyncio.Task[None]", *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        tasks = [asyncio.create_task(self._forward(line, *way)) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(
        self, line: "asyncio.Task[None]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65_536):
            await self._flows.wait()
            if line not in self._lost:
                writer.write(data)
                await writer.drain()
