"""Figures and the chart of a known recording."""

from xml.etree import ElementTree as ET

from drills.figures import late_percent, make_timeline, measure_freshness, spread, summarize_figures
from drills.picture import draw
from drills.recorder import Incident, InjectedFault, Outcome, Recorder, Write


def recording() -> Recorder:
    """Return a recording of two writes; the second pod is unavailable during the second write."""
    recorder = Recorder(["pod-1", "pod-2"])
    recorder.writes = [
        Write(1, 0, "a", 1.0, 1.0, 1.02, 1, Outcome.ACKNOWLEDGED, 5),
        Write(2, 0, "b", 2.0, 2.0, 2.02, 1, Outcome.ACKNOWLEDGED, 6),
    ]
    recorder.observations = [[(1.01, 5), (2.03, 6), (3.0, 6)], [(1.04, 5), (1.05, 4), (1.06, 5), (4.02, 6)]]
    recorder.outages = [[], [(1.5, 4.0)]]
    recorder.incidents = [Incident(2.5, "read", "refused"), Incident(2.6, "pod", "refused", is_error=False)]
    recorder.faults = [
        InjectedFault("kill-pod", "pod-2: kill -9", 1.4, 2.4, 2.9, is_judged=True),
        InjectedFault("kill-<b>", "x", 1.6, 2.0, is_judged=True),
    ]
    return recorder


def test_freshness_ends_where_no_lower_version_follows() -> None:
    """R27: a version is visible once no lower version follows; unavailable pods are counted separately."""
    samples = {(sample.pod, sample.version): sample for sample in measure_freshness(recording())}
    assert samples[0, 5].delay == 0.0, "visible before the acknowledgement"
    assert round(samples[0, 6].delay or 0, 3) == 0.01
    assert round(samples[1, 5].delay or 0, 3) == 0.04, "another pod of the load balancer was behind"
    assert (round(samples[1, 6].delay or 0, 3), samples[1, 6].was_unavailable) == (2.0, True)


def test_spread_is_in_milliseconds() -> None:
    """R27: percentiles of seconds are returned in milliseconds."""
    assert spread(n / 1000 for n in range(100)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 99.0}
    assert spread([])["p99"] is None


def test_the_chart_marks_faults() -> None:
    """R27: the SVG contains latency, freshness, errors and every fault at its time."""
    recorder = recording()
    fresh = measure_freshness(recorder)
    drawn = ET.fromstring(draw("a drill", make_timeline(recorder, fresh), recorder.faults))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"latency, ms", "freshness, ms", "errors per second"} <= set(texts)
    assert "kill-pod: recovered after 1.5 s" in texts
    assert "kill-<b>: not recovered" in texts
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "kill-pod at 1.4 s: pod-2: kill -9"


def test_the_summary_counts_only_errors() -> None:
    """R27: failed requests are counted by kind; other incidents are not errors."""
    recorder = recording()
    assert summarize_figures(recorder, measure_freshness(recorder))["errors"] == {"read: refused": 1}


def test_errors_are_per_second() -> None:
    """R27: one error in half a second is two per second, in four seconds a quarter per second."""
    recorder = recording()
    recorder.incidents = [Incident(1.5, "read", "refused")]
    assert max(bucket.errors_per_second for bucket in make_timeline(recorder, [], 0.5)) == 2
    assert max(bucket.errors_per_second for bucket in make_timeline(recorder, [], 4.0)) == 0.25


def test_unsent_requests_count_at_their_due_time() -> None:
    """R27: unsent requests of earlier steps of a ramp do not count for a later step."""
    recorder = recording()
    recorder.unsent = [0.5, 0.6]
    assert late_percent(recorder) == 50.0
    assert late_percent(recorder, since=1.0) == 0.0
