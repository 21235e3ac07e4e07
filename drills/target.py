"""The target of a drill, and the rates of its load."""

from dataclasses import dataclass, field

from drills.faults import Fault


@dataclass(frozen=True)
class Rates:
    """Requests per second, and the share of reads that require the last acknowledged version."""

    reads: float
    writes: float
    barrier: float = 0.25
    keys: int = 1_000


@dataclass(frozen=True)
class Target:
    """The addresses to write to and read from; a query address can be a load balancer."""

    command_url: str
    query_urls: dict[str, str]
    tenant: str
    dict_code: str
    token: str | None = None
    faults: list[Fault] = field(default_factory=list)
    description: dict[str, object] = field(default_factory=dict)
    is_ours: bool = True

    @property
    def items_path(self) -> str:
        return f"/v1/tenants/{self.tenant}/dictionaries/{self.dict_code}"

    @property
    def updates_path(self) -> str:
        return f"/v1/tenants/{self.tenant}/updates?consistencyMode=WAIT_COMMIT&timeoutMs=1000"
