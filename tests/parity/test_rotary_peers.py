"""timm's other rotary classes, rotary-embedding-torch and vit-pytorch against ours, and draws under one seed."""

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbedding,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
    apply_rot_embed_cat,
)
from timm.models.gemma4_vit import Gemma4RotaryEmbedding2D, apply_multidimensional_rope

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, MixedRope, MixedRopeSpec, Rotation
from visionpos.config import load_encoding
from visionpos.encodings import SectionRopeSpec

RECTANGLES = [(14, 14), (3, 5), (1, 7), (7, 1), (16, 30), (13, 11)]
HEAD_DIM = 64
DIMS = Dims(embed_dim=HEAD_DIM, num_heads=1, depth=3)
AUGMENT = {"shift": 0.5, "jitter": 1.5, "rescale": 2.0}


def as_timm(rotation: Rotation) -> torch.Tensor:
    """A Rotation as timm's (n, 2 d): sines, then cosines, one value a channel."""
    cos, sin = rotation.full_width()
    return torch.cat([sin, cos], dim=-1)


def timm_names(how: dict[str, float]) -> dict[str, float]:
    return {f"{name}_coords": value for name, value in how.items()}


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_timm_pixel(hw):
    """Cat with in_pixels left at its default: bit equal, with the trap's 3.1416 to 351.858 bands."""
    theirs = RotaryEmbeddingCat(HEAD_DIM).get_embed(list(hw))
    assert_close_to(
        as_timm(vp.build(load_encoding("timm_pixel"), DIMS)(Grid(*hw))), theirs, kind="exact"
    )


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_timm_linear_pixel(hw):
    theirs = RotaryEmbeddingCat(HEAD_DIM, linear_bands=True, max_res=56).get_embed(list(hw))
    spec = AxialRopeSpec(max_freq=56.0, coords=CoordSpec(unit="endpoint"))
    assert_close_to(as_timm(vp.build(spec, DIMS)(Grid(*hw))), theirs, kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("half", [False, True])
def test_reference_timm_base(hw, half):
    """RotaryEmbedding: sine and cosine apart."""
    theirs = RotaryEmbedding(HEAD_DIM, in_pixels=False, temperature=100.0, rotate_half=half)
    sin, cos = theirs.get_embed(list(hw))
    spec = AxialRopeSpec(pairing="half" if half else "adjacent")
    ours = vp.build(spec, DIMS)(Grid(*hw)).full_width()
    assert_close_to(ours[0], cos, kind="exact")
    assert_close_to(ours[1], sin, kind="exact")


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("sections", [(8, 12, 12), (24, 20, 20), (4, 3, 9), (0, 40, 40)])
def test_reference_mrope(hw, sections):
    """GenLIP: clamped strides, time still; the table and the turned tensor, bit equal."""
    theirs = RotaryEmbeddingMRope(HEAD_DIM, mrope_section=sections).get_embed(list(hw))
    module = vp.build(SectionRopeSpec(sections=sections, clamp=True), DIMS)
    assert_close_to(as_timm(module(Grid(*hw))), theirs, kind="exact")
    q = torch.randn(1, 2, hw[0] * hw[1], HEAD_DIM)
    assert_close_to(
        module(Grid(*hw)).apply(q), apply_rot_embed_cat(q, theirs, half=True), kind="exact"
    )


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_gemma4(hw):
    """timm's Gemma4RotaryEmbedding2D on (x, y) ids, and its apply."""
    ids = vp.coordinates(Grid(*hw)).flip(-1).long()[None]
    q = torch.randn(1, 3, hw[0] * hw[1], HEAD_DIM)
    cos, sin = Gemma4RotaryEmbedding2D(HEAD_DIM)(q, ids)
    rotation = vp.build(load_encoding("gemma4_rope"), DIMS)(Grid(*hw))
    for ours, theirs in zip(rotation.full_width(), (cos[0], sin[0]), strict=True):
        assert_close_to(ours, theirs, kind="table")
    expected = apply_multidimensional_rope(q, cos, sin, ndim=2, unsqueeze_dim=1)
    assert_close_to(rotation.apply(q), expected)


# A rope of timm in training and the spec that draws alike; x takes the first draw in its "xy" grids.
DRAWS = {
    "cat": (
        lambda how: RotaryEmbeddingCat(HEAD_DIM, in_pixels=False, temperature=100.0, **how),
        lambda how: AxialRopeSpec(coords=CoordSpec(**how)),
    ),
    "cat, xy": (
        lambda how: RotaryEmbeddingCat(
            HEAD_DIM, in_pixels=False, temperature=100.0, grid_indexing="xy", **how
        ),
        lambda how: AxialRopeSpec(axis_order=(1, 0), coords=CoordSpec(first="x", **how)),
    ),
    "pixel": (
        lambda how: RotaryEmbeddingCat(HEAD_DIM, max_res=32, **how),
        lambda how: AxialRopeSpec(
            max_freq=32.0, spacing="log", coords=CoordSpec(unit="endpoint", **how)
        ),
    ),
    "dinov3": (
        lambda how: RotaryEmbeddingDinoV3(HEAD_DIM, **how),
        lambda how: AxialRopeSpec(
            unit="turns", pairing="half", coords=CoordSpec(unit="centred", **how)
        ),
    ),
    "mrope": (
        lambda how: RotaryEmbeddingMRope(HEAD_DIM, **how),
        lambda how: SectionRopeSpec(sections=(8, 12, 12), clamp=True, coords=CoordSpec(**how)),
    ),
}


@pytest.mark.parametrize("wanted", [("rescale",), ("shift",), ("jitter",), tuple(AUGMENT)])
@pytest.mark.parametrize("name", DRAWS)
def test_reference_draws(name, wanted):
    """One seed, one augmentation after another: timm's classes and ours see the same coordinates."""
    how = {key: AUGMENT[key] for key in wanted}
    build, spec = DRAWS[name]
    theirs, ours = build(timm_names(how)).train(), vp.build(spec(how), DIMS).train()
    torch.manual_seed(7)
    expected = [theirs.get_embed([3, 5]) for _ in range(3)]
    torch.manual_seed(7)
    for table in expected:
        # Pixel bands turn by up to 50 rad at float32.
        torch.testing.assert_close(as_timm(ours(Grid(3, 5))), table, rtol=0, atol=2e-5)


@pytest.mark.parametrize("wanted", [("rescale",), tuple(AUGMENT)])
def test_reference_draws_of_mixed(wanted):
    """RoPE-Mixed in timm: x takes the first draw."""
    how = {key: AUGMENT[key] for key in wanted}
    theirs = RotaryEmbeddingMixed(96, depth=2, num_heads=6, **timm_names(how)).train()
    spec = MixedRopeSpec(coords=CoordSpec(first="x", **how))
    ours = vp.build(spec, Dims(embed_dim=96, num_heads=6, depth=2)).train()
    with torch.no_grad():
        ours.frequencies.copy_(MixedRope.from_timm(theirs.freqs))
        torch.manual_seed(7)
        table = theirs.get_embed([3, 5])
        torch.manual_seed(7)
        points = ours.points(Grid(3, 5))  # one draw for all layers, as scope "forward" asks
        for layer in range(2):
            turned = ours.rotation(ours.angles(points, layer))
            torch.testing.assert_close(as_timm(turned), table[layer], rtol=0, atol=2e-5)


def test_reference_draws_of_blocks():
    """Scope "block": a timm rope asked once a block, as the original DINOv3 asks its own, draws what ours draws."""
    theirs = RotaryEmbeddingDinoV3(HEAD_DIM, **timm_names(AUGMENT)).train()
    spec = AxialRopeSpec(
        unit="turns",
        pairing="half",
        coords=CoordSpec(unit="centred", scope="block", **AUGMENT),
    )
    ours = vp.build(spec, DIMS).train()
    torch.manual_seed(3)
    expected = [theirs.get_embed([3, 5]) for _ in range(DIMS.depth)]
    torch.manual_seed(3)
    points = ours.points(Grid(3, 5), draws=DIMS.depth)
    for layer in range(DIMS.depth):
        turned = ours.rotation(ours.angles(points[layer], layer))
        torch.testing.assert_close(as_timm(turned), expected[layer], rtol=0, atol=2e-5)


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("kind", ["pixel", "lang"])
def test_reference_rotary_embedding_torch(hw, kind):
    """get_axial_freqs and rotate: y then x, adjacent; both frequency kinds."""
    library = pytest.importorskip("rotary_embedding_torch")
    theirs = library.RotaryEmbedding(dim=HEAD_DIM // 2, freqs_for=kind, max_freq=10)
    freqs = theirs.get_axial_freqs(*hw)  # [h, w, channels]
    q = torch.randn(1, 2, *hw, HEAD_DIM)
    expected = library.apply_rotary_emb(freqs, q).flatten(2, 3)
    module = vp.build(load_encoding(f"rotary_embedding_torch_{kind}"), DIMS)
    torch.testing.assert_close(
        module(Grid(*hw)).apply(q.flatten(2, 3)), expected.detach(), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("side", [3, 7, 14])
def test_reference_vit_pytorch_rvt(side):
    """Its AxialRotaryEmbedding guesses a square; the numbers are those of pixel bands."""
    rvt = pytest.importorskip("vit_pytorch.rvt")
    sin, cos = rvt.AxialRotaryEmbedding(HEAD_DIM, max_freq=10)(torch.zeros(1, side * side, 1))
    ours = vp.build(load_encoding("rotary_embedding_torch_pixel"), DIMS)(
        Grid(side, side)
    ).full_width()
    torch.testing.assert_close(ours[0], cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], sin[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (13, 11)])
def test_reference_vit_pytorch_golden(hw):
    """GoldenGateRoPENd: its buffer and its map, on indices (y, x)."""
    peer = pytest.importorskip("vit_pytorch.vit_nd_rotary")
    theirs = peer.GoldenGateRoPENd(2, 4, 16, rope_min_freq=0.2, rope_max_freq=20.0)
    dims = Dims(embed_dim=64, num_heads=4, depth=1)
    overrides = ["encoding.slowest=0.2", "encoding.fastest=20.0"]
    module = vp.build(load_encoding("golden_gate_nd", overrides=overrides), dims)
    torch.testing.assert_close(module.freqs().mT, theirs.freqs, rtol=1e-6, atol=1e-6)
    q = torch.randn(1, 4, hw[0] * hw[1], 16)
    coords = vp.coordinates(Grid(*hw))
    expected = theirs(q, coords[None])
    torch.testing.assert_close(module(Grid(*hw)).apply(q), expected, rtol=0, atol=2e-4)
