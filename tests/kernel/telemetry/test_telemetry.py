"""Telemetry: logs without secrets, and metrics and traces per object."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import __version__
from penstock.kernel.tasks.outcome import Done, Failed
from penstock.kernel.telemetry.telemetry import Telemetry, redact

URL = "postgresql://penstock:hunter2@db:5432/penstock"
HIDDEN_URL = "postgresql://penstock:***@db:5432/penstock"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("password", "hunter2", "***"),
        ("DB_PASSWORD", "hunter2", "***"),
        ("api_key", "hunter2", "***"),
        ("apikey", "hunter2", "***"),
        ("Authorization", "Bearer hunter2", "***"),
        ("pin_secret", 1234, "***"),
        ("credentials", {"user": "u", "pass": "hunter2"}, "***"),
        ("tokens", ["hunter2"], "***"),
        ("password", None, None),
        ("headers", {"authorization": "hunter2", "accept": "*/*"}, {"authorization": "***", "accept": "*/*"}),
        ("a", {"b": [{"secret": "hunter2", "n": 1}]}, {"b": [{"secret": "***", "n": 1}]}),
        ("url", URL, HIDDEN_URL),
        ("event", f"cannot connect to {URL}, giving up", f"cannot connect to {HIDDEN_URL}, giving up"),
        ("urls", [URL, ("x", URL)], [HIDDEN_URL, ["x", HIDDEN_URL]]),
        ("url", "redis://:hunter2@r:6379", "redis://:***@r:6379"),
        ("url", "postgresql://u:hun@ter2@h/d", "postgresql://u:***@h/d"),
        ("url", "https://h/x?a=1&api_key=hunter2&b=2", "https://h/x?a=1&api_key=***&b=2"),
        ("error", ValueError(URL), f"ValueError('{HIDDEN_URL}')"),
        ("raw", URL.encode(), f"b'{HIDDEN_URL}'"),
        ("odd", {(1, 2): "x", 5: "y"}, {"(1, 2)": "x", "5": "y"}),
        ("url", "http://h:8080/path", "http://h:8080/path"),
        ("count", 5, 5),
        ("ratio", 0.5, 0.5),
        ("is_final", True, True),
        ("user", "u@example.org", "u@example.org"),
    ],
)
def test_secrets_are_hidden_by_name_and_in_urls(name: str, value: Any, shown: Any) -> None:
    """R26: values with the name of a secret are not logged, at any depth, nor are passwords in URLs."""
    assert redact(None, "info", {name: value}) == {name: shown}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_event_can_be_written_as_json(event: dict[str, Any]) -> None:
    """R26: redaction accepts any value, and returns a value for JSON."""
    json.dumps(redact(None, "info", {f"x{name}": value for name, value in event.items()}))


PROGRAM = f"""
import logging, sys
import structlog
from penstock.kernel.telemetry.telemetry import Telemetry, configure_logging

configure_logging("info", sys.argv[1])
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request_id="r-1"):
    log.info("hello", tenant="acme", password="hunter2", url="{URL}", n=1)
log.debug("not shown")
logging.getLogger("library").warning("stdlib says %s", "{URL}")
logging.getLogger("library").debug("not shown")
try:
    raise ValueError("{URL}")
except ValueError as error:
    log.exception("crashed", error=error)
    logging.getLogger("library").exception("library crashed")
with Telemetry().tracer.start_as_current_span("work"):
    log.info("traced")
"""


def run_program(format_: str) -> str:
    """Return the standard error of a separate program, because logging is configured per process."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, format_]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    return done.stderr


def test_logs_are_json_lines_on_standard_error() -> None:
    """R26: logs of Penstock and of libraries are one line each, with event, level, time, context and trace."""
    text = run_program("auto")
    hello, stdlib, crashed, library, traced = lines = [json.loads(line) for line in text.splitlines()]
    stamp = hello.pop("timestamp")
    assert hello == {
        "event": "hello",
        "level": "info",
        "request_id": "r-1",
        "tenant": "acme",
        "password": "***",
        "url": HIDDEN_URL,
        "n": 1,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", stamp)
    assert (stdlib["event"], stdlib["level"]) == (f"stdlib says {HIDDEN_URL}", "warning")
    assert all(line["level"] == "error" and "Traceback" in line["exception"] for line in (crashed, library))
    assert re.fullmatch(r"[0-9a-f]{32}", traced["trace_id"])
    assert [line["event"] for line in lines[2:4]] == ["crashed", "library crashed"]
    assert "hunter2" not in text


def test_logs_for_people_hide_secrets_too() -> None:
    """R26: the console format shows the same, including tracebacks, without secrets."""
    text = run_program("console")
    assert all(word in text for word in ("hello", "tenant=acme", "stdlib says", "Traceback", "library crashed"))
    assert "not shown" not in text
    assert "hunter2" not in text


def test_work_is_counted_and_timed() -> None:
    """R26: outcomes by queue and kind, and the duration of batches, are metrics."""
    telemetry = Telemetry()
    telemetry.work.count("shards", [Done(), Done(), Failed("x"), None], lost=2)
    with pytest.raises(ZeroDivisionError), telemetry.work.time_batch("shards"):
        _ = 1 / 0
    text = telemetry.format_metrics().decode()
    for outcome, number in {"done": 2, "failed": 1, "released": 1, "superseded": 2}.items():
        assert f'penstock_work_items_total{{outcome="{outcome}",queue="shards"}} {number}.0' in text
    assert 'penstock_work_batch_seconds_count{queue="shards"} 1.0' in text


def test_two_telemetry_objects_share_nothing() -> None:
    """Two services in one process have separate metrics."""
    first, second = Telemetry(), Telemetry()
    first.work.count("q", [Done()], lost=0)
    assert 'outcome="done"' in first.format_metrics().decode()
    assert 'outcome="done"' not in second.format_metrics().decode()
    assert first.provider is not second.provider


def test_spans_reach_their_exporter() -> None:
    """R26: a span is exported with the name and the version of the service."""
    memory, other = InMemorySpanExporter(), InMemorySpanExporter()
    telemetry = Telemetry("refdata", spans=[SimpleSpanProcessor(memory)])
    Telemetry(spans=[SimpleSpanProcessor(other)])
    with telemetry.tracer.start_as_current_span("swap"):
        pass
    telemetry.close()
    (span,) = memory.get_finished_spans()
    assert span.name == "swap"
    assert span.resource.attributes["service.name"] == "refdata"
    assert span.resource.attributes["service.version"] == __version__
    assert other.get_finished_spans() == ()
