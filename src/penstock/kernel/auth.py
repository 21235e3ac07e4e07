"""Who is asking: JSON Web Tokens, verified once and remembered, and the wall between tenants."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Protocol

import jwt
import orjson
import structlog

from penstock.kernel.errors import BadConfig, Forbidden, Transient, Unauthorized

CACHE_SIZE = 10_000
TOKEN_LIMIT = 16_000
REMEMBER_SECONDS = 300.0  # no longer, whatever the token says: a withdrawn key must stop working
REFUSAL_SECONDS = 10.0
KEYS_LIFESPAN = 300.0
KEYS_PAUSE = 30.0  # between two fetches that unknown names ask for
KEYS_RETRY = 5.0
_MIN_SECRET = 32  # RFC 7518: an HS256 key is as long as its hash
# All that broken key sets were seen to raise.
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError, jwt.PyJWTError)
KeySet = Mapping[str | None, jwt.PyJWK]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking. Without authentication it is the operator of this machine, who may act for every tenant."""

    subject: str
    tenant: str | None
    claims: Mapping[str, Any] = field(default_factory=dict)
    is_operator: bool = False

    def must_act_for(self, tenant: str) -> None:
        """R25: Forbidden unless the token's tenant is the path's."""
        if not self.is_operator and self.tenant != tenant:
            raise Forbidden(
                "WRONG_TENANT", f"this token does not act for tenant {tenant!r}", hint="use a token of that tenant"
            )


OPERATOR = Principal("operator", None, is_operator=True)


