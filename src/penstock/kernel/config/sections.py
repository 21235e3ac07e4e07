"""Shapes that several sections of the configuration share: durations, URLs and options without secrets, a database."""

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
    """*url* itself, unless it carries a password or its port is no number."""
    # The password first: what Python says about the rest of a URL may repeat it.
    if _PASSWORD.search(url):
        raise ValueError("a URL in the configuration carries no password: set `password: env:NAME` beside it")
    for host in urlsplit(url).netloc.rpartition("@")[2].split(","):  # PostgreSQL's may name several
        _ = urlsplit(f"//{host}").port  # a port that is no number is told here
    return url


Url = Annotated[str, AfterValidator(validate_url)]


def _without_secrets(options: dict[str, str]) -> dict[str, str]:
    for name in options:
        if _SECRET_OPTION.search(name):
            raise ValueError(f"{name} is a secret: give it under `secrets`, by reference")
    return options


Options = Annotated[dict[str, str], AfterValidator(_without_secrets)]


class DatabaseSection(Section):
    """PostgreSQL: the embedded one, or any other."""

    url: Url = Field(EMBEDDED, description="`embedded`, or postgresql://user@host:5432/database, 15 or newer")
    password: SecretRef | None = Field(None, description="Of the user in the URL.")
    pool_size: int = Field(10, ge=2, le=500, description="Connections of one process.")
    statement_timeout: Annotated[Duration, Field(ge=timedelta(seconds=1))] = Field(
        timedelta(minutes=5), description="How long one statement may take."
    )
