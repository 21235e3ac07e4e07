"""What librdkafka logs, as a logger of Python's."""

import logging
import re
import time

_QUIET_FOR = 60.0
_PASSING = re.compile(r"\d+ms|#(producer|consumer)-\d+|\[rdkafka\S*\]")


class OncePerMinute(logging.Filter):
    """Lets a sentence through once a minute: while a broker is down librdkafka says so many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, sentence = time.monotonic(), _PASSING.sub("", record.getMessage())
        is_new = now - self._said.get(sentence, -_QUIET_FOR) >= _QUIET_FOR
        if is_new:
            self._said = {said: at for said, at in self._said.items() if now - at < _QUIET_FOR}
            self._said[sentence] = now
        return is_new


def client_logger() -> logging.Logger:
    """A logger for one client, which forgets with it what it has said."""
    logger = logging.Logger("penstock.kafka")
    logger.parent = logging.getLogger()
    logger.addFilter(OncePerMinute())
    return logger
