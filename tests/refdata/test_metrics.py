"""R26: the metrics of the write path."""

import os
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import asyncpg
import httpx
import pytest

from penstock.refdata.maintenance import make_lag_task
from penstock.settings import Settings
from tests.refdata.exposition import parsed, samples_of
from tests.refdata.harness import environment, on_bus, opened, refdata_settings, upsert
from tests.refdata.retention import RetentionHarness
from tests.support.processes import Work
from tests.support.wait import becomes

DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)


async def test_metrics_are_exported(retention: RetentionHarness) -> None:
    """R26: results, lag, outbox and the age of pending updates, in a real exposition."""
    harness = retention.harness
    body = b'{"dictCode":"LOOSE","eventType":"DELTA","items":[]}'
    done = await harness.send("LOOSE", upsert("a", 1))
    await harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 9}))
    await harness.publish(*on_bus(body, event_id=done))
    await retention.send_chunk(uuid4(), 1, 2)
    await harness.publish(b"rubbish")
    await harness.apply()
    await harness.send("LOOSE", upsert("a", 2))
    retention.clock.advance(HOUR)
    await retention.upkeep.update_metrics()
    for topic in (harness.topic, "other.topic"):
        _, show_lag, _ = make_lag_task(harness.bus, topic, harness.platform.metrics)
        await show_lag()
    samples = samples_of(harness)
    events = {labels["result"]: value for labels, value in samples["penstock_refdata_events_total"]}
    assert events == {"committed": 1, "failed": 2, "staged": 1, "repeated": 1}
    assert samples["kafka_consumer_lag"] == [({"topic": harness.topic}, 1), ({"topic": "other.topic"}, 0)]
    assert samples["penstock_refdata_pending_oldest_seconds"] == [({}, 3600)]
    assert samples["penstock_refdata_outbox_messages"] == [({}, 1)]


async def test_metrics_are_there_before_anything_happened(retention: RetentionHarness) -> None:
    """R26: every result starts at 0, so that a rate exists from the first event on."""
    await retention.upkeep.update_metrics()
    samples = samples_of(retention.harness)
    assert {labels["result"] for labels, _ in samples["penstock_refdata_events_total"]} == {
        "committed", "failed", "staged", "repeated",
    }  # fmt: skip
    assert {value for _, value in samples["penstock_refdata_events_total"]} == {0}
    assert samples["penstock_refdata_pending_oldest_seconds"] == [({}, 0)]


@pytest.mark.full
async def test_commands_that_wait_are_the_lag_of_their_topic(database_url: str, tmp_path: Path) -> None:
    """R26: `kafka_consumer_lag` is the number of unprocessed messages by topic, on either bus."""
    topic = f"refdata.test.{os.urandom(4).hex()}"
    environment(database_url, tmp_path, kafka={"commandsTopic": topic})
    settings = refdata_settings(database_url).model_dump(mode="json", by_alias=True)
    settings["refdata"]["kafka"]["commandsTopic"] = topic
    holder = await asyncpg.connect(database_url)
    try:
        async with opened(Settings.model_validate(settings)) as writer, httpx.AsyncClient() as client:
            await writer.send("LOOSE", upsert("a", 0))
            await writer.apply()
            with Work(tmp_path, "apply") as apply:

                async def has_lag(wanted: int) -> bool:
                    text = (await client.get(f"{apply.api}/actuator/prometheus")).text
                    return parsed(text, "kafka_consumer_lag").get((topic,)) == wanted

                async with holder.transaction():
                    await holder.execute("SELECT FROM dictionary_meta FOR UPDATE")
                    for number in range(3):
                        await writer.send("LOOSE", upsert("a", number))
                    await becomes(lambda: has_lag(3), "three wait")
                await becomes(lambda: has_lag(0), "none waits")
    finally:
        await holder.close()
