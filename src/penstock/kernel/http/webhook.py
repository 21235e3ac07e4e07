"""Webhooks: a JSON document is posted to one URL, without following redirects."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson


async def post_webhook(
    url: str, document: Mapping[str, Any], headers: Mapping[str, str], *, timeout: float, secret: str | None = None
) -> aiohttp.ClientResponse:
    """Post *document* and return the response, its body unread; errors of aiohttp are raised unchanged.

    With a *secret*, the header X-Penstock-Signature contains the HMAC-SHA256 of the body.
    """
    body = orjson.dumps(document)
    all_headers = {**headers, "Content-Type": "application/json"}
    if secret is not None:
        all_headers["X-Penstock-Signature"] = f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
    # Redirects are not followed: the signature and the secrets among the headers are for this URL.
    async with (
        aiohttp.ClientSession(headers=all_headers, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
        session.post(url, data=body, allow_redirects=False) as response,
    ):
        return response
