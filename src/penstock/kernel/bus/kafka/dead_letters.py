"""Dead letters on Kafka: the unchanged message in another topic, with the reason and the time in its headers."""

from datetime import datetime

from confluent_kafka import Message as Record

from penstock.kernel.bus import BusMessage, DeadLetter
from penstock.kernel.bus.kafka.partition_state import make_message, read_headers
from penstock.kernel.bus.kafka.sender import OutgoingMessage

REASON, ATTEMPTS, DIED_AT = "penstock-reason", "penstock-attempts", "penstock-died-at"


def name_dead_letter_topic(topic: str) -> str:
    return f"{topic}.dead"


def make_dead_letter(topic: str, record: Record, reason: str, attempts: int, died_at: datetime) -> OutgoingMessage:
    """Return the message for the dead-letter topic, with key, value and headers byte for byte."""
    added = {REASON: reason, ATTEMPTS: str(attempts), DIED_AT: died_at.isoformat()}
    headers = [(name, value) for name, value in read_headers(record) if name not in added]
    return OutgoingMessage(name_dead_letter_topic(topic), record.key(), record.value(), [*headers, *added.items()])


def parse_dead_letter(topic: str, record: Record) -> DeadLetter:
    """Return the dead letter that `make_dead_letter` encoded."""
    stored = make_message(topic, record)
    added = {name: stored.headers.get(name, "") for name in (REASON, ATTEMPTS, DIED_AT)}
    headers = {name: value for name, value in stored.headers.items() if name not in added}
    message = BusMessage(topic, stored.key, stored.value, headers)
    return DeadLetter(message, added[REASON], int(added[ATTEMPTS]), datetime.fromisoformat(added[DIED_AT]))
