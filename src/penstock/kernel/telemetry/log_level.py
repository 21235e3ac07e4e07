"""The log level of a process: as it is configured, or DEBUG while debugging is switched on."""

import logging

import structlog


class LogLevel:
    """The minimum level of log entries. It applies to every logger at once, however old the logger is."""

    def __init__(self) -> None:
        self._configured = "INFO"
        self._is_debugging = False

    @property
    def number(self) -> int:
        return logging.getLogger().level

    def configure(self, level: str) -> None:
        """Set the configured level. It takes effect at once, or when debugging is switched off."""
        self._configured = level.upper()
        self._set()

    def toggle_debugging(self) -> None:
        """Switch to DEBUG, or back to the configured level."""
        self._is_debugging = not self._is_debugging
        self._set()
        structlog.get_logger().warning("log_level_changed", to=logging.getLevelName(self.number))

    def _set(self) -> None:
        logging.getLogger().setLevel("DEBUG" if self._is_debugging else self._configured)


LOG_LEVEL = LogLevel()  # global, as the logging of a process is
