"""R17: invalid, malformed and oversized requests are refused once, and the client receives the error."""

from itertools import product

import pytest

from penstock.refdata.pod.serve.http_parser import BODY_LIMIT, HEAD_LIMIT
from tests.refdata.pod.harness import PodHarness
from tests.refdata.pod.raw_client import ACME, LOCAL, connected, make_request, send_once

A = f"{ACME}/items/a"
GARBAGE = {
    "lower case": b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no method": b"FROB / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no version": b"GET / HTTP\r\nHost: localhost\r\n\r\n",
    "a version to come": b"GET / HTTP/3.7\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "line feeds only": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "a NUL in a header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n",
    "a control in the address": b"GET /a\x01b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a length below nothing": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "a chunk without a size": b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "noise": bytes(range(256)) * 20,
}


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    version = await pod.put("LOOSE", {"a": {"n": 1}})
    await pod.load("LOOSE", version)
    return pod


async def test_garbage_is_refused(filled: PodHarness) -> None:
    """R17: invalid HTTP is 400 as a problem, after the pending responses, and ends the connection."""
    for name, garbage in GARBAGE.items():
        async with connected(filled.address) as raw:
            raw.writer.write(make_request(A) + garbage + make_request(A))
            good, refused = await raw.reply(), await raw.reply()
            assert (good.status, refused.status, refused.is_last) == (200, 400, True), name
            assert refused.code == "BAD_REQUEST"
            assert await raw.rest() == b"", name


async def test_a_request_names_its_host(filled: PodHarness) -> None:
    """R17: HTTP/1.1 without Host is 400; the connection continues."""
    async with connected(filled.address) as raw:
        refused = await raw.ask(make_request(A, "Accept: */*"))
        assert (refused.status, refused.code, refused.is_last) == (400, "HOST_MISSING", False)
        assert (await raw.ask(make_request(A))).status == 200


TWICE = [
    [LOCAL, LOCAL],
    [LOCAL, "HOST: localhost"],
    [LOCAL, "Authorization: Bearer a", "authorization: Bearer b"],
    [LOCAL, "X-Min-Version: 0", "x-min-version: 0"],
]


async def test_unique_headers_must_not_repeat(filled: PodHarness) -> None:
    """R17: a repeated Host, Authorization or X-Min-Version is 400, because a proxy may have used the other one."""
    for twice in TWICE:
        async with connected(filled.address) as raw:
            raw.writer.write(make_request(A) + make_request(A, *twice) + make_request(A))
            assert (await raw.reply()).status == 200
            refused = await raw.reply()
            assert (refused.status, refused.code, refused.is_last) == (400, "DUPLICATE_HEADER", True), twice
            assert await raw.rest() == b""


async def test_other_methods_are_refused(filled: PodHarness) -> None:
    """R17: other methods are 405 with the allowed ones, and their body is skipped."""
    async with connected(filled.address) as raw:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            refused = await raw.ask(make_request(A, LOCAL, "Content-Length: 2", method=method, body=b"{}"))
            assert (refused.status, refused.code, refused.headers["allow"]) == (405, "METHOD_NOT_ALLOWED", "GET, HEAD")
            assert (await raw.ask(make_request(A))).status == 200


NOWHERE = [
    "/",
    "/v1",
    "/v1/",
    "/v1/tenants/acme/dictionaries",
    ACME,
    f"{ACME}/",
    f"{ACME}/items/",
    f"{ACME}/items/a/b",
    f"{ACME}/all/a",
    f"{ACME}/nothing",
    f"/{ACME}/items/a",
    f"{ACME}//items/a",
    "/v2/tenants/acme/dictionaries/LOOSE/items/a",
    "/V1/tenants/acme/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/NOSUCH/items/a",
    "/v1/tenants/unknown/dictionaries/LOOSE/items/a",
    "/v1/tenants/acme/dictionaries/%4COOSE%25/items/a",
    "/v1/tenants/acme/dictionaries/%FF/items/a",
    "/actuator/env",
]


