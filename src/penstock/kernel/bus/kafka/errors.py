"""The errors of Kafka as errors of Penstock."""

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from penstock.kernel.errors import Invalid, PenstockError, Transient

# The broker does not know this member, or not in this generation, or a rebalance is running.
OUTDATED = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001 - the public name of an error of librdkafka
    }
)
_TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE})
_REFUSED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,  # noqa: SLF001
    }
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the exceptions of confluent-kafka."""
    try:
        yield
    except KafkaException as error:
        raise make_error(error.args[0]) from error


def make_error(error: KafkaError) -> PenstockError:
    """Return *error* as an error of Penstock."""
    if error.code() in _TOO_LARGE:
        hint = "send it in chunks, or raise message.max.bytes of the topic"
        return Invalid("BAD_MESSAGE", f"Kafka refused the message because of its size: {error.str()}", hint=hint)
    if error.code() == KafkaError.TOPIC_EXCEPTION:
        return Invalid("BAD_TOPIC", f"Kafka refused the name of the topic: {error.str()}")
    if error.code() in _REFUSED:
        hint = "check the credentials in bus.kafka and the ACLs of their user"
        return Transient("BUS_REFUSED", f"Kafka refused the request: {error.str()}", hint=hint)
    return make_down_error(error.str())


def make_down_error(reason: str) -> Transient:
    """Return the error for brokers that do not answer."""
    hint = "check that the brokers run and that bus.kafka.bootstrap points to them"
    return Transient("BUS_DOWN", f"Kafka does not answer: {reason}", hint=hint)
