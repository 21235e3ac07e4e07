"""H14: diamonds from Nivoda, by GraphQL; prices are asked for in cents."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from yarl import URL

from penstock.harvest.config import NivodaSourceSection as NivodaSection
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.harvest.sources.http import UNAUTHORIZED, SourceClient, instant
from penstock.harvest.sources.json_envelope import garbage, reader, records
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.clock import Clock

MOST = 50  # records a page
_LOG_IN = """
query ($username: String!, $password: String!) {
  authenticate { username_and_password(username: $username, password: $password) { token } }
}"""
_COUNT = """
query ($token: String!, $query: DiamondQuery) { as(token: $token) { diamonds_by_query_count(query: $query) } }"""
_PAGE = """
query ($token: String!, $query: DiamondQuery, $offset: Int!, $limit: Int!) {
  as(token: $token) {
    diamonds_by_query(query: $query, offset: $offset, limit: $limit, order: {type: price, direction: ASC}) {
      items {
        id price discount updatedAt
        diamond {
          id availability supplierStockId image video
          location { country city }
          certificate {
            id lab certNumber shape carats color clarity cut polish symmetry floInt length width depth table labgrown
          }
        }
      }
      total_count
    }
  }
}"""
_OURS = {"BAD_USER_INPUT", "GRAPHQL_PARSE_FAILED", "GRAPHQL_VALIDATION_FAILED", "FORBIDDEN"}  # asking again is no use
_THROTTLED = {"RATE_LIMITED", "THROTTLED", "TOO_MANY_REQUESTS"}
T = TypeVar("T")


class _GraphqlProblem(msgspec.Struct):
    message: str = ""
    extensions: dict[str, Any] | None = None


class _GraphqlResponse(msgspec.Struct, Generic[T]):
    data: T | None = None
    errors: list[_GraphqlProblem] | None = None


class _AccessToken(msgspec.Struct):
    token: str


class _LogIn(msgspec.Struct):
    username_and_password: _AccessToken | None = None


class _LogInResult(msgspec.Struct):
    authenticate: _LogIn | None = None


class _AsUser(msgspec.Struct, Generic[T], rename={"as_": "as"}):
    as_: T | None = None


class _CountResult(msgspec.Struct):
    diamonds_by_query_count: int | None = None


class _ItemsResult(msgspec.Struct):
    items: list[msgspec.Raw]


class _PageResult(msgspec.Struct):
    diamonds_by_query: _ItemsResult | None = None


_decode_token = reader(msgspec.json.Decoder(_GraphqlResponse[_LogInResult]))
_decode_count = reader(msgspec.json.Decoder(_GraphqlResponse[_AsUser[_CountResult]]))
_decode_page = reader(msgspec.json.Decoder(_GraphqlResponse[_AsUser[_PageResult]]))


class NivodaSource:
    """The source port over Nivoda's API."""

    is_seekable = True
    has_windows = True

    def __init__(self, section: NivodaSection, password: str, caller: SourceClient, clock: Clock) -> None:
        self._section = section
        self._password = password
        self._caller = caller
        self._clock = clock
        self._url = URL(section.url)
        self._token: str | None = None
        self._token_until = clock.now()
        self._logging_in = asyncio.Lock()
        caller.api.secrets.add(password)

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        return await self._ask(_COUNT, {"query": _query(range_, window)}, self._read_count)

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        most = min(limit, MOST)

        def read(answer: bytes) -> RecordPage:
            texts = records(self._read_items(answer), most)
            return RecordPage(texts, PagePosition(position.offset + len(texts)) if texts else None)

        variables = {"query": _query(range_, window), "offset": position.offset, "limit": most}
        return await self._ask(_PAGE, variables, read)

    async def _ask(self, query: str, variables: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """Ask with the token there is; once more with a new one, when the source does not know it any more."""
        token = await self._logged_in()
        try:
            return await self._post(query, {"token": token, **variables}, read)
        except SourceRefused as refused:
            if refused.code != UNAUTHORIZED:
                raise
        token = await self._logged_in(instead_of=token)
        return await self._post(query, {"token": token, **variables}, read)

    async def _logged_in(self, *, instead_of: str | None = None) -> str:
        """A token; all that need a new one at the same time share it."""
        if (token := self._current(instead_of)) is not None:
            return token
        async with self._logging_in:
            if (token := self._current(instead_of)) is None:
                names = {"username": self._section.username, "password": self._password}
                token = await self._post(_LOG_IN, names, self._read_token)
                self._token, self._token_until = token, self._clock.now() + self._section.token_for
                self._caller.api.secrets = {self._password, token}
            return token

    def _current(self, refused: str | None) -> str | None:
        return self._token if self._token != refused and self._clock.now() < self._token_until else None

    async def _post(self, query: str, variables: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        body = msgspec.json.encode({"query": query, "variables": variables})
        return await self._caller.ask("POST", self._url, read, body)

    def _read_token(self, answer: bytes) -> str:
        given = self._told(_decode_token(answer)).authenticate
        if given is None or given.username_and_password is None:
            raise garbage("an answer without a token")
        return given.username_and_password.token

    def _read_count(self, answer: bytes) -> int:
        given = self._told(_decode_count(answer)).as_
        if given is None or given.diamonds_by_query_count is None:
            raise garbage("an answer without a count")
        return given.diamonds_by_query_count

    def _read_items(self, answer: bytes) -> list[msgspec.Raw]:
        given = self._told(_decode_page(answer)).as_
        if given is None or given.diamonds_by_query is None:
            raise garbage("an answer without items")
        return given.diamonds_by_query.items

    def _told(self, answer: _GraphqlResponse[T]) -> T:
        """The data; a GraphQL error, which comes with status 200, is raised as what it means."""
        if answer.errors:
            raise _failure(answer.errors[0], self._caller.api.make_excerpt(answer.errors[0].message))
        if answer.data is None:
            raise garbage("an answer without data")
        return answer.data


def _query(range_: PartitionRange, window: TimeWindow) -> dict[str, Any]:
    """Nivoda's ranges have both their ends, ours begin with their lower end and stop before their upper."""
    ends = {"from": range_.lower, "to": None if range_.upper is None else range_.upper - 1}
    value = {name: end for name, end in ends.items() if end is not None}
    changed = {name: instant(at) for name, at in (("after", window.after), ("upto", window.upto)) if at}
    query: dict[str, Any] = {"dollar_value": value, "updated_at": changed}
    if range_.kind is PartitionKind.NULL:
        query["has_price"] = False
    return {name: value for name, value in query.items() if value != {}}


def _failure(problem: _GraphqlProblem, message: str) -> SourceFailed:
    code = str((problem.extensions or {}).get("code"))
    if code == "UNAUTHENTICATED":
        return SourceRefused(UNAUTHORIZED, message)
    if code in _OURS:
        return SourceRefused("SOURCE_REFUSED", f"{code}: {message}")
    if code in _THROTTLED:
        return SourcePaused("SOURCE_THROTTLED", f"{code}: {message}")
    return SourceFailed("SOURCE_ERROR", f"{code}: {message}")
