"""What steps of the built-in kinds are given: read when they run, and looked over when their flow is written."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.flows.definition.spec import SpecModel
from penstock.flows.definition.validation import inputs_error, parse_inputs
from penstock.flows.step import CheckInputs, StepFailed
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

M = TypeVar("M", bound=SpecModel)
_CERTAIN = frozenset({"missing", "extra_forbidden"})  # whatever is referred to


def read(model: type[M], inputs: Mapping[str, Any]) -> M:
    """*inputs* with all references filled in, as *model* has them; StepFailed BAD_INPUTS names what is wrong."""
    try:
        return parse_inputs(model, inputs)
    except Invalid as error:
        raise StepFailed(error.code, error.message, retryable=False) from None


def checks(model: type[SpecModel]) -> CheckInputs:
    """How inputs of *model* are looked over before their run: Invalid BAD_INPUTS, unless a reference is in the way."""

    def check(inputs: Mapping[str, Any]) -> None:
        try:
            model.model_validate(dict(inputs))
        except ValidationError as error:
            wrong = [one for one in error.errors() if one["type"] in _CERTAIN or not _has_reference(one["input"])]
            problems = [f"{'.'.join(map(str, ('inputs', *one['loc'])))}: {describe_error(one)}" for one in wrong]
            if problems:
                raise inputs_error(*problems) from None

    return check


def _has_reference(value: Any) -> bool:
    """Whether nobody can know yet what it will be."""
    if isinstance(value, str):
        return "${" in value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(_has_reference, inner))
