"""F14: steps that are a function of Python."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from penstock.flows.contract import DOCUMENT_LIMIT
from penstock.flows.kinds.python import python_worker
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

def told(at: "FlowStep"):
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
worker = python_worker([MODULE])


@pytest.fixture(autouse=True)
def jobs() -> Iterator[None]:
    """A module somebody wrote, and one below it."""
    module, below = ModuleType(MODULE), ModuleType(f"{MODULE}.below")
    exec(SOURCE, module.__dict__)
    exec("def hi(): return {'hi': 1}", below.__dict__)
    beside = ModuleType(f"{MODULE}2")
    exec("def hi(): return {'hi': 2}", beside.__dict__)
    made = {one.__name__: one for one in (module, below, beside)}
    sys.modules.update(made)
    yield
    for name in made:
        del sys.modules[name]


def calling(name: str, module: str = MODULE, step_io: MemoryStepIO | None = None, **args: Any) -> FlowStep:
    return make_step("python", {"call": f"{module}:{name}", "args": args}, step_io=step_io)


async def test_a_function_is_called_with_its_args() -> None:
    """F14: a function in a thread, so that it holds nobody up; one that is async where all others are."""
    assert await run_step(worker, calling("add", a=2)) == {"sum": 3, "thread": False}
    is_main = threading.current_thread() is threading.main_thread()
    assert await run_step(worker, calling("add_later", a=2, b=3)) == {"sum": 5, "thread": is_main}
    assert await run_step(worker, calling("wrapped")) == {"sum": 3, "thread": is_main}


async def test_who_asks_for_the_step_gets_it() -> None:
    """F14: a parameter called `step`, or annotated so, is the step."""
    step_io = MemoryStepIO()
    assert await run_step(worker, calling("note", step_io=step_io, what="hello")) == {"run": "run-1"}
    assert step_io.written == {"note": b"hello"}
    assert await run_step(worker, calling("told")) == {}


async def test_what_it_returns_are_the_outputs() -> None:
    """F14: an object is the outputs, nothing is none, anything else is their `result`."""
    assert await run_step(worker, calling("number")) == {"result": 7}
    assert await run_step(worker, calling("nothing")) == {}
    fits = DOCUMENT_LIMIT - len('{"text":""}')
    assert len((await run_step(worker, calling("much", size=fits)))["text"]) == fits
    for step in (calling("much", size=fits + 1), calling("secret")):
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
async def test_only_what_is_allowed_is_called(call: tuple[str, str]) -> None:
    """F14: only functions of modules that `flows.python` names, and of those below them."""
    error = await run_failing_step(worker, calling(*call))
    expected = "PYTHON_NOT_FOUND" if call[1] == MODULE else "PYTHON_NOT_ALLOWED"
    assert (error.error.code, error.retryable) == (expected, False)
    assert "flows.python" in error.error.message or expected == "PYTHON_NOT_FOUND"


async def test_a_module_below_is_allowed_with_the_one_above() -> None:
    """F14: a package stands for its modules."""
    assert await run_step(worker, calling("hi", f"{MODULE}.below")) == {"hi": 1}
    assert (await run_failing_step(python_worker([]), calling("add", a=1))).error.code == "PYTHON_NOT_ALLOWED"


@pytest.mark.parametrize("name", ["breaks", "breaks_later"])
@pytest.mark.parametrize(("how", "kind"), [("value", "ValueError"), ("exit", "SystemExit"), ("stop", "RuntimeError")])
async def test_what_it_raises_is_told(name: str, how: str, kind: str) -> None:
    """F14: an exception becomes PYTHON_ERROR with its type, message and trace; even one that would end the program."""
    error = await run_failing_step(worker, calling(name, how=how))
    assert error.error.code == "PYTHON_ERROR"
    assert error.error.details["type"] == kind
    assert "\0" not in error.error.message
    if how != "stop":  # of which Python makes another error, on its way
        assert "in breaks" in error.error.details["traceback"]
        assert "flows/kinds" not in error.error.details["traceback"]


async def test_a_function_that_takes_long_holds_up_no_other() -> None:
    """F14: any number of them may block, and whoever stops waiting for one is not held."""
    steps = [asyncio.create_task(run_step(worker, calling("blocks"))) for _ in range(50)]
    assert await run_step(worker, calling("number")) == {"result": 7}
    for step in steps[1:]:
        step.cancel()
    await asyncio.wait(steps[1:])
    sys.modules[MODULE].__dict__["goes_on"].set()
    assert await steps[0] == {}


async def test_its_own_failure_passes_as_it_is() -> None:
    """F14: whoever raises StepFailed says himself what is wrong."""
    error = await run_failing_step(worker, calling("fails"))
    assert (error.error.code, error.error.details, error.retryable) == ("TOO_EARLY", {"at": 5}, True)


@pytest.mark.parametrize("args", [{}, {"a": 1, "c": 2}])
async def test_args_that_do_not_fit_are_refused(args: dict[str, Any]) -> None:
    """F14: what the function would not take is told as an input, before it is called."""
    error = await run_failing_step(worker, calling("add", **args))
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
def test_inputs_are_looked_over_before(inputs: dict[str, Any]) -> None:
    """F2, F14: what cannot be called is refused when the run is asked for, and the field is named."""
    check: Callable[[dict[str, Any]], None] = check_inputs["python"]
    with pytest.raises(Invalid, match="inputs") as refused:
        check(inputs)
    assert refused.value.code == "BAD_INPUTS"
    check({"call": "${scope.function}", "args": {"a": "${steps.one.outputs.a}"}})
