"""What is told of a publication, and how: a dictionary gets all facts as a SNAPSHOT, a flow a run, a webhook a note."""

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
from penstock.refdata.contract import PREFIX, Command, CommandItem, EventType, UpdateState, chunk_sizes, encode_command

_NAMESPACE = UUID("6f1f0c1e-3f53-4a57-9c0e-0d9a7c2f6f11")
_AROUND = 40  # bytes around one item
_COMMIT_WITHIN = 300.0
_POLL = 0.2
_TIMEOUT = 30.0


class DeliveryRefused(PenstockError):
    """The target will say the same again, to the same content."""


async def fill_dictionary(target: DictionaryTarget, key: str, state: PublishedState) -> Json:
    """Make a dictionary what *state* is. The ids come from the run, so that whoever repeats this changes nothing."""
    snapshot_id = uuid5(_NAMESPACE, f"{state.pointer.run_id}:{target.tenant}:{target.code}")
    token = resolve_secret(target.token, "targets.dictionary.token") if target.token else None
    async with _CommandSender(target.url, token=token) as commands:
        sizes = list(chunk_sizes(map(_size, _items(state, key))))
        items = _items(state, key)
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
        return await commands.ended(target.tenant, uuid5(snapshot_id, str(len(sizes))))


class _CommandSender(ApiClient):
    """The command API of refdata, as far as a snapshot needs it."""

    def __init__(self, url: str, *, token: str | None) -> None:
        super().__init__(url, PREFIX, token=token)

    async def submit(self, tenant: str, command: Command) -> None:
        await self._call("POST", f"/{quote(tenant, safe='')}/updates", encode_command(command))

    async def ended(self, tenant: str, event_id: UUID) -> Json:
        """How the update ended: it is committed, or raises why it failed."""
        deadline = monotonic() + _COMMIT_WITHIN
        while True:
            told = await self._get(f"/{quote(tenant, safe='')}/updates/{event_id}")
            if told["status"] == UpdateState.COMMITTED:
                return {"event_id": str(event_id), "version": told["committedVersion"]}
            if told["status"] == UpdateState.FAILED:
                raise DeliveryRefused(told.get("errorCode") or "FAILED", told.get("error") or "the update failed")
            if monotonic() > deadline:
                raise Transient("NOT_YET_COMMITTED", "the commit takes longer", hint="it is looked at again")
            await asyncio.sleep(_POLL)


def _size(item: CommandItem) -> int:
    """Return at least the encoded size of *item* in bytes."""
    # Do not refine: the event ids are those of the chunk numbers, and a delivery under way must find its chunks again.
    return len(item.key.encode()) * 2 + len(item.payload) + _AROUND  # type: ignore[arg-type]


def _items(state: PublishedState, key: str) -> Iterator[CommandItem]:
    for fact in state:
        name = fact["payload"].get(key)
        if name is None:
            raise Invalid("KEY_MISSING", f"a fact has no {key}", hint="the key of a dictionary is in every fact")
        yield CommandItem(str(name), payload=Raw(orjson.dumps(fact["payload"])))


async def start_flow(target: FlowTarget, supplier: str, current: CurrentState) -> Json:
    """Start a run of a flow. Its id comes from ours and the flow's name: whoever repeats this finds it there, however
    the server's address is written by then."""
    pointer = current.pointer
    told = {"supplier": supplier, "runId": pointer.run_id, "fence": pointer.fence, "facts": current.before.facts}
    run_id = f"{pointer.run_id}.{uuid5(_NAMESPACE, target.name).hex[:8]}"
    token = resolve_secret(target.token, "targets.flow.token") if target.token else None
    async with _FlowStarter(target.url, token=token) as runs:
        await runs.start({"runId": run_id, "flow": target.name, "scope": {**target.scope, **told}})
    return {"run_id": run_id}


class _FlowStarter(ApiClient):
    """The API of flows, as far as a start needs it."""

    def __init__(self, url: str, *, token: str | None) -> None:
        super().__init__(url, FLOWS, token=token)

    async def start(self, run: Json) -> None:
        try:
            await self._call("POST", "/flow_runs", run)
        except Conflict as error:
            if error.code != "RUN_EXISTS":  # started before, when `scope` was configured otherwise
                raise


async def call_webhook(target: WebhookTarget, supplier: str, current: CurrentState, key: str) -> Json:
    """Post a note of the publication; the same key every time, so that the receiver can tell a repetition."""
    pointer = current.pointer
    note = {
        "event": "ingest.published",
        "supplier": supplier,
        **pointer.as_dict(),
        "facts": current.before.facts,
        "changes": current.manifest.get("changes"),
    }
    secret = None if target.secret is None else resolve_secret(target.secret, "targets.webhook.secret")
    try:
        answer = await post_webhook(target.url, note, {"Idempotency-Key": key}, timeout=_TIMEOUT, secret=secret)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        said = str(error) or type(error).__name__
        raise Transient("WEBHOOK_DOWN", f"{target.url} does not answer: {said}", hint="it is called again") from error
    if not 200 <= answer.status < 300:
        raise Transient("WEBHOOK_REFUSED", f"{target.url} answered {answer.status}", hint="it is called again")
    return {"status": answer.status}
