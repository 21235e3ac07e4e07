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

from drills import report, runner
from drills.cluster import Setup, embedded, selected
from drills.existing_cluster import ExistingCluster, remove_password
from drills.faults import Schedule
from drills.runner import Plan, Ramp
from drills.target import Rates, Target
from penstock.cli.main import run_program
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.output import emit, print_message
from penstock.kernel.errors import Invalid
from penstock.kernel.telemetry.telemetry import configure_logging

app = CommandGroup(
    name="drills",
    help="A load test and a failover test, on this machine or on a cluster. Exit code 0: every guarantee was kept.",
)
Reads = Annotated[float, typer.Option(min=1, help="Reads per second.")]
Writes = Annotated[float, typer.Option(min=1, help="Writes per second.")]
Pods = Annotated[int, typer.Option(min=1, max=20, help="Query pods of the embedded setup.")]
Lease = Annotated[float, typer.Option(min=1, help="refdata.apply.lease of the embedded setup, in seconds.")]
Kafka = Annotated[str | None, typer.Option(help="host:port of a Kafka as the bus of the embedded setup.")]
Redis = Annotated[str | None, typer.Option(help="host:port of a Redis for the signals of the embedded setup.")]
CommandUrl = Annotated[str | None, typer.Option(help="Command API of an existing cluster.")]
QueryUrl = Annotated[list[str] | None, typer.Option(help="Pod or load balancer of an existing cluster; repeatable.")]
Tenant = Annotated[str | None, typer.Option(help="Tenant in the existing cluster.")]
DictCode = Annotated[str | None, typer.Option("--dict", help="Dictionary in the existing cluster.")]
TokenEnv = Annotated[str | None, typer.Option(metavar="NAME", help="Environment variable with a bearer token.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the report.", show_default="./penstock-drill-TIME")]
Json = Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")]


_EXIT_CODES = {report.PASSED: 0, report.FAILED: 1, report.STOPPED: 130}
_EMBEDDED_OPTIONS = ("pods", "lease", "kafka", "redis")


@dataclass(frozen=True)
class _DrillTarget:
    """The target of a drill: the embedded setup, or an existing cluster."""

    setup: Setup
    cluster: ExistingCluster | None
    faults: list[str]

    def open_inspector(self, logs: Path) -> AbstractAsyncContextManager[Target]:
        return _open_existing(self.cluster) if self.cluster else _embedded(self.setup, self.faults, logs)


@app.command()
def load(
    context: typer.Context,
    reads: Reads = 500,
    writes: Writes = 20,
    seconds: Annotated[float, typer.Option(min=1, help="Duration in seconds.")] = 30,
    ramp: Annotated[bool, typer.Option("--ramp", help="Raise the read rate until a limit is exceeded.")] = False,
    step: Annotated[float, typer.Option(min=1, help="Duration of a step of --ramp in seconds.")] = 5,
    p99: Annotated[float, typer.Option(min=0.1, help="Limit of the p99 of reads with --ramp, in ms.")] = 50,
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
    cluster = _parse_cluster(context, command_url, query_url, tenant, dict_code, token_env, [])
    setup = Setup(runner.new_run(), pods, lease, kafka, redis)
    plan = Plan(Rates(reads, writes), seconds=seconds, ramp=Ramp(step, p99) if ramp else None)
    _run(_DrillTarget(setup, cluster, []), plan, out, as_json=json)


@app.command()
def failover(
    context: typer.Context,
    reads: Reads = 200,
    writes: Writes = 20,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault to inject, repeatable: kill-pod, kill-apply, kill-relay, kill-command-api, "
            "restart-postgres, freeze-pod. Default: all of "
            "them. On an existing cluster NAME=COMMAND, for a shell."
        ),
    ] = None,
    settle: Annotated[float, typer.Option(min=0, help="Seconds before each fault and after the last.")] = 5,
    recover_within: Annotated[float, typer.Option(min=1, help="Time limit of a recovery in seconds.")] = 60,
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
    """Inject faults under load, one after the other, and report their effect and the time of recovery."""
    cluster = _parse_cluster(context, command_url, query_url, tenant, dict_code, token_env, fault or [])
    if cluster and not fault:
        raise Invalid("NO_FAULT", "no fault is given", hint="give --fault 'NAME=COMMAND'")
    setup = Setup(runner.new_run(), pods, lease, kafka, redis)
    plan = Plan(Rates(reads, writes), schedule=Schedule(settle, recover_within))
    _run(_DrillTarget(setup, cluster, fault or []), plan, out, as_json=json)


def _parse_cluster(
    context: typer.Context,
    command_url: str | None,
    query_url: list[str] | None,
    tenant: str | None,
    dict_code: str | None,
    token_env: str | None,
    faults: list[str],
) -> ExistingCluster | None:
    if command_url is None:
        if query_url or tenant or dict_code or token_env:
            hint = "give --command-url, --query-url, --tenant and --dict"
            raise Invalid("CLUSTER_INCOMPLETE", "an existing cluster needs --command-url", hint=hint)
        return None
    for name in _EMBEDDED_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = f"remove --{name}"
            raise Invalid("EMBEDDED_OPTION", f"--{name} applies only to the embedded setup", hint=hint)
    return ExistingCluster(command_url, query_url or [], tenant, dict_code, token_env, faults)


@asynccontextmanager
async def _open_existing(cluster: ExistingCluster) -> AsyncIterator[Target]:
    yield cluster.target()


@asynccontextmanager
async def _embedded(setup: Setup, faults: list[str], logs: Path) -> AsyncIterator[Target]:
    async with embedded(setup, logs) as target:
        yield replace(target, faults=selected(target.faults, faults))


def _run(drill: _DrillTarget, plan: Plan, out: Path | None, *, as_json: bool) -> None:
    configure_logging("CRITICAL", "console")
    folder = out or report.default_folder()
    print_status: Callable[[str], None] = _silent if as_json else print_message
    print_status(
        "starting PostgreSQL and the roles"
        if drill.cluster is None
        else f"connecting to {remove_password(drill.cluster.command_url)}"
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as event_loop:
        summary = event_loop.run(
            runner.run(drill.open_inspector(folder / "logs"), plan, drill.setup.run, folder, print_status)
        )
    emit(summary, as_json=as_json, text=report.render_text(summary, folder))
    sys.exit(_EXIT_CODES[summary["verdict"]])


def _silent(_said: str) -> None:
    """Print nothing, because --json prints only the summary."""


if __name__ == "__main__":
    run_program(app, name="drills")
