"""The topics of a cluster: their creation, backlog and oldest messages. All calls block."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.kernel.bus.kafka.errors import make_down_error, make_error, translate_errors

_FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.POLICY_VIOLATION,
}
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001 - a public name
# A partition has just been created, or its leader has died: a new leader is elected in a moment.
_ELECTING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
_POLL_INTERVAL = 0.05


class Topics:
    """The topics of one cluster."""

    def __init__(self, config: Mapping[str, Any], timeout: float) -> None:
        self._config = {**config, "log_level": 0}  # these clients are not polled, so their logs would be lost
        self._timeout = timeout
        self._admin = AdminClient(self._config)

    def create(self, topic: str, partitions: int) -> bool:
        """Create *topic* unless it exists; return False if the cluster does not allow it."""
        definition = NewTopic(topic, partitions, replication_factor=-1)  # the default of the cluster
        with translate_errors():
            created = self._admin.create_topics([definition], request_timeout=self._timeout)[topic]
            error = created.exception()
            code = error.args[0].code() if isinstance(error, KafkaException) else None
            if error is not None and code not in {KafkaError.TOPIC_ALREADY_EXISTS, *_FORBIDDEN}:
                raise error
            return code not in _FORBIDDEN

    def count_backlog(self, topic: str, group: str) -> int:
        """Return the number of messages of *topic* after the commits of *group*; 0 if the topic does not exist."""
        with self._open_reader(group) as reader:
            deadline = time.monotonic() + self._timeout
            while True:
                try:
                    partitions = self._list_partitions(reader, topic)
                    committed = reader.committed(partitions, timeout=self._timeout) if partitions else []
                    return sum(self._count_behind(reader, partition) for partition in committed)
                except KafkaException as error:
                    if error.args[0].code() not in _ELECTING or time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_INTERVAL)

    def read_oldest(self, topic: str, limit: int) -> list[Record]:
        """Return the first *limit* messages of each partition of *topic*."""
        with self._open_reader("penstock.reader") as reader:
            partitions = self._list_partitions(reader, topic)
            return [record for partition in partitions for record in self._read(reader, partition, limit)]

    def count_since(self, topic: str, since_ms: int) -> tuple[int, int]:
        """Return the number of messages of *topic* since a Unix time in ms, and the time of the oldest of them."""
        with self._open_reader("penstock.reader") as reader:
            starts = [TopicPartition(topic, each.partition, since_ms) for each in self._list_partitions(reader, topic)]
            # The offset is negative in a partition without a message since then.
            starts = [each for each in reader.offsets_for_times(starts, timeout=self._timeout) if each.offset >= 0]
            times = [record.timestamp()[1] for start in starts for record in self._read(reader, start, 1)]
            return sum(self._count_behind(reader, start) for start in starts), min(times, default=0)

    def _count_behind(self, reader: Consumer, partition: TopicPartition) -> int:
        low, high = reader.get_watermark_offsets(partition, timeout=self._timeout)
        return high - max(low, partition.offset)  # without a commit the offset is negative: all of it

    def _read(self, reader: Consumer, partition: TopicPartition, limit: int) -> list[Record]:
        reader.assign([partition])
        records: list[Record] = []
        deadline = time.monotonic() + self._timeout
        while len(records) < limit:
            record = reader.poll(max(0.0, deadline - time.monotonic()))
            if record is None:
                raise make_down_error(f"{partition.topic} could not be read in time")
            error = record.error()
            if error is None:
                records.append(record)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                break
            else:
                raise make_error(error)
        return records

    def _list_partitions(self, reader: Consumer, topic: str) -> list[TopicPartition]:
        metadata = reader.list_topics(topic, timeout=self._timeout).topics[topic]
        if metadata.error is not None and metadata.error.code() not in _MISSING:
            raise make_error(metadata.error)
        return [TopicPartition(topic, number, OFFSET_BEGINNING) for number in sorted(metadata.partitions)]

    @contextmanager
    def _open_reader(self, group: str) -> Iterator[Consumer]:
        """Yield a consumer that joins no group and commits nothing, so that reading does not affect the workers."""
        settings = {
            **self._config,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end of a partition is reached when a fetch returns nothing
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
        reader = Consumer(settings)
        try:
            with translate_errors():
                yield reader
        finally:
            reader.close()
