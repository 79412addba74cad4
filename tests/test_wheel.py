"""What a user installs: the package, its YAML files and py.typed, and no part of the workshop; the sdist has all."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def built(kind: str, folder: Path) -> Path:
    """The archive that hatchling makes of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built("wheel", tmp_path_factory.mktemp("wheel")))


def test_sdist_holds_what_its_tests_read(tmp_path: Path) -> None:
    """The doctests' conftest.py, the docs and the configs travel with the tests; caches do not."""
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "conftest.py"}
    for folder in ("visionpos", "configs", "tests", "examples", "benchmarks", "docs"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        needed |= {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert needed <= names, sorted(needed - names)
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_wheel_ships_every_config(wheel: zipfile.ZipFile) -> None:
    configs = {
        str(path.relative_to(ROOT))
        for ending in ("*.yaml", "*.json")
        for path in (ROOT / "configs").rglob(ending)
    }
    assert configs
    assert {f"visionpos/{path}" for path in configs} <= set(wheel.namelist())


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "visionpos/py.typed" in names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"visionpos"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_version_is_the_packages(wheel: zipfile.ZipFile) -> None:
    import visionpos

    assert wheel.filename is not None
    assert Path(wheel.filename).name.startswith(f"visionpos-{visionpos.__version__}-")
