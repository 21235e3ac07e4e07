"""Configuration: one YAML file, overrides from the environment, and errors with file, line and column."""

import difflib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WithJsonSchema
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLWarning

from penstock.kernel.errors import BadConfig
from penstock.kernel.validation import UNKNOWN_KEY, Violation, list_violations

ENV_PREFIX = "PENSTOCK__"
_SIZE_LIMIT = 1_000_000
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.+")

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str | int, ...]


class Section(BaseModel):
    """A section of the configuration. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _check_reference(value: str) -> str:
    if not _REFERENCE.fullmatch(value):
        raise ValueError("must be a reference to a secret: env:NAME or file:/path, never the secret itself")
    return value


class MisplacedKey(ValueError):
    """An error of several keys together, reported at the key that has to be changed."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path


SecretRef = Annotated[
    str, AfterValidator(_check_reference), WithJsonSchema({"type": "string", "pattern": f"^({_REFERENCE.pattern})$"})
]


def resolve_secret(reference: str, name: str) -> str:
    """Return the secret that *reference* names, read now; BadConfig if it is missing. Never log the result."""
    kind, _, source = reference.partition(":")
    try:
        secret = os.environ[source] if kind == "env" else Path(source).read_text(encoding="utf-8").rstrip("\n")
    except (KeyError, OSError, ValueError) as error:  # ValueError: not UTF-8, or an impossible file name
        if kind == "env":
            reason, hint = f"environment variable {source} is not set", f"set {source} in the environment of the server"
        else:
            reason, hint = f"{source} cannot be read", f"create {source}, readable by the user of the server"
        raise BadConfig("SECRET_MISSING", f"{name} refers to {reference}, but {reason}", hint=hint) from error
    return secret


@dataclass(frozen=True)
class ConfigProblem:
    """An error of the configuration with its location: a line of the file, a variable or the command line."""

    location: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.path + ': ' if self.path else ''}{self.message}"


def load(
    model: type[M], file: Path | None, env: Mapping[str, str], overrides: Mapping[KeyPath, Any] | None = None
) -> M:
    """Return the configuration from *file*, then *env*, then *overrides*; BadConfig with every error."""
    document = _read(file) if file else CommentedMap()
    locations: dict[KeyPath, str] = {}
    for name, value in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            path = _restore_case(model, name[len(ENV_PREFIX) :].lower().split("__"))
            _put(document, path, _parse_variable(name, value), f"environment variable {name}")
            locations[path] = f"environment variable {name}"
    for path, value in (overrides or {}).items():
        _put(document, path, value, "command line")
        locations[path] = "command line"
    try:
        return model.model_validate(document)
    except ValidationError as error:
        violations = list_violations(error.errors(), document)
        raise _make_config_error(
            [_locate(model, document, file, locations, violation) for violation in violations]
        ) from None


def _make_config_error(problems: Sequence[ConfigProblem]) -> BadConfig:
    listed = [{"location": p.location, "path": p.path, "message": p.message} for p in problems]
    hint = "`penstock config schema` prints every setting"
    return BadConfig("CONFIG_INVALID", "\n".join(map(str, problems)), hint=hint, problems=listed)


