"""Figures and the picture, from a recording that is known."""

from xml.etree import ElementTree as ET

from drills.figures import late_percent, shown, spread, summary, timeline
from drills.picture import draw
from drills.recorder import Outcome, Recorder, Struck, Trouble, Write


def recording() -> Recorder:
    """Two writes; one pod shows them soon, the other is away for the second one."""
    recorder = Recorder(["pod-1", "pod-2"])
    recorder.writes = [
        Write(1, 0, "a", 1.0, 1.0, 1.02, 1, Outcome.ACKNOWLEDGED, 5),
        Write(2, 0, "b", 2.0, 2.0, 2.02, 1, Outcome.ACKNOWLEDGED, 6),
    ]
    recorder.sights = [[(1.01, 5), (2.03, 6), (3.0, 6)], [(1.04, 5), (1.05, 4), (1.06, 5), (4.02, 6)]]
    recorder.away = [[], [(1.5, 4.0)]]
    recorder.troubles = [Trouble(2.5, "read", "refused"), Trouble(2.6, "pod", "refused", is_error=False)]
    recorder.faults = [
        Struck("kill-pod", "pod-2: kill -9", 1.4, 2.4, 2.9, is_judged=True),
        Struck("kill-<b>", "x", 1.6, 2.0, is_judged=True),
    ]
    return recorder


def test_freshness_ends_where_no_lower_version_follows() -> None:
    """R27: a version counts as shown when it is not taken back, and a pod that was away is told apart."""
    found = {(one.pod, one.version): one for one in shown(recording())}
    assert found[0, 5].delay == 0.0, "seen before the acknowledgement came"
    assert round(found[0, 6].delay or 0, 3) == 0.01
    assert round(found[1, 5].delay or 0, 3) == 0.04, "a balancer's other pod was behind"
    assert (round(found[1, 6].delay or 0, 3), found[1, 6].was_away) == (2.0, True)


def test_spread_is_in_milliseconds() -> None:
    """R27: p99 of a hundred values is the last but one or the last."""
    assert spread(n / 1000 for n in range(100)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 99.0}
    assert spread([])["p99"] is None


def test_the_picture_marks_what_was_broken_and_when() -> None:
    """R27: latency, freshness and errors over time, with every fault at its moment, as SVG that can be read."""
    recorder = recording()
    fresh = shown(recorder)
    drawn = ET.fromstring(draw("a drill", timeline(recorder, fresh), recorder.faults))
    said = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"latency, ms", "freshness, ms", "errors per second"} <= set(said)
    assert "kill-pod: well after 1.5 s" in said
    assert "kill-<b>: not well again" in said
    titles = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "kill-pod at 1.4 s: pod-2: kill -9"


def test_the_summary_counts_errors_but_not_every_trouble() -> None:
    """R27: what failed is told by kind."""
    recorder = recording()
    assert summary(recorder, shown(recorder))["errors"] == {"read: refused": 1}


def test_errors_are_told_per_second_however_wide_a_stretch_is() -> None:
    """R27: one error in half a second is two a second, in four seconds a quarter."""
    recorder = recording()
    recorder.troubles = [Trouble(1.5, "read", "refused")]
    assert max(one.errors_per_second for one in timeline(recorder, [], 0.5)) == 2
    assert max(one.errors_per_second for one in timeline(recorder, [], 4.0)) == 0.25


def test_what_was_not_sent_counts_where_it_was_due() -> None:
    """R27: a step of a ramp is not blamed for the ones before."""
    recorder = recording()
    recorder.unsent = [0.5, 0.6]
    assert late_percent(recorder) == 50.0
    assert late_percent(recorder, since=1.0) == 0.0
