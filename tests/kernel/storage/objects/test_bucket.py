"""URLs and options of a bucket."""

import pytest

from penstock.kernel.errors import BadConfig
from penstock.kernel.storage.objects import ObjectStorage


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("nonsense", {}),
        ("file:///tmp", {}),
        ("s3://", {}),
        ("s3://bucket", {"regoin": "us-east-1"}),
        ("s3://bucket", {"timeout": "soon"}),
    ],
)
def test_an_invalid_bucket_is_refused_at_once(url: str, options: dict[str, str]) -> None:
    """An invalid URL or option is an error when the storage is opened."""
    with pytest.raises(BadConfig) as refused:
        ObjectStorage(url, options)
    assert refused.value.code == "BAD_STORAGE"
