"""Listening sockets."""

import socket
from collections.abc import Iterator
from contextlib import suppress


def accept_queued(listening: socket.socket) -> Iterator[socket.socket]:
    """Those the kernel has greeted and nobody has taken yet; whoever is left when it closes would be cut off."""
    with suppress(BlockingIOError):
        while True:
            yield listening.accept()[0]
