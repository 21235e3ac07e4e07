"""Properties of signals on PostgreSQL only. The guarantees of every implementation are in test_signals."""

import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig
from penstock.kernel.signals import BODY_LIMIT
from penstock.kernel.signals.postgres import PostgresSignals


async def test_a_stuck_listener_shows_in_the_lag_of_postgres(db: Database) -> None:
    """R26: the lag grows while a listener reads nothing from the queue of PostgreSQL."""
    signals = PostgresSignals(db, "changes")
    async with db.connection() as stuck:
        await stuck.execute("LISTEN changes")
        async with stuck.transaction():
            await stuck.execute("SELECT 1")
            await signals.announce([f"{n:02}" + "x" * (BODY_LIMIT - 2) for n in range(40)])
            assert await signals.measure_lag() > 0


@pytest.mark.parametrize("channel", ["", "c" * 64, "ü" * 32])
async def test_a_channel_name_that_postgres_would_truncate_is_refused(db: Database, channel: str) -> None:
    """R16: a name that PostgreSQL would truncate is BadConfig, because no listener would receive its signals."""
    with pytest.raises(BadConfig):
        PostgresSignals(db, channel)
