"""Turn what the argument parser refuses into an error like every other: a sentence and a hint."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import typer

from penstock.cli.terminal.help_text import format_metavar, list_choices
from penstock.kernel.errors import Invalid, PenstockError

UsageError: type[Any] = typer.BadParameter.__mro__[1]  # Typer carries its own copy of Click, which is private
_EXTRA_ARGUMENTS = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)
# The types of pydantic's errors; their messages would speak of inputs, unions and timedeltas.
_EXPECTED: Mapping[str, str] = {
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "uuid_parsing": "is not a UUID",
    "datetime_parsing": "is not a time, e.g. 2026-01-31T00:00:00Z",
    "datetime_from_date_parsing": "is not a time, e.g. 2026-01-31T00:00:00Z",
    "bool_parsing": "is not true or false",
}


def translate_parser_error(error: Any) -> PenstockError:
    """Return the error to print for a UsageError of the parser."""
    context = error.ctx
    hint = f"usage: {context.command.format_short_usage(context)}" if context is not None else None
    kind = type(error).__name__
    if kind == "MissingParameter":
        values = list_choices(error.param)
        name = f"{error.param.param_type_name} {_name_parameter(error.param)}"
        suffix = f": {_format_choices(values).strip()}" if values else ""
        return Invalid("USAGE", f"missing {name}{suffix}", hint=hint)
    if kind == "NoSuchOption":
        near = get_close_matches(error.option_name, _list_options(context), n=1, cutoff=0.6)
        message = f"{context.command_path} has no option {error.option_name}"
        if _is_option_below(context.command, error.option_name):
            return Invalid("USAGE", message, hint=f"put {error.option_name} after the command")
        return Invalid("USAGE", message, hint=f"did you mean {near[0]}?" if near else hint)
    if kind == "BadOptionUsage":
        return Invalid("USAGE", f"{error.option_name} needs a value", hint=hint)
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return Invalid("USAGE", f"{_name_parameter(error.param)}: {_describe_refusal(error)}", hint=hint)
    if extra := _EXTRA_ARGUMENTS.fullmatch(error.message):
        return Invalid("USAGE", f"unexpected argument {extra[1]}", hint=hint)
    return Invalid("USAGE", _lower_first(error.format_message()).rstrip("."), hint=hint)


def make_unknown_command_error(group: Any, context: Any, name: str) -> PenstockError:
    """Return the error for a command that *group* does not have."""
    near = get_close_matches(name, group.commands, n=1, cutoff=0.6)
    known = ", ".join(group.commands)
    hint = f"did you mean `{context.command_path} {near[0]}`?" if near else f"commands: {known}"
    return Invalid("USAGE", f"{context.command_path} has no command {name!r}", hint=hint)


def _name_parameter(parameter: Any) -> str:
    return format_metavar(parameter) if parameter.param_type_name == "argument" else max(parameter.opts, key=len)


def _list_options(context: Any) -> list[str]:
    return [name for option in context.command.get_params(context) for name in (*option.opts, *option.secondary_opts)]


def _is_option_below(group: Any, option: str) -> bool:
    """Return whether a command of *group* has the option."""
    commands = getattr(group, "commands", {}).values()
    return any(
        any(option in (*parameter.opts, *parameter.secondary_opts) for parameter in command.params)
        or _is_option_below(command, option)
        for command in commands
    )


def _describe_refusal(error: Any) -> str:
    """Return why a value was refused, without the words of the libraries that refused it."""
    values = list_choices(error.param)
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not details:
        return _lower_first(str(error.message)).rstrip(".")
    first = details[0]
    given, limits = repr(first.get("input")), first.get("ctx", {})
    if values:
        return f"{given} is not{_format_choices(values)}"
    match first["type"]:
        case "greater_than_equal":
            return f"{given} is less than {limits['ge']:g}"
        case "less_than_equal":
            return f"{given} is more than {limits['le']:g}"
        case kind if kind in _EXPECTED:
            return f"{given} {_EXPECTED[kind]}"
    return _lower_first(str(first["msg"]).removeprefix("Value error, "))


def _format_choices(values: list[str]) -> str:
    return f" one of {', '.join(values)}" if values else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
