"""timm's rotary embeddings against ours, on rectangles: bit equal wherever the order of operations is the same."""

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
    apply_rot_embed_cat,
)

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, MixedRope, MixedRopeSpec, Rotation
from visionpos.config import load_encoding

RECTANGLES = [(14, 14), (3, 5), (1, 7), (7, 1), (16, 30), (13, 11)]
HEAD_DIM = 64
DIMS = Dims(embed_dim=HEAD_DIM, num_heads=1, depth=1)

# How timm builds its rope, and the spec that says the same. Every row is bit equal.
CAT = {
    "eva02, trained grid": (
        {"temperature": 10000.0, "ref_feat_shape": [16, 16]},
        load_encoding("eva02"),
    ),
    "rope-vit axial, xy": (
        {"temperature": 100.0, "grid_indexing": "xy"},
        load_encoding("rope_vit_axial"),
    ),
    "perception encoder": (
        {
            "temperature": 10000.0,
            "grid_indexing": "xy",
            "grid_offset": 1.0,
            "ref_feat_shape": [24, 24],
        },
        load_encoding("perception_encoder"),
    ),
    "index, ij": ({"temperature": 100.0}, AxialRopeSpec()),
    "index, ij, half": (
        {"temperature": 10000.0, "rotate_half": True},
        load_encoding("qwen_vl_vision"),
    ),
    "offset": (
        {"temperature": 100.0, "grid_offset": 0.5},
        AxialRopeSpec(coords=CoordSpec(offset=0.5)),
    ),
    "rectangular reference": (
        {"temperature": 100.0, "ref_feat_shape": [10, 24]},
        AxialRopeSpec(coords=CoordSpec(extent="trained", trained_shape=(10, 24))),
    ),
    "ends on the border": (
        {"temperature": 100.0, "grid_type": "pixel"},
        AxialRopeSpec(coords=CoordSpec(unit="endpoint")),
    ),
    "centred": (
        {"temperature": 100.0, "grid_type": "centered", "normalize_coords": "max"},
        AxialRopeSpec(coords=CoordSpec(unit="centred", normalize="max")),
    ),
}


def as_timm(rotation: Rotation) -> torch.Tensor:
    """A Rotation as timm's (n, 2 d): sines, then cosines, one value a channel."""
    cos, sin = rotation.full_width()
    return torch.cat([sin, cos], dim=-1)


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", CAT)
def test_reference_cat(name, hw):
    """RotaryEmbeddingCat: difference 0.0."""
    how, spec = CAT[name]
    theirs = RotaryEmbeddingCat(HEAD_DIM, in_pixels=False, **how).get_embed(list(hw))
    assert_close_to(as_timm(vp.build(spec, DIMS)(Grid(*hw))), theirs, kind="exact")


@pytest.mark.parametrize("how", [{"rescale": 2.0}, {"shift": 0.5, "jitter": 1.5, "rescale": 2.0}])
def test_reference_cat_in_training(how):
    """One seed, one augmentation: the draws, their order and the products are timm's, difference 0.0."""
    theirs = RotaryEmbeddingCat(
        HEAD_DIM,
        in_pixels=False,
        temperature=100.0,
        **{f"{name}_coords": value for name, value in how.items()},
    ).train()
    ours = vp.build(AxialRopeSpec(coords=CoordSpec(**how)), DIMS).train()
    torch.manual_seed(11)
    expected = theirs.get_embed([3, 5])
    torch.manual_seed(11)
    assert_close_to(as_timm(ours(Grid(3, 5))), expected, kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("normalize", ["separate", "min", "max"])
def test_reference_dinov3(hw, normalize):
    """RotaryEmbeddingDinoV3: they divide by a period, we multiply by a frequency: float noise, below 4e-6."""
    theirs = RotaryEmbeddingDinoV3(HEAD_DIM, normalize_coords=normalize).get_embed(list(hw))
    coords = CoordSpec(unit="centred", normalize=normalize)
    spec = AxialRopeSpec(unit="turns", pairing="half", coords=coords)
    ours = as_timm(vp.build(spec, DIMS)(Grid(*hw)))
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=4e-6 * max(1, coords_reach(hw, normalize))
    )


def coords_reach(hw: tuple[int, int], normalize: str) -> float:
    """How far "min" runs past 1 on the long axis: angles, and their noise, grow with it."""
    return max(hw) / min(hw) if normalize == "min" else 1.0


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_dinov3_periods(hw):
    """min_period and max_period: float noise, below 2e-5 at angles up to 12.6 rad."""
    theirs = RotaryEmbeddingDinoV3(HEAD_DIM, temperature=None, min_period=0.5, max_period=8.0)
    spec = AxialRopeSpec(periods=(0.5, 8.0), pairing="half", coords=CoordSpec(unit="centred"))
    ours = as_timm(vp.build(spec, DIMS)(Grid(*hw)))
    torch.testing.assert_close(ours, theirs.get_embed(list(hw)), rtol=0, atol=4e-6)


