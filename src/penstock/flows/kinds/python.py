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
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.text import make_storable

KIND = "python"
_TRACE_LIMIT = 4_000  # characters of the end of a traceback, which shows the error
_MESSAGE_LIMIT = 1_000

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of *work*, executed in a new thread; a cancelled caller does not stop the thread.

    The shared thread pool is not used: a few long steps would fill it, and delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            settle: tuple[Callable[[Any], None], Any] = (future.set_result, context.run(work))
        except StopIteration as error:  # a future cannot hold it
            settle = (future.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            settle = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(_settle, future, *settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _settle(future: "asyncio.Future[T]", set_outcome: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():  # the caller was not cancelled
        set_outcome(outcome)


class PythonInputs(SpecModel):
    """The function to call, and its arguments."""

    call: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w*(\.[A-Za-z_]\w*)*:[A-Za-z]\w*\z", max_length=500)]
    args: Json = Field(default_factory=dict, description="Arguments by parameter name.")


def make_python_handler(allowed: Sequence[str]) -> Handler:
    """Return the handler of steps that call functions of the *allowed* modules and their submodules."""

    async def call_function(step: FlowStep) -> Outputs:
        inputs = read_inputs(PythonInputs, step.inputs)
        module, _, name = inputs.call.partition(":")
        if not _is_allowed(module, allowed):
            message = f"the module {module} is not allowed; to allow it, add it to the setting flows.python"
            raise StepFailed("PYTHON_NOT_ALLOWED", message, retryable=False)
        function = await run_in_thread(partial(_load_function, module, name, allowed), f"import {module}")
        result = await _call(function, _bind_arguments(function, inputs, step), inputs.call)
        return _make_outputs(result, inputs.call)

    return call_function


def _is_allowed(module: str, allowed: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def _load_function(module: str, name: str, allowed: Sequence[str]) -> Callable[..., Any]:
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # an edge: the import executes a user's code
        raise _make_failure(error) from error
    # Imported functions are not allowed: a module with `from os import system` must not offer `system`.
    if not callable(function) or not _is_allowed(getattr(function, "__module__", None) or "", allowed):
        raise StepFailed("PYTHON_NOT_FOUND", f"the module {module} defines no function {name}", retryable=False)
    return function  # type: ignore[no-any-return]


def _bind_arguments(function: Callable[..., Any], inputs: PythonInputs, step: FlowStep) -> dict[str, Any]:
    signature = inspect.signature(function)
    names = [parameter.name for parameter in signature.parameters.values() if _takes_step(parameter)]
    arguments = {**inputs.args, **dict.fromkeys(names, step)}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise StepFailed("BAD_INPUTS", f"inputs.args: {inputs.call}: {error}", retryable=False) from None
    return arguments


def _takes_step(parameter: inspect.Parameter) -> bool:
    is_annotated = parameter.annotation is FlowStep or str(parameter.annotation).rpartition(".")[2] == FlowStep.__name__
    return is_annotated or parameter.name == "step"


async def _call(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Any:
    call = partial(function, **arguments)
    try:
        result = call() if inspect.iscoroutinefunction(function) else await run_in_thread(call, name)
        return await result if inspect.isawaitable(result) else result
    except StepFailed:
        raise
    except (Exception, SystemExit) as error:  # an edge: the function is a user's code
        raise _make_failure(error) from error


def _make_failure(error: BaseException) -> StepFailed:
    """Return the error of a user's code, with its traceback, without the frames of this module."""
    kind, message = type(error).__name__, make_storable(str(error), _MESSAGE_LIMIT)
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frames))
    details = {"type": kind, "message": message, "traceback": make_storable(lines[-_TRACE_LIMIT:], _TRACE_LIMIT)}
    return StepFailed("PYTHON_ERROR", f"{kind}: {message}", details)


def _make_outputs(result: Any, call: str) -> Outputs:
    try:
        document = orjson.dumps({} if result is None else result)
    except TypeError as error:
        message = f"the result of {call} cannot be encoded as JSON: {error}"
        raise StepFailed("PYTHON_RESULT", message, retryable=False) from None
    if len(document) > DOCUMENT_LIMIT:
        message = f"the result of {call} has {len(document)} bytes; the limit is {DOCUMENT_LIMIT}: write an artifact"
        raise StepFailed("PYTHON_RESULT", message, retryable=False)
    plain = orjson.loads(document)
    return plain if isinstance(plain, dict) else {"result": plain}
