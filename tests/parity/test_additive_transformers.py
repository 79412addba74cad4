"""transformers' and vit-pytorch's additive positions against ours: DETR's family, buckets, tables, Fourier codes."""

import types

import pytest
import torch
from torch import nn

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, LearnedTable, SinCosSpec
from visionpos.config import load_encoding
from visionpos.encodings import (
    AbsWin,
    AbsWinSpec,
    Factorized,
    FactorizedSpec,
    Fourier,
    FourierSpec,
    LearnedSpec,
    Sine,
    SineSpec,
)
from visionpos.encodings.sincos import dialect_of
from visionpos.encodings.sine import doubled_sine

pytest.importorskip("transformers")

from transformers.models.conditional_detr.modeling_conditional_detr import (
    encode_sinusoidal_position_embedding,
)
from transformers.models.dab_detr.modeling_dab_detr import DabDetrSinePositionEmbedding
from transformers.models.deformable_detr.modeling_deformable_detr import (
    DeformableDetrSinePositionEmbedding,
)
from transformers.models.detr.modeling_detr import (
    DetrLearnedPositionEmbedding,
    DetrSinePositionEmbedding,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionPatchEmbedder
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.omdet_turbo.modeling_omdet_turbo import OmDetTurboHybridEncoder
from transformers.models.perceiver.modeling_perceiver import PerceiverFourierPositionEncoding
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEmbeddings
from transformers.models.sam2.modeling_sam2 import (
    Sam2HieraDetModel,
    Sam2PositionalEmbedding,
    Sam2SinePositionEmbedding,
)
from transformers.models.sam2_video.modeling_sam2_video import get_1d_sine_pe
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEConfig, ViTMAEEmbeddings
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_nearest_position_ids,
)
from vit_pytorch.na_vit import NaViT
from vit_pytorch.simple_vit import posemb_sincos_2d
from vit_pytorch.simple_vit_3d import posemb_sincos_3d

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (25, 40)]
SINES = {
    "detr": DetrSinePositionEmbedding,
    "deformable_detr": DeformableDetrSinePositionEmbedding,
}


def dims(width: int) -> Dims:
    return Dims(embed_dim=width, num_heads=1, depth=1)


def rows(maps: torch.Tensor) -> torch.Tensor:
    """(b, d, h, w) as [b, n, d]."""
    return maps.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dialect", SINES)
