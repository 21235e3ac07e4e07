"""Identifiers that sort by their time of creation."""

import os
import socket
import uuid
from secrets import randbits

from penstock.kernel.clock import Clock


def make_id(clock: Clock) -> uuid.UUID:
    """Return a UUIDv7: unique, and in order of creation, so that an index over it stays dense."""
    milliseconds = int(clock.now().timestamp() * 1000) & ((1 << 48) - 1)
    value = (milliseconds << 80) | (0x7 << 76) | (randbits(12) << 64) | (0b10 << 62) | randbits(62)
    return uuid.UUID(int=value)


def make_worker_name(role: str) -> str:
    """Return a name by which an operator can find the process: role, host and process id."""
    return f"{role}@{socket.gethostname()}:{os.getpid()}"
