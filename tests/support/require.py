"""Skip a test whose service is missing on this machine, or fail it if PENSTOCK_REQUIRE names the service."""

import os
from typing import NoReturn

import pytest

REQUIRE = "PENSTOCK_REQUIRE"


def is_required(service: str) -> bool:
    """Return whether this run requires *service*: PENSTOCK_REQUIRE is a comma list such as `redis,kafka,mariadb`."""
    return service in {name.strip() for name in os.environ.get(REQUIRE, "").split(",")}


def require(service: str, reason: str | None = None) -> NoReturn:
    """End a test that needs *service*: skip it with the reason, or fail it if this run requires the service."""
    plain = reason or f"this machine has no {service}"
    if is_required(service):
        pytest.fail(f"{REQUIRE} names {service}, but {plain}", pytrace=False)
    pytest.skip(plain)
