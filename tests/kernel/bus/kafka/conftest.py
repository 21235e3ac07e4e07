"""A broker that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.services.kafka import Kafka, kafka


@pytest.fixture(scope="module")
def broker() -> Iterator[Kafka]:
    with kafka() as service:
        yield service
