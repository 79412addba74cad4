"""Layer plans: patterns, masks, and packed rows that equal their documents alone."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import sequence as oracle
from tests.tolerances import assert_close_to
from visionpos import config
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.latent import Latent, turn_latent
from visionpos.geometry.layer_views import layer_gains, layer_mask, layer_mask_rule, layer_rotation
from visionpos.geometry.layers import LayerKind, LayerPlan, Temperature
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.scaling import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    NtkAlpha,
    Proportional,
)
from visionpos.geometry.sequence import restart
from visionpos.geometry.yarn import Yarn

LONG = LongRope(
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(2.0, 4.0, 6.0, 8.0),
    original_positions=8,
    factor=4.0,
)
KINDS = {
    "none": LayerKind(name="a"),
    "plain": LayerKind(name="a", theta=1e4),
    "partial": LayerKind(name="a", theta=1e4, share=0.5),
    "linear": LayerKind(name="a", theta=1e4, scaling=Linear(factor=4.0)),
    "alpha": LayerKind(name="a", theta=1e4, scaling=NtkAlpha(alpha=4.0)),
    "dynamic": LayerKind(name="a", theta=1e4, scaling=DynamicNtk(factor=2.0, original_positions=8)),
    "yarn": LayerKind(name="a", theta=1e4, scaling=Yarn(factor=4.0, original_positions=8)),
    "llama3": LayerKind(name="a", theta=1e4, scaling=Llama3(original_positions=8)),
    "longrope": LayerKind(name="a", theta=1e4, scaling=LONG),
    "proportional": LayerKind(name="a", theta=1e4, scaling=Proportional(share=0.5)),
    "window": LayerKind(name="a", theta=1e4, window=3),
    "chunk": LayerKind(name="a", theta=1e4, chunk=4),
    "temperature": LayerKind(name="a", temperature=Temperature(every=3, shift=1)),
    "rope and temperature": LayerKind(name="a", theta=1e4, temperature=Temperature(every=3)),
}


def plan_of(kind, **changes):
    return LayerPlan(
        **({"layers": 1, "head_dim": 8, "kinds": (kind,), "pattern": (kind.name,)} | changes)
    )


def attention(plan, q, k, v, documents):
    """Return one layer's attention from q, k, v `[1, heads, n, d]` and the documents of a row."""
    ids = restart(documents)
    rotation, gains = layer_rotation(plan, 0, ids, documents), layer_gains(plan, 0, ids)
    if rotation is not None:
        q, k = rotation.apply(q), rotation.apply(k)
    if gains is not None:
        q = q * gains.unsqueeze(-1)
    mask = layer_mask(plan, 0, documents)
    scores = q @ k.transpose(-1, -2) * plan.softmax_scale(0)
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def draw(n, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(1, 2, n, 8, generator=source) for _ in range(3)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", [(13, 5), (5, 13), (7, 1, 11)])
def test_pack_equals_documents_alone(name, lengths):
    """Short and long documents in one row, either side of the trained length, to 5e-6 of the facts."""
    plan = plan_of(KINDS[name])
    n = sum(lengths)
    q, k, v = draw(n)
    documents = torch.cat([torch.full((size,), i) for i, size in enumerate(lengths)])
    packed, at = attention(plan, q, k, v, documents), 0
    for size in lengths:
        cut = [x[:, :, at : at + size] for x in (q, k, v)]
        alone = attention(plan, *cut, torch.zeros(size, dtype=torch.int64))
        worst = (packed[:, :, at : at + size] - alone).norm() / alone.norm()
        assert worst <= 5e-6
        at += size


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_of_the_row_is_another_ladder(name):
    """What transformers does: one ladder a batch, by the longest. The short document's angles then differ."""
    turn = RopeTurn(rope=KINDS[name].rope, head_dim=8)
    documents = torch.tensor([0] * 13 + [1] * 5)
    ids = restart(documents)
    alone = turn(torch.arange(5))
    assert torch.equal(turn(ids, documents).cos[13:], alone.cos)
    assert (turn(ids).cos[13:] - alone.cos).abs().max() > 1e-3


def test_longrope_pair_of_the_facts():
    """Two documents of 3000 tokens, trained 4096: without a reset the long list is taken, and cos changes by 2.38."""
    plan = config.load_language("phi3_longrope")
    turn = RopeTurn(rope=plan.kind(0).rope, head_dim=96)
    documents = torch.tensor([0] * 3000 + [1] * 3000)
    by_document = turn(restart(documents), documents).cos[:3000]
    run_on = turn(torch.arange(6000)).cos[:3000]
    assert torch.equal(by_document, turn(torch.arange(3000)).cos)
    gain = plan.kind(0).rope.gain
    assert gain == pytest.approx(1.190238, abs=5e-7)
    assert (by_document - run_on).abs().max().item() == pytest.approx(2 * gain, abs=5e-3)


def test_rows_of_a_batch_have_their_own_lengths():
    turn = RopeTurn(rope=KINDS["longrope"].rope, head_dim=8)
    ids = torch.stack([torch.arange(13), torch.arange(13) % 5])
    both = turn(ids)
    assert both.cos.shape == (2, 1, 13, 4)
    for row in range(2):
        assert torch.equal(both.cos[row, 0], turn(ids[row]).cos)


def test_far_ids_keep_their_angles():
    """Beyond 2**17 angles are formed in float64; float32 alone is off by 1.7e-2 at half a million."""
    ids = torch.tensor([499_999, 1_000_003, 2**24 + 1])
    turn = RopeTurn(rope=RopeParams(theta=1e4), head_dim=128)
    freqs = 1e4 ** (-torch.arange(64, dtype=torch.float64) / 64)
    expected = (ids.double()[:, None] * freqs).cos()
    assert (turn(ids).cos - expected).abs().max() < 1e-6
    assert turn(ids).cos.dtype == torch.float32


@pytest.mark.parametrize("accuracy", [None, "exact", "reference"])
def test_ids_that_are_no_numbers_are_refused(accuracy):
    """float32 has no odd numbers beyond 2**24: the id before them passes, that beyond is refused, float64 is not."""
    turn = RopeTurn(rope=RopeParams(theta=1e4), head_dim=8, accuracy=accuracy)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(PositionError, match="ids holds NaN or infinity"):
            turn(torch.tensor([0.0, value]))
    with pytest.raises(PositionError, match="float32 up to 16777218"):
        turn(torch.tensor([0.0, -(2.0**24) - 2]))
    with pytest.raises(PositionError, match="whole numbers"):
        turn(torch.tensor(3.0))
    assert turn(torch.tensor([2.0**24])).cos.shape == (1, 4)
    assert turn(torch.tensor([2.0**24 + 1], dtype=torch.float64)).cos.shape == (1, 4)


def test_documents_of_another_shape_are_refused_by_every_ladder():
    for kind in (KINDS["plain"], KINDS["longrope"]):
        turn = RopeTurn(rope=kind.rope, head_dim=8)
        with pytest.raises(PositionError, match=r"documents has shape \(2,\)"):
            turn(torch.arange(3), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool])
