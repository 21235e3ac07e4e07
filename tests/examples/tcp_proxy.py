"""TCP proxy between a daemon and its server that a test can cut."""

import asyncio
from types import TracebackType
from urllib.parse import urlsplit


class TcpProxy:
    """An address that forwards to a server until it is cut."""

    def __init__(self, url: str) -> None:
        self._far = urlsplit(url)
        self._is_cut = False
        self._ends: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps)

    def cut(self) -> None:
        """Nothing goes through any more, in either direction."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def restore(self) -> None:
        self._is_cut = False

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        far_reader, far_writer = await asyncio.open_connection(self._far.hostname, self._far.port)
        self._ends.add(far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        if self._is_cut:
            self.cut()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass  # cut, or one side is gone
        finally:
            target.transport.abort()
            self._ends.discard(target)
