"""ONNX through the dynamo exporter, checked in onnxruntime against torch; torch.export with dynamic sizes.

Facts: users.md fact 5 (the attributes with which ONNX Resize equals torch's antialiased bicubic) and H01.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import visionpos as vp
from tests.retrofit.zoo import Case, apart, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporters' own remarks are not ours

NOISE = 2e-6  # relative; measured 3e-7
SIZES = (
    (64, 96),
    (112, 80),
    (48, 176),
    (96, 64),
)  # the first is the table's own; the last has as many tokens
OPEN = ({2: 16 * Dim("rows", min=2, max=32), 3: 16 * Dim("columns", min=2, max=32)},)


def to_onnx(model: nn.Module, x: Tensor, path: Path, shapes: Any = None) -> Any:
    """Export through torch.export and the dynamo exporter; return the graph."""
    with torch.no_grad():
        program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(path))
    return onnx.load(str(path)).graph


def run_onnx(path: Path, x: Tensor) -> Tensor:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def operations(graph: Any) -> set[str]:
    return {node.op_type for node in graph.node}


def attributes(graph: Any, operation: str) -> list[dict[str, Any]]:
    return [
        {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        for node in graph.node
        if node.op_type == operation
    ]


# Fact 5: the attributes with which ONNX Resize is torch's antialiased bicubic.
WANTED: dict[str, Any] = {
    "mode": "cubic",
    "coordinate_transformation_mode": "half_pixel",
    "antialias": 1,
    "exclude_outside": 1,
    "cubic_coeff_a": -0.5,
}


def wanted_of(found: dict[str, Any]) -> dict[str, Any]:
    plain = {key: v.decode() if isinstance(v, bytes) else v for key, v in found.items()}
    return {key: plain[key] for key in WANTED}


def check(path: Path, model: nn.Module, sizes: Any) -> None:
    """Fail unless the graph agrees with torch at every size, and would tell a swapped image."""
    for size in sizes:
        x = image(size)
        with torch.no_grad():
            expected = model(x)
            swapped = apart(model(image(size).flip(-1)), expected)
        assert apart(run_onnx(path, x), expected) < NOISE, size
        assert swapped > 1e-2


@pytest.mark.parametrize(
    "size",
    [
        (96, 64),
        pytest.param((64, 96), marks=pytest.mark.slow),
        pytest.param((80, 48), marks=pytest.mark.slow),
    ],
)
def test_onnx_of_a_frozen_model(size: tuple[int, int], tmp_path: Path) -> None:
    """A table resampled by timm, a rotation of its own a layer, an added table: all are numbers in the file."""
    model = vit(dynamic_img_size=True, depth=1)
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.7)
    retrofit.attach(model, vp.LearnedSpec(grid_hw=(3, 5), std=0.5), strength=0.7)
    path = tmp_path / "frozen.onnx"
    graph = to_onnx(retrofit.freeze(model, size), image(size), path)
    assert operations(graph).isdisjoint({"Resize", "Cos", "Sin", "Range", "If", "Loop"})
    check(path, model, [size])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_onnx_of_a_frozen_eva(name: str, tmp_path: Path) -> None:
    case = Case(name, 14 if "14" in name else 16)
    model, path = case.build(depth=1), tmp_path / "eva.onnx"
    graph = to_onnx(retrofit.freeze(model, case.size_hw), case.image(), path)
    assert operations(graph).isdisjoint({"Cos", "Sin", "Range", "If"})
    check(path, model, [case.size_hw])


def open_model(*, lift: bool, **changes: Any) -> Any:
    model = vit(dynamic_img_size=True, depth=1, **changes)
    model.patch_embed.img_size = None  # timm's message about divisibility would fix the sides
    if lift:
        retrofit.lift_table(model)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.7)
    return model


def test_onnx_of_dynamic_sizes_with_a_lifted_table(tmp_path: Path) -> None:
    """The table is evaluated by plain products: no Resize, so no attribute that a runtime could read its own way."""
    model, path = open_model(lift=True), tmp_path / "lifted.onnx"
    graph = to_onnx(model, image(SIZES[0]), path, OPEN)
    assert operations(graph).isdisjoint({"Resize", "If"})
    check(path, model, SIZES)


@pytest.mark.slow
def test_onnx_of_dynamic_sizes_with_timms_table(tmp_path: Path) -> None:
    """timm resamples the table in every call: one Resize, right at every size, and not to be changed afterwards."""
    model, path = open_model(lift=False), tmp_path / "timm.onnx"
    graph = to_onnx(model, image(SIZES[0]), path, OPEN)
    assert [wanted_of(found) for found in attributes(graph, "Resize")] == [WANTED]
    check(path, model, SIZES)


class Interpolate(nn.Module):
    """What timm does to its table, on a table of 5 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        sides = (x.shape[-2], x.shape[-1])
        return x + F.interpolate(self.table, sides, mode="bicubic", antialias=True)