async def test_unknown_paths_are_not_found(filled: PodHarness) -> None:
    """R17: an unknown path, dictionary or tenant is 404 as a problem with the request id of the client."""
    async with connected(filled.address) as raw:
        for path in NOWHERE:
            refused = await raw.ask(make_request(path, LOCAL, "X-Request-Id: mine-1"))
            assert (refused.status, refused.json["status"], refused.headers["x-request-id"]) == (404, 404, "mine-1"), (
                path
            )
            problem = (refused.headers["content-type"], refused.json["request_id"])
            assert problem == ("application/problem+json", "mine-1"), path


async def test_a_head_over_the_limit_is_refused(filled: PodHarness) -> None:
    """R17: headers above the limit are 431, in one or more packets, first or pipelined; smaller ones pass."""
    over = make_request(A, LOCAL, "X-Padding: " + "x" * HEAD_LIMIT)
    fine = make_request(A, LOCAL, "X-Padding: " + "x" * (HEAD_LIMIT - 200))
    for ahead, step in product((b"", make_request(A)), (len(over) * 2, 4_000)):
        for request, status in ((fine, 200), (over, 431)):
            data = ahead + request
            async with connected(filled.address) as raw:
                await raw.send_pieces(data[at : at + step] for at in range(0, len(data), step))
                if ahead:
                    assert (await raw.reply()).status == 200
                answer = await raw.reply()
                assert (answer.status, answer.is_last) == (status, status == 431), (ahead, step)


async def test_a_head_without_an_end_is_refused(filled: PodHarness) -> None:
    """R17: an endless path, header name or value is 431 as soon as it exceeds the limit."""
    for begins in (b"GET /", make_request(A)[:-2] + b"X", make_request(A)[:-2] + b"X: "):
        async with connected(filled.address) as raw:
            await raw.send_pieces([make_request(A) + begins, *[b"y" * 1_000] * (HEAD_LIMIT // 1_000 + 1)])
            assert (await raw.reply()).status == 200
            refused = await raw.reply()
            assert (refused.status, refused.code) == (431, "HEAD_TOO_LARGE")


async def test_a_body_over_the_limit_is_refused(filled: PodHarness) -> None:
    """R17: a body above the limit is 413, by length or by data, and a sending client receives the error."""
    chunk = b"%x\r\n%b\r\n" % (10_000, b"x" * 10_000)
    chunked = [make_request(A, LOCAL, "Transfer-Encoding: chunked"), *[chunk] * (BODY_LIMIT // 10_000 + 1)]
    for pieces in (
        chunked,
        [b"".join(chunked)],
        [make_request(A, LOCAL, f"Content-Length: {BODY_LIMIT + 1}")],
        [make_request(A, LOCAL, f"Content-Length: {10**18}")],
    ):
        async with connected(filled.address) as raw:
            await raw.send_pieces([make_request(A), *pieces, *[b"x" * 10_000] * 20])
            assert (await raw.reply()).status == 200
            refused = await raw.reply()
            assert (refused.status, refused.code, refused.is_last) == (413, "BODY_TOO_LARGE", True)
            assert await raw.rest() == b""


UPGRADES = [
    make_request(A, LOCAL, "Connection: Upgrade", "Upgrade: websocket"),
    make_request(A, LOCAL, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"),
    make_request("localhost:80", LOCAL, method="CONNECT"),
]


async def test_nothing_is_upgraded(filled: PodHarness) -> None:
    """R17: a request to upgrade gets exactly one response in HTTP/1.1, also when repeated."""
    for request in UPGRADES * 2:
        async with connected(filled.address) as raw:
            answer = await raw.ask(request)
            assert answer.status in (200, 400, 405)
            if not answer.is_last:
                answer = await raw.ask(make_request(f"{ACME}/items/x", LOCAL, "Connection: close"))
                assert answer.status == 404, request
            assert await raw.rest() == b"", request


async def test_a_trailer_is_not_a_header(filled: PodHarness) -> None:
    """R17: trailers have no effect on host, version or repeated headers."""
    for trailer, status in (("X-Min-Version: 999", 200), (LOCAL, 200), ("If-None-Match: *", 200)):
        request = make_request(A, LOCAL, "Transfer-Encoding: chunked", body=f"0\r\n{trailer}\r\n\r\n".encode())
        assert (await send_once(filled.address, request)).status == status, trailer
    hostless = make_request(A, "Transfer-Encoding: chunked", body=f"0\r\n{LOCAL}\r\n\r\n".encode())
    assert (await send_once(filled.address, hostless)).code == "HOST_MISSING"
