"""The log of librdkafka, without its repetitions."""

import logging
import re
import time

_INTERVAL = 60.0
_VARIABLE_PARTS = re.compile(r"\d+ms|#(producer|consumer)-\d+|\[rdkafka\S*\]")


class RepetitionFilter(logging.Filter):
    """A filter that passes a message once a minute: librdkafka repeats it continuously while a broker is down."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, message = time.monotonic(), _VARIABLE_PARTS.sub("", record.getMessage())
        is_new = now - self._logged_at.get(message, -_INTERVAL) >= _INTERVAL
        if is_new:
            self._logged_at = {text: at for text, at in self._logged_at.items() if now - at < _INTERVAL}
            self._logged_at[message] = now
        return is_new


def make_client_logger() -> logging.Logger:
    """Return a logger for one client, with its own filter."""
    logger = logging.Logger("penstock.kafka")
    logger.parent = logging.getLogger()
    logger.addFilter(RepetitionFilter())
    return logger
