"""SQL templates: `:name` becomes a bound parameter, and everything else reaches PostgreSQL as it was written."""

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

# PostgreSQL's own classes, not Python's: to it a no-break space is a letter, and a carriage return ends a comment.
_SPACE = " \t\n\r\f\v"
_LETTER = r"A-Za-z_\u0080-\U0010ffff"
_WORD = rf"[{_LETTER}][{_LETTER}0-9$]*"
_TAG = rf"\$ (?: [{_LETTER}] [{_LETTER}0-9]* )? \$"
# A string goes on after a line break, and an E'' string goes on with its backslashes.
_GOES_ON = r"[ \t\f\v]* (?: --[^\n\r]* )? [\n\r] (?: [ \t\n\r\f\v] | --[^\n\r]*[\n\r] )*"
# '' and "" need no care outside of E'': they read as two quotes side by side, which cover the same text. So do
# B'', X'', N'' and U&'': a word and a string.
_TOKEN = re.compile(
    rf"""
      (?P<space>      [ \t\n\r\f\v]+ | --[^\n\r]* )
    | (?P<comment>    /\* )
    | (?P<quoted>     [eE]' (?: [^'\\] | \\. | '(?:{_GOES_ON})?' )* ' (?! (?:{_GOES_ON})? ' )
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
    """One statement as PostgreSQL gets it; `names[n - 1]` is the parameter behind `$n`."""

    sql: str
    names: tuple[str, ...]

    def bind(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in order; values the statement does not use are left out."""
        return tuple(values[name] for name in self.names)


@dataclass(frozen=True)
class _SqlToken:
    kind: str
    text: str
    line: int


def parse(text: str, allowed: Collection[str] = TYPES) -> SqlTemplate:
    """Read one statement that may use the *allowed* parameters and uses `:tenantId`; ValueError says what is wrong."""
    if "\0" in text:
        raise ValueError("a template cannot hold a NUL character")
    tokens = list(_single_statement(text))
    if all(token.kind in _BLANK for token in tokens):
        raise ValueError("the template is empty, it must hold one SQL statement")
    numbers: dict[str, int] = {}
    sql = "".join(_rendered(token, numbers, allowed) for token in tokens)
    if "tenantId" not in numbers:
        raise ValueError(
            "the template does not use :tenantId, so it would reach across tenants; a mention in a string, a comment"
            " or a quoted identifier does not count"
        )
    return SqlTemplate(sql.strip(_SPACE), tuple(numbers))


def _single_statement(text: str) -> Iterator[_SqlToken]:
    """The statement's tokens, its semicolon turned into a space: without one, what stood apart could grow together."""
    has_ended = False
    for token in _tokens(text):
        if has_ended and token.kind not in _BLANK:
            raise ValueError(f"line {token.line}: a template is one statement, nothing may follow its semicolon")
        if token.kind == "semicolon":
            has_ended = True
            yield _SqlToken("space", " ", token.line)
        else:
            yield token


def _tokens(text: str) -> Iterator[_SqlToken]:
    position, line = 0, 1
    while match := _TOKEN.match(text, position):
        kind, end = str(match.lastgroup), match.end()
        if kind == "unclosed":
            quote = match.group()
            raise ValueError(f"line {line}: the {_QUOTES[quote[-1]]} that begins here with {quote} is not closed")
        if kind == "comment":
            end = _comment_end(text, position, line)
        token = _SqlToken(kind, text[position:end], line)
        yield token
        position = end
        line += token.text.count("\n")


def _comment_end(text: str, start: int, line: int) -> int:
    """Where the comment that opens at *start* is closed: comments nest, which no regular expression can follow."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(text, start):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    raise ValueError(f"line {line}: the comment that begins here with /* is not closed")


def _rendered(token: _SqlToken, numbers: dict[str, int], allowed: Collection[str]) -> str:
    """What PostgreSQL gets for *token*; a parameter seen for the first time takes the next of *numbers*."""
    if token.kind == "positional":
        raise ValueError(f"line {token.line}: {token.text} has no meaning here, name the value: {_listed(allowed)}")
    if token.kind != "parameter":
        return token.text
    name = token.text[1:]
    if name not in allowed:
        raise ValueError(f"line {token.line}: {_why_not(name, allowed)}")
    # The type decides how PostgreSQL takes the value; the brackets hold it together whatever operator comes next.
    return f"(${numbers.setdefault(name, len(numbers) + 1)}::{TYPES[name]})"


def _why_not(name: str, allowed: Collection[str]) -> str:
    if name in TYPES:
        return f":{name} has no value here, use one of {_listed(allowed)}"
    lowered = {known.lower(): known for known in allowed}
    close = get_close_matches(name.lower(), lowered, n=1)
    guess = f", did you mean :{lowered[close[0]]}?" if close else "."
    return (
        f"there is no parameter :{name}{guess} Known are {_listed(allowed)}."
        " Where the colon is SQL's own, as in a slice a[lo: hi], put a space after it."
    )


def _listed(allowed: Collection[str]) -> str:
    return ", ".join(f":{name}" for name in TYPES if name in allowed)
