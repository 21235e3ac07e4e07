"""The failures of a store, in the same words whichever store it is."""

from pathlib import Path

from penstock.kernel.errors import Conflict, Invalid, NotFound, Transient


def missing_object(path: str) -> NotFound:
    return NotFound("OBJECT_NOT_FOUND", f"there is no object {path}", hint="see what its folder lists")


def existing_object(path: str) -> Conflict:
    return Conflict("OBJECT_EXISTS", f"{path} is there already", hint="read it, or replace it by its etag")


def changed_object(path: str) -> Conflict:
    return Conflict("OBJECT_CHANGED", f"{path} is not what the etag names", hint="read it again, then decide")


def storage_down(where: str, why: str, *, hint: str) -> Transient:
    return Transient("STORAGE_DOWN", f"the storage {where} does not work: {why}", hint=hint)


def source_size(source: Path) -> int:
    """How large the file to upload is; Invalid NO_SOURCE unless there is one."""
    if not source.is_file():
        raise Invalid("NO_SOURCE", f"there is no file {source}", hint="give the path of the file to store")
    return source.stat().st_size
