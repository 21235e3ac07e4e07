"""The text of `--help`: usage, arguments, options and commands, as wide as the terminal and never cut."""

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from penstock.cli.terminal.style import style_text

SERVER_OPTIONS = ("url", "query_url", "config")
COMMON_OPTIONS = ("json", "no_color", "help")
_WIDTH_OF_A_FILE = 100  # columns, when the output is not a terminal
_NAME_WIDTH = 32
_NAME_WIDTH_LIMIT = 0.45  # of the line, on narrow terminals


class ParameterHelp(NamedTuple):
    """An argument or option as help shows it."""

    section: str
    name: str
    text: str
    facts: Sequence[str]  # the default, the environment variable, the choices


def format_help(command: Any, context: Any) -> str:
    """Return the help page of *command*."""
    width = measure_help_width()
    parts = [style_text(f"usage: {format_usage(command, context)}", bold=True)]
    parts += [_fill(paragraph, width) for paragraph in split_paragraphs(command.help)]
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in describe_parameters(command, context):
        text = " ".join([parameter.text, *(f"[{fact}]" for fact in parameter.facts)])
        sections.setdefault(parameter.section, []).append((parameter.name, text.strip()))
    for name, below in list_commands(command):
        sections.setdefault(below.rich_help_panel or "Commands", []).append((name, extract_first_sentence(below.help)))
    order = sorted(sections, key=_rank_section)
    parts += [
        f"{style_text(f'{section}:', bold=True)}\n{_format_definitions(sections[section], width)}" for section in order
    ]
    if command.epilog:
        parts.append(_fill(command.epilog, width))
    return "\n\n".join(parts)


def measure_help_width() -> int:
    """Return the columns of the terminal, or 100 when the output goes elsewhere."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return _WIDTH_OF_A_FILE
    return max(shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns, 40)


def format_usage(command: Any, context: Any) -> str:
    """Return the usage line of *command*, e.g. `penstock flow logs [OPTIONS] RUN [STEP]`."""
    return " ".join([context.command_path, "[OPTIONS]", *_list_argument_names(command)])


def format_short_usage(command: Any, context: Any) -> str:
    """Return the command and its arguments, without options: the hint of a usage error."""
    return " ".join([context.command_path, *_list_argument_names(command)])


def split_paragraphs(text: str | None) -> list[str]:
    """Return the paragraphs of a help text, each as one line."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text or "").split("\n\n") if paragraph]


def extract_first_sentence(text: str | None) -> str:
    """Return the first sentence of a help text, without its full stop."""
    first = next(iter(split_paragraphs(text)), "")
    return first.partition(". ")[0].removesuffix(".")


def list_commands(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and commands of a group."""
    commands = getattr(command, "commands", {})
    yield from ((name, below) for name, below in commands.items() if not below.hidden)


def describe_parameters(command: Any, context: Any) -> Iterator[ParameterHelp]:
    """Yield the arguments and options of *command* in the order in which help shows them."""
    for parameter in command.get_params(context):
        if parameter.hidden:
            continue
        text = (parameter.help or "").strip()
        if parameter.param_type_name == "argument":
            yield ParameterHelp("Arguments", format_metavar(parameter), text, _list_facts(parameter))
        else:
            yield ParameterHelp(
                _name_option_section(parameter.name), _format_option_name(parameter), text, _list_facts(parameter)
            )


def format_metavar(parameter: Any) -> str:
    """Return the placeholder of the value of *parameter*: `RUN`, `SECONDS`, `N`."""
    if parameter.metavar:
        return str(parameter.metavar).strip("[]")
    if parameter.type_descriptor.annotation is int:
        return "N"
    return str(parameter.name).replace("_", "-").upper()


def list_choices(parameter: Any) -> list[str]:
    """Return the values that *parameter* accepts; an empty list if it is not a choice."""
    found = parameter.type_descriptor.choices or ()
    return [str(choice.value) if isinstance(choice, Enum) else str(choice) for choice in found]


def _rank_section(section: str) -> int:
    order = ("Arguments", "Options")
    last = ("Server options", "Common options")
    if section in order:
        return order.index(section)
    return 100 + last.index(section) if section in last else 50


def _list_argument_names(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument" and not parameter.hidden:
            name = format_metavar(parameter) + ("..." if parameter.nargs != 1 else "")
            yield name if parameter.required else f"[{name}]"
    if getattr(command, "commands", None):
        yield "COMMAND"


def _name_option_section(name: str) -> str:
    if name in SERVER_OPTIONS:
        return "Server options"
    return "Common options" if name in COMMON_OPTIONS else "Options"


def _format_option_name(parameter: Any) -> str:
    # `-f, --follow`; `--wait / --no-wait`; `--limit N`.
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names = f"{names} / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag or parameter.count else f"{names} {format_metavar(parameter)}"


def _list_facts(parameter: Any) -> list[str]:
    is_repeatable = parameter.param_type_name == "option" and parameter.multiple
    found = ["repeatable"] if is_repeatable and "repeatable" not in (parameter.help or "") else []
    if values := list_choices(parameter):
        found.append(f"one of: {', '.join(values)}")
    if parameter.envvar:
        found.append(f"env: {parameter.envvar}")
    if default := _format_default(parameter):
        found.append(f"default: {default}")
    if parameter.required and parameter.param_type_name == "option":
        found.append("required")
    return found


def _format_default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = parameter.default
    if parameter.param_type_name == "option" and parameter.is_flag:
        return (parameter.opts if default else parameter.secondary_opts)[0] if parameter.secondary_opts else ""
    if default is None or default == "" or callable(default) or isinstance(default, list | tuple):
        return ""
    if isinstance(default, Enum):
        return str(default.value)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _fill(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _format_definitions(rows: Iterable[tuple[str, str]], width: int) -> str:
    listed = list(rows)
    limit = min(_NAME_WIDTH, int(width * _NAME_WIDTH_LIMIT))
    column = max((len(name) for name, _ in listed if len(name) <= limit), default=limit) + 4
    lines: list[str] = []
    for name, text in listed:
        wrapped = textwrap.wrap(text, max(width - column, 20), break_long_words=False, break_on_hyphens=False)
        if len(name) + 4 > column or not wrapped:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:<{column - 2}}{wrapped.pop(0)}")
        lines += [" " * column + line for line in wrapped]
    return "\n".join(lines)
