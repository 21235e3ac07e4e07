"""The three kinds of targets: a dictionary gets all facts as a SNAPSHOT, a flow a run, a webhook a message."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from urllib.parse import quote
from uuid import UUID, uuid5

import aiohttp
import orjson
from msgspec import Raw

from penstock.flows.contract import PREFIX as FLOWS
from penstock.ingest.run.publish import CurrentState
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.supplier import DictionaryTarget, FlowTarget, WebhookTarget
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.errors import Conflict, Invalid, PenstockError, Transient
from penstock.kernel.http.client import ApiClient, Json
from penstock.kernel.http.webhook import post_webhook
from penstock.refdata.contract import PREFIX, Command, CommandItem, EventType, UpdateState, encode_command, split_sizes

_NAMESPACE = UUID("6f1f0c1e-3f53-4a57-9c0e-0d9a7c2f6f11")
_AROUND = 40  # bytes around one item
_COMMIT_WITHIN = 300.0
_POLL = 0.2
_TIMEOUT = 30.0
_RETRIED = "the delivery is retried automatically"


class DeliveryRefused(PenstockError):
    """A refusal that the same content would get again; it is not retried."""


async def fill_dictionary(target: DictionaryTarget, key: str, state: PublishedState) -> Json:
    """Replace the items of a dictionary with *state*. The ids come from the run, so a repetition changes nothing."""
    snapshot_id = uuid5(_NAMESPACE, f"{state.pointer.run_id}:{target.tenant}:{target.code}")
    token = resolve_secret(target.token, "targets.dictionary.token") if target.token else None
    async with _CommandSender(target.url, token=token) as commands:
        sizes = list(split_sizes(map(_estimate_size, _make_items(state, key))))
        items = _make_items(state, key)
        for index, size in enumerate(sizes, start=1):
            command = Command(
                dict_code=target.code,
                event_type=EventType.SNAPSHOT,
                items=list(islice(items, size)),
                event_id=uuid5(snapshot_id, str(index)),
                source_revision=state.pointer.fence,
                snapshot_id=snapshot_id,
                chunk_index=index,
                chunks_total=len(sizes),
            )
            await commands.submit(target.tenant, command)
        return await commands.wait_committed(target.tenant, uuid5(snapshot_id, str(len(sizes))))


class _CommandSender(ApiClient):
    """The routes of the command API of refdata that a snapshot needs."""

    def __init__(self, url: str, *, token: str | None) -> None:
        super().__init__(url, PREFIX, token=token)

    async def submit(self, tenant: str, command: Command) -> None:
        await self._call("POST", f"/{quote(tenant, safe='')}/updates", encode_command(command))

    async def wait_committed(self, tenant: str, event_id: UUID) -> Json:
        """Wait until the update is committed; raise DeliveryRefused if it failed."""
        deadline = monotonic() + _COMMIT_WITHIN
        while True:
            update = await self._get(f"/{quote(tenant, safe='')}/updates/{event_id}")
            if update["status"] == UpdateState.COMMITTED:
                return {"event_id": str(event_id), "version": update["committedVersion"]}
            if update["status"] == UpdateState.FAILED:
                raise DeliveryRefused(update.get("errorCode") or "FAILED", update.get("error") or "the update failed")
            if monotonic() > deadline:
                message = f"update {event_id} is not committed after {_COMMIT_WITHIN:g} s"
                raise Transient("NOT_YET_COMMITTED", message, hint="no action is needed: it is checked again")
            await asyncio.sleep(_POLL)


def _estimate_size(item: CommandItem) -> int:
    """Return at least the encoded size of *item* in bytes."""
    # Do not refine: the event ids are those of the chunk numbers, and an active delivery must find its chunks again.
    return len(item.key.encode()) * 2 + len(item.payload) + _AROUND  # type: ignore[arg-type]


def _make_items(state: PublishedState, key: str) -> Iterator[CommandItem]:
    for fact in state:
        name = fact["payload"].get(key)
        if name is None:
            hint = f"set required: true for the column {key} in the configuration of the supplier"
            raise Invalid("KEY_MISSING", f"a fact has no value for {key}, the key of the dictionary", hint=hint)
        yield CommandItem(str(name), payload=Raw(orjson.dumps(fact["payload"])))


async def start_flow(target: FlowTarget, supplier: str, current: CurrentState) -> Json:
    """Start a run of a flow.

    Its id consists of the id of the ingest run and a hash of the flow's name, so a repetition does not start it again.
    """
    pointer = current.pointer
    facts = current.as_previous.facts
    publication = {"supplier": supplier, "runId": pointer.run_id, "fence": pointer.fence, "facts": facts}
    run_id = f"{pointer.run_id}.{uuid5(_NAMESPACE, target.name).hex[:8]}"
    token = resolve_secret(target.token, "targets.flow.token") if target.token else None
    async with _FlowStarter(target.url, token=token) as runs:
        await runs.start({"runId": run_id, "flow": target.name, "scope": {**target.scope, **publication}})
    return {"run_id": run_id}


class _FlowStarter(ApiClient):
    """The route of the flows API that starts a run."""

    def __init__(self, url: str, *, token: str | None) -> None:
        super().__init__(url, FLOWS, token=token)

    async def start(self, run: Json) -> None:
        try:
            await self._call("POST", "/flow_runs", run)
        except Conflict as error:
            if error.code != "RUN_EXISTS":  # the flow was started before, with another `scope`
                raise


async def call_webhook(target: WebhookTarget, supplier: str, current: CurrentState, key: str) -> Json:
    """Post a message about the publication, with the same key every time, so that receivers recognize repetitions."""
    pointer = current.pointer
    message = {
        "event": "ingest.published",
        "supplier": supplier,
        "runId": pointer.run_id,
        "sha256": pointer.sha256,
        "fence": pointer.fence,
        "publishedAt": pointer.published_at,
        "facts": current.as_previous.facts,
        "changes": current.manifest.get("changes"),
    }
    secret = None if target.secret is None else resolve_secret(target.secret, "targets.webhook.secret")
    try:
        response = await post_webhook(target.url, message, {"Idempotency-Key": key}, timeout=_TIMEOUT, secret=secret)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        hint = f"check the address and the receiver; {_RETRIED}"
        raise Transient("WEBHOOK_DOWN", f"{target.url} does not answer: {reason}", hint=hint) from error
    if not 200 <= response.status < 300:
        hint = f"check the log of the receiver; {_RETRIED}"
        raise Transient("WEBHOOK_REFUSED", f"{target.url} answered {response.status}", hint=hint)
    return {"status": response.status}
