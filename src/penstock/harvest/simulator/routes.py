"""Which request is answered by what, and which faults come between."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from typing import Annotated, TypeVar

import msgspec
import structlog

from penstock.harvest.simulator import graphql, rest
from penstock.harvest.simulator.dataset import Dataset
from penstock.harvest.simulator.faults import Churn, Dealer, Fault, Faults, Kind, Rates
from penstock.harvest.simulator.graphql import Tokens
from penstock.harvest.simulator.message import (
    NDJSON,
    TEXT,
    Answer,
    BadRequest,
    Reply,
    Request,
    WrongMethod,
    refusal,
    told,
)
from penstock.kernel.errors import NotFound, PenstockError

T = TypeVar("T")
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_ABOUT = b"""Penstock's local source (H17): a paged API over seeded records, for tests, demos and benchmarks.
GET /records, GET /records/count, POST /graphql;
GET /admin/stats, GET /admin/records, POST /admin/faults, POST /admin/changes, POST /admin/expire-tokens.
"""


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /admin/changes` takes."""

    updates: Amount = 0
    inserts: Amount = 0
    deletes: Amount = 0
    churn: Rates | None = None


class Routes:
    """All that the server answers."""

    def __init__(self, dataset: Dataset, dealer: Dealer, tokens: Tokens, churn: Churn) -> None:
        self.dataset = dataset
        self.dealer = dealer
        self.tokens = tokens
        self.churn = churn
        self.requests: Counter[str] = Counter()
        self._sources: dict[bytes, tuple[bytes, Callable[[Request, Fault | None], Answer]]] = {
            b"/records": (b"GET", self._page),
            b"/records/count": (b"GET", self._count),
            b"/graphql": (b"POST", self._graphql),
        }
        self._others: dict[bytes, tuple[bytes, Callable[[Request], Answer]]] = {
            b"/": (b"GET", lambda _: Answer(_ABOUT, media_type=TEXT)),
            b"/admin/stats": (b"GET", lambda _: told(self.stats())),
            b"/admin/records": (b"GET", lambda _: Answer(media_type=NDJSON, lines=self.dataset.truth())),
            b"/admin/faults": (b"POST", self._set_faults),
            b"/admin/changes": (b"POST", self._change),
            b"/admin/expire-tokens": (b"POST", lambda _: told({"expired": self.tokens.expire()})),
        }

    def answer(self, request: Request) -> Reply:
        """What is sent, and when; it never raises."""
        try:
            if request.path in self._sources:
                return self._answer_source(request)
            return Reply(self._answer_other(request))
        except PenstockError as error:
            return Reply(refusal(error))
        except Exception as error:  # noqa: BLE001 - the edge
            structlog.get_logger().exception("request_failed", path=request.path.decode("latin-1"))
            return Reply(refusal(PenstockError("INTERNAL", f"{type(error).__name__}: {error}")))

    def stats(self) -> dict[str, object]:
        """How often it was asked for what, what it did wrong on purpose, and what it holds."""
        return {
            "requests": dict(self.requests),
            "faults": {kind.value: number for kind, number in self.dealer.given.items()},
            "total": self.dataset.total,
            "generation": self.dataset.generation,
        }

    def _answer_source(self, request: Request) -> Reply:
        method, make = self._sources[request.path]
        _must_be(method, request)
        fault, delay = self.dealer.deal(), self.dealer.faults.latency_ms / 1_000
        if fault is None or fault.kind is Kind.SHORT:
            return Reply(make(request, fault), delay)
        self.dealer.given[fault.kind] += 1
        return self._failing(fault.kind, make(request, None), delay)

    def _failing(self, kind: Kind, answer: Answer, delay: float) -> Reply:
        faults = self.dealer.faults
        if kind is Kind.THROTTLED:
            return Reply(_throttled(faults), delay)
        if kind is Kind.ERROR:
            return Reply(refusal(PenstockError("INTERNAL", "this is one of the faults that were asked for")), delay)
        if kind is Kind.TIMEOUT:
            return Reply(answer, None if faults.timeout_for is None else delay + faults.timeout_for)
        if kind is Kind.GARBAGE:
            return Reply(Answer(answer.body[: len(answer.body) // 2]), delay)
        return Reply(answer, delay, is_cut=True)

    def _answer_other(self, request: Request) -> Answer:
        if request.path not in self._others:
            raise NotFound("NO_SUCH_PATH", "there is nothing here", hint="GET / tells what there is")
        self.requests["admin"] += 1
        method, make = self._others[request.path]
        _must_be(method, request)
        return make(request)

    def _page(self, request: Request, fault: Fault | None) -> Answer:
        self.requests["page"] += 1
        return rest.page(self.dataset, self.dealer, request.query, fault)

    def _count(self, request: Request, _fault: Fault | None) -> Answer:
        self.requests["count"] += 1
        return rest.count(self.dataset, request.query)

    def _graphql(self, request: Request, fault: Fault | None) -> Answer:
        kind, answer = graphql.answer(self.dataset, self.tokens, self.dealer, request.body, fault)
        self.requests[kind] += 1
        return answer

    def _set_faults(self, request: Request) -> Answer:
        """All of them: what is not told is as it is without faults."""
        self.dealer.set(_decoded(request, Faults))
        return told(msgspec.to_builtins(self.dealer.faults))

    def _change(self, request: Request) -> Answer:
        asked = _decoded(request, Changes)
        if asked.churn is not None:
            self.churn.set(asked.churn)
        changed = self.dataset.change(asked.updates, asked.inserts, asked.deletes)
        state = {"total": self.dataset.total, "generation": self.dataset.generation}
        return told({**asdict(changed), **state, "churn": msgspec.to_builtins(self.churn.rates)})


def _must_be(method: bytes, request: Request) -> None:
    if request.method != method:
        raise WrongMethod("WRONG_METHOD", f"{request.path.decode('latin-1')} takes {method.decode()}")


def _decoded(request: Request, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=shape)
    except msgspec.DecodeError as error:
        raise BadRequest("BAD_BODY", str(error)) from error


def _throttled(faults: Faults) -> Answer:
    after = b"Retry-After: %d\r\n" % ceil(faults.retry_after)
    return told({"error": {"code": "TOO_MANY_REQUESTS", "detail": "slower, please"}}, 429, after)
