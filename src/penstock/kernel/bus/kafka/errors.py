"""What Kafka's errors mean to a caller: wait, ask differently, or know that the partition is another's now."""

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from penstock.kernel.errors import Invalid, PenstockError, Transient

# The broker does not know this member, or not in this generation; or it is just between two.
OUTDATED = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001 - librdkafka's own errors are spelt so
    }
)
_UNFIT = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE})
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
def translated() -> Iterator[None]:
    """Turn what confluent-kafka raises into our errors."""
    try:
        yield
    except KafkaException as error:
        raise problem(error.args[0]) from error


def problem(error: KafkaError) -> PenstockError:
    """*error* as ours."""
    if error.code() in _UNFIT:
        hint = "send it in chunks, or raise message.max.bytes of the topic"
        return Invalid("BAD_MESSAGE", f"Kafka takes no message of that size: {error.str()}", hint=hint)
    if error.code() == KafkaError.TOPIC_EXCEPTION:
        return Invalid("BAD_TOPIC", f"Kafka takes no topic of that name: {error.str()}")
    if error.code() in _REFUSED:
        hint = "check the credentials and what they may do"
        return Transient("BUS_REFUSED", f"Kafka refused: {error.str()}", hint=hint)
    return down(error.str())


def down(reason: str) -> Transient:
    hint = "check that the brokers run and that bus.kafka.bootstrap points to them"
    return Transient("BUS_DOWN", f"Kafka does not answer: {reason}", hint=hint)
