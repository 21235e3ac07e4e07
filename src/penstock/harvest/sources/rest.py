"""H14: any REST API that lists records in pages of JSON, as its configuration describes it."""

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

import msgspec
from yarl import URL

from penstock.harvest.config import PagingSection
from penstock.harvest.config import RestSourceSection as RestSection
from penstock.harvest.model import PagePosition, PartitionKind, PartitionRange, RecordPage, TimeWindow
from penstock.harvest.sources.http import SourceClient, instant
from penstock.harvest.sources.json_envelope import envelope, garbage, reader, records

_NOTHING = RecordPage((), None)


class RestSource:
    """The source port over a REST API."""

    def __init__(self, section: RestSection, caller: SourceClient) -> None:
        self.is_seekable = section.paging is not PagingSection.CURSOR
        self.has_windows = section.after_param is not None
        self._section = section
        self._caller = caller
        self._listing = _address(section, section.path)
        self._counting = self._listing if section.count_path is None else _address(section, section.count_path)
        self._read_page = _page_reader(section)
        self._read_count = _count_reader(section)

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        if self._is_unheard_of(range_):
            return 0
        wanted = [*self._wanted(range_, window)]
        if self._section.count_path is None:
            wanted += [*self._place(PagePosition(), 1)]
        return await self._caller.ask("GET", _url(self._counting, wanted), self._read_count)

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        if self._is_unheard_of(range_):
            return _NOTHING
        wanted = [*self._wanted(range_, window), *self._place(position, limit)]

        def read(answer: bytes) -> RecordPage:
            found, cursor, has_more = self._read_page(answer)
            texts = records(found, limit)
            return RecordPage(texts, self._next(position, limit, len(texts), cursor, has_more))

        return await self._caller.ask("GET", _url(self._listing, wanted), read)

    def _is_unheard_of(self, range_: PartitionRange) -> bool:
        """Whether the API cannot be asked for records without a value: then the total tells if there are any."""
        return range_.kind is PartitionKind.NULL and self._section.null_param is None

    def _wanted(self, range_: PartitionRange, window: TimeWindow) -> Iterator[tuple[str, str]]:
        section = self._section
        if range_.kind is PartitionKind.NULL and section.null_param:
            yield section.null_param, "true"
        if range_.lower is not None:
            yield section.lower_param, _major(range_.lower, section.decimals)
        if range_.upper is not None:
            yield section.upper_param, _major(range_.upper, section.decimals)
        if window.after and section.after_param:
            yield section.after_param, instant(window.after)
        if window.upto and section.upto_param:
            yield section.upto_param, instant(window.upto)

    def _place(self, position: PagePosition, limit: int) -> Iterator[tuple[str, str]]:
        section = self._section
        yield section.limit_param, str(limit)
        if section.paging is PagingSection.OFFSET:
            yield section.offset_param, str(position.offset)
        elif section.paging is PagingSection.PAGE:
            yield section.page_param, str(position.offset // limit + section.first_page)
        elif position.cursor is not None:
            yield section.cursor_param, position.cursor

    def _next(
        self, position: PagePosition, limit: int, got: int, cursor: str | None, has_more: bool | None
    ) -> PagePosition | None:
        """H16: where the page after this one begins. A short page is the end only where the source promises that."""
        if has_more is False or (self._section.short_page_ends and got < limit):
            return None
        if self._section.paging is PagingSection.CURSOR:
            if cursor is not None and cursor == position.cursor:
                raise garbage("the cursor of the next page is that of this one")
            return PagePosition(position.offset + got, cursor) if cursor else None
        if got == 0:
            return None
        if self._section.paging is PagingSection.PAGE:
            return PagePosition((position.offset // limit + 1) * limit)
        return PagePosition(position.offset + got)


def _page_reader(section: RestSection) -> Callable[[bytes], tuple[list[msgspec.Raw], str | None, bool | None]]:
    leaves: list[tuple[str, Any]] = [(section.records, list[msgspec.Raw])]
    if section.paging is PagingSection.CURSOR:
        leaves.append((section.next_cursor, str | int))
    if section.has_more:
        leaves.append((section.has_more, bool))
    shape, (records_of, *others) = envelope(*leaves)
    cursor_of = others.pop(0) if section.paging is PagingSection.CURSOR else None
    has_more_of = others.pop(0) if section.has_more else None
    decode = reader(msgspec.json.Decoder(shape))

    def read(answer: bytes) -> tuple[list[msgspec.Raw], str | None, bool | None]:
        document = decode(answer)
        found, cursor = records_of(document), cursor_of and cursor_of(document)
        if found is None:
            raise garbage(f"an answer without {section.records}")
        return found, None if cursor is None else str(cursor), has_more_of and has_more_of(document)

    return read


def _count_reader(section: RestSection) -> Callable[[bytes], int]:
    path = section.total or "total"
    shape, (total_of,) = envelope((path, int))
    decode = reader(msgspec.json.Decoder(shape, strict=False))

    def read(answer: bytes) -> int:
        total = total_of(decode(answer))
        if total is None or total < 0:
            raise garbage(f"an answer whose {path} is no count")
        return int(total)

    return read


def _address(section: RestSection, path: str) -> str:
    """Up to the parameters of a request."""
    address = str(URL(f"{section.url.rstrip('/')}/{path.lstrip('/')}"))
    params = urlencode(section.params)
    return f"{address}{'&' if '?' in address else '?'}{params}{'&' if params else ''}"


def _url(address: str, params: list[tuple[str, str]]) -> URL:
    return URL(address + urlencode(params), encoded=True)


def _major(minor: int, decimals: int) -> str:
    return str(minor) if decimals == 0 else f"{Decimal(minor).scaleb(-decimals):f}"
