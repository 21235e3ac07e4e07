"""R25: a tenant can read only its own dictionaries, and only with a valid token."""

import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.kernel.http.auth import JwtAuthenticator
from penstock.kernel.http.keys import KeyFile, SharedSecret
from penstock.refdata.pod.serve.router import GRANT_SECONDS
from penstock.settings import Settings
from tests.kernel.tokens import CLAIMS, EC_KEY, JWKS, RSA_KEY, RSA_OTHER, SECRET, forged, signed, with_keys, write
from tests.refdata.harness import refdata_settings
from tests.refdata.pod.conftest import QUERY
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.refdata.pod.raw_client import ACME, LOCAL, RawConnection, RawReply, connected, make_request, send_once
from tests.support.wait import becomes

GLOBEX = ACME.replace("acme", "globex")
OURS, THEIRS = b'"of acme"', b'"of globex"'
READS = ["items/a", "items?keys=a", "all", "version", "changes", "items/none"]
NOW = int(time.time())


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


def guard(**options: Any) -> JwtAuthenticator:
    chosen: Any = {"issuer": "us", "audience": "pods", "leeway": timedelta(0), **options}
    return JwtAuthenticator(SharedSecret(SECRET), algorithms=["HS256"], **chosen)


def token(tenant: Any = "acme", **claims: Any) -> str:
    return signed(**{"tenant_id": tenant, "iss": "us", "aud": "pods", **claims})


async def _fill(pod: PodHarness) -> None:
    for tenant in ("acme", "globex"):
        await pod.put("LOOSE", {"a": f"of {tenant}", "b": f"of {tenant}", "a/b": f"of {tenant}"}, tenant)
    for state in pod.pod._list_states():
        if state.target.dict_code == "LOOSE" and state.target.tenant_id in ("acme", "globex"):
            await state.wait_for_version(1)


@pytest.fixture
async def guarded(pod_settings: Settings, tmp_path: Path) -> AsyncIterator[PodHarness]:
    """Yield a pod with authentication and two tenants with the same keys."""
    async with running_pod(pod_settings, tmp_path, guard()) as pod:
        await _fill(pod)
        yield pod


async def test_a_token_reads_its_own_tenant(guarded: PodHarness) -> None:
    """R25: the tenant of the token must be the tenant of the path, else 403 without any information."""
    async with connected(guarded.address) as raw:
        for path in [path for path in READS if path != "changes"] * 2:
            mine = await raw.ask(make_request(f"{ACME}/{path}", LOCAL, bearer(token())))
            assert (mine.status, mine.headers["x-dict-version"]) == (404 if "none" in path else 200, "1")
        for path in READS:
            foreign = await raw.ask(make_request(f"{GLOBEX}/{path}", LOCAL, bearer(token())))
            assert (foreign.status, foreign.code, "x-dict-version" in foreign.headers) == (403, "WRONG_TENANT", False)
        assert (await raw.ask(make_request(f"{GLOBEX}/items/a", LOCAL, bearer(token("globex"))))).body == THEIRS


async def test_reads_need_a_token(guarded: PodHarness) -> None:
    """R25: a read without a token is 401 with the scheme; health needs no token."""
    async with connected(guarded.address) as raw:
        for path in READS:
            refused = await raw.ask(make_request(f"{ACME}/{path}"))
            assert (refused.status, refused.code) == (401, "NO_TOKEN"), path
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await raw.ask(make_request("/actuator/health/liveness"))).status == 200


BAD = {
    "expired": token(exp=NOW - 1),
    "not yet": token(nbf=NOW + 3600),
    "without an end": token(exp=None),
    "unsigned": forged({"alg": "none"}, {**CLAIMS, "iss": "us", "aud": "pods"}),
    "another key": signed("x" * 32, iss="us", aud="pods"),
    "another audience": token(aud="others"),
    "no audience": token(aud=None),
    "another issuer": token(iss="them"),
    "no issuer": token(iss=None),
    "another algorithm": signed("s" * 64, algorithm="HS512", iss="us", aud="pods"),
    "cut": token()[:-2],
    "no token": "a.b.c",
}


