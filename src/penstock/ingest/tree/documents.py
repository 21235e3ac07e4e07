"""Small JSON documents of a tree, and the hash of a file in it."""

import hashlib
from typing import Any, BinaryIO

import orjson

from penstock.ingest.model import RunArtifact


def hash_content(content: BinaryIO) -> RunArtifact:
    """The hash and size of all that is left in *content*."""
    digest, size = hashlib.sha256(), 0
    while piece := content.read(1 << 20):
        digest.update(piece)
        size += len(piece)
    return RunArtifact(digest.hexdigest(), size)


def encode_document(data: object) -> bytes:
    """A small JSON file, for programs and for people."""
    return orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n"


def parse_document(content: bytes | None) -> dict[str, Any]:
    """What a small JSON file tells; nothing when it is not there or makes no sense."""
    try:
        told = orjson.loads(content or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}
