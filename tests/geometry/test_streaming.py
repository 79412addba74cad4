"""Streaming caches: what stays, and keys turned again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerances import assert_close_to
from visionpos.errors import PositionError
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.scaling import DynamicNtk, LongRope
from visionpos.geometry.streaming import Sinks, turned_again
from visionpos.geometry.yarn import Yarn

KEPT = torch.tensor([0, 1, 2, 3, 6, 7, 8])
SLOTS = torch.arange(7)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(ids, freqs, gain=1.0):
    """Return a float64 rotation, to hold float64 laws against."""
    return Rotation.of(ids.double().unsqueeze(-1) * freqs, "half", scale=gain)


FREQS = 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)


def test_slot_rotation_equals_fresh_rotation():
    """Cached keys, turned at their places, turned again to slots: 2.5e-13 of the facts, in float64."""
    keys = normal(2, 3, 7, 16)
    fresh = exact(SLOTS, FREQS).apply(keys)
    again = turned_again(exact(KEPT, FREQS).apply(keys), KEPT, SLOTS, lambda i: exact(i, FREQS))
    assert_close_to(again, fresh)


def test_slots_keep_recent_logits_and_change_those_of_sinks():
    """Query at place 8, slot 6: logits of the recent keys stay, those of sinks do not; unmended keys are off."""
    q, keys = normal(1, 1, 1, 16, seed=1), normal(1, 1, 7, 16)

    def logits(query_id, key_ids):
        one = exact(torch.tensor([query_id]), FREQS).apply(q)
        return (one @ exact(key_ids, FREQS).apply(keys).transpose(-1, -2)).flatten()

    by_place, by_slot, unmended = logits(8, KEPT), logits(6, SLOTS), logits(6, KEPT)
    assert_close_to(by_slot[4:], by_place[4:])
    assert ((by_slot - by_place)[:4].norm() / by_place[:4].norm()).item() > 0.1
    assert torch.equal(unmended[:4], by_slot[:4])  # sinks stand at their slots anyway
    assert ((unmended - by_slot)[4:].norm() / by_slot[4:].norm()).item() > 0.5


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize(
    "scaling", [None, Yarn(factor=4.0, original_positions=16)], ids=["plain", "yarn"]
)
def test_turned_again_keeps_the_gain_once(pairing, scaling):
    """YaRN's gain is in the cache once; batches of unlike ids, and channels that do not turn, come out right too."""
    rope = RopeParams(theta=1e4, share=0.5, scaling=scaling)
    turn = RopeTurn(rope=rope, head_dim=16, pairing=pairing)
    keys = normal(2, 1, 3, 16).float()
    old, new = torch.tensor([[5, 9, 200], [0, 1, 2]]), torch.tensor([[0, 1, 2], [7, 8, 9]])
    again = turned_again(turn(old).apply(keys), old, new, turn)
    assert_close_to(again, turn(new).apply(keys))


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicNtk(factor=2.0, original_positions=8),
        LongRope(
            short_factor=(1.0,) * 8,
            long_factor=tuple(float(k + 2) for k in range(8)),
            original_positions=8,
            factor=4.0,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_turned_again_joins_two_ladders(scaling):
    """A cache filled while the text was short is mended for the ladder of the long text."""
    turn = RopeTurn(rope=RopeParams(theta=1e4, scaling=scaling), head_dim=16)
    keys = normal(1, 2, 4, 16).float()
    short, long = torch.arange(4), torch.arange(30)

    def later(ids):
        whole = turn(long)
        return Rotation(whole.cos[ids], whole.sin[ids], whole.pairing)

    again = turned_again(turn(short).apply(keys), short, short, later, old_turn=turn)
    assert_close_to(again, later(short).apply(keys))
    assert not torch.allclose(again, turn(short).apply(keys), atol=1e-3)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 30), st.data())
def test_invariant_kept(sinks, window, length, data):
    """What stays is the sinks and the end, in order; with what comes it fits; nothing is dropped without need."""
    coming = data.draw(st.integers(0, window))
    rule = Sinks(sinks=sinks, window=window)
    kept = rule.kept(length, coming).tolist()
    dropped = [place for place in range(length) if place not in kept]
    assert kept == sorted(set(kept))
    assert len(kept) + coming <= rule.size
    assert set(range(min(sinks, length))) <= set(kept)
    if dropped:
        assert dropped == list(range(sinks, sinks + len(dropped)))
        assert len(kept) + coming == rule.size
    assert kept == [place for place in range(length) if place not in dropped]


def test_a_stream_of_any_length_keeps_its_slots():
    """Token by token: the cache equals the one of the paper, and slots never run past its size."""
    rule, cache = Sinks(sinks=2, window=3), []
    for token in range(20):
        cache = [cache[place] for place in rule.kept(len(cache), 1).tolist()] + [token]
        recent = [t for t in range(token + 1) if t > token - 3 and t >= 2]
        assert cache == [t for t in (0, 1) if t <= token] + recent
        assert len(cache) <= rule.size


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Sinks(window=0), "window is 0"),
        (lambda: Sinks(sinks=-1, window=4), "sinks is -1"),
        (lambda: Sinks(window=4).kept(10, 5), "coming is 5 and window 4"),
        (lambda: Sinks(window=4).kept(-1), "length is -1"),
        (lambda: Sinks(window=4).kept(2.5), "length is 2.5"),
        (
            lambda: turned_again(
                torch.ones(1, 1, 2, 16), torch.arange(2), torch.arange(3), lambda i: exact(i, FREQS)
            ),
            "must agree",
        ),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
