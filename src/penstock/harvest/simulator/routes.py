"""Routes of the simulator, and the faults that replace or delay their answers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
import structlog

from penstock.harvest.simulator import graphql, rest
from penstock.harvest.simulator.dataset import Dataset
from penstock.harvest.simulator.faults import Churn, Fault, FaultInjector, FaultKind, Faults, Rates
from penstock.harvest.simulator.graphql import AccessTokens
from penstock.harvest.simulator.rest import InvalidQuery
from penstock.kernel.errors import Invalid, NotFound, PenstockError

T = TypeVar("T")
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
BODY_LIMIT = 1_000_000
_LINES_AT_ONCE = 1_000
_ABOUT = b"""Penstock's simulator (H17): a paged API over generated records, for tests, demos and benchmarks.
GET /records, GET /records/count, POST /graphql;
GET /admin/stats, GET /admin/records, POST /admin/faults, POST /admin/changes, POST /admin/expire-tokens.
"""


class WrongMethod(Invalid):
    """The path exists, but does not accept the method."""

    status, title = 405, "Method not allowed"


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request with the complete body."""

    method: str
    path: str
    query: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class SimulatedResponse:
    """Answer with a body, or with lines. *delay* is in seconds, or None for never. *is_cut* sends half of the body."""

    body: bytes = b""
    status: int = 200
    media_type: bytes = b"application/json"
    headers: Sequence[tuple[bytes, bytes]] = ()
    lines: Sequence[bytes] = ()
    delay: float | None = 0.0
    is_cut: bool = False

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        length = len(self.body) + sum(map(len, self.lines)) + len(self.lines)
        return [(b"content-type", self.media_type), (b"content-length", b"%d" % length), *self.headers]

    def iterate_pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces, so that a long answer is never in memory as a whole."""
        yield self.body[: len(self.body) // 2] if self.is_cut else self.body
        for start in range(0, len(self.lines), _LINES_AT_ONCE):
            yield b"\n".join((*self.lines[start : start + _LINES_AT_ONCE], b""))


class ChangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /admin/changes`."""

    updates: Amount = 0
    inserts: Amount = 0
    deletes: Amount = 0
    churn: Rates | None = None


