"""Listening sockets."""

import socket
from collections.abc import Iterator
from contextlib import suppress


def accept_queued(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept the connections that wait in the queue of *listener*, which would be reset when it is closed."""
    with suppress(BlockingIOError):
        while True:
            yield listener.accept()[0]
