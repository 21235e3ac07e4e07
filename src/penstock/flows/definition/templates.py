"""F8, F14: conditions, and templates with ${…} references to the scope and to the outputs of steps."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.flows.definition.expression_eval import EvaluationContext, evaluate
from penstock.flows.definition.expression_syntax import CODE, ParsedExpression, make_expression_error, parse_expression
from penstock.kernel.errors import Invalid

FILLED_LIMIT: Final = 1_000_000  # characters and items that references may insert into one document
_DEPTH_LIMIT = 100
_OPENING = re.compile(r"\$\$\{|\$\{")
_INSIDE = re.compile(r"""[^'"{}]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)  # quoted texts may contain a brace
Part = str | ParsedExpression


@dataclass(frozen=True)
class StepCondition:
    """The condition `when` of a step."""

    expression: ParsedExpression

    @property
    def references(self) -> frozenset[str]:
        """Return the steps that the condition refers to."""
        return self.expression.steps

    @property
    def uses_item(self) -> bool:
        """Return whether the condition is valid only within a map."""
        return self.expression.uses_item

    def holds(self, context: EvaluationContext) -> bool:
        """Return whether the step runs. Missing values are null, and null is false."""
        return bool(evaluate(self.expression, context, is_strict=False))


def parse_condition(text: str) -> StepCondition:
    """Parse the condition *text*; raise Invalid BAD_EXPRESSION if it is not valid."""
    return StepCondition(parse_expression(text))


def find_references(template: Any) -> frozenset[str]:
    """Return the steps that *template* refers to; raise Invalid BAD_EXPRESSION for an invalid expression."""
    return frozenset(step for expression in _iterate_expressions(template) for step in expression.steps)


def uses_item(template: Any) -> bool:
    """Return whether *template* is valid only within a map."""
    return any(expression.uses_item for expression in _iterate_expressions(template))


def has_references(template: Any) -> bool:
    """Return whether *template* contains a ${…} or an escaped $${, so that `fill_template` changes it."""
    return any("${" in text for text in _iterate_texts(template))


def fill_template(template: Any, context: EvaluationContext) -> Any:
    """Return *template* with every ${…} replaced: alone, by its value; within a text, by the text of its value.

    `$${` is a literal `${`. Inserted values are not filled again. A missing value raises Invalid
    REFERENCE_UNRESOLVED.
    """
    return _TemplateFiller(context).fill(template, 0)


class _TemplateFiller:
    def __init__(self, context: EvaluationContext) -> None:
        self._context, self._left = context, FILLED_LIMIT

    def fill(self, template: Any, depth: int) -> Any:
        if depth > _DEPTH_LIMIT:
            raise Invalid(CODE, f"inputs are nested deeper than {_DEPTH_LIMIT} levels")
        if isinstance(template, str):
            return self._fill_text(template) if "${" in template else template
        if isinstance(template, Mapping):
            return {name: self.fill(inner, depth + 1) for name, inner in template.items()}
        if isinstance(template, list | tuple):
            return [self.fill(inner, depth + 1) for inner in template]
        return template

    def _fill_text(self, text: str) -> Any:
        parts = list(_split(text))
        if len(parts) == 1 and isinstance(parts[0], ParsedExpression):
            return self._evaluate(parts[0])
        return "".join(part if isinstance(part, str) else _format_value(part, self._evaluate(part)) for part in parts)

    def _evaluate(self, expression: ParsedExpression) -> Any:
        value = evaluate(expression, self._context, is_strict=True)
        for inner in _iterate_values(value):
            self._left -= len(inner) + 1 if isinstance(inner, str) else 1
            if self._left < 0:
                hint = "pass large data between steps as artifacts"
                raise make_expression_error(
                    expression.text, f"the filled inputs have more than {FILLED_LIMIT:,} characters", hint
                )
        return value


def _iterate_expressions(template: Any) -> Iterator[ParsedExpression]:
    for text in _iterate_texts(template):
        if "${" in text:
            yield from (part for part in _split(text) if isinstance(part, ParsedExpression))


def _iterate_texts(template: Any) -> Iterator[str]:
    return (value for value in _iterate_values(template) if isinstance(value, str))


def _iterate_values(value: Any) -> Iterator[Any]:
    """Yield *value* and all values within it; the caller may stop early."""
    if isinstance(value, str):  # the most frequent case
        yield value
        return
    pending = [value]
    while pending:
        yield (inner := pending.pop())
        if isinstance(inner, Mapping):
            pending.extend(inner.values())
        elif isinstance(inner, list | tuple):
            pending.extend(inner)


def _split(text: str) -> Iterator[Part]:
    """Yield the texts and expressions of *text*, in order."""
    position = 0
    while match := _OPENING.search(text, position):
        if match.group() == "$${":
            yield text[position : match.start()] + "${"
            position = match.end()
            continue
        if match.start() > position:
            yield text[position : match.start()]
        end = _find_end(text, match.end())
        yield parse_expression(text[match.end() : end])
        position = end + 1
    if position < len(text) or not text:
        yield text[position:]


def _find_end(text: str, start: int) -> int:
    """Return the position of the brace that closes the `${` before *start*."""
    position = start
    while inside := _INSIDE.match(text, position):
        position = inside.end()
    if position < len(text) and text[position] == "}":
        return position
    problem = "maps: not supported" if text[position : position + 1] == "{" else "`${` is not closed"
    raise make_expression_error(text[start - 2 :], problem, "write `$${` for a literal ${")


def _format_value(expression: ParsedExpression, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise make_expression_error(expression.text, "its value cannot be written into a text") from None
