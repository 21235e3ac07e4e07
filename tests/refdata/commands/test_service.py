"""Repeated commands."""

from uuid import uuid4

import pytest

from penstock.kernel.errors import Conflict
from penstock.refdata.config import RefdataSection
from penstock.refdata.contract import UpdateState, decode_command
from tests.refdata.harness import RefdataHarness, command, upsert


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_a_repeated_command_is_answered_when_its_dictionary_is_gone(harness: RefdataHarness) -> None:
    """R8: the same id and body get the same response, also after the dictionary was removed."""
    event_id = str(uuid4())
    await harness.send("LOOSE", upsert("a", 1), eventId=event_id)
    await harness.apply()
    harness.refdata.catalogue.replace(RefdataSection())
    again = await harness.refdata.submit("acme", decode_command(command("LOOSE", upsert("a", 1), eventId=event_id)))
    assert (again.status, again.committed_version) == (UpdateState.COMMITTED, 1)
    with pytest.raises(Conflict):
        await harness.refdata.submit("acme", decode_command(command("LOOSE", upsert("a", 2), eventId=event_id)))
