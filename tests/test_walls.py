"""The import contracts can fail: one forbidden import is planted for each, in a copy."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}

# Contract -> file of the copy and the line added to it. `planted_*` files are new.
PLANTS = {
    "floors": ("visionpos/errors.py", "import visionpos.geometry"),
    "siblings": ("visionpos/encodings/planted_a.py", "import visionpos.encodings.planted_b"),
    "front": ("visionpos/geometry/planted.py", "import visionpos"),
    "timm": ("visionpos/geometry/planted.py", "import timm.layers"),
    "transformers": ("visionpos/vlm/planted.py", "from transformers import AutoConfig"),
    "pixels": ("visionpos/vlm/planted.py", "import cv2"),
    "triton": ("visionpos/geometry/planted.py", "def late():\n    import triton.language"),
    "yaml": ("visionpos/geometry/planted.py", "import pydantic.dataclasses"),
    "cli": ("visionpos/geometry/planted.py", "from rich.table import Table"),
    "report": ("visionpos/geometry/planted.py", "import matplotlib.pyplot"),
    "oracles": ("tests/reference/planted.py", "from visionpos.errors import PositionError"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What lint-imports says of a copy with every plant in it."""
    copy = tmp_path_factory.mktemp("walls")
    for folder in ("visionpos", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "visionpos/encodings/planted_b.py").touch()
    for path, line in PLANTS.values():
        with (copy / path).open("a") as file:
            file.write(f"\n{line}\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    answer = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    return answer.stdout


def test_every_contract_has_a_plant() -> None:
    assert PLANTS.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract_can_fail(verdicts: str, contract: str) -> None:
    assert f"{CONTRACTS[contract]} BROKEN" in verdicts
