"""Every failure a user can meet: a stable code, a sentence, and the next step."""

from collections.abc import Mapping
from typing import Any, ClassVar


class PenstockError(Exception):
    """A failure with an HTTP status, an exit code and a hint; its subclasses are the only kinds there are."""

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
        """The error as data: what `--json` prints and problem+json extends."""
        known = {"code": self.code, "detail": self.message, "hint": self.hint}
        return {**self.details, **{name: value for name, value in known.items() if value is not None}}


class Invalid(PenstockError):
    """What was asked makes no sense as it stands; asking again will not help."""

    status, exit_code, title = 422, 2, "Invalid request"


class BadConfig(Invalid):
    """The configuration cannot be used."""

    exit_code, title = 3, "Invalid configuration"


class TooLarge(Invalid):
    """What came in is over a limit."""

    status, title = 413, "Too large"


class Unauthorized(PenstockError):
    """Nobody knows who is asking."""

    status, exit_code, title = 401, 4, "Unauthorized"


class Forbidden(PenstockError):
    """The caller is known, and may not."""

    status, exit_code, title = 403, 4, "Forbidden"


class NotFound(PenstockError):
    """There is no such thing."""

    status, exit_code, title = 404, 5, "Not found"


class Conflict(PenstockError):
    """The state does not allow it, or somebody else holds it."""

    status, exit_code, title = 409, 6, "Conflict"


class Transient(PenstockError):
    """A dependency is down or busy; the same call may work later."""

    status, exit_code, title = 503, 7, "Temporarily unavailable"


class TimedOut(Transient):
    """The answer did not come in time."""

    exit_code, title = 124, "Timed out"


class Corrupt(PenstockError):
    """What is stored contradicts itself; a person has to look."""

    title = "Corrupt data"