async def test_a_bad_token_is_refused(guarded: PodHarness) -> None:
    """R25: an invalid token is 401 each time, also on a connection with valid tokens before and after."""
    good = make_request(f"{ACME}/items/a", LOCAL, bearer(token()))
    async with connected(guarded.address) as raw:
        for name, bad in BAD.items():
            request = make_request(f"{ACME}/items/a", LOCAL, bearer(bad))
            raw.writer.write(good + request + good + request)
            statuses = [(await raw.reply()).status for _ in range(4)]
            assert statuses == [200, 401, 200, 401], name
        for header in ("Basic YTpi", "Bearer", "Bearer ", token(), "", f"Bearer {token()}x", f"Bearer  {token()[1:]}"):
            assert (await raw.ask(make_request(f"{ACME}/items/a", LOCAL, f"Authorization: {header}"))).status == 401, (
                header
            )


async def test_public_keys_from_a_file(pod_settings: Settings, tmp_path: Path) -> None:
    """R25: RS256 and ES256 with a JWKS file; a wrong key, or the public key as a secret, is refused."""
    keys = KeyFile(write(tmp_path / "jwks.json", JWKS))
    pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    async with running_pod(pod_settings, tmp_path, with_keys(keys)) as pod, connected(pod.address) as raw:
        await _fill(pod)
        for given, status in [
            (signed(RSA_KEY, "rsa", "RS256"), 200),
            (signed(EC_KEY, "ec", "ES256"), 200),
            (signed(RSA_KEY, "rsa", "RS256", tenant_id="globex"), 403),
            (signed(RSA_OTHER, "rsa", "RS256"), 401),
            (signed(RSA_KEY, "other", "RS256"), 401),
            (signed(EC_KEY, "rsa", "ES256"), 401),
            (forged({"alg": "HS256", "kid": "rsa"}, CLAIMS, pem), 401),
            (forged({"alg": "none", "kid": "rsa"}, CLAIMS), 401),
        ]:
            for _ in range(2):
                assert (await raw.ask(make_request(f"{ACME}/items/a", LOCAL, bearer(given)))).status == status


