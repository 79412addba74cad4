"""Golden codes to add: facts/vision_pe.md 1A, 1F, 1H, 2 and 5, facts/users.md a and b, one test a case.

Cases that are tested elsewhere: 5.4, 5.5, 5.32, 5.35, 5.41 and A06 in test_resample; 5.7 and A21 in
encodings/test_additive; A12 and A14 in encodings/test_learned; A16 and B01's goldens in encodings/test_sincos; C09 in
encodings/test_abswin. A17 (fit) is tests/geometry/test_grid's, A19 a size rule of vlm.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import visionpos as vp
from visionpos import Dims, Grid, LearnedSpec, LearnedTable, PositionError, SinCosSpec
from visionpos.config import load_encoding
from visionpos.encodings import FactorizedSpec, Fourier, FourierSpec, SineSpec
from visionpos.encodings.sincos import dialect_of
from visionpos.encodings.sine import doubled_sine


def dims(width: int) -> Dims:
    return Dims(embed_dim=width, num_heads=1, depth=1)


def code(spec, width: int, *hw: int) -> torch.Tensor:
    return vp.build(spec, dims(width))(Grid(*hw)).detach()


# 1F: DETR-style sine.


@pytest.mark.parametrize("side", [2, 4, 7, 50])
def test_golden_detr_ends(side):
    """1F: DETR's last cell is exactly a whole turn, the first is 2 pi / H, none is at 0."""
    fastest = code(SineSpec(), 4, side, 1)[:, :2]
    turn = torch.atan2(fastest[:, 0], fastest[:, 1]) % (2 * math.pi)
    assert turn[0].item() == pytest.approx(2 * math.pi / side, abs=1e-5)
    last = 2 * math.pi - turn[-1].item()
    assert min(last, 2 * math.pi - last) == pytest.approx(0, abs=1e-5)
    assert (turn[:-1] > 1e-3).all()


def test_golden_detr_and_deformable():
    """1F: rows 1 and 2 of 2: DETR at half a turn and a turn, Deformable-DETR at a quarter and three quarters."""
    expected = {
        "detr": [[0, -1], [0, 1]],
        "deformable_detr": [[1, 0], [-1, 0]],
    }
    for dialect, value in expected.items():
        got = code(SineSpec(dialect=dialect), 4, 2, 1)[:, :2]
        torch.testing.assert_close(got, torch.tensor(value).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dialect", ["detr", "deformable_detr"])
def test_golden_order(dialect):
    """1F: [y, x] halves, sine and cosine element-interleaved, exponents 2 (i // 2) / (D / 2)."""
    got = code(SineSpec(dialect=dialect, normalize=False), 8, 3, 5)[
        7
    ]  # row 1, column 2: counts 2 and 3
    expected = [
        wave(count / 10000**exponent)
        for count in (2, 3)
        for exponent in (0.0, 0.5)
        for wave in (math.sin, math.cos)
    ]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-6)


def test_golden_doubled():
    """1F: SAM 2's 1-D code at 1, 8 channels."""
    expected = [0.8415, 0.8415, 0.01, 0.01, 0.5403, 0.5403, 0.9999, 0.9999]
    got = doubled_sine(torch.tensor([1.0]), 8)[0]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=6e-5)


def test_golden_learned_detr():
    """1F: learned DETR is [x (columns), y (rows)], the opposite of the sine code, uniform on [0, 1), 50 entries."""
    module = vp.build(load_encoding("detr_learned"), dims(4))
    assert module.rows.min() >= 0
    assert module.rows.max() < 1
    token = module(Grid(3, 5))[7]  # row 1, column 2
    assert torch.equal(token, torch.cat([module.columns[2], module.rows[1]]))


# 1H: other splits.


