"""F14: steps that send one HTTP request, only to URLs that `flows.http.allow` permits."""

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
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.errors import BadConfig
from penstock.kernel.http.external_api import BodyTooLarge, redact_url, send_request
from penstock.kernel.text import SecretMask, is_storable, make_storable

KIND = "http"
BODY_LIMIT = 64_000_000  # bytes of a response
BODY = "body"  # the name of the artifact with a large response
_QUOTED_LIMIT = 2_000  # characters of a response in an error
_HEADERS = ("Content-Type", "ETag", "Last-Modified", "Link", "Location", "Retry-After")

Status = Annotated[int, Field(ge=100, le=599)]
Header = Annotated[str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\z", max_length=200)]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]*\z", max_length=8_000)]
Param = str | int | float | bool


class HttpInputs(SpecModel):
    """A request, and the statuses of a success."""

    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    url: Annotated[str, Field(min_length=1, max_length=4_000)]
    params: dict[str, Param | list[Param]] = Field(default_factory=dict)
    headers: dict[Header, HeaderValue] = Field(default_factory=dict)
    secret_headers: dict[Header, str] = Field(
        default_factory=dict, description="Headers with secret values: names from flows.http.secrets."
    )
    json_: Any = Field(None, alias="json")
    body: str | None = None
    timeout_seconds: float = Field(30, gt=0, le=86_400)
    expect: list[Status] | None = Field(None, description="Statuses of a successful response; all 2xx by default.")
    retry_on: list[Status] = Field(default_factory=list, description="Statuses that are retried, besides 429 and 5xx.")

    @model_validator(mode="after")
    def _is_one_request(self) -> "HttpInputs":
        if {"json_", "body"} <= self.model_fields_set:
            raise ValueError("use either `json` or `body`, not both")
        if any(name.lower() in ("host", "idempotency-key") for name in (*self.headers, *self.secret_headers)):
            raise ValueError("headers: Penstock sets Host and Idempotency-Key; remove them")
        return self

    def is_expected(self, status: int) -> bool:
        return 200 <= status < 300 if self.expect is None else status in self.expect

    def is_retryable(self, status: int) -> bool:
        return status == 429 or status >= 500 or status in self.retry_on


