"""A feed with raw records, and what is made of them."""

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.harvest.config import ConsolidationSection, FeedSection
from penstock.harvest.consolidate.worker import ConsolidationResult, Progress, apply_mapping, consolidate
from penstock.harvest.feed.mapping import FeedMapping
from penstock.kernel.db.database import Database

MODES = ("sets", "batches")
WRITE = """
WITH raw AS (
    INSERT INTO raw_record (feed, key, payload, version, seen_run, seen_in, seen_scan, changed_at)
    VALUES ($1, $2, $3::text::jsonb, $4, gen_random_uuid(), 'p', 1, now())
    ON CONFLICT (feed, key) DO UPDATE SET payload = excluded.payload, version = excluded.version, is_deleted = false
)
INSERT INTO raw_pending VALUES ($1, $2, $4) ON CONFLICT (feed, key) DO UPDATE SET version = excluded.version
"""


@dataclass
class Feed:
    """A feed called `d`, and its canonical records."""

    db: Database
    run_id: UUID
    name: str = "d"

    async def write(self, key: str, payload: Any, version: int = 1) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.db.execute(WRITE, self.name, key, text, version)

    async def use_mapping(self, mapping: FeedMapping) -> int:
        async with self.db.transaction() as tx:
            await tx.execute("INSERT INTO harvest_feed (feed) VALUES ($1) ON CONFLICT DO NOTHING", self.name)
            await tx.execute("SELECT FROM harvest_feed WHERE feed = $1 FOR UPDATE", self.name)
            return await apply_mapping(tx, self.name, mapping, self.db.clock.now())

    async def consolidate(
        self, mapping: FeedMapping, mode: str = "sets", *, progress: Progress | None = None, **section: Any
    ) -> ConsolidationResult:
        settings = ConsolidationSection.model_validate({"mode": mode, **section})
        version = await self.use_mapping(mapping)
        options: dict[str, Any] = {"run_id": self.run_id, "pricing_version": version, "progress": progress}
        return await consolidate(self.db, self.name, mapping, settings, **options)

    async def read_canonical(self) -> dict[str, tuple[Any, ...]]:
        columns = "key, fields::text, cost::text, price::text, rule, version, deleted_at IS NOT NULL"
        rows = await self.db.fetch(f"SELECT {columns} FROM canonical_record WHERE feed = $1 ORDER BY key", self.name)
        return {key: tuple(values) for key, *values in rows}

    async def rejects(self) -> dict[str, tuple[str, str]]:
        rows = await self.db.fetch("SELECT key, reason, payload FROM harvest_reject WHERE feed = $1", self.name)
        assert len({row["key"] for row in rows}) == len(rows)
        return {key: (reason, payload) for key, reason, payload in rows}

    async def pending(self) -> dict[str, int]:
        rows = await self.db.fetch("SELECT key, version FROM raw_pending WHERE feed = $1", self.name)
        return {row["key"]: row["version"] for row in rows}


def make_mapping(rules: list[Any], fields: dict[str, Any] | None = None, **pricing: Any) -> FeedMapping:
    fields = fields or {"shape": {"path": "shape"}, "carat": {"path": "a.carat", "type": "decimal"}}
    feed = {
        "source": {"kind": "rest", "url": "http://source.test"},
        "key": "id",
        "fields": fields,
        "cost": {"path": "price", "decimals": 2},
        "pricing": {"rules": rules, **pricing},
    }
    return FeedMapping.from_feed(FeedSection.model_validate(feed))