def test_golden_navit_bucket():
    """1H: Idefics 2 reads row floor(70 i / h) of its 70 rows; 49 cells read 0, 1, 2, 4, 5, 7, ..."""
    spec = FactorizedSpec(table_hw=(70, 1), coords="fractional")
    module = vp.build(spec, dims(1))
    with torch.no_grad():
        module.rows.copy_(torch.arange(70.0).unsqueeze(-1))
        module.columns.zero_()
    got = module(Grid(49, 1)).flatten()
    assert got[:8].tolist() == [0, 1, 2, 4, 5, 7, 8, 10]
    assert got.tolist() == [70 * i // 49 for i in range(49)]


# What each float32 rule misplaces by one, at the native size: facts 5.35 [V] for the quotient; the reciprocal measured.
MISPLACED = {
    ("nearest_transformers", 27): [10],
    ("nearest_transformers", 25): [11, 12, 13],
    ("nearest_transformers", 37): [3, 6, 10, 12, 27, 31],
    ("nearest_idefics2", 25): [5, 9, 10, 11, 12, 13, 15, 18, 20, 23],
}
FINE = (14, 16, 24, 32, 64, 70)


@pytest.mark.parametrize(("recipe", "side"), MISPLACED)
def test_golden_float32_buckets(recipe, side):
    """Facts 5.35: side 27 puts row 10 into 9; every misplaced row is one too low."""
    ramp = torch.arange(float(side)).unsqueeze(-1)
    cells = vp.coordinates(Grid(side, 1))
    got = vp.sample_table(ramp, cells, source=Grid(side, 1), extent_hw=(side, 1), recipe=recipe)
    wrong = [i for i, row in enumerate(got.flatten().tolist()) if row != i]
    assert wrong == MISPLACED[recipe, side]
    assert all(got[i].item() == i - 1 for i in wrong)


@pytest.mark.parametrize("side", FINE)
@pytest.mark.parametrize("recipe", ["nearest", "nearest_transformers", "nearest_idefics2"])
def test_golden_fine_sizes(recipe, side):
    """Facts 5.35: 14, 16, 24, 32, 64 and 70 are right at their native size by every rule."""
    ramp = torch.arange(float(side)).unsqueeze(-1)
    cells = vp.coordinates(Grid(side, 1))
    got = vp.sample_table(ramp, cells, source=Grid(side, 1), extent_hw=(side, 1), recipe=recipe)
    assert torch.equal(got, ramp)


def test_golden_buckets_of_70_rows():
    """Idefics 2's 70 rows: the reciprocal parts from whole numbers at 25, 49, 50, ... cells, the quotient nowhere."""
    ramp = torch.arange(70.0).unsqueeze(-1)
    parts = {}
    for recipe in ("nearest_idefics2", "nearest_transformers"):
        parts[recipe] = [
            cells
            for cells in range(1, 100)
            if not torch.equal(
                *(
                    vp.resample(ramp, source=Grid(70, 1), target=Grid(cells, 1), recipe=rule)
                    for rule in (recipe, "nearest")
                )
            )
        ]
    assert parts["nearest_idefics2"] == [25, 49, 50, 55, 82, 94, 98]
    assert parts["nearest_transformers"] == []


# 2: Fourier.

B = torch.tensor([[1.0, 0.5], [0.0, -0.25]])  # x first, turns


def sam() -> Fourier:
    state = {"pe_layer.positional_encoding_gaussian_matrix": B}
    return Fourier.from_segment_anything(state, FourierSpec(dialect="sam"), dims(4))


def test_golden_sam_grid():
    """2, SAM: B = [[1, .5], [0, -.25]], 2x3 grid, tokens (0, 0) and (1, 2)."""
    got = sam()(Grid(2, 3))
    for token, expected in (
        (0, [0.866025, -0.965926, -0.5, 0.258819]),
        (5, [-0.866025, 0.965926, -0.5, 0.258819]),
    ):
        torch.testing.assert_close(got[token], torch.tensor(expected), rtol=0, atol=1e-6)


def test_golden_sam_points():
    """2, SAM: pixel (x 100, y 50) in 1024 squared, with the half pixel and without."""
    for half, expected in (
        (0.5, [0.943593, -0.895284, 0.331106, 0.445496]),
        (0.0, [0.941544, -0.895966, 0.336890, 0.444122]),
    ):
        share = torch.tensor([50 + half, 100 + half]) / 1024
        got = sam().at(2 * share - 1)
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("distance", "kernel"), [(16, 0.9794), (32, 0.9204), (64, 0.7218), (128, 0.3009), (256, 0.030)]
)
def test_golden_sam_kernel(distance, kernel):
    """2, SAM: the mean product of two codes at sigma 1, by distance in pixels of 1024; the facts drew 128 pairs."""
    spec = FourierSpec(dialect="sam", bands=20000, project=True)
    module = Fourier(spec, dims(1))
    freqs = module.frequencies.detach()
    offset = torch.tensor([0.0, 2.0 * distance / 1024])
    gaussian = math.exp(-((2 * math.pi * 2 * distance / 1024) ** 2) / 2)
    assert (offset @ freqs).cos().mean().item() == pytest.approx(gaussian, abs=0.02)
    assert kernel == pytest.approx(gaussian, abs=0.07)  # one deviation of a mean of 128 is .0625


# 5: pitfalls.


