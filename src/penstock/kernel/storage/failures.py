"""The errors of all stores."""

from pathlib import Path

from penstock.kernel.errors import Conflict, Invalid, NotFound, Transient


def missing_object(path: str) -> NotFound:
    return NotFound("OBJECT_NOT_FOUND", f"the object {path} does not exist", hint="list the objects of its folder")


def existing_object(path: str) -> Conflict:
    return Conflict("OBJECT_EXISTS", f"the object {path} exists already", hint="read it, or replace it with its etag")


def changed_object(path: str) -> Conflict:
    hint = "read it again and use its new etag"
    return Conflict("OBJECT_CHANGED", f"the object {path} has another etag: it was changed", hint=hint)


def storage_down(location: str, reason: str, *, hint: str) -> Transient:
    return Transient("STORAGE_DOWN", f"the storage {location} does not work: {reason}", hint=hint)


def source_size(source: Path) -> int:
    """Return the size of the file to upload; Invalid NO_SOURCE if it does not exist."""
    if not source.is_file():
        raise Invalid("NO_SOURCE", f"the file {source} does not exist", hint="pass the path of the file to store")
    return source.stat().st_size
