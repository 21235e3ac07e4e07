"""F13, F15: the market kinds are a module that is loaded by its name, like a user's module."""

import sys
from pathlib import Path

import pytest

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.kinds.registry import BUILT_IN_MODULES, check_inputs, open_catalogue
from penstock.flows.step import KindContext
from penstock.kernel.errors import BadConfig, Invalid
from penstock.tracking.contract import NAME_LIMIT
from tests.support.types import Json

MARKET = {"OHLCV_EXPORT", "CHART_EXPORT", "LLM_REPORT"}
TARGET: Json = {"tenant": "a", "dictionary": "B", "mode": "DELTA"}


def list_kinds(catalogue: FlowCatalogue, section: FlowsSection) -> set[str]:
    """Return the kinds that the modules of *catalogue* have workers of."""
    return {kind for workers in catalogue.make_workers(KindContext(section)) for kind in workers.handlers}


def test_market_kinds_are_built_in() -> None:
    """F13: their checks exist before any worker is opened, and their workers afterwards."""
    section = FlowsSection()
    catalogue = open_catalogue(section)
    assert set(catalogue.input_checks) == {*check_inputs, *MARKET}
    assert list(catalogue.report_checks) == ["CHART_EXPORT"]
    assert list_kinds(catalogue, section) == MARKET
    assert not MARKET & set(check_inputs)


def test_market_kinds_can_be_a_user_module() -> None:
    """F15: `flows.modules` may name a built-in module: the checks and workers exist once."""
    section = FlowsSection(modules=[*BUILT_IN_MODULES])
    for catalogue in (FlowCatalogue(section), open_catalogue(section)):
        assert set(catalogue.input_checks) >= MARKET
        assert list_kinds(catalogue, section) == MARKET
        assert sum(len(make_worker.handlers) for make_worker in catalogue.make_workers(KindContext(section))) == len(
            MARKET
        )


def test_built_in_modules_do_not_change_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: the current folder is added to the path only for modules of users."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    open_catalogue(FlowsSection())
    assert str(tmp_path) not in sys.path
    (tmp_path / "users_own.py").write_text("")
    open_catalogue(FlowsSection(modules=["users_own"]))
    assert sys.path[-1] == str(tmp_path)


def test_modules_cannot_replace_built_in_checks(tmp_path: Path) -> None:
    """F12, F15: the checks of `http` and of the market kinds stay, whatever a module declares."""
    (tmp_path / "lenient.py").write_text(
        "from penstock.flows.step import ReportCheck, Workers\n"
        "kinds, accept = Workers(), ReportCheck('x', 'y', lambda *_: {})\n"
        "for kind in ('http', 'OHLCV_EXPORT', 'CHART_EXPORT'):\n"
        "    kinds.declare(kind, check_inputs=lambda inputs: None, check_report=accept)\n"
    )
    catalogue, plain = (
        open_catalogue(FlowsSection(modules=[str(tmp_path / "lenient.py")])),
        open_catalogue(FlowsSection()),
    )
    assert catalogue.input_checks == plain.input_checks
    assert catalogue.report_checks["CHART_EXPORT"] is plain.report_checks["CHART_EXPORT"]
    with pytest.raises(Invalid, match="source"):
        catalogue.input_checks["OHLCV_EXPORT"]({})


@pytest.mark.parametrize("name", ["images", "llm"])
def test_missing_token_is_reported_with_the_workers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13: a server without workers needs no secrets."""
    monkeypatch.delenv("MARKET_TOKEN", raising=False)
    section = FlowsSection.model_validate({name: {"token": "env:MARKET_TOKEN"}})
    catalogue = open_catalogue(section)
    with pytest.raises(BadConfig, match=rf"flows\.{name}\.token") as caught:
        catalogue.make_workers(KindContext(section))
    assert caught.value.code == "SECRET_MISSING"


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        ("harvest.run", {"feed": "a"}, [{}, {"feed": "a/b"}, {"feed": "a", "full": "perhaps"}, {"feed": "a", "x": 1}]),
        ("ingest.run", {"supplier": "a"}, [{}, {"supplier": ".."}, {"supplier": ""}, {"supplier": "a" * 65}]),
        (
            "refdata.publish",
            {**TARGET, "items": "${steps.a.outputs.items}"},
            [{}, TARGET, {**TARGET, "mode": "X", "items": []}, {**TARGET, "items": [], "from": {"step": "a"}}],
        ),
        (
            "tracking.wait",
            {"filename": "${scope.f}"},
            [{}, {"filename": "f", "stage": "x"}, {"pollSeconds": 0}, {"filename": "f" * (NAME_LIMIT + 1)}],
        ),
    ],
)
def test_inputs_are_checked_before_a_run(kind: str, good: Json, wrong: list[Json]) -> None:
    """F2, F14: errors are reported with the field when the run is created; a reference is not an error."""
    check_inputs[kind](good)
    for inputs in wrong:
        with pytest.raises(Invalid, match="inputs") as caught:
            check_inputs[kind](inputs)
        assert caught.value.code == "BAD_INPUTS"
