"""The command API as its clients meet it: without a network, over a real database, with an applier at work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from penstock.app.apis import PublicApis, make_command_api
from penstock.kernel.db import page as paging
from penstock.kernel.http.auth import Authenticator, NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.refdata.contract import COMMAND_LIMIT, ITEM_LIMIT
from penstock.refdata.runtime import run_apply
from penstock.settings import Settings
from tests.kernel.tokens import CLAIMS, forged, shared, signed
from tests.refdata.harness import RefdataHarness, command, create_schemas, opened, refdata_settings, upsert
from tests.support.http import answered, problem
from tests.support.types import Json

BAD = upsert("EUR", {"name": "Euro", "digits": 9})  # CURRENCY has at most 4


class CommandApiClient:
    """Requests to one application, and checks of the responses."""

    def __init__(self, http: httpx.AsyncClient, harness: RefdataHarness) -> None:
        self.http = http
        self.harness = harness

    async def post(self, body: bytes, tenant: str = "acme", **params: Any) -> httpx.Response:
        return await self.http.post(f"/v1/tenants/{tenant}/updates", content=body, params=params)

    async def taken(self, body: bytes, **params: Any) -> Json:
        return answered(await self.post(body, **params), 202)

    async def committed(self, body: bytes, tenant: str = "acme") -> Json:
        """Send a command, and repeat it with the same id until it is committed."""
        async with asyncio.timeout(30):
            while (
                answer := await self.post(body, tenant, consistencyMode="WAIT_COMMIT", timeoutMs=1000)
            ).status_code != 200:
                assert answer.status_code == 202, answer.text
        return answered(answer)

    async def get(self, path: str, **params: Any) -> Json:
        return answered(await self.http.get(f"/v1/tenants/{path}", params=params))


@asynccontextmanager
async def serving(settings: Settings, authenticator: Authenticator | None = None) -> AsyncIterator[CommandApiClient]:
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(opened(settings))
        telemetry = harness.platform.telemetry
        web = PublicApis(settings, telemetry, authenticator or NoAuthenticator())
        app = make_command_api(web, LivenessPulse({}, needs=[]), harness.refdata)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)
        yield CommandApiClient(await stack.enter_async_context(http), harness)


@pytest.fixture
async def settings(database_url: str) -> Settings:
    await create_schemas(database_url)
    return refdata_settings(database_url)


@pytest.fixture
async def idle(settings: Settings) -> AsyncIterator[CommandApiClient]:
    """Yield an API without an applier."""
    async with serving(settings) as api:
        yield api


@pytest.fixture
async def api(idle: CommandApiClient) -> AsyncIterator[CommandApiClient]:
    """Yield an API whose commands are applied immediately."""
    async with run_apply(idle.harness.platform):
        yield idle


async def test_async_answers_at_once_and_tells_where_to_ask(api: CommandApiClient) -> None:
    """R6, R7: the response is 202 with eventId, status and statusUrl, where the update becomes COMMITTED."""
    taken = await api.taken(command("LOOSE", upsert("a", 1)), consistencyMode="ASYNC")
    assert (set(taken), taken["status"]) == ({"eventId", "status", "statusUrl"}, "PENDING")
    await api.committed(command("LOOSE", upsert("a", 1), eventId=taken["eventId"]))
    found = (await api.http.get(taken["statusUrl"])).json()
    assert (found["eventId"], found["tenantId"], found["dictCode"]) == (taken["eventId"], "acme", "LOOSE")
    assert (found["status"], found["committedVersion"], found["error"]) == ("COMMITTED", 1, None)


async def test_wait_commit_answers_with_the_version(api: CommandApiClient) -> None:
    """R6: the response is 200 with eventId and committedVersion, and the command is committed."""
    event_id = str(uuid4())
    body = command("LOOSE", upsert("a", 1), eventId=event_id)
    assert await api.committed(body) == {"eventId": event_id, "committedVersion": 1}
    assert await api.harness.items("LOOSE") == {"a": 1}
    assert (await api.committed(command("LOOSE", upsert("a", 2))))["committedVersion"] == 2


async def test_wait_commit_answers_202_when_it_takes_too_long(idle: CommandApiClient) -> None:
    """R6: at the timeout, 300 ms by default, the response is 202 PENDING; the command is applied later."""
    loop, taken = asyncio.get_running_loop(), dict[str, Any]()

    async def seconds(**params: int) -> float:
        nonlocal taken
        began = loop.time()
        taken = await idle.taken(command("LOOSE", upsert("a", 1)), consistencyMode="WAIT_COMMIT", **params)
        assert taken["status"] == "PENDING"
        return loop.time() - began

    # The quickest of some: a busy machine makes waits longer, never shorter.
    short = min([await seconds(timeoutMs=50) for _ in range(5)])
    assert 0.05 <= short < 0.3 <= await seconds()
    assert await seconds(timeoutMs=1000) >= 1.0
    await idle.harness.apply()
    assert (await idle.get(taken["statusUrl"].removeprefix("/v1/tenants/")))["committedVersion"] == 7


async def test_wait_commit_tells_why_it_failed(api: CommandApiClient) -> None:
    """R6: a command that fails meanwhile gets 422 with reason, code and eventId; repeated, the same response."""
    event_id = str(uuid4())
    body = command("CURRENCY", BAD, eventId=event_id)
    async with asyncio.timeout(30):
        while (answer := await api.post(body, consistencyMode="WAIT_COMMIT")).status_code == 202:
            pass
    found = problem(answer, 422, "SQL_ERROR")
    assert (found["eventId"], found["detail"][:5]) == (event_id, "23514")
    problem(await api.post(body, consistencyMode="WAIT_COMMIT"), 422, "SQL_ERROR")
    assert (await api.taken(body))["status"] == "FAILED"
    status = await api.get(f"acme/updates/{event_id}")
    assert (status["status"], status["errorCode"], status["error"][:5]) == ("FAILED", "SQL_ERROR", "23514")


@pytest.mark.parametrize("waits", [49, 1001, 0, -1, "x", "1e2", "", 10**30])
async def test_how_long_to_wait_has_bounds(idle: CommandApiClient, waits: Any) -> None:
    """R6: timeoutMs is 50 to 1000; any other value gets 422, and no command is accepted."""
    answer = await idle.post(command("LOOSE", upsert("a", 1)), consistencyMode="WAIT_COMMIT", timeoutMs=waits)
    assert "timeoutMs" in problem(answer, 422, "MALFORMED")["detail"]
    problem(await idle.post(command("LOOSE"), consistencyMode="LATER"), 422, "MALFORMED")
    assert (await idle.get("acme/updates", status="PENDING"))["updates"] == []


async def test_the_same_again_is_the_same(idle: CommandApiClient) -> None:
    """R8: the same id and content, in any formatting, is one update, while PENDING and when COMMITTED."""
    event_id = str(uuid4())
    spelt = [
        f'{{"eventId":"{event_id}","dictCode":"LOOSE","eventType":"DELTA","items":[{{"key":"a","payload":{{"x":1,"y":[2]}}}}]}}',
        f'{{ "items": [ {{"payload": {{"y": [ 2 ], "x": 1}}, "op": "UPSERT", "key": "\\u0061"}} ],\n'
        f' "eventType": "DELTA", "tenantId": "acme", "source": "REST", "dictCode": "LOOSE", "eventId": "{event_id}" }}',
    ]
    answers = [await idle.taken(text.encode()) for text in spelt * 2]
    assert answers == [answers[0]] * 4
    await idle.harness.apply()
    for text in spelt:
        assert await idle.committed(text.encode()) == {"eventId": event_id, "committedVersion": 1}
        assert (await idle.taken(text.encode()))["status"] == "COMMITTED"
    assert await idle.harness.version("LOOSE") == 1


async def test_an_id_is_for_one_command(idle: CommandApiClient) -> None:
    """R8: a known id with another body or dictionary gets 409 in every state; ids of other tenants are independent."""
    event_id, bad = str(uuid4()), str(uuid4())
    await idle.taken(command("LOOSE", upsert("a", 1), eventId=event_id))
    await idle.taken(command("CURRENCY", BAD, eventId=bad))
    for _ in ("PENDING", "COMMITTED and FAILED"):
        for other in (
            command("LOOSE", upsert("a", 2), eventId=event_id),
            command("LOOSE", upsert("a", 1), eventId=event_id, sourceRevision=1),
            command("LOOSE", upsert("a", 1), eventId=event_id, occurredAt="2026-01-01T00:00:00Z"),
            command("LOOSE", upsert("a", 1), eventId=event_id, event_type="SNAPSHOT"),
            command("COUNTRY", upsert("a", 1), eventId=event_id),
            command("CURRENCY", upsert("EUR", {"name": "Euro", "digits": 2}), eventId=bad),
        ):
            problem(await idle.post(other), 409, "EVENT_ID_REUSED")
        await idle.harness.apply()
    answer = await idle.post(command("LOOSE", upsert("b", 1), eventId=event_id), "globex")
    assert answer.status_code == 202
    assert await idle.harness.items("LOOSE") == {"a": 1}


@pytest.mark.parametrize("digits", ["12345678901234567890123", "0.12345678901234567890123"])
async def test_another_number_is_another_body(idle: CommandApiClient, digits: str) -> None:
    """R8: bodies that differ in the last digit of a long number are different."""
    body = command("LOOSE", upsert("a", "N"), eventId=str(uuid4())).replace(b'"N"', b"%s")
    await idle.taken(body % digits.encode())
    problem(await idle.post(body % (digits[:-1] + "4").encode()), 409, "EVENT_ID_REUSED")


async def test_limits(idle: CommandApiClient) -> None:
    """R8: a command that is too large gets 413, too many items or too long a key 422; at the limit it is accepted."""
    fits, over = "k" * 512, "k" * 513
    problem(await idle.post(command("LOOSE", upsert("a", "x" * COMMAND_LIMIT))), 413, "COMMAND_TOO_LARGE")
    problem(await idle.post(b" " * (Settings().server.body_limit + 1)), 413, "BODY_TOO_LARGE")
    many = [upsert(str(n), 0) for n in range(ITEM_LIMIT + 1)]
    assert "20000" in problem(await idle.post(command("LOOSE", *many)), 422, "MALFORMED")["detail"]
    assert "items[0].key" in problem(await idle.post(command("LOOSE", upsert(over, 1))), 422, "MALFORMED")["detail"]
    for body in (
        command("LOOSE", upsert("a", "x" * (COMMAND_LIMIT - 1_000))),
        command("LOOSE", *[{"key": str(n), "payload": 0} for n in range(ITEM_LIMIT)]),
        command("LOOSE", upsert(fits, 1), upsert("\U0001f600" * 512, 1)),
        command("LOOSE"),
    ):
        await idle.taken(body)
    await idle.harness.apply()
    assert await idle.harness.dead() == []
    assert await idle.harness.version("LOOSE") == 4


async def test_what_is_taken_is_not_too_large_afterwards(idle: CommandApiClient) -> None:
    """R8: a body just below the limit is applied, although id and tenant are added on the way."""
    bare = len(command("LOOSE", upsert("a", "")))
    taken = await idle.taken(command("LOOSE", upsert("a", "x" * (COMMAND_LIMIT - bare))))
    await idle.harness.apply()
    assert (await idle.harness.update(UUID(taken["eventId"]))).error_message is None


def nested(depth: int) -> bytes:
    return command("LOOSE", upsert("a", "N")).replace(b'"N"', b"[" * depth + b"]" * depth)


async def test_what_is_nested_too_deeply_is_refused(idle: CommandApiClient) -> None:
    """R8: a payload with a hundred levels is accepted, with hundreds of thousands rejected, without a crash."""
    await idle.taken(nested(100))
    for depth in (2_000, 100_000, 400_000):
        problem(await idle.post(nested(depth)), 422, "MALFORMED")


@pytest.mark.parametrize("depth", [300, 900])
async def test_no_depth_breaks_the_api(idle: CommandApiClient, depth: int) -> None:
    """R8: a payload with a few hundred levels is accepted or rejected, never a 500."""
    assert (await idle.post(nested(depth))).status_code in (202, 422)


A = upsert("a", 1)
REFUSED: dict[tuple[int, str], list[bytes]] = {
    (422, "MALFORMED"): [
        *(b"", b"{", b"\xff", b"[]", b'"' + b"x" * 1000, command("../x", A), command("LOOSE", A, extra=1)),
        *(command("LOOSE", A, eventId="7"), command("LOOSE", A, occurredAt="2026-01-01T00:00:00")),
        *(command("LOOSE", upsert("a", None)), command("LOOSE", upsert("a", "\0"))),
        command("LOOSE", {"key": "a", "op": "DELETE"}, event_type="SNAPSHOT"),
    ],
    (422, "DUPLICATE_KEY"): [command("LOOSE", A, A, event_type="SNAPSHOT")],
    (422, "BAD_CHUNK"): [command("LOOSE", A, snapshotId=str(uuid4())), command("LOOSE", A, chunkIndex=2)],
    (422, "TENANT_MISMATCH"): [command("LOOSE", A, tenantId="globex")],
    (404, "UNKNOWN_DICTIONARY"): [command("NONE", A), command("loose", A)],
    (422, "DICTIONARY_READ_ONLY"): [command("BRAND", A)],
    (422, "DICTIONARY_DISABLED"): [command("OFF", A)],
}


async def test_every_refusal_is_a_problem(idle: CommandApiClient) -> None:
    """R6, R8: every invalid request gets a stable code and a hint, in both modes, and leaves no PENDING update."""
    for expected, bodies in REFUSED.items():
        for body in bodies:
            problem(await idle.post(body), *expected)
            problem(await idle.post(body, consistencyMode="WAIT_COMMIT"), *expected)
    problem(await idle.post(command("LOOSE", upsert("a", 1)), "umbrella"), 404, "UNKNOWN_TENANT")
    for tenant in ("a:b", "%2e%2e", "a%0a", "a%00", "%ff", "'", "x" * 129, "acme%20"):
        problem(await idle.post(command("LOOSE", upsert("a", 1)), tenant), 422, "MALFORMED")
    for path, status, code in (
        (f"acme/updates/{uuid4()}", 404, "UNKNOWN_UPDATE"),
        ("acme/updates/7", 422, "MALFORMED"),
        ("acme/history/NONE", 404, "UNKNOWN_DICTIONARY"),
        ("umbrella/history/LOOSE", 404, "UNKNOWN_TENANT"),
        ("acme/updates?status=COMMITTED", 422, "STATUS_NOT_LISTABLE"),
        ("acme/updates?status=DONE", 422, "MALFORMED"),
        ("acme/updates?limit=0", 422, "MALFORMED"),
        ("acme/history/LOOSE?limit=1001", 422, "MALFORMED"),
        ("acme/nothing", 404, "NOT_FOUND"),
    ):
        problem(await idle.http.get(f"/v1/tenants/{path}"), status, code)
    problem(await idle.http.delete("/v1/tenants/acme/updates"), 405, "METHOD_NOT_ALLOWED")
    assert await idle.harness.db.fetch("SELECT FROM update_request") == []


async def walked(api: CommandApiClient, path: str, name: str, **params: Any) -> list[Json]:
    """Return all entries of a listing, with three per page."""
    found: list[Json] = []
    cursor: Json = {}
    while True:
        page = await api.get(path, limit=3, **params, **cursor)
        found += page[name]
        if page["next"] is None:
            return found
        assert len(page[name]) == 3
        cursor = {"cursor": page["next"]}


async def test_updates_are_listed_page_by_page(idle: CommandApiClient) -> None:
    """R7: PENDING and FAILED updates of a tenant are listed latest first, each once; optionally of one dictionary."""
    ids = [(await idle.taken(command("CURRENCY", BAD)))["eventId"] for _ in range(8)]
    other = (await idle.taken(command("LOOSE", upsert("a", 1))))["eventId"]
    await idle.post(command("LOOSE", upsert("a", 1)), "globex")
    pending = await walked(idle, "acme/updates", "updates", status="PENDING")
    assert [update["eventId"] for update in pending] == [other, *reversed(ids)]
    assert await walked(idle, "acme/updates", "updates") == []
    await idle.harness.apply()
    failed = await walked(idle, "acme/updates", "updates", status="FAILED")
    assert sorted(update["eventId"] for update in failed) == sorted(ids)
    assert {(update["status"], update["errorCode"]) for update in failed} == {("FAILED", "SQL_ERROR")}
    assert [update["updatedAt"] for update in failed] == sorted(
        (update["updatedAt"] for update in failed), reverse=True
    )
    assert await walked(idle, "acme/updates", "updates", status="FAILED", dictCode="LOOSE") == []
    assert await walked(idle, "globex/updates", "updates", status="FAILED") == []
    assert (await idle.get("acme/updates", limit=8))["next"] is None


async def test_history_has_pages(idle: CommandApiClient) -> None:
    """R30: the history contains every version and its command, latest first, of this tenant only."""
    for n in range(7):
        await idle.taken(command("LOOSE", upsert(f"k{n}", n), sourceRevision=n))
    await idle.post(command("LOOSE", upsert("a", 1)), "globex")
    await idle.harness.apply()
    versions = await walked(idle, "acme/history/LOOSE", "versions")
    assert [(version["version"], version["keys"], version["sourceRevision"]) for version in versions] == [
        (n + 1, [f"k{n}"], n) for n in reversed(range(7))
    ]
    assert {(version["eventType"], version["source"], version["items"]) for version in versions} == {
        ("DELTA", "REST", 1)
    }
    assert (await idle.get("globex/history/LOOSE"))["versions"][0]["version"] == 1


async def test_a_cursor_is_nobodys_to_make_up(idle: CommandApiClient) -> None:
    """R7: an invalid cursor gets 422 BAD_CURSOR, never a crash."""
    now, good = "2026-01-01T00:00:00+00:00", str(uuid4())
    made: list[list[Any]] = [
        [now, "7"],
        [now, 7],
        [7, good],
        [now],
        [now, good, 1],
        ["now", good],
        ["0001-01-01T00:00:00+14:00", good],
    ]
    made += [["2026-01-01T00:00:00", good], [now, "\0"], [None, None], [2**63], ["1"], [1.0], [True], []]
    cursors = [*map(paging.encode_cursor, made), "", "x", "====", "é", "e30", "bnVsbA", "x" * 4_000]
    for cursor in cursors:
        for path in ("acme/updates", "acme/history/LOOSE"):
            problem(await idle.http.get(f"/v1/tenants/{path}", params={"cursor": cursor}), 422, "BAD_CURSOR")
    assert (await idle.get("acme/history/LOOSE", cursor=paging.encode_cursor([-(2**63)])))["versions"] == []


TOKENS: dict[str, list[str | None]] = {
    "NO_TOKEN": [None, "", "Basic YTpi", "Bearer ", signed()],
    "TOKEN_EXPIRED": [f"Bearer {signed(exp=1)}"],
    "BAD_TOKEN": [
        f"Bearer {token}"
        for token in (
            *("x", signed("t" * 32), signed() + "x", signed(exp=None), forged({"alg": "none"}, CLAIMS)),
            *(signed(tenant_id=claim) for claim in (5, ["acme"], {"acme": 1})),
        )
    ],
}


async def test_only_a_tenants_token_acts_for_it(database_url: str) -> None:
    """R25: a missing or invalid token gets 401, that of another tenant 403, on every route; X-Tenant-Id is ignored."""
    async with serving(refdata_settings(database_url), shared()) as api:
        routes = [("POST", "updates"), ("GET", "updates"), ("GET", f"updates/{uuid4()}"), ("GET", "history/LOOSE")]
        for method, path in routes:
            url = f"/v1/tenants/acme/{path}"
            for code, credentials in TOKENS.items():
                for credential in credentials:
                    headers = {"Authorization": credential} if credential is not None else {}
                    problem(await api.http.request(method, url, headers=headers), 401, code)
            for claim in ("globex", "ACME", "acme ", "", None):
                token = {"Authorization": f"Bearer {signed(tenant_id=claim)}", "X-Tenant-Id": "acme"}
                problem(await api.http.request(method, url, headers=token), 403, "WRONG_TENANT")
        mine = {"Authorization": f"Bearer {signed()}"}
        for path in ("acme%2f..%2fglobex", "..%2fglobex", "globex", "globex%2f..%2facme", "acme/../globex", "acme%00"):
            answer = await api.http.post(f"/v1/tenants/{path}/updates", content=command("LOOSE"), headers=mine)
            assert answer.status_code in (403, 404, 422), path
        await api.http.post("/v1/tenants/acme/updates", content=command("LOOSE"), headers=mine)
        assert [row["tenant_id"] for row in await api.harness.db.fetch("SELECT tenant_id FROM update_request")] == [
            "acme"
        ]


async def test_a_trusted_client_names_its_tenant(database_url: str) -> None:
    """R25: if allowed, the listed subjects act for the tenant of X-Tenant-Id, and only for that tenant."""
    tenant = {"allowHeaderOverrideForTrustedClients": True, "trustedClients": ["gateway"]}
    async with serving(refdata_settings(database_url, security={"tenant": tenant}), shared()) as api:
        may_not = [("gateway", "acme"), ("gateway", None), ("daemon-7", "globex"), (None, "globex")]
        for subject, named in [("gateway", "globex"), *may_not]:
            headers = {"Authorization": f"Bearer {signed(sub=subject)}", **({"X-Tenant-Id": named} if named else {})}
            answer = await api.http.get("/v1/tenants/globex/updates", headers=headers)
            assert answer.status_code == (403 if (subject, named) in may_not else 200), (subject, named)
