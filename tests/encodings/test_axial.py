"""Axial RoPE: the shipped fillings against the loops, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import coords as where
from tests.reference import directions
from tests.reference import rotary as oracle
from tests.strategies import grids, seeds, shifts, volumes
from tests.tolerances import assert_close_to
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, PositionError
from visionpos.attention import turn
from visionpos.config import load_encoding, shipped

DIMS = Dims(embed_dim=32, num_heads=2, depth=2, prefix=1)  # heads of 16 channels

# Shipped name -> angles of a grid by the formula of its source (facts/vision_pe.md 1B, facts/timm.md 1.1).
MODELS = {
    "dinov3": lambda h, w: oracle.axial_angles(where.centred(h, w), 16, 100.0, turns=True),
    "sapiens2": lambda h, w: oracle.axial_angles(where.centred(h, w), 16, 100.0, turns=True),
    "eva02": lambda h, w: oracle.axial_angles(where.index_to_reference(h, w, (16, 16)), 16, 1e4),
    "rope_vit_axial": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 100.0, axis_order=(1, 0)
    ),
    "pixtral_vision": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e4, dealt=True),
    "qwen_vl_vision": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e4),
    "perception_encoder": lambda h, w: oracle.axial_angles(
        where.index_to_reference(h, w, (24, 24), 1.0), 16, 1e4, axis_order=(1, 0)
    ),
    "dinov3_pretraining": lambda h, w: oracle.axial_angles(
        where.centred(h, w), 16, 100.0, turns=True
    ),
    "rope_vit_swin": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 50.0, axis_order=(1, 0)
    ),
    "sam2_memory": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e4, axis_order=(1, 0)),
    "sam3_vit": lambda h, w: oracle.axial_angles(
        where.index_to_reference(h, w, (24, 24)), 16, 1e4, axis_order=(1, 0)
    ),
    "pixtral_mistral": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e4, dealt=True),
    "llama4_vision": lambda h, w: oracle.axial_angles(
        where.index(h, w, 1.0), 16, 1e4, axis_order=(1, 0)
    ),
    "gemma4_rope": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 100.0, axis_order=(1, 0)
    ),
    "kimi_moonvit": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 1e4, axis_order=(1, 0), interleaved=True
    ),
    "kimi_k25_vision": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 1e4, axis_order=(1, 0), interleaved=True
    ),
    "step3p7_vision": lambda h, w: oracle.axial_angles(
        where.index(h, w), 16, 1e4, axis_order=(1, 0)
    ),
    "lfm3_vision": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e6),
    "minimax_m3_vision": lambda h, w: oracle.axial_angles(
        still(where.index(h, w)), 12, 1e4, axis_order=(0, 1, 2)
    ),
    "vjepa2": lambda h, w: oracle.axial_angles(
        still(where.index(h, w)), 12, 1e4, axis_order=(0, 1, 2)
    ),
    "vjepa2_untiled": lambda h, w: oracle.axial_angles(
        still(where.index(h, w)), 12, 1e4, axis_order=(0, 1, 2)
    ),
    "rotary_embedding_torch_pixel": lambda h, w: directions.pixel_angles(
        where.endpoint(h, w), 16, 10.0, log=False
    ),
    "rotary_embedding_torch_lang": lambda h, w: oracle.axial_angles(where.index(h, w), 16, 1e4),
    "timm_pixel": lambda h, w: directions.pixel_angles(where.endpoint(h, w), 16, 224.0, log=True),
    "pape_rope": lambda h, w: oracle.axial_angles(
        where.index(h, w, 1.0), 16, 1e4, axis_order=(1, 0)
    ),
}
HALF = [
    "dinov3",
    "dinov3_pretraining",
    "kimi_k25_vision",
    "lfm3_vision",
    "minimax_m3_vision",
    "pape_rope",
    "pixtral_vision",
    "qwen_vl_vision",
    "sapiens2",
    "step3p7_vision",
]
PAIRING = dict.fromkeys(HALF, "half") | {
    "gemma4_rope": "half_per_axis",
    "vjepa2": "adjacent_tiled",
}


def still(coords_yx):
    """(t, y, x) of a single frame."""
    return np.pad(coords_yx, ((0, 0), (1, 0)))


def rope(spec: AxialRopeSpec, dims: Dims = DIMS) -> vp.AxialRope:
    return vp.build(spec, dims).eval()


@pytest.mark.parametrize(("rotary_dim", "pairs"), [(None, 8), (8, 4), (16, 8)])
def test_shape_of_a_part_of_the_head(rotary_dim, pairs):
    """rotary_dim turns the first channels of a head; the others pass through."""
    module = rope(AxialRopeSpec(rotary_dim=rotary_dim))
    assert module.freqs().shape == (2, pairs)
    q = torch.randn(1, 2, 16, 16)
    out = module(Grid(3, 5)).apply(q, prefix=1)
    assert torch.equal(out[..., 2 * pairs :], q[..., 2 * pairs :])
    assert not torch.equal(out[..., 1:, : 2 * pairs], q[..., 1:, : 2 * pairs])


def test_shape_of_a_clip_with_time():
    """Three axes give every frame its own angles; head_dim must then be a multiple of 6."""
    module = rope(AxialRopeSpec(coords=CoordSpec(axes=3)), Dims(embed_dim=48, num_heads=2, depth=1))
    out = module(Grid(3, 5, frames=2))
    assert out.cos.shape == (30, 12)
    assert not torch.equal(out.sin[:15], out.sin[15:])
    assert torch.equal(out.sin[:15, 4:], out.sin[15:, 4:])  # y and x repeat in every frame


@given(grids(max_side=9), st.sampled_from(sorted(MODELS)))
def test_reference_shipped_models(hw, name):
    """Every shipped filling equals its source's formula on any rectangle."""
    module = rope(load_encoding(name))
    assert module.pairing == PAIRING.get(name, "adjacent")
    turns = module.angles(vp.coordinates(Grid(*hw), module.coords))
    expected = torch.from_numpy(MODELS[name](*hw))
    # Float32 knows an angle to a share of the fastest band: pixel bands reach 112 pi.
    reach = max(1.0, expected.abs().max().item() / 20)
    torch.testing.assert_close(turns.double(), expected, rtol=2e-6, atol=2e-6 * reach)
    rotation = module(Grid(*hw))
    torch.testing.assert_close(rotation.cos.double(), expected.cos(), rtol=0, atol=4e-6 * reach)


