"""check_layout: the shipped layouts against each other, and weights that were not converted."""

import dataclasses
import itertools

import pytest
import torch

import visionpos as vp
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, Layout, PositionError
from visionpos.config import load_encoding, shipped
from visionpos.geometry import check_layout

IL_XY = Layout(head_dim=16, pairing="adjacent", axis_order=(1, 0))


def shipped_layouts(head_dim: int = 24) -> dict[str, Layout]:
    """The descriptor of every shipped axial filling, on heads that hold thirds and halves alike."""
    dims = Dims(embed_dim=head_dim, num_heads=1, depth=1)
    specs = {name: load_encoding(name) for name in shipped("encodings")}
    axial = {name: spec for name, spec in specs.items() if isinstance(spec, AxialRopeSpec)}
    return {name: vp.build(spec, dims).layout for name, spec in axial.items()}


LAYOUTS = shipped_layouts()


def same_places(one: Layout, other: Layout) -> bool:
    """Coordinates up to what no score can see without exempt tokens in evaluation: offset and jitter."""
    return all(
        getattr(one.coords, name) == getattr(other.coords, name)
        for name in ("unit", "axes", "normalize", "extent", "trained_shape", "scale")
    )


def joinable(one: Layout, other: Layout) -> bool:
    try:
        vp.channel_permutation(one, other)
    except PositionError:
        return False
    return True


PAIRS = [
    (a, b)
    for a, b in itertools.permutations(sorted(LAYOUTS), 2)
    if joinable(LAYOUTS[a], LAYOUTS[b])
]
GOOD = [(a, b) for a, b in PAIRS if same_places(LAYOUTS[a], LAYOUTS[b])]
# Facts 1B: who has the same frequencies and the same numbering, by source.
FAMILIES = [
    {"dinov3", "dinov3_pretraining", "sapiens2"},
    {"rope_vit_axial", "gemma4_rope"},
    {"pixtral_vision", "pixtral_mistral"},
    {"minimax_m3_vision", "vjepa2_untiled"},
    {"perception_encoder", "sam3_vit"},  # 1 cell more in front is the same shift everywhere
    {
        *("qwen_vl_vision", "kimi_moonvit", "kimi_k25_vision", "step3p7_vision", "sam2_memory"),
        *("llama4_vision", "pape_rope", "rotary_embedding_torch_lang"),
    },
]


def test_invariant_who_can_be_joined():
    """No more and no fewer than the table of layouts says."""
    expected = {pair for family in FAMILIES for pair in itertools.permutations(family, 2)}
    assert set(GOOD) == expected


@pytest.mark.parametrize(("source", "target"), GOOD)
def test_reference_shipped_layouts(source, target):
    """Every pair that can be converted: scores agree; skipping the conversion changes them by order 1."""
    draw = torch.Generator().manual_seed(0)
    one, other = LAYOUTS[source], LAYOUTS[target]
    # Indices are stretched to the trained grid in float32.
    noise = 1e-5 if one.coords.extent == "trained" else 1e-10
    assert check_layout(one, other, generator=draw, grid=Grid(3, 5), tolerance=1e-5) < noise
    order = vp.channel_permutation(one, other)
    if torch.equal(order, torch.arange(24)):
        return
    weights = tuple(torch.randn(2, 24, 8, dtype=torch.float64, generator=draw))
    with pytest.raises(PositionError, match=r"differ by .*\. Convert the q and k rows") as caught:
        check_layout(one, other, before=weights, after=weights, generator=draw)
    assert 0.3 < float(str(caught.value).split("differ by ")[1].split()[0]) < 100


@pytest.mark.parametrize(("source", "target"), sorted(set(PAIRS) - set(GOOD)))
def test_error_other_coordinates(source, target):
    """Rows can be put in order, but the numbering differs (users.md D01): the measured error says so."""
    with pytest.raises(
        PositionError, match=r"differ by .*The coordinates differ too: .*Build the target"
    ):
        check_layout(LAYOUTS[source], LAYOUTS[target], generator=torch.Generator().manual_seed(0))


