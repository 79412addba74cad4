"""transformers' rotary vision towers against the shipped layouts, tables and turned tensors, on rectangles."""

import pytest
import torch

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.attention import turn
from visionpos.config import load_encoding
from visionpos.geometry import inverse_order, merge_order, rotate_memory, token_order, window_order

pytest.importorskip("transformers")

from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.inkling2 import modeling_inkling2 as inkling2
from transformers.models.inkling2.configuration_inkling2 import Inkling2VisionConfig
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.lfm3_vl import modeling_lfm3_vl as lfm3
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlVisionConfig
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLVisionConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.sam2_video import modeling_sam2_video as sam2
from transformers.models.sam2_video.configuration_sam2_video import Sam2VideoConfig
from transformers.models.sam3 import modeling_sam3 as sam3
from transformers.models.sam3.configuration_sam3 import Sam3ViTConfig
from transformers.models.step3p7 import modeling_step3p7 as step3p7
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.vjepa2 import modeling_vjepa2 as vjepa2
from transformers.models.vjepa2.configuration_vjepa2 import VJEPA2Config
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (32, 24)]
HEAD_DIM = 32
DIMS = Dims(embed_dim=2 * HEAD_DIM, num_heads=2, depth=1)
SIZES = {"hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2}
ONE = torch.zeros(1)


def rotation(name: str, grid: Grid, dims: Dims = DIMS) -> vp.Rotation:
    return vp.build(load_encoding(name), dims).eval()(grid)


def yx(hw: tuple[int, int]) -> torch.Tensor:
    return vp.coordinates(Grid(*hw)).long()


# name -> (cos, sin) of their module for a grid, one value a channel.
TOWERS = {
    "gemma4_rope": lambda hw: gemma4.Gemma4VisionRotaryEmbedding(
        Gemma4VisionConfig(**SIZES, head_dim=HEAD_DIM)
    )(ONE, yx(hw).flip(-1)[None]),
    "kimi_k25_vision": lambda hw: kimi.Kimi_K25VisionRotaryEmbedding(Kimi_K25VisionConfig(**SIZES))(
        ONE, yx(hw)
    ),
    "sam2_memory": lambda hw: sam2.Sam2VideoVisionRotaryEmbedding(
        Sam2VideoConfig(
            memory_attention_hidden_size=HEAD_DIM, memory_attention_num_attention_heads=1
        )
    )(ONE, yx(hw).flip(-1)),
    "qwen_vl_vision": lambda hw: qwen3.Qwen3VLVisionRotaryEmbedding(
        Qwen3VLVisionConfig(hidden_size=2 * HEAD_DIM, num_heads=2)
    )(ONE, yx(hw)),
    "lfm3_vision": lambda hw: lfm3.Lfm3VlVisionRotaryEmbedding(Lfm3VlVisionConfig(**SIZES))(
        ONE, yx(hw)
    ),
    "step3p7_vision": lambda hw: step3p7.Step3p7VisionRotaryEmbedding(Step3p7VisionConfig(**SIZES))(
        ONE, yx(hw)
    ),
    "minimax_m3_vision": lambda hw: minimax.MiniMaxM3VLVisionRotaryEmbedding(
        MiniMaxM3VLVisionConfig(**SIZES)
    )(ONE, vp.coordinates(Grid(*hw), vp.CoordSpec(axes=3)).long()),
}


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", TOWERS)
def test_reference_tables(name, hw):
    """cos and sin of every token and channel with their default theta: bit equal."""
    theirs = TOWERS[name](hw)
    for ours, expected in zip(rotation(name, Grid(*hw)).full_width(), theirs, strict=True):
        assert_close_to(ours, expected.reshape(ours.shape), kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_inkling2(hw):
    """W block, H block, adjacent pairs (facts/mrope.md 5): the layout of SAM 2's memory attention."""
    theirs = inkling2.Inkling2VisionRotaryEmbedding(Inkling2VisionConfig(**SIZES))(ONE, yx(hw))
    for ours, expected in zip(rotation("sam2_memory", Grid(*hw)).full_width(), theirs, strict=True):
        assert_close_to(ours, expected.reshape(ours.shape), kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_gemma4_apply(hw):
    """apply_multidimensional_rope, halves inside each axis: bit equal; the fast path rounds once, they twice."""
    rot = rotation("gemma4_rope", Grid(*hw))
    q = torch.randn(2, 2, hw[0] * hw[1], HEAD_DIM)
    cos, sin = TOWERS["gemma4_rope"](hw)
    ids = yx(hw).flip(-1)[None]
    theirs = gemma4.apply_multidimensional_rope(q.transpose(1, 2), cos, sin, ids).transpose(1, 2)
    assert_close_to(rot.apply(q), theirs, kind="exact")
    torch.testing.assert_close(turn(q, rot), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_minimax_apply(hw):
    """78 of 80 channels turn, i with i + 39."""
    dims = Dims(embed_dim=160, num_heads=2, depth=1)
    rot = rotation("minimax_m3_vision", Grid(*hw), dims)
    q = torch.randn(1, 2, hw[0] * hw[1], 80)
    theirs, _ = minimax.apply_rotary_pos_emb_vision(
        q[0].transpose(0, 1), q[0].transpose(0, 1), *rot.full_width()
    )
    assert_close_to(rot.apply(q)[0].transpose(0, 1), theirs, kind="exact")


@pytest.mark.parametrize("side", [3, 4, 7])
def test_reference_llama4(side):
    """Their port builds squares only: x then y from 1, the class token last at angle 0."""
    config = Llama4VisionConfig(**SIZES, image_size=4 * side, patch_size=4)
    theirs = llama4.Llama4VisionRotaryEmbedding(config)(ONE)  # [n + 1, 1, pairs] complex
    rot = rotation("llama4_vision", Grid(side, side)).padded(suffix=1)
    assert_close_to(rot.cos, theirs[:, 0].real, kind="table")
    assert_close_to(rot.sin, theirs[:, 0].imag, kind="table")
    q = torch.randn(2, side * side + 1, 2, HEAD_DIM)
    expected, _ = llama4.vision_apply_rotary_emb(q, q, theirs)
    ours = rotation("llama4_vision", Grid(side, side)).apply(q.transpose(1, 2), suffix=1)
    assert_close_to(ours.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("hw", "frames", "pointers"), [((3, 5), 1, 0), ((3, 5), 4, 7), ((7, 1), 3, 2)]
)
def test_reference_sam2_memory(hw, frames, pointers):
    """apply_rotary_pos_emb_2d with repeated keys and trailing object pointers, on rectangles: bit equal."""
    n = hw[0] * hw[1]
    cos, sin = TOWERS["sam2_memory"](hw)
    q, k = torch.randn(2, 1, n, HEAD_DIM), torch.randn(2, 1, frames * n + pointers, HEAD_DIM)
    theirs = sam2.apply_rotary_pos_emb_2d(
        q, k, cos, sin, num_k_exclude_rope=pointers, repeat_freqs_k=True
    )
    rot = rotation("sam2_memory", Grid(*hw))
    for ours, expected in zip(rotate_memory(q, k, rot, suffix=pointers), theirs, strict=True):
        assert_close_to(ours, expected, kind="exact")


@pytest.mark.parametrize("side", [2, 6, 9])
def test_reference_sam3_vit(side):
    """Global layers: positions times window / side; theirs are squares."""
    config = Sam3ViTConfig(**SIZES, image_size=4 * side, patch_size=4)
    ids = sam3.Sam3ViTLayer.precompute_positions(config, 0)
    theirs = sam3.Sam3ViTRotaryEmbedding(config)(ONE, ids)
    for ours, expected in zip(
        rotation("sam3_vit", Grid(side, side)).full_width(), theirs, strict=True
    ):
        torch.testing.assert_close(ours, expected.reshape(ours.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "side", "frames"), [(32, 3, 2), (20, 4, 1), (64, 2, 4)])
def test_reference_vjepa2(head_dim, side, frames):
    """apply_rotary_embeddings of the released model, tiling included, on their square clips."""
    config = VJEPA2Config(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        crop_size=4 * side,
        patch_size=4,
        frames_per_clip=2 * frames,
        tubelet_size=2,
    )
    attention = vjepa2.VJEPA2RopeAttention(config, hidden_size=2 * head_dim, num_attention_heads=2)
    n = frames * side * side
    q = torch.randn(1, 2, n, head_dim)
    ids = attention.get_position_ids(torch.zeros(1, n, 2 * head_dim))
    theirs = attention.apply_rotary_embeddings(q, ids)
    dims = Dims(embed_dim=2 * head_dim, num_heads=2, depth=1)
    ours = rotation("vjepa2", Grid(side, side, frames=frames), dims).apply(q)
    assert_close_to(ours, theirs)
    meant = rotation("vjepa2_untiled", Grid(side, side, frames=frames), dims).apply(q)
    assert (meant - theirs).abs().max() > 0.1


@pytest.mark.parametrize("thw", [(1, 4, 6), (2, 10, 4), (3, 12, 8)])
@pytest.mark.parametrize("merge", [1, 2])
def test_reference_merge_order(thw, merge):
    theirs = get_vision_position_ids(torch.tensor([thw]), merge)
    grid = Grid(*thw[1:], frames=thw[0])
    assert torch.equal(vp.coordinates(grid)[merge_order(grid, merge)].long(), theirs)


@pytest.mark.parametrize(
    "thw", [(1, 8, 8), (1, 12, 10), (2, 4, 10), (1, 16, 16), (3, 26, 6), (1, 2, 2)]
)
def test_reference_window_order(thw):
    """get_vision_window_index with window 112, patch 14, merge 2."""
    index, ends = get_vision_window_index(torch.tensor([thw]), 2, 112, 14)
    order, own = window_order(Grid(*thw[1:], frames=thw[0]), 4, merge=2)
    assert torch.equal(order, index)
    assert own.tolist() == ends.tolist()


def test_reference_qwen2_5_tower_rotation():
    """The tower's own steps: blocks, then windows, cos and sin permuted with the tokens; ours selects once."""
    grid = Grid(12, 10)
    ids = get_vision_position_ids(torch.tensor([[1, 12, 10]]), 2)
    index, _ = get_vision_window_index(torch.tensor([[1, 12, 10]]), 2, 112, 14)
    config = qwen2_5.Qwen2_5_VLVisionConfig(hidden_size=2 * HEAD_DIM, num_heads=2)
    config.num_attention_heads = 2
    theirs = qwen2_5.Qwen2_5_VLVisionRotaryEmbedding(config)(ONE, ids)
    cells, _ = window_order(grid, 4, merge=2)
    order = merge_order(grid)[token_order(cells, 4)]
    ours = rotation("qwen_vl_vision", grid).select(order).full_width()
    for one, other in zip(ours, theirs, strict=True):
        moved = other.unflatten(0, (-1, 4))[index].flatten(0, 1)
        assert_close_to(one, moved, kind="exact")
    assert order[inverse_order(order)].tolist() == list(range(120))
