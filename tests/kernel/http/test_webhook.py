"""Webhooks: the document, its signature, and no address but the given one."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.kernel.http.webhook import post_webhook


class Receiver:
    """Keeps each request, and answers with *status* unless it is silent."""

    def __init__(self) -> None:
        self.status = 204
        self.is_silent = False
        self.url = ""
        self.ending = asyncio.Event()
        self.requests: list[tuple[web.BaseRequest, bytes]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((request, await request.read()))
        if self.is_silent:
            await self.ending.wait()
        return web.Response(status=self.status, headers={"Location": "/elsewhere"})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver, app = Receiver(), web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    async with TestServer(app) as server:
        receiver.url = str(server.make_url("/hook"))
        yield receiver
        receiver.ending.set()


async def test_a_webhook_is_signed_over_its_body(receiver: Receiver) -> None:
    """The signature is the HMAC-SHA256 of the bytes that arrive; the caller's headers come with it."""
    answer = await post_webhook(receiver.url, {"a": "é"}, {"Idempotency-Key": "k1"}, timeout=5, secret="hush")
    assert answer.status == 204
    [(request, body)] = receiver.requests
    assert (request.method, request.path, body) == ("POST", "/hook", '{"a":"é"}'.encode())
    assert (request.content_type, request.headers["Idempotency-Key"]) == ("application/json", "k1")
    signature = hmac.new(b"hush", body, hashlib.sha256).hexdigest()
    assert request.headers["X-Penstock-Signature"] == f"sha256={signature}"


@pytest.mark.parametrize("status", [302, 307, 503])
async def test_no_answer_leads_elsewhere(receiver: Receiver, status: int) -> None:
    """A redirect is returned like any other status; without a secret there is no signature."""
    receiver.status = status
    assert (await post_webhook(receiver.url, {}, {}, timeout=5)).status == status
    [(request, _)] = receiver.requests
    assert "X-Penstock-Signature" not in request.headers


async def test_a_silent_receiver_times_out(receiver: Receiver) -> None:
    """The timeout covers the whole request."""
    receiver.is_silent = True
    with pytest.raises(TimeoutError):
        await post_webhook(receiver.url, {}, {}, timeout=0.1)