def test_invariant_offset_shows_against_exempt_tokens_alone():
    """Llama 4's indices from 1: without a class token nothing changes, with one the check refuses."""
    zero = dataclasses.replace(LAYOUTS["llama4_vision"], coords=CoordSpec())
    one = LAYOUTS["llama4_vision"]
    assert check_layout(one, zero) < 1e-10
    one, zero = (dataclasses.replace(each, suffix=1) for each in (one, zero))
    with pytest.raises(PositionError, match=r"differ by .*offset=1\.0.*offset=0\.0"):
        check_layout(one, zero)


def test_invariant_class_token_first_or_last():
    """Llama 4 keeps its class token last; a target that keeps it first gets the same scores."""
    last = dataclasses.replace(LAYOUTS["llama4_vision"], suffix=1)
    first = dataclasses.replace(last, suffix=0, prefix=1, pairing="half", axis_order=(0, 1))
    assert check_layout(last, first) < 1e-10
    with pytest.raises(PositionError, match=r"source exempts 0 \+ 1 tokens and target 0 \+ 0"):
        check_layout(last, dataclasses.replace(first, prefix=0))


def test_invariant_gemma4_by_hand():
    """Facts 1B: [x, x, y, y] halves inside each axis: rows of one 16-channel head from adjacent x, y."""
    gemma = Layout(head_dim=16, pairing="half_per_axis", axis_order=(1, 0))
    rows = vp.channel_permutation(IL_XY, gemma).tolist()
    assert rows == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert check_layout(IL_XY, gemma) < 1e-10


def test_invariant_heads_biases_and_norms():
    """Several heads at once; a bias and a q/k norm weight move with the rows."""
    target = Layout(head_dim=16)
    q, k = torch.randn(2, 48, 8, dtype=torch.float64)
    moved = tuple(vp.convert(w, IL_XY, target) for w in (q, k))
    assert check_layout(IL_XY, target, before=(q, k), after=moved) < 1e-10
    assert check_layout(IL_XY, target, before=(q, k), after=moved, grid=Grid(1, 7)) < 1e-10
    one_only = (moved[0], k)
    with pytest.raises(PositionError, match="q and k alike"):
        check_layout(IL_XY, target, before=(q, k), after=one_only)
    # RMS norm with a weight, then rotation: converted weights give converted channels.
    norm, bias, x = torch.rand(16) + 0.5, torch.randn(16), torch.randn(7, 16)
    order = vp.channel_permutation(IL_XY, target)
    plain = torch.nn.functional.rms_norm(x + bias, (16,), norm)
    changed = torch.nn.functional.rms_norm(
        x[:, order] + vp.convert(bias, IL_XY, target), (16,), vp.convert(norm, IL_XY, target)
    )
    torch.testing.assert_close(changed, plain[:, order])


def test_invariant_tiled_layouts_stay_among_themselves():
    """V-JEPA 2 as released: axes may be reordered, but no order of rows makes a rotation of it."""
    tiled = LAYOUTS["vjepa2"]
    turned = dataclasses.replace(tiled, axis_order=(2, 0, 1))
    assert check_layout(tiled, turned) < 1e-10
    with pytest.raises(PositionError, match=r"tiled \(no rotation\).*cannot be reached"):
        vp.channel_permutation(tiled, LAYOUTS["vjepa2_untiled"])


def test_invariant_one_axis_dealt_is_shared():
    """Over one axis a dealt ladder is the shared one: names follow frequencies, not words."""
    one, other = (Layout(head_dim=8, axis_order=(0,), bands=bands) for bands in ("shared", "dealt"))
    assert vp.channel_permutation(one, other).tolist() == list(range(8))


