"""The feeds of this process: settings, open sources, record readers and mappings."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.harvest.config import FeedSection, HarvestSection, NivodaSourceSection
from penstock.harvest.feed.mapping import FeedMapping
from penstock.harvest.feed.reader import RecordReader
from penstock.harvest.sources import nivoda, rest
from penstock.harvest.sources.http import SourceClient
from penstock.harvest.sources.port import HarvestSource, SourcePaused
from penstock.harvest.sources.rate_limiter import RateLimiter
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.db.database import Database
from penstock.kernel.errors import NotFound

_CONFIG_DELAY = timedelta(seconds=30)


@asynccontextmanager
async def open_source(feed: str, section: FeedSection, db: Database) -> AsyncIterator[HarvestSource]:
    """Open the source of *feed*; its rate limiter is shared with all processes that use *db*."""
    setting = f"harvest.feeds.{feed}.source"
    source = section.source
    limiter = RateLimiter(feed, source.call, db)
    if isinstance(source, NivodaSourceSection):
        password = resolve_secret(source.password, f"{setting}.password")
        async with SourceClient.open(limiter, source.call, {"Content-Type": "application/json"}) as client:
            yield nivoda.NivodaSource(source, password, client, db.clock)
    else:
        secrets = {
            name: resolve_secret(ref, f"{setting}.secret_headers.{name}") for name, ref in source.secret_headers.items()
        }
        async with SourceClient.open(limiter, source.call, {**source.headers, **secrets}) as client:
            client.api.secrets.update(secrets.values())
            yield rest.RestSource(source, client, setting)


@dataclass(frozen=True)
class Feed:
    """A feed: its settings and the objects that are made of them."""

    name: str
    section: FeedSection
    source: HarvestSource
    reader: RecordReader
    mapping: FeedMapping


class FeedRegistry:
    """The configured feeds."""

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds

    @classmethod
    @asynccontextmanager
    async def open(cls, section: HarvestSection, db: Database) -> "AsyncIterator[FeedRegistry]":
        async with AsyncExitStack() as stack:
            feeds = {}
            for name, feed in section.feeds.items():
                source = await stack.enter_async_context(open_source(name, feed, db))
                feeds[name] = Feed(name, feed, source, RecordReader(feed), FeedMapping.from_feed(feed))
            yield cls(feeds)

    def get(self, name: str) -> Feed:
        """Return the feed. During a rollout, another process may have sent a message about a feed that is new."""
        if name not in self._feeds:
            raise SourcePaused(
                "FEED_NOT_CONFIGURED", f"this process has no feed {name!r} configured", after=_CONFIG_DELAY
            )
        return self._feeds[name]


def find_feed(section: HarvestSection, name: str) -> FeedSection:
    """Return the settings of a feed, or raise NotFound."""
    if name not in section.feeds:
        names = ", ".join(sorted(section.feeds)) or "none"
        raise NotFound("FEED_NOT_FOUND", f"there is no feed {name!r}", hint=f"feeds in harvest.feeds: {names}")
    return section.feeds[name]
