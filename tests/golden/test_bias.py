"""Golden biases: facts/vision_pe.md 1D and 2, facts/timm.md 1.5, facts/sequence_and_audit.md 1.2, facts/users.md c."""

import math

import numpy as np
import pytest
import torch

from tests.reference import resampling as oracle
from visionpos import Dims, Grid, resample
from visionpos.encodings import (
    Alibi,
    AlibiSpec,
    Fire,
    FireSpec,
    Kerple,
    KerpleSpec,
    LogBias,
    LogBiasSpec,
    LookHere,
    LookHereSpec,
    OffsetTable,
    OffsetTableSpec,
    SwinTable,
    SwinTableSpec,
    T5Bias,
    T5BiasSpec,
)
from visionpos.geometry.relative import relative_index


def dims(heads: int = 1) -> Dims:
    return Dims(embed_dim=8 * heads, num_heads=heads, depth=1)


def test_golden_relative_index():
    """Facts 2: 2x2 window; BEiT appends 9 (class row), 10 (class column), 11 (class, class)."""
    expected = [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert relative_index(Grid(2, 2)).tolist() == expected
    module = SwinTable(SwinTableSpec(window_hw=(2, 2), class_rows=True), dims())
    module.table.data.copy_(torch.arange(12.0).unsqueeze(-1))
    out = module(Grid(2, 2), prefix=1)[0].int().tolist()
    assert out == [[11, 9, 9, 9, 9], *([10, *row] for row in expected)]


@pytest.mark.parametrize(
    ("form", "pretrained", "window", "far", "expected"),
    [
        ("microsoft", 4, 2, 1, 0.624823),
        ("microsoft", 8, 8, 7, 1.056642),
        ("microsoft", 8, 16, 15, 1.393777),
        ("microsoft", 12, 24, 23, 1.382633),
        ("torchvision", None, 8, 7, 1.056642),
        ("torchvision", None, 16, 15, 1.056642),
        ("cr", None, 2, 1, 0.693147),
    ],
)
def test_golden_far_end(form, pretrained, window, far, expected):
    """Facts 1D and 2: the coordinate of the longest difference of a window."""
    unit = None if pretrained is None else (pretrained, pretrained)
    module = LogBias(LogBiasSpec(form=form, pretrained_window_hw=unit, hidden=1), dims())
    coords = module.coords(
        torch.tensor([[far, -far]], dtype=torch.float64), window_hw=(window, window)
    )
    assert coords[0].tolist() == pytest.approx([expected, -expected], abs=5e-7)


def test_golden_log_coordinates():
    """Facts 2, Swin V2: window 8, and window 24 from 12; users' case C01: one cell of 24 in its own units is .1435."""
    steps = torch.arange(6.0).unsqueeze(-1).expand(-1, 2)
    eight = LogBias(LogBiasSpec(pretrained_window_hw=(8, 8), hidden=1), dims())
    expected = [0, 0.366512, 0.572069, 0.715614, 0.826016, 0.915745]
    assert eight.coords(steps)[:, 0].tolist() == pytest.approx(expected, abs=6e-7)
    twelve = LogBias(LogBiasSpec(pretrained_window_hw=(12, 12), hidden=1), dims())
    expected = [0, 0.262832, 0.431819, 0.556617, 0.655611]
    assert twelve.coords(steps)[:5, 1].tolist() == pytest.approx(expected, abs=6e-7)
    current = LogBias(LogBiasSpec(form="torchvision", hidden=1), dims())
    assert current.coords(steps, window_hw=(24, 24))[1, 0].item() == pytest.approx(0.1435, abs=5e-5)


def test_golden_pretrained_window():
    """Facts 1.5 of timm: 8 to 12 without a record changes a difference's bias by 24 % of its spread; with it, by 0.

    The sheet's figure is one draw; single draws run from .2 to .35.
    """
    change = {}
    for form in ("microsoft", "torchvision"):
        unit = (8, 8) if form == "microsoft" else None
        ratios = []
        for seed in range(8):
            torch.manual_seed(seed)
            module = LogBias(LogBiasSpec(form=form, pretrained_window_hw=unit), dims(6))
            for layer in (module.hidden, module.out):  # PyTorch's start, as in the fact sheet
                layer.reset_parameters()
            small = module.distinct(Grid(8, 8)).unflatten(1, (15, 15))
            large = module.distinct(Grid(12, 12)).unflatten(1, (23, 23))[:, 4:19, 4:19]
            moved = (large - small).square().mean((1, 2)).sqrt() / small.flatten(1).std(1)  # a head
            ratios.append(moved.mean().item())
        change[form] = sum(ratios) / len(ratios)
    assert change["microsoft"] < 1e-6
    assert change["torchvision"] == pytest.approx(0.24, abs=0.04)


# Facts 1.5 of timm, a distance-like table: relative error against the true function, geometric and bicubic. The sheet
# does not say which function of distance; on distance itself both columns come within a third of the printed digits.
ROUTES = [
    (7, 12, 0.395, 0.472),
    (12, 7, 0.016, 0.607),
    (14, 24, 0.392, 0.457),
    (7, 8, 0.086, 0.116),
]


def relief(side: int) -> torch.Tensor:
    """A table of distances, `[(2 side - 1) ** 2, 1]`."""
    steps = torch.arange(1 - side, side, dtype=torch.float64)
    return (steps.unsqueeze(1).square() + steps.square()).sqrt().reshape(-1, 1)


@pytest.mark.parametrize(("old", "new", "geometric", "bicubic"), ROUTES)
def test_golden_geometric_keeps_short_offsets(old, new, geometric, bicubic):
    """Geometric keeps short offsets, bicubic zooms the whole map; shrinking by geometric is almost a crop."""
    grids = {"source": Grid(2 * old - 1, 2 * old - 1), "target": Grid(2 * new - 1, 2 * new - 1)}
    true, errors = relief(new), {}
    for recipe in ("beit", "swin", "timm"):
        moved = resample(relief(old), recipe=recipe, **grids)
        errors[recipe] = ((moved - true).norm() / true.norm()).item()
    assert errors["beit"] == pytest.approx(geometric, rel=0.34)
    assert errors["swin"] == pytest.approx(bicubic, rel=0.34)
    assert errors["timm"] == pytest.approx(
        errors["swin"], rel=0.02
    )  # the sheet's .472 and .471, .607 and .607
    assert errors["beit"] < errors["swin"]


def test_golden_geometric_saturates():
    """Facts 1.5 of timm: 7 to 32, the source's offsets end at 20.78 and 22 to 31 are all the edge's number."""
    module = SwinTable(SwinTableSpec(window_hw=(7, 1), recipe="beit"), dims())
    module.table.data.copy_(torch.arange(-6.0, 7.0).abs().unsqueeze(-1))
    row = module.resized((32, 1)).table[31:, 0]
    assert (row[22:] == 6.0).all()
    assert row[20] < 6.0
    assert row[0] == 0.0
    assert row[1] == 1.0


def test_golden_slopes():
    """Facts 1.2: h=6: 1/4, 1/16, 1/64, 1/256, 1/2, 1/8; h=12 ends .707107, .353553, .176777, .088388."""
    six = Alibi(AlibiSpec(), dims(6)).slopes()
    assert six == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    twelve = Alibi(AlibiSpec(), dims(12)).slopes()
    assert twelve[:8] == [2.0**-step for step in range(1, 9)]
    assert twelve[8:] == pytest.approx([0.707107, 0.353553, 0.176777, 0.088388], abs=5e-7)


# Facts 1.2, transformers' T5Attention: first and last key-minus-query distance of every negative bucket from 8 on.
RANGES = [
    (8, 8, 11), (9, 12, 15), (10, 16, 22), (11, 23, 31), (12, 32, 45), (13, 46, 63), (14, 64, 90), (15, 91, 400),
]  # fmt: skip
POINTS = {
    -200: 15,
    -128: 15,
    -64: 14,
    -32: 12,
    -16: 10,
    -9: 8,
    -1: 1,
    0: 0,
    1: 17,
    8: 24,
    16: 26,
    64: 30,
    91: 31,
}


def test_golden_t5_buckets():
    """Bucket 16 is never produced; the positive side is 16 more."""
    module = T5Bias(T5BiasSpec(buckets=(32,), max_distance=(128,)), dims())
    for bucket, first, last in RANGES:
        for far in (first, last):
            rows = module.buckets(torch.tensor([[float(far)], [-float(far)]]))[:, 0].tolist()
            assert rows == [bucket, bucket + 16]
    for relative, bucket in POINTS.items():
        assert module.buckets(torch.tensor([[-float(relative)]])).item() == bucket
    assert module.unused() == [[16]]


@pytest.mark.parametrize(
    ("form", "p", "a", "points"),
    [
        ("log", 1.0, 0.5, {1: -0.405465, 4: -1.098612, 16: -2.197225}),
        ("power", 0.5, 0.5, {1: -0.5, 4: -1.0, 16: -2.0}),
    ],
)
def test_golden_kerple(form, p, a, points):
    """Facts 1.2: differences along one axis are the paper's 1-D distances."""
    module = Kerple(KerpleSpec(form=form), dims())
    module.set(p=torch.tensor([p]), a=torch.tensor([a]))
    for far, expected in points.items():
        assert module.values(torch.tensor([[0.0, far]])).item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        (10, 9, 0.024098),
        (10, 0, 0.175255),
        (511, 0, 0.999515),
        (1023, 0, 1.0),
        (1023, 1022, 0.020551),
    ],
)
def test_golden_fire(query, key, expected):
    """Facts 1.2, c=.1, L=512: the causal query's index is the reach."""
    module = Fire(FireSpec(), dims())
    far = torch.tensor([float(query - key)])
    assert module.inputs(far, reach=float(query)).item() == pytest.approx(expected, abs=6e-7)


