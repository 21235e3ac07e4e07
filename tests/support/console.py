"""The console examples of pages: commands, exit codes and outputs."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer

from penstock.cli import main

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_TYPED = re.compile(r"^\$ (?P<line>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
_ENDS = re.compile(r" # .*ends with (\d+)")
_OPERATOR = re.compile(r"[|&;<>()]+")
_ASSIGNED = re.compile(r"[A-Z_]+=.*", re.DOTALL)
_RUNS_PENSTOCK = re.compile(r"(?:^|[|;&(] *)(?:[A-Z_]+=\S* +|time +)*penstock ")


@dataclass(frozen=True)
class Block:
    """A fenced example of a page."""

    language: str
    text: str


@dataclass(frozen=True)
class Typed:
    """A command of a page, its documented exit code, and its documented output."""

    line: str
    code: int
    shown: str


def blocks_of(text: str) -> list[Block]:
    """Return the examples of a page in order."""
    return [Block(language, example) for _, language, example in _BLOCK.findall(text)]


def typed_in(console: str) -> Iterator[Typed]:
    """Return the commands of a console block. `# ends with N` after a command is its exit code; the default is 0."""
    for typed in _TYPED.finditer(console):
        ends = _ENDS.search(typed["line"])
        yield Typed(typed["line"], int(ends[1]) if ends else 0, typed["shown"])


def commands_of(text: str) -> list[list[str]]:
    """Return every `penstock …` in the console blocks of a page, without the syntax of the shell."""
    consoles = [block.text for block in blocks_of(text) if block.language == "console"]
    lines = [typed.line for console in consoles for typed in typed_in(console) if _RUNS_PENSTOCK.search(typed.line)]
    return [words for line in lines for words in penstock_words(line)]


def penstock_words(line: str) -> Iterator[list[str]]:
    """Return the arguments of every `penstock` in a line of the shell."""
    for words in simple_commands(line):
        while words and (_ASSIGNED.fullmatch(words[0]) or words[0] == "time"):
            words = words[1:]
        if words[:1] == ["penstock"]:
            yield words[1:]


def simple_commands(line: str) -> Iterator[list[str]]:
    """Return the words of a line of the shell between its operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if _OPERATOR.fullmatch(word):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def can_be_given(words: list[str]) -> None:
    """Raise unless `penstock` has this command, with these options and as many arguments."""
    with suppress(typer.Exit):  # --version and --help end the program
        _parse(typer.main.get_command(main.app), words)


def _parse(command: Any, words: list[str]) -> None:
    context = command.make_context("penstock", list(words))
    if hasattr(command, "resolve_command"):
        _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        _parse(inner, rest)
