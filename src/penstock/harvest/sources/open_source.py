"""The sources there are, opened as a feed's configuration says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.harvest.config import FeedSection, NivodaSource
from penstock.harvest.sources import nivoda, rest
from penstock.harvest.sources.http import Caller
from penstock.harvest.sources.port import Source
from penstock.harvest.sources.rate_limiter import Gate
from penstock.kernel.config.loader import resolve
from penstock.kernel.db.database import Database


@asynccontextmanager
async def open_source(feed: str, section: FeedSection, db: Database) -> AsyncIterator[Source]:
    """The source of *feed*, its gate shared with all processes over *db*; closed at the end."""
    place = f"harvest.feeds.{feed}.source"
    source = section.source
    gate = Gate(feed, source.call, db)
    if isinstance(source, NivodaSource):
        password = resolve(source.password, f"{place}.password")
        async with Caller.open(gate, source.call, {"Content-Type": "application/json"}) as caller:
            yield nivoda.NivodaSource(source, password, caller, db.clock)
    else:
        secrets = {name: resolve(ref, f"{place}.secret_headers.{name}") for name, ref in source.secret_headers.items()}
        async with Caller.open(gate, source.call, {**source.headers, **secrets}) as caller:
            caller.secrets.update(secrets.values())
            yield rest.RestSource(source, caller)
