"""`import visionpos` costs torch and nothing heavier."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

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


def test_an_encoding_is_imported_when_its_name_is_used() -> None:
    """A bare import loads no scheme; a name, a spec type and a build load one."""
    code = """
import json, sys
def schemes():
    return sorted(name for name in sys.modules if name.startswith("visionpos.encodings."))
import visionpos as vp
before = schemes()
vp.build(vp.AxialRopeSpec(), vp.Dims(embed_dim=64, num_heads=1, depth=1))
from visionpos.encodings import spec_type
spec_type("peg")
print(json.dumps([before, schemes()]))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    before, after = json.loads(answer.stdout)
    assert before == []
    files = {name.rpartition(".")[2] for name in after}
    assert {"axial", "conditional"} <= files
    assert not files & {"mixed", "swin_table", "prompt", "sincos"}


def test_pixels_are_imported_when_they_are_used(torch_alone: set[str]) -> None:
    """`vlm.pixels` and `vlm.prepare` are there without an import of their own, and cost nothing before."""
    heavy = {"torchvision", "cv2", "PIL"}
    before = top_level_modules("from visionpos import vlm; dir(vlm); hasattr(vlm, 'nothing')")
    assert not (before - torch_alone) & heavy
    after = top_level_modules(
        "from visionpos import vlm; assert vlm.prepare is vlm.pixels.prepare; "
        "assert {'pixels', 'prepare'} <= set(dir(vlm))"
    )
    assert {"torchvision", "PIL"} <= after
    assert "cv2" not in after


@pytest.mark.parametrize("room", ["visionpos", "visionpos.encodings", "visionpos.vlm"])
def test_lazy_names_are_listed_and_strangers_refused(room: str) -> None:
    module = importlib.import_module(room)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'AxailRope'"):
        module.AxailRope  # noqa: B018


def test_the_table_of_encodings_names_every_file_once() -> None:
    """Every kind is its spec's own, every file with a Spec has a row, and the typed unions hold them all."""
    from visionpos import encodings

    types = encodings.spec_types()
    kinds = {
        name: {f.name: f.default for f in fields(spec)}["kind"] for name, spec in types.items()
    }
    assert all(name == kind for name, kind in kinds.items())
    folder = Path(encodings.__file__).parent
    declared = set()
    for file in folder.glob("*.py"):
        declared |= set(re.findall(r"^class (\w+Spec)\b", file.read_text(encoding="utf-8"), re.M))
    assert declared == {spec.__name__ for spec in types.values()}
    assert declared <= set(encodings.__all__)
    assert set(get_args(encodings.EncodingSpec)) == set(types.values())
    source = Path(encodings.__file__).read_text(encoding="utf-8")
    for name, union in (("EncodingSpec", encodings.EncodingSpec), ("Encoding", encodings.Encoding)):
        typed = re.search(rf"^    {name} = \((.*?)\)", source, re.M | re.S)
        assert typed
        assert set(re.findall(r"\w+", typed[1])) == {part.__name__ for part in get_args(union)}
