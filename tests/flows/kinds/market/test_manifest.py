"""F12: what CHART_EXPORT asks for, the manifest, and what it comes to."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.kinds.market.manifest import (
    MANIFEST_LIMIT,
    REQUEST_LIMIT,
    ChartFailure,
    ChartItem,
    ChartRequest,
    ChartsManifest,
    check_manifest,
    check_unresolved_inputs,
    evaluate_manifest,
    make_manifest,
    parse_chart_inputs,
    read_manifest,
)
from penstock.flows.model import StepError
from penstock.kernel.errors import Invalid
from tests.support.soak import examples

ABC = [{"id": "a"}, {"id": "b"}, {"id": "c"}]
INPUTS = {"requests": ABC, "minImages": 2}
NAMES = ["a.svg", "b.svg", "c.svg", "manifest.json"]


def manifest(items: str = "abc", failures: str = "", requested: str = "abc") -> dict[str, list[Any]]:
    return {
        "requested": [{"id": name} for name in requested],
        "items": [{"id": name, "name": f"{name}.svg"} for name in items],
        "failures": [{"id": name, "code": "IMAGE_TIMEOUT", "message": "late"} for name in failures],
    }


def found(document: object, inputs: dict[str, Any] | None = None, names: list[str] | None = None) -> Any:
    data = document if isinstance(document, bytes) else orjson.dumps(document)
    return check_manifest(data, inputs or INPUTS, NAMES if names is None else names)


def refused(inputs: dict[str, Any]) -> str:
    with pytest.raises(Invalid) as caught:
        parse_chart_inputs(inputs)
    assert (caught.value.code, caught.value.status) == ("BAD_INPUTS", 422)
    return caught.value.message


def test_all_are_needed_unless_it_is_said() -> None:
    """F12: `minImages` is how many were requested, where it is not given; 0 is a number like any other."""
    assert parse_chart_inputs({"requests": ABC}).min_images == 3
    assert parse_chart_inputs(INPUTS).min_images == 2
    assert parse_chart_inputs({"requests": ABC, "minImages": 0}).min_images == 0


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"requests": ABC, "minImages": 4}, "4 is greater than the number of requests, 3"),
        ({"requests": ABC, "minImages": -1}, "inputs.minImages"),
        ({"requests": ABC, "minImages": "2"}, "inputs.minImages"),
        ({"requests": ABC, "minImages": True}, "inputs.minImages"),
        ({"requests": [*ABC, {"id": "b"}]}, "'b' is not unique"),
        ({"requests": []}, "inputs.requests"),
        ({"requests": [{"id": f"r{n}"} for n in range(REQUEST_LIMIT + 1)]}, "inputs.requests"),
        ({"requests": [{"id": "../up"}]}, "inputs.requests.0.id"),
        ({"requests": [{"id": "a", "width": 10}]}, "inputs.requests.0.width"),
        ({"requests": [{"id": "a", "colour": "red"}]}, "inputs.requests.0.colour"),
        ({"requests": [{"id": "a", "timeframe": "soon"}]}, "inputs.requests.0.timeframe"),
        ({"requests": "all"}, "inputs.requests"),
        ({}, "either `requests` or `chartTemplateId`"),
        ({"requests": ABC, "chartTemplateId": "candles"}, "either `requests` or `chartTemplateId`"),
        ({"chartTemplateId": "candles", "timeframes": ["1h", "1h"]}, "'candles-1h' is not unique"),
    ],
)
def test_inputs_that_make_no_sense_are_named(inputs: dict[str, Any], named: str) -> None:
    """F12: more pictures than requested, ids that come twice, and whatever else is wrong: 422, naming it."""
    assert named in refused(inputs)
    with pytest.raises(Invalid):
        check_unresolved_inputs(inputs)


def test_a_template_stands_for_requests() -> None:
    """F12: `chartTemplateId` is one request, or one for each timeframe."""
    assert [each.id for each in parse_chart_inputs({"chartTemplateId": "candles"}).requests] == ["candles"]
    several = parse_chart_inputs({"chartTemplateId": "candles", "timeframes": ["1h", "1d"]}).requests
    assert [(each.id, each.timeframe) for each in several] == [("candles-1h", "1h"), ("candles-1d", "1d")]


@pytest.mark.parametrize(
    "inputs",
    [
        {"requests": "${steps.before.outputs.requests}", "minImages": 5},
        {"requests": [{"id": "${scope.symbol}", "theme": "${scope.theme}"}, {"id": "b"}], "minImages": 2},
        {"requests": ["${scope.first}", {"id": "b"}], "minImages": "${scope.least}"},
        {"requests": ABC, "files": "${steps.ohlcv.outputs.files}"},
        {"chartTemplateId": "${scope.template}", "timeframes": "${scope.timeframes}", "minImages": 3},
    ],
)
def test_what_is_referred_to_is_judged_later(inputs: dict[str, Any]) -> None:
    """F12: a reference is no mistake when the run is made."""
    check_unresolved_inputs(inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        {"requests": [{"id": "${scope.symbol}"}, {"id": "b"}], "minImages": 3},
        {"requests": [{"id": "a", "theme": "${scope.theme}", "width": -1}]},
        {"requests": [{"id": "a", "title": "${scope.title}"}, {"id": "a"}]},
        {"requests": "${scope.requests}", "minImages": REQUEST_LIMIT + 1},
        {"requests": "${scope.requests}", "minimages": 1},
    ],
)
def test_what_stands_beside_a_reference_is_judged_at_once(inputs: dict[str, Any]) -> None:
    """F12: a mistake that no reference can mend is told when the run is made."""
    with pytest.raises(Invalid):
        check_unresolved_inputs(inputs)


@pytest.mark.parametrize(
    ("items", "failures", "partial"), [("abc", "", False), ("ab", "c", True), ("ac", "b", True), ("ab", "", True)]
)
def test_enough_pictures_are_a_success(items: str, failures: str, partial: bool) -> None:
    """F12: with `minImages` or more the step has succeeded; `partial` tells that some are missing."""
    received = {"requested": 3, "received": len(items), "partial": partial}
    assert found(manifest(items, failures)) == received


def test_too_few_pictures_are_a_failure() -> None:
    """F12: with fewer the step has failed, and its error names what failed."""
    error = found(manifest("b", "ac"))
    assert (error.code, error.message) == ("TOO_FEW_IMAGES", "1 of 3 charts were rendered; minImages is 2")
    assert [each["id"] for each in error.details["failures"]] == ["a", "c"]
    assert error.details["failures"][0]["code"] == "IMAGE_TIMEOUT"
    assert (error.details["requested"], error.details["received"], error.details["minImages"]) == (3, 1, 2)


def test_no_manifest_is_a_failure() -> None:
    """F12: a worker's word is not enough."""
    error = check_manifest(None, INPUTS, NAMES)
    assert isinstance(error, StepError)
    assert error.code == "MANIFEST_MISSING"


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b" " * (MANIFEST_LIMIT + 1),
        [],
        None,
        {},
        {"requested": [], "items": []},
        {**manifest(), "items": {}},
        {**manifest(), "items": [{"id": "a"}]},
        {**manifest(), "items": [{"id": "a", "name": "../a.svg"}]},
        {**manifest(), "items": [{"id": "a", "name": "manifest.json"}, {"id": "b", "name": "b.svg"}]},
        {**manifest(), "items": [{"id": "a", "name": "a.svg"}, {"id": "b", "name": "a.svg"}]},
        {**manifest("ab"), "failures": [{"id": "c", "code": "too long"}]},
        manifest("aab"),
        manifest("ab", "cc"),
        manifest("abc", "c"),
        manifest("abd"),
        manifest("ab", "d"),
        manifest(requested="ab", items="ab"),
        manifest(requested="abcd"),
        manifest(requested="aabc"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_not_believed(document: object) -> None:
    """F12: what is no manifest, counts a picture twice, or is not of what was requested, is MANIFEST_INVALID."""
    error = found(document)
    assert isinstance(error, StepError)
    assert error.code == "MANIFEST_INVALID"


def test_a_picture_that_is_not_there_does_not_count() -> None:
    """F12: an item must be an artifact of the step."""
    error = found(manifest("abc"), names=["a.svg", "b.svg", "manifest.json"])
    assert (error.code, error.details) == ("ARTIFACT_MISSING", {"missing": ["c.svg"]})


def test_a_manifest_of_hundreds_of_failures_fits_an_error() -> None:
    """F12: what is told of failures stays small, however many there are."""
    requests = [ChartRequest(id=f"r{n}") for n in range(REQUEST_LIMIT)]
    failures = [ChartFailure(id=each.id, code="IMAGE_ERROR", message="x" * 500) for each in requests]
    data = make_manifest(requests, [], failures).as_bytes()
    error = check_manifest(data, {"requests": [{"id": each.id} for each in requests]}, ["manifest.json"])
    assert isinstance(error, StepError)
    assert error.details["received"] == 0
    assert len(orjson.dumps(error.as_dict())) < 100_000


def test_other_workers_may_tell_more() -> None:
    """F12: fields we do not know are no contradiction."""
    more = {**manifest(), "producer": "theirs", "items": [{"id": n, "name": f"{n}.svg", "dpi": 96} for n in "abc"]}
    assert found(more)["received"] == 3


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=2_000))
@given(st.data())
def test_a_manifest_is_read_as_it_was_written(data: st.DataObject) -> None:
    """F12: requested, items and failures come back in order, and `evaluate_manifest` counts them."""
    ids = data.draw(
        st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True), unique=True, min_size=1)
    )
    came = data.draw(st.sets(st.sampled_from(ids)))
    requests = [ChartRequest(id=name) for name in ids]
    items = [ChartItem(id=name, name=f"{name}.png") for name in sorted(came)]
    failures = [ChartFailure(id=name, code="IMAGE_ERROR") for name in sorted({*ids} - came)]
    read = read_manifest(make_manifest(requests, items, failures).as_bytes())
    assert isinstance(read, ChartsManifest)
    assert [each.id for each in read.requested] == ids
    assert [each.id for each in read.items] == [name for name in ids if name in came]
    least = data.draw(st.integers(0, len(ids)))
    assert evaluate_manifest(read, least).is_enough is (len(came) >= least)
    assert evaluate_manifest(read, least).partial is (len(came) < len(ids))