def _read(file: Path) -> CommentedMap:
    try:
        if file.stat().st_size > _SIZE_LIMIT:
            hint = "check that it is the configuration file"
            raise BadConfig("CONFIG_INVALID", f"{file} has more than {_SIZE_LIMIT} bytes", hint=hint)
        document = _parse_yaml(file.read_text(encoding="utf-8"), "rt")
    except OSError as error:
        hint = "pass the path of the configuration file with --config or PENSTOCK_CONFIG"
        raise BadConfig("CONFIG_UNREADABLE", f"cannot read {file}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        hint = "save the file as UTF-8"
        raise BadConfig("CONFIG_INVALID", f"{file} is not UTF-8: {error.reason}", hint=hint) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise _make_config_error(
            [ConfigProblem(location, "", f"not valid YAML: {error.problem or error.context}")]
        ) from None
    except (YAMLError, ValueError) as error:
        raise _make_config_error([ConfigProblem(str(file), "", f"not valid YAML: {error}")]) from None
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        raise _make_config_error(
            [ConfigProblem(f"{file}:1:1", "", "the file must contain keys with values, e.g. `server: {}`")]
        )
    return document


def _parse_yaml(text: str, kind: str) -> Any:
    """Return the document that *text* contains; YAMLError or ValueError if it is not YAML."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)  # warnings of style, such as an anchor used twice
            return YAML(typ=kind).load(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (AssertionError, AttributeError, LookupError, OverflowError, TypeError) as error:
        # The parser crashes on values that do not have the type of their tag, such as `!!float ''`.
        raise ValueError("a value does not match its tag") from error


def _parse_variable(name: str, text: str) -> Any:
    try:
        return _parse_yaml(text, "safe")
    except (YAMLError, ValueError):  # without the parser's message: it repeats the value, which may be a secret
        message = "not a YAML value; put text in quotes"
        raise _make_config_error([ConfigProblem(f"environment variable {name}", "", message)]) from None


def _restore_case(model: type[BaseModel], keys: Sequence[str]) -> KeyPath:
    """Return the path of these lower-case *keys*, each in the spelling of its section; unknown keys stay unchanged."""
    path: KeyPath = ()
    for key in keys:
        spellings = {field.lower(): field for field in _list_keys(model, path)}
        path = (*path, spellings.get(key, key))
    return path


def _put(document: Any, path: KeyPath, value: Any, location: str) -> None:
    for key in path[:-1]:
        if not isinstance(document, dict):
            raise _make_config_error([ConfigProblem(location, ".".join(map(str, path)), UNKNOWN_KEY)])
        if document.get(key) is None:
            document[key] = CommentedMap()
        document = document[key]
    if not isinstance(document, dict):
        raise _make_config_error([ConfigProblem(location, ".".join(map(str, path)), UNKNOWN_KEY)])
    document[path[-1]] = value


def _locate(
    model: type[BaseModel], document: Any, file: Path | None, locations: Mapping[KeyPath, str], violation: Violation
) -> ConfigProblem:
    cause = violation.detail.get("ctx", {}).get("error")
    path: KeyPath = (*violation.path, *(cause.path if isinstance(cause, MisplacedKey) else ()))
    message = violation.message
    if violation.detail["type"] == "extra_forbidden":
        message += _suggest_key(str(path[-1]), _list_keys(model, path[:-1], document))
    return ConfigProblem(_find_location(document, file, locations, path), ".".join(map(str, path)), message)


def _suggest_key(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known keys: {', '.join(known)}" if known else "; this section has no keys"


def _list_keys(model: type[BaseModel], path: KeyPath, document: Any = None) -> list[str]:
    """Return the keys of the section at *path*; *document* decides which member of a union it is."""
    is_entry = False
    for key in path:
        document = _get_inner(document, key)
        if isinstance(key, int) or is_entry:  # an item of a list or an entry of a mapping, whose model is known
            is_entry = False
            continue
        field = next((field for name, field in model.model_fields.items() if key in (name, field.alias)), None)
        inner = _list_models(field.annotation) if field else []
        if not inner:
            return []
        model, is_entry = _choose_model(inner, document), field is not None and _is_mapping(field.annotation)
    return [field.alias or name for name, field in model.model_fields.items()]


def _get_inner(document: Any, key: str | int) -> Any:
    try:
        return document[key]
    except (LookupError, TypeError):
        return None


def _choose_model(models: Sequence[type[BaseModel]], document: Any) -> type[BaseModel]:
    """Return the member of a union that *document* names by a key such as `kind`, else the first one."""
    return next((model for model in models if len(models) > 1 and _has_tag(model, document)), models[0])


def _has_tag(model: type[BaseModel], document: Any) -> bool:
    return isinstance(document, Mapping) and any(
        get_origin(field.annotation) is Literal and document.get(field.alias or name) in get_args(field.annotation)
        for name, field in model.model_fields.items()
    )


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in *annotation*: itself, or the models of an optional or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _list_models(inner)]


def _is_mapping(annotation: Any) -> bool:
    """Return whether the models in *annotation* are entries of a mapping, whose keys the user chooses."""
    return get_origin(annotation) is dict or any(_is_mapping(inner) for inner in get_args(annotation))


def _find_location(document: Any, file: Path | None, locations: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Return where *path*, or the nearest key around it, was set: a variable, the command line or a line."""
    for length in range(len(path), 0, -1):
        part = path[:length]
        inside = (location for key, location in locations.items() if key[:length] == part)
        if found := locations.get(part) or _find_line(document, file, part) or next(inside, None):
            return found
    return str(file) if file else "defaults"


def _find_line(document: Any, file: Path | None, path: KeyPath) -> str | None:
    """Return file, line and column of *path*, or None if the file does not contain it."""
    line = column = None
    for key in path:
        try:
            line, column = document.lc.key(key) if isinstance(document, CommentedMap) else document.lc.item(key)
            document = document[key]
        except (AttributeError, KeyError, TypeError, IndexError):
            return None
    return None if line is None or column is None else f"{file}:{line + 1}:{column + 1}"
