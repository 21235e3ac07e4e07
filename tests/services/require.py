"""What a test needs and this machine lacks: the test is skipped, or fails where the run insists."""

import os
from typing import NoReturn

import pytest

REQUIRE = "PENSTOCK_REQUIRE"


def is_required(service: str) -> bool:
    """Whether this run insists on *service*: PENSTOCK_REQUIRE is a comma list such as `redis,kafka,mariadb`."""
    return service in {name.strip() for name in os.environ.get(REQUIRE, "").split(",")}


def require(service: str, reason: str | None = None) -> NoReturn:
    """End a test that cannot do without *service*: skipped with the plain reason, failed where the run insists."""
    plain = reason or f"this machine has no {service}"
    if is_required(service):
        pytest.fail(f"{REQUIRE} names {service}, but {plain}", pytrace=False)
    pytest.skip(plain)
