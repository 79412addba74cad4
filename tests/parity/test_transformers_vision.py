"""transformers' vision towers against the shipped encodings: rotary tables bit equal, learned tables by recipe."""

import pytest
import torch

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, SinCosSpec
from visionpos.config import load_encoding
from visionpos.geometry import rotate as plain_rotate

pytest.importorskip("transformers")

from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.dinov2_with_registers.configuration_dinov2_with_registers import (
    Dinov2WithRegistersConfig,
)
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
)
from transformers.models.dinov3_vit.configuration_dinov3_vit import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (32, 24)]
HEAD_DIM = 32
DIMS = Dims(embed_dim=2 * HEAD_DIM, num_heads=2, depth=1)


def full_width(name: str, hw: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of a shipped encoding in evaluation, one value a channel."""
    return vp.build(load_encoding(name), DIMS).eval()(Grid(*hw)).full_width()


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        (Qwen2VLVisionConfig(embed_dim=64, num_heads=2), Qwen2VLVisionRotaryEmbedding),
        (Qwen2_5_VLVisionConfig(hidden_size=64, num_heads=2), Qwen2_5_VLVisionRotaryEmbedding),
    ],
    ids=["qwen2_vl", "qwen2_5_vl"],
)
def test_reference_qwen(config, rotary, hw):
    """cos and sin of every patch, bit equal."""
    config.num_attention_heads = 2
    ids = vp.coordinates(Grid(*hw)).long()
    theirs = rotary(config)(torch.zeros(1), ids)
    for ours, expected in zip(full_width("qwen_vl_vision", hw), theirs, strict=True):
        assert_close_to(ours, expected, kind="exact")


@pytest.mark.parametrize("hw", [(4, 6), (2, 10), (12, 8)])
def test_reference_qwen_merge_blocks(hw):
    """The towers order patches in 2x2 blocks: the rows of our coordinates, reordered likewise."""
    theirs = get_vision_position_ids(torch.tensor([[1, *hw]]), 2)
    blocks = torch.arange(hw[0] * hw[1]).reshape(hw[0] // 2, 2, hw[1] // 2, 2)
    ours = vp.coordinates(Grid(*hw))[blocks.transpose(1, 2).flatten()]
    assert torch.equal(ours.long(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_qwen_apply(dtype):
    """q and k turned as the tower turns them, [n, heads, head_dim] there: bit equal, halves too."""
    rotation = vp.build(load_encoding("qwen_vl_vision"), DIMS)(Grid(3, 5))
    q, k = torch.randn(2, 1, 2, 15, HEAD_DIM).to(dtype)
    theirs = apply_rotary_pos_emb_vision(
        q[0].transpose(0, 1), k[0].transpose(0, 1), *rotation.full_width()
    )
    for ours, expected in zip(plain_rotate(q, k, rotation), theirs, strict=True):
        assert_close_to(ours[0].transpose(0, 1), expected, kind="exact")
    for ours, expected in zip(vp.rotate(q, k, rotation), theirs, strict=True):
        assert_close_to(ours[0].transpose(0, 1), expected)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_pixtral(hw):
    """One ladder dealt to y and x: cos and sin bit equal."""
    config = PixtralVisionConfig(hidden_size=64, num_attention_heads=2, head_dim=HEAD_DIM)
    ids = vp.coordinates(Grid(*hw)).long()
    theirs = PixtralVisionRotaryEmbedding(config)(torch.zeros(1), ids)
    for ours, expected in zip(full_width("pixtral_vision", hw), theirs, strict=True):
        assert_close_to(ours, expected, kind="exact")


def dinov3(**how) -> DINOv3ViTRopePositionEmbedding:
    config = DINOv3ViTConfig(
        hidden_size=64, num_attention_heads=2, patch_size=4, image_size=16, **how
    )
    return DINOv3ViTRopePositionEmbedding(config)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_dinov3(hw):
    """They multiply coordinates by 2 pi first, we the frequencies: float noise, below 2e-6."""
    theirs = dinov3().eval()(torch.zeros(1, 3, 4 * hw[0], 4 * hw[1]))
    for ours, expected in zip(full_width("dinov3", hw), theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


def test_reference_dinov3_in_training():
    """pos_embed_rescale 2, drawn alike under one seed; their other augmentations too."""
    for how in ({"rescale": 2.0}, {"shift": 0.1, "jitter": 1.5, "rescale": 2.0}):
        theirs = dinov3(**{f"pos_embed_{name}": value for name, value in how.items()}).train()
        spec = vp.AxialRopeSpec(
            unit="turns", pairing="half", coords=vp.CoordSpec(unit="centred", **how)
        )
        torch.manual_seed(3)
        expected = theirs(torch.zeros(1, 3, 12, 20))
        torch.manual_seed(3)
        ours = vp.build(spec, DIMS).train()(Grid(3, 5)).full_width()
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("dim", [8, 64, 768])
def test_reference_mae(hw, dim):
    """vit_mae's builder, in float64: V-JEPA's order; its model swaps the halves, which is MAE's."""
    theirs = build_2d_sinusoidal_position_embedding(*hw, embed_dim=dim)
    dims = Dims(embed_dim=dim, num_heads=1, depth=1)
    vjepa, mae = (vp.build(SinCosSpec(dialect=d), dims)(Grid(*hw)) for d in ("vjepa", "mae"))
    assert_close_to(vjepa, theirs, kind="exact")
    assert_close_to(mae, theirs.roll(dim // 2, dims=-1), kind="exact")


@pytest.mark.parametrize(
    ("embeddings", "recipe"),
    [
        (Dinov2Embeddings(Dinov2Config(hidden_size=8, image_size=28, patch_size=4)), "hf_dinov2"),
        (
            Dinov2WithRegistersEmbeddings(
                Dinov2WithRegistersConfig(hidden_size=8, image_size=28, patch_size=4)
            ),
            "dinov2_reg",
        ),
    ],
    ids=["dinov2", "dinov2_with_registers"],
)
@pytest.mark.parametrize("hw", [(3, 5), (12, 4), (13, 11), (1, 49)])
def test_reference_dinov2(embeddings, recipe, hw):
    """interpolate_pos_encoding of both, on rectangles: float32 noise; (1, 49) has the table's own count."""
    with torch.no_grad():
        table = embeddings.position_embeddings.normal_()[0]
        tokens = torch.zeros(1, 1 + hw[0] * hw[1], 8)
        theirs = embeddings.interpolate_pos_encoding(tokens, 4 * hw[0], 4 * hw[1])[0]
        ours = vp.resample(table, source=Grid(7, 7), target=Grid(*hw), recipe=recipe, prefix=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", [(16, 16), (10, 24), (7, 9), (32, 20), (3, 64)])
def test_reference_siglip2(hw):
    """Antialiased triangles an output coordinate, as we do: equal to float noise."""
    table = torch.randn(16, 16, 8)
    n = hw[0] * hw[1]
    theirs = Siglip2VisionEmbeddings.resize_positional_embeddings(table, torch.tensor([hw]), n + 3)
    flat = table.flatten(0, 1)
    ours = vp.resample(flat, source=Grid(16, 16), target=Grid(*hw), recipe="siglip2_naflex")
    torch.testing.assert_close(ours, theirs[0, :n], rtol=0, atol=6e-6)


@pytest.mark.parametrize(
    ("recipe", "mode", "align_corners"),
    [
        ("qwen3_vl", "bilinear", True),
        ("paddleocr_vl", "bilinear", False),
        ("kimi_k25", "bicubic", False),
    ],
)
@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (60, 36), (48, 48)])
def test_reference_packed_tables(recipe, mode, align_corners, hw):
    """Qwen3-VL, PaddleOCR-VL and Kimi gather taps of a 48x48 table: equal to float noise.

    Float32 places near cell 48 are known to 4e-6 of a cell, in their code and in sample_table.
    """
    table = torch.randn(48 * 48, 8)
    taps, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *hw]]), 48, mode=mode, align_corners=align_corners
    )
    theirs = (table[taps] * weights[..., None]).sum(1)
    ours = vp.sample_table(
        table, vp.coordinates(Grid(*hw)), source=Grid(48, 48), extent_hw=hw, recipe=recipe
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
    whole = vp.resample(table, source=Grid(48, 48), target=Grid(*hw), recipe=recipe)
    torch.testing.assert_close(whole, theirs, rtol=0, atol=5e-5)
