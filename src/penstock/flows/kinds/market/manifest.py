"""F12: the inputs of CHART_EXPORT, the manifest of its charts, and the check whether there are enough charts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from penstock.flows.contract import ARTIFACT_LIMIT
from penstock.flows.definition.spec import Code, Json, Name, SpecModel
from penstock.flows.definition.validation import make_inputs_error, parse_inputs
from penstock.flows.kinds.market.candles import TIMEFRAME, CandleFile
from penstock.flows.model import StepError
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

MANIFEST = "manifest.json"
MANIFEST_OUTPUT = "outputsManifestGcsUri"  # the name in the founding document, for every object store
MANIFEST_MISSING, MANIFEST_INVALID = "MANIFEST_MISSING", "MANIFEST_INVALID"
TOO_FEW_IMAGES, ARTIFACT_MISSING = "TOO_FEW_IMAGES", "ARTIFACT_MISSING"
REQUEST_LIMIT = ARTIFACT_LIMIT - 1  # the manifest is an artifact, too
MANIFEST_LIMIT = 8_000_000  # bytes
DEFAULT_TEMPLATE = "candles"
_DETAILS_LIMIT = 50  # failures in the details of an error
_REFERENCE = "${"

RequestId = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,89}\z")
]  # the name of the image has a suffix, too


class ChartRequest(SpecModel):
    """A requested chart."""

    id: RequestId
    template: Name = DEFAULT_TEMPLATE
    timeframe: str | None = Field(None, pattern=TIMEFRAME, description="Timeframe of the candles.")
    title: str | None = Field(None, max_length=200)
    theme: Literal["light", "dark"] | None = None
    width: int = Field(1200, ge=320, le=4096)
    height: int = Field(675, ge=240, le=4096)
    last: int | None = Field(None, ge=1, le=1_000_000, description="Number of candles to show, the latest.")
    params: Json = Field(default_factory=dict, description="Parameters that are sent to an image API unchanged.")

    def as_dict(self) -> Json:
        """Return the request as it is stored in the manifest and sent to an image API."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class _ChartInputs(SpecModel):
    requests: list[ChartRequest] | None = Field(None, min_length=1, max_length=REQUEST_LIMIT)
    chart_template_id: Name | None = None
    timeframes: list[Annotated[str, StringConstraints(pattern=TIMEFRAME)]] = Field(
        default_factory=list, max_length=REQUEST_LIMIT
    )
    min_images: int | None = Field(None, ge=0, strict=True)
    files: list[CandleFile] = Field(default_factory=list, max_length=1_000)


@dataclass(frozen=True, slots=True)
class ChartInputs:
    """The parsed inputs of a CHART_EXPORT step."""

    requests: Sequence[ChartRequest]
    min_images: int
    files: Sequence[CandleFile]


def parse_chart_inputs(inputs: Mapping[str, Any]) -> ChartInputs:
    """Return resolved *inputs* of CHART_EXPORT; Invalid BAD_INPUTS with the errors."""
    parsed = parse_inputs(_ChartInputs, inputs)
    if (parsed.requests is None) == (parsed.chart_template_id is None):
        raise make_inputs_error("inputs: either `requests` or `chartTemplateId` is required, but not both")
    requests = parsed.requests or _expand_template(str(parsed.chart_template_id), parsed.timeframes)
    if duplicates := _find_duplicates([request.id for request in requests]):
        raise make_inputs_error(*(f"inputs.requests: the id {name!r} is not unique" for name in duplicates))
    min_images = len(requests) if parsed.min_images is None else parsed.min_images
    if min_images > len(requests):
        raise make_inputs_error(
            f"inputs.minImages: {min_images} is greater than the number of requests, {len(requests)}"
        )
    return ChartInputs(tuple(requests), min_images, tuple(parsed.files))


def check_unresolved_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise Invalid BAD_INPUTS for errors in unresolved *inputs*; references are checked after their resolution."""
    checked = {name: value for name, value in inputs.items() if name == "requests" or not _has_reference(value)}
    requests = inputs.get("requests")
    if isinstance(requests, list):
        checked["requests"] = [_remove_references(n, request) for n, request in enumerate(requests)]
    elif _has_reference(requests):
        checked = {**checked, "requests": [{"id": f"request-{n}"} for n in range(REQUEST_LIMIT)]}
    if _has_reference(inputs.get("chartTemplateId")) or _has_reference(inputs.get("timeframes")):
        checked.pop("minImages", None)
        checked["chartTemplateId"] = DEFAULT_TEMPLATE
    parse_chart_inputs(checked)


def _remove_references(n: int, request: Any) -> Any:
    if not isinstance(request, dict):
        return {"id": f"request-{n}"} if _has_reference(request) else request
    literal = {name: value for name, value in request.items() if not _has_reference(value)}
    return literal if "id" in literal or "id" not in request else {**literal, "id": f"request-{n}"}


def _has_reference(value: Any) -> bool:
    """Return whether *value* contains a reference."""
    if isinstance(value, str):
        return _REFERENCE in value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_reference, inner))


def _expand_template(template: str, timeframes: Sequence[str]) -> list[ChartRequest]:
    """Return one request per timeframe, or a single request without timeframes."""
    if not timeframes:
        return [parse_inputs(ChartRequest, {"id": template, "template": template})]
    return [
        parse_inputs(ChartRequest, {"id": f"{template}-{t}", "template": template, "timeframe": t}) for t in timeframes
    ]


def _find_duplicates(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


class _ManifestPart(BaseModel):
    """A part of the manifest, which other workers may extend with own fields."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)


class RequestedChart(_ManifestPart):
    """A requested chart in the manifest."""

    id: RequestId


