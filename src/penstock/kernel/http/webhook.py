"""Webhooks: one JSON document, posted to one address and to no other."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson


async def post_webhook(
    url: str, document: Mapping[str, Any], headers: Mapping[str, str], *, timeout: float, secret: str | None = None
) -> aiohttp.ClientResponse:
    """Post *document* and return the answer, its body unread; errors of aiohttp are for the caller to report.

    With a *secret*, X-Penstock-Signature holds the HMAC-SHA256 of the body.
    """
    body = orjson.dumps(document)
    sent = {**headers, "Content-Type": "application/json"}
    if secret is not None:
        sent["X-Penstock-Signature"] = f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
    # Redirects are not followed: the signature and the secrets among the headers are for this address.
    async with (
        aiohttp.ClientSession(headers=sent, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
        session.post(url, data=body, allow_redirects=False) as answer,
    ):
        return answer