def test_reference_every_axial_yaml_is_checked():
    """A new axial YAML needs a formula here."""
    axial = {n for n in shipped("encodings") if isinstance(load_encoding(n), AxialRopeSpec)}
    assert axial == set(MODELS)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_reference_periods(axes):
    """DINOv3's min_period and max_period replace theta."""
    spec = AxialRopeSpec(coords=CoordSpec(unit="centred", axes=axes), periods=(0.5, 8.0))
    module = rope(spec, Dims(embed_dim=24, num_heads=1, depth=1))
    coords = vp.coordinates(Grid(3, 5), module.coords)
    expected = oracle.period_angles(coords.double().numpy(), 24, 0.5, 8.0)
    assert_close_to(module.angles(coords), torch.from_numpy(expected), kind="table")


def test_invariant_turns_are_two_pi_radians():
    plain, turned = (rope(AxialRopeSpec(unit=unit)).freqs() for unit in ("radians", "turns"))
    torch.testing.assert_close(turned, plain * 2 * math.pi)


@given(grids(max_side=8))
def test_invariant_all_layers_alike(hw):
    module = rope(AxialRopeSpec())
    assert not module.layerwise
    assert torch.equal(module(Grid(*hw), layer=0).sin, module(Grid(*hw), layer=1).sin)


def test_invariant_there_is_no_state():
    """No parameter, no buffer, no key in a state dict: a cast, a shard or a stale checkpoint cannot touch it."""
    module = rope(AxialRopeSpec())
    assert not list(module.parameters())
    assert not list(module.buffers())
    assert not module.state_dict()


