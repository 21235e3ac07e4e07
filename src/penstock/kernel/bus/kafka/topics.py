"""The topics of a cluster: there when they are needed, and what is in them. Every call blocks."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.kernel.bus.kafka.errors import down, problem, translated

_MAY_NOT = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.POLICY_VIOLATION}
_NOT_THERE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001 - spelt so
# A partition has just been made, or its leader has gone: in a moment there is one again.
_ELECTING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
_LOOK_AGAIN = 0.05


class Topics:
    """Asks and tells the cluster about its topics."""

    def __init__(self, config: Mapping[str, Any], timeout: float) -> None:
        self._config = {**config, "log_level": 0}  # nobody polls these clients, so nobody would read their logs
        self._timeout = timeout
        self._admin = AdminClient(self._config)

    def make(self, topic: str, partitions: int) -> bool:
        """Make *topic* unless it is there; False when we may not, because others make the topics here."""
        wanted = NewTopic(topic, partitions, replication_factor=-1)  # as the cluster has it by default
        with translated():
            made = self._admin.create_topics([wanted], request_timeout=self._timeout)[topic]
            error = made.exception()
            known = error.args[0].code() if isinstance(error, KafkaException) else None
            if error is not None and known not in {KafkaError.TOPIC_ALREADY_EXISTS, *_MAY_NOT}:
                raise error
            return known not in _MAY_NOT

    def backlog(self, topic: str, group: str) -> int:
        """How many messages of *topic* lie behind what *group* committed; what nobody made is empty."""
        with self._reader(group) as reader:
            patience = time.monotonic() + self._timeout
            while True:
                try:
                    places = self._partitions(reader, topic)
                    committed = reader.committed(places, timeout=self._timeout) if places else []
                    return sum(self._behind(reader, place) for place in committed)
                except KafkaException as error:
                    if error.args[0].code() not in _ELECTING or time.monotonic() > patience:
                        raise
                time.sleep(_LOOK_AGAIN)

    def oldest(self, topic: str, limit: int) -> list[Record]:
        """The first *limit* messages of each partition of *topic*."""
        with self._reader("penstock.reader") as reader:
            places = self._partitions(reader, topic)
            return [record for place in places for record in self._read(reader, place, limit)]

    def count_since(self, topic: str, since_ms: int) -> tuple[int, int]:
        """Return the number of messages of *topic* since a Unix time in ms, and the time of the oldest of them."""
        with self._reader("penstock.reader") as reader:
            starts = [TopicPartition(topic, each.partition, since_ms) for each in self._partitions(reader, topic)]
            # The offset is negative in a partition without a message since then.
            starts = [each for each in reader.offsets_for_times(starts, timeout=self._timeout) if each.offset >= 0]
            times = [record.timestamp()[1] for start in starts for record in self._read(reader, start, 1)]
            return sum(self._behind(reader, start) for start in starts), min(times, default=0)

    def _behind(self, reader: Consumer, place: TopicPartition) -> int:
        low, high = reader.get_watermark_offsets(place, timeout=self._timeout)
        return high - max(low, place.offset)  # without a commit the offset is negative: all of it

    def _read(self, reader: Consumer, place: TopicPartition, limit: int) -> list[Record]:
        reader.assign([place])
        records: list[Record] = []
        patience = time.monotonic() + self._timeout
        while len(records) < limit:
            record = reader.poll(max(0.0, patience - time.monotonic()))
            if record is None:
                raise down(f"{place.topic} could not be read in time")
            error = record.error()
            if error is None:
                records.append(record)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                break
            else:
                raise problem(error)
        return records

    def _partitions(self, reader: Consumer, topic: str) -> list[TopicPartition]:
        found = reader.list_topics(topic, timeout=self._timeout).topics[topic]
        if found.error is not None and found.error.code() not in _NOT_THERE:
            raise problem(found.error)
        return [TopicPartition(topic, number, OFFSET_BEGINNING) for number in sorted(found.partitions)]

    @contextmanager
    def _reader(self, group: str) -> Iterator[Consumer]:
        """A consumer that joins no group and commits nothing, so reading disturbs nobody."""
        settings = {
            **self._config,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end of a partition is known when a fetch finds nothing more
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
        reader = Consumer(settings)
        try:
            with translated():
                yield reader
        finally:
            reader.close()