class Routes:
    """Answers all requests of the simulator."""

    def __init__(self, dataset: Dataset, injector: FaultInjector, tokens: AccessTokens, churn: Churn) -> None:
        self.dataset = dataset
        self.injector = injector
        self.tokens = tokens
        self.churn = churn
        self.requests: Counter[str] = Counter()
        self._sources: dict[str, tuple[str, Callable[[SimulatedRequest, Fault | None], bytes]]] = {
            "/records": ("GET", self._answer_page),
            "/records/count": ("GET", self._count),
            "/graphql": ("POST", self._answer_graphql),
        }
        self._others: dict[str, tuple[str, Callable[[SimulatedRequest], SimulatedResponse]]] = {
            "/": ("GET", lambda _: SimulatedResponse(_ABOUT, media_type=b"text/plain; charset=utf-8")),
            "/admin/stats": ("GET", lambda _: _make_response(self.read_stats())),
            "/admin/records": (
                "GET",
                lambda _: SimulatedResponse(media_type=b"application/x-ndjson", lines=self.dataset.list_truth()),
            ),
            "/admin/faults": ("POST", self._set_faults),
            "/admin/changes": ("POST", self._change_records),
            "/admin/expire-tokens": ("POST", lambda _: _make_response({"expired": self.tokens.expire()})),
        }

    def answer_request(self, request: SimulatedRequest) -> SimulatedResponse:
        """Return the answer to a request. Errors are answers as well."""
        if len(request.body) > BODY_LIMIT:
            return _make_refusal(InvalidQuery("BAD_REQUEST", f"the body is larger than {BODY_LIMIT} bytes"))
        try:
            if request.path in self._sources:
                return self._answer_source(request)
            return self._answer_other(request)
        except PenstockError as error:
            return _make_refusal(error)
        except Exception as error:  # noqa: BLE001 - the edge
            structlog.get_logger().exception("request_failed", path=request.path)
            return _make_refusal(PenstockError("INTERNAL", f"{type(error).__name__}: {error}"))

    def read_stats(self) -> dict[str, object]:
        """Return the numbers of requests and faults by kind, and the state of the dataset."""
        return {
            "requests": dict(self.requests),
            "faults": {kind.value: number for kind, number in self.injector.injected.items()},
            "total": self.dataset.total,
            "generation": self.dataset.generation,
        }

    def _answer_source(self, request: SimulatedRequest) -> SimulatedResponse:
        method, make = self._sources[request.path]
        _check_method(method, request)
        faults, fault = self.injector.faults, self.injector.inject()
        if fault is None or fault.kind is FaultKind.SHORT:
            answer = SimulatedResponse(make(request, fault))
        else:
            self.injector.injected[fault.kind] += 1
            answer = _fail(SimulatedResponse(make(request, None)), fault.kind, faults)
        return answer if answer.delay is None else replace(answer, delay=answer.delay + faults.latency_ms / 1_000)

    def _answer_other(self, request: SimulatedRequest) -> SimulatedResponse:
        if request.path not in self._others:
            raise NotFound("NO_SUCH_PATH", f"unknown path {request.path}", hint="GET / lists the paths")
        self.requests["admin"] += 1
        method, make = self._others[request.path]
        _check_method(method, request)
        return make(request)

    def _answer_page(self, request: SimulatedRequest, fault: Fault | None) -> bytes:
        self.requests["page"] += 1
        return rest.make_page(self.dataset, self.injector, request.query, fault)

    def _count(self, request: SimulatedRequest, _fault: Fault | None) -> bytes:
        self.requests["count"] += 1
        return rest.count(self.dataset, request.query)

    def _answer_graphql(self, request: SimulatedRequest, fault: Fault | None) -> bytes:
        kind, body = graphql.answer_request(self.dataset, self.tokens, self.injector, request.body, fault)
        self.requests[kind] += 1
        return body

    def _set_faults(self, request: SimulatedRequest) -> SimulatedResponse:
        """Replace all faults: a field that the body lacks has the default value."""
        self.injector.set(_decode(request, Faults))
        return _make_response(msgspec.to_builtins(self.injector.faults))

    def _change_records(self, request: SimulatedRequest) -> SimulatedResponse:
        request_body = _decode(request, ChangeRequest)
        if request_body.churn is not None:
            self.churn.set(request_body.churn)
        changed = self.dataset.change_records(request_body.updates, request_body.inserts, request_body.deletes)
        state = {"total": self.dataset.total, "generation": self.dataset.generation}
        return _make_response({**asdict(changed), **state, "churn": msgspec.to_builtins(self.churn.rates)})


def _check_method(method: str, request: SimulatedRequest) -> None:
    if request.method != method:
        raise WrongMethod("WRONG_METHOD", f"{request.path} requires the method {method}")


def _decode(request: SimulatedRequest, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=shape)
    except msgspec.DecodeError as error:
        raise InvalidQuery("BAD_BODY", str(error)) from error


def _fail(answer: SimulatedResponse, kind: FaultKind, faults: Faults) -> SimulatedResponse:
    """Return the answer with a fault instead of *answer*."""
    if kind is FaultKind.THROTTLED:
        error = {"error": {"code": "TOO_MANY_REQUESTS", "detail": "too many requests"}}
        return _make_response(error, 429, [(b"retry-after", b"%d" % ceil(faults.retry_after))])
    if kind is FaultKind.ERROR:
        return _make_refusal(PenstockError("INTERNAL", "a simulated fault"))
    if kind is FaultKind.TIMEOUT:
        return replace(answer, delay=faults.timeout_for)
    if kind is FaultKind.GARBAGE:
        return replace(answer, body=answer.body[: len(answer.body) // 2])
    return replace(answer, is_cut=True)


def _make_response(data: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> SimulatedResponse:
    return SimulatedResponse(orjson.dumps(data), status, headers=headers)


def _make_refusal(error: PenstockError) -> SimulatedResponse:
    return _make_response({"error": error.as_dict()}, error.status)
