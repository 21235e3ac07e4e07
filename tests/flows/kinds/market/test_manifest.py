"""F12: the inputs of CHART_EXPORT, the manifest, and its check."""

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


def make_document(items: str = "abc", failures: str = "", requested: str = "abc") -> dict[str, list[Any]]:
    return {
        "requested": [{"id": name} for name in requested],
        "items": [{"id": name, "name": f"{name}.svg"} for name in items],
        "failures": [{"id": name, "code": "IMAGE_TIMEOUT", "message": "late"} for name in failures],
    }


def check(document: object, inputs: dict[str, Any] | None = None, names: list[str] | None = None) -> Any:
    data = document if isinstance(document, bytes) else orjson.dumps(document)
    return check_manifest(data, inputs or INPUTS, NAMES if names is None else names)


def refuse(inputs: dict[str, Any]) -> str:
    with pytest.raises(Invalid) as caught:
        parse_chart_inputs(inputs)
    assert (caught.value.code, caught.value.status) == ("BAD_INPUTS", 422)
    return caught.value.message


def test_min_images_is_all_by_default() -> None:
    """F12: without `minImages` all requested charts are required; 0 is a valid number."""
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
def test_invalid_inputs_are_named(inputs: dict[str, Any], named: str) -> None:
    """F12: more images than requests, duplicate ids, and other errors are 422 with the path of the input."""
    assert named in refuse(inputs)
    with pytest.raises(Invalid):
        check_unresolved_inputs(inputs)


def test_template_is_expanded_to_requests() -> None:
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
def test_references_are_checked_later(inputs: dict[str, Any]) -> None:
    """F12: a reference is not an error when the run is created."""
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
def test_values_beside_references_are_checked_at_once(inputs: dict[str, Any]) -> None:
    """F12: an error that does not depend on a reference is reported when the run is created."""
    with pytest.raises(Invalid):
        check_unresolved_inputs(inputs)


@pytest.mark.parametrize(
    ("items", "failures", "partial"), [("abc", "", False), ("ab", "c", True), ("ac", "b", True), ("ab", "", True)]
)
def test_enough_charts_are_a_success(items: str, failures: str, partial: bool) -> None:
    """F12: with `minImages` or more the step succeeds; `partial` is true if charts are missing."""
    received = {"requested": 3, "received": len(items), "partial": partial}
    assert check(make_document(items, failures)) == received


def test_too_few_charts_are_a_failure() -> None:
    """F12: with fewer than `minImages` the step fails, and the error has the failures."""
    error = check(make_document("b", "ac"))
    assert (error.code, error.message) == ("TOO_FEW_IMAGES", "1 of 3 charts were rendered; minImages is 2")
    assert [each["id"] for each in error.details["failures"]] == ["a", "c"]
    assert error.details["failures"][0]["code"] == "IMAGE_TIMEOUT"
    assert (error.details["requested"], error.details["received"], error.details["minImages"]) == (3, 1, 2)


def test_missing_manifest_is_a_failure() -> None:
    """F12: the report of a worker without a manifest is not sufficient."""
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
        {**make_document(), "items": {}},
        {**make_document(), "items": [{"id": "a"}]},
        {**make_document(), "items": [{"id": "a", "name": "../a.svg"}]},
        {**make_document(), "items": [{"id": "a", "name": "manifest.json"}, {"id": "b", "name": "b.svg"}]},
        {**make_document(), "items": [{"id": "a", "name": "a.svg"}, {"id": "b", "name": "a.svg"}]},
        {**make_document("ab"), "failures": [{"id": "c", "code": "too long"}]},
        make_document("aab"),
        make_document("ab", "cc"),
        make_document("abc", "c"),
        make_document("abd"),
        make_document("ab", "d"),
        make_document(requested="ab", items="ab"),
        make_document(requested="abcd"),
        make_document(requested="aabc"),
    ],
)
def test_inconsistent_manifest_is_invalid(document: object) -> None:
    """F12: other data, duplicate charts, or charts that were not requested are MANIFEST_INVALID."""
    error = check(document)
    assert isinstance(error, StepError)
    assert error.code == "MANIFEST_INVALID"


def test_items_must_be_artifacts() -> None:
    """F12: an item must be an artifact of the step."""
    error = check(make_document("abc"), names=["a.svg", "b.svg", "manifest.json"])
    assert (error.code, error.details) == ("ARTIFACT_MISSING", {"missing": ["c.svg"]})


def test_details_of_many_failures_are_limited() -> None:
    """F12: the details of the error stay small for any number of failures."""
    requests = [ChartRequest(id=f"r{n}") for n in range(REQUEST_LIMIT)]
    failures = [ChartFailure(id=each.id, code="IMAGE_ERROR", message="x" * 500) for each in requests]
    data = make_manifest(requests, [], failures).as_bytes()
    error = check_manifest(data, {"requests": [{"id": each.id} for each in requests]}, ["manifest.json"])
    assert isinstance(error, StepError)
    assert error.details["received"] == 0
    assert len(orjson.dumps(error.as_dict())) < 100_000


def test_unknown_fields_are_accepted() -> None:
    """F12: other workers may add fields to the manifest."""
    more = {**make_document(), "producer": "theirs", "items": [{"id": n, "name": f"{n}.svg", "dpi": 96} for n in "abc"]}
    assert check(more)["received"] == 3


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=2_000))
@given(st.data())
def test_manifest_round_trip(data: st.DataObject) -> None:
    """F12: requested, items and failures are read in order, and `evaluate_manifest` counts them."""
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
