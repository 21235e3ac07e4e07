"""Authentication by JSON Web Tokens, which are verified once and cached, and the separation of tenants."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

import jwt
from pydantic import Field, model_validator

from penstock.kernel.config.loader import SecretRef, Section, resolve_secret
from penstock.kernel.config.sections import Duration, Url
from penstock.kernel.errors import Forbidden, Unauthorized
from penstock.kernel.http.keys import KeyFile, KeySource, KeyUrl, SharedSecret

CACHE_SIZE = 10_000
TOKEN_LIMIT = 16_000
REMEMBER_SECONDS = 300.0  # the maximum, even for tokens that expire later: a withdrawn key must stop working
REFUSAL_SECONDS = 10.0
_NEW_TOKEN = "get a new token from the issuer"  # noqa: S105 - a hint


class JwtSection(Section):
    """Authentication by JSON Web Tokens (`Authorization: Bearer …`).

    Set exactly one of secret, jwks_file and jwks_url.
    """

    algorithms: list[Literal["HS256", "RS256", "ES256"]] = Field(
        ["RS256", "ES256"], min_length=1, description="Signature algorithms of tokens that are accepted."
    )
    secret: SecretRef | None = Field(
        None, description="Shared secret for HS256, at least 32 bytes, as env:NAME or file:/path."
    )
    jwks_file: Path | None = Field(
        None, description="File with the public keys for RS256 and ES256, as a JSON Web Key Set."
    )
    jwks_url: Url | None = Field(
        None,
        description="URL of a JSON Web Key Set with the public keys for RS256 and ES256. It is fetched again if a "
        "token was "
        "signed with an unknown key.",
    )
    issuer: str | None = Field(
        None, description="Required value of the `iss` claim. If not set, every issuer is accepted."
    )
    audience: str | None = Field(
        None, description="Value that the `aud` claim must contain. If not set, every audience is accepted."
    )
    tenant_claim: str = Field(
        "tenant_id", description="Name of the claim with the tenant. A token without this claim is an operator token."
    )
    leeway: Duration = Field(
        timedelta(seconds=30), description="Tolerated clock difference when the expiry time of a token is checked."
    )

    @model_validator(mode="after")
    def _check_source_of_keys(self) -> "JwtSection":
        given = [name for name in ("secret", "jwks_file", "jwks_url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("must have exactly one of secret, jwks_file and jwks_url")
        if {algorithm == "HS256" for algorithm in self.algorithms} != {given == ["secret"]}:
            raise ValueError("`secret` needs `algorithms: [HS256]`; jwks_file and jwks_url need RS256 or ES256")
        return self


class AuthSection(Section):
    """Authentication.

    Without `jwt` every caller is an operator, so the servers accept connections of this machine only.
    """

    jwt: JwtSection | None = Field(
        None, description="Verification of JSON Web Tokens. If not set, callers are not authenticated."
    )


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request.

    Without authentication it is the operator of this machine, who may act for every tenant.
    """

    subject: str
    tenant: str | None
    claims: Mapping[str, Any] = field(default_factory=dict)
    is_operator: bool = False

    def require_tenant(self, tenant: str, *, claimed: object = None) -> None:
        """R25: raise Forbidden unless the tenant of the token, or the *claimed* one, is the tenant of the path."""
        if not self.is_operator and (self.tenant if claimed is None else claimed) != tenant:
            raise Forbidden(
                "WRONG_TENANT",
                f"the token does not act for tenant {tenant!r}",
                hint=f"use a token of tenant {tenant!r}",
            )


OPERATOR = Principal("operator", None, is_operator=True)


class Authenticator(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller that an Authorization header names; raise Unauthorized if it names none."""


class NoAuthenticator:
    """Treats every caller as the operator; for loopback only."""

    async def authenticate(self, authorization: str | None) -> Principal:  # noqa: ARG002 - the header is not used
        return OPERATOR


class JwtAuthenticator:
    """R25: verifies a token once and caches the result for minutes, never past its expiry; refusals for seconds."""

    def __init__(
        self,
        keys: KeySource,
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
        self._cache: OrderedDict[bytes, tuple[float, Principal | Unauthorized]] = OrderedDict()

    async def authenticate(self, authorization: str | None) -> Principal:
        token = _parse_bearer(authorization)
        name = sha256(token.encode(errors="surrogatepass")).digest()  # long tokens must not fill the memory
        cached = self._cache.get(name)
        if cached is None or cached[0] < time.time():
            cached = await self._verify(token)
            self._store(name, cached)
        result = cached[1]
        if isinstance(result, Unauthorized):
            raise _copy_error(result)
        return result

    async def _verify(self, token: str) -> tuple[float, Principal | Unauthorized]:
        try:
            claims = await self._decode(token)
        except Unauthorized as error:
            return time.time() + REFUSAL_SECONDS, _copy_error(error)
        tenant = claims.get(self._tenant_claim)
        if not (tenant is None or isinstance(tenant, str)):  # it means some tenant, so it must not pass for an operator
            problem = f"the claim {self._tenant_claim} of the token is not text"
            return time.time() + REFUSAL_SECONDS, Unauthorized("BAD_TOKEN", problem, hint=_NEW_TOKEN)
        principal = Principal(str(claims.get("sub", "")), tenant, claims)
        return min(int(claims["exp"]), time.time() + REMEMBER_SECONDS) + self._leeway, principal

    async def _decode(self, token: str) -> Mapping[str, Any]:
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                await self._keys.find_key(token),
                algorithms=self._algorithms,
                issuer=self._issuer,
                audience=self._audience,
                leeway=self._leeway,
                options={"require": ["exp"], "verify_aud": self._audience is not None},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("TOKEN_EXPIRED", "the token has expired", hint=_NEW_TOKEN) from None
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise Unauthorized("BAD_TOKEN", f"the token is not accepted: {error}", hint=_NEW_TOKEN) from None
        return claims

    def _store(self, name: bytes, result: tuple[float, Principal | Unauthorized]) -> None:
        self._cache[name] = result
        self._cache.move_to_end(name)
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)


def _copy_error(error: Unauthorized) -> Unauthorized:
    """Return the same refusal without its traceback, which would keep a whole request in the cache."""
    return Unauthorized(error.code, error.message, hint=error.hint)


def _parse_bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LIMIT:
        hint = "send the header `Authorization: Bearer TOKEN`; the CLI sends PENSTOCK_TOKEN"
        raise Unauthorized("NO_TOKEN", "the request has no token", hint=hint)
    return token.strip()


def make_authenticator(section: AuthSection) -> Authenticator:
    """R25: return an authenticator that requires tokens if keys are configured, else one for this machine only."""
    keys = section.jwt
    if keys is None:
        return NoAuthenticator()
    return JwtAuthenticator(
        _open_keys(keys),
        algorithms=list(keys.algorithms),
        issuer=keys.issuer,
        audience=keys.audience,
        tenant_claim=keys.tenant_claim,
        leeway=keys.leeway,
    )


def _open_keys(section: JwtSection) -> KeySource:
    if section.secret is not None:
        return SharedSecret(resolve_secret(section.secret, "auth.jwt.secret"))
    return KeyFile(section.jwks_file) if section.jwks_file is not None else KeyUrl(section.jwks_url or "")
