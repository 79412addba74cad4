"""Golden rotary values of facts/vision_pe.md 1B, 1G, 2 and 5, and of users.md d, through the shipped fillings."""

import math

import pytest
import torch

import visionpos as vp
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, Rotation
from visionpos.config import load_encoding

DIMS = Dims(embed_dim=16, num_heads=1, depth=3)  # one head of 16 channels

# Facts 1B: token (y=1, x=2), d=16, theta 10000. Rows without a number in the facts follow from their table of layouts.
ANGLES = {
    "qwen_vl_vision": [1, 0.1, 0.01, 0.001, 2, 0.2, 0.02, 0.002],
    "pixtral_vision": [1, 0.1, 0.01, 0.001, 0.632456, 0.063246, 0.006325, 0.000632],
    "pixtral_mistral": [1, 0.1, 0.01, 0.001, 0.632456, 0.063246, 0.006325, 0.000632],
    "llama4_vision": [3, 0.3, 0.03, 0.003, 2, 0.2, 0.02, 0.002],
    "sam2_memory": [2, 0.2, 0.02, 0.002, 1, 0.1, 0.01, 0.001],
    "step3p7_vision": [2, 0.2, 0.02, 0.002, 1, 0.1, 0.01, 0.001],
    "kimi_k25_vision": [2, 1, 0.2, 0.1, 0.02, 0.01, 0.002, 0.001],
    "kimi_moonvit": [2, 1, 0.2, 0.1, 0.02, 0.01, 0.002, 0.001],
    "pape_rope": [3, 0.3, 0.03, 0.003, 2, 0.2, 0.02, 0.002],
}


@pytest.mark.parametrize("name", ANGLES)
def test_golden_angles(name):
    module = vp.build(load_encoding(name), DIMS).eval()
    turns = module.angles(module.points(Grid(3, 5)))[1 * 5 + 2]
    torch.testing.assert_close(turns, torch.tensor(ANGLES[name]).float(), rtol=2e-6, atol=6e-7)


def test_golden_vjepa2_tiling():
    """Facts 5.13, D=4: e0 at position 1 becomes [.5403 .01 0 0] of norm .54; the meant map keeps norm 1."""
    dims, one = Dims(embed_dim=4, num_heads=1, depth=1), CoordSpec(axes=1)
    e0, at = torch.eye(4)[None, None, :1], torch.tensor([[1.0]])
    released, meant = (
        vp.build(AxialRopeSpec(theta=1e4, coords=one, legacy_tiling=tiled), dims)
        for tiled in (True, False)
    )
    out = released.rotation(released.angles(at)).apply(e0).flatten()
    torch.testing.assert_close(out, torch.tensor([0.5403, 0.0100, 0, 0]), rtol=0, atol=5e-5)
    assert out.norm().item() == pytest.approx(0.54, abs=5e-3)
    right = meant.rotation(meant.angles(at)).apply(e0).flatten()
    torch.testing.assert_close(right, torch.tensor([0.5403, 0.8415, 0, 0]), rtol=0, atol=5e-5)