@given(grids(max_side=8))
def test_invariant_prefix_tokens_stand_at_the_origin(hw):
    """Facts 5.16: prefix tokens are not turned, whatever the grid."""
    module = rope(AxialRopeSpec())
    q = torch.randn(1, 2, DIMS.prefix + hw[0] * hw[1], 16)
    out, _ = vp.rotate(q, q, module(Grid(*hw)), prefix=DIMS.prefix)
    assert torch.equal(out[..., :1, :], q[..., :1, :])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ({"order": "interleaved"}, "'interleaved'"),
        ({"bands": "dealt"}, "'dealt'"),
        ({"axis_order": (1, 0)}, r"\(1, 0\)"),
        ({"unit": "turns"}, "'turns'"),
    ],
)
def test_error_periods_exclude(field, value):
    """periods is DINOv3's whole schedule: another choice beside it is refused with its value."""
    match = rf"periods \(0\.5, 8\.0\) cannot be combined.*{value}.*drop periods"
    with pytest.raises(PositionError, match=match):
        AxialRopeSpec(periods=(0.5, 8.0), **field)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (
            AxialRopeSpec(rotary_dim=20),
            r"rotary_dim is 20 and a head has 16 channels; at most head_dim",
        ),
        (
            AxialRopeSpec(rotary_dim=6),
            r"rotary_dim is 6 of head_dim 16 for 2 axes; .*multiple of 4",
        ),
        (AxialRopeSpec(rotary_dim=0), r"rotary_dim is 0 of head_dim 16 for 2 axes"),
        (
            AxialRopeSpec(coords=CoordSpec(axes=3)),
            r"rotary_dim is 16 of head_dim 16 for 3 axes; .*multiple of 6.*Change num_heads",
        ),
        (
            AxialRopeSpec(pairing="half_per_axis", order="interleaved"),
            r"order is 'interleaved' with pairing 'half_per_axis'.*Use order='contiguous'",
        ),
    ],
)
def test_error_at_build(spec, match):
    """Sizes that do not fit are refused when built, not in the first forward."""
    with pytest.raises(PositionError, match=match):
        vp.build(spec, DIMS)


@pytest.mark.parametrize(
    ("theta", "match"),
    [
        (0.0, r"theta is 0\.0; .*above 0"),
        (-1.0, r"theta is -1\.0; .*above 0"),
        (float("nan"), r"theta is nan; it must be a finite number"),
        (float("inf"), r"theta is inf; it must be a finite number"),
    ],
)
def test_error_theta(theta, match):
    """A ladder base that gives no ladder is refused by the spec itself."""
    with pytest.raises(PositionError, match=match):
        AxialRopeSpec(theta=theta)


def test_error_tiled_pairing():
    """What is no rotation must be asked for by its own name."""
    with pytest.raises(PositionError, match=r"adjacent_tiled.*legacy_tiling=True"):
        AxialRopeSpec(pairing="adjacent_tiled")


def test_gradient_reaches_q_and_k():
    """The encoding has nothing to learn; gradients pass through it."""
    rotation = rope(AxialRopeSpec())(Grid(1, 2))
    q = torch.randn(1, 1, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotation.apply, (q,))


@pytest.mark.parametrize("field", ["pairing", "order", "bands", "unit", "spacing"])
def test_error_unknown_word(field):
    """YAML is checked by pydantic; a spec written in Python is not, and a typo changes the angles in silence."""
    with pytest.raises(PositionError, match=rf"{field} is 'turn'; it must be"):
        vp.build(AxialRopeSpec(**{field: "turn"}), DIMS)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"axis_order": (0, 2)}, r"axis_order is \(0, 2\); a permutation of \(0, 1\)"),
        (
            {"axis_order": (1, 0), "coords": CoordSpec(axes=3)},
            r"axis_order is \(1, 0\); a permutation of \(0, 1, 2\)",
        ),
        ({"periods": (8.0, 0.5)}, r"periods are 8\.0 and 0\.5; 0 < shortest <= longest"),
        ({"max_freq": 1.0}, r"max_freq is 1\.0; .*at least 2"),
        ({"max_freq": 10.0, "unit": "turns"}, r"max_freq 10\.0 cannot be combined.*drop max_freq"),
        ({"max_freq": 10.0, "periods": (1.0, 2.0)}, r"periods \(1\.0, 2\.0\) cannot be combined"),
        (
            {"legacy_tiling": True, "pairing": "half"},
            r"legacy_tiling cannot be combined with pairing 'half'.*Use pairing='adjacent'",
        ),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        AxialRopeSpec(**fields)


# facts/vision_pe.md 1B: head_dim -> channels that turn, in thirds; the rest pass through.
@pytest.mark.parametrize(("head_dim", "turned"), [(64, 60), (80, 78), (88, 84), (128, 126)])
def test_shape_of_thirds(head_dim, turned):
    module = rope(load_encoding("vjepa2"), Dims(embed_dim=head_dim, num_heads=1, depth=1))
    assert 2 * module.freqs().shape[1] == module.layout.turned == turned
    q = torch.randn(1, 1, 2 * 3 * 5, head_dim)
    out = module(Grid(3, 5, frames=2)).apply(q)
    assert torch.equal(out[..., turned:], q[..., turned:])


