"""How much a process logs: as it is configured or, as long as somebody looks closer, everything."""

import logging

import structlog


class LogLevel:
    """The least a log line has to be to be told, by whichever logger, and however long ago that was made."""

    def __init__(self) -> None:
        self._configured = "INFO"
        self._is_debugging = False

    @property
    def number(self) -> int:
        return logging.getLogger().level

    def configure(self, level: str) -> None:
        """What it is from now on, unless everything is told."""
        self._configured = level.upper()
        self._set()

    def toggle_debugging(self) -> None:
        """Tell everything; called again, what is configured."""
        self._is_debugging = not self._is_debugging
        self._set()
        structlog.get_logger().warning("log_level_changed", to=logging.getLevelName(self.number))

    def _set(self) -> None:
        logging.getLogger().setLevel("DEBUG" if self._is_debugging else self._configured)


LOG_LEVEL = LogLevel()  # of the process, as its logging is
