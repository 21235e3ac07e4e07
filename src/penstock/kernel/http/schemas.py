"""Types that the request and response bodies of all APIs share."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from penstock.kernel.text import is_storable


def _check_storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("must not contain a NUL character or half of a surrogate pair")
    return text


def _convert_whole_number(value: Any) -> Any:
    """Return 1.0 as the integer 1, because JSON has one type of number; true and "1" are not numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _convert_to_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:  # within a day of the first or the last date that datetime supports
        raise ValueError("must be a time from year 1 to 9999 in UTC") from error


Text = Annotated[str, Field(json_schema_extra={"pattern": r"^[^\x00]*$"}), AfterValidator(_check_storable)]
WHOLE = BeforeValidator(_convert_whole_number)  # after the bounds of an int, or the OpenAPI document loses them
Fence = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1), WHOLE]
UtcTime = Annotated[AwareDatetime, AfterValidator(_convert_to_utc)]


class Body(BaseModel):
    """A request body. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class MoveSchema(BaseModel):
    """A state change: from which state to which, by whom, when, why, and under which fence."""

    # `from` is a keyword of Python.
    source: str | None = Field(
        serialization_alias="from", description="The state before; null if the move created the subject."
    )
    target: str = Field(serialization_alias="to", description="The state after.")
    actor: str = Field(description="The process or person that made the change.")
    at: datetime = Field(description="The time of the change.")
    reason: str | None = Field(description="The reason in words, if the actor gave one.")
    fence: int | None = Field(description="The fencing token of the lease under which the change was made, if any.")


class Camel(BaseModel):
    """A body with names in camelCase, which can be read from any object with the attributes."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, from_attributes=True)


class CamelBody(Camel, Body):
    """A request body with names in camelCase. An unknown field is an error."""