def test_golden_546_pixels():
    """5.1, A01: a 37-grid at 546 px of patch 14 is 39 patches; a scale factor of 39 / 37 gives 38."""
    grid = Grid.of_image((546, 546), patch=14)
    assert (grid.height, grid.width) == (39, 39)
    table = torch.randn(1, 4, 37, 37)
    assert F.interpolate(table, scale_factor=39 / 37, mode="bicubic").shape[-1] == 38
    module = vp.build(load_encoding("dinov2_learned_37"), dims(4))
    assert module(grid).shape == (39 * 39, 4)


# A01 and fact 6: table side -> grids of which a scale factor loses a row.
LOST = {
    14: [61, 115, 122, 230, 237, 244, 251],
    37: [39, 43, 78, 86, 115, 123, 156, 172, 193, 209, 230, 246],
    27: [61, 111, 117, 122, 127, 217, 222, 227, 234, 239, 244, 249, 254],
    16: [],
}


@pytest.mark.parametrize("side", LOST)
def test_golden_no_row_is_lost(side):
    """A01: floor(M * (n / M)) is n - 1 for these n; a grid that is passed never is."""
    lost = [n for n in range(1, 257) if math.floor(side * (n / side)) != n]
    assert lost == LOST[side]
    table = torch.zeros(side, 1)
    for n in lost:
        out = vp.resample(table, source=Grid(side, 1), target=Grid(n, 1), recipe="dinov2")
        assert out.shape == (n, 1)


def test_golden_rectangular_models():
    """5.2, A02: a model built at a rectangular size keeps its grid; equal grids are the table, bit for bit."""
    spec = LearnedSpec(grid_hw=(20, 30), recipe="dinov2", prefix_rows=1)
    module = LearnedTable(spec, dims(4))
    assert torch.equal(module(Grid(20, 30)), module.table[1:])
    turned = module(Grid(30, 20))
    assert turned.shape == (600, 4)
    assert (turned - module(Grid(20, 30))).abs().max() > 1e-2


def test_golden_spectrograms():
    """A04: a 1024x128 spectrogram at patch 16 is 64x8 = 512 tokens, of which no square root is taken."""
    grid = Grid.of_image((1024, 128), patch=16)
    assert (grid.height, grid.width, grid.size) == (64, 8, 512)
    module = LearnedTable(LearnedSpec(grid_hw=(64, 8)), dims(4))
    assert module(Grid(50, 63)).shape == (3150, 4)
    with pytest.raises(PositionError, match=r"tokens is 512, which is no square"):
        Grid.square(512)


