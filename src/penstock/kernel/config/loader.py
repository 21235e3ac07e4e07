"""Configuration: one YAML file, overrides from the environment, and errors that point at the very place."""

import difflib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WithJsonSchema
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLWarning

from penstock.kernel.errors import BadConfig

ENV_PREFIX = "PENSTOCK__"
_SIZE_LIMIT = 1_000_000
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.+")

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str | int, ...]


class Section(BaseModel):
    """A part of the configuration; a key it does not know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _reference(value: str) -> str:
    if not _REFERENCE.fullmatch(value):
        raise ValueError("a secret is given by reference: env:NAME or file:/path, never itself")
    return value


class MisplacedKey(ValueError):
    """A mistake only the whole can see, told where it can be mended."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path


SecretRef = Annotated[
    str, AfterValidator(_reference), WithJsonSchema({"type": "string", "pattern": f"^({_REFERENCE.pattern})$"})
]


def resolve_secret(reference: str, name: str) -> str:
    """The secret behind *reference*, read now; BadConfig when it is not there. Never log what this returns."""
    kind, _, place = reference.partition(":")
    try:
        secret = os.environ[place] if kind == "env" else Path(place).read_text(encoding="utf-8").rstrip("\n")
    except (KeyError, OSError, ValueError) as error:  # ValueError: not UTF-8, or a name no file can have
        what = f"environment variable {place} is not set" if kind == "env" else f"cannot read {place}"
        raise BadConfig("SECRET_MISSING", f"{name} refers to {reference}, but {what}", hint="provide it") from error
    return secret


@dataclass(frozen=True)
class ConfigProblem:
    """One thing wrong, and where."""

    place: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.path + ': ' if self.path else ''}{self.message}"


def load(
    model: type[M], file: Path | None, env: Mapping[str, str], overrides: Mapping[KeyPath, Any] | None = None
) -> M:
    """The configuration from *file*, then *env*, then *overrides*; BadConfig naming every mistake and its place."""
    document = _read(file) if file else CommentedMap()
    places: dict[KeyPath, str] = {}
    for name, value in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            path = _spelled(model, name[len(ENV_PREFIX) :].lower().split("__"))
            _put(document, path, _scalar(name, value), f"environment variable {name}")
            places[path] = f"environment variable {name}"
    for path, value in (overrides or {}).items():
        _put(document, path, value, "command line")
        places[path] = "command line"
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _bad([_problem(model, document, file, places, dict(detail)) for detail in error.errors()]) from None


def _bad(problems: Sequence[ConfigProblem]) -> BadConfig:
    listed = [{"place": p.place, "path": p.path, "message": p.message} for p in problems]
    hint = "`penstock config schema` prints all that can be set"
    return BadConfig("CONFIG_INVALID", "\n".join(map(str, problems)), hint=hint, problems=listed)


def _read(file: Path) -> CommentedMap:
    try:
        if file.stat().st_size > _SIZE_LIMIT:
            raise BadConfig("CONFIG_INVALID", f"{file} is over {_SIZE_LIMIT} bytes", hint="is it the right file?")
        document = _yaml(file.read_text(encoding="utf-8"), "rt")
    except OSError as error:
        hint = "check --config"
        raise BadConfig("CONFIG_UNREADABLE", f"cannot read {file}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise BadConfig("CONFIG_INVALID", f"{file} is not UTF-8: {error.reason}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise _bad([ConfigProblem(place, "", f"not valid YAML: {error.problem or error.context}")]) from None
    except (YAMLError, ValueError) as error:
        raise _bad([ConfigProblem(str(file), "", f"not valid YAML: {error}")]) from None
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        raise _bad([ConfigProblem(f"{file}:1:1", "", "the file must hold a mapping of sections")])
    return document


def _yaml(text: str, kind: str) -> Any:
    """What *text* says; YAMLError or ValueError when it says nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)  # of style, such as an anchor used twice
            return YAML(typ=kind).load(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (AssertionError, AttributeError, LookupError, OverflowError, TypeError) as error:
        # The parser stumbles over values that are not what their tag says, such as `!!float ''`.
        raise ValueError("a value does not match its tag") from error


def _scalar(name: str, text: str) -> Any:
    try:
        return _yaml(text, "safe")
    except (YAMLError, ValueError):  # without its words: they repeat the value, which may be a secret
        message = "not a YAML value; quote it if it is meant as text"
        raise _bad([ConfigProblem(f"environment variable {name}", "", message)]) from None


def _spelled(model: type[BaseModel], keys: Sequence[str]) -> KeyPath:
    """The path of these lower-case *keys*, each spelled as its section spells it; one no section knows stays."""
    path: KeyPath = ()
    for key in keys:
        spellings = {field.lower(): field for field in _fields(model, path)}
        path = (*path, spellings.get(key, key))
    return path


def _put(document: Any, path: KeyPath, value: Any, place: str) -> None:
    for key in path[:-1]:
        if not isinstance(document, dict):
            raise _bad([ConfigProblem(place, ".".join(map(str, path)), "there is no such place")])
        if document.get(key) is None:
            document[key] = CommentedMap()
        document = document[key]
    if not isinstance(document, dict):
        raise _bad([ConfigProblem(place, ".".join(map(str, path)), "there is no such place")])
    document[path[-1]] = value


def _problem(
    model: type[BaseModel], document: Any, file: Path | None, places: Mapping[KeyPath, str], detail: dict[str, Any]
) -> ConfigProblem:
    cause = detail.get("ctx", {}).get("error")
    path: KeyPath = (*detail["loc"], *(cause.path if isinstance(cause, MisplacedKey) else ()))
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "unknown key" + _did_you_mean(str(path[-1]), _fields(model, path[:-1]))
    return ConfigProblem(_place(document, file, places, path), ".".join(map(str, path)), message)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known keys: {', '.join(known)}" if known else "; this section has no keys yet"


def _fields(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys the section at *path* knows."""
    is_entry = False
    for key in path:
        if isinstance(key, int) or is_entry:  # an item of a list, or an entry of a mapping: the model is known already
            is_entry = False
            continue
        field = next((field for name, field in model.model_fields.items() if key in (name, field.alias)), None)
        inner = _models(field.annotation) if field else []
        if not inner:
            return []
        model, is_entry = inner[0], field is not None and _is_mapping(field.annotation)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models within *annotation*: itself, or those of an optional or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _is_mapping(annotation: Any) -> bool:
    """Whether the models within *annotation* go by names of the user's own."""
    return get_origin(annotation) is dict or any(_is_mapping(inner) for inner in get_args(annotation))


def _place(document: Any, file: Path | None, places: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Where *path*, or the nearest thing around it, was set: a variable, the command line, or a line of the file."""
    for length in range(len(path), 0, -1):
        part = path[:length]
        inside = (place for key, place in places.items() if key[:length] == part)
        if found := places.get(part) or _line(document, file, part) or next(inside, None):
            return found
    return str(file) if file else "defaults"


def _line(document: Any, file: Path | None, path: KeyPath) -> str | None:
    """The line and column of *file* where *path* is, if it is there."""
    line = column = None
    for key in path:
        try:
            line, column = document.lc.key(key) if isinstance(document, CommentedMap) else document.lc.item(key)
            document = document[key]
        except (AttributeError, KeyError, TypeError, IndexError):
            return None
    return None if line is None or column is None else f"{file}:{line + 1}:{column + 1}"
