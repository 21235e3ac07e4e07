"""F6: what steps leave behind: written under the attempt, published when the attempt is the one that counts."""

import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from penstock.flows.contract import ARTIFACT_LIMIT, ARTIFACT_NAME_LIMIT, artifact_folder, attempt_folder
from penstock.flows.model import StepArtifact, StepError
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.storage import Storage, is_object_path

IsOurs = Callable[[], Awaitable[None]]
ARTIFACT_MISSING = "ARTIFACT_MISSING"
_TOLD = 20  # names in one error


def checked_name(name: str) -> str:
    """*name* itself when it can be an artifact's; else Invalid BAD_ARTIFACT."""
    if not is_object_path(name) or len(name) > ARTIFACT_NAME_LIMIT:
        hint = "use a relative path such as report.md or charts/1h.svg"
        raise Invalid("BAD_ARTIFACT", f"{name!r} cannot be the name of an artifact", hint=hint)
    return name


def checked_names(names: Sequence[str]) -> list[str]:
    """All of them, each once; Invalid when there are too many."""
    if len(names) > ARTIFACT_LIMIT:
        raise Invalid("TOO_MANY_ARTIFACTS", f"a step has at most {ARTIFACT_LIMIT} artifacts", hint="pack them together")
    return sorted({checked_name(name) for name in names})


async def write(storage: Storage, run_id: str, step_id: str, fence: int, name: str, data: bytes) -> None:
    """Keep *data* under an attempt."""
    await storage.put(f"{attempt_folder(run_id, step_id, fence)}/{checked_name(name)}", data)


async def read_attempt(storage: Storage, run_id: str, step_id: str, fence: int, name: str) -> bytes | None:
    """What an attempt wrote; None when it did not."""
    try:
        return (await storage.get(f"{attempt_folder(run_id, step_id, fence)}/{name}")).data
    except NotFound:
        return None


async def missing(storage: Storage, run_id: str, step_id: str, fence: int, names: Sequence[str]) -> list[str]:
    """Which of the artifacts a report names were not written by its attempt."""
    folder = attempt_folder(run_id, step_id, fence)
    return [name for name in names if await storage.info(f"{folder}/{name}") is None]


def missing_error(gone: Sequence[str]) -> StepError:
    """What is wrong with a report that names them."""
    return StepError(ARTIFACT_MISSING, f"the report names {gone[0]}, which is not there", {"missing": gone[:_TOLD]})


async def make_room(
    storage: Storage, kind: str, run_id: str, step_id: str, names: Sequence[str], is_ours: IsOurs
) -> None:
    """Remove what an attempt that failed published, and this one does not: a name may be another's folder."""
    folder = artifact_folder(kind, run_id, step_id)
    kept = {f"{folder}/{name}" for name in names}
    for path in [info.path async for info in storage.list(folder)]:
        if path not in kept:
            await is_ours()
            await storage.delete(path)


async def publish(
    storage: Storage, kind: str, run_id: str, step_id: str, fence: int, names: Sequence[str], is_ours: IsOurs
) -> list[StepArtifact]:
    """Copy what the attempt wrote to where it belongs. Whoever does it again copies the same."""
    source, target = attempt_folder(run_id, step_id, fence), artifact_folder(kind, run_id, step_id)
    return [await _copy(storage, f"{source}/{name}", f"{target}/{name}", name, is_ours) for name in names]


async def holds(storage: Storage, artifact: StepArtifact) -> bool:
    """F19: whether what is stored is still what was published."""
    found = hashlib.sha256()
    try:
        async for piece in storage.stream(artifact.path):
            found.update(piece)
    except (NotFound, Conflict):
        return False
    return found.hexdigest() == artifact.sha256


async def forget_attempts(storage: Storage, run_id: str, step_id: str | None = None) -> None:
    """Remove what attempts wrote."""
    await forget(storage, f"attempts/{run_id}" if step_id is None else f"attempts/{run_id}/{step_id}")


async def forget(storage: Storage, folder: str) -> None:
    """Remove everything in *folder*."""
    for path in [info.path async for info in storage.list(folder)]:
        await storage.delete(path)


def document(found: Sequence[StepArtifact]) -> str:
    """Artifacts as they are kept with their step: JSON text."""
    return orjson.dumps([asdict(one) for one in found]).decode()


def known(documents: Sequence[Any] | None) -> list[StepArtifact]:
    """Artifacts as they were kept."""
    return [StepArtifact(**one) for one in documents or ()]


async def _copy(storage: Storage, source: str, target: str, name: str, is_ours: IsOurs) -> StepArtifact:
    found = hashlib.sha256()
    size = 0
    with tempfile.NamedTemporaryFile(prefix="penstock-artifact-") as file:
        async for piece in storage.stream(source):
            found.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        await is_ours()
        await storage.put_file(target, Path(file.name))
    return StepArtifact(name, target, storage.uri(target), found.hexdigest(), size)