def test_reference_sine(dialect, normalize, hw):
    """DETR and Deformable-DETR, 32 channels an axis: float noise (they divide by powers, we multiply)."""
    theirs = SINES[dialect](32, normalize=normalize)((1, 3, *hw), "cpu", torch.float32)
    ours = Sine(SineSpec(dialect=dialect, normalize=normalize), dims(64))(Grid(*hw))
    torch.testing.assert_close(ours, rows(theirs)[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("dialect", SINES)
def test_reference_sine_masks(dialect):
    """Padded batches, mask 1 on the image: equal on valid cells. Facts 8: Deformable's empty columns are noise."""
    mask = torch.zeros(3, 6, 8)
    mask[0, :4, :5] = mask[1, :, :3] = mask[2, :2] = 1
    theirs = rows(SINES[dialect](16, normalize=True)((3, 3, 6, 8), "cpu", torch.float32, mask))
    module = Sine(SineSpec(dialect=dialect), dims(32))
    valid = mask.flatten(1).bool()
    for ours in (module.masked(valid=mask), module.masked(padding=1 - mask)):
        torch.testing.assert_close(ours[valid], theirs[valid], rtol=0, atol=2e-6)
        parts = (ours - theirs).abs().max().item()
        assert (parts > 1) == (dialect == "deformable_detr")


def test_reference_sine_of_others():
    """SAM 2's image code is DETR's; DAB-DETR's is DETR's with base 20."""
    theirs = Sam2SinePositionEmbedding(16, normalize=True)((1, 3, 5, 7), "cpu", torch.float32)
    ours = Sine(load_encoding("detr_sine"), dims(32))(Grid(5, 7))
    torch.testing.assert_close(ours, rows(theirs)[0], rtol=0, atol=2e-6)
    config = types.SimpleNamespace(
        hidden_size=32,
        temperature_height=20,
        temperature_width=20,
        sine_position_embedding_scale=None,
    )
    mask = torch.ones(1, 5, 7)
    theirs = DabDetrSinePositionEmbedding(config)(torch.zeros(1, 3, 5, 7), mask)
    ours = Sine(load_encoding("dab_detr_sine"), dims(32))(Grid(5, 7))
    torch.testing.assert_close(ours, rows(theirs)[0], rtol=0, atol=2e-6)


def test_reference_sine_of_points():
    """Conditional DETR encodes box centres (x, y) by the same code: at() takes (y, x)."""
    centres_xy = torch.rand(2, 9, 2)
    theirs = encode_sinusoidal_position_embedding(centres_xy, 16)
    ours = Sine(SineSpec(), dims(32)).at(centres_xy.flip(-1))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("side", "dtype", "error"),
    [(25, torch.bfloat16, 0.024), (42, torch.bfloat16, 0.034), (25, torch.float16, 0.0047)],
)
def test_reference_sine_in_half(side, dtype, error):
    """1F: transformers builds in the model's dtype: off by .024 (25x25) and .034 (42x42) in bf16; cast last, .002."""
    module = Sine(SineSpec(), dims(256))
    exact = module(Grid(side, side)).double()
    theirs = rows(DetrSinePositionEmbedding(128, normalize=True)((1, 3, side, side), "cpu", dtype))
    assert (theirs[0].double() - exact).abs().max().item() == pytest.approx(error, rel=0.15)
    ours = module(Grid(side, side)).to(dtype).double()
    assert (ours - exact).abs().max() <= 0.002


@pytest.mark.parametrize("hw", [(3, 5), (50, 50), (1, 7)])
def test_reference_learned_detr(hw):
    """DetrLearnedPositionEmbedding: difference 0.0, columns first; its 51st entry does not exist."""
    theirs = DetrLearnedPositionEmbedding(8)
    nn.init.uniform_(theirs.row_embeddings.weight)
    ours = Factorized.from_source(theirs.state_dict(), load_encoding("detr_learned"), dims(16))
    expected = rows(theirs((1, 3, *hw), "cpu", torch.float32))[0]
    assert_close_to(ours(Grid(*hw)), expected, kind="exact")
    with pytest.raises(IndexError):
        theirs((1, 3, 3, 51), "cpu", torch.float32)


def test_reference_doubled():
    """SAM 2 video's get_1d_sine_pe."""
    positions = torch.linspace(0, 1, 8)
    theirs = get_1d_sine_pe(positions, dim=64)
    torch.testing.assert_close(doubled_sine(positions, 64), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hw", [(3, 4), (5, 5), (1, 7)])
def test_reference_omdet_turbo(hw):
    """The column-major builder: difference 0.0, fault included."""
    theirs = OmDetTurboHybridEncoder.build_2d_sincos_position_embedding(hw[1], hw[0], 16)[0]
    ours = vp.build(SinCosSpec(dialect="omdet_turbo"), dims(16))(Grid(*hw))
    assert_close_to(ours, theirs, kind="exact")


@pytest.mark.parametrize("thw", [(2, 3, 5), (1, 1, 7), (4, 3, 1)])
@pytest.mark.parametrize("width", [18, 20, 64])
def test_reference_simple_vit_3d(thw, width):
    """vit-pytorch's 3-D code: difference 0.0."""
    theirs = posemb_sincos_3d(torch.zeros(1, *thw, width))
    ours = vp.build(SinCosSpec(dialect="big_vision", axes=3), dims(width))(Grid(*thw[1:], thw[0]))
    assert_close_to(ours, theirs, kind="exact")


def test_reference_vit_mae_state():
    """vit_mae stores its table as a parameter behind a zero row; the dialect is mae, found from the numbers."""
    config = ViTMAEConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=48, patch_size=16
    )
    theirs = ViTMAEEmbeddings(config)
    theirs.initialize_weights()
    stored = theirs.state_dict()["position_embeddings"]
    assert stored.shape == (1, 10, 32)
    assert (stored[0, 0] == 0).all()
    assert dialect_of(stored, Grid(3, 3), prefix=1) == "mae"
    ours = vp.build(load_encoding("mae"), dims(32))(Grid(3, 3))
    torch.testing.assert_close(ours, stored[0, 1:], rtol=0, atol=1e-6)


SHAPES = [(3, 5), (10, 24), (16, 16), (7, 1), (20, 12)]


def test_reference_siglip2_batch():
    """SigLIP 2 NaFlex resized for every sample, as a batch: float noise; the shipped YAML, its key."""
    table = torch.randn(256, 8)
    module = LearnedTable.from_source(
        {"vision_model.embeddings.position_embedding.weight": table},
        load_encoding("siglip2_naflex"),
        dims(8),
    )
    theirs = Siglip2VisionEmbeddings.resize_positional_embeddings(
        table.reshape(16, 16, 8), torch.tensor(SHAPES), 256
    )
    padded = module.batch([Grid(*hw) for hw in SHAPES], length=256)
    coords = torch.zeros(len(SHAPES), 256, 2)
    valid = torch.zeros(len(SHAPES), 256, dtype=torch.bool)
    for i, hw in enumerate(SHAPES):
        coords[i, : hw[0] * hw[1]] = vp.coordinates(Grid(*hw))
        valid[i, : hw[0] * hw[1]] = True
    points = module.at(coords, torch.tensor(SHAPES), valid=valid)
    for ours in (padded, points):
        torch.testing.assert_close(ours[valid], theirs[valid], rtol=0, atol=6e-6)
        assert (ours[~valid] == 0).all()


@pytest.mark.parametrize("side", [14, 25, 27, 37, 70])
def test_reference_nearest_ids(side):
    """get_vision_nearest_position_ids: the same bucket for every cell at 60 sizes, faults included."""
    table = torch.arange(float(side * side)).unsqueeze(-1)
    for height in range(1, 61):
        hw = (height, max(61 - height, 1))
        theirs = get_vision_nearest_position_ids(torch.tensor([hw]), side)
        ours = vp.sample_table(
            table,
            vp.coordinates(Grid(*hw)),
            source=Grid(side, side),
            extent_hw=hw,
            recipe="nearest_transformers",
        )
        assert torch.equal(ours.flatten().long(), theirs)


@pytest.mark.parametrize("source", [Idefics2VisionEmbeddings, Idefics3VisionEmbeddings])
@pytest.mark.parametrize("side", [25, 27, 70])
def test_reference_idefics(source, side):
    """Idefics 2 and 3, a batch padded to one size: bit equal, faults included; the shipped recipe, its key."""
    config = types.SimpleNamespace(hidden_size=4, image_size=2 * side, patch_size=2, num_channels=1)
    theirs = source(config)
    with torch.no_grad():
        theirs.position_embedding.weight.normal_()
        theirs.patch_embedding.weight.zero_()
        theirs.patch_embedding.bias.zero_()
    spec = LearnedSpec(grid_hw=(side, side), recipe="nearest_idefics2")
    ours = LearnedTable.from_source(theirs.state_dict(), spec, dims(4))
    shapes = [(25, 49), (50, 82), (55, 3), (27, 70)]
    mask = torch.zeros(4, 55, 82, dtype=torch.bool)
    for i, (h, w) in enumerate(shapes):
        mask[i, :h, :w] = True
    with torch.no_grad():
        expected = theirs(torch.zeros(4, 1, 110, 164), mask).unflatten(1, (55, 82))
    for i, (h, w) in enumerate(shapes):
        got = ours.at(vp.coordinates(Grid(h, w)), (h, w))
        assert torch.equal(got, expected[i, :h, :w].flatten(0, 1))


@pytest.mark.parametrize("hw", [(3, 5), (60, 36), (1, 7)])
def test_reference_muse(hw):
    """1C: bilinear with zero padding, border taps lose weight: transformers' muse towers."""
    table = torch.randn(48 * 48, 4)
    taps, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *hw]]), 48, mode="bilinear", padding="zeros"
    )
    theirs = (table[taps] * weights[..., None]).sum(1)
    ours = vp.resample(table, source=Grid(48, 48), target=Grid(*hw), recipe="muse")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("hw", [(8, 8), (16, 24), (24, 8)])