def test_golden_lookhere():
    """Facts 6: slopes 2^-1.. repeated by 4 for directed heads, [1/4, 1/16, 1/64, 1/256] for the others."""
    spec = LookHereSpec(
        views=(("corners", 8), ("none", 4)), global_slope=1.0, layer_slopes=(1.0, 1.0)
    )
    module = LookHere(spec, dims(12))
    assert module.slopes() == [0.5] * 4 + [0.25] * 4 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert module(Grid(3, 5), prefix=1)[:, 0].abs().max() == 0
    hidden = module.values(torch.tensor([-1.0, 0.0]))[
        0
    ].item()  # the key below, a head that looks up and left
    assert hidden == torch.finfo(torch.bfloat16).min
    assert math.isfinite(hidden)


@pytest.mark.parametrize(("old", "rows", "new", "moved"), [(7, 169, 12, 529)])
def test_golden_swin_rows(old, rows, new, moved):
    """Users' case C02: (169, heads) to (529, heads) by bicubic over the 13x13 map a head."""
    module = SwinTable(SwinTableSpec(window_hw=(old, old)), dims(3))
    assert module.table.shape == (rows, 3)
    assert module.resized((new, new)).table.shape == (moved, 3)


@pytest.mark.parametrize(
    ("form", "pretrained", "near", "far"),
    [
        ("microsoft", (12, 12), 0.262832, 1.382633),
        ("torchvision", None, 0.143545, 1.056642),
        ("cr", None, 0.693147, 3.178054),
    ],
)
def test_golden_units_of_a_difference(form, pretrained, near, far):
    """Facts 1D: one cell and 23 cells of a window of 24, after training at 12, in three sources' coordinates."""
    module = LogBias(LogBiasSpec(form=form, pretrained_window_hw=pretrained, hidden=1), dims())
    steps = torch.tensor([[0.0, 1.0], [0.0, 23.0]], dtype=torch.float64)
    coords = module.coords(steps, window_hw=(24, 24))
    assert coords[:, 1].tolist() == pytest.approx([near, far], abs=6e-7)


