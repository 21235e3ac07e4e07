"""Types that several sections of the configuration share: durations, URLs and options without secrets, a database."""

import re
from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema

from penstock.kernel.config.loader import SecretRef, Section

EMBEDDED = "embedded"
_SECRET_OPTION = re.compile(
    r"password|secret|token|(access|account|encryption)_key$|\.pem$|authorization|cookie|api[-_]?key$", re.IGNORECASE
)
_PASSWORD = re.compile(r"://[^:/@]*:[^@]+@|[?&][^=&]*(password|secret|token)[^=&]*=", re.IGNORECASE)
Duration = Annotated[
    timedelta,
    Field(ge=timedelta(0)),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "format": "duration"}]}),
]
Secrets = dict[str, SecretRef]


def validate_url(url: str) -> str:
    """Return *url* unchanged; ValueError if it contains a password, or a port that is not a port number."""
    if _PASSWORD.search(url):
        raise ValueError("must not contain a password: set `password: env:NAME` beside the URL")
    try:
        for host in urlsplit(url).netloc.rpartition("@")[2].split(","):  # a URL of PostgreSQL may name several hosts
            _ = urlsplit(f"//{host}").port
    except ValueError:  # without the message of Python, which may repeat a secret in the URL
        raise ValueError("must be a URL with a port from 0 to 65535, if it has one") from None
    return url


Url = Annotated[str, AfterValidator(validate_url)]


def _refuse_secrets(options: dict[str, str]) -> dict[str, str]:
    for name in options:
        if _SECRET_OPTION.search(name):
            raise ValueError(f"{name} is a secret: move it to `secrets`, as env:NAME or file:/path")
    return options


Options = Annotated[dict[str, str], AfterValidator(_refuse_secrets)]


class DatabaseSection(Section):
    """Connection to PostgreSQL: the embedded server, or your own."""

    url: Url = Field(
        EMBEDDED,
        description="PostgreSQL 15 or newer: `embedded` for the server that Penstock runs itself, or "
        "postgresql://user@host:5432/database.",
    )
    password: SecretRef | None = Field(
        None,
        description="Password of the user in `url`, as env:NAME or file:/path. The URL itself must not contain it.",
    )
    pool_size: int = Field(10, ge=2, le=500, description="Maximum number of PostgreSQL connections per process.")
    statement_timeout: Annotated[Duration, Field(ge=timedelta(seconds=1))] = Field(
        timedelta(minutes=5), description="Maximum time of one SQL statement; a slower statement is cancelled."
    )
