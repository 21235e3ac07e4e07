"""Dead letters on Kafka: the message as it was, on a topic of its own, with why and when in the headers."""

from datetime import datetime

from confluent_kafka import Message as Record

from penstock.kernel.bus import BusMessage, DeadLetter
from penstock.kernel.bus.kafka.place import headers_of, message_of
from penstock.kernel.bus.kafka.sender import OutgoingMessage

REASON, ATTEMPTS, DIED_AT = "penstock-reason", "penstock-attempts", "penstock-died-at"


def dead_topic(topic: str) -> str:
    return f"{topic}.dead"


def bury(topic: str, record: Record, reason: str, attempts: int, died_at: datetime) -> OutgoingMessage:
    """What is sent to the dead-letter topic: key, value and headers byte for byte, whatever they are."""
    about = {REASON: reason, ATTEMPTS: str(attempts), DIED_AT: died_at.isoformat()}
    kept = [(name, value) for name, value in headers_of(record) if name not in about]
    return OutgoingMessage(dead_topic(topic), record.key(), record.value(), [*kept, *about.items()])


def exhume(topic: str, record: Record) -> DeadLetter:
    """What `bury` sent, read back."""
    found = message_of(topic, record)
    about = {name: found.headers.get(name, "") for name in (REASON, ATTEMPTS, DIED_AT)}
    message = BusMessage(topic, found.key, found.value, {k: v for k, v in found.headers.items() if k not in about})
    return DeadLetter(message, about[REASON], int(about[ATTEMPTS]), datetime.fromisoformat(about[DIED_AT]))
