"""Where the serving processes of a pod come with what they cannot answer from memory."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog

from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.wait import run_with_timeout
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.ipc import (
    Answer,
    AuditRequest,
    DocumentReply,
    FindRequest,
    LoadedReply,
    Question,
    ReachRequest,
    RefusedReply,
    ShowRequest,
)
from penstock.refdata.pod.load.auditor import PodAuditor
from penstock.refdata.pod.load.barrier import VersionBarrier
from penstock.refdata.pod.load.loader import PodLoader

_LOADED_WITHIN = 5.0
Pages = Callable[[str], Awaitable[DocumentReply]]


class LoaderRequests:
    """Answers every question, if only with a refusal. Until the primary was reached once, nobody is behind it."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._behind: tuple[PodLoader, VersionBarrier, PodAuditor] | None = None

    def open(self, loader: PodLoader, barrier: VersionBarrier, auditor: PodAuditor) -> None:
        self._behind = loader, barrier, auditor

    async def answer(self, question: Question) -> Answer:
        try:
            if isinstance(question, ShowRequest):
                return await self._pages(question.path)
            return await self._dictionaries(question)
        except PenstockError as error:
            version = error.details.get("version")
            return RefusedReply(error.status, error.code, error.message, error.hint, version)
        except Exception:  # noqa: BLE001 - the edge: whoever asked gets an answer, the log gets the rest
            structlog.get_logger().exception("question_crashed", question=type(question).__name__)
            return RefusedReply(500, "INTERNAL", "something went wrong here; the log has it")

    async def _dictionaries(self, question: ReachRequest | FindRequest | AuditRequest) -> Answer:
        if self._behind is None:
            raise _not_loaded("nothing is loaded yet: the primary was not reached since the start")
        loader, barrier, auditor = self._behind
        if isinstance(question, ReachRequest):
            return await barrier.reach(question)
        if isinstance(question, AuditRequest):
            finding = await auditor.audit(DictionaryKey(question.tenant_id, question.dict_code))
            return DocumentReply(200, "application/json", msgspec.json.encode(finding))
        holding = loader.find(DictionaryKey(question.tenant_id, question.dict_code))
        try:
            await run_with_timeout(_LOADED_WITHIN, holding.settles())
        except TimeoutError:
            raise _not_loaded(f"{question.dict_code} is not loaded yet") from None
        if holding.mark is None and holding.error is not None:
            raise _not_loaded(f"{question.dict_code} cannot be loaded: {holding.error.message}")
        return LoadedReply()


def _not_loaded(said: str) -> Transient:
    return Transient("NOT_LOADED", said, hint="try again; the pod's log tells what it waits for")
