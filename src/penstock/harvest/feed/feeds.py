"""The feeds of this process: their configuration, their sources opened, their recipes made."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.harvest.config import FeedSection, HarvestSection, NivodaSourceSection
from penstock.harvest.feed.reader import RecordReader
from penstock.harvest.feed.recipe import FeedMapping
from penstock.harvest.sources import nivoda, rest
from penstock.harvest.sources.http import SourceClient
from penstock.harvest.sources.port import HarvestSource, SourcePaused
from penstock.harvest.sources.rate_limiter import RateLimiter
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.db.database import Database
from penstock.kernel.errors import NotFound

_ANOTHER = timedelta(seconds=30)


@asynccontextmanager
async def open_source(feed: str, section: FeedSection, db: Database) -> AsyncIterator[HarvestSource]:
    """The source of *feed*, its gate shared with all processes over *db*; closed at the end."""
    place = f"harvest.feeds.{feed}.source"
    source = section.source
    gate = RateLimiter(feed, source.call, db)
    if isinstance(source, NivodaSourceSection):
        password = resolve_secret(source.password, f"{place}.password")
        async with SourceClient.open(gate, source.call, {"Content-Type": "application/json"}) as caller:
            yield nivoda.NivodaSource(source, password, caller, db.clock)
    else:
        secrets = {
            name: resolve_secret(ref, f"{place}.secret_headers.{name}") for name, ref in source.secret_headers.items()
        }
        async with SourceClient.open(gate, source.call, {**source.headers, **secrets}) as caller:
            caller.api.secrets.update(secrets.values())
            yield rest.RestSource(source, caller)


@dataclass(frozen=True)
class Feed:
    """One API, kept in step."""

    name: str
    section: FeedSection
    source: HarvestSource
    reader: RecordReader
    recipe: FeedMapping


class FeedRegistry:
    """All that are configured."""

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds

    @classmethod
    @asynccontextmanager
    async def open(cls, section: HarvestSection, db: Database) -> "AsyncIterator[FeedRegistry]":
        async with AsyncExitStack() as stack:
            feeds = {}
            for name, feed in section.feeds.items():
                source = await stack.enter_async_context(open_source(name, feed, db))
                feeds[name] = Feed(name, feed, source, RecordReader(feed), FeedMapping.of(feed))
            yield cls(feeds)

    def get(self, name: str) -> Feed:
        """The feed of that name. Where configuration is being rolled out another process may know it already."""
        if name not in self._feeds:
            raise SourcePaused("FEED_NOT_CONFIGURED", f"this process has no feed {name!r} configured", after=_ANOTHER)
        return self._feeds[name]


def known_feed(section: HarvestSection, name: str) -> FeedSection:
    """The configuration of a feed; NotFound when there is none."""
    if name not in section.feeds:
        names = ", ".join(sorted(section.feeds)) or "none"
        raise NotFound("FEED_NOT_FOUND", f"there is no feed {name!r}", hint=f"configured under harvest.feeds: {names}")
    return section.feeds[name]
