"""SelfExtend: its attention is its definition by loops, with padding and packed rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import sequence as oracle
from tests.tolerances import assert_close_to
from visionpos.errors import PositionError
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.scaling import DynamicNtk, LongRope
from visionpos.geometry.self_extend import SelfExtend, self_extend_attention
from visionpos.geometry.sequence import restart

FREQS = 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)


def turn(ids):
    turns = ids.double().unsqueeze(-1) * FREQS
    return Rotation.of(turns if ids.ndim == 1 else turns.unsqueeze(1), "half")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(q, k, v, rule, ids, allowed):
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        row = (ids if ids.ndim == 1 else ids[b]).tolist()
        for head in range(q.shape[1]):
            parts = (q[b, head], k[b, head // share], v[b, head // share])
            out[b, head] = torch.tensor(
                oracle.self_extend(
                    *(part.tolist() for part in parts),
                    row,
                    rule.group,
                    rule.window,
                    FREQS.tolist(),
                    lambda i, j, b=b: bool(allowed[b, i, j]),
                    fraction=rule.form == "code",
                ),
                dtype=torch.float64,
            )
    return out


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["paper", "code"]), st.integers(1, 13))
def test_reference_attention_is_the_definition(group, window, form, n):
    rule, m = SelfExtend(group=group, window=window, form=form), 13
    q, k, v = normal(1, 2, n, 8), normal(1, 1, m, 8, seed=1), normal(1, 1, m, 3, seed=2)
    found = self_extend_attention(q, k, v, rule, turn, torch.arange(m))
    everything = torch.ones(1, n, m, dtype=torch.bool)
    assert_close_to(found, by_loops(q, k, v, rule, torch.arange(m), everything))


def test_reference_padding_and_packing():
    """One row is padded on the left, one holds two documents: each equals itself alone, padding gives zeros."""
    rule, m = SelfExtend(group=3, window=2), 11
    documents = torch.tensor([[-1] * 3 + [0] * 8, [4] * 6 + [5] * 5])
    ids = restart(documents)
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)) & (documents >= 0).unsqueeze(-1)
    q, k, v = normal(2, 2, m, 8), normal(2, 2, m, 8, seed=1), normal(2, 2, m, 4, seed=2)
    found = self_extend_attention(q, k, v, rule, turn, ids, mask=same.unsqueeze(1))
    assert_close_to(found, by_loops(q, k, v, rule, ids, same))
    assert not found[0, :, :3].any()
    for row, first, last in ((0, 3, 11), (1, 0, 6), (1, 6, 11)):
        cut = (x[row : row + 1, :, first:last] for x in (q, k, v))
        alone = self_extend_attention(*cut, rule, turn, torch.arange(last - first))
        assert_close_to(found[row : row + 1, :, first:last], alone)


BY_LENGTH = {
    "dynamic": DynamicNtk(factor=4.0, original_positions=7),
    "longrope": LongRope(
        short_factor=(1.0,) * 4, long_factor=(3.0, 5.0, 7.0, 9.0), original_positions=7, factor=4.0
    ),
}


@pytest.mark.parametrize("scaling", BY_LENGTH.values(), ids=BY_LENGTH)
@pytest.mark.parametrize(("group", "window"), [(4, 3), (5, 2), (3, 30)])
def test_reference_one_ladder_by_length_for_both_sides(scaling, group, window):
    """LongLM indexes one table for near and far, queries and keys: that of the document's own length.

    Documents of 13 and 5 tokens lie either side of the 7 trained ones, and far ids of queries and of keys do as well.
    """
    rope = RopeParams(theta=1e4, scaling=scaling)
    rule, length_turn = SelfExtend(group=group, window=window), RopeTurn(rope=rope, head_dim=8)
    documents = torch.tensor([3] * 13 + [8] * 5)
    q, k, v = (normal(1, 2, 18, 8, seed=seed) for seed in range(3))
    found = self_extend_attention(
        q, k, v, rule, length_turn, restart(documents), documents=documents
    )
    for first, last in ((0, 13), (13, 18)):
        n, cut = last - first, [x[:, :, first:last] for x in (q, k, v)]
        freqs = rope.frequencies(8, length=n, dtype=torch.float64)[0].tolist()
        for head in range(2):
            parts = [x[0, head].tolist() for x in cut]
            parts[0] = (cut[0][0, head] * rope.gain**2).tolist()
            alone = oracle.self_extend(
                *parts, list(range(n)), group, window, freqs, lambda i, j, n=n: j < n and i < n
            )
            torch.testing.assert_close(
                found[0, head, first:last], torch.tensor(alone).double(), atol=2e-6, rtol=2e-6
            )


def test_narrow_ids_do_not_wrap():
    """uint8 ids minus each other, and int8 ids plus a window of 200, leave what a byte holds."""
    rule, ids = SelfExtend(group=2, window=200), torch.arange(100)
    assert torch.equal(rule.far_queries(ids.to(torch.int8)), rule.far_queries(ids))
    rule = SelfExtend(group=2, window=3)
    narrow = ids.to(torch.uint8)
    assert torch.equal(rule.distances(narrow, narrow), rule.distances(ids, ids))


def test_decoding_equals_prefill():
    rule, m = SelfExtend(group=4, window=3), 300  # more queries than are held at once
    q, k, v = normal(1, 1, m, 8), normal(1, 1, m, 8, seed=1), normal(1, 1, m, 2, seed=2)
    whole = self_extend_attention(q, k, v, rule, turn, torch.arange(m))
    for place in (0, 2, 3, 40, 299):
        cut = (x[:, :, : place + 1] for x in (k, v))
        one = self_extend_attention(
            q[:, :, place : place + 1], *cut, rule, turn, torch.arange(place + 1)
        )
        assert_close_to(one, whole[:, :, place : place + 1])


def test_within_the_window_nothing_changes():
    m = 9
    q, k, v = normal(1, 1, m, 8), normal(1, 1, m, 8, seed=1), normal(1, 1, m, 2, seed=2)
    ids = torch.arange(m)
    expected = torch.nn.functional.scaled_dot_product_attention(
        turn(ids).apply(q), turn(ids).apply(k), v, is_causal=True
    )
    for rule in (SelfExtend(group=5, window=m), SelfExtend(group=1, window=2)):
        assert_close_to(self_extend_attention(q, k, v, rule, turn, ids), expected)


@given(st.integers(1, 12), st.integers(1, 40), st.sampled_from(["paper", "code"]))
def test_invariant_seam(group, window, form):
    """What `seam` states is what keys exactly a window behind get, over all queries; nothing runs backwards."""
    rule = SelfExtend(group=group, window=window, form=form)
    far = [
        oracle.self_extend_distance(q, q - window, group, window, fraction=form == "code")
        for q in range(window, window + 3 * group)
    ]
    assert rule.seam == pytest.approx((min(far), max(far)))
    assert (rule.seam[0] == rule.seam[1] == window) == (window % group == 0)
    ids = torch.arange(window + 40)
    seen = rule.distances(ids[-1:], ids).flatten()
    assert bool((seen.diff() <= 0).all())


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 60))
def test_invariant_reach(group, window, more):
    """Within the reach no distance leaves the trained ones, whatever the query."""
    rule, trained = SelfExtend(group=group, window=window), window + more
    last = rule.reach(trained) - 1
    ids = torch.tensor([0])
    assert rule.distances(torch.tensor([last]), ids).item() <= trained
    assert rule.distances(torch.tensor([last + 2 * group]), ids).item() >= trained


def test_fits_as_the_authors_advise():
    rule = SelfExtend(group=8, window=1024)
    assert rule.fits(8192, 4096)  # 1024 + 7168 / 8 = 1920 < 2048
    assert not rule.fits(16384, 4096)  # 2944
    assert not rule.fits(16384, 4096, share=2 / 3)  # 2730.7


def test_halves_keep_their_dtype_and_scores_do_not_lose():
    rope = RopeTurn(rope=RopeParams(theta=1e4), head_dim=8)
    rule, ids = SelfExtend(group=4, window=6, form="code"), torch.arange(20)
    q, k, v = (normal(1, 2, 20, 8, seed=seed).bfloat16() for seed in range(3))
    found = self_extend_attention(q, k, v, rule, rope, ids)
    assert found.dtype == torch.bfloat16
    assert_close_to(found, self_extend_attention(q.float(), k.float(), v.float(), rule, rope, ids))


def test_gradients_flow():
    rule, ids = SelfExtend(group=2, window=2), torch.arange(4)
    leaves = [normal(1, 1, 4, 8, seed=seed).requires_grad_() for seed in range(3)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: self_extend_attention(q, k, v, rule, turn, ids), leaves
    )


def test_gradients_of_padding_are_zero_and_finite():
    rule, ids = SelfExtend(group=2, window=2), torch.arange(5)
    leaves = [normal(1, 1, 5, 8, seed=seed).requires_grad_() for seed in range(3)]
    mask = (ids >= 2).expand(1, 1, 5, 5)
    self_extend_attention(*leaves, rule, turn, ids, mask=mask).sum().backward()
    for leaf in leaves:
        assert bool(leaf.grad.isfinite().all())
        assert not leaf.grad[:, :, :2].any()
        assert bool(leaf.grad[:, :, 2:].any())


def wrong(**changes):
    given = {
        "q": torch.ones(1, 2, 4, 8),
        "k": torch.ones(1, 2, 4, 8),
        "v": torch.ones(1, 2, 4, 8),
        "rule": SelfExtend(group=2, window=2),
        "turn": turn,
        "ids": torch.arange(4),
        "mask": None,
        "documents": None,
        "scale": None,
    } | changes
    return lambda: self_extend_attention(**given)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: SelfExtend(group=0, window=2), "group is 0"),
        (lambda: SelfExtend(group=2, window=0), "window is 0"),
        (lambda: SelfExtend(group=2, window=2, form="repo"), "form is 'repo'"),
        (lambda: SelfExtend(group=2, window=8).reach(8), "trained is 8 and window 8"),
        (wrong(k=torch.ones(1, 2, 3, 8), v=torch.ones(1, 2, 3, 8)), "no more queries than keys"),
        (wrong(k=torch.ones(1, 3, 4, 8), v=torch.ones(1, 3, 4, 8)), "divide the heads"),
        (wrong(ids=torch.arange(5)), r"ids have shape \(5,\)"),
        (wrong(ids=torch.arange(4.0)), "whole numbers"),
        (wrong(mask=torch.zeros(4, 4)), "mask is torch.float32"),
        (wrong(q=torch.ones(1, 2, 4, 8, dtype=torch.int64)), "q is torch.int64"),
        (wrong(v=torch.ones(1, 2, 4, 8, dtype=torch.int64)), "v is torch.int64"),
        (wrong(mask=torch.ones(3, 4, dtype=torch.bool)), r"mask has shape \(3, 4\)"),
        (wrong(mask=torch.ones(1, 1, 1, 4, 4, dtype=torch.bool)), "mask has shape"),
        (wrong(documents=torch.zeros(3, dtype=torch.int64)), r"documents has shape \(3,\)"),
        (wrong(scale=float("nan")), "scale is nan"),
        (wrong(turn=lambda ids: turn(ids[:3])), "turn gives 3 tokens for 16 ids"),
        (lambda: SelfExtend(group=2, window=2).fits(9, 9, share=-1.0), "share is -1.0"),
        (lambda: SelfExtend(group=2, window=2).fits(9, 9, share="half"), "share is 'half'"),
        (wrong(rule=3), "rule is 3"),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
