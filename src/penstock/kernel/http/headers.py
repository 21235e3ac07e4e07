"""What a request's headers tell, whichever server reads them: its id, and whether a page from elsewhere sent it."""

import re
from collections.abc import Collection, Mapping

from penstock.kernel.errors import Forbidden

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}\Z")
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def foreign_page(headers: Mapping[bytes, str], local_names: Collection[str]) -> Forbidden | None:
    """A page from elsewhere can reach loopback through the browser of whoever reads it."""
    host = re.sub(r":\d+$", "", headers.get(b"host", "localhost"))
    if host not in local_names:
        return Forbidden(
            "HOST_NOT_ALLOWED", f"without authentication only local names are served, not {host!r}", hint="set auth.jwt"
        )
    if headers.get(b"sec-fetch-site") == "cross-site":
        return Forbidden("CROSS_ORIGIN_REQUEST", "a page of another site may not call this server", hint="set auth.jwt")
    return None


def is_request_id(given: str) -> bool:
    """Whether a caller's id can be written down as it is."""
    return _REQUEST_ID.match(given) is not None
