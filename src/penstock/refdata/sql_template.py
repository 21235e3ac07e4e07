"""SQL templates: `:name` becomes a bound parameter; all other text is passed to PostgreSQL unchanged."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

TYPES: Mapping[str, str] = {
    "tenantId": "text",
    "key": "text",
    "payload": "jsonb",
    "snapshotJson": "jsonb",
    "eventEpoch": "bigint",
    "eventVersion": "bigint",
    "eventId": "uuid",
    "occurredAt": "timestamptz",
}

# The character classes of PostgreSQL, not of Python: a no-break space is a letter, a carriage return ends a comment.
_SPACE = " \t\n\r\f\v"
_LETTER = r"A-Za-z_\u0080-\U0010ffff"
_WORD = rf"[{_LETTER}][{_LETTER}0-9$]*"
_TAG = rf"\$ (?: [{_LETTER}] [{_LETTER}0-9]* )? \$"
# A string literal can continue after a line break; an E'' string continues with its escapes.
_CONTINUATION = r"[ \t\f\v]* (?: --[^\n\r]* )? [\n\r] (?: [ \t\n\r\f\v] | --[^\n\r]*[\n\r] )*"
# '' and "" need no rule outside of E'': they match as two adjacent literals, which cover the same text. So do
# B'', X'', N'' and U&'': a word and a literal.
_TOKEN = re.compile(
    rf"""
      (?P<space>      [ \t\n\r\f\v]+ | --[^\n\r]* )
    | (?P<comment>    /\* )
    | (?P<quoted>     [eE]' (?: [^'\\] | \\. | '(?:{_CONTINUATION})?' )* ' (?! (?:{_CONTINUATION})? ' )
                    | '[^']*'
                    | "[^"]*"
                    | (?P<tag> {_TAG} ) .*? (?P=tag) )
    | (?P<unclosed>   [eE]?' | " | {_TAG} )
    | (?P<positional> \$[0-9]+ )
    | (?P<parameter>  :{_WORD} )
    | (?P<semicolon>  ; )
    | (?P<other>      {_WORD} | :: | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_BLANK = ("space", "comment")
_QUOTES = {"'": "string", '"': "quoted identifier", "$": "dollar-quoted string"}


@dataclass(frozen=True)
class SqlTemplate:
    """A statement with numbered parameters; `names[n - 1]` is the name of `$n`."""

    sql: str
    names: tuple[str, ...]

    def bind(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of the statement in order; unused values are left out."""
        return tuple(values[name] for name in self.names)


@dataclass(frozen=True)
class _SqlToken:
    kind: str
    text: str
    line: int


def parse(text: str, allowed: Collection[str] = TYPES) -> SqlTemplate:
    """Parse one statement with *allowed* parameters, among them `:tenantId`; ValueError describes the problem."""
    if "\0" in text:
        raise ValueError("the template contains a NUL character")
    tokens = list(_iterate_single_statement(text))
    if all(token.kind in _BLANK for token in tokens):
        raise ValueError("the template is empty: write one SQL statement")
    numbers: dict[str, int] = {}
    sql = "".join(_render(token, numbers, allowed) for token in tokens)
    if "tenantId" not in numbers:
        raise ValueError(
            "the template does not use :tenantId, so it would affect all tenants; :tenantId in a string, a comment"
            " or a quoted identifier is not a parameter"
        )
    return SqlTemplate(sql.strip(_SPACE), tuple(numbers))


def _iterate_single_statement(text: str) -> Iterator[_SqlToken]:
    """Yield the tokens of the only statement. Its semicolon becomes a space, so that its neighbours stay separated."""
    has_ended = False
    for token in _iterate_tokens(text):
        if has_ended and token.kind not in _BLANK:
            raise ValueError(f"line {token.line}: there is text after the semicolon; a template must be one statement")
        if token.kind == "semicolon":
            has_ended = True
            yield _SqlToken("space", " ", token.line)
        else:
            yield token


def _iterate_tokens(text: str) -> Iterator[_SqlToken]:
    position, line = 0, 1
    while match := _TOKEN.match(text, position):
        kind, end = str(match.lastgroup), match.end()
        if kind == "unclosed":
            quote = match.group()
            raise ValueError(f"line {line}: the {_QUOTES[quote[-1]]} that starts here with {quote} is not closed")
        if kind == "comment":
            end = _find_comment_end(text, position, line)
        token = _SqlToken(kind, text[position:end], line)
        yield token
        position = end
        line += token.text.count("\n")


def _find_comment_end(text: str, start: int, line: int) -> int:
    """Return the end of the comment at *start*. Comments nest, which a regular expression cannot match."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(text, start):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    raise ValueError(f"line {line}: the comment that starts here with /* is not closed")


def _render(token: _SqlToken, numbers: dict[str, int], allowed: Collection[str]) -> str:
    """Return the SQL of *token*; a parameter that is not in *numbers* gets the next number."""
    if token.kind == "positional":
        raise ValueError(
            f"line {token.line}: {token.text} is not supported; use a named parameter: {_list_names(allowed)}"
        )
    if token.kind != "parameter":
        return token.text
    name = token.text[1:]
    if name not in allowed:
        raise ValueError(f"line {token.line}: {_describe_unknown(name, allowed)}")
    # The cast sets the type of the value; the parentheses keep it together before any operator.
    return f"(${numbers.setdefault(name, len(numbers) + 1)}::{TYPES[name]})"


def _describe_unknown(name: str, allowed: Collection[str]) -> str:
    if name in TYPES:
        return f":{name} has no value in this statement; use one of {_list_names(allowed)}"
    lowered = {parameter.lower(): parameter for parameter in allowed}
    close = get_close_matches(name.lower(), lowered, n=1)
    guess = f", did you mean :{lowered[close[0]]}?" if close else "."
    return (
        f"there is no parameter :{name}{guess} The parameters are {_list_names(allowed)}."
        " If the colon belongs to SQL, as in a slice a[lo: hi], put a space after it."
    )


def _list_names(allowed: Collection[str]) -> str:
    return ", ".join(f":{name}" for name in TYPES if name in allowed)
