"""Kafka for tests: a real broker when the run names one, else librdkafka's own mock cluster in this process."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import cimpl

from tests.services.require import is_required, require

ADDRESS = "PENSTOCK_TEST_KAFKA"
_PRODUCER = 0
_JOIN_DELAY = 50  # milliseconds a new group waits for more members; Kafka's own default is three seconds


@dataclass(frozen=True)
class Kafka:
    """Where it is, and what a bus must know to use it."""

    bootstrap: str
    is_real: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    session: float = 6.0

    def needs_real(self, why: str) -> None:
        """Skip a test the mock cannot serve."""
        if not self.is_real:
            require("kafka", f"librdkafka's mock cluster {why}; `make kafka` brings a broker, {ADDRESS} names it")


@contextmanager
def kafka() -> Iterator[Kafka]:
    """The broker the run names, else a mock; where the run insists on Kafka a mock will not do."""
    if address := os.environ.get(ADDRESS):
        yield Kafka(address, is_real=True)
    elif is_required("kafka"):
        require("kafka", f"{ADDRESS} names no broker")
    else:
        with mock_cluster() as address:
            # The mock makes topics when somebody asks for them, not by CreateTopics; and its groups rebalance for as
            # long as the session less a second, so sessions are short.
            session = {"session.timeout.ms": 1_500, "heartbeat.interval.ms": 200}
            yield Kafka(address, False, {"makes_topics": False, "consumer_config": session}, session=1.5)


@contextmanager
def mock_cluster() -> Iterator[str]:
    """The address of a mock cluster of one broker. Reached by its C interface: a setting gives no way to tune it."""
    library = ctypes.CDLL(cimpl.__file__)  # finds what this module is linked with, wherever the wheel put it
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    error = ctypes.create_string_buffer(512)
    config = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(config, b"log_level", b"0", error, len(error))
    client = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, config, error, len(error)))
    if not client:
        raise RuntimeError(error.value.decode())
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, 1))
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, _JOIN_DELAY)
    try:
        yield library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(client)
