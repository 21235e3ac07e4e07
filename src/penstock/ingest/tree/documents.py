"""Small JSON documents of a tree, and the hash of a file in it."""

import hashlib
from typing import Any, BinaryIO

import orjson

from penstock.ingest.model import RunArtifact


def hash_content(content: BinaryIO) -> RunArtifact:
    """Return the hash and the size of the rest of *content*."""
    digest, size = hashlib.sha256(), 0
    while piece := content.read(1 << 20):
        digest.update(piece)
        size += len(piece)
    return RunArtifact(digest.hexdigest(), size)


def encode_document(data: object) -> bytes:
    """Return *data* as indented JSON."""
    return orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n"


def parse_document(content: bytes | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty object if the file does not exist or is not valid."""
    try:
        parsed = orjson.loads(content or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
