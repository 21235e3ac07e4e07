"""Inputs of the built-in step kinds: parsed when a step runs, and checked when its flow is validated."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.flows.definition.spec import SpecModel
from penstock.flows.definition.validation import make_inputs_error, parse_inputs
from penstock.flows.step import CheckInputs, StepFailed
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

M = TypeVar("M", bound=SpecModel)
_CERTAIN = frozenset({"missing", "extra_forbidden"})  # errors that do not depend on the value of a reference


def read_inputs(model: type[M], inputs: Mapping[str, Any]) -> M:
    """Return resolved *inputs* as *model*; StepFailed BAD_INPUTS with all errors."""
    try:
        return parse_inputs(model, inputs)
    except Invalid as error:
        raise StepFailed(error.code, error.message, retryable=False) from None


def make_input_check(model: type[SpecModel]) -> CheckInputs:
    """Return a check of unresolved inputs: it raises Invalid BAD_INPUTS for errors outside of references."""

    def check(inputs: Mapping[str, Any]) -> None:
        try:
            model.model_validate(dict(inputs))
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, ('inputs', *details['loc'])))}: {describe_error(details)}"
                for details in error.errors()
                if details["type"] in _CERTAIN or not _has_reference(details["input"])
            ]
            if problems:
                raise make_inputs_error(*problems) from None

    return check


def _has_reference(value: Any) -> bool:
    """Return whether a value contains a reference that is resolved later."""
    if isinstance(value, str):
        return "${" in value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(_has_reference, inner))