def test_onnx_of_an_antialiased_resize(tmp_path: Path) -> None:
    """The dynamo exporter writes the attributes of fact 5, for larger and smaller; without them it is wrong by 1 %."""
    model, path = Interpolate(), tmp_path / "resize.onnx"
    open_ = ({2: Dim("h", min=2, max=64), 3: Dim("w", min=2, max=64)},)
    (found,) = attributes(to_onnx(model, torch.zeros(1, 4, 7, 9), path, open_), "Resize")
    assert wanted_of(found) == WANTED
    for sides in ((7, 9), (20, 30), (3, 5), (5, 8)):
        x = torch.zeros(1, 4, *sides)
        with torch.no_grad():
            assert apart(run_onnx(path, x), model(x)) < 1e-5, sides


def resized_by_onnx(table: Tensor, sides: tuple[int, int], **changes: Any) -> Tensor:
    """Return an ONNX Resize of opset 18, made by hand with the attributes of fact 5 but for the changes."""
    settings = {**WANTED, **changes}
    help_ = onnx.helper
    real = onnx.TensorProto.FLOAT
    sizes = onnx.numpy_helper.from_array(np.array([*table.shape[:2], *sides], np.int64), "sizes")
    graph = help_.make_graph(
        [help_.make_node("Resize", ["x", "", "", "sizes"], ["y"], **settings)],
        "resize",
        [help_.make_tensor_value_info("x", real, list(table.shape))],
        [help_.make_tensor_value_info("y", real, [*table.shape[:2], *sides])],
        [sizes],
    )
    model = help_.make_model(graph, opset_imports=[help_.make_opsetid("", 18)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": table.numpy()})[0])


@pytest.mark.parametrize("sides", [(16, 16), (20, 30), (57, 57), (5, 37)])
def test_onnx_resize_attributes(sides: tuple[int, int]) -> None:
    """Fact 5: these attributes are torch's; any other, also the defaults of ONNX, is a difference that matters."""
    table = torch.randn(1, 8, 37, 37, generator=torch.Generator().manual_seed(0))
    wanted = F.interpolate(table, sides, mode="bicubic", antialias=True)
    assert apart(resized_by_onnx(table, sides), wanted) < 1e-5  # measured 4e-6
    assert apart(resized_by_onnx(table, sides, cubic_coeff_a=-0.75), wanted) > 1e-2
    assert apart(resized_by_onnx(table, sides, exclude_outside=0), wanted) > 5e-3
    if min(sides) < 37:  # antialias ignored, as by exporters before opset 18: H01
        assert apart(resized_by_onnx(table, sides, antialias=0), wanted) > 0.2
    ours = vp.resample(
        table[0].flatten(1).T, source=vp.Grid(37, 37), target=vp.Grid(*sides), recipe="timm"
    )
    assert apart(ours, wanted[0].flatten(1).T) < 1e-5


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lift", [False, True])
def test_export_one_program_for_all_sizes(lift: bool, strict: bool) -> None:
    """Also where the example has the table's own grid: the program is not tied to it."""
    model = open_model(lift=lift)
    with torch.no_grad():
        program = torch.export.export(model, (image(SIZES[0]),), dynamic_shapes=OPEN, strict=strict)
        for size in SIZES:
            assert torch.equal(program.module()(image(size)), model(image(size))), size
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    assert not any(torch.is_tensor(value) and value.is_complex() for value in values)


class Table(nn.Module):
    """A learned table alone, on the grid of a map."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        spec = vp.LearnedSpec(grid_hw=(4, 6), recipe=recipe, std=0.5)
        self.encoding = vp.build(spec, vp.Dims(embed_dim=8, num_heads=1, depth=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoding(vp.Grid(*x.shape[-2:])) + x.flatten(-2).T


@pytest.mark.parametrize("example", [(4, 6), (5, 7)])
@pytest.mark.parametrize(
    "recipe",
    [
        "timm",
        "dinov2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("dinov2_reg", "mae", "big_vision")),
    ],
)
def test_export_of_a_table_alone(recipe: str, example: tuple[int, int]) -> None:
    """Every recipe that serves its own grid as it is exports from any example; DINOv2's drift is refused, not baked."""
    model, open_ = Table(recipe), ({1: Dim("h", min=2, max=64), 2: Dim("w", min=2, max=64)},)
    if recipe == "dinov2":
        with pytest.raises(PositionError, match="one exported program cannot do both"):
            torch.export.export(model, (torch.zeros(8, *example),), dynamic_shapes=open_)
        program = torch.export.export(model, (torch.zeros(8, *example),))
        assert torch.equal(
            program.module()(torch.zeros(8, *example)), model(torch.zeros(8, *example))
        )
        return
    program = torch.export.export(model, (torch.zeros(8, *example),), dynamic_shapes=open_)
    for sides in ((4, 6), (6, 4), (9, 13), (2, 12)):
        x = torch.zeros(8, *sides)
        assert torch.equal(program.module()(x), model(x)), sides


@pytest.mark.parametrize("learn", [False, True])
def test_export_strength_is_a_number_or_a_parameter_of_the_program(learn: bool) -> None:
    """A constant is part of the graph for good; a learned one stays a parameter, shared with the model."""
    x, model = image(SIZES[0]), vit(depth=1)
    part = retrofit.attach(
        model, vp.AxialRopeSpec(), strength=0.5, learn_strength=learn, name="mine"
    )
    with torch.no_grad():
        program, half = torch.export.export(model, (x,)), model(x)
        part.set_strength(1.0)
        assert torch.equal(program.module()(x), model(x) if learn else half)
    assert ("visionpos.mine.learned_strength" in program.state_dict) == learn