class ChartItem(_ManifestPart):
    """A rendered chart: the artifact *name* of the step."""

    id: RequestId
    name: Name
    content_type: str = ""
    size: int = 0
    sha256: str = ""
    path: str = ""


class ChartFailure(_ManifestPart):
    """A chart that was not rendered, and its error."""

    id: RequestId
    code: Code
    message: str = ""
    attempts: int = 1
    retryable: bool = False


class ChartsManifest(_ManifestPart):
    """The ChartsOutputsManifest of the founding document."""

    requested: list[RequestedChart]
    items: list[ChartItem]
    failures: list[ChartFailure]

    def as_bytes(self) -> bytes:
        """Return the content of the artifact."""
        return orjson.dumps(self.model_dump(mode="json", by_alias=True), option=orjson.OPT_INDENT_2)


def make_manifest(
    requests: Sequence[ChartRequest], items: Sequence[ChartItem], failures: Sequence[ChartFailure]
) -> ChartsManifest:
    """Return the manifest of requests and their results, in the order of the requests."""
    order = {request.id: n for n, request in enumerate(requests)}
    return ChartsManifest(
        requested=[RequestedChart.model_validate(request.as_dict()) for request in requests],
        items=sorted(items, key=lambda item: order[item.id]),
        failures=sorted(failures, key=lambda failure: order[failure.id]),
    )


def read_manifest(data: bytes | None) -> ChartsManifest | StepError:
    """Return the parsed manifest, or the error that makes it invalid."""
    if data is None:
        return StepError(MANIFEST_MISSING, f"the step wrote no artifact {MANIFEST}")
    if len(data) > MANIFEST_LIMIT:
        return StepError(MANIFEST_INVALID, f"the manifest has more than {MANIFEST_LIMIT} bytes")
    try:
        manifest = ChartsManifest.model_validate(orjson.loads(data))
    except orjson.JSONDecodeError as error:
        return StepError(MANIFEST_INVALID, f"the manifest is not JSON: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        return StepError(MANIFEST_INVALID, f"the manifest is invalid: {path}: {describe_error(first)}")
    problems = _find_problems(manifest)
    return (
        StepError(MANIFEST_INVALID, f"the manifest is invalid: {problems[0]}", problems[:_DETAILS_LIMIT])
        if problems
        else manifest
    )


def _find_problems(manifest: ChartsManifest) -> list[str]:
    requested, items = [chart.id for chart in manifest.requested], [item.id for item in manifest.items]
    failures, artifacts = [failure.id for failure in manifest.failures], [item.name for item in manifest.items]
    return [
        *(f"{name!r} is in `requested` twice" for name in _find_duplicates(requested)),
        *(f"{name!r} is in `items` twice" for name in _find_duplicates(items)),
        *(f"{name!r} is in `failures` twice" for name in _find_duplicates(failures)),
        *(f"two items have the artifact {name!r}" for name in _find_duplicates(artifacts)),
        *(f"{name!r} is the manifest, not a chart" for name in artifacts if name == MANIFEST),
        *(f"{name!r} is in both `items` and `failures`" for name in sorted({*items} & {*failures})),
        *(f"{name!r} was not requested" for name in sorted({*items, *failures} - {*requested})),
    ]


@dataclass(frozen=True, slots=True)
class CheckedManifest:
    """F12: whether a manifest has enough charts, and whether some are missing."""

    is_enough: bool
    partial: bool


def evaluate_manifest(manifest: ChartsManifest, min_images: int) -> CheckedManifest:
    """Return whether a manifest has at least *min_images* charts, and whether some are missing."""
    received = len(manifest.items)
    return CheckedManifest(received >= min_images, received < len(manifest.requested))


def check_manifest(
    data: bytes | None, inputs: Mapping[str, Any], artifacts: Collection[str]
) -> StepError | Mapping[str, Any]:
    """Check the manifest of a step, whatever its worker reported; return outputs to add, or the error of the step."""
    try:
        parsed = parse_chart_inputs(inputs)
    except Invalid as error:
        return StepError(error.code, error.message)
    manifest = read_manifest(data)
    if isinstance(manifest, StepError):
        return manifest
    if contradiction := _find_contradiction(manifest, parsed, artifacts):
        return contradiction
    result = evaluate_manifest(manifest, parsed.min_images)
    counts = {"requested": len(manifest.requested), "received": len(manifest.items)}
    if result.is_enough:
        return {**counts, "partial": result.partial}
    message = f"{counts['received']} of {counts['requested']} charts were rendered; minImages is {parsed.min_images}"
    failures = [failure.model_dump(mode="json", by_alias=True) for failure in manifest.failures[:_DETAILS_LIMIT]]
    return StepError(TOO_FEW_IMAGES, message, {**counts, "minImages": parsed.min_images, "failures": failures})


def _find_contradiction(manifest: ChartsManifest, inputs: ChartInputs, artifacts: Collection[str]) -> StepError | None:
    """Return the error of a manifest that contradicts the inputs or the artifacts of its step."""
    requested, expected = {chart.id for chart in manifest.requested}, {request.id for request in inputs.requests}
    if requested != expected:
        difference = sorted(requested ^ expected)[:_DETAILS_LIMIT]
        message = "the manifest is invalid: `requested` differs from the inputs of the step"
        return StepError(MANIFEST_INVALID, message, difference)
    missing = [item.name for item in manifest.items if item.name not in artifacts]
    if missing:
        message = f"the manifest names {len(missing)} artifacts that were not written, e.g. {missing[0]}"
        return StepError(ARTIFACT_MISSING, message, {"missing": missing[:_DETAILS_LIMIT]})
    return None
