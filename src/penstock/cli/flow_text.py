"""Runs of flows as text for people."""

from datetime import datetime
from typing import Any

from penstock.cli.output import printable, table
from penstock.cli.server_client import moment

_LISTED = 200  # steps of one run that are shown; --json has all
_NOTE = 100


def run_row(one: dict[str, Any]) -> list[str]:
    """A run in a list."""
    reason = _short(one["reason"] or "")
    return [
        one["runId"],
        one["flow"] or "",
        one["status"],
        moment(one["createdAt"]),
        _seconds(one["startedAt"], one["finishedAt"]),
        one["createdBy"],
        reason,
    ]


def run_text(told: dict[str, Any]) -> str:
    """A run with its steps."""
    steps = list(told["steps"].items())
    head = ["step", "kind", "status", "attempts", "seconds", "worker", "note"]
    lines = [summary(told)]
    if steps:
        lines += ["", table([head, *(_step_row(name, step) for name, step in steps[:_LISTED])])]
    if len(steps) > _LISTED:
        lines.append(f"… and {len(steps) - _LISTED:,} more; --json has them all")
    return "\n".join(lines)


def summary(told: dict[str, Any]) -> str:
    """How a run stands, what failed in it, and what to do about that."""
    flow = f"  {told['flow']}" if told["flow"] else ""
    counts = ", ".join(f"{number:,} {status}" for status, number in sorted(told["counts"].items()))
    lines = [f"{told['status']}  {told['runId']}{flow}  {counts}".rstrip()]
    if told["reason"]:
        lines.append(printable(told["reason"]))
    failed = [name for name, step in (told["steps"] or {}).items() if step["status"] == "FAILED"]
    for name in failed[:5]:
        error = told["steps"][name]["error"] or {"code": "", "message": ""}
        lines.append(printable(f"{name}: {error['code']}: {error['message']}"))
    if failed and told["status"] == "FAILED":
        lines.append(f"hint: mend the cause, then `penstock flow retry {told['runId']}`")
    return "\n".join(lines)


def _step_row(name: str, step: dict[str, Any]) -> list[str]:
    seconds = _seconds(step["startedAt"], step["finishedAt"])
    return [name, step["kind"], step["status"], str(step["attempts"]), seconds, step["worker"] or "", _note(step)]


def _note(step: dict[str, Any]) -> str:
    """What is worth knowing of a step in a few words."""
    if step["status"] == "PENDING" and step["dependsOn"]:
        return _short(f"after {', '.join(step['dependsOn'])}")
    if step["error"] and step["status"] != "SUCCEEDED":
        return _short(f"{step['error']['code']}: {step['error']['message']}")
    if step["reason"]:
        return _short(step["reason"])
    return _short(", ".join(one["name"] for one in step["artifacts"]))


def _seconds(started: str | None, finished: str | None) -> str:
    if started is None or finished is None:
        return ""
    return f"{max(0.0, (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()):.1f}"


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _NOTE else f"{shown[: _NOTE - 1]}…"