def test_half_precision_ids_are_refused(dtype):
    turn = RopeTurn(rope=RopeParams(theta=1e4), head_dim=8)
    with pytest.raises(PositionError, match="whole numbers"):
        turn(torch.arange(300).to(dtype))
    with pytest.raises(PositionError, match="whole numbers"):
        Temperature(every=4).gains(torch.arange(3).to(dtype))


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 6)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.integers(1, 7)),
)
def test_reference_masks(runs, window, chunk):
    documents = [name for name, size in runs for _ in range(size)]
    kind = LayerKind(name="a", window=window, chunk=chunk)
    found = layer_mask(plan_of(kind), 0, torch.tensor(documents))
    assert found.tolist() == oracle.masks(documents, window, chunk)
    assert bool(found.diagonal().all())  # no softmax is empty


def test_mask_rule_serves_flex_attention():
    from torch.nn.attention.flex_attention import create_mask

    documents = torch.tensor([0] * 5 + [1] * 6)
    plan = plan_of(KINDS["chunk"])
    rule = layer_mask_rule(plan, 0, documents)
    made = create_mask(rule, None, None, 11, 11, device="cpu")[0, 0]
    assert torch.equal(made, layer_mask(plan, 0, documents))


def test_patterns_and_the_last_layer():
    local, full = LayerKind(name="local", theta=1e4), LayerKind(name="full", theta=1e6, head_dim=16)
    plan = LayerPlan(
        layers=5, head_dim=8, kinds=(local, full), pattern=("local", "full"), last="full"
    )
    assert plan.names == ("local", "full", "local", "full", "full")
    assert [plan.head_dim_of(layer) for layer in range(5)] == [8, 16, 8, 16, 16]
    assert plan.kind(-1) is plan.kind(4)
    assert layer_rotation(plan, 1, torch.arange(3)).pairs == 8
    assert replace(plan, last=None).names[-1] == "local"


