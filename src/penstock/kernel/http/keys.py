"""The keys that tokens are verified with: a shared secret, a JWKS file, or a JWKS URL."""

import asyncio
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, Protocol

import jwt
import orjson
import structlog

from penstock.kernel.errors import BadConfig, Transient, Unauthorized

KEYS_LIFESPAN = 300.0
KEYS_PAUSE = 30.0  # minimum time between two fetches because of unknown key names
KEYS_RETRY = 5.0
_MIN_SECRET = 32  # RFC 7518: an HS256 key is as long as its hash
# Every exception that broken key sets raise.
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError, jwt.PyJWTError)
KeySet = Mapping[str | None, jwt.PyJWK]


class KeySource(Protocol):
    async def find_key(self, token: str) -> Any:
        """Return the key that *token* must be signed with."""


class SharedSecret:
    """A secret that signs and verifies tokens (HS256)."""

    def __init__(self, secret: str) -> None:
        if len(secret.encode()) < _MIN_SECRET:
            hint = "create one with: openssl rand -base64 48"
            raise BadConfig("WEAK_SECRET", f"auth.jwt.secret needs at least {_MIN_SECRET} bytes", hint=hint)
        self._secret = secret

    async def find_key(self, token: str) -> Any:  # noqa: ARG002 - there is only one key
        return self._secret


class KeyFile:
    """Public keys from a JWKS file, reloaded if it changes. While it is missing or broken, the last keys are used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = self._read()

    async def find_key(self, token: str) -> Any:
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._reload()
        return _find_key(self._keys, _read_key_name(token))

    def _read_stamp(self) -> tuple[int, ...] | None:
        """Return a value that changes with the file; None while it is missing."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ctime_ns, stat.st_ino, stat.st_size

    def _read(self) -> KeySet:
        try:
            return _index_keys(jwt.PyJWKSet.from_dict(orjson.loads(self._path.read_bytes())))
        except _UNUSABLE as error:
            hint = "check that auth.jwt.jwks_file names a JSON Web Key Set with public keys"
            raise BadConfig("BAD_JWKS", f"{self._path} contains no usable keys: {error}", hint=hint) from error

    def _reload(self) -> None:
        try:
            self._keys = self._read()
        except BadConfig as error:
            structlog.get_logger().warning("jwks_read_failed", code=error.code, error=error.message)


class KeyUrl:
    """Public keys from a JWKS URL, fetched if old or if a key is unknown. In an outage the last keys are used."""

    def __init__(self, url: str) -> None:
        try:
            self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=5)
        except jwt.PyJWKClientError as error:
            hint = "set auth.jwt.jwks_url to an http or https URL"
            raise BadConfig("BAD_JWKS", f"auth.jwt.jwks_url cannot be used: {error}", hint=hint) from error
        self._keys: KeySet = {}
        self._failure: str | None = None
        self._fetch_from = self._old_from = -inf
        self._fetching = asyncio.Lock()

    async def find_key(self, token: str) -> Any:
        name = _read_key_name(token)
        if self._wants_fetch(name):
            async with self._fetching:
                if self._wants_fetch(name):  # another request may have fetched meanwhile
                    await self._fetch()
        try:
            return _find_key(self._keys, name)
        except Unauthorized:
            if self._failure is None:
                raise
            problem = f"the keys of auth.jwt.jwks_url cannot be fetched: {self._failure}"
            hint = "check that the server can reach auth.jwt.jwks_url, then send the request again"
            raise Transient("JWKS_UNAVAILABLE", problem, hint=hint) from None

    def _wants_fetch(self, name: str | None) -> bool:
        now = time.monotonic()
        return now >= self._fetch_from and (now >= self._old_from or name not in self._keys)

    async def _fetch(self) -> None:
        try:
            self._keys = _index_keys(await asyncio.to_thread(self._client.get_jwk_set))
        except _UNUSABLE as error:
            self._failure, self._fetch_from = str(error), time.monotonic() + KEYS_RETRY
            structlog.get_logger().warning("jwks_fetch_failed", error=self._failure)
        else:
            now = time.monotonic()
            self._failure, self._fetch_from, self._old_from = None, now + KEYS_PAUSE, now + KEYS_LIFESPAN


def _index_keys(key_set: jwt.PyJWKSet) -> KeySet:
    if any(hasattr(key.key, "sign") for key in key_set.keys):
        raise ValueError("the key set contains private keys; publish the public keys only")
    return {key.key_id: key for key in key_set.keys}


def _read_key_name(token: str) -> str | None:
    name: str | None = jwt.get_unverified_header(token).get("kid")
    return name


def _find_key(keys: KeySet, name: str | None) -> jwt.PyJWK:
    if name is None and len(keys) == 1:
        return next(iter(keys.values()))
    if name not in keys:
        hint = "get a token from the issuer that this server is configured for (auth.jwt)"
        raise Unauthorized("UNKNOWN_KEY", f"the token is signed with an unknown key (kid {name!r})", hint=hint)
    return keys[name]
