"""T9: invalid input is answered with a problem and changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import Up

PATHS = [
    "queues/shard-splitter?updated_since=0001-01-01T00:00:00%2B14:00",
    "queues/shard-splitter?updated_before=9999-12-31T23:59:59-14:00",
    "queues/shard-splitter?updated_since=yesterday",
    "queues/shard-splitter?limit=0",
    "queues/shard-splitter?limit=1001",
    "queues/shard-splitter?offset=-1",
    "queues/shard-splitter?cursor=nonsense",
    "queues/shard-splitter?cursor=",
    "files?cursor=",
    "files/f/history?cursor=",
    "files?updated_since=0001-01-01T00:00:00%2B14:00",
    "files?stage=shard-worker",
    "files?status=lost",
    "files/a%00b",
    "files/%2e%2e",
    "files/f/99999999999/why",
    "files/f/-1/why",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of a running server."""
    folder: Path = tmp_path_factory.mktemp("up")
    with Up(folder) as up, httpx.Client(base_url=f"{up.api}/api/v1/pipeline/") as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_invalid_query_is_422(server: httpx.Client, path: str) -> None:
    """T9: an invalid path or query gets a problem with a code, never a 5xx."""
    answer = server.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert answer.json()["code"]


@pytest.mark.parametrize(
    "body",
    [
        {"failed_since": "0001-01-01T00:00:00+14:00"},
        {"failed_since": "2025-01-01T00:00:00"},
        {"error_contains": "a\0b"},
        {"limit": 0},
        {"shards": []},
        {"shrads": [1]},
    ],
)
def test_invalid_filter_retries_nothing(server: httpx.Client, body: dict[str, object]) -> None:
    """T19: an invalid filter is an error; it never matches all rows."""
    answer = server.post("stages/mysql-sender/retry-failed", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "MALFORMED")