async def test_a_token_is_remembered_but_not_past_its_end(guarded: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: a token is stored while it is valid, and refused after its expiry on a warm connection."""
    ahead, wall = 0.0, time.time

    class Later(jwt.api_jwt.datetime):  # type: ignore[name-defined, misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + timedelta(seconds=ahead)

    monkeypatch.setattr(time, "time", lambda: wall() + ahead)
    monkeypatch.setattr("jwt.api_jwt.datetime", Later)
    request = make_request(f"{ACME}/items/a", LOCAL, bearer(token(exp=int(wall()) + 600)))
    async with connected(guarded.address) as raw:
        assert [(await raw.ask(request)).status for _ in range(3)] == [200] * 3
        assert guarded.server.parsed_headers
        ahead = 600 - GRANT_SECONDS - 30
        assert [(await raw.ask(request)).status for _ in range(3)] == [200] * 3
        ahead = 600 + GRANT_SECONDS

        async def is_refused() -> bool:
            answer = await raw.ask(request)
            assert answer.status == 200 or answer.code == "TOKEN_EXPIRED"
            return answer.status == 401

        await becomes(is_refused, "the token is refused")  # at the next tick of the pod
        assert [(await raw.ask(request)).status for _ in range(3)] == [401] * 3


async def test_a_claim_that_is_no_tenant_opens_nothing(guarded: PodHarness) -> None:
    """R25: a token without a tenant or with a similar name is 403, one whose tenant is not text 401."""
    claims: list[Any] = [None, "", "Acme", "acme ", ["acme"], {"acme": 1}, 5, True]
    async with connected(guarded.address) as raw:
        for claim in claims * 2:
            is_text = claim is None or isinstance(claim, str)
            refused = await raw.ask(make_request(f"{ACME}/items/a", LOCAL, bearer(token(claim))))
            assert (refused.status, refused.code) == ((403, "WRONG_TENANT") if is_text else (401, "BAD_TOKEN")), claim


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_trusted_client_may_name_a_tenant(
    pod_settings: Settings, database_url: str, tmp_path: Path, is_allowed: bool
) -> None:
    """R25: X-Tenant-Id works only if it is allowed and for trusted clients, also with known headers."""
    tenants = {"allowHeaderOverrideForTrustedClients": is_allowed, "trustedClients": ["gateway"]}
    chosen = refdata_settings(database_url, query=QUERY, security={"tenant": tenants})
    async with running_pod(chosen, tmp_path, guard()) as pod, connected(pod.address) as raw:
        await _fill(pod)
        for _ in range(2):
            allowed, other = (200, 403) if is_allowed else (403, 200)
            assert await _statuses(raw, "gateway", None) == [200, 403]
            assert await _statuses(raw, "gateway", "globex") == [other, allowed]
            assert await _statuses(raw, "gateway", "unknown") == [other, 403]
            assert await _statuses(raw, "daemon-7", "globex") == [200, 403]
            assert await _statuses(raw, "Gateway", "globex") == [200, 403]


async def _statuses(raw: RawConnection, subject: str, named: str | None) -> list[int]:
    """Return the statuses of a token of acme for acme and for globex."""
    headers = [LOCAL, bearer(token(sub=subject)), *([f"X-Tenant-Id: {named}"] if named else [])]
    return [(await raw.ask(make_request(f"{path}/items/a", *headers))).status for path in (ACME, GLOBEX)]


TRICKS = [
    "/v1/tenants/acme/../globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme%2F..%2Fglobex/dictionaries/LOOSE/items/a",
    "/v1/tenants/%2e%2e/tenants/globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/%2e%2e/items/a",
    "/v1/tenants/acme/dictionaries/..%2F..%2Fglobex%2Fdictionaries%2FLOOSE/items/a",
    "/v1/tenants/acme/dictionaries/..%2f..%2fglobex%2fdictionaries%2fLOOSE/all",
    "/v1/tenants/acme%00globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/globex%00/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/LOOSE%00/items/a",
    "/v1/tenants/globex%20/dictionaries/LOOSE/items/a",
    "/v1/tenants/globex%0A/dictionaries/LOOSE/items/a",
    "/v1/tenants/%67lobex/dictionaries/LOOSE/items/a",
    "/v1/tenants/%2567lobex/dictionaries/LOOSE/items/a",
    "/v1/tenants/GLOBEX/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/LOOSE/items/..%2F..%2F..%2F..%2Fglobex%2Fdictionaries%2FLOOSE%2Fitems%2Fa",
    "/v1/tenants/acme/dictionaries/LOOSE/items/../../../../globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/LOOSE/items/%2e%2e",
    "/v1/tenants/acme/dictionaries/LOOSE/../../../globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/LOOSE/items?keys=../../globex/LOOSE/a",
    "http://localhost/v1/tenants/globex/dictionaries/LOOSE/items/a",
    "//v1/tenants/globex/dictionaries/LOOSE/items/a",
    "/v1//tenants/globex/dictionaries/LOOSE/items/a",
    "/v1/tenants/globex/dictionaries/LOOSE/items/a?tenant=acme",
    "/v1/tenants/acme/dictionaries/LOOSE/items/a#/../globex",
    "/v1/tenants/globex/dictionaries/LOOSE/audit",
]


async def test_no_address_leads_to_another_tenant(guarded: PodHarness) -> None:
    """R25: encoded slashes, dots and NULs do not change the tenant, also on a warm connection."""
    async with connected(guarded.address) as raw:
        for host in (GLOBEX, ACME):
            tenant = host.split("/")[3]
            assert (await raw.ask(make_request(f"{host}/items/a", LOCAL, bearer(token(tenant))))).status == 200
        for path in TRICKS:
            for _ in range(2):
                answer = await raw.ask(make_request(path, LOCAL, bearer(token())))
                assert b"of globex" not in answer.body, path
                assert answer.status in (400, 403, 404) or "keys=" in path, path
        mine = await raw.ask(
            make_request("/v1/tenants/%61cme/dictionaries/LOOS%45/items/a%2Fb", LOCAL, bearer(token()))
        )
        assert (mine.status, mine.body) == (200, OURS)


async def test_a_warm_connection_keeps_tenants_apart(guarded: PodHarness) -> None:
    """R25: two tenants on one connection, as with a proxy, each get their own items or 403."""
    async with connected(guarded.address) as raw:
        asked = [(tenant, path) for tenant in ("acme", "globex") for path in (ACME, GLOBEX)] * 3
        requests = [make_request(f"{path}/items/a", LOCAL, bearer(token(tenant))) for tenant, path in asked]
        expected = [200, 403, 403, 200] * 3
        raw.writer.write(b"".join(requests))  # unverified tokens
        together = [await raw.reply() for _ in requests]
        one_by_one = [await raw.ask(request) for request in requests]
        for answers in (together, one_by_one):
            assert [answer.status for answer in answers] == expected
            assert [answer.body for answer in answers if answer.status == 200] == [OURS, THEIRS] * 3


async def test_a_token_in_a_trailer_is_ignored(guarded: PodHarness) -> None:
    """R25: a token in a trailer is ignored, and two tokens are refused."""
    hidden = f"0\r\n{bearer(token())}\r\n\r\n".encode()
    answer = await send_once(
        guarded.address, make_request(f"{ACME}/items/a", LOCAL, "Transfer-Encoding: chunked", body=hidden)
    )
    assert answer.status in (400, 401)
    twice = await send_once(
        guarded.address, make_request(f"{ACME}/items/a", LOCAL, bearer(token("globex")), bearer(token()))
    )
    assert (twice.status, twice.code) == (400, "DUPLICATE_HEADER")


async def test_a_cursor_is_of_one_tenant(guarded: PodHarness) -> None:
    """R25: a page of another tenant is refused, and its cursor does not work for the own tenant."""
    async with connected(guarded.address) as raw:

        async def page(path: str, tenant: str, cursor: str = "") -> RawReply:
            return await raw.ask(make_request(f"{path}/all?limit=1{cursor}", LOCAL, bearer(token(tenant))))

        theirs = f"&cursor={(await page(GLOBEX, 'globex')).json['next']}"
        assert (await page(GLOBEX, "acme", theirs)).status == 403
        assert (await page(ACME, "acme", theirs)).status == 410
        assert (await page(GLOBEX, "globex", theirs)).json["items"] == [{"key": "a/b", "value": "of globex"}]


async def test_without_tokens_only_local_names_are_served(pod: PodHarness) -> None:
    """R25: without authentication a foreign host, as from a web page, is 403, also on a warm connection."""
    await _fill(pod)
    async with connected(pod.address) as raw:
        for local in ("localhost", "localhost:80", "127.0.0.1", "127.0.0.1:8080", "[::1]:1"):
            for _ in range(2):
                assert (await raw.ask(make_request(f"{ACME}/items/a", f"Host: {local}"))).body == OURS
        for foreign in (
            "evil.example",
            "localhost.evil.example",
            "evil.example:80",
            "127.0.0.1.evil",
            "",
            "localhost:x",
        ):
            for path in (f"{ACME}/items/a", f"{ACME}/all", "/actuator/health"):
                refused = await raw.ask(make_request(path, f"Host: {foreign}"))
                assert (refused.status, refused.code) == (403, "HOST_NOT_ALLOWED"), foreign
        crossing = [LOCAL, "Sec-Fetch-Site: cross-site"]
        for _ in range(2):
            assert (await raw.ask(make_request(f"{ACME}/items/a", *crossing))).code == "CROSS_ORIGIN_REQUEST"
            assert (await raw.ask(make_request(f"{ACME}/items/a"))).status == 200
