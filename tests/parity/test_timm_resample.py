"""Table resizing against timm, PyTorch, torchvision and SciPy: the arithmetic of each named recipe."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torchvision.models.vision_transformer import interpolate_embeddings

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, SinCosSpec

# Old and new sides: enlarged, reduced, mixed, one row, one column, equal counts, primes.
MOVES = [
    ((16, 16), (24, 32)),
    ((16, 16), (10, 24)),
    ((14, 14), (7, 28)),
    ((4, 9), (6, 6)),
    ((37, 37), (16, 13)),
    ((3, 5), (13, 11)),
    ((7, 2), (1, 9)),
    ((5, 11), (23, 1)),
]

# Recipe -> how F.interpolate is called for it.
INTERPOLATE = {
    "timm": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "dinov2_reg": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "hiera": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "hf_dinov2": {"mode": "bicubic", "align_corners": False},
    "mae": {"mode": "bicubic", "align_corners": False},
    "swin": {"mode": "bicubic", "align_corners": False},
    "sam2": {"mode": "bicubic", "align_corners": False},
    "kimi_k25": {"mode": "bicubic", "align_corners": False},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "big_vision": {"mode": "bilinear", "align_corners": True},
    "qwen3_vl": {"mode": "bilinear", "align_corners": True},
    "paddleocr_vl": {"mode": "bilinear", "align_corners": False},
    "siglip2_naflex": {"mode": "bilinear", "antialias": True, "align_corners": False},
    "flexivit": {"mode": "bilinear", "antialias": True, "align_corners": False},
}


def interpolated(table: torch.Tensor, old: tuple[int, int], **how) -> torch.Tensor:
    """F.interpolate of a table `[n, d]`, in timm's memory order.

    Channels-last matters: on contiguous images PyTorch 2.14.1 (CPU) gives one row for all when antialiasing to a
    width of 1.
    """
    image = table.reshape(1, *old, -1).permute(0, 3, 1, 2)
    return F.interpolate(image, **how)[0].permute(1, 2, 0).flatten(0, 1)


@pytest.mark.parametrize(("old", "new"), MOVES)
@pytest.mark.parametrize("recipe", INTERPOLATE)
def test_reference_interpolate(recipe, old, new):
    """F.interpolate in float64: the same weights, to rounding."""
    table = torch.randn(old[0] * old[1], 8, dtype=torch.float64)
    expected = interpolated(table, old, size=new, **INTERPOLATE[recipe])
    ours = vp.resample(table, source=Grid(*old), target=Grid(*new), recipe=recipe)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_reference_dinov2_drift(old, new):
    """The hub models hand scale factors (n + .1) / M to F.interpolate: the sampling drifts, the size is right."""
    table = torch.randn(old[0] * old[1], 8, dtype=torch.float64)
    scales = tuple((n + 0.1) / m for n, m in zip(new, old, strict=True))
    expected = interpolated(table, old, scale_factor=scales, mode="bicubic")
    ours = vp.resample(table, source=Grid(*old), target=Grid(*new), recipe="dinov2")
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), MOVES)
def test_reference_timm(old, new, prefix, dtype):
    """resample_abs_pos_embed on unit normals: below 6e-6 in float32, one rounding apart in halves."""
    table = torch.randn(1, prefix + old[0] * old[1], 8).to(dtype)
    expected = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    ours = vp.resample(table, source=Grid(*old), target=Grid(*new), recipe="timm", prefix=prefix)
    assert torch.equal(ours[:, :prefix], table[:, :prefix])
    if dtype == torch.float32:
        torch.testing.assert_close(ours, expected, rtol=0, atol=6e-6)
    else:
        assert_close_to(ours, expected)


def test_reference_timm_identity():
    """Equal grids: both give the very table back."""
    table = torch.randn(1, 37, 8)
    assert resample_abs_pos_embed(table, [4, 9], [4, 9]) is table
    assert (
        vp.resample(table, source=Grid(4, 9), target=Grid(4, 9), recipe="timm", prefix=1) is table
    )


def test_gradient_of_resample():
    """The gradient of the table is F.interpolate's."""
    table, weight = torch.randn(36, 4, dtype=torch.float64), torch.randn(35, 4, dtype=torch.float64)
    gradients = []
    for run in (
        lambda x: vp.resample(x, source=Grid(4, 9), target=Grid(7, 5), recipe="timm"),
        lambda x: interpolated(x, (4, 9), size=(7, 5), mode="bicubic", antialias=True),
    ):
        leaf = table.clone().requires_grad_()
        (run(leaf) * weight).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")  # two of timm's interpolator
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((7, 7), (12, 12)),
        ((14, 14), (24, 24)),
        ((12, 12), (7, 7)),
        ((7, 7), (8, 8)),
        ((4, 6), (9, 5)),
        ((7, 7), (32, 32)),
        ((5, 8), (5, 12)),
    ],
)
def test_reference_geometric(old, new):
    """resize_rel_pos_bias_table: BEiT's spacing, its three class rows at the end; timm's knots are float32."""
    sizes = [tuple(2 * side - 1 for side in window) for window in (old, new)]
    table = torch.randn(sizes[0][0] * sizes[0][1] + 3, 4)
    shape = (sizes[1][0] * sizes[1][1] + 3, 4)
    expected = resize_rel_pos_bias_table(table, new, shape, old_window_size=old)
    ours = vp.resample(
        table, source=Grid(*sizes[0]), target=Grid(*sizes[1]), recipe="beit", suffix=3
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", [(14, 14), (3, 5), (1, 7), (7, 1), (40, 56)])
@pytest.mark.parametrize("dim", [8, 64, 384])
def test_reference_sincos(hw, dim):
    """build_sincos2d_pos_embed, default flags: difference 0.0."""
    ours = vp.build(SinCosSpec(dialect="timm"), Dims(embed_dim=dim, num_heads=1, depth=1))(
        Grid(*hw)
    )
    assert_close_to(ours, build_sincos2d_pos_embed(list(hw), dim), kind="exact")


@pytest.mark.parametrize("hw", [(3, 5), (16, 9)])
def test_reference_sincos_interleaved(hw):
    """facts/timm.md 1.3: timm's interleave flag gives V-JEPA's blocks, and MAE's with the halves swapped."""
    theirs = build_sincos2d_pos_embed(list(hw), 32, interleave_sin_cos=True)
    dims = Dims(embed_dim=32, num_heads=1, depth=1)
    vjepa, mae = (vp.build(SinCosSpec(dialect=d), dims)(Grid(*hw)) for d in ("vjepa", "mae"))
    torch.testing.assert_close(vjepa, theirs, rtol=0, atol=2e-6)
    torch.testing.assert_close(mae, theirs.roll(16, dims=-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("old", "new"), [(4, 6), (14, 24), (14, 9)])
def test_reference_torchvision(old, new):
    """torchvision's interpolate_embeddings (squares only): corners pinned, cubic."""
    table = torch.randn(1, 1 + old * old, 8)
    state = OrderedDict([("encoder.pos_embedding", table)])
    expected = interpolate_embeddings(new * 16, 16, state)["encoder.pos_embedding"]
    ours = vp.resample(
        table, source=Grid(old, old), target=Grid(new, new), recipe="torchvision", prefix=1
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("old", "new"), [move for move in MOVES if 1 not in move[1]])
def test_reference_big_vision(old, new):
    """big_vision zooms at load time by SciPy's order 1, on rectangles of more than one cell a side."""
    ndimage = pytest.importorskip("scipy.ndimage")
    table = torch.randn(*old, 3, dtype=torch.float64)
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    expected = torch.from_numpy(np.asarray(ndimage.zoom(table.numpy(), zoom, order=1)))
    ours = vp.resample(
        table.flatten(0, 1), source=Grid(*old), target=Grid(*new), recipe="big_vision"
    )
    torch.testing.assert_close(ours, expected.flatten(0, 1), rtol=1e-10, atol=1e-10)
