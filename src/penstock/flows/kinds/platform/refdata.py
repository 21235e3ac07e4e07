"""F14: steps that publish a dictionary, from their inputs or from an artifact of a step before."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Annotated, Any, Protocol
from uuid import UUID

import msgspec
from pydantic import Field, StringConstraints, model_validator

from penstock.flows.definition.spec import Name, SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.platform.common import call_until_available, derive_id, pause
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.errors import Invalid, NotFound
from penstock.refdata.contract import (
    NAME,
    Command,
    CommandItem,
    EventType,
    UpdateState,
    chunk_items,
    decode_command,
    encode_command,
)

KIND = "refdata.publish"
_WAIT = timedelta(seconds=2)  # for a commit that is told; after that it is looked for
_ITEMS = msgspec.json.Decoder(list[CommandItem])
_ITEM = msgspec.json.Decoder(CommandItem)
_Named = Annotated[str, StringConstraints(pattern=NAME[:-1] + r"\z")]


class ArtifactOf(SpecModel):
    """Where the items are: JSON lines, or a JSON list."""

    step: Name
    artifact: Annotated[str, Field(min_length=1, max_length=1_000)]


class RefdataInputs(SpecModel):
    """Which dictionary, and what becomes of it."""

    tenant: _Named
    dictionary: _Named
    mode: EventType
    items: list[Any] | None = None
    from_: ArtifactOf | None = Field(None, alias="from")

    @model_validator(mode="after")
    def _has_one_source(self) -> "RefdataInputs":
        if (self.items is None) == (self.from_ is None):
            raise ValueError("give items or from, one of the two")
        return self


@dataclass(frozen=True, slots=True)
class RefdataOutputs:
    """How a command stands."""

    status: UpdateState
    version: int | None
    error_code: str | None
    error: str | None


class RefdataService(Protocol):
    """What is needed of refdata."""

    async def submit(self, tenant: str, command: Command, wait: timedelta | None) -> RefdataOutputs:
        """Take a command in, or find the one with its id; how it stands after *wait*."""

    async def update(self, tenant: str, event_id: UUID) -> RefdataOutputs | None:
        """How a command stands; None when nobody knows it."""


def refdata_worker(dictionaries: RefdataService) -> Handler:
    """The worker that publishes dictionaries."""

    async def work(step: FlowStep) -> Outputs:
        given = read(RefdataInputs, step.inputs)
        items = await _items(step, given)
        publishing = _CommandBatch(step, dictionaries, given, list(chunk_items(items)))
        version = await (publishing.snapshot() if given.mode is EventType.SNAPSHOT else publishing.deltas())
        return {"tenantId": given.tenant, "dictCode": given.dictionary, "version": version, "items": len(items)}

    return work


async def _items(step: FlowStep, given: RefdataInputs) -> list[CommandItem]:
    if given.from_ is None:
        return _decoded(msgspec.json.encode(given.items), "inputs.items")
    try:
        content = await step.read(given.from_.step, given.from_.artifact)
    except NotFound as error:
        raise StepFailed("ARTIFACT_MISSING", error.message, retryable=False) from error
    return _decoded(content, f"{given.from_.step}/{given.from_.artifact}")


def _decoded(content: bytes, where: str) -> list[CommandItem]:
    """The items, their payloads left as the text they are, so that no digit is lost."""
    try:
        if content.lstrip()[:1] == b"[":
            return _ITEMS.decode(content)
        return [_ITEM.decode(line) for line in content.splitlines() if line.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = f"{where} is no list of {{key, payload}}, nor a line of JSON for each: {error}"
        raise StepFailed("BAD_ITEMS", said, retryable=False) from None


class _CommandBatch:
    """What one step sends: under the same ids at every attempt, unless what was sent before has failed."""

    def __init__(
        self, step: FlowStep, dictionaries: RefdataService, given: RefdataInputs, chunks: Sequence[list[CommandItem]]
    ) -> None:
        self._step = step
        self._dictionaries = dictionaries
        self._given = given
        self._chunks = chunks
        self._digest = hashlib.sha256(b"\n".join(map(msgspec.json.encode, chunks))).hexdigest()

    async def snapshot(self) -> int | None:
        """All chunks, which become one version; that version."""
        total = len(self._chunks)
        for failures in count():
            ids = [self._id(index, failures) for index in range(total)]
            if not any([await self._has_failed(one) for one in ids]):
                break
        place = {"snapshot_id": self._id("snapshot", failures), "chunks_total": total}
        commands = [
            self._command(event_id, items, chunk_index=index, **place)
            for index, (event_id, items) in enumerate(zip(ids, self._chunks, strict=True), 1)
        ]
        for command in commands[:-1]:
            await call_until_available(self._step, partial(self._submit, command, None))
        return await self._committed(commands[-1])

    async def deltas(self) -> int | None:
        """One after another, since a key may come twice; the version of the last."""
        version = None
        for index, items in enumerate(self._chunks):
            for failures in count():
                if not await self._has_failed(event_id := self._id(index, failures)):
                    break
            version = await self._committed(self._command(event_id, items))
        return version

    async def _committed(self, command: Command) -> int | None:
        told: RefdataOutputs | None = await call_until_available(self._step, partial(self._submit, command, _WAIT))
        while told is None or told.status is UpdateState.PENDING:
            await pause(self._step)
            told = await self._update(command.event_id)
        if told.status is UpdateState.FAILED:
            details = {"eventId": str(command.event_id), "code": told.error_code}
            raise StepFailed(told.error_code or "REFDATA_FAILED", told.error or "it was refused", details)
        return told.version

    def _command(self, event_id: UUID, items: list[CommandItem], **chunk: Any) -> Command:
        command = Command(
            dict_code=self._given.dictionary, event_type=self._given.mode, items=items, event_id=event_id, **chunk
        )
        try:
            return decode_command(encode_command(command))
        except Invalid as error:
            raise StepFailed(error.code, error.message, retryable=False) from error

    async def _submit(self, command: Command, wait: timedelta | None) -> RefdataOutputs:
        return await self._dictionaries.submit(self._given.tenant, command, wait)

    async def _has_failed(self, event_id: UUID) -> bool:
        known = await self._update(event_id)
        return known is not None and known.status is UpdateState.FAILED

    async def _update(self, event_id: UUID | None) -> RefdataOutputs | None:
        if event_id is None:
            return None
        return await call_until_available(self._step, partial(self._dictionaries.update, self._given.tenant, event_id))

    def _id(self, place: object, failures: int) -> UUID:
        return derive_id(self._step, self._digest, place, failures)
