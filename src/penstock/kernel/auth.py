"""Who is asking: JSON Web Tokens, verified once and remembered, and the wall between tenants."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import jwt
import orjson

from penstock.kernel.errors import BadConfig, Forbidden, PenstockError, Transient, Unauthorized

CACHE_SIZE = 10_000
TOKEN_LIMIT = 16_000
REFUSAL_SECONDS = 10.0
_MIN_SECRET = 32  # RFC 7518: an HS256 key is as long as its hash


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
    """Public keys from a JWKS file, read anew when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = -1
        self._keys: dict[str | None, Any] = {}
        self._read()

    async def key_for(self, token: str) -> Any:
        if self._path.stat().st_mtime_ns != self._read_at:
            self._read()
        name = jwt.get_unverified_header(token).get("kid")
        if name is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if name not in self._keys:
            raise Unauthorized("UNKNOWN_KEY", "the token is signed with a key nobody here knows")
        return self._keys[name]

    def _read(self) -> None:
        try:
            self._read_at = self._path.stat().st_mtime_ns
            self._keys = {key.key_id: key for key in jwt.PyJWKSet.from_dict(orjson.loads(self._path.read_bytes())).keys}
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise BadConfig(
                "BAD_JWKS", f"{self._path} holds no usable keys: {error}", hint="check auth.jwt.jwks_file"
            ) from error


class KeyUrl:
    """Public keys from a JWKS address, fetched when an unknown one is named, and remembered."""

    def __init__(self, url: str) -> None:
        self._client = jwt.PyJWKClient(url, cache_keys=True, lifespan=300, timeout=5)

    async def key_for(self, token: str) -> Any:
        try:
            return (await asyncio.to_thread(self._client.get_signing_key_from_jwt, token)).key
        except jwt.PyJWKClientConnectionError as error:
            hint = "check auth.jwt.jwks_url"
            raise Transient("KEYS_DOWN", f"the signing keys cannot be fetched: {error}", hint=hint) from error


class JwtAuthenticator:
    """R25: verifies a token once, and remembers it until it expires; a bad one is remembered briefly."""

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
        self._known: OrderedDict[str, tuple[float, Principal | PenstockError]] = OrderedDict()

    async def authenticate(self, authorization: str | None) -> Principal:
        token = _bearer(authorization)
        remembered = self._known.get(token)
        if remembered is None or remembered[0] < time.time():
            remembered = await self._verified(token)
            self._remember(token, remembered)
        answer = remembered[1]
        if isinstance(answer, PenstockError):
            raise answer.with_traceback(None)
        return answer

    async def _verified(self, token: str) -> tuple[float, Principal | PenstockError]:
        try:
            claims = await self._claims(token)
        except Unauthorized as error:
            return time.time() + REFUSAL_SECONDS, error
        tenant = claims.get(self._tenant_claim)
        principal = Principal(str(claims.get("sub", "")), tenant if isinstance(tenant, str) else None, claims)
        return float(claims["exp"]) + self._leeway, principal

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
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthorized("BAD_TOKEN", f"the token is not accepted: {error}", hint="get a new one") from None
        return claims

    def _remember(self, token: str, answer: tuple[float, Principal | PenstockError]) -> None:
        self._known[token] = answer
        self._known.move_to_end(token)
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LIMIT:
        raise Unauthorized("NO_TOKEN", "this needs a token", hint="send the header `Authorization: Bearer …`")
    return token.strip()
