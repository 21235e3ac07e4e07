"""H14: diamonds from Nivoda, through its GraphQL API; prices are in cents."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from yarl import URL

from penstock.harvest.config import NivodaSourceSection as NivodaSection
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.harvest.sources.http import UNAUTHORIZED, SourceClient, format_time
from penstock.harvest.sources.json_envelope import make_reader, make_response_error, read_records
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.clock import Clock

MAX_PAGE_SIZE = 50
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
_REFUSED = {"BAD_USER_INPUT", "GRAPHQL_PARSE_FAILED", "GRAPHQL_VALIDATION_FAILED", "FORBIDDEN"}  # a retry does not help
_THROTTLED = {"RATE_LIMITED", "THROTTLED", "TOO_MANY_REQUESTS"}
T = TypeVar("T")


class _GraphqlError(msgspec.Struct):
    message: str = ""
    extensions: dict[str, Any] | None = None


class _GraphqlResponse(msgspec.Struct, Generic[T]):
    data: T | None = None
    errors: list[_GraphqlError] | None = None


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


_decode_token = make_reader(msgspec.json.Decoder(_GraphqlResponse[_LogInResult]))
_decode_count = make_reader(msgspec.json.Decoder(_GraphqlResponse[_AsUser[_CountResult]]))
_decode_page = make_reader(msgspec.json.Decoder(_GraphqlResponse[_AsUser[_PageResult]]))


class NivodaSource:
    """The source port over Nivoda's API."""

    is_seekable = True
    has_windows = True

    def __init__(self, section: NivodaSection, password: str, client: SourceClient, clock: Clock) -> None:
        self._section = section
        self._password = password
        self._client = client
        self._clock = clock
        self._url = URL(section.url)
        self._token: str | None = None
        self._token_until = clock.now()
        self._login_lock = asyncio.Lock()
        client.api.secrets.add(password)

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        return await self._query(_COUNT, {"query": _make_filter(range_, window)}, self._read_count)

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        size = min(limit, MAX_PAGE_SIZE)

        def read(body: bytes) -> RecordPage:
            texts = read_records(self._read_items(body), size)
            return RecordPage(texts, PagePosition(position.offset + len(texts)) if texts else None)

        variables = {"query": _make_filter(range_, window), "offset": position.offset, "limit": size}
        return await self._query(_PAGE, variables, read)

    async def _query(self, query: str, variables: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """Send a query with the present token, and again with a new token if the source rejects the present one."""
        token = await self._log_in()
        try:
            return await self._post(query, {"token": token, **variables}, read)
        except SourceRefused as refused:
            if refused.code != UNAUTHORIZED:
                raise
        token = await self._log_in(rejected=token)
        return await self._post(query, {"token": token, **variables}, read)

    async def _log_in(self, *, rejected: str | None = None) -> str:
        """Return a token; concurrent callers that need a new one share it."""
        if (token := self._get_valid_token(rejected)) is not None:
            return token
        async with self._login_lock:
            if (token := self._get_valid_token(rejected)) is None:
                credentials = {"username": self._section.username, "password": self._password}
                token = await self._post(_LOG_IN, credentials, self._read_token)
                self._token, self._token_until = token, self._clock.now() + self._section.token_for
                self._client.api.secrets = {self._password, token}
            return token

    def _get_valid_token(self, rejected: str | None) -> str | None:
        return self._token if self._token != rejected and self._clock.now() < self._token_until else None

    async def _post(self, query: str, variables: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        body = msgspec.json.encode({"query": query, "variables": variables})
        return await self._client.request("POST", self._url, read, body)

    def _read_token(self, body: bytes) -> str:
        login = self._read_data(_decode_token(body)).authenticate
        if login is None or login.username_and_password is None:
            raise make_response_error(
                "the response of Nivoda has no token at `data.authenticate.username_and_password`"
            )
        return login.username_and_password.token

    def _read_count(self, body: bytes) -> int:
        result = self._read_data(_decode_count(body)).as_
        if result is None or result.diamonds_by_query_count is None:
            raise make_response_error("the response of Nivoda has no count at `data.as.diamonds_by_query_count`")
        return result.diamonds_by_query_count

    def _read_items(self, body: bytes) -> list[msgspec.Raw]:
        result = self._read_data(_decode_page(body)).as_
        if result is None or result.diamonds_by_query is None:
            raise make_response_error("the response of Nivoda has no records at `data.as.diamonds_by_query.items`")
        return result.diamonds_by_query.items

    def _read_data(self, response: _GraphqlResponse[T]) -> T:
        """Return the data, or raise the failure of a GraphQL error, which has the status 200."""
        if response.errors:
            error = response.errors[0]
            raise _convert_error(error, self._client.api.make_excerpt(error.message))
        if response.data is None:
            raise make_response_error("the response of Nivoda has neither `data` nor `errors`")
        return response.data


def _make_filter(range_: PartitionRange, window: TimeWindow) -> dict[str, Any]:
    """Return the filter of a query. Ranges of Nivoda include both ends; `PartitionRange` excludes the upper end."""
    ends = {"from": range_.lower, "to": None if range_.upper is None else range_.upper - 1}
    value = {name: end for name, end in ends.items() if end is not None}
    changed = {name: format_time(at) for name, at in (("after", window.after), ("upto", window.upto)) if at}
    filters: dict[str, Any] = {"dollar_value": value, "updated_at": changed}
    if range_.kind is PartitionKind.NULL:
        filters["has_price"] = False
    return {name: value for name, value in filters.items() if value != {}}


def _convert_error(error: _GraphqlError, message: str) -> SourceFailed:
    code = str((error.extensions or {}).get("code"))
    if code == "UNAUTHENTICATED":
        return SourceRefused(UNAUTHORIZED, message)
    if code in _REFUSED:
        return SourceRefused("SOURCE_REFUSED", f"{code}: {message}")
    if code in _THROTTLED:
        return SourcePaused("SOURCE_THROTTLED", f"{code}: {message}")
    return SourceFailed("SOURCE_ERROR", f"{code}: {message}")
