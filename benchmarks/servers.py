"""Programs of ours as processes of their own, for what is measured through them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def served(*command: str) -> AsyncIterator[str]:
    """Where a Python program listens that tells so in JSON, until the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readuntil(b"}\n"))["api"]
    finally:
        process.terminate()
        await process.wait()
