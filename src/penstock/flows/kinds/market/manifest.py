"""F12: what CHART_EXPORT asks for, the manifest of what came of it, and whether that is enough."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from penstock.flows.contract import ARTIFACT_LIMIT
from penstock.flows.definition.spec import Code, Json, Name, SpecModel
from penstock.flows.definition.validation import inputs_error, parse_inputs
from penstock.flows.kinds.market.candles import TIMEFRAME, CandleFile
from penstock.flows.model import StepError
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

MANIFEST = "manifest.json"
MANIFEST_OUTPUT = "outputsManifestGcsUri"  # the document's name for it, whichever store is used
MANIFEST_MISSING, MANIFEST_INVALID = "MANIFEST_MISSING", "MANIFEST_INVALID"
TOO_FEW_IMAGES, ARTIFACT_MISSING = "TOO_FEW_IMAGES", "ARTIFACT_MISSING"
REQUEST_LIMIT = ARTIFACT_LIMIT - 1  # the manifest is an artifact too
MANIFEST_LIMIT = 8_000_000  # bytes
DEFAULT_TEMPLATE = "candles"
_TOLD = 50  # failures in an error's details
_REFERENCE = "${"

RequestId = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,89}\z")
]  # its picture adds a suffix


class ChartRequest(SpecModel):
    """One picture that is asked for."""

    id: RequestId
    template: Name = DEFAULT_TEMPLATE
    timeframe: str | None = Field(None, pattern=TIMEFRAME, description="Of the candles; the first there are, if none.")
    title: str | None = Field(None, max_length=200)
    theme: Literal["light", "dark"] | None = None
    width: int = Field(1200, ge=320, le=4096)
    height: int = Field(675, ge=240, le=4096)
    last: int | None = Field(None, ge=1, le=1_000_000, description="Only so many candles, the latest.")
    params: Json = Field(default_factory=dict, description="For an image API: sent as it is.")

    def as_dict(self) -> Json:
        """As it is kept in the manifest and sent to an image API."""
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
    """What a step of the kind CHART_EXPORT is to do."""

    requests: Sequence[ChartRequest]
    min_images: int
    files: Sequence[CandleFile]


def chart_inputs(inputs: Mapping[str, Any]) -> ChartInputs:
    """The *inputs* with all references filled in; Invalid BAD_INPUTS that names what is wrong."""
    read = parse_inputs(_ChartInputs, inputs)
    if (read.requests is None) == (read.chart_template_id is None):
        raise inputs_error("inputs: give either `requests` or `chartTemplateId`")
    requests = read.requests or _of_template(str(read.chart_template_id), read.timeframes)
    if twice := _twice([request.id for request in requests]):
        raise inputs_error(*(f"inputs.requests: the id {name!r} comes twice" for name in twice))
    least = len(requests) if read.min_images is None else read.min_images
    if least > len(requests):
        raise inputs_error(f"inputs.minImages: {least} is more than the {len(requests)} requested")
    return ChartInputs(tuple(requests), least, tuple(read.files))


def check_written(inputs: Mapping[str, Any]) -> None:
    """Invalid BAD_INPUTS when *inputs* as written cannot be right; what is referred to is judged when it is known."""
    known = {name: value for name, value in inputs.items() if name == "requests" or not _refers(value)}
    requests = inputs.get("requests")
    if isinstance(requests, list):
        known["requests"] = [_without_references(n, request) for n, request in enumerate(requests)]
    elif _refers(requests):
        known = {**known, "requests": [{"id": f"request-{n}"} for n in range(REQUEST_LIMIT)]}
    if _refers(inputs.get("chartTemplateId")) or _refers(inputs.get("timeframes")):
        known.pop("minImages", None)
        known["chartTemplateId"] = DEFAULT_TEMPLATE
    chart_inputs(known)


def _without_references(n: int, request: Any) -> Any:
    if not isinstance(request, dict):
        return {"id": f"request-{n}"} if _refers(request) else request
    known = {name: value for name, value in request.items() if not _refers(value)}
    return known if "id" in known or "id" not in request else {**known, "id": f"request-{n}"}


def _refers(value: Any) -> bool:
    """Whether a reference is somewhere in *value*."""
    if isinstance(value, str):
        return _REFERENCE in value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_refers, inner))


def _of_template(template: str, timeframes: Sequence[str]) -> list[ChartRequest]:
    """One picture per timeframe, or the one there is."""
    if not timeframes:
        return [parse_inputs(ChartRequest, {"id": template, "template": template})]
    return [
        parse_inputs(ChartRequest, {"id": f"{template}-{t}", "template": template, "timeframe": t}) for t in timeframes
    ]


def _twice(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


class _ManifestPart(BaseModel):
    """A part of the manifest: other workers may add to it."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)


class RequestedChart(_ManifestPart):
    """What was asked for."""

    id: RequestId


class ChartItem(_ManifestPart):
    """A picture that came: the artifact *name* of the step."""

    id: RequestId
    name: Name
    content_type: str = ""
    size: int = 0
    sha256: str = ""
    path: str = ""


