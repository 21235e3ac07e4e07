"""The errors of all stores."""

from pathlib import Path

from penstock.kernel.errors import Conflict, Invalid, NotFound, Transient


def make_missing_object_error(path: str) -> NotFound:
    return NotFound("OBJECT_NOT_FOUND", f"the object {path} does not exist", hint="list the objects of its folder")


def make_existing_object_error(path: str) -> Conflict:
    return Conflict("OBJECT_EXISTS", f"the object {path} exists already", hint="read it, or replace it with its etag")


def make_changed_object_error(path: str) -> Conflict:
    hint = "read it again and use its new etag"
    return Conflict("OBJECT_CHANGED", f"the object {path} has another etag: it was changed", hint=hint)


def make_storage_down_error(location: str, reason: str, *, hint: str) -> Transient:
    return Transient("STORAGE_DOWN", f"the storage {location} does not work: {reason}", hint=hint)


def measure_source(source: Path) -> int:
    """Return the size of the file to upload; Invalid NO_SOURCE if it does not exist."""
    if not source.is_file():
        raise Invalid("NO_SOURCE", f"the file {source} does not exist", hint="pass the path of the file to store")
    return source.stat().st_size
