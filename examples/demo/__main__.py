"""`make demo`: one morning through all five parts, judged at its end. `make up`: the same, and it goes on serving.

Exit code 0 if and only if every promise held.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from time import perf_counter

from examples.demo.place import LOG, ROOT, Broken, Place
from examples.demo.story import Story

from penstock.cli.output import table
from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry import configure_logging


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="go on serving on the usual ports, until Ctrl-C")
    parser.add_argument("--folder", type=Path, help="where it happens; emptied first (.build/demo, .build/up)")
    given = parser.parse_args()
    folder = given.folder or ROOT / ".build" / ("up" if given.keep else "demo")
    configure_logging("ERROR", "console")
    began = perf_counter()

    def say(text: str) -> None:
        print(f"{perf_counter() - began:5.1f} s  {text}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended either way
    try:
        with Place.made(folder) as place:
            story = Story(place, say, ports=(8080, 8081, 8090) if given.keep else (0, 0, 0))
            asyncio.run(story.tell())
            print(summary(story, perf_counter() - began), flush=True)
            if given.keep:
                print(invitation(story), flush=True)
                signal.pause()
    except (Broken, PenstockError) as error:
        print(f"the story did not come to its end: {error}; {shown(folder / LOG)} tells more", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if given.keep else 130
    return 0 if all(one.held for one in story.found) else 1


def summary(story: Story, seconds: float) -> str:
    held = sum(one.held for one in story.found)
    rows = [["", "part", "promise", "what happened"]]
    rows += [["ok" if one.held else "FAIL", one.part, one.promise, one.detail] for one in story.found]
    folder = story.place.folder
    files = folder / "data" / "etl_data" / "raw_v1"
    further = [
        ["look at", shown(folder / "charts"), "the charts the flow drew"],
        ["", shown(files), "what became of the suppliers' files, and why"],
        ["", shown(story.place.log), "what all processes logged"],
        ["next", "make up", "the same, and it stays: ask it for status, events and dictionaries"],
        ["", "docs/tutorial.md", "the same by hand, step by step"],
    ]
    return f"\n{held} of {len(story.found)} promises held, in {seconds:.0f} s\n\n{table(rows)}\n\n{table(further)}"


def shown(path: Path) -> str:
    """A place as one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def invitation(story: Story) -> str:
    return "\n".join(
        [
            f"\nserving until Ctrl-C: the API at {story.api} (/docs shows it), reads at {story.query}",
            "  penstock status",
            "  penstock events --follow",
            "  penstock dict get acme TYRES AZ-0001",
            "  penstock flow show morning-1",
            "  penstock harvest run diamonds --wait",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
