"""R26: one trace from the request to the announcement, across processes."""

import json
from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.app.apis import PublicApis, make_command_api
from penstock.app.parts import open_refdata
from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.http.auth import NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.external_topics import TopicMapping
from penstock.refdata.config import ExternalTopicSection
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, chunk, command, on_bus, upsert
from tests.support.types import Json

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


class TracedHarness(RefdataHarness):
    """Yield a harness that records spans."""

    kept: InMemorySpanExporter

    def spans(self, name: str = "refdata") -> list[ReadableSpan]:
        return [span for span in self.kept.get_finished_spans() if span.name.startswith(name)]

    async def list_announcements(self) -> list[Json]:
        """Return the announcements in the outbox."""
        return [json.loads(row["payload"]) for row in await self.db.fetch("SELECT payload FROM outbox_event")]


@pytest.fixture
async def traced(settings: Settings) -> AsyncIterator[TracedHarness]:
    kept = InMemorySpanExporter()
    async with open_refdata(settings, Telemetry(spans=[SimpleSpanProcessor(kept)])) as platform:
        harness = TracedHarness(platform)
        harness.kept = kept
        yield harness


def traces(spans: list[ReadableSpan]) -> list[str]:
    return [format(span.context.trace_id, "032x") for span in spans if span.context]


async def post(harness: RefdataHarness, headers: dict[str, str]) -> httpx.Response:
    telemetry = harness.platform.telemetry
    web = PublicApis(Settings(), telemetry, NoAuthenticator())
    app = make_command_api(web, LivenessPulse({}, needs=()), harness.refdata)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        body = command("LOOSE", upsert("a", 1))
        return await client.post("/v1/tenants/acme/updates", content=body, headers=headers)


async def test_every_stage_is_in_the_callers_trace(traced: TracedHarness) -> None:
    """R26: the trace of a caller passes bus and outbox; each stage has the identifying attributes."""
    event_id = (await post(traced, {"traceparent": CALLER})).json()["eventId"]
    await traced.apply()
    assert await traced.relay() == 1
    stages = traced.spans()
    assert [span.name for span in stages] == ["refdata.apply", "refdata.announce"]
    assert traces(stages) == [TRACE, TRACE]
    about = {"tenantId": "acme", "dictCode": "LOOSE", "eventId": event_id, "version": 1}
    assert [dict(span.attributes or {}) for span in stages] == [{**about, "source": "REST"}, about]
    (announcement,) = await traced.list_announcements()
    assert announcement["traceparent"].split("-")[1] == TRACE
    ours = {span.context.span_id for span in traced.kept.get_finished_spans() if span.context and span not in stages}
    assert {span.parent.span_id for span in stages if span.parent} <= ours


async def test_a_refusal_is_an_error_in_the_trace(traced: TracedHarness) -> None:
    """R26: a failed command is an error in the trace, with its reason, and is not announced."""
    value, key = on_bus(command("NOPE", upsert("a", 1)))
    await traced.bus.publish([BusMessage(traced.topic, key, value, {"traceparent": CALLER})])
    await traced.apply()
    (span,) = traced.spans()
    assert not span.status.is_ok
    assert str(span.status.description).startswith("UNKNOWN_DICTIONARY")
    assert traces([span]) == [TRACE]
    assert await traced.list_announcements() == []


async def test_a_snapshot_belongs_to_the_trace_of_the_chunk_that_completed_it(traced: TracedHarness) -> None:
    """R26: each chunk is a stage of its own trace; the version belongs to the trace of the last one."""
    other, snapshot_id = TRACE[::-1], uuid4()
    for index, trace in enumerate((TRACE, other), 1):
        value, key = on_bus(chunk("LOOSE", snapshot_id, index, 2, upsert(str(index), 1)))
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        await traced.bus.publish([BusMessage(traced.topic, key, value, headers)])
    await traced.apply()
    assert traces(traced.spans()) == [TRACE, other]
    (announcement,) = await traced.list_announcements()
    assert announcement["traceparent"].split("-")[1] == other


@pytest.mark.parametrize(
    "header",
    [None, "", "rubbish", f"00-{TRACE}-b7ad6b7169203331-00", f"00-{'0' * 32}-b7ad6b7169203331-01", "ü"],
)
async def test_a_command_without_a_trace_is_not_traced(traced: TracedHarness, header: str | None) -> None:
    """R26: a command without a trace, with an unsampled or an invalid one is applied."""
    value, key = on_bus(command("LOOSE", upsert("a", 1)))
    headers = {} if header is None else {"traceparent": header}
    await traced.bus.publish([BusMessage(traced.topic, key, value, headers)])
    await traced.apply()
    assert await traced.relay() == 1
    assert traced.spans() == []
    (announcement,) = await traced.list_announcements()
    assert "traceparent" not in announcement
    assert announcement["version"] == 1


async def test_a_trace_is_handed_on_in_its_shortest_form(traced: TracedHarness) -> None:
    """R26: additions of later versions of the header are dropped: a signal must be short."""
    value, key = on_bus(command("LOOSE", upsert("a", 1)))
    headers = {"traceparent": f"cc{CALLER[2:]}-{'x' * 400}"}
    await traced.bus.publish([BusMessage(traced.topic, key, value, headers)])
    await traced.apply()
    assert [announcement["traceparent"] for announcement in await traced.list_announcements()] == [CALLER]
    assert await traced.relay() == 1


async def test_a_process_that_sends_no_traces_hands_them_on(harness: RefdataHarness) -> None:
    """R26: the trace passes a process without a collector."""
    await post(harness, {"traceparent": CALLER})
    await harness.apply()
    payload = await harness.db.fetchval("SELECT payload FROM outbox_event")
    assert json.loads(payload)["traceparent"].split("-")[1] == TRACE


def test_a_foreign_message_keeps_its_trace() -> None:
    """R26, R10: a message of an external topic keeps the trace of its sender."""
    topic = ExternalTopicSection(topic="x", tenantId="=acme", dictCode="=LOOSE", key="/id", payload="/")
    delivery = BusDelivery(BusMessage("x", "k", b'{"id": "a"}', {"traceparent": CALLER}), 1, 0, 1, 1)
    assert TopicMapping(topic).map_message(delivery).trace == CALLER
