"""Golden resampled tables of facts/vision_pe.md 1C and 5, and facts/timm.md 1.5 and 3."""

import pytest
import torch

import visionpos as vp
from tests.reference import resampling as oracle
from visionpos import Grid

GRIDDED = sorted(oracle.SOURCES)  # every recipe but BEiT's, which wants odd sides


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far a is from b, over b, in L2."""
    return ((a - b).norm() / b.norm()).item()


# Facts 1C: a table whose rows hold 0 1 2 3 (4x4).
RAMP = {
    ("hf_dinov2", 2): [0.40625, 2.59375],
    ("timm", 2): [0.586777, 2.413223],
    ("dinov2_reg", 2): [0.586777, 2.413223],
    ("dinov2", 2): [0.362431, 2.451439],
    ("big_vision", 2): [0, 3],
    ("torchvision", 2): [0, 3],
    ("hf_dinov2", 6): [-0.086806, 0.40625, 1.212963, 1.787037, 2.59375, 3.086806],
    ("mae", 6): [-0.086806, 0.40625, 1.212963, 1.787037, 2.59375, 3.086806],
    ("dinov2", 6): [-0.088480, 0.390981, 1.182597, 1.747006, 2.546706, 3.063792],
    ("paddleocr_vl", 6): [0, 0.5, 1.166667, 1.833333, 2.5, 3],
    ("big_vision", 6): [0, 0.6, 1.2, 1.8, 2.4, 3],
    ("qwen3_vl", 6): [0, 0.6, 1.2, 1.8, 2.4, 3],
    ("torchvision", 6): [0, 0.504, 1.248, 1.752, 2.496, 3],
}


@pytest.mark.parametrize(("recipe", "side"), RAMP)
def test_golden_ramp(recipe, side):
    """Facts 1C: one ramp, six answers; along rows and along columns alike."""
    expected = torch.tensor(RAMP[recipe, side]).float()
    rows = torch.arange(4.0).repeat_interleave(4).unsqueeze(-1)
    columns = torch.arange(4.0).repeat(4).unsqueeze(-1)
    for table, out in ((rows, Grid(side, 3)), (columns, Grid(3, side))):
        got = vp.resample(table, source=Grid(4, 4), target=out, recipe=recipe).unflatten(
            0, out.shape[1:]
        )
        line = got[:, 1, 0] if table is rows else got[1, :, 0]
        # The facts print six digits of a float32 result, whose drift is itself rounded.
        torch.testing.assert_close(line, expected, rtol=0, atol=4e-6)


# Facts 1C, 37x37 white table: target -> (drift against none, no AA against AA, std without AA, std with AA).
WHITE = {
    16: (0.299, 1.928, 0.854, 0.357),
    24: (0.210, 0.859, 0.845, 0.534),
    32: (0.159, 0.271, 0.852, 0.709),
    64: (0.077, 0.085, 0.864, 0.823),
    74: (0.067, 0.090, 0.860, 0.817),
}


@pytest.mark.parametrize("side", WHITE)
def test_golden_white_noise(side):
    """Facts 1C: how far the recipes part on white noise. The seed of the facts is unknown: bands of 10 %."""
    table = torch.randn(37 * 37, 32)
    drift, plain, smooth = (
        vp.resample(table, source=Grid(37, 37), target=Grid(side, side), recipe=recipe)
        for recipe in ("dinov2", "hf_dinov2", "timm")
    )
    got = (relative(drift, plain), relative(plain, smooth), plain.std().item(), smooth.std().item())
    assert got == pytest.approx(WHITE[side], rel=0.1)


# facts/timm.md 3, white tables, relative to timm's result: DINOv2, HF, big_vision, SigLIP 2, bilinear.
PARTING = {
    (14, 14, 24, 24): (0.119, 0.084, 0.314, 0.204, 0.204),
    (16, 16, 37, 37): (0.104, 0.082, 0.390, 0.209, 0.209),
    (37, 37, 16, 16): (2.00, 1.96, 1.60, 0.205, 1.39),
    (14, 14, 10, 10): (0.616, 0.601, 0.537, 0.184, 0.434),
    (14, 14, 16, 28): (0.128, 0.087, 0.297, 0.230, 0.230),
    (24, 24, 24, 12): (0.640, 0.562, 0.753, 0.147, 0.290),
}


@pytest.mark.parametrize("sides", PARTING)
def test_golden_recipes_part(sides):
    """facts/timm.md 3: the same weights, other results. The seed of the facts is unknown: bands of 15 %."""
    source, target = Grid(*sides[:2]), Grid(*sides[2:])
    table = torch.randn(source.size, 64)
    out = {
        recipe: vp.resample(table, source=source, target=target, recipe=recipe)
        for recipe in ("timm", "dinov2", "hf_dinov2", "qwen3_vl", "siglip2_naflex", "paddleocr_vl")
    }
    timm = out.pop("timm")
    assert [relative(other, timm) for other in out.values()] == pytest.approx(
        PARTING[sides], rel=0.15
    )


def test_golden_impulse():
    """facts/timm.md 3: an impulse a quarter of a cell away (both axes) keeps .75201 with AA, .77248 without."""
    impulse = torch.zeros(8, 8, 1)
    impulse[4, 4] = 1
    for recipe, expected in (("timm", 0.75201), ("hf_dinov2", 0.77248)):
        out = vp.resample(
            impulse.flatten(0, 1), source=Grid(8, 8), target=Grid(16, 16), recipe=recipe
        )
        assert out.unflatten(0, (16, 16))[8, 8].item() == pytest.approx(expected, abs=5.1e-6)


def test_golden_naflex_bilinear():
    """Facts 5.32 (timm PR 2543): a white 16x16 table on 10x24 differs 24 % between bicubic and SigLIP 2's bilinear."""
    table = torch.randn(256, 64)
    bicubic, bilinear = (
        vp.resample(table, source=Grid(16, 16), target=Grid(10, 24), recipe=recipe)
        for recipe in ("timm", "siglip2_naflex")
    )
    assert relative(bicubic, bilinear) == pytest.approx(0.24, rel=0.15)


