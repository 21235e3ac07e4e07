"""F14: steps that are one HTTP request, to what `flows.http.allow` names and to nobody else."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import aiohttp
import orjson
from pydantic import Field, StringConstraints, model_validator
from yarl import URL

from penstock.flows.config import HttpSection
from penstock.flows.contract import DOCUMENT_LIMIT
from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.errors import BadConfig
from penstock.kernel.http.external_api import BodyTooLarge, redact_url, send_request
from penstock.kernel.text import SecretMask, is_storable, make_storable

KIND = "http"
BODY_LIMIT = 64_000_000  # bytes of an answer
BODY = "body"  # the artifact a large answer becomes
_TOLD_LIMIT = 2_000  # characters of an answer in an error
_HEADERS = ("Content-Type", "ETag", "Last-Modified", "Link", "Location", "Retry-After")

Status = Annotated[int, Field(ge=100, le=599)]
Header = Annotated[str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\z", max_length=200)]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]*\z", max_length=8_000)]
Param = str | int | float | bool


class HttpInputs(SpecModel):
    """A request, and what is taken for success."""

    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    url: Annotated[str, Field(min_length=1, max_length=4_000)]
    params: dict[str, Param | list[Param]] = Field(default_factory=dict)
    headers: dict[Header, HeaderValue] = Field(default_factory=dict)
    secret_headers: dict[Header, str] = Field(default_factory=dict, description="Names in flows.http.secrets.")
    json_: Any = Field(None, alias="json")
    body: str | None = None
    timeout_seconds: float = Field(30, gt=0, le=86_400)
    expect: list[Status] | None = Field(None, description="Statuses that are a success; 2xx where none is named.")
    retry_on: list[Status] = Field(default_factory=list, description="Besides 429 and 5xx.")

    @model_validator(mode="after")
    def _is_one_request(self) -> "HttpInputs":
        if {"json_", "body"} <= self.model_fields_set:
            raise ValueError("give json or body, not both")
        if any(name.lower() in ("host", "idempotency-key") for name in (*self.headers, *self.secret_headers)):
            raise ValueError("headers: Host and Idempotency-Key are not for you to set")
        return self

    def is_expected(self, status: int) -> bool:
        return 200 <= status < 300 if self.expect is None else status in self.expect

    def is_worth_a_retry(self, status: int) -> bool:
        return status == 429 or status >= 500 or status in self.retry_on


@asynccontextmanager
async def http_worker(section: HttpSection) -> AsyncIterator[Handler]:
    """The worker that makes requests, its connections closed at the end."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def work(step: FlowStep) -> Outputs:
            given = read(HttpInputs, step.inputs)
            url = _allowed(given, section)
            request = _Request(given, url, _secrets(given, section, url))
            status, headers, body = await request.answer(session, f"{step.run_id}/{step.step_id}")
            if not given.is_expected(status):
                raise request.refused(status, headers, body)
            return await _kept(step, status, headers, body, request.hiding)

        yield work


def _allowed(given: HttpInputs, section: HttpSection) -> URL:
    """The address that is meant, if it is among those that may be asked."""
    try:
        url = URL(given.url)
        is_allowed = _is_among(url, section.allow)
    except ValueError as error:
        raise StepFailed("BAD_INPUTS", f"inputs.url: {error}", retryable=False) from None
    if not is_allowed:
        said = f"{redact_url(url)} begins with nothing that flows.http.allow lists; add it there to let steps ask it"
        raise StepFailed("HTTP_NOT_ALLOWED", said, retryable=False)
    return url.extend_query([(name, _spelt(one)) for name, value in given.params.items() for one in _several(value)])


def _is_among(url: URL, beginnings: Iterable[str]) -> bool:
    return any(_is_within(url, URL(entry)) for entry in beginnings)


def _is_within(url: URL, allowed: URL) -> bool:
    if url.scheme not in ("http", "https") or url.raw_user is not None or url.raw_password is not None:
        return False
    if (url.scheme, url.host, url.port) != (allowed.scheme, allowed.host, allowed.port) or not url.host:
        return False
    folder = allowed.raw_path if allowed.raw_path.endswith("/") else f"{allowed.raw_path}/"
    return not _climbs(url.raw_path) and (url.raw_path == allowed.raw_path or url.raw_path.startswith(folder))


def _climbs(path: str) -> bool:
    """Whether some server could take *path* for one above it: dots, however often they are encoded."""
    while (plain := unquote(path)) != path:
        path = plain
    return any(part.partition(";")[0] in (".", "..") for part in path.replace("\\", "/").split("/"))


def _several(value: Param | list[Param]) -> list[Param]:
    return value if isinstance(value, list) else [value]


