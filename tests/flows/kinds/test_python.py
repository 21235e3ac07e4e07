"""F14: steps that call a Python function."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from penstock.flows.contract import DOCUMENT_LIMIT
from penstock.flows.kinds.python import make_python_handler
from penstock.flows.kinds.registry import check_inputs
from penstock.flows.step import FlowStep
from penstock.kernel.errors import Invalid
from tests.flows.memory_step_io import MemoryStepIO, make_step, run_failing_step, run_step

MODULE = "penstock_test_jobs"
SOURCE = """
import threading
from os import getcwd
from penstock.flows.step import FlowStep, StepFailed

def add(a: int, b: int = 1):
    return {"sum": a + b, "thread": threading.current_thread() is threading.main_thread()}

async def add_later(a, b):
    return {"sum": a + b, "thread": threading.current_thread() is threading.main_thread()}

async def note(what, step):
    await step.write("note", what)
    return {"run": step.run_id}

def take_step(at: "FlowStep"):
    return at.inputs["args"]

def number(): return 7
def nothing(): return None
def secret(): return {1, 2}
def much(size): return {"text": "x" * size}
def breaks(how): raise {"value": ValueError("no \\0 good"), "exit": SystemExit(3), "stop": StopIteration()}[how]
async def breaks_later(how): breaks(how)
def fails(): raise StepFailed("TOO_EARLY", "come back", {"at": 5}, retryable=True)
goes_on = threading.Event()
def blocks(): goes_on.wait()
def wrapped(): return add_later(1, 2)
constant = 5
"""
worker = make_python_handler([MODULE])


@pytest.fixture(autouse=True)
def jobs() -> Iterator[None]:
    """Create a user's module, and a submodule."""
    module, below = ModuleType(MODULE), ModuleType(f"{MODULE}.below")
    exec(SOURCE, module.__dict__)
    exec("def hi(): return {'hi': 1}", below.__dict__)
    beside = ModuleType(f"{MODULE}2")
    exec("def hi(): return {'hi': 2}", beside.__dict__)
    modules = {file.__name__: file for file in (module, below, beside)}
    sys.modules.update(modules)
    yield
    for name in modules:
        del sys.modules[name]


def make_call_step(name: str, module: str = MODULE, step_io: MemoryStepIO | None = None, **args: Any) -> FlowStep:
    return make_step("python", {"call": f"{module}:{name}", "args": args}, step_io=step_io)


async def test_function_is_called_with_its_args() -> None:
    """F14: a function is called in a thread, a coroutine function in the event loop."""
    assert await run_step(worker, make_call_step("add", a=2)) == {"sum": 3, "thread": False}
    is_main = threading.current_thread() is threading.main_thread()
    assert await run_step(worker, make_call_step("add_later", a=2, b=3)) == {"sum": 5, "thread": is_main}
    assert await run_step(worker, make_call_step("wrapped")) == {"sum": 3, "thread": is_main}


async def test_parameter_step_receives_the_step() -> None:
    """F14: a parameter named `step`, or with its annotation, is the step."""
    step_io = MemoryStepIO()
    assert await run_step(worker, make_call_step("note", step_io=step_io, what="hello")) == {"run": "run-1"}
    assert step_io.written == {"note": b"hello"}
    assert await run_step(worker, make_call_step("take_step")) == {}


async def test_result_is_the_outputs() -> None:
    """F14: an object is the outputs, None is no outputs, any other value is the output `result`."""
    assert await run_step(worker, make_call_step("number")) == {"result": 7}
    assert await run_step(worker, make_call_step("nothing")) == {}
    fits = DOCUMENT_LIMIT - len('{"text":""}')
    assert len((await run_step(worker, make_call_step("much", size=fits)))["text"]) == fits
    for step in (make_call_step("much", size=fits + 1), make_call_step("secret")):
        error = await run_failing_step(worker, step)
        assert (error.error.code, error.retryable) == ("PYTHON_RESULT", False)


