"""Checks of request headers that all servers share: the request id, and requests that a page of another site sends."""

import re
from collections.abc import Collection, Mapping

from penstock.kernel.errors import Forbidden

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}\Z")
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHENTICATE = "call it as http://127.0.0.1, or set auth.jwt in penstock.yaml"


def refuse_foreign_page(headers: Mapping[bytes, str], local_names: Collection[str]) -> Forbidden | None:
    """Return an error for a request that a page of another site sends to loopback through the browser of its reader."""
    host = re.sub(r":\d+$", "", headers.get(b"host", "localhost"))
    if host not in local_names:
        problem = f"without authentication the server accepts the host names of this machine only, not {host!r}"
        return Forbidden("HOST_NOT_ALLOWED", problem, hint=_AUTHENTICATE)
    if headers.get(b"sec-fetch-site") == "cross-site":
        problem = "without authentication a page of another site may not call this server"
        return Forbidden("CROSS_ORIGIN_REQUEST", problem, hint=_AUTHENTICATE)
    return None


def is_request_id(text: str) -> bool:
    """Return whether *text* is a request id that can be logged unchanged."""
    return _REQUEST_ID.match(text) is not None
