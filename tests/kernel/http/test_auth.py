"""R25: authentication: accepted and refused tokens, and the cache of both."""

import base64
import contextlib
import time
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import BadConfig, Forbidden, Transient, Unauthorized
from penstock.kernel.http import auth
from penstock.kernel.http.auth import (
    CACHE_SIZE,
    OPERATOR,
    REFUSAL_SECONDS,
    TOKEN_LIMIT,
    JwtAuthenticator,
    NoAuthenticator,
)
from penstock.kernel.http.keys import KeySource, SharedSecret
from tests.kernel.tokens import (
    ANY_TEXT,
    CLAIMS,
    HEADERS,
    JSON,
    LATER,
    SECRET,
    Hours,
    come_in,
    forged,
    refusal,
    shared,
    signed,
)


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    return Hours(monkeypatch)


@dataclass
class CountingKeys:
    """Keys that count their lookups."""

    inner: KeySource = field(default_factory=lambda: SharedSecret(SECRET))
    asked: int = 0

    async def find_key(self, token: str) -> Any:
        self.asked += 1
        return await self.inner.find_key(token)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_valid_token_identifies_the_caller(scheme: str) -> None:
    """R25: subject, tenant and claims are those of the token."""
    caller = await shared().authenticate(f"{scheme} {signed(role='writer')}")
    assert (caller.subject, caller.tenant, caller.is_operator) == ("daemon-7", "acme", False)
    assert caller.claims["role"] == "writer"


async def test_without_authentication_every_caller_is_the_operator() -> None:
    """R25: on loopback without keys the caller may act for every tenant."""
    assert await NoAuthenticator().authenticate(None) is OPERATOR
    OPERATOR.require_tenant("acme")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic dTpw", signed(), f"Bearer {'a' * (TOKEN_LIMIT + 1)}", "Bearer\t" + signed()],
)
async def test_a_request_without_a_token_is_refused(header: str | None) -> None:
    """R25: no header, another scheme, no token or a token that is too long is 401."""
    with pytest.raises(Unauthorized) as refused:
        await shared().authenticate(header)
    assert refused.value.code == "NO_TOKEN"
    assert refused.value.status == 401


