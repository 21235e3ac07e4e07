"""Fixtures of the tree in a folder and in buckets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ingest.tree_backends import SUPPLIER, BucketBackend, FolderBackend, TreeBackend, s3_backend, stored_backend
from tests.services.s3 import S3Bucket, open_s3_bucket


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Bucket]:
    with open_s3_bucket() as workspace:
        yield workspace


@pytest.fixture
def folder(tmp_path: Path) -> FolderBackend:
    root = tmp_path / "root"
    root.mkdir()
    backend = FolderBackend(root)
    backend.tree.prepare(SUPPLIER)
    return backend


@pytest.fixture
def s3_bucket(s3: S3Bucket, tmp_path: Path) -> Iterator[BucketBackend]:
    with s3_backend(s3, tmp_path / "machines") as backend:
        yield backend


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[BucketBackend]:
    with stored_backend(tmp_path / "objects", tmp_path / "machines") as backend:
        yield backend


@pytest.fixture(params=["folder", "s3_bucket", "stored"])
def backend(request: pytest.FixtureRequest) -> TreeBackend:
    chosen: TreeBackend = request.getfixturevalue(request.param)
    return chosen
