"""H14: a REST API that lists records in pages of JSON, as its settings describe it."""

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from yarl import URL

from penstock.harvest.config import PagingSection
from penstock.harvest.config import RestSourceSection as RestSection
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.harvest.sources.http import SourceClient, format_time
from penstock.harvest.sources.json_envelope import (
    describe_value,
    make_envelope,
    make_reader,
    make_response_error,
    read_records,
)

_EMPTY_PAGE = RecordPage((), None)
_EXPECTED = {  # by setting
    "records": "list of records",
    "total": "whole number",
    "next_cursor": "text or number",
    "has_more": "boolean",
}


class _PageEnvelope(NamedTuple):
    """The decoded values of a page."""

    records: list[msgspec.Raw]
    cursor: str | None
    has_more: bool | None


class RestSource:
    """The source port over a REST API. Errors name the settings below *setting*."""

    def __init__(self, section: RestSection, client: SourceClient, setting: str) -> None:
        self.is_seekable = section.paging is not PagingSection.CURSOR
        self.has_windows = section.after_param is not None
        self._section = section
        self._client = client
        self._list_url = _join_url(section, section.path)
        self._count_url = self._list_url if section.count_path is None else _join_url(section, section.count_path)
        self._read_page = _make_page_reader(section, setting)
        self._read_count = _make_count_reader(section, setting)

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        if self._is_unsupported(range_):
            return 0
        params = [*self._filter_params(range_, window)]
        if self._section.count_path is None:
            params += [*self._make_page_params(PagePosition(), 1)]
        return await self._client.request("GET", _add_params(self._count_url, params), self._read_count)

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        if self._is_unsupported(range_):
            return _EMPTY_PAGE
        params = [*self._filter_params(range_, window), *self._make_page_params(position, limit)]

        def read(body: bytes) -> RecordPage:
            page = self._read_page(body)
            texts = read_records(page.records, limit)
            return RecordPage(texts, self._compute_next_position(position, limit, len(texts), page))

        return await self._client.request("GET", _add_params(self._list_url, params), read)

    def _is_unsupported(self, range_: PartitionRange) -> bool:
        """Return whether the API cannot select records without a value. If it has some, the total reveals them."""
        return range_.kind is PartitionKind.NULL and self._section.null_param is None

    def _filter_params(self, range_: PartitionRange, window: TimeWindow) -> Iterator[tuple[str, str]]:
        section = self._section
        if range_.kind is PartitionKind.NULL and section.null_param:
            yield section.null_param, "true"
        if range_.lower is not None:
            yield section.lower_param, _format_bound(range_.lower, section.decimals)
        if range_.upper is not None:
            yield section.upper_param, _format_bound(range_.upper, section.decimals)
        if window.after and section.after_param:
            yield section.after_param, format_time(window.after)
        if window.upto and section.upto_param:
            yield section.upto_param, format_time(window.upto)

    def _make_page_params(self, position: PagePosition, limit: int) -> Iterator[tuple[str, str]]:
        section = self._section
        yield section.limit_param, str(limit)
        if section.paging is PagingSection.OFFSET:
            yield section.offset_param, str(position.offset)
        elif section.paging is PagingSection.PAGE:
            yield section.page_param, str(position.offset // limit + section.first_page)
        elif position.cursor is not None:
            yield section.cursor_param, position.cursor

    def _compute_next_position(
        self, position: PagePosition, limit: int, received: int, page: _PageEnvelope
    ) -> PagePosition | None:
        """H16: return the start of the next page. A short page is the last one only if the source guarantees it."""
        if page.has_more is False or (self._section.short_page_ends and received < limit):
            return None
        if self._section.paging is PagingSection.CURSOR:
            if page.cursor is not None and page.cursor == position.cursor:
                raise make_response_error(f"the cursor of the next page is that of this page: {page.cursor[:100]}")
            return PagePosition(position.offset + received, page.cursor) if page.cursor else None
        if received == 0:
            return None
        if self._section.paging is PagingSection.PAGE:
            return PagePosition((position.offset // limit + 1) * limit)
        return PagePosition(position.offset + received)


def _make_page_reader(section: RestSection, setting: str) -> Callable[[bytes], _PageEnvelope]:
    kinds: dict[str, Any] = {"records": list[msgspec.Raw]}
    if section.paging is PagingSection.CURSOR:
        kinds["next_cursor"] = str | int
    if section.has_more:
        kinds["has_more"] = bool
    read_values = _make_values_reader(section, setting, kinds, required="records")

    def read(body: bytes) -> _PageEnvelope:
        values = read_values(body)
        cursor = values.get("next_cursor")
        return _PageEnvelope(values["records"], None if cursor is None else str(cursor), values.get("has_more"))

    return read


def _make_count_reader(section: RestSection, setting: str) -> Callable[[bytes], int]:
    read_values = _make_values_reader(section, setting, {"total": int}, required="total", strict=False)

    def read(body: bytes) -> int:
        total = int(read_values(body)["total"])
        if total < 0:
            raise _make_value_error(section, setting, "total", body)
        return total

    return read


def _make_values_reader(
    section: RestSection, setting: str, kinds: Mapping[str, Any], *, required: str, strict: bool = True
) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that reads the values of the settings *kinds*; its errors name the setting."""
    shape, getters = make_envelope(*((_get_path(section, name), kind) for name, kind in kinds.items()))
    decode = make_reader(msgspec.json.Decoder(shape, strict=strict))

    def read(body: bytes) -> dict[str, Any]:
        try:
            document = decode(body)
        except msgspec.ValidationError as error:
            name = next((name for name in kinds if f"`$.{_get_path(section, name)}`" in str(error)), required)
            raise _make_value_error(section, setting, name, body) from error
        values = {name: get(document) for name, get in zip(kinds, getters, strict=True)}
        if values[required] is None:
            raise _make_value_error(section, setting, required, body)
        return values

    return read


def _get_path(section: RestSection, name: str) -> str:
    return getattr(section, name) or "total"


def _make_value_error(section: RestSection, setting: str, name: str, body: bytes) -> Exception:
    path = _get_path(section, name)
    expected = f"the response has no {_EXPECTED[name]} at `{path}` ({setting}.{name})"
    return make_response_error(f"{expected}: {describe_value(body, path)}")


def _join_url(section: RestSection, path: str) -> str:
    """Return the URL of *path* up to the parameters of a request."""
    url = str(URL(f"{section.url.rstrip('/')}/{path.lstrip('/')}"))
    params = urlencode(section.params)
    return f"{url}{'&' if '?' in url else '?'}{params}{'&' if params else ''}"


def _add_params(url: str, params: list[tuple[str, str]]) -> URL:
    return URL(url + urlencode(params), encoded=True)


def _format_bound(minor: int, decimals: int) -> str:
    return str(minor) if decimals == 0 else f"{Decimal(minor).scaleb(-decimals):f}"
