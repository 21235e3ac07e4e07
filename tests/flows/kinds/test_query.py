"""F13: SQL statements of steps are read-only, and their session is reset."""

from penstock.flows.kinds.query import make_query
from penstock.kernel.db.database import Database


async def test_session_is_reset_after_a_statement(database_url: str) -> None:
    """F13: the next statement does not see settings of an earlier one, and no lock stays."""
    async with Database.open(database_url, size=1) as db:
        await db.execute("CREATE TABLE price AS SELECT 1 AS v; CREATE SCHEMA other; CREATE TABLE other.price (v int)")
        query = make_query(db)
        await query("SELECT set_config('search_path', 'other', false), pg_advisory_lock(1)::text", [], 10)
        assert await query("SELECT v FROM price", [], 10) == [{"v": 1}]
        claimed = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await db.fetchval(claimed) == 0
