"""Opening a bucket by its URL: limited timeouts, few retries, and options that are checked at once."""

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
# A slow reader may read a stream for long, so the limit of a request is high; the limit of silence is not.
_CLIENT: Mapping[str, Any] = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "1h"}
_RETRY: Mapping[str, Any] = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
# The options of the connection; all others are options of the store.
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
    """Return the store at *url* without a request to it; BadConfig if the URL or an option is invalid."""
    if urlsplit(url).scheme not in SCHEMES:
        raise _make_config_error(f"{url!r} is not the URL of a bucket", "use s3://bucket/prefix, gs://… or az://…")
    config: Any = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    connection = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    # An endpoint with http:// needs no further option.
    plain = {"allow_http": "true"} if options.get("endpoint", "").startswith("http://") else {}
    client: Any = {**_CLIENT, **plain, **connection}
    retry: Any = _RETRY
    try:
        return from_url(url, config=config, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise _make_config_error(f"{url} cannot be opened: {reason}", "check the URL and its options") from error


def _make_config_error(message: str, hint: str) -> BadConfig:
    return BadConfig("BAD_STORAGE", message, hint=hint)
