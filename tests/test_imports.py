"""`import visionpos` costs torch and nothing heavier."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    "timm",
    "torchvision",
    "transformers",
    "triton",
    "cv2",
    "PIL",
    "pydantic",
    "yaml",
    "typer",
    "rich",
    "matplotlib",
    "jinja2",
    "safetensors",
    "skimage",
    "skvideo",
}
# What a room may load on top. Optional packages are loaded by the function that needs them.
ROOMS = {
    "visionpos": set(),
    "visionpos.geometry": set(),
    "visionpos.encodings": set(),
    "visionpos.vlm": {"pydantic", "yaml"},
    "visionpos.checkpoint": {"safetensors", "pydantic", "yaml"},
}


def top_level_modules(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return {name.partition(".")[0] for name in json.loads(answer.stdout)}


@pytest.fixture(scope="module")
def torch_alone() -> set[str]:
    return top_level_modules("import torch")


@pytest.mark.parametrize("room", ROOMS)
def test_import_adds_nothing_heavy(torch_alone: set[str], room: str) -> None:
    added = (top_level_modules(f"import {room}") - torch_alone) & HEAVY
    assert added <= ROOMS[room], f"import {room} also loads {sorted(added - ROOMS[room])}"
