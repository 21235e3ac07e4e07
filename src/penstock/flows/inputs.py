"""What the inputs of a step may be: read into a model, with every mistake named."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from penstock.flows.definition.spec import Name, Written
from penstock.kernel.errors import Invalid

BAD_INPUTS = "BAD_INPUTS"
TIMEFRAME = r"^[1-9][0-9]{0,3}[mhdw]\z"
_TOLD = 20  # mistakes named in one answer

M = TypeVar("M", bound=BaseModel)


class CandleFile(Written):
    """Candles of one timeframe, as a step before exported them."""

    step: Name
    name: Name
    timeframe: str = Field(pattern=TIMEFRAME)
    path: str = Field("", max_length=1_000)
    candles: int = 0
    first: str | None = None
    last: str | None = None


def checked(model: type[M], inputs: Mapping[str, Any]) -> M:
    """The *inputs* as *model* has them; Invalid BAD_INPUTS that names what is wrong."""
    try:
        return model.model_validate(dict(inputs))
    except ValidationError as error:
        problems = [f"{_place(told['loc'])}: {told['msg']}" for told in error.errors()]
    raise bad_inputs(*problems)


def bad_inputs(*problems: str) -> Invalid:
    """What is wrong with the inputs of a step, to be raised."""
    more = len(problems) - _TOLD
    said = "; ".join(problems[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
    return Invalid(BAD_INPUTS, said, problems=list(problems[:_TOLD]))


def _place(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, ("inputs", *path)))