@pytest.mark.parametrize(
    ("resize", "expected"),
    [("mirrored", [0.0, 0.374, 0.8975, 1.0962]), ("direct", [-0.0882, 0.2071, 0.7929, 1.0882])],
)
def test_golden_where_the_origin_goes(resize, expected):
    """docs/dialects.md: offsets 0 and 1 holding 0 and 1, to 4 offsets; computed by the loops of the oracle."""
    module = OffsetTable(OffsetTableSpec(window_hw=(2, 1), resize=resize), dims())
    module.table.data.copy_(torch.tensor([[0.0], [1.0]]))
    got = module.resized((4, 1)).table[:, 0].tolist()
    assert got == pytest.approx(expected, abs=6e-5)
    line = np.array([0.0, 1.0]) if resize == "direct" else np.array([1.0, 0.0, 1.0])
    side = 4 if resize == "direct" else 7
    loops = oracle.resized(line.reshape(-1, 1, 1), (side, 1), module.spec.recipe)[-4:]
    assert got == pytest.approx(loops.flatten().tolist(), abs=1e-6)


def test_golden_layoutlmv3_divides():
    """Facts 8: a head of 64 channels: LayoutLMv3's bias is LayoutLMv2's, divided by 8."""
    wide, step = Dims(embed_dim=64, num_heads=1, depth=1), torch.tensor([[3.0, -5.0]])
    out = {}
    for scale in ("none", "sqrt_head_dim"):
        module = T5Bias(T5BiasSpec(buckets=(64, 64), max_distance=(256, 256), scale=scale), wide)
        for table in module.tables:
            table.data.fill_(0.25)
        out[scale] = module.values(step).item()
    assert out == {"none": 0.5, "sqrt_head_dim": 0.0625}
