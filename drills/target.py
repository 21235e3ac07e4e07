"""What a drill is run against, and how hard."""

from dataclasses import dataclass, field

from drills.faults import Fault


@dataclass(frozen=True)
class Rates:
    """What is asked of it: requests a second, and the share of reads that name the last acknowledged version."""

    reads: float
    writes: float
    barrier: float = 0.25
    keys: int = 1_000


@dataclass(frozen=True)
class Target:
    """Where to write and read; one query address may be the balancer before many pods."""

    command_url: str
    query_urls: dict[str, str]
    tenant: str
    dict_code: str
    token: str | None = None
    faults: list[Fault] = field(default_factory=list)
    about: dict[str, object] = field(default_factory=dict)
    is_ours: bool = True

    @property
    def items_path(self) -> str:
        return f"/v1/tenants/{self.tenant}/dictionaries/{self.dict_code}"

    @property
    def updates_path(self) -> str:
        return f"/v1/tenants/{self.tenant}/updates?consistencyMode=WAIT_COMMIT&timeoutMs=1000"