def test_latent_turns_one_key_for_all_heads():
    """Scores of the turned part go by differences; the still part is as it was."""
    sizes = Latent(still_dim=3, rope_dim=4, value_dim=5, kv_rank=6)
    source = torch.Generator().manual_seed(0)
    q, k, shared = (
        torch.randn(2, heads, 6, width, generator=source)
        for heads, width in ((3, 7), (3, 3), (1, 4))
    )
    turn = RopeTurn(rope=RopeParams(theta=1e4), head_dim=4, pairing="adjacent")
    scores = []
    for shift in (0, 17):
        rotation = turn(torch.arange(6) + shift)
        found_q, found_k = turn_latent(q, k, shared, rotation, sizes=sizes)
        assert torch.equal(found_q[..., :3], q[..., :3])
        assert torch.equal(found_k[..., :3], k)
        assert torch.equal(found_k[:, 0, :, 3:], found_k[:, 2, :, 3:])
        scores.append(found_q @ found_k.transpose(-1, -2))
    assert_close_to(scores[1], scores[0].double(), kind="applied")


def test_empty_and_single():
    plan = plan_of(KINDS["dynamic"])
    none = torch.empty(0, dtype=torch.int64)
    assert layer_rotation(plan, 0, none).cos.shape == (0, 4)
    assert layer_mask(plan, 0, none).shape == (0, 0)
    assert layer_mask(plan, 0, torch.tensor([5])).tolist() == [[True]]


def test_error_of_documents_and_latent():
    sizes = Latent(still_dim=3, rope_dim=4, value_dim=5, kv_rank=6)
    rotation = RopeTurn(rope=RopeParams(theta=1e4), head_dim=4)(torch.arange(2))
    ones = torch.ones(1, 2, 2, 7), torch.ones(1, 2, 2, 3), torch.ones(1, 2, 2, 4)
    with pytest.raises(PositionError, match="k_rope 2 heads"):
        turn_latent(*ones, rotation, sizes=sizes)
    q, k_still, k_rope = ones[0], ones[1], torch.ones(1, 1, 2, 4)
    for wrong in (
        (q, k_still[:, :, :1], k_rope),
        (q, k_still[:, :1], k_rope),
        (q, k_still, k_rope[0]),
    ):
        with pytest.raises(PositionError, match="q, k_still and k_rope have shapes"):
            turn_latent(*wrong, rotation, sizes=sizes)
    with pytest.raises(PositionError, match=r"\(2, 3\); \[n\]"):
        layer_mask(plan_of(KINDS["window"]), 0, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(PositionError, match="layer is 1"):
        layer_rotation(plan_of(KINDS["plain"]), 1, torch.arange(2))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: LayerKind(name="a", window=0), "window of layer kind 'a' is 0"),
        (lambda: LayerKind(name="a", chunk=0), "chunk of layer kind 'a' is 0"),
        (lambda: LayerKind(name="a", scaling=Linear(factor=2.0)), "no theta"),
        (lambda: LayerKind(name="a", share=0.5), "no theta"),
        (lambda: LayerKind(name="a", theta=-1.0), "theta is -1.0"),
        (lambda: LayerKind(name="a", theta=1e4, norm="rms"), "norm is 'rms'"),
        (lambda: Temperature(every=0), "every is 0"),
        (lambda: Temperature(every=4, shift=-1), "shift is -1"),
        (lambda: plan_of(KINDS["plain"], pattern=("b",)), r"pattern is \('b',\)"),
        (lambda: plan_of(KINDS["plain"], pattern=()), "pattern is"),
        (lambda: plan_of(KINDS["plain"], last="b"), "last 'b'"),
        (lambda: plan_of(KINDS["plain"], kinds=(KINDS["plain"],) * 2), "have its own name"),
        (lambda: plan_of(KINDS["plain"], layers=0), "layers is 0"),
        (lambda: Latent(still_dim=3, rope_dim=3, value_dim=5, kv_rank=6), "rope_dim is 3"),
        (
            lambda: plan_of(
                KINDS["plain"], latent=Latent(still_dim=3, rope_dim=4, value_dim=5, kv_rank=6)
            ),
            "head_dim is 8 and rope_dim of latent 4",
        ),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()


def test_error_of_configuration_is_one():
    with pytest.raises(ConfigError, match="window is '3'"):
        LayerKind(name="a", window="3")
