"""Opening a bucket by its url: bounded time-outs, few retries, and options checked at once."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import from_url

from penstock.kernel.errors import BadConfig

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
# A stream is read as fast as its reader wants, so a whole request may take long; silence may not.
_CLIENT: Mapping[str, Any] = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "1h"}
_RETRY: Mapping[str, Any] = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
# What concerns the connection; every other option concerns the store.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)


def open_bucket(url: str, options: Mapping[str, str]) -> "ObjectStore":
    """The store at *url*, not yet asked anything; BadConfig when the url or an option makes no sense."""
    if urlsplit(url).scheme not in SCHEMES:
        raise _bad(f"{url!r} is not the url of a bucket", "write s3://bucket/prefix, gs://… or az://…")
    config: Any = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    connection = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    # Whoever names an endpoint without TLS means it.
    plain = {"allow_http": "true"} if options.get("endpoint", "").startswith("http://") else {}
    client: Any = {**_CLIENT, **plain, **connection}
    retry: Any = _RETRY
    try:
        return from_url(url, config=config, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise _bad(f"{url} cannot be opened: {reason}", "check the url and its options") from error


def _bad(message: str, hint: str) -> BadConfig:
    return BadConfig("BAD_STORAGE", message, hint=hint)
