"""F13: statements of steps read, and leave nothing behind in their session."""

from penstock.flows.kinds.query import make_query
from penstock.kernel.db.database import Database


async def test_a_session_forgets_what_a_statement_did_to_it(database_url: str) -> None:
    """F13: the next step's statement reads the tables it means, and nothing stays locked."""
    async with Database.open(database_url, size=1) as db:
        await db.execute("CREATE TABLE price AS SELECT 1 AS v; CREATE SCHEMA other; CREATE TABLE other.price (v int)")
        query = make_query(db)
        await query("SELECT set_config('search_path', 'other', false), pg_advisory_lock(1)::text", [], 10)
        assert await query("SELECT v FROM price", [], 10) == [{"v": 1}]
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await db.fetchval(held) == 0