@given(volumes(max_side=5, max_frames=3), seeds())
def test_reference_legacy_tiling(thw, seed):
    """The released V-JEPA 2 map, channel by channel (facts 1B and 5.13)."""
    t, h, w = thw
    module = rope(load_encoding("vjepa2"), Dims(embed_dim=16, num_heads=1, depth=1))
    coords = np.array([[f, y, x] for f in range(t) for y in range(h) for x in range(w)], float)
    turns = oracle.axial_angles(coords, 12, 1e4, axis_order=(0, 1, 2))
    q = torch.randn(1, 1, t * h * w, 16, generator=torch.Generator().manual_seed(seed))
    expected = torch.from_numpy(directions.tiled(q[0, 0].double().numpy(), turns, 3))
    assert_close_to(module(Grid(h, w, frames=t)).apply(q)[0, 0], expected)


@given(grids(max_side=5), st.sampled_from(sorted(set(MODELS) - {"vjepa2"})), seeds())
def test_reference_matrices(hw, name, seed):
    """Every shipped filling turns a head by the 2x2 blocks of its pairing, through every path."""
    module = rope(load_encoding(name))
    turns, axes = MODELS[name](*hw), module.coords.axes
    q = torch.randn(1, 2, hw[0] * hw[1], 16, generator=torch.Generator().manual_seed(seed))
    rotation = module(Grid(*hw))
    pairing = PAIRING.get(name, "adjacent")
    for n in range(len(turns)):
        matrix = np.eye(16)
        for angle, (a, b) in zip(
            turns[n], oracle.pair_channels(turns.shape[1], pairing, axes), strict=True
        ):
            c, s = math.cos(angle), math.sin(angle)
            matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
        expected = torch.from_numpy(q[0, :, n].double().numpy() @ matrix.T)
        noise = 2e-5 * max(1.0, np.abs(turns[n]).max() / 20)
        for out in (rotation.apply(q), turn(q, rotation)):
            torch.testing.assert_close(out[0, :, n].double(), expected, rtol=0, atol=noise)


@given(grids(max_side=6), st.sampled_from(sorted(MODELS)), seeds())
def test_invariant_full_width_is_the_same_map(hw, name, seed):
    """(cos, sin) a channel, as transformers and timm take them, and a partner by the pairing's rule: one map."""
    module = rope(load_encoding(name))
    rotation = module(Grid(*hw))
    cos, sin = rotation.full_width()
    turned, axes = cos.shape[-1], module.coords.axes
    q = torch.randn(1, 1, hw[0] * hw[1], 16, generator=torch.Generator().manual_seed(seed))
    head = q[..., :turned]
    if "adjacent" in module.pairing:
        partner = torch.stack([-head[..., 1::2], head[..., ::2]], -1).flatten(-2)
    else:
        runs = axes if module.pairing == "half_per_axis" else 1
        first, second = head.unflatten(-1, (runs, -1)).chunk(2, dim=-1)
        partner = torch.cat([-second, first], -1).flatten(-2)
    expected = torch.cat([head * cos + partner * sin, q[..., turned:]], -1)
    torch.testing.assert_close(rotation.apply(q), expected, rtol=1e-6, atol=1e-6)


