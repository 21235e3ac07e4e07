"""The address of the server: an option, the environment, a configuration file, or the default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.kernel.errors import Invalid

DEFAULT_FILE = "penstock.yaml"
_LOOPBACK = "127.0.0.1"
_ENV_PREFIX = "PENSTOCK__"  # that of kernel.config.loader, which is slow to import
_selected: dict[str, str | None] = {"file": None}  # the value of --config, which callbacks set before a command runs


@dataclass(frozen=True)
class ServerKind:
    """A server of Penstock, and the names by which a user points to it."""

    option: str
    variable: str
    key: str  # of the section `server`
    port: int
    parameter: str
    description: str


API = ServerKind("--url", "PENSTOCK_URL", "port", 8080, "url", "API")
QUERY_API = ServerKind("--query-url", "PENSTOCK_QUERY_URL", "query_port", 8081, "query_url", "query server")


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and where it comes from."""

    url: str
    origin: str
    kind: ServerKind

    @property
    def is_found_from_anywhere(self) -> bool:
        """True if a command in another folder finds the same server without the option."""
        if os.environ.get(self.kind.variable):
            return self.origin == self.kind.variable
        return self.url == f"http://{_LOOPBACK}:{self.kind.port}"

    def make_down_hint(self) -> str:
        """Return what to do when no server answers at this address."""
        kind = self.kind
        if self.origin == kind.option:
            return f"`penstock up` starts a server; correct {kind.option} if the server is at another address"
        return (
            f"the address comes from {self.origin}; `penstock up` starts a server, "
            f"{kind.option} URL or {kind.variable} names another address"
        )


@dataclass(frozen=True)
class ClientConfig:
    """The keys of a configuration file that client commands use."""

    origin: str  # the file, or the environment
    server: Mapping[str, Any]
    ingest_root: Path | None


def select_config_file(file: str | None) -> str | None:
    """Use *file* for the rest of the process; the callback of `--config`."""
    _selected["file"] = file
    return file


def find_server(url: str | None, kind: ServerKind = API) -> ServerAddress:
    """Return the address of a server: *url*, else the environment, else the configuration file, else the default."""
    for given, origin in ((url, kind.option), (os.environ.get(kind.variable), kind.variable)):
        if given:
            return ServerAddress(normalize_url(given, origin), origin, kind)
    config = read_client_config()
    port = config.server.get(kind.key) or kind.port
    configured = next((key for key in (kind.key, "host") if config.server.get(key)), None)
    origin = f"server.{configured} in {config.origin}" if configured else "the default"
    return ServerAddress(f"http://{_make_reachable(config.server.get('host'))}:{port}", origin, kind)


def normalize_url(text: str, origin: str) -> str:
    """Return *text* as a URL: `host` and `host:port` mean http://."""
    url = text.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise Invalid("BAD_URL", f"{origin}: {text!r} is not a server address", hint="e.g. http://127.0.0.1:8080")
    return url.rstrip("/")


def read_client_config() -> ClientConfig:
    """Return the client keys of --config, else of PENSTOCK_CONFIG, else of ./penstock.yaml, else nothing."""
    chosen = _selected["file"] or os.environ.get("PENSTOCK_CONFIG")
    file = Path(chosen or DEFAULT_FILE)
    prefixes = (f"{_ENV_PREFIX}SERVER__", f"{_ENV_PREFIX}INGEST__ROOT")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return _read(file.absolute() if chosen or file.exists() else None, str(file), tuple(environment.items()))


@cache
def _read(file: Path | None, name: str, environment: tuple[tuple[str, str], ...]) -> ClientConfig:
    """Read a few keys without the model of all settings, which takes most of a second to import."""
    if file is None and not environment:
        return ClientConfig("", {}, None)
    from pydantic import BaseModel, ConfigDict, Field

    from penstock.kernel.config.loader import load

    class ClientSection(BaseModel):
        model_config = ConfigDict(extra="ignore")

    class ServerKeys(ClientSection):
        host: str | None = None
        port: int | None = Field(None, ge=0, le=65535)
        query_port: int | None = Field(None, ge=0, le=65535)

    class IngestKeys(ClientSection):
        root: Path | None = None

    class ClientKeys(ClientSection):
        server: ServerKeys = ServerKeys()
        ingest: IngestKeys = IngestKeys()

    keys = load(ClientKeys, file, dict(environment))
    origin = name if file else "the environment"
    return ClientConfig(origin, keys.server.model_dump(exclude_unset=True), keys.ingest.root)


def _make_reachable(host: str | None) -> str:
    """Return a host to connect to; a server that listens on every address is reached by loopback."""
    if not host:
        return _LOOPBACK
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return _LOOPBACK
    return f"[{address}]" if address.version == 6 else str(address)
