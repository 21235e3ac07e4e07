"""Errors for users: a stable code, a message, and a hint with the next step."""

from collections.abc import Mapping
from typing import Any, ClassVar


class PenstockError(Exception):
    """An error with an HTTP status, an exit code and a hint; every error of Penstock is of a subclass."""

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    title: ClassVar[str] = "Internal error"

    def __init__(self, code: str, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details: Mapping[str, Any] = details

    def as_dict(self) -> dict[str, Any]:
        """Return the error as data: `--json` prints it, and problem+json extends it."""
        fields = {"code": self.code, "detail": self.message, "hint": self.hint}
        return {**self.details, **{name: value for name, value in fields.items() if value is not None}}


class Invalid(PenstockError):
    """The request is invalid; repeating it unchanged fails again."""

    status, exit_code, title = 422, 2, "Invalid request"


class BadConfig(Invalid):
    """The configuration cannot be used."""

    exit_code, title = 3, "Invalid configuration"


class TooLarge(Invalid):
    """The request exceeds a limit."""

    status, title = 413, "Too large"


class Unauthorized(PenstockError):
    """The caller is not authenticated."""

    status, exit_code, title = 401, 4, "Unauthorized"


class Forbidden(PenstockError):
    """The caller is authenticated, but lacks the right."""

    status, exit_code, title = 403, 4, "Forbidden"


class NotFound(PenstockError):
    """The requested object does not exist."""

    status, exit_code, title = 404, 5, "Not found"


class Conflict(PenstockError):
    """The current state does not allow the request, or another process has locked the object."""

    status, exit_code, title = 409, 6, "Conflict"


class Transient(PenstockError):
    """A dependency is down or busy; the same request may succeed later."""

    status, exit_code, title = 503, 7, "Temporarily unavailable"


class TimedOut(Transient):
    """The operation did not finish in time."""

    exit_code, title = 124, "Timed out"


class Corrupt(PenstockError):
    """Stored data is inconsistent; an operator has to look at it."""

    title = "Corrupt data"