def test_golden_mirror_of_the_tiling_fault():
    """Facts 5.14: element-repeated angles with half-split partners are no rotation; every pairing of ours is."""
    turns = torch.tensor([[0.3, 1.1, 2.0, 0.7]], dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    repeated = turns.repeat_interleave(2, -1)
    partner = torch.cat([-eye[:, 4:], eye[:, :4]], -1)
    fault = eye * repeated.cos() + partner * repeated.sin()
    assert (fault.T @ fault - eye).abs().max() > 0.3
    for pairing in ("half", "adjacent", "half_per_axis"):
        rotation = Rotation.of(turns, pairing, axes=2)
        matrix = rotation.apply(eye[:, None, None]).squeeze()
        torch.testing.assert_close(matrix.T @ matrix, eye, rtol=0, atol=1e-12)


# facebookresearch/dinov3 at 6876159, RopePositionEmbedding(d=8 a head, base 100) in train(), manual_seed(0), asked
# three times as its block loop does: slow band of token 0, (y, x).
BLOCKS = [
    ({"rescale": 2.0}, [(-0.312533, -0.312533), (-0.455654, -0.455654), (-0.177578, -0.177578)]),
    (
        {"shift": 0.5, "jitter": 2.0, "rescale": 2.0},
        [(-0.136989, -0.066953), (-0.478528, -0.361920), (-0.158545, -0.178496)],
    ),
]


@pytest.mark.parametrize(("how", "expected"), BLOCKS)
def test_golden_dinov3_draws_a_block(how, expected):
    """Facts 1G: a 3-block model draws three times in one forward; the first draw is that of the facts."""
    spec = AxialRopeSpec(
        unit="turns",
        pairing="half",
        coords=CoordSpec(unit="centred", scope="block", **how),
    )
    module = vp.build(spec, Dims(embed_dim=8, num_heads=1, depth=3)).train()
    torch.manual_seed(0)
    points = module.points(Grid(2, 2), draws=3)
    slow = module.angles(points)[:, 0, 0, [1, 3]]  # [draws, shared by heads, token, pair]
    torch.testing.assert_close(slow, torch.tensor(expected), rtol=0, atol=2e-6)
    # Asked layer by layer, as a block loop would, the draws are the same.
    torch.manual_seed(0)
    for layer in range(3):
        turned = module(Grid(2, 2), layer=layer)
        own = torch.atan2(turned.sin[0, [1, 3]], turned.cos[0, [1, 3]])
        torch.testing.assert_close(own, torch.tensor(expected[layer]), rtol=0, atol=4e-6)


def test_golden_phase_precision():
    """users.md D06: 2048 positions, 32 channels: tables in half precision are off by .782 and 1.995; ours are not."""
    spec = AxialRopeSpec(theta=1e4, coords=CoordSpec(axes=1))
    module = vp.build(spec, Dims(embed_dim=32, num_heads=1, depth=1))
    exact = vp.coordinates(Grid(1, 2048), spec.coords).double() * 1e4 ** (
        -torch.arange(16.0, dtype=torch.float64) / 16
    )
    for dtype, off in ((torch.float16, 0.782), (torch.bfloat16, 1.995)):
        position = torch.arange(2048, dtype=dtype)
        freqs = vp.ladder(16, theta=1e4).to(dtype)
        rough = (position[:, None] * freqs).double().cos()
        assert (rough - exact.cos()).abs().max().item() == pytest.approx(off, abs=5e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = module.to(dtype)(Grid(1, 2048))
        assert ours.cos.dtype == torch.float32
        assert (ours.cos.double() - exact.cos()).abs().max() < 3e-4


def test_golden_eva02_rectangle():
    """users.md D09: 24x36 tokens: (r, c) depends on r and c alone, and the transposed image swaps the bands."""
    module = vp.build(load_encoding("eva02"), Dims(embed_dim=64, num_heads=1, depth=1))
    wide = module.angles(module.points(Grid(24, 36))).unflatten(0, (24, 36))
    tall = module.angles(module.points(Grid(36, 24))).unflatten(0, (36, 24))
    assert torch.equal(wide[5, :, :16], wide[5, :1, :16].expand(36, 16))
    assert torch.equal(wide[:, 7, 16:], wide[:1, 7, 16:].expand(24, 16))
    assert torch.equal(tall.transpose(0, 1).roll(16, -1), wide)


def test_golden_pixel_bands_keep_their_span():
    """users.md D04: under pixel bands a larger grid is denser on one span; a wider view is a choice of its own."""
    spec = load_encoding("rotary_embedding_torch_pixel")
    module = vp.build(spec, DIMS)
    ends = [module.angles(module.points(Grid(side, side)))[-1] for side in (4, 8)]
    assert torch.equal(ends[0], ends[1])
    wider = AxialRopeSpec(
        max_freq=10.0, coords=CoordSpec(unit="centred", extent="index", trained_shape=(4, 4))
    )
    far = vp.build(wider, DIMS).points(Grid(8, 8)).amax()
    assert far.item() == pytest.approx(1.75)


def test_golden_aliasing_of_the_fastest_band():
    """Facts 1B: period 1 on (-1, 1): positions half an image apart get one rotation of DINOv3's fastest pair."""
    module = vp.build(load_encoding("dinov3"), DIMS)
    turns = module.angles(torch.tensor([[-0.5, 0.1], [0.5, 0.1]]))
    assert (turns[1, 0] - turns[0, 0]).item() == pytest.approx(2 * math.pi, rel=1e-6)
    assert turns[1, 1] - turns[0, 1] < 2


def test_golden_eva_stretches_or_runs_on():
    """Facts 5.31 (EVA 45), timm.md 1.4: at 32 cells, cell 2i stands where cell i of 16 stood; as an index, at 2i."""
    stretched = load_encoding("eva02")
    index = AxialRopeSpec(theta=1e4)
    for spec, factor in ((stretched, 1), (index, 2)):
        module = vp.build(spec, DIMS)
        far = module.angles(module.points(Grid(32, 32))).unflatten(0, (32, 32))[::2, ::2]
        near = module.angles(module.points(Grid(16, 16))).unflatten(0, (16, 16))
        torch.testing.assert_close(far, factor * near, rtol=1e-6, atol=0)


def test_golden_dinov3_has_no_trained_grid():
    """Facts 5.38 (dinov3 280): weights of 256 px, a config of 224: centred angles ask for neither."""
    spec = load_encoding("dinov3")
    assert spec.coords.trained_shape is None
    module = vp.build(spec, DIMS)
    for side in (14, 16):
        ends = module.angles(module.points(Grid(side, side)))[-1, 0].item()
        assert ends == pytest.approx(2 * math.pi * (1 - 1 / side), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_golden_draws_are_float32(dtype):
    """Facts 1G: DINOv3 draws in its rope's dtype; here a half model draws what a float32 model draws."""
    spec = AxialRopeSpec(coords=CoordSpec(unit="centred", shift=0.5, jitter=2.0, rescale=2.0))
    drawn = []
    for model_dtype in (torch.float32, dtype):
        module = vp.build(spec, DIMS).to(model_dtype).train()
        drawn.append(module.points(Grid(3, 5), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(*drawn)
    coarse = torch.empty(256, dtype=dtype).uniform_(-0.5, 0.5)
    fine = torch.empty(256).uniform_(-0.5, 0.5)
    assert len(coarse.unique()) < len(fine.unique()) == 256


def test_golden_mixed_turns_every_pair_by_both_axes():
    """users.md D02 (rope-vit 27, 3): mixed is x fx + y fy on every pair, a head; axial is one axis a pair."""
    mixed = vp.build(load_encoding("rope_mixed"), Dims(embed_dim=16, num_heads=2, depth=1))
    freqs = mixed.freqs(0).detach()
    assert (freqs != 0).all()
    assert not torch.equal(freqs[0], freqs[1])
    points = mixed.points(Grid(3, 5))
    by_hand = points[:, :1] * freqs[:, None, 0] + points[:, 1:] * freqs[:, None, 1]
    torch.testing.assert_close(mixed.angles(points).detach(), by_hand)
    axial = vp.build(load_encoding("rope_vit_axial"), DIMS).freqs()
    assert ((axial != 0).sum(0) == 1).all()


def test_golden_x_and_y_in_turns_is_a_permutation():
    """users.md D02: [x bands, y bands] and x, y, x, y, ... give one score once q and k are permuted alike."""
    blocks, turns = (
        vp.build(AxialRopeSpec(axis_order=(1, 0), order=order), DIMS)(Grid(3, 5))
        for order in ("contiguous", "interleaved")
    )
    q, k = torch.randn(2, 1, 1, 15, 16)
    moved = torch.arange(16).view(2, 4, 2).transpose(0, 1).flatten()  # pair p of x, pair p of y
    expected = blocks.apply(q) @ blocks.apply(k).mT
    same = turns.apply(q[..., moved]) @ turns.apply(k[..., moved]).mT
    torch.testing.assert_close(same, expected, rtol=1e-5, atol=1e-5)
    assert (turns.apply(q) @ turns.apply(k).mT - expected).abs().max() > 0.5


class Turned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = vp.build(load_encoding("sam2_memory"), DIMS)

    def forward(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.rope(Grid(rows.shape[0], rows.shape[1])).apply(q)


def test_golden_no_complex_number_leaves():
    """users.md D07 (sam2 186): the real form is the complex form to 1e-6; no operation of the graph is complex."""
    q, rows = torch.randn(1, 1, 15, 16), torch.zeros(3, 5)
    module = Turned()
    turns = module.rope.angles(module.rope.points(Grid(3, 5)))
    pairs = torch.view_as_complex(q.unflatten(-1, (8, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(-2)
    torch.testing.assert_close(module(q, rows), expected, rtol=0, atol=1e-6)
    graph = torch.export.export(module, (q, rows)).graph
    values = [node.meta["val"] for node in graph.nodes if torch.is_tensor(node.meta.get("val"))]
    assert len(values) > 5
    assert not [value for value in values if value.is_complex()]
