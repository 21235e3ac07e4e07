"""The base of all command groups: one style of help, of usage errors, and of the options every command has."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.server_address import select_config_file
from penstock.cli.terminal.help_text import SERVER_OPTIONS, format_help, format_short_usage, format_usage
from penstock.cli.terminal.style import turn_colour_off
from penstock.cli.terminal.usage_error import make_unknown_command_error

HELP_OPTIONS = ["-h", "--help"]
NoColorOption = Annotated[
    bool, typer.Option("--no-color", callback=turn_colour_off, is_eager=True, help="Print without colours.")
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        envvar="PENSTOCK_CONFIG",
        callback=select_config_file,
        is_eager=True,
        help="Configuration file whose `server` section has the address.",
        show_default="./penstock.yaml if it exists",
    ),
]


class _HelpMixin:
    """Print help and usage as all commands of Penstock do."""

    def get_help(self, ctx: Any) -> str:
        return format_help(self, ctx)

    def get_usage(self, ctx: Any) -> str:
        return f"usage: {format_usage(self, ctx)}"

    def format_short_usage(self, ctx: Any) -> str:
        return format_short_usage(self, ctx)


class PenstockCommand(_HelpMixin, TyperCommand):
    """A command; one that calls a server also accepts `--config`, which says where the server is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names = {parameter.name for parameter in self.params}
        if names & set(SERVER_OPTIONS) and "config" not in names:
            self.params += _hide_options(_declare_config)
        self.params += _hide_options(_declare_no_color)


class PenstockGroup(_HelpMixin, TyperGroup):
    """A group of commands."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params += _hide_options(_declare_no_color)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and args[0][:1].isalnum() and not ctx.resilient_parsing:
            raise make_unknown_command_error(self, ctx, args[0])
        return super().resolve_command(ctx, args)


class CommandGroup(typer.Typer):
    """A Typer application whose commands have the help and the common options of Penstock."""

    def __init__(self, help: str, **options: Any) -> None:  # noqa: A002 - the name Typer gives it
        defaults = {
            "cls": PenstockGroup,
            "no_args_is_help": True,
            "add_completion": False,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "context_settings": {"help_option_names": HELP_OPTIONS},
        }
        super().__init__(**{**defaults, "help": help, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Register a command, as Typer does."""
        return super().command(*args, **{"cls": PenstockCommand, **options})


def _declare_no_color(no_color: NoColorOption = False) -> None:
    """Declare the option that every command and group accepts."""


def _declare_config(config: ConfigOption = None) -> None:
    """Declare the option that every client command accepts."""


def _hide_options(declaration: Callable[..., None]) -> list[Any]:
    """Return the options that *declaration* declares; their callbacks act, and the command's function gets nothing."""
    app = typer.Typer(add_completion=False)
    app.command()(declaration)
    options: list[Any] = [option for option in typer.main.get_command(app).params if option.name != "help"]
    for option in options:
        option.expose_value = False
    return options
