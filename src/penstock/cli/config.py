"""`penstock config`: validate and print the configuration."""

from io import StringIO

from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, JsonOption
from penstock.cli.terminal.output import emit

app = CommandGroup(help="Validate and print the configuration.")


@app.command()
def validate(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Validate the configuration, and print every error with its file, line and column."""
    from penstock.settings import load_settings

    load_settings(config)
    emit({"valid": True}, as_json=json, text="the configuration is valid")


@app.command()
def show(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Print the effective configuration: file, environment and defaults. Secrets are printed as references."""
    from ruamel.yaml import YAML

    from penstock.settings import load_settings

    data = load_settings(config).model_dump(mode="json", by_alias=True)
    text = StringIO()
    YAML().dump(data, text)
    emit(data, as_json=json, text=text.getvalue().rstrip("\n"))


@app.command()
def schema(json: JsonOption = False) -> None:  # noqa: ARG001 - a schema is always JSON
    """Print the JSON Schema of penstock.yaml, for editors."""
    from penstock.settings import Settings

    emit(Settings.model_json_schema(), as_json=True)
