"""F8, F14: conditions, and references in inputs: a small safe language over scope and the outputs of steps."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.flows.definition.expression_eval import EvaluationContext, worth
from penstock.flows.definition.expression_syntax import CODE, ParsedExpression, bad, parsed
from penstock.kernel.errors import Invalid

FILLED_LIMIT: Final = 1_000_000  # characters and members that references may put into one document
_DEPTH_LIMIT = 100
_OPENING = re.compile(r"\$\$\{|\$\{")
_INSIDE = re.compile(r"""[^'"{}]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)  # texts may hold a brace
Part = str | ParsedExpression


@dataclass(frozen=True)
class StepCondition:
    """A step's `when`."""

    expression: ParsedExpression

    @property
    def references(self) -> frozenset[str]:
        """The steps it refers to."""
        return self.expression.steps

    @property
    def uses_item(self) -> bool:
        """Whether it makes sense only within a map."""
        return self.expression.uses_item

    def holds(self, context: EvaluationContext) -> bool:
        """Whether the step is to run. What is missing is null, and null is false."""
        return bool(worth(self.expression, context, is_strict=False))


def condition(text: str) -> StepCondition:
    """The condition *text*; Invalid BAD_EXPRESSION when it is none."""
    return StepCondition(parsed(text))


def references(template: Any) -> frozenset[str]:
    """The steps that ${…} in *template* refer to; Invalid BAD_EXPRESSION where one is no expression."""
    return frozenset(step for expression in _expressions(template) for step in expression.steps)


def uses_item(template: Any) -> bool:
    """Whether *template* makes sense only within a map."""
    return any(expression.uses_item for expression in _expressions(template))


def has_references(template: Any) -> bool:
    """Whether `fill` makes anything else of *template*: there is a ${…} in it, or an escaped one."""
    return any("${" in text for text in _texts(template))


def fill(template: Any, context: EvaluationContext) -> Any:
    """*template* with every ${…} replaced: one alone by what it gives, one within a text by its text.

    `$${` stands for `${`. What was put in is not looked at again. Invalid REFERENCE_UNRESOLVED names what is not there.
    """
    return _Filling(context).filled(template, 0)


class _Filling:
    def __init__(self, context: EvaluationContext) -> None:
        self._context, self._left = context, FILLED_LIMIT

    def filled(self, template: Any, depth: int) -> Any:
        if depth > _DEPTH_LIMIT:
            raise Invalid(CODE, f"inputs are nested deeper than {_DEPTH_LIMIT}")
        if isinstance(template, str):
            return self._text(template) if "${" in template else template
        if isinstance(template, Mapping):
            return {name: self.filled(inner, depth + 1) for name, inner in template.items()}
        if isinstance(template, list | tuple):
            return [self.filled(inner, depth + 1) for inner in template]
        return template

    def _text(self, text: str) -> Any:
        parts = list(_parts(text))
        if len(parts) == 1 and isinstance(parts[0], ParsedExpression):
            return self._value(parts[0])
        return "".join(part if isinstance(part, str) else _as_text(part, self._value(part)) for part in parts)

    def _value(self, expression: ParsedExpression) -> Any:
        value = worth(expression, self._context, is_strict=True)
        for one in _values(value):
            self._left -= len(one) + 1 if isinstance(one, str) else 1
            if self._left < 0:
                hint = "hand large data on as artifacts"
                raise bad(expression.text, f"the inputs come to more than {FILLED_LIMIT:,} characters", hint)
        return value


def _expressions(template: Any) -> Iterator[ParsedExpression]:
    for text in _texts(template):
        if "${" in text:
            yield from (part for part in _parts(text) if isinstance(part, ParsedExpression))


def _texts(template: Any) -> Iterator[str]:
    return (value for value in _values(template) if isinstance(value, str))


def _values(value: Any) -> Iterator[Any]:
    """*value* and all within, one after the other: what asks may stop at any."""
    if isinstance(value, str):  # by far the most
        yield value
        return
    waiting = [value]
    while waiting:
        yield (one := waiting.pop())
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)


def _parts(text: str) -> Iterator[Part]:
    """The texts and expressions *text* is made of, in turn."""
    place = 0
    while found := _OPENING.search(text, place):
        if found.group() == "$${":
            yield text[place : found.start()] + "${"
            place = found.end()
            continue
        if found.start() > place:
            yield text[place : found.start()]
        end = _end(text, found.end())
        yield parsed(text[found.end() : end])
        place = end + 1
    if place < len(text) or not text:
        yield text[place:]


def _end(text: str, start: int) -> int:
    """Where the brace is that closes the one before *start*."""
    place = start
    while inside := _INSIDE.match(text, place):
        place = inside.end()
    if place < len(text) and text[place] == "}":
        return place
    said = "there are no maps in expressions" if text[place : place + 1] == "{" else "its ${ is not closed"
    raise bad(text[start - 2 :], said, "`$${` stands for a ${ that is meant as text")


def _as_text(expression: ParsedExpression, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise bad(expression.text, "gives nothing that can be written into a text") from None