def test_golden_up_and_down_is_lossy():
    """facts/timm.md 3: 14 -> 28 -> 14 leaves 39 % on a white table, so resizing must start from the source."""
    table = torch.randn(196, 64)
    up = vp.resample(table, source=Grid(14, 14), target=Grid(28, 28), recipe="timm")
    down = vp.resample(up, source=Grid(28, 28), target=Grid(14, 14), recipe="timm")
    assert relative(down, table) == pytest.approx(0.39, rel=0.1)


@pytest.mark.parametrize(
    ("side", "smooth", "plain"), [(16, 0.825, 0.87), (10, 0.59, 0.82), (7, 0.41, 0.69)]
)
def test_golden_norm_shrinks(side, smooth, plain):
    """facts/timm.md 3: rms of a resized white 14x14 table, with and without antialias (bands of 6 %)."""
    table = torch.randn(196, 256)
    for recipe, expected in (("timm", smooth), ("hf_dinov2", plain)):
        out = vp.resample(table, source=Grid(14, 14), target=Grid(side, side), recipe=recipe)
        assert out.square().mean().sqrt().item() == pytest.approx(expected, rel=0.06)


def test_golden_ramp_at_the_border():
    """facts/timm.md 3: AA keeps a ramp inside; no AA is off by .047 of a source cell inside when upsampling."""
    ramp = torch.arange(16.0, dtype=torch.float64).unsqueeze(-1)
    for recipe, inside in (("timm", 0.0), ("hf_dinov2", 0.047)):
        out = vp.resample(ramp, source=Grid(16, 1), target=Grid(32, 1), recipe=recipe).flatten()
        exact = (torch.arange(32, dtype=torch.float64) + 0.5) / 2 - 0.5
        error = (out - exact).abs()
        assert error[5:-5].max().item() == pytest.approx(inside, abs=5e-4)
        assert error.max() < 0.3


