"""An existing cluster: its addresses, and the commands that inject faults into it."""

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
class ExistingCluster:
    """The options of the command line that describe the cluster."""

    command_url: str
    query_urls: Sequence[str]
    tenant: str | None
    dict_code: str | None
    token_env: str | None
    faults: Sequence[str]

    def target(self) -> Target:
        """Return the target of the drill; Invalid if an option is missing or malformed."""
        if not self.query_urls or not self.tenant or not self.dict_code:
            hint = "give --command-url, --query-url, --tenant and --dict"
            raise Invalid("CLUSTER_INCOMPLETE", "the existing cluster is not described completely", hint=hint)
        for url in (self.command_url, *self.query_urls):
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise Invalid(
                    "BAD_URL",
                    f"{remove_password(url)!r} is not a valid address",
                    hint="write http://host:port or https://host",
                )
            if "@" in urlsplit(url).netloc:
                hint = "remove it, and name the variable of a bearer token with --token-env"
                raise Invalid("PASSWORD_IN_URL", f"{remove_password(url)!r} contains a password", hint=hint)
        names = _name_pods(self.query_urls)
        description = {
            "set-up": "existing cluster",
            "commands": self.command_url,
            "queries": ", ".join(self.query_urls),
        }
        return Target(
            self.command_url,
            dict(zip(names, self.query_urls, strict=True)),
            self.tenant,
            self.dict_code,
            token=self._token(),
            faults=[_parse_fault(fault) for fault in self.faults],
            description={**description, "tenant": self.tenant, "dictionary": self.dict_code},
            is_ours=False,
        )

    def _token(self) -> str | None:
        if self.token_env is None:
            return None
        if token := os.environ.get(self.token_env):
            return token
        raise BadConfig("NO_TOKEN", f"the variable {self.token_env} is not set", hint="export it with a bearer token")


def remove_password(url: str) -> str:
    """Return *url* without its user and password."""
    before, mark, rest = url.partition("//")
    return before + mark + rest.rpartition("@")[2]


def _name_pods(urls: Sequence[str]) -> list[str]:
    return ["queries"] if len(urls) == 1 else [f"pod-{number}" for number in range(1, len(urls) + 1)]


def _parse_fault(message: str) -> Fault:
    name, _, command = (part.strip() for part in message.partition("="))
    if not name or not command:
        hint = "for example --fault 'pod=kubectl delete pod -l app=query --wait=false'"
        raise Invalid("BAD_FAULT", f"{message!r} is not NAME=COMMAND", hint=hint)
    return Fault(name, command, partial(run_shell, command, FAULT_TIMEOUT))
