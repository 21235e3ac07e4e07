"""F14: steps that call a Python function of an allowed module, and the threads that run blocking calls."""

import asyncio
import contextvars
import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, StringConstraints

from penstock.flows.contract import DOCUMENT_LIMIT
from penstock.flows.definition.spec import Json, SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.text import make_storable

KIND = "python"
_TRACE_LIMIT = 4_000  # characters, of its end: there the mistake is
_MESSAGE_LIMIT = 1_000

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """What *work* returns or raises; whoever stops waiting leaves it alone.

    Not in the pool everybody shares: a few steps that take hours would fill it, and the program's end wait for them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            settle: tuple[Callable[[Any], None], Any] = (future.set_result, context.run(work))
        except StopIteration as error:  # no future can carry it
            settle = (future.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            settle = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, *settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _settle(future: "asyncio.Future[T]", how: Callable[[Any], None], what: Any) -> None:
    if not future.done():  # else whoever waited was cancelled
        how(what)


class PythonInputs(SpecModel):
    """What is called, and with what."""

    call: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w*(\.[A-Za-z_]\w*)*:[A-Za-z]\w*\z", max_length=500)]
    args: Json = Field(default_factory=dict, description="By the names of its parameters.")


def python_worker(allowed: Sequence[str]) -> Handler:
    """The worker that calls functions of the modules *allowed*, and of those below them."""

    async def work(step: FlowStep) -> Outputs:
        given = read(PythonInputs, step.inputs)
        module, _, name = given.call.partition(":")
        if not _is_below(module, allowed):
            said = f"{module} is none of the modules that may be called; name it in flows.python to allow it"
            raise StepFailed("PYTHON_NOT_ALLOWED", said, retryable=False)
        function = await run_in_thread(partial(_found, module, name, allowed), f"import {module}")
        return _as_outputs(await _result(function, _bound(function, given, step), given.call), given.call)

    return work


def _is_below(module: str, allowed: Sequence[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in allowed)


def _found(module: str, name: str, allowed: Sequence[str]) -> Callable[..., Any]:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise _told(error) from error
    # What a module has only borrowed is not its own: `from os import system` must not offer that.
    if not callable(found) or not _is_below(getattr(found, "__module__", None) or "", allowed):
        raise StepFailed("PYTHON_NOT_FOUND", f"{module} has no function {name} of its own", retryable=False)
    return found  # type: ignore[no-any-return]


def _bound(function: Callable[..., Any], given: PythonInputs, step: FlowStep) -> dict[str, Any]:
    signature = inspect.signature(function)
    wanted = [parameter.name for parameter in signature.parameters.values() if _wants_step(parameter)]
    arguments = {**given.args, **dict.fromkeys(wanted, step)}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise StepFailed("BAD_INPUTS", f"inputs.args: {given.call}: {error}", retryable=False) from None
    return arguments


def _wants_step(parameter: inspect.Parameter) -> bool:
    is_annotated = parameter.annotation is FlowStep or str(parameter.annotation).rpartition(".")[2] == FlowStep.__name__
    return is_annotated or parameter.name == "step"


async def _result(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Any:
    call = partial(function, **arguments)
    try:
        found = call() if inspect.iscoroutinefunction(function) else await run_in_thread(call, name)
        return await found if inspect.isawaitable(found) else found
    except StepFailed:
        raise
    except (Exception, SystemExit) as error:  # an edge: it is somebody else's code
        raise _told(error) from error


def _told(error: BaseException) -> StepFailed:
    kind, message = type(error).__name__, make_storable(str(error), _MESSAGE_LIMIT)
    theirs = error.__traceback__
    while theirs is not None and theirs.tb_next is not None and theirs.tb_frame.f_code.co_filename == __file__:
        theirs = theirs.tb_next
    lines = "".join(traceback.format_exception(type(error), error, theirs))
    details = {"type": kind, "message": message, "traceback": make_storable(lines[-_TRACE_LIMIT:], _TRACE_LIMIT)}
    return StepFailed("PYTHON_ERROR", f"{kind}: {message}", details)


def _as_outputs(result: Any, call: str) -> Outputs:
    try:
        document = orjson.dumps({} if result is None else result)
    except TypeError as error:
        said = f"what {call} returned is no JSON: {error}"
        raise StepFailed("PYTHON_RESULT", said, retryable=False) from None
    if len(document) > DOCUMENT_LIMIT:
        said = f"{call} returned {len(document)} bytes, at most {DOCUMENT_LIMIT} are kept; write an artifact instead"
        raise StepFailed("PYTHON_RESULT", said, retryable=False)
    plain = orjson.loads(document)
    return plain if isinstance(plain, dict) else {"result": plain}
