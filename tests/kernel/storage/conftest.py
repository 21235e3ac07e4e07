"""The storage on a folder and on S3."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernel.storage import Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.storage.objects import ObjectStorage
from tests.services.s3 import S3Bucket, open_s3_bucket


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Bucket]:
    with open_s3_bucket() as place:
        yield place


@pytest.fixture
def bucket(s3: S3Bucket) -> ObjectStorage:
    return ObjectStorage(f"{s3.url}/{uuid.uuid4().hex}/nested", s3.options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "made" / "at first write"


@pytest.fixture
def folder(root: Path) -> FolderStorage:
    return FolderStorage(root)


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest) -> Storage:
    chosen: Storage = request.getfixturevalue(request.param)
    return chosen
