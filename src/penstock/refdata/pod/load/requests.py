"""Requests of the serving processes of a pod that they cannot answer from memory."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.wait import run_with_timeout
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.ipc import (
    AuditRequest,
    BarrierRequest,
    DocumentReply,
    DocumentRequest,
    LoadedReply,
    LoaderReply,
    LoaderRequest,
    LoadRequest,
    RefusedReply,
)
from penstock.refdata.pod.load.auditor import PodAuditor
from penstock.refdata.pod.load.barrier import VersionBarrier
from penstock.refdata.pod.load.loader import PodLoader

_LOAD_TIMEOUT = 5.0
Pages = Callable[[str], Awaitable[DocumentReply]]


class LoaderRequestHandler:
    """Answers every request, possibly with an error; before `open`, all requests for dictionaries are refused."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._services: tuple[PodLoader, VersionBarrier, PodAuditor] | None = None

    def open(self, loader: PodLoader, barrier: VersionBarrier, auditor: PodAuditor) -> None:
        """Serve requests for dictionaries, now that the primary was reached."""
        self._services = loader, barrier, auditor

    async def handle(self, request: LoaderRequest) -> LoaderReply:
        """Return the reply to *request*; every error becomes a reply."""
        try:
            if isinstance(request, DocumentRequest):
                return await self._pages(request.path)
            return await self._handle_dictionary(request)
        except PenstockError as error:
            version = error.details.get("version")
            return RefusedReply(error.status, error.code, error.message, error.hint, version)
        except Exception:  # noqa: BLE001 - the edge: the client gets a reply, the log gets the traceback
            structlog.get_logger().exception("loader_request_crashed", request=type(request).__name__)
            return RefusedReply(500, "INTERNAL", "internal error: see loader_request_crashed in the log of the pod")

    async def _handle_dictionary(self, request: BarrierRequest | LoadRequest | AuditRequest) -> LoaderReply:
        if self._services is None:
            raise _make_not_loaded_error(
                "no dictionary is loaded: PostgreSQL was not reached since the start of the pod"
            )
        loader, barrier, auditor = self._services
        if isinstance(request, BarrierRequest):
            return await barrier.reach(request)
        if isinstance(request, AuditRequest):
            result = await auditor.audit(DictionaryKey(request.tenant_id, request.dict_code))
            return DocumentReply(200, "application/json", msgspec.json.encode(result))
        state = loader.ensure_state(DictionaryKey(request.tenant_id, request.dict_code))
        try:
            await run_with_timeout(_LOAD_TIMEOUT, state.wait_until_loaded())
        except TimeoutError:
            raise _make_not_loaded_error(f"{request.dict_code} is not loaded yet") from None
        if state.mark is None and state.error is not None:
            problem = f"{request.dict_code} cannot be loaded: {state.error.message}"
            raise _make_not_loaded_error(problem, state.error.hint)
        return LoadedReply()


def _make_not_loaded_error(problem: str, hint: str | None = None) -> Transient:
    default = "try again; look for dictionary_load_failed and primary_lost in the log of the pod"
    return Transient("NOT_LOADED", problem, hint=hint or default)
