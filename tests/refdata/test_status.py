"""What of dictionaries is found late or broken."""

from datetime import timedelta
from uuid import UUID, uuid4

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.refdata import status as refdata
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from tests.support.status import issue_tuples

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


async def test_dictionaries(database_url: str, clock: ManualClock) -> None:
    """R7: what waits for apply or for the relay is late; what failed within a day is broken, by dictionary."""
    async with Database.open(database_url, clock=clock) as db:
        section = RefdataSection.model_validate({"dictionaries": [{"code": "RATES"}]})
        service = Refdata(db, None, None, DictionaryCatalogue(section), section)  # type: ignore[arg-type]
        assert issue_tuples(await refdata.report_status(service)) == []
        now = clock.now()
        request = """
            INSERT INTO update_request (tenant_id, event_id, dict_code, status, error_code, created_at, updated_at)
            VALUES ('acme', $1, 'RATES', $2, $3, $4, $4)
        """
        await db.execute(request, uuid4(), "PENDING", None, now - refdata.PENDING_TOO_LONG - MINUTE)
        for code, ago in (("SQL_ERROR", 2 * HOUR), ("STALE_REVISION", HOUR), ("SQL_ERROR", timedelta(days=2))):
            await db.execute(request, uuid4(), "FAILED", code, now - ago)
        await db.execute(
            "INSERT INTO outbox_event (tenant_id, event_id, dict_code, version, payload,"
            " event_type, source, items, created_at)"
            " VALUES ('acme', $1, 'RATES', 1, '{}', 'DELTA', 'REST', 1, $2)",
            UUID(int=1),
            now - refdata.UNTOLD_TOO_LONG - MINUTE,
        )
        assert issue_tuples(await refdata.report_status(service)) == [
            ("LATE", "apply", "1 update waiting, the oldest for 3 minutes"),
            ("LATE", "relay", "versions waiting to be announced, the oldest for 2 minutes"),
            ("BROKEN", "acme/RATES", "2 updates failed, the last 60 minutes ago: STALE_REVISION"),
        ]
