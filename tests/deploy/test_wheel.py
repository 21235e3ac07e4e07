"""The wheel: everything it must contain, and the demo in an environment that does not know the checkout."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from penstock import __version__
from penstock.demo.samples import list_samples
from tests.pages import ROOT

SOURCE = ROOT / "src" / "penstock"
METADATA = f"penstock-{__version__}.dist-info"

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`penstock` of a new environment: the wheel, and the dependencies of this environment without the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    # A folder named in a .pth file is searched, but its own .pth files are not read: those lead to the checkout.
    [installed] = folder.glob("lib/python*/site-packages")
    (installed / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder / "bin" / "penstock"


def run(program: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in *folder*, without the environment variables of the tests."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run([str(program), *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_wheel_is_the_package_and_its_metadata(wheel: Path) -> None:
    """Every file of the package is in the wheel, with the licence; tests, examples and documents are not."""
    with zipfile.ZipFile(wheel) as found:
        names = set(found.namelist())
        metadata = found.read(f"{METADATA}/METADATA").decode()
    files = [file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {f"penstock/{file.relative_to(SOURCE)}" for file in files} <= names
    assert {name.partition("/")[0] for name in names} == {"penstock", METADATA}
    assert not [name for name in names if name.endswith(".pyc") or "/test" in name]
    assert f"{METADATA}/licenses/LICENSE" in names
    assert all(f"Classifier: Programming Language :: Python :: 3.{minor}\n" in metadata for minor in (11, 12, 13))


@pytest.mark.parametrize(
    "name",
    [
        "py.typed",
        "tracking/migrations/0001_pipeline_ddl.sql",
        *(f"{part}/queries.sql" for part in ("tracking", "refdata", "ingest/run", "harvest", "flows")),
        *(f"demo/{sample}" for sample in list_samples()),
    ],
)
def test_the_wheel_contains_more_than_code(wheel: Path, name: str) -> None:
    """Types, migrations, queries and sample files are in the wheel."""
    with zipfile.ZipFile(wheel) as found:
        assert f"penstock/{name}" in found.namelist()


def test_the_installed_program_says_its_version(program: Path, tmp_path: Path) -> None:
    """`penstock --version` works, and the package it runs is the installed one."""
    done = run(program, "--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"penstock {__version__}\n")
    where = run(program.with_name("python"), "-c", "import penstock; print(penstock.__file__)", folder=tmp_path)
    assert Path(where.stdout).is_relative_to(program.parents[1])


def test_the_installed_demo_keeps_every_promise(program: Path, tmp_path: Path) -> None:
    """F14: in an empty folder, with nothing but the wheel and its dependencies, all nine promises hold."""
    done = run(program, "demo", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["passed"] is True
    assert [promise["promise"] for promise in verdict["promises"] if not promise["passed"]] == []
    assert len(verdict["promises"]) == 9


def test_the_installed_package_brings_the_files_of_the_tutorial(program: Path, tmp_path: Path) -> None:
    """`penstock demo --files` writes all sample files."""
    done = run(program, "demo", "--files", "samples", folder=tmp_path)
    assert done.stdout.splitlines() == [f"samples/{sample}" for sample in list_samples()]
    assert all((tmp_path / line).stat().st_size for line in done.stdout.splitlines())