NOW = int(time.time())
HEADER = {"alg": "HS256", "typ": "JWT"}
BAD_TOKENS = {
    "expired": (signed(exp=NOW - 3600), "TOKEN_EXPIRED"),
    "not yet valid": (signed(nbf=LATER - 1), "BAD_TOKEN"),
    "issued in the future": (signed(iat=LATER - 1), "BAD_TOKEN"),
    "without an end": (signed(exp=None), "BAD_TOKEN"),
    "end is no number": (signed(exp="soon"), "BAD_TOKEN"),
    "end is a list": (signed(exp=[LATER]), "BAD_TOKEN"),
    "wrong secret": (signed("x" * 32), "BAD_TOKEN"),
    "another algorithm": (signed("s" * 64, algorithm="HS512"), "BAD_TOKEN"),
    "algorithm none": (forged({"alg": "none"}, CLAIMS), "BAD_TOKEN"),
    "algorithm nOnE": (forged({"alg": "nOnE"}, CLAIMS), "BAD_TOKEN"),
    "no algorithm": (forged({"typ": "JWT"}, CLAIMS, SECRET.encode()), "BAD_TOKEN"),
    "algorithm is a list": (forged({"alg": ["HS256"]}, CLAIMS, SECRET.encode()), "BAD_TOKEN"),
    "algorithm is a mapping": (forged({"alg": {"a": 1}}, CLAIMS, SECRET.encode()), "BAD_TOKEN"),
    "unsigned": (forged(HEADER, CLAIMS), "BAD_TOKEN"),
    "name of the key is a number": (forged({**HEADER, "kid": 5}, CLAIMS, SECRET.encode()), "BAD_TOKEN"),
    "unknown critical header": (forged({**HEADER, "crit": ["x"], "x": 1}, CLAIMS, SECRET.encode()), "BAD_TOKEN"),
    "claims are a list": (forged(HEADER, [1], SECRET.encode()), "BAD_TOKEN"),
    "subject is a number": (forged(HEADER, {**CLAIMS, "sub": 5}, SECRET.encode()), "BAD_TOKEN"),
    "cut": (signed()[:-2], "BAD_TOKEN"),
    "two parts": ("a.b", "BAD_TOKEN"),
    "no parts": ("token", "BAD_TOKEN"),
    "blank": ("   ", "BAD_TOKEN"),
    "deep": (base64.urlsafe_b64encode(b"[" * 9000).decode() + ".e30.", "BAD_TOKEN"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
async def test_an_invalid_token_is_refused(name: str) -> None:
    """R25: expired, early, unsigned, forged or broken tokens are 401."""
    token, code = BAD_TOKENS[name]
    assert await refusal(shared(), token) == code


@pytest.mark.parametrize(
    ("wanted", "claims", "is_good"),
    [
        ({"audience": "penstock"}, {"aud": "penstock"}, True),
        ({"audience": "penstock"}, {"aud": ["other", "penstock"]}, True),
        ({"audience": "penstock"}, {"aud": "other"}, False),
        ({"audience": "penstock"}, {"aud": 5}, False),
        ({"audience": "penstock"}, {}, False),
        ({}, {"aud": "other"}, True),
        ({"issuer": "https://idp"}, {"iss": "https://idp"}, True),
        ({"issuer": "https://idp"}, {"iss": "https://idp.evil"}, False),
        ({"issuer": "https://idp"}, {}, False),
        ({"leeway": timedelta(hours=2)}, {"exp": NOW - 3600}, True),
        ({"leeway": timedelta(0)}, {"exp": NOW - 3600}, False),
    ],
)
async def test_audience_issuer_and_leeway_are_checked(wanted: Any, claims: Any, is_good: bool) -> None:
    """R25: a token with another audience or issuer than the settings is 401."""
    if is_good:
        await come_in(shared(**wanted), signed(**claims))
    else:
        await refusal(shared(**wanted), signed(**claims))


@pytest.mark.parametrize("tenant", [5, True, 0, False, ["acme"], [], {"acme": 1}, {}])
async def test_a_tenant_that_is_not_text_is_refused(tenant: Any) -> None:
    """R25: such a token is meant for a tenant, so it must not be accepted as a token of an operator."""
    assert await refusal(shared(), signed(tenant_id=tenant)) == "BAD_TOKEN"


@pytest.mark.parametrize("tenant", [None, "", "ACME", "acme2"])
async def test_a_token_acts_for_its_own_tenant_only(tenant: Any) -> None:
    """R25: the claim must equal the tenant of the path exactly, as text; else 403."""
    caller = await come_in(shared(), signed(tenant_id=tenant))
    assert caller.tenant == tenant
    with pytest.raises(Forbidden) as refused:
        caller.require_tenant("acme")
    assert (refused.value.code, refused.value.status) == ("WRONG_TENANT", 403)
    (await come_in(shared(), signed())).require_tenant("acme")


async def test_the_claim_that_names_the_tenant_can_be_chosen() -> None:
    """R25: if the settings name another claim for the tenant, only this claim counts."""
    authenticator = shared(tenant_claim="org")
    assert (await come_in(authenticator, signed(org="globex"))).tenant == "globex"
    assert (await come_in(authenticator, signed())).tenant is None


@pytest.mark.parametrize("secret", ["", "s" * 31, "é" * 15])
def test_a_weak_secret_is_refused_at_the_start(secret: str) -> None:
    """R25: an HS256 secret that is shorter than the hash is an error at the start."""
    with pytest.raises(BadConfig) as refused:
        SharedSecret(secret)
    assert refused.value.code == "WEAK_SECRET"
    SharedSecret("é" * 16)


ENDS = st.just(LATER) | st.sampled_from(["9" * 400, 10**400, 1e308, True, "١٢٣", " 4000000000 "]) | JSON
BODIES = st.fixed_dictionaries(
    {"exp": ENDS, "aud": st.just("penstock") | JSON, "iss": st.just("idp") | JSON},
    optional={"nbf": JSON, "iat": JSON, "sub": st.text() | JSON, "tenant_id": JSON},
)


@settings(deadline=None)
@given(ANY_TEXT)
async def test_any_header_is_accepted_or_unauthorized(header: str) -> None:
    """R25: any header leads at worst to Unauthorized."""
    for value in (header, f"Bearer {header}", f"Bearer {header}.{header}.{header}"):
        with pytest.raises(Unauthorized):
            await shared().authenticate(value)


@settings(deadline=None)
@given(st.just(HEADER) | HEADERS | JSON, BODIES | JSON, st.booleans())
async def test_any_claims_are_accepted_or_unauthorized(header: Any, claims: Any, strict: bool) -> None:
    """R25: a token with a valid signature and any claims is accepted or 401."""
    authenticator = shared(audience="penstock", issuer="idp") if strict else shared()
    with contextlib.suppress(Unauthorized):
        caller = await come_in(authenticator, forged(header, claims, SECRET.encode()))
        assert caller.tenant is None or isinstance(caller.tenant, str)


@pytest.mark.parametrize("end", [10**400, "9" * 400, 1e308, 4e9, " 4000000000 "])
async def test_any_valid_expiry_is_accepted(end: Any) -> None:
    """R25: a token that expires in billions of years is valid."""
    assert (await come_in(shared(), signed(exp=end))).subject == "daemon-7"


async def test_a_token_is_verified_once() -> None:
    """R25: a verified token is cached; the keys are not looked up again."""
    keys = CountingKeys()
    authenticator = JwtAuthenticator(keys, algorithms=["HS256"])
    assert [await come_in(authenticator, signed()) for _ in range(5)] == [await come_in(shared(), signed())] * 5
    assert keys.asked == 1


async def test_a_cached_token_expires(hours: Hours) -> None:
    """R25: the cache does not outlive the token."""
    authenticator = shared(leeway=timedelta(seconds=5))
    token = signed(exp=int(time.time()) + 60)
    await come_in(authenticator, token)
    hours.ahead = 70
    assert await refusal(authenticator, token) == "TOKEN_EXPIRED"


async def test_a_refusal_is_cached_briefly(hours: Hours) -> None:
    """R25: an invalid token is verified again only after a while."""
    keys = CountingKeys()
    authenticator = JwtAuthenticator(keys, algorithms=["HS256"])
    assert {await refusal(authenticator, "bad") for _ in range(5)} == {"BAD_TOKEN"}
    assert keys.asked == 1
    hours.ahead = REFUSAL_SECONDS + 1
    await refusal(authenticator, "bad")
    assert keys.asked == 2


async def test_a_cached_refusal_keeps_no_request_alive() -> None:
    """R25: each refusal is a new error; a cached error has no traceback, and so no request."""
    authenticator, raised = shared(), []
    for _ in range(2):
        with pytest.raises(Unauthorized) as refused:
            await come_in(authenticator, "bad")
        raised.append(refused.value)
    ((_, remembered),) = authenticator._cache.values()
    assert raised[0] is not raised[1]
    assert isinstance(remembered, Unauthorized)
    assert (remembered.__traceback__, remembered.__context__) == (None, None)


async def test_the_cache_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: many tokens evict the oldest, and do not fill the memory."""
    assert CACHE_SIZE <= 10_000
    monkeypatch.setattr(auth, "CACHE_SIZE", 10)
    authenticator = shared()
    for number in range(50):
        await refusal(authenticator, f"bad{number}")
    newest = [sha256(f"bad{number}".encode()).digest() for number in range(40, 50)]
    assert list(authenticator._cache) == newest


async def test_an_outage_is_not_cached() -> None:
    """R25: a token that could not be verified is verified in the next request."""

    class Down:
        async def find_key(self, token: str) -> Any:
            raise Transient("JWKS_UNAVAILABLE", "down")

    keys = CountingKeys(Down())
    authenticator = JwtAuthenticator(keys, algorithms=["HS256"])
    for _ in range(2):
        with pytest.raises(Transient):
            await come_in(authenticator, signed())
    keys.inner = SharedSecret(SECRET)
    await come_in(authenticator, signed())
    assert keys.asked == 3