@pytest.mark.parametrize(
    "call",
    [
        ("getcwd", MODULE),  # borrowed from another module
        ("constant", MODULE),
        ("missing", MODULE),
        ("system", "os"),
        ("hi", f"{MODULE}2"),
        ("main", "penstock.cli.main"),
    ],
)
async def test_only_allowed_functions_are_called(call: tuple[str, str]) -> None:
    """F14: functions of the modules in `flows.python`, and of their submodules."""
    error = await run_failing_step(worker, make_call_step(*call))
    expected = "PYTHON_NOT_FOUND" if call[1] == MODULE else "PYTHON_NOT_ALLOWED"
    assert (error.error.code, error.retryable) == (expected, False)
    assert "flows.python" in error.error.message or expected == "PYTHON_NOT_FOUND"


async def test_submodules_are_allowed_with_their_package() -> None:
    """F14: an entry of a package allows all its modules."""
    assert await run_step(worker, make_call_step("hi", f"{MODULE}.below")) == {"hi": 1}
    assert (
        await run_failing_step(make_python_handler([]), make_call_step("add", a=1))
    ).error.code == "PYTHON_NOT_ALLOWED"


@pytest.mark.parametrize("name", ["breaks", "breaks_later"])
@pytest.mark.parametrize(("how", "kind"), [("value", "ValueError"), ("exit", "SystemExit"), ("stop", "RuntimeError")])
async def test_exceptions_are_reported(name: str, how: str, kind: str) -> None:
    """F14: PYTHON_ERROR has type, message and traceback, also for an exception that would end the process."""
    error = await run_failing_step(worker, make_call_step(name, how=how))
    assert error.error.code == "PYTHON_ERROR"
    assert error.error.details["type"] == kind
    assert "\0" not in error.error.message
    if how != "stop":  # of which Python makes another error, on its way
        assert "in breaks" in error.error.details["traceback"]
        assert "flows/kinds" not in error.error.details["traceback"]


async def test_blocking_functions_do_not_delay_others() -> None:
    """F14: any number of functions may block, and a cancelled step does not wait for its function."""
    steps = [asyncio.create_task(run_step(worker, make_call_step("blocks"))) for _ in range(50)]
    assert await run_step(worker, make_call_step("number")) == {"result": 7}
    for step in steps[1:]:
        step.cancel()
    await asyncio.wait(steps[1:])
    sys.modules[MODULE].__dict__["goes_on"].set()
    assert await steps[0] == {}


async def test_step_failed_is_passed_on() -> None:
    """F14: a function that raises StepFailed decides the error itself."""
    error = await run_failing_step(worker, make_call_step("fails"))
    assert (error.error.code, error.error.details, error.retryable) == ("TOO_EARLY", {"at": 5}, True)


@pytest.mark.parametrize("args", [{}, {"a": 1, "c": 2}])
async def test_wrong_args_are_refused(args: dict[str, Any]) -> None:
    """F14: arguments that do not match the parameters are BAD_INPUTS, before the call."""
    error = await run_failing_step(worker, make_call_step("add", **args))
    assert (error.error.code, error.retryable) == ("BAD_INPUTS", False)
    assert "inputs.args" in error.error.message


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"call": "os"},
        {"call": "os:system()"},
        {"call": "os:_x"},
        {"call": "os:a", "args": []},
        {"call": "a:b", "x": 1},
    ],
)
def test_inputs_are_checked_before_a_run(inputs: dict[str, Any]) -> None:
    """F2, F14: inputs that cannot be called are refused with the field when the run is created."""
    check: Callable[[dict[str, Any]], None] = check_inputs["python"]
    with pytest.raises(Invalid, match="inputs") as refused:
        check(inputs)
    assert refused.value.code == "BAD_INPUTS"
    check({"call": "${scope.function}", "args": {"a": "${steps.one.outputs.a}"}})
