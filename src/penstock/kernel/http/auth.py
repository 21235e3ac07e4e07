"""Who is asking: JSON Web Tokens, verified once and remembered, and the wall between tenants."""

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
REMEMBER_SECONDS = 300.0  # no longer, whatever the token says: a withdrawn key must stop working
REFUSAL_SECONDS = 10.0


class JwtSection(Section):
    """Who may come in: bearers of a token signed by one of these keys."""

    algorithms: list[Literal["HS256", "RS256", "ES256"]] = Field(
        ["RS256", "ES256"], min_length=1, description="Those a token may be signed with."
    )
    secret: SecretRef | None = Field(None, description="For HS256, at least 32 bytes.")
    jwks_file: Path | None = Field(None, description="Public keys, as a JWKS.")
    jwks_url: Url | None = Field(
        None, description="Where such a JWKS is fetched from, again when it names no key of a token."
    )
    issuer: str | None = Field(None, description="What `iss` has to be; without it, anything.")
    audience: str | None = Field(None, description="What `aud` has to have; without it, anything.")
    tenant_claim: str = Field("tenant_id", description="The claim that names the tenant.")
    leeway: Duration = Field(timedelta(seconds=30), description="By how much clocks may differ.")

    @model_validator(mode="after")
    def _has_one_source_of_keys(self) -> "JwtSection":
        given = [name for name in ("secret", "jwks_file", "jwks_url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of secret, jwks_file and jwks_url")
        if {algorithm == "HS256" for algorithm in self.algorithms} != {given == ["secret"]}:
            raise ValueError("a secret goes with `algorithms: [HS256]`, keys with RS256 and ES256")
        return self


class AuthSection(Section):
    """Without `jwt` anybody who can connect may do anything, so Penstock then listens on loopback only."""

    jwt: JwtSection | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking. Without authentication it is the operator of this machine, who may act for every tenant."""

    subject: str
    tenant: str | None
    claims: Mapping[str, Any] = field(default_factory=dict)
    is_operator: bool = False

    def require_tenant(self, tenant: str, *, claimed: object = None) -> None:
        """R25: Forbidden unless the token's tenant, or whom it *acts_for*, is the path's."""
        if not self.is_operator and (self.tenant if claimed is None else claimed) != tenant:
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


class JwtAuthenticator:
    """R25: verifies a token once, and remembers it for minutes, never past its end; a bad one is remembered briefly."""

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
        if not (tenant is None or isinstance(tenant, str)):  # it means some tenant, so it must not pass for none
            wrong = f"the token's {self._tenant_claim} is no text"
            return time.time() + REFUSAL_SECONDS, Unauthorized("BAD_TOKEN", wrong, hint="get a new one")
        principal = Principal(str(claims.get("sub", "")), tenant, claims)
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


def _anew(error: Unauthorized) -> Unauthorized:
    """The same refusal without its traceback, which would keep a whole request in the cache."""
    return Unauthorized(error.code, error.message, hint=error.hint)


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_LIMIT:
        raise Unauthorized("NO_TOKEN", "this needs a token", hint="send the header `Authorization: Bearer …`")
    return token.strip()


def make_authenticator(section: AuthSection) -> Authenticator:
    """R25: tokens when keys are configured, else nobody but whoever is on this machine."""
    keys = section.jwt
    if keys is None:
        return NoAuthenticator()
    return JwtAuthenticator(
        _keys(keys),
        algorithms=list(keys.algorithms),
        issuer=keys.issuer,
        audience=keys.audience,
        tenant_claim=keys.tenant_claim,
        leeway=keys.leeway,
    )


def _keys(section: JwtSection) -> KeySource:
    if section.secret is not None:
        return SharedSecret(resolve_secret(section.secret, "auth.jwt.secret"))
    return KeyFile(section.jwks_file) if section.jwks_file is not None else KeyUrl(section.jwks_url or "")
