"""A cluster that is there already: where it is, and what its owner does to break it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from drills.faults import Fault, run_shell
from drills.target import Target
from penstock.kernel.errors import BadConfig, Invalid

FAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Given:
    """What the command line says of it."""

    command_url: str
    query_urls: Sequence[str]
    tenant: str | None
    dict_code: str | None
    token_env: str | None
    faults: Sequence[str]

    def target(self) -> Target:
        """The cluster to drill; Invalid when something is not said."""
        if not self.query_urls or not self.tenant or not self.dict_code:
            hint = "--command-url, --query-url, --tenant and --dict go together"
            raise Invalid("CLUSTER_INCOMPLETE", "a given cluster is not described in full", hint=hint)
        for url in (self.command_url, *self.query_urls):
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise Invalid(
                    "BAD_URL", f"{without_password(url)!r} is no address", hint="http://host:port or https://host"
                )
            if "@" in urlsplit(url).netloc:
                hint = "leave it out: --token-env names the variable with a bearer token"
                raise Invalid("PASSWORD_IN_URL", f"{without_password(url)!r} was given with a password", hint=hint)
        names = _names(self.query_urls)
        about = {"set-up": "a given cluster", "commands": self.command_url, "queries": ", ".join(self.query_urls)}
        return Target(
            self.command_url,
            dict(zip(names, self.query_urls, strict=True)),
            self.tenant,
            self.dict_code,
            token=self._token(),
            faults=[_fault(fault) for fault in self.faults],
            about={**about, "tenant": self.tenant, "dictionary": self.dict_code},
            is_ours=False,
        )

    def _token(self) -> str | None:
        if self.token_env is None:
            return None
        if token := os.environ.get(self.token_env):
            return token
        raise BadConfig("NO_TOKEN", f"the variable {self.token_env} is not set", hint="export it, with a bearer token")


def without_password(url: str) -> str:
    """An address as it may be shown."""
    before, mark, rest = url.partition("//")
    return before + mark + rest.rpartition("@")[2]


def _names(urls: Sequence[str]) -> list[str]:
    return ["queries"] if len(urls) == 1 else [f"pod-{number}" for number in range(1, len(urls) + 1)]


def _fault(said: str) -> Fault:
    name, _, command = (part.strip() for part in said.partition("="))
    if not name or not command:
        hint = "such as --fault 'pod=kubectl delete pod -l app=query --wait=false'"
        raise Invalid("BAD_FAULT", f"{said!r} is not NAME=COMMAND", hint=hint)
    return Fault(name, command, partial(run_shell, command, FAULT_TIMEOUT))