def _spelt(value: Param) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _secrets(given: HttpInputs, section: HttpSection, url: URL) -> dict[str, str]:
    """The values of the headers that are secret, if they are for *url*."""
    found = {}
    for header, name in given.secret_headers.items():
        if name not in section.secrets:
            said = f"inputs.secretHeaders.{header}: flows.http.secrets has no {name!r}"
            raise StepFailed("SECRET_UNKNOWN", said, retryable=False)
        if not _is_among(url, section.secrets[name].to):
            said = f"{redact_url(url)} begins with nothing that flows.http.secrets.{name}.to lists"
            raise StepFailed("SECRET_NOT_ALLOWED", said, retryable=False)
        try:
            found[header] = resolve_secret(section.secrets[name].value, f"flows.http.secrets.{name}")
        except BadConfig as error:
            raise StepFailed(error.code, error.message) from None
    return found


class _Request:
    """One request; what is secret in it comes back to nobody."""

    def __init__(self, given: HttpInputs, url: URL, secrets: Mapping[str, str]) -> None:
        self._given = given
        self._url = url
        self._secrets = secrets
        self.hiding = SecretMask(secrets.values())
        self._named = f"{given.method} {redact_url(url)}"

    async def answer(self, session: aiohttp.ClientSession, key: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body; StepFailed when nothing came that could be one."""
        method, timeout = self._given.method, self._given.timeout_seconds
        try:
            sent = {"data": self._data(), "headers": {**self._headers(), "Idempotency-Key": key}}
            # A redirect is an answer like any other: it could lead out of what is allowed.
            answered = await send_request(session, method, self._url, timeout=timeout, limit=BODY_LIMIT, **sent)
            found = answered.headers
            headers = {name: self.hiding.mask_text(found[name]) for name in _HEADERS if name in found}
            return answered.status, headers, self.hiding.mask_bytes(answered.body)
        except BodyTooLarge:
            said = f"{self._named} was answered with more than {BODY_LIMIT} bytes"
            raise StepFailed("HTTP_TOO_LARGE", said, retryable=False) from None
        except TimeoutError:
            said = f"{self._named} was not answered within {timeout:g} s"
            raise StepFailed("HTTP_TIMEOUT", said, retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:  # from None: what it says may repeat the request
            said = f"{self._named} failed: {self.hiding.mask_text(str(error) or type(error).__name__)}"
            raise StepFailed("HTTP_UNAVAILABLE", make_storable(said, _TOLD_LIMIT), retryable=True) from None
        except ValueError:  # a secret no header can carry: not even its error is to be seen
            raise StepFailed("BAD_INPUTS", f"{self._named}: a header cannot be sent", retryable=False) from None

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> StepFailed:
        """An answer that is no success."""
        is_retryable = self._given.is_worth_a_retry(status)
        code = "HTTP_UNAVAILABLE" if is_retryable else "HTTP_STATUS"
        told = make_storable(body.decode(errors="replace"), _TOLD_LIMIT)
        details = {"status": status, "headers": dict(headers), "body": told}
        return StepFailed(code, f"{self._named} was answered with {status}", details, retryable=is_retryable)

    def _headers(self) -> dict[str, str]:
        kind = {"Content-Type": "application/json"} if "json_" in self._given.model_fields_set else {}
        spelt = {name.title() for name in self._given.headers}
        return {**{k: v for k, v in kind.items() if k not in spelt}, **self._given.headers, **self._secrets}

    def _data(self) -> bytes | None:
        if "json_" in self._given.model_fields_set:
            return orjson.dumps(self._given.json_)
        return None if self._given.body is None else self._given.body.encode()


async def _kept(step: FlowStep, status: int, headers: Mapping[str, str], body: bytes, hiding: SecretMask) -> Outputs:
    """The answer as outputs, its body as JSON or text where it can be, else as an artifact."""
    outputs: dict[str, Any] = {"status": status, "headers": dict(headers)}
    if not body:
        return outputs
    read = {**outputs, **hiding.mask_json(_readable(headers.get("Content-Type", ""), body))}
    if len(read) > len(outputs) and len(orjson.dumps(read)) <= DOCUMENT_LIMIT:
        return read
    return {**outputs, "artifact": await step.write(BODY, body), "bytes": len(body)}


def _readable(content_type: str, body: bytes) -> dict[str, Any]:
    if len(body) > DOCUMENT_LIMIT:
        return {}
    kind = content_type.partition(";")[0].strip().lower()
    try:
        text = body.decode()
        if kind.endswith(("/json", "+json")) and b"\\u0000" not in body:  # no database keeps that character
            return {"json": orjson.loads(body)}
    except UnicodeDecodeError:
        return {}
    except orjson.JSONDecodeError:
        pass  # as text, then: it is not what it says it is
    return {"text": text} if is_storable(text) else {}
