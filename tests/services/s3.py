"""An S3 of our own: moto's server on the loopback, with keys of no account."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import httpx
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

_REGION = "us-east-1"
_KEY, _SECRET = "penstock-test", "penstock-test-secret"


@dataclass(frozen=True)
class S3Bucket:
    """An empty bucket, and how to reach it."""

    url: str
    options: Mapping[str, str]


@contextmanager
def open_s3_bucket() -> Iterator[S3Bucket]:
    """A bucket of its own on a running server; both are gone afterwards."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with _atomic_requests(), _server() as endpoint:
        bucket = f"penstock-{uuid.uuid4().hex}"
        httpx.put(f"{endpoint}/{bucket}", trust_env=False).raise_for_status()
        yield S3Bucket(
            f"s3://{bucket}",
            {
                "endpoint": endpoint,
                "region": _REGION,
                "access_key_id": _KEY,
                "secret_access_key": _SECRET,
            },
        )


@contextmanager
def _server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        if server._server is not None:
            server._server.server_close()  # moto forgets its listening socket


@contextmanager
def _atomic_requests() -> Iterator[None]:
    """Let S3's requests happen one after another: moto checks a condition before it writes, and closes the content that
    another request reads when the object is replaced."""
    lock = threading.Lock()

    def locked(respond: Callable[..., Any]) -> Callable[..., Any]:
        def respond_alone(*args: Any) -> Any:
            with lock:
                return respond(*args)

        return respond_alone

    with (
        mock.patch.object(S3Response, "_key_response", locked(S3Response._key_response)),
        mock.patch.object(S3Response, "_bucket_response", locked(S3Response._bucket_response)),
    ):
        yield