def test_error_other_frequencies():
    slow = dataclasses.replace(IL_XY, theta=100.0)
    with pytest.raises(PositionError, match=r"theta 10000\.0, radians.*theta 100\.0.*Retrain"):
        check_layout(IL_XY, slow)
    with pytest.raises(PositionError, match=r"periods is \(0\.5, 8\.0\)"):
        check_layout(dataclasses.replace(IL_XY, periods=(0.5, 8.0)), IL_XY)


def test_error_layout_words_and_counts():
    for fields, match in (
        ({"prefix": -1}, r"prefix is -1 and suffix 0"),
        ({"unit": "degrees"}, r"unit is 'degrees'; it must be one of 'radians', 'turns'"),
        ({"pairing": "half_per_axis", "order": "interleaved"}, r"order is 'interleaved'"),
    ):
        with pytest.raises(PositionError, match=match):
            Layout(head_dim=16, **fields)


def test_invariant_nothing_is_written():
    q, k = torch.randn(2, 16, 4)
    kept = q.clone(), k.clone()
    check_layout(IL_XY, Layout(head_dim=16), before=(q, k))
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_invariant_grouped_queries(kv_heads):
    """Fewer heads of k, shared by neighbouring heads of q: converted scores agree, and skipping k is seen."""
    target = Layout(head_dim=16)
    q, k = (torch.randn(heads * 16, 8, dtype=torch.float64) for heads in (4, kv_heads))
    moved = vp.convert(q, IL_XY, target), vp.convert(k, IL_XY, target)
    assert check_layout(IL_XY, target, before=(q, k)) < 1e-10
    assert check_layout(IL_XY, target, before=(q, k), after=moved) < 1e-10
    with pytest.raises(PositionError, match="q and k alike"):
        check_layout(IL_XY, target, before=(q, k), after=(moved[0], k))
    if (
        kv_heads == 2
    ):  # heads 0, 1 share the first head of k, heads 2, 3 the second: another order is another model
        wrong = moved[0], moved[1].unflatten(0, (2, 16)).flip(0).flatten(0, 1)
        with pytest.raises(PositionError, match="differ by"):
            check_layout(IL_XY, target, before=(q, k), after=wrong)


@pytest.mark.parametrize(
    ("q", "k", "match"),
    [
        ((64, 8), (48, 8), r"shapes \(64, 8\) and \(48, 8\) and head_dim is 16; .*grouped queries"),
        ((16, 8), (32, 8), r"shapes \(16, 8\) and \(32, 8\)"),
        ((32, 8), (32, 6), r"shapes \(32, 8\) and \(32, 6\).*one width"),
        ((40, 8), (40, 8), r"shapes \(40, 8\) and \(40, 8\) and head_dim is 16; whole heads"),
        ((32,), (32,), r"\(32,\) and \(32,\); two tensors .*Biases and norms move with `convert`"),
        ((32, 8), (0, 8), r"shapes \(32, 8\) and \(0, 8\)"),
    ],
)
def test_error_weights(q, k, match):
    weights = torch.zeros(q), torch.zeros(k)
    with pytest.raises(PositionError, match=f"^before (has|is) {match}"):
        check_layout(IL_XY, Layout(head_dim=16), before=weights)
    with pytest.raises(PositionError, match=f"^after (has|is) {match}"):
        check_layout(IL_XY, Layout(head_dim=16), after=weights)


def test_error_weights_of_two_models():
    """A bias given on one side, and another width after the conversion."""
    one, other = torch.ones(16, 8), torch.ones(16, 6)
    target = Layout(head_dim=16)
    with pytest.raises(PositionError, match=r"before has shapes \(16, 8\) .* after \(16, 6\)"):
        check_layout(IL_XY, target, before=(one, one), after=(other, other))
    for given in ((one, one, torch.ones(16)), (one, None), one, 3):
        with pytest.raises(PositionError, match=r"^after is .*; two tensors"):
            check_layout(IL_XY, target, before=(one, one), after=given)
