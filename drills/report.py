"""What is left of a drill: a folder with a page, a picture, all figures and all samples, and words for a terminal."""

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
from drills.checker import Finding
from drills.faults import outcome_of
from drills.recorder import Read, Recorder, Struck, Write
from penstock import __version__
from penstock.cli.terminal.output import table

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#22272e;background:#fff}
table{border-collapse:collapse;margin:.6em 0 1.6em}td,th{padding:.25em .9em .25em 0;text-align:left;vertical-align:top}
th{font-weight:600;border-bottom:1px solid #c9ced6}td{border-bottom:1px solid #eceef1}.n{text-align:right}
.ok{color:#1d7a44;font-weight:600}.bad{color:#b42323;font-weight:600}svg{max-width:100%;height:auto}
small{color:#5b626b}"""


PASSED, FAILED, STOPPED = "passed", "failed", "stopped"
_EARLY = "It was stopped before its end: what held until then proves nothing."


@dataclass(frozen=True)
class Drill:
    """A drill that is over."""

    kind: str
    began: datetime
    about: dict[str, object]
    recorder: Recorder
    findings: Sequence[Finding]
    steps: Sequence[dict[str, object]] = ()
    was_stopped: bool = False

    @property
    def verdict(self) -> str:
        """`stopped` proves nothing, whatever held until then."""
        if self.was_stopped:
            return STOPPED
        return PASSED if all(finding.is_held for finding in self.findings) else FAILED


def summarised(drill: Drill, fresh: Sequence[figures.Shown]) -> dict[str, Any]:
    """All there is to tell, without the samples."""
    faults = [{**asdict(fault), "seconds": fault.seconds} for fault in drill.recorder.faults]
    return {
        "drill": drill.kind,
        "verdict": drill.verdict,
        "began": drill.began.isoformat(),
        "stopped_early": drill.was_stopped,
        "about": drill.about,
        "machine": _machine(),
        "promises": [asdict(finding) for finding in drill.findings],
        "figures": figures.summary(drill.recorder, fresh),
        "faults": faults,
        **({"ramp": list(drill.steps)} if drill.steps else {}),
    }


def written(drill: Drill, folder: Path) -> dict[str, Any]:
    """Write it all into *folder*; the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder, fresh = drill.recorder, figures.shown(drill.recorder)
    told = summarised(drill, fresh)
    end = max((read.ended for read in recorder.reads), default=0.0)
    buckets = figures.timeline(recorder, fresh, 0.5 if end < 30 else max(1.0, end / 240))
    drawn = picture.draw(_title(drill, told), buckets, recorder.faults)
    (folder / "picture.svg").write_text(drawn)
    timeline = [asdict(bucket) for bucket in buckets]
    (folder / "report.json").write_text(json.dumps({**told, "timeline": timeline}, indent=2))
    (folder / "report.html").write_text(_page(told, drawn))
    _rows(folder / "reads.csv", Read, (_values(one) for one in recorder.reads))
    _rows(folder / "writes.csv", Write, (_values(write) for write in recorder.writes))
    _rows(folder / "freshness.csv", figures.Shown, (_values(one) for one in fresh))
    return told


def as_text(told: dict[str, Any], folder: Path) -> str:
    """The summary for a terminal."""
    promises = [["ok" if one["is_held"] else "FAIL", one["promise"], one["detail"]] for one in told["promises"]]
    examples = [f"      {line}" for one in told["promises"] for line in one["examples"]]
    parts = [table(_measured(told)), "", *_fault_lines(told), *_ramp_lines(told), table(promises), *examples, ""]
    parts += [f"sent late by this client: {told['figures']['sent_late_percent']} %", _errors(told)]
    parts += [_EARLY] if told["stopped_early"] else []
    parts += [f"{told['drill']} {told['verdict']}; see {folder / 'report.html'}"]
    return "\n".join(parts)


def _measured(told: dict[str, Any]) -> list[list[str]]:
    """Rows of latencies and freshness, first of everything, then without the faults."""
    rows = [["", "count", "p50 ms", "p95 ms", "p99 ms", "max ms", "failed"]]
    calm = told["figures"]["outside_faults"]
    for name, whole in (("", told["figures"]), (", outside faults", calm)):
        for what in ("reads", "writes", "freshness") if whole else ():
            one = whole[what]
            rows.append([what + name, f"{one['count']:,}", *(_number(one[p]) for p in ("p50", "p95", "p99", "max"))])
            rows[-1].append(_failed(what, one))
    return rows


def _failed(what: str, one: dict[str, Any]) -> str:
    if what == "reads":
        return f"{one['failed_first']:,}; after one retry {one['failed_after_retry']:,}"
    if what == "writes":
        return f"{one['unknown']:,}; sent again {one['sent_again']:,}"
    away = one["max_of_pods_that_were_away"]
    return "" if away is None else f"pods that were away: max {_number(away)} ms"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _fault_lines(told: dict[str, Any]) -> list[str]:
    rows = _fault_rows(told)
    return [table([["fault", "at", "what", "outcome"], *rows]), ""] if rows else []


def _fault_rows(told: dict[str, Any]) -> list[list[str]]:
    return [[fault["name"], f"{fault['began']:.1f} s", fault["what"], fault["outcome"]] for fault in _faults(told)]


def _faults(told: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for one in told["faults"]:
        kept = {name: value for name, value in one.items() if name != "seconds"}
        yield {**one, "outcome": outcome_of(Struck(**kept))}


def _ramp_rows(told: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{one['reads']:,.0f}", _number(one["p99"]), f"{one['failed_percent']}", f"{one['late_percent']}", one["held"]]
        for one in told.get("ramp", ())
    ]


_RAMP_HEAD = ["reads/s", "p99 ms", "failed %", "sent late %", "held"]


def _ramp_lines(told: dict[str, Any]) -> list[str]:
    rows = _ramp_rows(told)
    return [table([_RAMP_HEAD, *rows]), ""] if rows else []


def _errors(told: dict[str, Any]) -> str:
    errors = told["figures"]["errors"]
    return "errors: " + (", ".join(f"{kind} {count:,}" for kind, count in sorted(errors.items())) or "none")


def _title(drill: Drill, told: dict[str, Any]) -> str:
    return f"Penstock {drill.kind}, {drill.began:%Y-%m-%d %H:%M} UTC: {told['verdict']}"


def _page(told: dict[str, Any], drawn: str) -> str:
    """The report as one page that needs nothing else."""
    verdict = f"<p class='{'ok' if told['verdict'] == PASSED else 'bad'}'>{told['verdict']}</p>"
    early = f"<p>{_EARLY}</p>" if told["stopped_early"] else ""
    promises = [
        [_mark(one["is_held"]), escape(one["promise"]), escape(one["detail"]) + "".join(map(_small, one["examples"]))]
        for one in told["promises"]
    ]
    head, *measured = _measured(told)
    about = [[name, str(value)] for name, value in {**told["about"], **told["machine"]}.items()]
    title = f"Penstock {told['drill']} drill"
    sections = [
        f"<h1>{title}</h1><p>{told['began']}</p>{verdict}{early}",
        drawn,
        "<h2>Promises</h2>" + _table(["", "promise", ""], promises),
        "<h2>Figures</h2>" + _table(head, _escaped(measured)),
        f"<p>{escape(_errors(told))}. Sent late by this client: {told['figures']['sent_late_percent']} %.</p>",
        "<h2>Faults</h2>" + _table(["fault", "at", "what", "outcome"], _escaped(_fault_rows(told)))
        if told["faults"]
        else "",
        "<h2>Ramp</h2>" + _table(_RAMP_HEAD, _escaped(_ramp_rows(told))) if told.get("ramp") else "",
        "<h2>Under what</h2>" + _table(["", ""], _escaped(about)),
        f"<small>{_EXPLAINED}</small>",
    ]
    style = f"<meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{style}</head><body>{''.join(sections)}</body></html>"


_EXPLAINED = (
    "Latency is counted from when a request was due. Freshness is the time from an acknowledged commit until a pod"
    " showed that version and never again a lower one. A fault is over when for a second no request failed, none hung,"
    " and every pod answered with what had been acknowledged half a second before."
)


def _mark(is_held: bool) -> str:
    return "<span class='ok'>ok</span>" if is_held else "<span class='bad'>FAIL</span>"


def _small(line: str) -> str:
    return f"<br><small>{escape(line)}</small>"


def _escaped(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + f"</tr>{lines}</table>"


def _rows(file: Path, kind: type[Any], rows: Iterable[Sequence[object]]) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(field.name for field in fields(kind))
        writer.writerows(rows)


def _values(one: Any) -> list[object]:
    found = (getattr(one, each.name) for each in fields(one))
    return [round(value, 6) if isinstance(value, float) else value for value in found]


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
    """A new folder here, named by the time."""
    return Path(f"penstock-drill-{datetime.now(UTC):%Y%m%d-%H%M%S}")
