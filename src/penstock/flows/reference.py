"""F15: references in Python: `fetch.outputs.rows` is written as ${steps.fetch.outputs.rows}."""

import json
from collections.abc import Iterator
from keyword import iskeyword


class Reference:
    """Something known only once a run is under way; its text is what YAML would have."""

    __slots__ = ("_expression",)

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __getattr__(self, name: str) -> "Reference":
        if name.startswith("_"):  # Python asks for such names on its own account
            raise AttributeError(f"write [{name!r}] for what begins with an underscore")
        return self[name]

    def __getitem__(self, key: str | int) -> "Reference":
        if isinstance(key, str) and key.isascii() and key.isidentifier() and not iskeyword(key) and key[:2] != "__":
            return Reference(f"{self._expression}.{key}")
        return Reference(f"{self._expression}[{json.dumps(key, ensure_ascii=False)}]")

    def __iter__(self) -> Iterator["Reference"]:
        raise TypeError("what a reference gives is not known yet: use a map to go through it")

    def __str__(self) -> str:
        return f"${{{self._expression}}}"

    def __repr__(self) -> str:
        return f"<{self}>"


def of_step(step_id: str) -> Reference:
    """What there is to know of a step: `outputs` and `status`."""
    return Reference("steps")[step_id]
