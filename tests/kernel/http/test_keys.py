"""R25: keys from a file and from a URL: rotated, revoked, invalid and unreachable."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from structlog.testing import capture_logs

from penstock.kernel.errors import BadConfig, Transient, Unauthorized
from penstock.kernel.http.auth import REMEMBER_SECONDS, JwtAuthenticator
from penstock.kernel.http.keys import KEYS_LIFESPAN, KEYS_PAUSE, KEYS_RETRY, KeyFile, KeySource, KeyUrl
from tests.kernel.tokens import (
    ANY_TEXT,
    CLAIMS,
    EC_KEY,
    HEADERS,
    JSON,
    JWKS,
    RSA_KEY,
    RSA_OTHER,
    Hours,
    KeyServer,
    come_in,
    forged,
    public,
    refusal,
    signed,
    with_keys,
    write,
)


@pytest.fixture
def jwks_file(tmp_path: Path) -> Path:
    return write(tmp_path / "jwks.json", JWKS)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyServer]:
    monkeypatch.setenv("no_proxy", "*")
    running = KeyServer()
    yield running
    running.stop()


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    return Hours(monkeypatch)


@pytest.mark.parametrize(("key", "kid", "algorithm"), [(RSA_KEY, "rsa", "RS256"), (EC_KEY, "ec", "ES256")])
async def test_tokens_are_verified_with_public_keys(jwks_file: Path, key: Any, kid: str, algorithm: str) -> None:
    """R25: RS256 and ES256 tokens are verified with the key they name."""
    assert (await come_in(with_keys(KeyFile(jwks_file)), signed(key, kid, algorithm))).tenant == "acme"


async def test_a_single_key_needs_no_id(tmp_path: Path) -> None:
    """R25: with a single key, a token needs no key id."""
    keys = KeyFile(write(tmp_path / "jwks.json", {"keys": [public(RSA_KEY, None)]}))
    assert (await come_in(with_keys(keys), signed(RSA_KEY, None, "RS256"))).subject == "daemon-7"


@pytest.mark.parametrize("algorithms", [["RS256", "ES256"], ["HS256", "RS256", "ES256"]])
@pytest.mark.parametrize("source", ["file", "url"])
async def test_a_public_key_is_not_accepted_as_a_secret(
    jwks_file: Path, server: KeyServer, algorithms: list[str], source: str
) -> None:
    """R25: an HS256 token signed with the RSA public key is refused, even where HS256 was allowed by mistake."""
    pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    keys: KeySource = KeyFile(jwks_file) if source == "file" else KeyUrl(server.url)
    token = forged({"alg": "HS256", "kid": "rsa"}, CLAIMS, pem)
    assert await refusal(JwtAuthenticator(keys, algorithms=algorithms), token) == "BAD_TOKEN"


@pytest.mark.parametrize(
    ("key", "kid", "algorithm", "code"),
    [
        (RSA_OTHER, "rsa", "RS256", "BAD_TOKEN"),
        (EC_KEY, "rsa", "ES256", "BAD_TOKEN"),
        (RSA_KEY, "ec", "RS256", "BAD_TOKEN"),
        (RSA_KEY, "rsa", "RS512", "BAD_TOKEN"),
        (RSA_OTHER, "missing", "RS256", "UNKNOWN_KEY"),
        (RSA_KEY, None, "RS256", "UNKNOWN_KEY"),
    ],
)
@pytest.mark.parametrize("source", ["file", "url"])
async def test_only_the_key_with_the_id_and_its_algorithm_count(
    jwks_file: Path, server: KeyServer, source: str, key: Any, kid: str | None, algorithm: str, code: str
) -> None:
    """R25: the signature of another key, another algorithm or an unknown key id is 401."""
    keys: KeySource = KeyFile(jwks_file) if source == "file" else KeyUrl(server.url)
    assert await refusal(with_keys(keys), signed(key, kid, algorithm)) == code


async def test_keys_rotate_with_the_file(jwks_file: Path) -> None:
    """R25: a new key is valid as soon as it is in the file."""
    authenticator = with_keys(KeyFile(jwks_file))
    await come_in(authenticator, signed(RSA_KEY, "rsa", "RS256"))
    write(jwks_file, {"keys": [public(RSA_OTHER, "rsa")]})
    assert await refusal(authenticator, signed(RSA_KEY, "rsa", "RS256", jti="2")) == "BAD_TOKEN"
    await come_in(authenticator, signed(RSA_OTHER, "rsa", "RS256"))


async def test_a_revoked_key_stops_working(jwks_file: Path, hours: Hours) -> None:
    """R25: a token of a revoked key is accepted only as long as the cache lasts."""
    authenticator = with_keys(KeyFile(jwks_file))
    token = signed(RSA_KEY, "rsa", "RS256")
    await come_in(authenticator, token)
    write(jwks_file, {"keys": [public(EC_KEY, "ec")]})
    hours.ahead = REMEMBER_SECONDS + 31
    assert await refusal(authenticator, token) == "UNKNOWN_KEY"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"keys": []}', "\udcff"])
async def test_a_file_that_becomes_invalid_keeps_the_old_keys(jwks_file: Path, content: str | None) -> None:
    """R25: while the file is missing or invalid the loaded keys remain valid, with one warning."""
    authenticator = with_keys(KeyFile(jwks_file))
    if content is None:
        jwks_file.unlink()
    else:
        jwks_file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with capture_logs() as logs:
        for number in range(3):
            await come_in(authenticator, signed(RSA_KEY, "rsa", "RS256", jti=f"{number}"))
    assert [(log["event"], log["log_level"]) for log in logs] == [("jwks_read_failed", "warning")]
    write(jwks_file, {"keys": [public(RSA_OTHER, "new")]})
    await come_in(authenticator, signed(RSA_OTHER, "new", "RS256"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "5",
        "{}",
        '{"keys": 5}',
        '{"keys": [5]}',
        '{"keys": [{"kty": "RSA", "alg": ["x"]}]}',
        pytest.param(json.dumps({"keys": [{**public(RSA_KEY, None), "kid": ["rsa"]}]}), id="a name that is a list"),
        pytest.param(json.dumps({"keys": [RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True)]}), id="a private RSA key"),
        pytest.param(json.dumps({"keys": [ECAlgorithm.to_jwk(EC_KEY, as_dict=True)]}), id="a private EC key"),
    ],
)
def test_a_file_without_public_keys_does_not_start(tmp_path: Path, content: str) -> None:
    """R25: an invalid JWKS file, or a file with private keys, is BadConfig."""
    (tmp_path / "jwks.json").write_text(content)
    with pytest.raises(BadConfig) as refused:
        KeyFile(tmp_path / "jwks.json")
    assert refused.value.code == "BAD_JWKS"


def test_a_missing_file_does_not_start(tmp_path: Path) -> None:
    """R25: a missing file of keys is an error at the start."""
    with pytest.raises(BadConfig):
        KeyFile(tmp_path / "jwks.json")


RSA_TOKEN = signed(RSA_KEY, "rsa", "RS256")


async def test_keys_are_fetched_once_for_concurrent_callers(server: KeyServer) -> None:
    """R25: concurrent callers cause one request, and later callers none."""
    authenticator = with_keys(KeyUrl(server.url))
    tokens = [signed(RSA_KEY, "rsa", "RS256", jti=f"{n}") for n in range(8)] + [signed(EC_KEY, "ec", "ES256")]
    assert len(await asyncio.gather(*(come_in(authenticator, token) for token in tokens))) == 9
    assert server.asked == 1


async def test_an_unknown_key_id_fetches_again_but_not_at_once(server: KeyServer, hours: Hours) -> None:
    """R25: a rotated key is found, but forged key ids do not cause many requests."""
    authenticator = with_keys(KeyUrl(server.url))
    await come_in(authenticator, RSA_TOKEN)
    server.body = json.dumps({"keys": [public(RSA_OTHER, "new")]}).encode()
    for number in range(5):
        assert await refusal(authenticator, signed(RSA_OTHER, f"made-up-{number}", "RS256")) == "UNKNOWN_KEY"
    assert server.asked == 1
    hours.ahead = KEYS_PAUSE + 1
    await come_in(authenticator, signed(RSA_OTHER, "new", "RS256"))
    assert server.asked == 2


async def test_a_key_revoked_at_the_url_stops_working(server: KeyServer, hours: Hours) -> None:
    """R25: old keys are fetched again, so that a revoked key is removed."""
    authenticator = with_keys(KeyUrl(server.url))
    await come_in(authenticator, RSA_TOKEN)
    server.body = json.dumps({"keys": [public(EC_KEY, "ec")]}).encode()
    hours.ahead = max(KEYS_LIFESPAN, REMEMBER_SECONDS) + 31
    assert await refusal(authenticator, RSA_TOKEN) == "UNKNOWN_KEY"


@pytest.mark.parametrize(
    ("status", "body", "cut"),
    [
        (500, b"{}", False),
        (302, b"", False),
        (200, b"<html>maintenance</html>", False),
        (200, b"\xff\xfe", False),
        (200, b"[]", False),
        (200, b'{"keys": []}', False),
        (200, b'{"keys": [{"kty": "RSA", "alg": []}]}', False),
        (200, b'{"keys": [', True),
    ],
)
async def test_a_url_with_an_invalid_response_is_down(
    server: KeyServer, hours: Hours, status: int, body: bytes, cut: bool
) -> None:
    """R25: without keys a valid token is 503, not 401; loaded keys remain valid during an outage."""
    good, fresh, known = server.body, with_keys(KeyUrl(server.url)), with_keys(KeyUrl(server.url))
    await come_in(known, RSA_TOKEN)
    server.status, server.body, server.cut = status, body, cut
    hours.ahead = KEYS_LIFESPAN + 31
    assert (await come_in(known, signed(RSA_KEY, "rsa", "RS256", jti="2"))).tenant == "acme"
    for _ in range(3):
        with pytest.raises(Transient) as down:
            await come_in(fresh, RSA_TOKEN)
        assert down.value.code == "JWKS_UNAVAILABLE"
    assert server.asked == 3, "a failed fetch is not repeated by every caller"
    server.status, server.body, server.cut = 200, good, False
    hours.ahead += KEYS_RETRY + 1
    await come_in(fresh, RSA_TOKEN)


async def test_an_unreachable_url_is_down(server: KeyServer) -> None:
    """R25: without a server at the URL requests are refused as Transient."""
    server.stop()
    with pytest.raises(Transient) as down:
        await come_in(with_keys(KeyUrl(server.url)), RSA_TOKEN)
    assert (down.value.code, down.value.status) == ("JWKS_UNAVAILABLE", 503)


async def test_a_malformed_token_causes_no_request(server: KeyServer) -> None:
    """R25: a malformed token does not fetch keys."""
    assert await refusal(with_keys(KeyUrl(server.url)), "a.b.c") == "BAD_TOKEN"
    assert server.asked == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h/k", "jwks.json", ""])
def test_only_http_urls_are_allowed(url: str) -> None:
    """R25: a URL with another scheme is BadConfig."""
    with pytest.raises(BadConfig) as refused:
        KeyUrl(url)
    assert refused.value.code == "BAD_JWKS"


@pytest.fixture(scope="module")
def steady_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("keys") / "jwks.json", JWKS)


@given(header=HEADERS | JSON, junk=ANY_TEXT)
@settings(max_examples=50, deadline=None)
async def test_any_token_is_valid_or_unauthorized_with_public_keys(steady_file: Path, header: Any, junk: str) -> None:
    """R25: any token leads at worst to Unauthorized."""
    authenticator = with_keys(KeyFile(steady_file))
    for token in (forged(header, CLAIMS, b"x"), f"{junk}.{junk}.", junk):
        with pytest.raises(Unauthorized):
            await authenticator.authenticate(f"Bearer {token}")