def test_reference_dinov3_in_training():
    """Sapiens 2: rescale 2, drawn alike under one seed."""
    theirs = RotaryEmbeddingDinoV3(HEAD_DIM, rescale_coords=2.0).train()
    ours = vp.build(load_encoding("sapiens2"), DIMS).train()
    for seed in range(3):
        torch.manual_seed(seed)
        expected = theirs.get_embed([3, 5])
        torch.manual_seed(seed)
        torch.testing.assert_close(as_timm(ours(Grid(3, 5))), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_mixed(hw):
    """RotaryEmbeddingMixed: timm's parameter, reordered, gives its table of every layer and head: 0.0."""
    theirs = RotaryEmbeddingMixed(96, depth=3, num_heads=6)
    ours = vp.build(MixedRopeSpec(), Dims(embed_dim=96, num_heads=6, depth=3))
    with torch.no_grad():
        ours.frequencies.copy_(MixedRope.from_timm(theirs.freqs))
        table = theirs.get_embed(list(hw))
        points, wide = ours.points(Grid(*hw)), ours.frequencies.double()
        for layer in range(3):
            direct = ours.rotation(ours.angles(points, layer))
            assert_close_to(as_timm(direct), table[layer], kind="exact")
            # The lattice's product of turns is another rounding of the same values, and a smaller one.
            exact = vp.angles(points.double(), wide[layer])
            over = ours(Grid(*hw), layer=layer)
            off = (over.cos - exact.cos()).square().mean().sqrt()
            theirs_off = (direct.cos - exact.cos()).square().mean().sqrt()
            assert off < max(1.2 * theirs_off, 6e-8)
            assert (over.sin - exact.sin()).abs().max() < 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reference_mixed_start_values(seed):
    """Under one seed both start from the same bits."""
    torch.manual_seed(seed)
    theirs = RotaryEmbeddingMixed(96, depth=3, num_heads=6).freqs
    torch.manual_seed(seed)
    ours = vp.build(load_encoding("rope_mixed"), Dims(embed_dim=96, num_heads=6, depth=3))
    assert torch.equal(ours.frequencies, MixedRope.from_timm(theirs))


@pytest.mark.parametrize("sections", [(24, 20, 20), (12, 12, 12)])
def test_reference_interleaved_sections(sections):
    """timm's M-RoPE of an image, where its strides hold the sections: time stands still, difference 0.0."""
    dim = 2 * sum(sections)
    theirs = RotaryEmbeddingMRope(dim, mrope_section=sections, temperature=10000.0).get_embed(
        [3, 5]
    )
    coords = torch.cat([torch.zeros(15, 1), vp.coordinates(Grid(3, 5))], dim=-1)
    freqs = vp.section_freqs(dim, sections, theta=10000.0, order="interleaved")
    assert_close_to(as_timm(Rotation.of(vp.angles(coords, freqs), "half")), theirs, kind="exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_reference_apply(pairing, dtype, prefix):
    """apply_rot_embed_cat on the rotated part, prefix sliced off as timm's attention does: bit equal."""
    spec = AxialRopeSpec(pairing=pairing)
    rotation = vp.build(spec, DIMS)(Grid(3, 5))
    q = torch.randn(2, 3, prefix + 15, HEAD_DIM).to(dtype)
    body = apply_rot_embed_cat(q[:, :, prefix:], as_timm(rotation), half=pairing == "half")
    expected = torch.cat([q[:, :, :prefix], body], dim=2)
    assert_close_to(rotation.apply(q, prefix=prefix), expected, kind="exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_apply_per_head(dtype):
    """Mixed: [heads, n, pairs] against timm's (heads, n, 2 d): bit equal."""
    theirs = RotaryEmbeddingMixed(96, depth=2, num_heads=6)
    ours = vp.build(MixedRopeSpec(), Dims(embed_dim=96, num_heads=6, depth=2))
    with torch.no_grad():
        ours.frequencies.copy_(MixedRope.from_timm(theirs.freqs))
        q = torch.randn(2, 6, 15, 16).to(dtype)
        expected = apply_rot_embed_cat(q, theirs.get_embed([3, 5])[1])
        direct = ours.rotation(ours.angles(ours.points(Grid(3, 5)), 1))
        assert_close_to(direct.apply(q), expected, kind="exact")
        assert_close_to(ours(Grid(3, 5), layer=1).apply(q), expected)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_gradient_of_apply(pairing):
    """The backward of one rotation is timm's too, to float noise."""
    rotation = vp.build(AxialRopeSpec(pairing=pairing), DIMS)(Grid(3, 5))
    q, weight = torch.randn(2, 2, 3, 15, HEAD_DIM)
    gradients = []
    for run in (
        rotation.apply,
        lambda x: apply_rot_embed_cat(x, as_timm(rotation), half=pairing == "half"),
    ):
        leaf = q.clone().requires_grad_()
        (run(leaf) * weight).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