@given(grids(max_side=5), st.sampled_from(sorted(set(MODELS) - {"vjepa2"})), shifts(), seeds())
def test_invariant_shift(hw, name, shift, seed):
    """Scores of every true rotation see differences alone, and no norm changes."""
    module = rope(load_encoding(name))
    draw = torch.Generator().manual_seed(seed)
    coords = vp.coordinates(Grid(*hw), module.coords).double()
    q, k = torch.randn(2, 1, 2, len(coords), 16, dtype=torch.float64, generator=draw)
    freqs = module.layout.freqs(dtype=torch.float64)
    step = torch.tensor([0.0, *shift] if coords.shape[1] == 3 else shift) / 8

    def turned(points):
        return vp.rotate(q, k, module.rotation(vp.angles(points, freqs)))

    here, there = turned(coords), turned(coords + step)
    torch.testing.assert_close(here[0].norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(here[0] @ here[1].mT, there[0] @ there[1].mT, rtol=0, atol=1e-8)


def test_invariant_tiling_is_no_rotation():
    """Facts 5.13, d=20 an axis: at a fixed offset of 1 the score drifts with position, and norms change."""
    spec = AxialRopeSpec(theta=1e4, coords=CoordSpec(axes=1), legacy_tiling=True)
    module = rope(spec, Dims(embed_dim=20, num_heads=1, depth=1))
    q, k = torch.randn(2, 1, 1, 1, 20)

    def score(module, at):
        turn_of = [module.rotation(module.angles(torch.tensor([[p]]))) for p in (at, at + 1.0)]
        return (turn_of[0].apply(q) @ turn_of[1].apply(k).mT).item()

    legacy = [score(module, at) for at in (0.0, 5.0, 10.0)]
    assert max(legacy) - min(legacy) > 0.5
    meant = rope(AxialRopeSpec(theta=1e4, coords=CoordSpec(axes=1)), module.dims)
    right = [score(meant, at) for at in (0.0, 5.0, 10.0)]
    assert max(right) - min(right) < 1e-4
    e0 = torch.eye(20)[None, None, :1]
    norm = module.rotation(module.angles(torch.tensor([[1.0]]))).apply(e0).norm()
    assert norm.item() == pytest.approx(math.hypot(math.cos(1.0), math.sin(1e4**-0.1)), abs=1e-5)


def test_invariant_layout_says_what_the_rotation_does():
    """The descriptor's frequencies are the module's, bit for bit, and its tokens those of the model."""
    dims = Dims(embed_dim=32, num_heads=2, depth=1, prefix=1, suffix=3)
    for name in MODELS:
        module = rope(load_encoding(name), dims)
        assert torch.equal(module.layout.freqs(), module.freqs())
        assert (module.layout.prefix, module.layout.suffix) == (1, 3)
        assert module.layout.pairing == module.pairing
        assert module.layout.coords == module.coords


@given(grids(max_side=6), st.integers(1, 4), st.integers(0, 5))
def test_invariant_memory_frames_share_the_rotation(hw, frames, pointers):
    """SAM 2 (facts 5.8): keys of r frames turn alike, frame after frame; trailing pointers keep every bit."""
    module = rope(load_encoding("sam2_memory"))
    n = hw[0] * hw[1]
    q, k = torch.randn(1, 1, n, 16), torch.randn(1, 1, frames * n + pointers, 16)
    rotation = module(Grid(*hw))
    turned_q, turned_k = vp.geometry.rotate_memory(q, k, rotation, suffix=pointers)
    assert torch.equal(turned_q, rotation.apply(q))
    for frame in range(frames):
        part = slice(frame * n, (frame + 1) * n)
        assert torch.equal(turned_k[:, :, part], rotation.apply(k[:, :, part]))
    assert torch.equal(turned_k[:, :, frames * n :], k[:, :, frames * n :])


def test_invariant_memory_without_a_frame():
    """Pointers alone, as in the first frame after a reset: nothing turns, and the result is a copy."""
    k = torch.randn(1, 1, 4, 16)
    rotation = rope(load_encoding("sam2_memory"))(Grid(3, 5))
    _, turned = vp.geometry.rotate_memory(torch.randn(1, 1, 15, 16), k, rotation, suffix=4)
    assert torch.equal(turned, k)
    assert turned.data_ptr() != k.data_ptr()


@pytest.mark.parametrize(("tokens", "suffix"), [(31, 0), (34, 3), (3, 4)])
def test_error_memory_of_part_frames(tokens, suffix):
    rotation = rope(load_encoding("sam2_memory"))(Grid(3, 5))
    q, k = torch.randn(1, 1, 15, 16), torch.randn(1, 1, tokens, 16)
    with pytest.raises(
        PositionError, match=rf"k has {tokens} tokens, suffix is {suffix}.*a frame has 15"
    ):
        vp.geometry.rotate_memory(q, k, rotation, suffix=suffix)


@given(grids(max_side=6), seeds())
def test_invariant_class_token_at_the_end(hw, seed):
    """Llama 4 (facts 5.16): the trailing class token is turned by 0, and indices start from 1 for the others."""
    dims = Dims(embed_dim=32, num_heads=2, depth=1, suffix=1)
    module = rope(load_encoding("llama4_vision"), dims)
    q = torch.randn(1, 2, hw[0] * hw[1] + 1, 16, generator=torch.Generator().manual_seed(seed))
    out, _ = vp.rotate(q, q, module(Grid(*hw)), suffix=dims.suffix)
    assert torch.equal(out[..., -1, :], q[..., -1, :])
    assert not torch.equal(out[..., 0, :], q[..., 0, :])


def test_invariant_interpolation_is_one_factor_an_axis():
    """Facts 5.40: 8x8 to 8x16: a factor an axis keeps rows as they are and halves columns; one scalar would not."""
    own = CoordSpec(scale=(1.0, 0.5))
    wide = vp.coordinates(Grid(8, 16), own).unflatten(0, (8, 16))
    narrow = vp.coordinates(Grid(8, 8)).unflatten(0, (8, 8))
    assert torch.equal(wide[:, ::2], narrow)
    with pytest.raises(PositionError, match=r"scale is \(0\.5,\) for 2 axes; one finite factor"):
        CoordSpec(scale=(0.5,))


def test_invariant_equal_counts_other_shapes():
    """Facts 5.7: 28x7 tokens on a 14x14 model are not given the angles of 14x14 (up to 5.9 rad there)."""
    module = rope(load_encoding("rope_vit_axial"))
    first, tall = module(Grid(14, 14)), module(Grid(28, 7))
    assert (first.cos - tall.cos).abs().max() > 1
    assert torch.equal(module(Grid(14, 14)).cos, first.cos)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("sam2_memory", (36, 64)), ("sam2_memory", (2, 8)), ("sam2_memory", (32, 64))],
)
def test_invariant_no_square_guess(name, grid):
    """Facts 5.8: row 1, column 0 of 36x64 is y=1, x=0, and 32x64 does not raise."""
    module = rope(load_encoding(name))
    row_1 = module.angles(module.points(Grid(*grid)))[grid[1]]
    expected = torch.from_numpy(MODELS[name](2, 1))[1]
    torch.testing.assert_close(row_1.double(), expected, rtol=1e-6, atol=1e-6)


