"""An HTTP client of the simulator."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.types import Json

AUTHENTICATE = (
    """query { authenticate { username_and_password(username: $username, password: $password) { token } } }"""
)
COUNT = """query { as(token: $token) { diamonds_by_query_count(query: $query) } }"""
PAGE = """query { as(token: $token) { diamonds_by_query(query: $query, offset: $offset, limit: $limit,
  order: {type: price, direction: ASC}) { items { id price } total_count } } }"""


class LocalSourceClient:
    """A client that returns JSON, and fails for another status than *status*."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    @staticmethod
    @asynccontextmanager
    async def of(url: str) -> "AsyncIterator[LocalSourceClient]":
        async with aiohttp.ClientSession(url) as session:
            yield LocalSourceClient(session)

    async def get(self, path: str, *, status: int = 200, **params: Any) -> Any:
        async with self.session.get(path, params=params) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def post(self, path: str, body: Json, *, status: int = 200) -> Any:
        async with self.session.post(path, json=body) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def graphql(self, text: str, **variables: Any) -> Any:
        return await self.post("/graphql", {"query": text, "variables": variables})

    async def token(self) -> str:
        response = await self.graphql(AUTHENTICATE, username="demo@example.com", password="demo")
        token = response["data"]["authenticate"]["username_and_password"]["token"]
        assert isinstance(token, str)
        return token


def sort_by_price(truth: dict[str, Json]) -> list[Json]:
    """Return all records in the order of pages."""
    return sorted(truth.values(), key=lambda record: (record["price"] is None, record["price"] or 0, record["id"]))
