"""The report of a drill: a page with a chart, all results and samples as files, and a summary for the terminal."""

import csv
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from drills import figures, picture
from drills.checker import GuaranteeResult
from drills.faults import describe_outcome
from drills.recorder import InjectedFault, Read, Recorder, Write
from penstock import __version__
from penstock.cli.terminal.output import format_table

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#22272e;background:#fff}
table{border-collapse:collapse;margin:.6em 0 1.6em}td,th{padding:.25em .9em .25em 0;text-align:left;vertical-align:top}
th{font-weight:600;border-bottom:1px solid #c9ced6}td{border-bottom:1px solid #eceef1}.n{text-align:right}
.ok{color:#1d7a44;font-weight:600}.bad{color:#b42323;font-weight:600}svg{max-width:100%;height:auto}
small{color:#5b626b}"""


PASSED, FAILED, STOPPED = "passed", "failed", "stopped"
_EARLY = "The drill was stopped before its end: its results prove nothing."


@dataclass(frozen=True)
class Drill:
    """A drill after its end."""

    kind: str
    started_at: datetime
    description: dict[str, object]
    recorder: Recorder
    results: Sequence[GuaranteeResult]
    steps: Sequence[dict[str, object]] = ()
    was_stopped: bool = False

    @property
    def verdict(self) -> str:
        """Return the verdict; `stopped` proves nothing, even if all guarantees were kept so far."""
        if self.was_stopped:
            return STOPPED
        return PASSED if all(result.is_kept for result in self.results) else FAILED


def summarize(drill: Drill, fresh: Sequence[figures.FreshnessSample]) -> dict[str, Any]:
    """Return all results without the samples."""
    faults = [{**asdict(fault), "seconds": fault.seconds} for fault in drill.recorder.faults]
    return {
        "drill": drill.kind,
        "verdict": drill.verdict,
        "started_at": drill.started_at.isoformat(),
        "stopped_early": drill.was_stopped,
        "about": drill.description,
        "machine": _machine(),
        "guarantees": [asdict(result) for result in drill.results],
        "figures": figures.summarize_figures(drill.recorder, fresh),
        "faults": faults,
        **({"ramp": list(drill.steps)} if drill.steps else {}),
    }


def write_report(drill: Drill, folder: Path) -> dict[str, Any]:
    """Write the report into *folder*, and return the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder, fresh = drill.recorder, figures.measure_freshness(drill.recorder)
    summary = summarize(drill, fresh)
    end = max((read.ended for read in recorder.reads), default=0.0)
    buckets = figures.make_timeline(recorder, fresh, 0.5 if end < 30 else max(1.0, end / 240))
    drawn = picture.draw(_title(drill, summary), buckets, recorder.faults)
    (folder / "picture.svg").write_text(drawn)
    timeline = [asdict(bucket) for bucket in buckets]
    (folder / "report.json").write_text(json.dumps({**summary, "timeline": timeline}, indent=2))
    (folder / "report.html").write_text(_render_html(summary, drawn))
    _write_csv(folder / "reads.csv", Read, (_list_values(read) for read in recorder.reads))
    _write_csv(folder / "writes.csv", Write, (_list_values(write) for write in recorder.writes))
    _write_csv(folder / "freshness.csv", figures.FreshnessSample, (_list_values(sample) for sample in fresh))
    return summary


def render_text(summary: dict[str, Any], folder: Path) -> str:
    """Return the summary for a terminal."""
    results = summary["guarantees"]
    rows = [["ok" if result["is_kept"] else "FAIL", result["guarantee"], result["detail"]] for result in results]
    examples = [f"      {line}" for result in results for line in result["examples"]]
    parts = [
        format_table(_figure_rows(summary)),
        "",
        *_fault_lines(summary),
        *_ramp_lines(summary),
        format_table(rows),
        *examples,
        "",
    ]
    parts += [f"sent late by this client: {summary['figures']['sent_late_percent']} %", _errors(summary)]
    parts += [_EARLY] if summary["stopped_early"] else []
    parts += [f"{summary['drill']} {summary['verdict']}; see {folder / 'report.html'}"]
    return "\n".join(parts)


def _figure_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return rows of latencies and freshness: of the whole drill, then outside faults."""
    rows = [["", "count", "p50 ms", "p95 ms", "p99 ms", "max ms", "failed"]]
    outside = summary["figures"]["outside_faults"]
    for name, whole in (("", summary["figures"]), (", outside faults", outside)):
        for kind in ("reads", "writes", "freshness") if whole else ():
            group = whole[kind]
            percentiles = (_number(group[column]) for column in ("p50", "p95", "p99", "max"))
            rows.append([kind + name, f"{group['count']:,}", *percentiles])
            rows[-1].append(_failed(kind, group))
    return rows


def _failed(kind: str, group: dict[str, Any]) -> str:
    if kind == "reads":
        return f"{group['failed_first']:,}; after one retry {group['failed_after_retry']:,}"
    if kind == "writes":
        return f"{group['unknown']:,}; retried {group['retried']:,}"
    delay = group["max_of_unavailable_pods"]
    return "" if delay is None else f"unavailable pods: max {_number(delay)} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _fault_lines(summary: dict[str, Any]) -> list[str]:
    rows = _fault_rows(summary)
    return [format_table([["fault", "at", "what", "outcome"], *rows]), ""] if rows else []


def _fault_rows(summary: dict[str, Any]) -> list[list[str]]:
    return [
        [fault["name"], f"{fault['started_at']:.1f} s", fault["what"], fault["outcome"]] for fault in _faults(summary)
    ]


def _faults(summary: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for fault in summary["faults"]:
        attributes = {name: value for name, value in fault.items() if name != "seconds"}
        yield {**fault, "outcome": describe_outcome(InjectedFault(**attributes))}


def _ramp_rows(summary: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{step['reads']:,.0f}",
            _number(step["p99"]),
            f"{step['failed_percent']}",
            f"{step['late_percent']}",
            step["sustained"],
        ]
        for step in summary.get("ramp", ())
    ]


_RAMP_HEAD = ["reads/s", "p99 ms", "failed %", "sent late %", "sustained"]


def _ramp_lines(summary: dict[str, Any]) -> list[str]:
    rows = _ramp_rows(summary)
    return [format_table([_RAMP_HEAD, *rows]), ""] if rows else []


def _errors(summary: dict[str, Any]) -> str:
    errors = summary["figures"]["errors"]
    return "errors: " + (", ".join(f"{kind} {count:,}" for kind, count in sorted(errors.items())) or "none")


def _title(drill: Drill, summary: dict[str, Any]) -> str:
    return f"Penstock {drill.kind}, {drill.started_at:%Y-%m-%d %H:%M} UTC: {summary['verdict']}"


def _render_html(summary: dict[str, Any], drawn: str) -> str:
    """Return the report as one HTML page without other files."""
    verdict = f"<p class='{'ok' if summary['verdict'] == PASSED else 'bad'}'>{summary['verdict']}</p>"
    early = f"<p>{_EARLY}</p>" if summary["stopped_early"] else ""
    guarantees = [
        [
            _format_verdict(result["is_kept"]),
            escape(result["guarantee"]),
            escape(result["detail"]) + "".join(map(_format_example, result["examples"])),
        ]
        for result in summary["guarantees"]
    ]
    head, *measured = _figure_rows(summary)
    description = [[name, str(value)] for name, value in {**summary["about"], **summary["machine"]}.items()]
    title = f"Penstock {summary['drill']} drill"
    sections = [
        f"<h1>{title}</h1><p>{summary['started_at']}</p>{verdict}{early}",
        drawn,
        "<h2>Guarantees</h2>" + _table(["", "guarantee", ""], guarantees),
        "<h2>Figures</h2>" + _table(head, _escape_rows(measured)),
        f"<p>{escape(_errors(summary))}. Sent late by this client: {summary['figures']['sent_late_percent']} %.</p>",
        "<h2>Faults</h2>" + _table(["fault", "at", "what", "outcome"], _escape_rows(_fault_rows(summary)))
        if summary["faults"]
        else "",
        "<h2>Ramp</h2>" + _table(_RAMP_HEAD, _escape_rows(_ramp_rows(summary))) if summary.get("ramp") else "",
        "<h2>Environment</h2>" + _table(["", ""], _escape_rows(description)),
        f"<small>{_EXPLAINED}</small>",
    ]
    style = f"<meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{style}</head><body>{''.join(sections)}</body></html>"


_EXPLAINED = (
    "Latency is measured from the due time of a request. Freshness is the time from an acknowledged commit until a pod"
    " returned that version and no lower version later. The system has recovered from a fault when for one second no"
    " request failed, none took too long, and every pod returned what was acknowledged half a second before."
)


def _format_verdict(is_kept: bool) -> str:
    return "<span class='ok'>ok</span>" if is_kept else "<span class='bad'>FAIL</span>"


def _format_example(line: str) -> str:
    return f"<br><small>{escape(line)}</small>"


def _escape_rows(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + f"</tr>{lines}</table>"


def _write_csv(file: Path, kind: type[Any], rows: Iterable[Sequence[object]]) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(field.name for field in fields(kind))
        writer.writerows(rows)


def _list_values(record: Any) -> list[object]:
    values = (getattr(record, field.name) for field in fields(record))
    return [round(value, 6) if isinstance(value, float) else value for value in values]


def _machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "client's system": f"{platform.system()} {platform.machine()}",
        "client's cores": os.cpu_count() or 0,
        "client's memory": f"{memory / 2**30:.0f} GB",
    }


def default_folder() -> Path:
    """Return the path of a new folder, named by the time."""
    return Path(f"penstock-drill-{datetime.now(UTC):%Y%m%d-%H%M%S}")