def test_golden_rows_stay_rows():
    """Facts 5.4 (dinov2 456): a 4x6 table of row numbers, moved to 8x3, still varies along rows alone."""
    table = torch.arange(4.0).repeat_interleave(6).unsqueeze(-1)
    for recipe in sorted(set(GRIDDED) - {"muse"}):  # whose border cells fade to zero
        out = vp.resample(table, source=Grid(4, 6), target=Grid(8, 3), recipe=recipe).unflatten(
            0, (8, 3)
        )
        assert (out - out[:, :1]).abs().max() < 1e-6
        assert (out[:, 0].diff(dim=0) >= -1e-6).all()
        assert out[-1, 0] - out[0, 0] > 2


def test_golden_equal_counts_are_moved():
    """Facts 5.5 (timm PR 2737): (2,8) -> (4,4) has equal counts and must be interpolated all the same."""
    table = torch.randn(16, 8, dtype=torch.float64)
    for recipe in GRIDDED:
        out = vp.resample(table, source=Grid(2, 8), target=Grid(4, 4), recipe=recipe)
        assert not torch.equal(out, table)
        expected = oracle.resized(table.unflatten(0, (2, 8)).numpy(), (4, 4), recipe)
        torch.testing.assert_close(out, torch.from_numpy(expected).flatten(0, 1))


def test_golden_no_slice_of_the_flat_table():
    """Facts 5.41 (vit-pytorch): a 4x4 table used on 2x2 must not return rows 0 to 3."""
    table = torch.arange(16.0).unsqueeze(-1)
    for recipe in GRIDDED:
        out = vp.resample(table, source=Grid(4, 4), target=Grid(2, 2), recipe=recipe).flatten()
        assert out.mean() > 4  # a slice has mean 1.5, the picture 7.5 (5 for nearest's corners)
        assert out[2] - out[0] > 4  # the second row of cells lies below the first


def test_golden_4x9_is_not_6x6():
    """facts/timm.md 3: read as 6x6, a 4x9 table is wrong by 1.28; the grid travels with the table."""
    table = torch.randn(36, 64)
    for hw in ((8, 18), (12, 12)):
        right, wrong = (
            vp.resample(table, source=source, target=Grid(*hw), recipe="timm")
            for source in (Grid(4, 9), Grid(6, 6))
        )
        assert relative(wrong, right) == pytest.approx(1.28, rel=0.06)
    square = vp.resample(table, source=Grid(4, 9), target=Grid(6, 6), recipe="timm")
    assert not torch.equal(square, table)


def test_golden_geometric_saturates():
    """facts/timm.md 1.5: window 7 -> 32: sources end at offset 20.78, offsets 22 to 31 all equal the edge."""
    line = torch.arange(13.0, dtype=torch.float64).unsqueeze(-1)  # offsets -6..6
    out = vp.resample(line, source=Grid(13, 1), target=Grid(63, 1), recipe="beit").flatten()
    centre = 31
    assert (out[centre + 21 :] == 12).all()
    assert out[centre + 20] < 12
    assert out[centre] == 6


@pytest.mark.parametrize("side", [14, 16, 24, 25, 27, 32, 37, 64, 70])
def test_golden_nearest_bucket_at_the_native_size(side):
    """Facts 5.35 (Idefics family): float32 boundaries put row 10 of 27 into bucket 9; floor(i n / h) does not."""
    table = torch.arange(side, dtype=torch.float32).unsqueeze(-1)
    coords = vp.coordinates(Grid(side, 1))
    where = {"source": Grid(side, 1), "recipe": "nearest"}
    assert torch.equal(vp.sample_table(table, coords, extent_hw=(side, 1), **where), table)
    for target in (side + 1, 2 * side, 3 * side - 1, 100):
        out = vp.resample(table, target=Grid(target, 1), **where).flatten()
        assert out.tolist() == [i * side // target for i in range(target)]
