"""F6: artifacts of steps: written under their attempt, and published when the report of the attempt is accepted."""

import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from penstock.flows.contract import ARTIFACT_LIMIT, ARTIFACT_NAME_LIMIT, attempt_folder, make_artifact_folder
from penstock.flows.model import StepArtifact, StepError
from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.storage import Storage, is_object_path

CheckOwnership = Callable[[], Awaitable[None]]
ARTIFACT_MISSING = "ARTIFACT_MISSING"
_NAMED_LIMIT = 20  # names in the details of an error


def check_name(name: str) -> str:
    """Return *name* if it is a valid name of an artifact; otherwise raise Invalid BAD_ARTIFACT."""
    if not is_object_path(name) or len(name) > ARTIFACT_NAME_LIMIT:
        hint = "use a relative path such as report.md or charts/1h.svg"
        raise Invalid("BAD_ARTIFACT", f"{name!r} is not a valid name of an artifact", hint=hint)
    return name


def check_names(names: Sequence[str]) -> list[str]:
    """Return the distinct names, sorted; Invalid if one is not valid, or if there are too many."""
    if len(names) > ARTIFACT_LIMIT:
        message = f"the report names {len(names)} artifacts; a step can have at most {ARTIFACT_LIMIT}"
        raise Invalid("TOO_MANY_ARTIFACTS", message, hint="pack them into an archive")
    return sorted({check_name(name) for name in names})


async def write(storage: Storage, run_id: str, step_id: str, fence: int, name: str, data: bytes) -> None:
    """Store *data* under an attempt."""
    await storage.put(f"{attempt_folder(run_id, step_id, fence)}/{check_name(name)}", data)


async def read_attempt(storage: Storage, run_id: str, step_id: str, fence: int, name: str) -> bytes | None:
    """Return the file *name* of an attempt, or None."""
    try:
        return (await storage.get(f"{attempt_folder(run_id, step_id, fence)}/{name}")).data
    except NotFound:
        return None


async def find_missing(storage: Storage, run_id: str, step_id: str, fence: int, names: Sequence[str]) -> list[str]:
    """Return those of *names* that the attempt did not write."""
    folder = attempt_folder(run_id, step_id, fence)
    return [name for name in names if await storage.read_info(f"{folder}/{name}") is None]


def make_missing_error(missing: Sequence[str]) -> StepError:
    """Return the error of a report that names artifacts its attempt did not write."""
    message = f"the report names the artifact {missing[0]}, which was not written"
    return StepError(ARTIFACT_MISSING, message, {"missing": missing[:_NAMED_LIMIT]})


async def delete_others(
    storage: Storage, kind: str, run_id: str, step_id: str, names: Sequence[str], check_ownership: CheckOwnership
) -> None:
    """Delete artifacts of a failed attempt that are not among *names*: a name may be the folder of a new artifact."""
    folder = make_artifact_folder(kind, run_id, step_id)
    retained = {f"{folder}/{name}" for name in names}
    for path in [info.path async for info in storage.list(folder)]:
        if path not in retained:
            await check_ownership()
            await storage.delete(path)


async def publish(
    storage: Storage,
    kind: str,
    run_id: str,
    step_id: str,
    fence: int,
    names: Sequence[str],
    check_ownership: CheckOwnership,
) -> list[StepArtifact]:
    """Copy the files of an attempt to the folder of its step. A repetition has the same result."""
    source, target = attempt_folder(run_id, step_id, fence), make_artifact_folder(kind, run_id, step_id)
    return [await _copy(storage, f"{source}/{name}", f"{target}/{name}", name, check_ownership) for name in names]


async def is_unchanged(storage: Storage, artifact: StepArtifact) -> bool:
    """F19: return whether the stored object has the content that was published."""
    digest = hashlib.sha256()
    try:
        async for piece in storage.stream(artifact.path):
            digest.update(piece)
    except (NotFound, Conflict):
        return False
    return digest.hexdigest() == artifact.sha256


async def delete_attempts(storage: Storage, run_id: str, step_id: str | None = None) -> None:
    """Delete the files of attempts."""
    await delete_folder(storage, f"attempts/{run_id}" if step_id is None else f"attempts/{run_id}/{step_id}")


async def delete_folder(storage: Storage, folder: str) -> None:
    """Delete all objects in *folder*."""
    for path in [info.path async for info in storage.list(folder)]:
        await storage.delete(path)


def encode(published: Sequence[StepArtifact]) -> str:
    """Return artifacts as they are stored with their step: JSON text."""
    return orjson.dumps([asdict(artifact) for artifact in published]).decode()


def decode(documents: Sequence[Any] | None) -> list[StepArtifact]:
    """Return stored artifacts."""
    return [StepArtifact(**document) for document in documents or ()]


async def _copy(storage: Storage, source: str, target: str, name: str, check_ownership: CheckOwnership) -> StepArtifact:
    digest = hashlib.sha256()
    size = 0
    with tempfile.NamedTemporaryFile(prefix="penstock-artifact-") as file:
        async for piece in storage.stream(source):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        await check_ownership()
        await storage.put_file(target, Path(file.name))
    return StepArtifact(name, target, storage.make_uri(target), digest.hexdigest(), size)