class Authenticator(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal behind an Authorization header, or Unauthorized."""


class NoAuthenticator:
    """For loopback only: whoever can connect is the operator."""

    async def authenticate(self, authorization: str | None) -> Principal:  # noqa: ARG002 - the header does not matter here
        return OPERATOR


class Keys(Protocol):
    async def key_for(self, token: str) -> Any:
        """The key that must have signed *token*."""


class SharedSecret:
    """One secret that signs and verifies."""

    def __init__(self, secret: str) -> None:
        if len(secret.encode()) < _MIN_SECRET:
            raise BadConfig(
                "WEAK_SECRET", f"auth.jwt.secret needs at least {_MIN_SECRET} bytes", hint="openssl rand -base64 48"
            )
        self._secret = secret

    async def key_for(self, token: str) -> Any:  # noqa: ARG002 - there is but one
        return self._secret


class KeyFile:
    """Public keys from a JWKS file, read anew when the file changes; while it is missing or broken, those at hand."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self._keys = self._read()

    async def key_for(self, token: str) -> Any:
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            self._read_anew()
        return _pick(self._keys, _key_name(token))

    def _look(self) -> tuple[int, ...] | None:
        """What changes when the file does; None while it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ctime_ns, found.st_ino, found.st_size

    def _read(self) -> KeySet:
        try:
            return _by_name(jwt.PyJWKSet.from_dict(orjson.loads(self._path.read_bytes())))
        except _UNUSABLE as error:
            raise BadConfig(
                "BAD_JWKS", f"{self._path} holds no usable keys: {error}", hint="check auth.jwt.jwks_file"
            ) from error

    def _read_anew(self) -> None:
        try:
            self._keys = self._read()
        except BadConfig as error:
            structlog.get_logger().warning("jwks_not_read", code=error.code, error=error.message)


class KeyUrl:
    """Public keys from a JWKS address, fetched when old or when an unknown one is named; in an outage those at hand."""

    def __init__(self, url: str) -> None:
        try:
            self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=5)
        except jwt.PyJWKClientError as error:
            raise BadConfig("BAD_JWKS", f"auth.jwt.jwks_url cannot be used: {error}") from error
        self._keys: KeySet = {}
        self._failure: str | None = None
        self._fetch_from = self._old_from = -inf
        self._fetching = asyncio.Lock()

    async def key_for(self, token: str) -> Any:
        name = _key_name(token)
        if self._wants_fetch(name):
            async with self._fetching:
                if self._wants_fetch(name):  # else somebody fetched while this waited
                    await self._fetch()
        try:
            return _pick(self._keys, name)
        except Unauthorized:
            if self._failure is None:
                raise
            hint = "check auth.jwt.jwks_url"
            raise Transient("KEYS_DOWN", f"the signing keys cannot be fetched: {self._failure}", hint=hint) from None

    def _wants_fetch(self, name: str | None) -> bool:
        now = time.monotonic()
        return now >= self._fetch_from and (now >= self._old_from or name not in self._keys)

    async def _fetch(self) -> None:
        try:
            self._keys = _by_name(await asyncio.to_thread(self._client.get_jwk_set))
        except _UNUSABLE as error:
            self._failure, self._fetch_from = str(error), time.monotonic() + KEYS_RETRY
            structlog.get_logger().warning("jwks_not_fetched", error=self._failure)
        else:
            now = time.monotonic()
            self._failure, self._fetch_from, self._old_from = None, now + KEYS_PAUSE, now + KEYS_LIFESPAN


class JwtAuthenticator:
    """R25: verifies a token once, and remembers it for minutes, never past its end; a bad one is remembered briefly."""

    def __init__(
        self,
        keys: Keys,
        *,
        algorithms: list[str],
        issuer: str | None = None,
        audience: str | None = None,
        tenant_claim: str = "tenant_id",
        leeway: timedelta = timedelta(seconds=30),
    ) -> None:
        self._keys = keys
        self._algorithms = algorithms
        self._issuer, self._audience = issuer, audience
        self._tenant_claim = tenant_claim
        self._leeway = leeway.total_seconds()
        self._known: OrderedDict[bytes, tuple[float, Principal | Unauthorized]] = OrderedDict()

    async def authenticate(self, authorization: str | None) -> Principal:
        token = _bearer(authorization)
        name = sha256(token.encode(errors="surrogatepass")).digest()  # long tokens must not fill the memory
        remembered = self._known.get(name)
        if remembered is None or remembered[0] < time.time():
            remembered = await self._verified(token)
            self._remember(name, remembered)
        answer = remembered[1]
        if isinstance(answer, Unauthorized):
            raise _anew(answer)
        return answer

    async def _verified(self, token: str) -> tuple[float, Principal | Unauthorized]:
        try:
            claims = await self._claims(token)
        except Unauthorized as error:
            return time.time() + REFUSAL_SECONDS, _anew(error)
        tenant = claims.get(self._tenant_claim)
        principal = Principal(str(claims.get("sub", "")), tenant if isinstance(tenant, str) else None, claims)
        return min(int(claims["exp"]), time.time() + REMEMBER_SECONDS) + self._leeway, principal

    async def _claims(self, token: str) -> Mapping[str, Any]:
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                await self._keys.key_for(token),
                algorithms=self._algorithms,
                issuer=self._issuer,
                audience=self._audience,
                leeway=self._leeway,
                options={"require": ["exp"], "verify_aud": self._audience is not None},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("TOKEN_EXPIRED", "the token has expired", hint="get a new one") from None
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise Unauthorized("BAD_TOKEN", f"the token is not accepted: {error}", hint="get a new one") from None
        return claims

    def _remember(self, name: bytes, answer: tuple[float, Principal | Unauthorized]) -> None:
        self._known[name] = answer
        self._known.move_to_end(name)
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)


def _by_name(found: jwt.PyJWKSet) -> KeySet:
    if any(hasattr(key.key, "sign") for key in found.keys):
        raise ValueError("there are private keys among them; give the public ones only")
    return {key.key_id: key for key in found.keys}


def _key_name(token: str) -> str | None:
    name: str | None = jwt.get_unverified_header(token).get("kid")
    return name


def _pick(keys: KeySet, name: str | None) -> jwt.PyJWK:
    if name is None and len(keys) == 1:
        return next(iter(keys.values()))
    if name not in keys:
        raise Unauthorized("UNKNOWN_KEY", "the token is signed with a key nobody here knows")
    return keys[name]


def _anew(error: Unauthorized) -> Unauthorized:
    """The same refusal without its traceback, which would keep a whole request in the cache."""
    return Unauthorized(error.code, error.message, hint=error.hint)


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LIMIT:
        raise Unauthorized("NO_TOKEN", "this needs a token", hint="send the header `Authorization: Bearer …`")
    return token.strip()