@pytest.mark.parametrize(("side", "factor"), [(56, 1.00304), (112, 1.01216), (160, 1.01489)])
def test_golden_pinned_ends(side, factor):
    """A07: Qwen3-VL pins the ends of its 48 rows; half-pixel sampling scales about the centre by 48 (T-1) / (47 T)."""
    ramp = torch.arange(48.0, dtype=torch.float64).unsqueeze(-1)
    slope = {}
    for recipe in ("qwen3_vl", "paddleocr_vl"):
        out = vp.resample(ramp, source=Grid(48, 1), target=Grid(side, 1), recipe=recipe).flatten()
        slope[recipe] = (out[side // 2 + 5] - out[side // 2 - 5]).item() / 10
    assert slope["paddleocr_vl"] / slope["qwen3_vl"] == pytest.approx(factor, abs=1e-5)


@pytest.mark.parametrize("hw", [(4, 6), (3, 5)])
def test_golden_grid_sample(hw):
    """5.10, A09: a table whose channels are row and column tells (y, x) from (x, y); grid_sample wants (x, y)."""
    spec = LearnedSpec(grid_hw=(8, 8), recipe="paddleocr_vl")
    module = LearnedTable(spec, dims(2))
    with torch.no_grad():
        module.table.copy_(vp.coordinates(Grid(8, 8)))
    got = module(Grid(*hw)).detach()
    share = vp.coordinates(Grid(*hw), vp.CoordSpec(unit="centred"))
    image = module.table.detach().unflatten(0, (8, 8)).permute(2, 0, 1)[None]
    how = {"mode": "bilinear", "padding_mode": "border", "align_corners": False}
    right = F.grid_sample(image, share.flip(-1)[None, None], **how)[0, :, 0].T
    wrong = F.grid_sample(image, share[None, None], **how)[0, :, 0].T
    torch.testing.assert_close(got, right, rtol=0, atol=1e-5)
    assert (got - wrong).abs().max() > 1
    assert (got[:, 0].unflatten(0, hw).diff(dim=0) > 0).all()
    assert (got[:, 1].unflatten(0, hw).diff(dim=1) > 0).all()


def test_golden_leading_zero_rows():
    """5.17 (ControlAR 18): 257 zero rows before 256 cells: the cells are the last 256, and they differ."""
    spec = LearnedSpec(grid_hw=(16, 16), prefix_rows=257)
    state = {"pos_embed": torch.cat([torch.zeros(257, 4), torch.randn(256, 4)])[None]}
    module = LearnedTable.from_source(state, spec, dims(4))
    assert (module.prefix() == 0).all()
    assert module(Grid(16, 16)).std(0).min() > 0.1
    with pytest.raises(PositionError, match=r"has shape \(513, 4\); \(257, 4\)"):
        LearnedTable.from_source(state, LearnedSpec(grid_hw=(16, 16), prefix_rows=1), dims(4))


def test_golden_which_axis_the_channels_hold():
    """5.23, B01: channels 0 to D/2 of MAE vary along columns, whatever its variables are called."""
    for dialect, first in (("mae", "columns"), ("vjepa", "rows")):
        lattice = code(SinCosSpec(dialect=dialect), 16, 3, 5).unflatten(0, (3, 5))[..., :8]
        along_rows = (lattice - lattice[:1]).abs().max().item()
        along_columns = (lattice - lattice[:, :1]).abs().max().item()
        assert (along_rows == 0) == (first == "columns")
        assert (along_columns == 0) == (first == "rows")
    stored = torch.cat([torch.zeros(1, 16), code(SinCosSpec(), 16, 3, 5)])[None]
    assert dialect_of(stored, Grid(3, 5), prefix=1) == "mae"
    swapped = torch.cat([torch.zeros(1, 16), code(SinCosSpec(), 16, 3, 5).roll(8, -1)])[None]
    assert dialect_of(swapped, Grid(3, 5), prefix=1) == "vjepa"


def test_golden_detr_50():
    """5.26 (detr 251): a feature side above 50 is an error that says so, not a CUDA assert."""
    module = vp.build(load_encoding("detr_learned"), dims(4))
    with pytest.raises(PositionError, match=r"grid has 51 columns and the table 50 entries"):
        module(Grid(3, 51))


@pytest.mark.parametrize("hw", [(65, 3), (3, 100), (64, 64)])
def test_golden_beyond_64_cells(hw):
    """5.44: big_vision's NaFlex gives NaN beyond 64 cells a side; here every side is served."""
    module = vp.build(load_encoding("siglip2_naflex"), dims(4))
    assert module(Grid(*hw)).isfinite().all()
    assert module.at(vp.coordinates(Grid(*hw)), hw).isfinite().all()


def test_golden_naflex_bilinear():
    """5.32 (timm PR 2543): the shipped SigLIP 2 is bilinear with antialias: 24 % off bicubic on 10x24."""
    module = vp.build(load_encoding("siglip2_naflex"), dims(64))
    with torch.no_grad():
        module.table.normal_()
    cells = module.cells().detach()
    where = {"source": Grid(16, 16), "target": Grid(10, 24)}
    bilinear, bicubic = (
        vp.resample(cells, recipe=recipe, **where) for recipe in ("siglip2_naflex", "timm")
    )
    torch.testing.assert_close(module(Grid(10, 24)).detach(), bilinear)
    assert ((bicubic - bilinear).norm() / bilinear.norm()).item() == pytest.approx(0.24, rel=0.15)


# Users, a and b.


def test_golden_identity_returns_the_table():
    """A11: at the trained grid a shortcut returned the tokens, so x + x; zero tokens must give the table."""
    module = LearnedTable(LearnedSpec(grid_hw=(3, 5)), dims(4))
    tokens = torch.zeros(2, 15, 4)
    out = module.added(tokens, module(Grid(3, 5)))
    assert torch.equal(out, module.table.expand(2, -1, -1))


def test_golden_one_table_serves_both():
    """A21: 384x384 and 384x768 px: 24x24 and 24x48 cells of one table, no clones picked by token count."""
    module = LearnedTable(LearnedSpec(grid_hw=(24, 24)), dims(4))
    square, wide = module(Grid(24, 24)), module(Grid(24, 48))
    assert (square.shape[0], wide.shape[0]) == (576, 1152)
    assert torch.equal(module(Grid(24, 24)), square)


def test_golden_rt_detr_rows():
    """B02: 3 rows x 4 columns, x is 0, 1, 2, 3 in every row; the original code ran down the columns."""
    for dialect, x, y in (
        ("vjepa", [0, 1, 2, 3] * 3, [0] * 4 + [1] * 4 + [2] * 4),
        ("omdet_turbo", [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 2] * 4),
    ):
        halves = code(SinCosSpec(dialect=dialect), 8, 3, 4).unflatten(-1, (2, 2, 2))
        place = torch.atan2(halves[:, :, 0, 0], halves[:, :, 1, 0]).round().int()
        first, second = place.unbind(-1)
        got = (second, first) if dialect == "vjepa" else (first, second)
        assert (got[0].tolist(), got[1].tolist()) == (x, y)


@pytest.mark.parametrize("side", [2, 5, 32])
def test_golden_half_cells(side):
    """B04 (DN-DETR 51): cell centres (i + 1/2) / N have the mean 1/2; DETR's own positions lie half a cell further."""
    for dialect, mean in (("deformable_detr", 0.5), ("detr", (side + 1) / (2 * side))):
        spec = SineSpec(dialect=dialect, scale=1.0)
        fastest = code(spec, 4, side, 1)[:, :2]
        shares = torch.atan2(fastest[:, 0], fastest[:, 1])
        assert shares.mean().item() == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("hw", [(3, 5), (5, 4)])
def test_golden_mesh_order(hw):
    """B07: a mesh built xy instead of ij shows on rectangles alone: y varies down the rows in every scheme."""
    for spec in (
        SinCosSpec(dialect="vjepa"),
        SineSpec(),
        FourierSpec(dialect="perceiver", bands=4, max_resolution=(10, 10)),
    ):
        lattice = code(spec, 16, *hw).unflatten(0, hw)
        varies = (lattice - lattice[:, :1]).abs().amax((0, 1)) > 1e-6  # along x
        rows = lattice[..., ~varies]
        assert rows.shape[-1] == 8
        assert (rows - rows[:1]).abs().max() > 0.1


def test_golden_entries_of_two_axes():
    """1H: NaViT's two tables hold a vector a side, a full table one a cell, as the paper says of Pix2Struct."""
    counts = {}
    for name, spec in (
        ("factorised", FactorizedSpec(table_hw=(30, 20))),
        ("full", LearnedSpec(grid_hw=(30, 20))),
    ):
        module = vp.build(spec, dims(4))
        counts[name] = sum(weight.shape[0] for weight in module.parameters())
    assert counts == {"factorised": 50, "full": 600}
    published = {"siglip2_naflex": 16 * 16, "idefics2_vision": 70 * 70}
    for name, entries in published.items():
        assert vp.build(load_encoding(name), dims(4)).table.shape[0] == entries


def test_golden_start_of_navit():
    """1H: vit-pytorch's NaViT starts its tables at a deviation of 1, timm's factorised NaFlexVit at .02."""
    for name, std in (("navit_factorized", 1.0), ("naflexvit_factorized", 0.02)):
        rows = vp.build(load_encoding(name), dims(512)).rows
        assert rows.std().item() == pytest.approx(std, rel=0.05)


def test_golden_class_row_of_mae():
    """1A: MAE stores a row of zeros in front, so nothing is added to the class token; the others have no such row."""
    module = vp.build(load_encoding("mae"), Dims(embed_dim=8, num_heads=1, depth=1, prefix=1))
    tokens = torch.randn(2, 1 + 15, 8)
    out = module.added(tokens, module(Grid(3, 5)), prefix=1)
    assert torch.equal(out[:, 0], tokens[:, 0])
    stored = torch.cat([torch.zeros(1, 8), module(Grid(3, 5))])  # as MAE keeps it
    torch.testing.assert_close(out, tokens + stored)


@pytest.mark.parametrize(
    ("coords", "picked"), [("absolute", [0, 1, 2, 3]), ("fractional", [0, 2, 4, 6])]
)
def test_golden_rows_of_a_smaller_grid(coords, picked):
    """1H: tables of 8 rows on 4: NaViT's absolute index, or its share of the side."""
    module = vp.build(FactorizedSpec(table_hw=(8, 1), coords=coords), dims(1))
    with torch.no_grad():
        module.rows.copy_(torch.arange(8.0).unsqueeze(-1))
        module.columns.zero_()
    assert module(Grid(4, 1)).flatten().tolist() == picked


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("tancik", [0.5, 0.991445, 0.866025, 0.130526]),
        ("sam", [0.866025, -0.965926, -0.5, 0.258819]),
    ],
)
def test_golden_tancik_and_sam(dialect, expected):
    """2, Tancik: cosines first, on [0, 1]; SAM: sines first, on [-1, 1], of one matrix at token (0, 0) of 2x3."""
    module = Fourier(FourierSpec(dialect=dialect), dims(4))
    module.load_state_dict({"frequencies": 2 * math.pi * B.flip(0)})
    torch.testing.assert_close(module(Grid(2, 3))[0], torch.tensor(expected), rtol=0, atol=2e-6)
