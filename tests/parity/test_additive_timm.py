"""timm's additive positions against ours: XCiT and EdgeNeXt, Hiera, HieraDet, NaFlexVit, its sin-cos flags."""

import pytest
import timm
import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.edgenext import PositionalEncodingFourier as EdgeNeXtFourier
from timm.models.hiera import Hiera
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexEmbeds
from timm.models.xcit import PositionalEncodingFourier as XcitFourier

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, LearnedSpec, LearnedTable, PositionError, SinCosSpec
from visionpos.config import load_encoding
from visionpos.encodings import (
    AbsWin,
    AbsWinSpec,
    Factorized,
    FactorizedSpec,
    Sine,
    SpatioTemporal,
    SpatioTemporalSpec,
)

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (24, 40)]


def dims(width: int) -> Dims:
    return Dims(embed_dim=width, num_heads=1, depth=1)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Zero-initialised tables hide errors."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("width", [8, 64])
def test_reference_reverse_coord(hw, width):
    """build_sincos2d_pos_embed(reverse_coord=True): difference 0.0, fault included."""
    theirs = build_sincos2d_pos_embed(list(hw), width, reverse_coord=True)
    ours = vp.build(SinCosSpec(dialect="timm_reversed"), dims(width))(Grid(*hw))
    assert_close_to(ours, theirs, kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("source", [XcitFourier, EdgeNeXtFourier])
@pytest.mark.parametrize("width", [10, 48])
def test_reference_xcit(source, hw, width):
    """PositionalEncodingFourier with its projection: float noise."""
    theirs = randomised(source(dim=width))
    expected = theirs(1, *hw) if source is XcitFourier else theirs((1, *hw))
    ours = Sine.from_timm(theirs.state_dict(), load_encoding("xcit_fourier"), dims(width))
    torch.testing.assert_close(
        ours(Grid(*hw)), expected[0].flatten(1).T, rtol=0, atol=2e-5
    )  # sums of 64 unit normals


@pytest.mark.parametrize(
    ("size", "hw"), [((64, 96), (16, 24)), ((32, 32), (8, 8)), ((96, 32), (24, 8))]
)
@pytest.mark.parametrize("global_hw", [(5, 6), (16, 24), (14, 14)])
def test_reference_hiera(size, hw, global_hw):
    """Hiera's absolute-window position, antialiased: float noise on rectangles."""
    theirs = randomised(
        Hiera(
            img_size=size,
            embed_dim=8,
            num_heads=1,
            stages=(1, 1, 1, 1),
            abs_win_pos_embed=True,
            global_pos_size=global_hw,
        )
    )
    expected = theirs._pos_embed(torch.zeros(1, hw[0] * hw[1], 8))[0]
    ours = AbsWin.from_source(theirs.state_dict(), AbsWinSpec(global_hw=global_hw), dims(8))
    torch.testing.assert_close(ours(Grid(*hw)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", [(8, 8), (16, 24), (24, 8), (64, 40)])
@pytest.mark.parametrize("global_hw", [(7, 7), (5, 9)])
def test_reference_hieradet(hw, global_hw):
    """SAM 2's trunk in timm, not antialiased: float noise."""
    theirs = randomised(
        HieraDet(embed_dim=8, num_heads=1, stages=(1, 1, 1, 1), global_pos_size=global_hw)
    )
    expected = theirs._pos_embed(torch.zeros(1, *hw, 8)).flatten(0, 2)
    spec = AbsWinSpec(global_hw=global_hw, recipe="sam2")
    ours = AbsWin.from_source(theirs.state_dict(), spec, dims(8))
    torch.testing.assert_close(ours(Grid(*hw)), expected, rtol=0, atol=1e-5)


def test_reference_hieradet_refuses_too():
    """facts/timm.md 1.2: the tile count is integer-divided, so 12x16 fails there; here with a remedy."""
    theirs = randomised(HieraDet(embed_dim=8, num_heads=1, stages=(1, 1, 1, 1)))
    with pytest.raises(RuntimeError, match="size of tensor"):
        theirs._pos_embed(torch.zeros(1, 12, 16, 8))
    spec = AbsWinSpec(global_hw=(7, 7), recipe="sam2")
    ours = AbsWin.from_source(theirs.state_dict(), spec, dims(8))
    with pytest.raises(PositionError, match=r"grid 12x16 is no multiple of window 8x8"):
        ours(Grid(12, 16))


def test_reference_hiera_video():
    """Hiera's separable position: pos_embed_spatial and pos_embed_temporal, difference 0.0."""
    theirs = randomised(
        Hiera(
            img_size=(4, 32, 64),
            embed_dim=8,
            num_heads=1,
            stages=(1, 1),
            q_pool=1,
            q_stride=(1, 2, 2),
            mask_unit_size=(1, 8, 8),
            patch_kernel=(3, 7, 7),
            patch_stride=(2, 4, 4),
            patch_padding=(1, 3, 3),
            mask_unit_attn=(True, False),
            sep_pos_embed=True,
        )
    )
    frames, height, width = theirs.tokens_spatial_shape
    expected = theirs._pos_embed(torch.zeros(1, frames * height * width, 8))[0]
    spec = SpatioTemporalSpec(grid_thw=(frames, height, width))
    ours = SpatioTemporal.from_source(theirs.state_dict(), spec, dims(8))
    assert_close_to(ours(Grid(height, width, frames)), expected, kind="exact")


def naflex(kind: str, *, square: bool, **how) -> NaFlexEmbeds:
    return randomised(
        NaFlexEmbeds(
            patch_size=4,
            in_chans=1,
            embed_dim=8,
            class_token=False,
            pos_embed=kind,
            pos_embed_grid_size=(5, 6),
            pos_embed_ar_preserving=square,
            **how,
        )
    )


def ours_of(theirs: NaFlexEmbeds, kind: str, *, square: bool, recipe: str):
    aspect = "square" if square else "stretch"
    if kind == "learned":
        spec = LearnedSpec(grid_hw=(5, 6), recipe=recipe, aspect=aspect)
        return LearnedTable.from_source(theirs.state_dict(), spec, dims(8))
    spec = FactorizedSpec(table_hw=(5, 6), coords="fractional", recipe="sam", aspect=aspect)
    return Factorized.from_source(theirs.state_dict(), spec, dims(8))


BATCH = [(3, 7), (5, 6), (9, 2), (4, 4)]


def coords_of(shapes: list[tuple[int, int]], length: int) -> torch.Tensor:
    """(y, x) of every sample, padded with zeros, as timm's collator does."""
    out = torch.zeros(len(shapes), length, 2, dtype=torch.long)
    for i, hw in enumerate(shapes):
        out[i, : hw[0] * hw[1]] = vp.coordinates(Grid(*hw)).long()
    return out


@pytest.mark.parametrize(
    ("how", "recipe"),
    [
        ({"pos_embed_interp_mode": "bicubic"}, "timm"),
        ({"pos_embed_interp_mode": "bilinear"}, "siglip2_naflex"),
        ({"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False}, "paddleocr_vl"),
        (
            {
                "pos_embed_interp_mode": "bilinear",
                "pos_embed_antialias": False,
                "pos_embed_align_corners": True,
            },
            "qwen3_vl",
        ),
    ],
)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_reference_naflex(kind, square, how, recipe):
    """NaFlexVit, in raster order and without drops, where it is right: one image, and a batch of four sizes."""
    theirs = naflex(kind, square=square, **how)
    ours = ours_of(theirs, kind, square=square, recipe=recipe)
    one = (
        theirs._apply_learned_pos_embed if kind == "learned" else theirs._apply_factorized_pos_embed
    )
    for hw in BATCH:
        tokens = torch.zeros(1, hw[0] * hw[1], 8)
        one(tokens, grid_size=list(hw))
        torch.testing.assert_close(ours(Grid(*hw)), tokens[0], rtol=0, atol=1e-5)
    many = (
        theirs._apply_learned_naflex_pos_embed
        if kind == "learned"
        else theirs._apply_factorized_naflex_pos_embed
    )
    tokens = torch.zeros(4, 40, 8)
    many(tokens, patch_coord=coords_of(BATCH, 40))
    padded = ours.batch([Grid(*hw) for hw in BATCH], length=40)
    torch.testing.assert_close(padded, tokens, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_reference_naflex_order(kind):
    """facts/timm.md 2.5: permuting (patch, coordinate) pairs changes timm's codes, and so does dropping; not ours."""
    theirs = naflex(kind, square=False, pos_embed_interp_mode="bilinear")
    ours = ours_of(theirs, kind, square=False, recipe="siglip2_naflex")
    run = (
        theirs._apply_learned_naflex_pos_embed
        if kind == "learned"
        else theirs._apply_factorized_naflex_pos_embed
    )

    def codes(coords):
        tokens = torch.zeros(1, coords.shape[1], 8)
        run(tokens, patch_coord=coords)
        return tokens, ours.at(coords.float(), torch.tensor([[4, 7]]))

    raster = coords_of([(4, 7)], 28)
    order = torch.randperm(28)
    plain, shuffled = codes(raster), codes(raster[:, order])
    torch.testing.assert_close(plain[0], plain[1], rtol=0, atol=1e-5)
    assert (shuffled[0] - plain[0][:, order]).abs().max() > 0.1  # the defect, pinned
    torch.testing.assert_close(shuffled[1], plain[1][:, order])
    kept = raster[:, :21]  # the last row dropped: timm reads a 3x7 grid
    dropped = codes(kept)
    assert (dropped[0] - plain[0][:, :21]).abs().max() > 0.1
    torch.testing.assert_close(dropped[1], plain[1][:, :21])


def test_reference_naflex_grid_sample():
    """timm's grid_sample option is free of order but not antialiased: equal to the recipe that says so."""
    theirs = naflex("learned", square=False, pos_embed_interp_mode="bilinear")
    tokens, coords = torch.zeros(1, 28, 8), coords_of([(4, 7)], 28)[:, torch.randperm(28)]
    theirs._apply_learned_naflex_pos_embed_grid_sample(tokens, patch_coord=coords)
    ours = ours_of(theirs, "learned", square=False, recipe="paddleocr_vl")
    torch.testing.assert_close(ours.at(coords.float(), (4, 7)), tokens, rtol=0, atol=1e-5)


# timm's learned tables: model, key, grid, prefix rows, where the channels stand.
TABLES = [
    ("vit_tiny_patch16_224", "pos_embed", (14, 14), 1, "last"),
    ("deit_tiny_distilled_patch16_224", "pos_embed", (14, 14), 2, "last"),
    ("cait_xxs24_224", "pos_embed", (14, 14), 0, "last"),
    ("convit_tiny", "pos_embed", (14, 14), 0, "last"),
    ("crossvit_tiny_240", "pos_embed_0", (20, 20), 1, "last"),
    ("crossvit_tiny_240", "pos_embed_1", (14, 14), 1, "last"),
    ("eva02_tiny_patch14_224", "pos_embed", (16, 16), 1, "last"),
    ("hiera_tiny_224", "pos_embed", (56, 56), 0, "last"),
    ("naflexvit_base_patch16_siglip", "embeds.pos_embed", (16, 16), 0, "last"),
    ("pit_ti_224", "pos_embed", (27, 27), 0, "first"),
    ("resnet50_clip", "head.pos_embed", (7, 7), 1, "last"),
    ("samvit_base_patch16", "pos_embed", (64, 64), 0, "last"),
    ("tnt_s_patch16_224", "patch_pos", (14, 14), 1, "last"),
    ("tnt_s_patch16_224", "pixel_pos", (4, 4), 0, "first"),
    ("visformer_tiny", "pos_embed1", (28, 28), 0, "first"),
    ("visformer_tiny", "pos_embed3", (7, 7), 0, "first"),
    ("volo_d1_224", "pos_embed", (14, 14), 0, "last"),
]


@pytest.mark.parametrize(("name", "key", "hw", "prefix", "channels"), TABLES)
def test_reference_every_learned_table_loads(name, key, hw, prefix, channels):
    """A model's entry, under its own key and in its own shape, is the table at the trained grid."""
    with torch.device("meta"):
        shape = timm.create_model(name).state_dict()[key].shape
    entry = torch.randn(shape)
    width = shape[1] if channels == "first" else shape[-1]
    ours = LearnedTable.from_source(
        {key: entry}, LearnedSpec(grid_hw=hw, prefix_rows=prefix), dims(width), channels=channels
    )
    rows = (entry.movedim(1, -1) if channels == "first" else entry).reshape(-1, width)
    assert torch.equal(ours(Grid(*hw)), rows[prefix:])
    assert torch.equal(ours.prefix(), rows[:prefix])
