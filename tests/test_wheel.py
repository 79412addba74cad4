"""What a user installs: the package, its YAML files and py.typed, and no part of the workshop."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_ships_every_config(wheel: zipfile.ZipFile) -> None:
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
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
