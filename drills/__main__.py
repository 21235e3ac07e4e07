"""`python -m drills load` and `python -m drills failover`."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from drills import report, running
from drills.cluster import Setup, chosen, embedded
from drills.faults import Schedule
from drills.given import Given, without_password
from drills.running import Plan, Ramp
from drills.target import Rates, Target
from penstock.cli.main import run_program
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.output import emit, print_message
from penstock.kernel.errors import Invalid
from penstock.kernel.telemetry.telemetry import configure_logging

app = CommandGroup(
    name="drills",
    help="A load test and a failover test, on this machine or on a cluster. Exit code 0: every promise held.",
)
Reads = Annotated[float, typer.Option(min=1, help="Reads a second.")]
Writes = Annotated[float, typer.Option(min=1, help="Writes a second.")]
Pods = Annotated[int, typer.Option(min=1, max=20, help="Query pods of the embedded set-up.")]
Lease = Annotated[float, typer.Option(min=1, help="refdata.apply.lease of the embedded set-up, in seconds.")]
Kafka = Annotated[str | None, typer.Option(help="host:port of a Kafka that is the bus of the embedded set-up.")]
Redis = Annotated[str | None, typer.Option(help="host:port of a Redis for the signals of the embedded set-up.")]
CommandUrl = Annotated[str | None, typer.Option(help="A given cluster's commands, instead of the embedded set-up.")]
QueryUrl = Annotated[list[str] | None, typer.Option(help="A given cluster's pods, or their balancer; may come again.")]
Tenant = Annotated[str | None, typer.Option(help="Of a given cluster.")]
DictCode = Annotated[str | None, typer.Option("--dict", help="Of a given cluster; only keys of the drill are written.")]
TokenEnv = Annotated[str | None, typer.Option(metavar="NAME", help="The variable that holds a bearer token.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the report.", show_default="./penstock-drill-TIME")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")]


_EXIT_CODES = {report.PASSED: 0, report.FAILED: 1, report.STOPPED: 130}
_OF_THE_EMBEDDED = ("pods", "lease", "kafka", "redis")


@dataclass(frozen=True)
class _Place:
    """Where a drill is run: here, unless a cluster is given."""

    setup: Setup
    given: Given | None
    faults: list[str]

    def opened(self, logs: Path) -> AbstractAsyncContextManager[Target]:
        return _given(self.given) if self.given else _embedded(self.setup, self.faults, logs)


@app.command()
def load(
    context: typer.Context,
    reads: Reads = 500,
    writes: Writes = 20,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 30,
    ramp: Annotated[bool, typer.Option("--ramp", help="Raise the reads step by step, as long as it holds.")] = False,
    step: Annotated[float, typer.Option(min=1, help="Seconds of a step of --ramp.")] = 5,
    p99: Annotated[float, typer.Option(min=0.1, help="What p99 of the reads may be under --ramp, in ms.")] = 50,
    pods: Pods = 3,
    lease: Lease = 5,
    kafka: Kafka = None,
    redis: Redis = None,
    command_url: CommandUrl = None,
    query_url: QueryUrl = None,
    tenant: Tenant = None,
    dict_code: DictCode = None,
    token_env: TokenEnv = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Read and write at a constant rate, and report latency and freshness."""
    given = _described(context, command_url, query_url, tenant, dict_code, token_env, [])
    setup = Setup(running.new_run(), pods, lease, kafka, redis)
    plan = Plan(Rates(reads, writes), seconds=seconds, ramp=Ramp(step, p99) if ramp else None)
    _run(_Place(setup, given, []), plan, out, as_json=json)


@app.command()
def failover(
    context: typer.Context,
    reads: Reads = 200,
    writes: Writes = 20,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Which one, may come again: kill-pod, kill-apply, kill-relay, kill-command-api, "
            "restart-postgres, freeze-pod; all of them "
            "otherwise. On a given cluster NAME=COMMAND, for a shell."
        ),
    ] = None,
    settle: Annotated[float, typer.Option(min=0, help="Calm seconds before each fault and after the last.")] = 5,
    recover_within: Annotated[float, typer.Option(min=1, help="Seconds until all must be well after a fault.")] = 60,
    pods: Pods = 3,
    lease: Lease = 5,
    kafka: Kafka = None,
    redis: Redis = None,
    command_url: CommandUrl = None,
    query_url: QueryUrl = None,
    tenant: Tenant = None,
    dict_code: DictCode = None,
    token_env: TokenEnv = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Break one thing after the other under load, and report what was felt and for how long."""
    given = _described(context, command_url, query_url, tenant, dict_code, token_env, fault or [])
    if given and not fault:
        raise Invalid("NO_FAULT", "nothing to break", hint="--fault 'NAME=COMMAND', such as kubectl delete pod")
    setup = Setup(running.new_run(), pods, lease, kafka, redis)
    plan = Plan(Rates(reads, writes), schedule=Schedule(settle, recover_within))
    _run(_Place(setup, given, fault or []), plan, out, as_json=json)


def _described(
    context: typer.Context,
    command_url: str | None,
    query_url: list[str] | None,
    tenant: str | None,
    dict_code: str | None,
    token_env: str | None,
    faults: list[str],
) -> Given | None:
    if command_url is None:
        if query_url or tenant or dict_code or token_env:
            hint = "--command-url, --query-url, --tenant and --dict go together"
            raise Invalid("CLUSTER_INCOMPLETE", "a given cluster needs --command-url", hint=hint)
        return None
    for name in _OF_THE_EMBEDDED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "leave it out: a given cluster is taken as it is"
            raise Invalid("NOT_OURS", f"--{name} is of the embedded set-up", hint=hint)
    return Given(command_url, query_url or [], tenant, dict_code, token_env, faults)


@asynccontextmanager
async def _given(given: Given) -> AsyncIterator[Target]:
    yield given.target()


@asynccontextmanager
async def _embedded(setup: Setup, faults: list[str], logs: Path) -> AsyncIterator[Target]:
    async with embedded(setup, logs) as target:
        yield replace(target, faults=chosen(target.faults, faults))


def _run(place: _Place, plan: Plan, out: Path | None, *, as_json: bool) -> None:
    configure_logging("CRITICAL", "console")
    folder = out or report.default_folder()
    tell: Callable[[str], None] = _silent if as_json else print_message
    tell(
        "starting PostgreSQL and the roles"
        if place.given is None
        else f"reaching {without_password(place.given.command_url)}"
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(running.run(place.opened(folder / "logs"), plan, place.setup.run, folder, tell))
    emit(told, as_json=as_json, text=report.as_text(told, folder))
    sys.exit(_EXIT_CODES[told["verdict"]])


def _silent(_said: str) -> None:
    """Whoever asked for JSON wants nothing else."""


if __name__ == "__main__":
    run_program(app, name="drills")
