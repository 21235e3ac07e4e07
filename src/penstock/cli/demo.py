"""`penstock demo`: run all five parts on sample data, and check each guarantee."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.options import JsonOption
from penstock.cli.terminal.output import emit, format_table, print_message

if TYPE_CHECKING:
    from penstock.demo.scenario import DemoScenario

PORTS = (8080, 8081, 8090)  # of the API, of the query server, of the source
_CHECKOUT = Path(__file__).parents[3]  # the checkout; of an installed package, some other folder


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Use ports 8080, 8081 and 8090, and continue serving until Ctrl-C.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the demo: a new folder, or one of an earlier demo.")
    ] = Path("penstock-demo"),
    files: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the sample files into this new folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run all five parts on sample data, and check every guarantee.

    The demo takes about 20 seconds, needs neither a server nor a network, and kills some of its own processes. The
    folder of an earlier demo is emptied first. The exit code is 0 if every guarantee held, 1 if one did not or the
    demo failed, 6 if the folder is in use or not a folder of a demo. With --json, progress goes to standard error.
    """
    if files is None:
        sys.exit(_run(keep=keep, folder=folder, as_json=json))
    from penstock.demo.samples import write_samples

    written = [str(file) for file in write_samples(files)]
    emit({"files": written}, as_json=json, text="\n".join(written))


def _run(*, keep: bool, folder: Path, as_json: bool) -> int:
    import asyncio
    import signal
    from contextlib import suppress
    from time import perf_counter

    from penstock.demo.scenario import DemoScenario
    from penstock.demo.workspace import DemoFailed, DemoWorkspace
    from penstock.kernel.errors import PenstockError
    from penstock.kernel.telemetry.telemetry import configure_logging

    configure_logging("ERROR", "console")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the workspace ends the processes of the demo
    started = perf_counter()

    def report(line: str) -> None:
        text = f"{perf_counter() - started:5.1f} s  {line}"
        print_message(text) if as_json else emit(None, as_json=False, text=text)

    with DemoWorkspace.create(folder) as workspace:
        scenario = DemoScenario(workspace, report, ports=PORTS if keep else (0, 0, 0))
        try:
            asyncio.run(scenario.run())
        except (DemoFailed, PenstockError) as error:
            hint = f"{shorten_path(workspace.log)} contains the log of all processes"
            raise PenstockError("DEMO_FAILED", f"the demo did not finish: {error}", hint=hint) from error
        seconds = perf_counter() - started
        emit(make_verdict(scenario, seconds), as_json=as_json, text=format_summary(scenario, seconds, keep=keep))
        if keep:
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0 if scenario.has_passed else 1


def make_verdict(scenario: "DemoScenario", seconds: float) -> dict[str, Any]:
    """Return the result of the demo as data."""
    from dataclasses import asdict

    return {
        "passed": scenario.has_passed,
        "seconds": round(seconds, 1),
        "promises": [asdict(promise) for promise in scenario.promises],
        "folder": str(scenario.workspace.folder),
        "log": str(scenario.workspace.log),
        "api": scenario.api,
        "query": scenario.query,
    }


def format_summary(scenario: "DemoScenario", seconds: float, *, keep: bool) -> str:
    """Return the result of the demo as text, with its files and the next commands."""
    held = sum(promise.passed for promise in scenario.promises)
    rows = [["", "part", "guarantee", "result"]]
    rows += [
        ["ok" if promise.passed else "FAIL", promise.part, promise.promise, promise.detail]
        for promise in scenario.promises
    ]
    folder = scenario.workspace.folder
    further = [
        ["files", shorten_path(folder / "charts"), "charts that the flow created"],
        ["", shorten_path(folder / "data" / "etl_data" / "raw_v1"), "published and rejected supplier files"],
        ["", shorten_path(scenario.workspace.log), "log of all processes"],
    ]
    text = f"\n{held} of {len(scenario.promises)} guarantees held, in {seconds:.0f} s\n\n{format_table(rows)}\n\n"
    if keep:
        return f"{text}{format_table(further)}\n\n{_format_invitation(scenario)}"
    return f"{text}{format_table([*further, *_list_next_steps()])}"


def shorten_path(path: Path) -> str:
    """Return *path* relative to the current folder if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _list_next_steps() -> list[list[str]]:
    about = "run the demo and keep serving; try status, events and dict"
    if Path.cwd() == _CHECKOUT:
        steps = [["make up", about], ["docs/tutorial.md", "the same steps one by one"]]
    else:
        activation = [[command, "put penstock on PATH"] for command in _list_activation()]
        files = "write the sample files of the tutorial"
        steps = [*activation, ["penstock demo --keep", about], ["penstock demo --files samples", files]]
    return [["" if number else "next", *step] for number, step in enumerate(steps)]


def _format_invitation(scenario: "DemoScenario") -> str:
    commands = [
        *_list_activation(),
        "penstock status",
        "penstock events --follow",
        "penstock dict get acme TYRES AZ-0001",
        "penstock flow show morning-1",
        "penstock harvest run diamonds --wait",
    ]
    serving = f"serving until Ctrl-C: API at {scenario.api} (documentation at /docs), query server at {scenario.query}"
    return "\n".join([serving, "commands for another terminal:", *(f"  {command}" for command in commands)])


def _list_activation() -> list[str]:
    """Return the command that puts `penstock` on PATH; empty if it is there, or if there is no such command."""
    folder = Path(sys.prefix) / "bin"
    if shutil.which("penstock") == str(folder / "penstock") or not (folder / "activate").exists():
        return []
    return [f"source {shorten_path(folder / 'activate')}"]