# One filling a mechanism: pairings, orders, bands, extents, units.
@pytest.mark.parametrize(
    "name",
    ["eva02", "dinov3", "pixtral_vision", "kimi_k25_vision", "gemma4_rope", "vjepa2", "timm_pixel"],
)
def test_compile_one_graph_over_six_sizes(name):
    module = rope(load_encoding(name), Dims(embed_dim=24, num_heads=1, depth=1))
    calls = [(torch.randn(2, 3, h * w, 24), h, w) for h, w in SIZES]
    plain = graphs_of(
        lambda q, h, w: turn(q, module(Grid(h, w))),
        calls,
        lambda q, h, w: module(Grid(h, w)).apply(q),
    )
    assert plain == 1


def test_device_of_every_pairing(device):
    for name in ("gemma4_rope", "vjepa2", "pixtral_vision", "sam2_memory"):
        module = rope(load_encoding(name))
        q = torch.randn(1, 2, 15, 16)
        there = turn(q.to(device), module(Grid(3, 5), device=device))
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), module(Grid(3, 5)).apply(q), rtol=1e-5, atol=1e-5)


def test_reference_periods_of_a_checkpoint():
    """DINOv3's rope_embed.periods: base^(2k / (d / 2)); released ones are rounded to bf16 (facts 2)."""
    module = rope(load_encoding("dinov3"), Dims(embed_dim=64, num_heads=1, depth=1))
    periods = 100.0 ** (2 * torch.arange(16.0) / 32)
    assert module.check_periods(periods) < 1e-6
    assert 5e-4 < module.check_periods(periods.bfloat16()) < 2**-8
    other = rope(AxialRopeSpec(periods=(0.5, 8.0), coords=CoordSpec(unit="centred")))
    assert other.check_periods(torch.tensor([0.5, 1.259921, 3.174802, 8.0])) < 1e-6


@pytest.mark.parametrize(
    ("periods", "match"),
    [
        (torch.ones(8), r"periods have shape \(8,\) and an axis has 16 pairs"),
        (
            1000.0 ** (torch.arange(16.0) / 16),
            r"periods differ from the spec's by .*Set theta or periods",
        ),
        (torch.full((16,), math.nan), r"periods differ from the spec's by nan"),
    ],
)
def test_error_periods_of_a_checkpoint(periods, match):
    module = rope(load_encoding("dinov3"), Dims(embed_dim=64, num_heads=1, depth=1))
    with pytest.raises(PositionError, match=match):
        module.check_periods(periods)
