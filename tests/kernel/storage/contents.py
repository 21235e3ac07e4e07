"""The contents of a storage, for tests."""

import asyncio
import subprocess
import sys
from pathlib import Path

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.storage import RESERVED, Storage
from penstock.kernel.storage.objects import ObjectStorage
from tests.services.s3 import S3Bucket


async def paths(storage: Storage, prefix: str = "") -> list[str]:
    return [info.path async for info in storage.list(prefix)]


async def run_together(program: str, root: Path, processes: int = 4) -> list[int]:
    """Run *program* in several processes that start at the same moment; return the numbers that they print."""
    whole = f"""
import asyncio, pathlib, sys
from penstock.kernel.errors import Conflict
from penstock.kernel.storage.folder import FolderStorage
storage, name = FolderStorage(pathlib.Path(sys.argv[1])), sys.argv[2]
async def main():
{program}
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", whole, str(root), f"process {number}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(processes)
    ]
    for process in started:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in started))
    return [int(output) for output, _ in outputs]


def drafts(root: Path) -> list[Path]:
    return sorted((root / RESERVED / "drafts").iterdir())


async def assert_down(bucket: ObjectStorage, tmp_path: Path, *, within: float) -> None:
    (tmp_path / "file").write_bytes(b"content")
    calls = [
        bucket.put("a", b""),
        bucket.create("a", b""),
        bucket.replace("a", b"", etag="any"),
        bucket.put_file("a", tmp_path / "file"),
        bucket.get("a"),
        bucket.read_info("a"),
        bucket.delete("a"),
        bucket.check(),
        anext(bucket.list()),
        anext(bucket.stream("a")),
    ]
    async with asyncio.timeout(within):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, Transient) and outcome.hint for outcome in outcomes)
    assert {outcome.code for outcome in outcomes if isinstance(outcome, PenstockError)} == {"STORAGE_DOWN"}


def object_url(s3: S3Bucket, key: str) -> str:
    return f"{s3.options['endpoint']}/{s3.url.removeprefix('s3://')}/{key}"
