"""HTTP client of the local source."""

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
    """Answers as data; what is not 200 fails, unless it is what is asked for."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    @staticmethod
    @asynccontextmanager
    async def of(url: str) -> "AsyncIterator[LocalSourceClient]":
        async with aiohttp.ClientSession(url) as session:
            yield LocalSourceClient(session)

    async def get(self, path: str, *, status: int = 200, **params: Any) -> Any:
        async with self.session.get(path, params=params) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def post(self, path: str, body: Json, *, status: int = 200) -> Any:
        async with self.session.post(path, json=body) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def graphql(self, text: str, **variables: Any) -> Any:
        return await self.post("/graphql", {"query": text, "variables": variables})

    async def token(self) -> str:
        told = await self.graphql(AUTHENTICATE, username="demo@example.com", password="demo")
        token = told["data"]["authenticate"]["username_and_password"]["token"]
        assert isinstance(token, str)
        return token


def in_order(truth: dict[str, Json]) -> list[Json]:
    """All records as pages have them."""
    return sorted(truth.values(), key=lambda record: (record["price"] is None, record["price"] or 0, record["id"]))