class ChartFailure(_ManifestPart):
    """A picture that did not come, and why."""

    id: RequestId
    code: Code
    message: str = ""
    attempts: int = 1
    retryable: bool = False


class ChartsManifest(_ManifestPart):
    """The ChartsOutputsManifest."""

    requested: list[RequestedChart]
    items: list[ChartItem]
    failures: list[ChartFailure]

    def as_bytes(self) -> bytes:
        """As it is written."""
        return orjson.dumps(self.model_dump(mode="json", by_alias=True), option=orjson.OPT_INDENT_2)


def manifest_of(
    requests: Sequence[ChartRequest], items: Sequence[ChartItem], failures: Sequence[ChartFailure]
) -> ChartsManifest:
    """The manifest of what was asked for and what came of it, in the order it was asked for."""
    place = {request.id: n for n, request in enumerate(requests)}
    return ChartsManifest(
        requested=[RequestedChart.model_validate(request.as_dict()) for request in requests],
        items=sorted(items, key=lambda item: place[item.id]),
        failures=sorted(failures, key=lambda failure: place[failure.id]),
    )


def read_manifest(data: bytes | None) -> ChartsManifest | StepError:
    """The manifest as it was written; or why it cannot be believed."""
    if data is None:
        return StepError(MANIFEST_MISSING, "the step wrote no manifest")
    if len(data) > MANIFEST_LIMIT:
        return StepError(MANIFEST_INVALID, f"the manifest is over {MANIFEST_LIMIT} bytes")
    try:
        manifest = ChartsManifest.model_validate(orjson.loads(data))
    except orjson.JSONDecodeError as error:
        return StepError(MANIFEST_INVALID, f"the manifest is no JSON: {error}")
    except ValidationError as error:
        told = error.errors()[0]
        return StepError(MANIFEST_INVALID, f"the manifest: {'.'.join(map(str, told['loc']))}: {describe_error(told)}")
    problems = _contradictions(manifest)
    return StepError(MANIFEST_INVALID, f"the manifest: {problems[0]}", problems[:_TOLD]) if problems else manifest


def _contradictions(manifest: ChartsManifest) -> list[str]:
    requested, items = [each.id for each in manifest.requested], [each.id for each in manifest.items]
    failures, names = [each.id for each in manifest.failures], [each.name for each in manifest.items]
    return [
        *(f"{each!r} is requested twice" for each in _twice(requested)),
        *(f"{each!r} is among items twice" for each in _twice(items)),
        *(f"{each!r} is among failures twice" for each in _twice(failures)),
        *(f"two items are the artifact {each!r}" for each in _twice(names)),
        *(f"{each!r} is no picture" for each in names if each == MANIFEST),
        *(f"{each!r} is an item and a failure" for each in sorted({*items} & {*failures})),
        *(f"{each!r} was not requested" for each in sorted({*items, *failures} - {*requested})),
    ]


@dataclass(frozen=True, slots=True)
class CheckedManifest:
    """F12: whether the pictures are enough, and whether some are missing."""

    is_enough: bool
    partial: bool


def judged(manifest: ChartsManifest, min_images: int) -> CheckedManifest:
    """What a manifest comes to."""
    received = len(manifest.items)
    return CheckedManifest(received >= min_images, received < len(manifest.requested))


def verdict(data: bytes | None, inputs: Mapping[str, Any], artifacts: Collection[str]) -> StepError | Mapping[str, Any]:
    """What the manifest of a step comes to, whatever its worker said: outputs to add, or the error it ends with."""
    try:
        asked = chart_inputs(inputs)
    except Invalid as error:
        return StepError(error.code, error.message)
    manifest = read_manifest(data)
    if isinstance(manifest, StepError):
        return manifest
    if untrue := _untrue(manifest, asked, artifacts):
        return untrue
    found = judged(manifest, asked.min_images)
    counts = {"requested": len(manifest.requested), "received": len(manifest.items)}
    if found.is_enough:
        return {**counts, "partial": found.partial}
    said = f"{counts['received']} of {counts['requested']} pictures came, {asked.min_images} are needed"
    failures = [failure.model_dump(mode="json", by_alias=True) for failure in manifest.failures[:_TOLD]]
    return StepError(TOO_FEW_IMAGES, said, {**counts, "minImages": asked.min_images, "failures": failures})


def _untrue(manifest: ChartsManifest, asked: ChartInputs, artifacts: Collection[str]) -> StepError | None:
    """What the manifest says that is not so."""
    requested, wanted = {each.id for each in manifest.requested}, {request.id for request in asked.requests}
    if requested != wanted:
        odd = sorted(requested ^ wanted)[:_TOLD]
        return StepError(MANIFEST_INVALID, "the manifest: `requested` is not what the inputs ask for", odd)
    missing = [item.name for item in manifest.items if item.name not in artifacts]
    if missing:
        said = f"the manifest names {len(missing)} artifacts that were not written, e.g. {missing[0]}"
        return StepError(ARTIFACT_MISSING, said, {"missing": missing[:_TOLD]})
    return None
