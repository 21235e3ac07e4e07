"""What the bodies of all APIs are made of, so that they say and refuse the same in the same way."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from penstock.kernel.text import is_storable


def _storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("a NUL, or half a character: that cannot be kept")
    return text


def _whole(value: Any) -> Any:
    """JSON has but one kind of number: 1.0 is the integer 1, and true and "1" are none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:  # within a day of the first or the last moment there is
        raise ValueError("a moment that has none in UTC") from error


Text = Annotated[str, Field(json_schema_extra={"pattern": r"^[^\x00]*$"}), AfterValidator(_storable)]
WHOLE = BeforeValidator(_whole)  # behind the bounds of an int, or the document does not tell them
Fence = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1), WHOLE]
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class Body(BaseModel):
    """A field nobody knows is a mistake, told at once."""

    model_config = ConfigDict(extra="forbid")


class MoveSchema(BaseModel):
    """A move of whatever it is: from where to where, who, when, why, and under which fence."""

    # Not by these names: `from` is a word of Python's own.
    source: str | None = Field(serialization_alias="from", description="Null when it came into being.")
    target: str = Field(serialization_alias="to")
    actor: str
    at: datetime
    reason: str | None
    fence: int | None


class Camel(BaseModel):
    """Written as JavaScript writes names; read from whatever has the attributes."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, from_attributes=True)


class CamelBody(Camel, Body):
    """Both."""
