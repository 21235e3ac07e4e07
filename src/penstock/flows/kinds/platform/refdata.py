"""F14: steps that publish a dictionary, from their inputs or from an artifact of an earlier step."""

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
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.platform.common import call_until_available, derive_id, pause
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.errors import Invalid, NotFound
from penstock.refdata.contract import (
    NAME,
    Command,
    CommandItem,
    EventType,
    UpdateState,
    decode_command,
    encode_command,
    split_items,
)

KIND = "refdata.publish"
_WAIT = timedelta(seconds=2)  # for the commit of a command; after this time the step polls
_ITEMS = msgspec.json.Decoder(list[CommandItem])
_ITEM = msgspec.json.Decoder(CommandItem)
_Named = Annotated[str, StringConstraints(pattern=NAME[:-1] + r"\z")]


class ArtifactSource(SpecModel):
    """An artifact with the items: JSON lines, or a JSON list."""

    step: Name
    artifact: Annotated[str, Field(min_length=1, max_length=1_000)]


class RefdataInputs(SpecModel):
    """The dictionary, and the items to publish."""

    tenant: _Named
    dictionary: _Named
    mode: EventType
    items: list[Any] | None = None
    from_: ArtifactSource | None = Field(None, alias="from")

    @model_validator(mode="after")
    def _has_one_source(self) -> "RefdataInputs":
        if (self.items is None) == (self.from_ is None):
            raise ValueError("either `items` or `from` is required, but not both")
        return self


@dataclass(frozen=True, slots=True)
class RefdataOutputs:
    """The status of a command."""

    status: UpdateState
    version: int | None
    error_code: str | None
    error: str | None


class RefdataService(Protocol):
    """The functions of refdata that the steps use."""

    async def submit(self, tenant: str, command: Command, wait: timedelta | None) -> RefdataOutputs:
        """Submit a command, or find the command with its id; return its status after *wait*."""

    async def update(self, tenant: str, event_id: UUID) -> RefdataOutputs | None:
        """Return the status of a command, or None if it does not exist."""


def make_refdata_handler(dictionaries: RefdataService) -> Handler:
    """Return the handler of steps that publish dictionaries."""

    async def publish_dictionary(step: FlowStep) -> Outputs:
        inputs = read_inputs(RefdataInputs, step.inputs)
        items = await _read_items(step, inputs)
        batch = _CommandBatch(step, dictionaries, inputs, list(split_items(items)))
        version = await (batch.publish_snapshot() if inputs.mode is EventType.SNAPSHOT else batch.publish_deltas())
        return {"tenantId": inputs.tenant, "dictCode": inputs.dictionary, "version": version, "items": len(items)}

    return publish_dictionary


async def _read_items(step: FlowStep, inputs: RefdataInputs) -> list[CommandItem]:
    if inputs.from_ is None:
        return _decode_items(msgspec.json.encode(inputs.items), "inputs.items")
    try:
        content = await step.read(inputs.from_.step, inputs.from_.artifact)
    except NotFound as error:
        raise StepFailed("ARTIFACT_MISSING", error.message, retryable=False) from error
    return _decode_items(content, f"{inputs.from_.step}/{inputs.from_.artifact}")


def _decode_items(content: bytes, source: str) -> list[CommandItem]:
    """Return the items with their payloads as text, so that numbers keep all digits."""
    try:
        if content.lstrip()[:1] == b"[":
            return _ITEMS.decode(content)
        return [_ITEM.decode(line) for line in content.splitlines() if line.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"{source} must be a JSON list of {{key, payload}}, or one JSON object per line: {error}"
        raise StepFailed("BAD_ITEMS", message, retryable=False) from None


class _CommandBatch:
    """The commands of one step: they have the same ids at every attempt, unless an earlier command has failed."""

    def __init__(
        self, step: FlowStep, dictionaries: RefdataService, inputs: RefdataInputs, chunks: Sequence[list[CommandItem]]
    ) -> None:
        self._step = step
        self._dictionaries = dictionaries
        self._inputs = inputs
        self._chunks = chunks
        self._digest = hashlib.sha256(b"\n".join(map(msgspec.json.encode, chunks))).hexdigest()

    async def publish_snapshot(self) -> int | None:
        """Send all chunks of a snapshot, and return its version."""
        total = len(self._chunks)
        for failures in count():
            ids = [self._derive_id(index, failures) for index in range(total)]
            if not any([await self._has_failed(event_id) for event_id in ids]):
                break
        snapshot = {"snapshot_id": self._derive_id("snapshot", failures), "chunks_total": total}
        commands = [
            self._make_command(event_id, items, chunk_index=index, **snapshot)
            for index, (event_id, items) in enumerate(zip(ids, self._chunks, strict=True), 1)
        ]
        for command in commands[:-1]:
            await call_until_available(self._step, partial(self._submit, command, None))
        return await self._commit(commands[-1])

    async def publish_deltas(self) -> int | None:
        """Send the deltas in order, because a key may occur twice, and return the version of the last."""
        version = None
        for index, items in enumerate(self._chunks):
            for failures in count():
                if not await self._has_failed(event_id := self._derive_id(index, failures)):
                    break
            version = await self._commit(self._make_command(event_id, items))
        return version

    async def _commit(self, command: Command) -> int | None:
        """Submit a command, wait for its commit, and return the version."""
        result: RefdataOutputs | None = await call_until_available(self._step, partial(self._submit, command, _WAIT))
        while result is None or result.status is UpdateState.PENDING:
            await pause(self._step)
            result = await self._read_update(command.event_id)
        if result.status is UpdateState.FAILED:
            details = {"eventId": str(command.event_id), "code": result.error_code}
            message = result.error or f"refdata refused command {command.event_id}"
            raise StepFailed(result.error_code or "REFDATA_FAILED", message, details)
        return result.version

    def _make_command(self, event_id: UUID, items: list[CommandItem], **chunk: Any) -> Command:
        command = Command(
            dict_code=self._inputs.dictionary, event_type=self._inputs.mode, items=items, event_id=event_id, **chunk
        )
        try:
            return decode_command(encode_command(command))
        except Invalid as error:
            raise StepFailed(error.code, error.message, retryable=False) from error

    async def _submit(self, command: Command, wait: timedelta | None) -> RefdataOutputs:
        return await self._dictionaries.submit(self._inputs.tenant, command, wait)

    async def _has_failed(self, event_id: UUID) -> bool:
        result = await self._read_update(event_id)
        return result is not None and result.status is UpdateState.FAILED

    async def _read_update(self, event_id: UUID | None) -> RefdataOutputs | None:
        if event_id is None:
            return None
        call = partial(self._dictionaries.update, self._inputs.tenant, event_id)
        return await call_until_available(self._step, call)

    def _derive_id(self, part: object, failures: int) -> UUID:
        return derive_id(self._step, self._digest, part, failures)
