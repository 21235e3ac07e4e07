"""Kafka for tests: the real broker of PENSTOCK_TEST_KAFKA, else the mock cluster of librdkafka in this process."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import cimpl

from tests.support.require import is_required, require

ADDRESS = "PENSTOCK_TEST_KAFKA"
_PRODUCER = 0
_JOIN_DELAY = 50  # milliseconds a new group waits for more members; Kafka's own default is three seconds


@dataclass(frozen=True)
class Kafka:
    """The address and the options of a broker."""

    bootstrap: str
    is_real: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def needs_real(self, why: str) -> None:
        """Skip a test that the mock does not support."""
        if not self.is_real:
            require("kafka", f"librdkafka's mock cluster {why}; `make kafka` brings a broker, {ADDRESS} names it")


@contextmanager
def kafka() -> Iterator[Kafka]:
    """Yield the broker of the run, else a mock; fail with a mock if the run requires Kafka."""
    if address := os.environ.get(ADDRESS):
        yield Kafka(address, is_real=True)
    elif is_required("kafka"):
        require("kafka", f"{ADDRESS} names no broker")
    else:
        with mock_cluster() as cluster:
            yield cluster.kafka


class MockCluster:
    """The mock broker of librdkafka, through its C interface, because the settings cannot tune or break it."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(
            cimpl.__file__
        )  # finds what this is linked with, wherever the wheel put it
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(library, name).restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(512)
        config = ctypes.c_void_p(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(config, b"log_level", b"0", error, len(error))
        self._client = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, config, error, len(error)))
        if not self._client:
            raise RuntimeError(error.value.decode())
        self._cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(self._client, 1))
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, _JOIN_DELAY)

    @property
    def kafka(self) -> Kafka:
        """Return the address and the options of the mock."""
        # The mock creates topics at the first request of a client and has no CreateTopics. A rebalance takes the
        # session timeout minus one second, so sessions are short.
        session = {"session.timeout.ms": 1_500, "heartbeat.interval.ms": 200}
        bootstrap = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        return Kafka(bootstrap, is_real=False, options={"creates_topics": False, "consumer_config": session})

    def go_down(self) -> None:
        self._library.rd_kafka_mock_broker_set_down(self._cluster, 1)

    def come_up(self) -> None:
        self._library.rd_kafka_mock_broker_set_up(self._cluster, 1)

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    try:
        yield cluster
    finally:
        cluster.close()