@asynccontextmanager
async def open_http_handler(section: HttpSection) -> AsyncIterator[Handler]:
    """Yield the handler of steps that send requests; close its connections at the end."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def run_step(step: FlowStep) -> Outputs:
            inputs = read_inputs(HttpInputs, step.inputs)
            url = _check_url(inputs, section)
            request = _Request(inputs, url, _resolve_secrets(inputs, section, url))
            status, headers, body = await request.send(session, f"{step.run_id}/{step.step_id}")
            if not inputs.is_expected(status):
                raise request.make_failure(status, headers, body)
            return await _make_outputs(step, status, headers, body, request.mask)

        yield run_step


def _check_url(inputs: HttpInputs, section: HttpSection) -> URL:
    """Return the URL with its parameters, if the configuration allows it."""
    try:
        url = URL(inputs.url)
        is_allowed = _is_allowed(url, section.allow)
    except ValueError as error:
        raise StepFailed("BAD_INPUTS", f"inputs.url: {error}", retryable=False) from None
    if not is_allowed:
        message = f"the URL {redact_url(url)} is not allowed; to allow it, add it to the setting flows.http.allow"
        raise StepFailed("HTTP_NOT_ALLOWED", message, retryable=False)
    pairs = [(name, value) for name, values in inputs.params.items() for value in _as_list(values)]
    return url.extend_query([(name, _encode_param(value)) for name, value in pairs])


def _is_allowed(url: URL, prefixes: Iterable[str]) -> bool:
    return any(_is_within(url, URL(prefix)) for prefix in prefixes)


def _is_within(url: URL, allowed: URL) -> bool:
    if url.scheme not in ("http", "https") or url.raw_user is not None or url.raw_password is not None:
        return False
    if (url.scheme, url.host, url.port) != (allowed.scheme, allowed.host, allowed.port) or not url.host:
        return False
    folder = allowed.raw_path if allowed.raw_path.endswith("/") else f"{allowed.raw_path}/"
    return not _has_dot_segments(url.raw_path) and (url.raw_path == allowed.raw_path or url.raw_path.startswith(folder))


def _has_dot_segments(path: str) -> bool:
    """Return whether a server could read *path* as a path above it: dots, however often they are encoded."""
    while (plain := unquote(path)) != path:
        path = plain
    return any(part.partition(";")[0] in (".", "..") for part in path.replace("\\", "/").split("/"))


def _as_list(value: Param | list[Param]) -> list[Param]:
    return value if isinstance(value, list) else [value]


def _encode_param(value: Param) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolve_secrets(inputs: HttpInputs, section: HttpSection, url: URL) -> dict[str, str]:
    """Return the values of the secret headers, if they may be sent to *url*."""
    secrets = {}
    for header, name in inputs.secret_headers.items():
        if name not in section.secrets:
            message = f"inputs.secretHeaders.{header}: the setting flows.http.secrets has no {name!r}"
            raise StepFailed("SECRET_UNKNOWN", message, retryable=False)
        if not _is_allowed(url, section.secrets[name].to):
            message = f"the setting flows.http.secrets.{name}.to does not allow the URL {redact_url(url)}"
            raise StepFailed("SECRET_NOT_ALLOWED", message, retryable=False)
        try:
            secrets[header] = resolve_secret(section.secrets[name].value, f"flows.http.secrets.{name}")
        except BadConfig as error:
            raise StepFailed(error.code, error.message) from None
    return secrets


class _Request:
    """A request; its secrets are masked in the response and in errors."""

    def __init__(self, inputs: HttpInputs, url: URL, secrets: Mapping[str, str]) -> None:
        self._inputs = inputs
        self._url = url
        self._secrets = secrets
        self.mask = SecretMask(secrets.values())
        self._name = f"{inputs.method} {redact_url(url)}"

    async def send(self, session: aiohttp.ClientSession, key: str) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the response; StepFailed if there is no response."""
        method, timeout = self._inputs.method, self._inputs.timeout_seconds
        try:
            content = {"data": self._make_body(), "headers": {**self._make_headers(), "Idempotency-Key": key}}
            # Redirects are not followed: they could lead to a URL that is not allowed.
            response = await send_request(session, method, self._url, timeout=timeout, limit=BODY_LIMIT, **content)
            received = response.headers
            headers = {name: self.mask.mask_text(received[name]) for name in _HEADERS if name in received}
            return response.status, headers, self.mask.mask_bytes(response.body)
        except BodyTooLarge:
            message = f"the response to {self._name} has more than {BODY_LIMIT} bytes"
            raise StepFailed("HTTP_TOO_LARGE", message, retryable=False) from None
        except TimeoutError:
            message = f"{self._name} had no response within {timeout:g} s"
            raise StepFailed("HTTP_TIMEOUT", message, retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:  # from None: its message may contain the request
            message = f"{self._name} failed: {self.mask.mask_text(str(error) or type(error).__name__)}"
            raise StepFailed("HTTP_UNAVAILABLE", make_storable(message, _QUOTED_LIMIT), retryable=True) from None
        except ValueError:  # a header cannot hold the secret; the error would show it
            raise StepFailed("BAD_INPUTS", f"{self._name}: a header cannot be sent", retryable=False) from None

    def make_failure(self, status: int, headers: Mapping[str, str], body: bytes) -> StepFailed:
        """Return the error of a response that is not a success."""
        is_retryable = self._inputs.is_retryable(status)
        code = "HTTP_UNAVAILABLE" if is_retryable else "HTTP_STATUS"
        text = make_storable(body.decode(errors="replace"), _QUOTED_LIMIT)
        details = {"status": status, "headers": dict(headers), "body": text}
        return StepFailed(code, f"the response to {self._name} has status {status}", details, retryable=is_retryable)

    def _make_headers(self) -> dict[str, str]:
        kind = {"Content-Type": "application/json"} if "json_" in self._inputs.model_fields_set else {}
        names = {name.title() for name in self._inputs.headers}
        return {**{k: v for k, v in kind.items() if k not in names}, **self._inputs.headers, **self._secrets}

    def _make_body(self) -> bytes | None:
        if "json_" in self._inputs.model_fields_set:
            return orjson.dumps(self._inputs.json_)
        return None if self._inputs.body is None else self._inputs.body.encode()


async def _make_outputs(
    step: FlowStep, status: int, headers: Mapping[str, str], body: bytes, mask: SecretMask
) -> Outputs:
    """Return the response as outputs, with the body as JSON or text if possible, otherwise as an artifact."""
    outputs: dict[str, Any] = {"status": status, "headers": dict(headers)}
    if not body:
        return outputs
    decoded = {**outputs, **mask.mask_json(_decode_body(headers.get("Content-Type", ""), body))}
    if len(decoded) > len(outputs) and len(orjson.dumps(decoded)) <= DOCUMENT_LIMIT:
        return decoded
    return {**outputs, "artifact": await step.write(BODY, body), "bytes": len(body)}


def _decode_body(content_type: str, body: bytes) -> dict[str, Any]:
    if len(body) > DOCUMENT_LIMIT:
        return {}
    kind = content_type.partition(";")[0].strip().lower()
    try:
        text = body.decode()
        if kind.endswith(("/json", "+json")) and b"\\u0000" not in body:  # PostgreSQL cannot store this character
            return {"json": orjson.loads(body)}
    except UnicodeDecodeError:
        return {}
    except orjson.JSONDecodeError:
        pass  # the body is not JSON, although its content type says so: return it as text
    return {"text": text} if is_storable(text) else {}
