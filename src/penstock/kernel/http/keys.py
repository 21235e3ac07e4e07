"""The keys that tokens are signed with: a shared secret, a JWKS file, or a JWKS address."""

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
KEYS_PAUSE = 30.0  # between two fetches that unknown names ask for
KEYS_RETRY = 5.0
_MIN_SECRET = 32  # RFC 7518: an HS256 key is as long as its hash
# All that broken key sets were seen to raise.
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError, jwt.PyJWTError)
KeySet = Mapping[str | None, jwt.PyJWK]


class KeySource(Protocol):
    async def key_for(self, token: str) -> Any:
        """The key that must have signed *token*."""


class SharedSecret:
    """One secret that signs and verifies."""

    def __init__(self, secret: str) -> None:
        if len(secret.encode()) < _MIN_SECRET:
            raise BadConfig(
                "WEAK_SECRET", f"auth.jwt.secret needs at least {_MIN_SECRET} bytes", hint="openssl rand -base64 48"
            )
        self._secret = secret

    async def key_for(self, token: str) -> Any:  # noqa: ARG002 - there is but one
        return self._secret


class KeyFile:
    """Public keys from a JWKS file, read anew when the file changes; while it is missing or broken, those at hand."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self._keys = self._read()

    async def key_for(self, token: str) -> Any:
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            self._read_anew()
        return _pick(self._keys, _key_name(token))

    def _look(self) -> tuple[int, ...] | None:
        """What changes when the file does; None while it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ctime_ns, found.st_ino, found.st_size

    def _read(self) -> KeySet:
        try:
            return _by_name(jwt.PyJWKSet.from_dict(orjson.loads(self._path.read_bytes())))
        except _UNUSABLE as error:
            raise BadConfig(
                "BAD_JWKS", f"{self._path} holds no usable keys: {error}", hint="check auth.jwt.jwks_file"
            ) from error

    def _read_anew(self) -> None:
        try:
            self._keys = self._read()
        except BadConfig as error:
            structlog.get_logger().warning("jwks_not_read", code=error.code, error=error.message)


class KeyUrl:
    """Public keys from a JWKS address, fetched when old or when an unknown one is named; in an outage those at hand."""

    def __init__(self, url: str) -> None:
        try:
            self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=5)
        except jwt.PyJWKClientError as error:
            raise BadConfig("BAD_JWKS", f"auth.jwt.jwks_url cannot be used: {error}") from error
        self._keys: KeySet = {}
        self._failure: str | None = None
        self._fetch_from = self._old_from = -inf
        self._fetching = asyncio.Lock()

    async def key_for(self, token: str) -> Any:
        name = _key_name(token)
        if self._wants_fetch(name):
            async with self._fetching:
                if self._wants_fetch(name):  # else somebody fetched while this waited
                    await self._fetch()
        try:
            return _pick(self._keys, name)
        except Unauthorized:
            if self._failure is None:
                raise
            hint = "check auth.jwt.jwks_url"
            raise Transient(
                "JWKS_UNAVAILABLE", f"the signing keys cannot be fetched: {self._failure}", hint=hint
            ) from None

    def _wants_fetch(self, name: str | None) -> bool:
        now = time.monotonic()
        return now >= self._fetch_from and (now >= self._old_from or name not in self._keys)

    async def _fetch(self) -> None:
        try:
            self._keys = _by_name(await asyncio.to_thread(self._client.get_jwk_set))
        except _UNUSABLE as error:
            self._failure, self._fetch_from = str(error), time.monotonic() + KEYS_RETRY
            structlog.get_logger().warning("jwks_not_fetched", error=self._failure)
        else:
            now = time.monotonic()
            self._failure, self._fetch_from, self._old_from = None, now + KEYS_PAUSE, now + KEYS_LIFESPAN


def _by_name(found: jwt.PyJWKSet) -> KeySet:
    if any(hasattr(key.key, "sign") for key in found.keys):
        raise ValueError("there are private keys among them; give the public ones only")
    return {key.key_id: key for key in found.keys}


def _key_name(token: str) -> str | None:
    name: str | None = jwt.get_unverified_header(token).get("kid")
    return name


def _pick(keys: KeySet, name: str | None) -> jwt.PyJWK:
    if name is None and len(keys) == 1:
        return next(iter(keys.values()))
    if name not in keys:
        raise Unauthorized("UNKNOWN_KEY", "the token is signed with a key nobody here knows")
    return keys[name]
