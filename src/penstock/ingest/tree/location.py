"""The tree at a root, which is the path of a folder or the URL of a bucket."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.ingest.config import IngestSection
from penstock.ingest.tree.folder import FolderTree
from penstock.ingest.tree.port import FileTree
from penstock.kernel.config.loader import resolve_secret


def open_tree(root: str, options: Mapping[str, str] | None = None) -> FileTree:
    """Return the tree at *root*; *options* are those of the object store."""
    parts = urlsplit(root)
    if parts.scheme in ("", "file"):
        return FolderTree(Path(unquote(parts.path)) if parts.scheme else Path(root))
    from penstock.ingest.tree.bucket import BucketTree  # load only where they are used
    from penstock.kernel.storage.objects import ObjectStorage

    return BucketTree(ObjectStorage(root, options or {}), root)


def make_tree(root: str, section: IngestSection) -> FileTree:
    """Return the tree at *root* with the options and the secrets of *section*."""
    secrets = {key: resolve_secret(reference, f"ingest.secrets.{key}") for key, reference in section.secrets.items()}
    return open_tree(root, {**section.options, **secrets})