def test_reference_sam2(hw):
    """transformers' SAM 2 trunk: float noise."""
    holder = nn.Module()
    holder.pos_embed = nn.Parameter(torch.randn(1, 8, 5, 7))
    holder.pos_embed_window = nn.Parameter(torch.randn(1, 8, 8, 8))
    expected = Sam2HieraDetModel._get_pos_embed(holder, hw).flatten(0, 2)
    spec = AbsWinSpec(global_hw=(5, 7), recipe="sam2")
    ours = AbsWin.from_source(holder.state_dict(), spec, dims(8))
    torch.testing.assert_close(ours(Grid(*hw)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", [(3, 5), (9, 2)])
def test_reference_pix2struct(hw):
    """Row and column tables indexed from 1, added: difference 0.0 with patches of zero."""
    config = types.SimpleNamespace(
        patch_embed_hidden_size=6, hidden_size=4, seq_len=30, dropout_rate=0.0
    )
    theirs = Pix2StructVisionEmbeddings(config).eval()
    nn.init.zeros_(theirs.patch_projection.weight)
    nn.init.zeros_(theirs.patch_projection.bias)
    cells = vp.coordinates(Grid(*hw))
    patches = torch.cat([cells + 1, torch.zeros(len(cells), 6)], dim=-1)[None]
    spec = FactorizedSpec(table_hw=(30, 30), offset=1)
    ours = Factorized.from_source(theirs.state_dict(), spec, dims(4))
    expected = theirs(patches)[0]
    assert_close_to(ours(Grid(*hw)), expected, kind="exact")
    assert_close_to(ours.at(cells.flip(0)), expected.flip(0), kind="exact")


def test_reference_gemma4():
    """One tensor (2, n, d), columns first, padding at -1 gives zeros: difference 0.0."""
    config = types.SimpleNamespace(hidden_size=4, patch_size=2, position_embedding_size=20)
    theirs = Gemma4VisionPatchEmbedder(config)
    with torch.no_grad():
        theirs.position_embedding_table.normal_()
    ids_xy = torch.stack([torch.randint(0, 20, (2, 9)), torch.randint(0, 20, (2, 9))], dim=-1)
    ids_xy[1, 6:] = -1
    padding = (ids_xy == -1).all(-1)
    expected = theirs._position_embeddings(ids_xy, padding)
    spec = FactorizedSpec(table_hw=(20, 20))
    ours = Factorized.from_source(theirs.state_dict(), spec, dims(4))
    assert_close_to(ours.at(ids_xy.flip(-1), valid=~padding), expected, kind="exact")


def test_reference_navit():
    """vit-pytorch's NaViT: its two tables, absolute, added; start deviation 1."""
    theirs = NaViT(
        image_size=64, patch_size=8, num_classes=2, dim=16, depth=1, heads=1, mlp_dim=16, channels=1
    )
    table = theirs.pos_embed_height
    assert table.std().item() == pytest.approx(1.0, rel=0.2)
    spec = FactorizedSpec(table_hw=(8, 8), std=1.0)
    ours = Factorized.from_source(theirs.state_dict(), spec, dims(16))
    cells = vp.coordinates(Grid(3, 5)).long()
    expected = theirs.pos_embed_height[cells[:, 0]] + theirs.pos_embed_width[cells[:, 1]]
    assert_close_to(ours(Grid(3, 5)), expected, kind="exact")


@pytest.mark.parametrize(
    ("shape", "resolution"), [((5, 7), (14, 20)), ((1, 9), (8, 8)), ((3, 5, 7), (4, 14, 20))]
)
def test_reference_perceiver(shape, resolution):
    """Perceiver's Fourier code on images and clips, coordinates first: float noise at up to 31 rad."""
    theirs = PerceiverFourierPositionEncoding(8, resolution)(list(shape), 1, "cpu", torch.float32)
    spec = FourierSpec(
        dialect="perceiver",
        axes=len(shape),
        bands=8,
        max_resolution=resolution,
        include_coords=True,
    )
    grid = Grid(*shape[-2:], frames=shape[0] if len(shape) == 3 else 1)
    ours = Fourier(spec, dims(17 * len(shape)))(grid)
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-5)


def test_reference_sam2_fourier():
    """transformers' Sam2PositionalEmbedding in float32: the same code of normalised points; its buffer's key."""
    theirs = Sam2PositionalEmbedding(types.SimpleNamespace(scale=1.0, hidden_size=16))
    module = Fourier.from_segment_anything(
        theirs.state_dict(), FourierSpec(dialect="sam"), dims(16)
    )
    shares_xy = torch.rand(2, 3, 5, 2)
    ours = module.at(2 * shares_xy.flip(-1) - 1)
    torch.testing.assert_close(ours, theirs(shares_xy), rtol=0, atol=1e-5)


def test_reference_simple_vit_width_4():
    """1A: one frequency an axis, exponent 0 / 0: vit-pytorch and big_vision give NaN at width 4; here it is refused."""
    assert posemb_sincos_2d(2, 3, 4).isnan().all()
    eight = vp.build(SinCosSpec(dialect="big_vision"), dims(8))(Grid(2, 3))
    torch.testing.assert_close(eight, posemb_sincos_2d(2, 3, 8), rtol=0, atol=1e-6)
    with pytest.raises(vp.PositionError, match=r"embed_dim is 4; .* at least 8"):
        vp.build(SinCosSpec(dialect="big_vision"), dims(4))
