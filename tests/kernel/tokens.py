"""Valid and invalid tokens, their keys, and the sources of keys, for tests of authentication."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from penstock.kernel.errors import Unauthorized
from penstock.kernel.http.auth import JwtAuthenticator, Principal
from penstock.kernel.http.keys import KeySource, SharedSecret

SECRET = "s" * 32
RSA_KEY, RSA_OTHER = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC_KEY = ec.generate_private_key(ec.SECP256R1())
LATER = 4_000_000_000
CLAIMS = {"sub": "daemon-7", "tenant_id": "acme", "exp": LATER}

ANY_TEXT = st.text(st.characters()) | st.binary().map(lambda raw: raw.decode("latin-1"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
HEADERS = st.fixed_dictionaries(
    {"alg": st.sampled_from(["HS256", "none"]) | JSON},
    optional={"kid": st.just("rsa") | JSON, "crit": JSON, "b64": JSON, "typ": JSON},
)


def public(key: Any, kid: str | None) -> dict[str, Any]:
    """Return the public key of *key* as a JWK."""
    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **({"kid": kid} if kid else {})}


JWKS = {"keys": [public(RSA_KEY, "rsa"), public(EC_KEY, "ec")]}


def signed(key: Any = SECRET, kid: str | None = None, algorithm: str = "HS256", **claims: Any) -> str:
    """Return a token; a claim with the value None is left out."""
    chosen = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(chosen, key, algorithm, headers={"kid": kid} if kid else None)


def forged(header: Mapping[str, Any], claims: Any, secret: bytes | None = None) -> str:
    """Return a token that no library creates, signed if there is a *secret*."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    text = b".".join(parts)
    signature = hmac.digest(secret, text, hashlib.sha256) if secret else b""
    return (text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def shared(**options: Any) -> JwtAuthenticator:
    return JwtAuthenticator(SharedSecret(SECRET), algorithms=["HS256"], **options)


def with_keys(keys: KeySource, **options: Any) -> JwtAuthenticator:
    return JwtAuthenticator(keys, algorithms=["RS256", "ES256"], **options)


async def come_in(authenticator: JwtAuthenticator, token: str) -> Principal:
    return await authenticator.authenticate(f"Bearer {token}")


async def refusal(authenticator: JwtAuthenticator, token: str) -> str:
    with pytest.raises(Unauthorized) as refused:
        await come_in(authenticator, token)
    return refused.value.code


def write(path: Path, jwks: Any) -> Path:
    """Replace the file by *jwks* atomically, as a rotation of keys should."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(jwks))
    return new.replace(path)


class Hours:
    """The wall clock and the monotonic clock, which a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        wall, mono, hours = time.time, time.monotonic, self

        class ShiftedDatetime(jwt.api_jwt.datetime):  # type: ignore[name-defined, misc]
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return super().now(tz) + timedelta(seconds=hours.ahead)

        monkeypatch.setattr(time, "time", lambda: wall() + self.ahead)
        monkeypatch.setattr(time, "monotonic", lambda: mono() + self.ahead)
        monkeypatch.setattr("jwt.api_jwt.datetime", ShiftedDatetime)


class KeyServer:
    """A JWKS URL on loopback with a response that a test chooses."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, json.dumps(JWKS).encode(), 0
        self.cut = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(server.body) + server.cut))
                self.end_headers()
                self.wfile.write(server.body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base has it
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/jwks"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
