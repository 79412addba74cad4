"""Golden ids, distances, gains and bounds of facts/sequence_and_audit.md 1.1 and 1.3."""

import math

import pytest
import torch

import visionpos as vp
from visionpos import config
from visionpos.geometry import bounds
from visionpos.geometry.coupling import coupled_addition
from visionpos.geometry.latent import Latent
from visionpos.geometry.layer_views import layer_gains, layer_mask
from visionpos.geometry.layers import Temperature
from visionpos.geometry.self_extend import SelfExtend
from visionpos.geometry.sequence import skipped
from visionpos.geometry.streaming import Sinks


def test_golden_rope_by_both_pairings():
    """x = 1 ... 8 at position 1, base 10000: as x-transformers and timm have it, and transformers and timm."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 1, 1, 8)
    turns = vp.angles(torch.ones(1, 1).double(), vp.ladder(4, theta=1e4, dtype=torch.float64)[None])
    adjacent = [-1.142640, 1.922076, 2.585679, 4.279517, 4.939751, 6.049699, 6.991997, 8.006996]
    half = [-3.667053, 1.391008, 2.929851, 3.991998, 3.542983, 6.169692, 7.029650, 8.003996]
    for pairing, expected in (("adjacent", adjacent), ("half", half)):
        found = vp.Rotation.of(turns, pairing=pairing).apply(x).flatten()
        assert found.tolist() == pytest.approx(expected, abs=6e-7)


def test_golden_pairings_are_one_permutation():
    """half(x[perm]) is adjacent(x)[perm], bit for bit."""
    perm = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    assert perm.argsort().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    turns = vp.angles(torch.arange(5.0)[:, None], vp.ladder(4, theta=1e4)[None])
    halves = vp.Rotation.of(turns, "half").apply(x[..., perm])
    assert torch.equal(halves, vp.Rotation.of(turns, "adjacent").apply(x)[..., perm])


def test_golden_pose():
    assert skipped(8, 3, 10).tolist() == [0, 1, 2, 13, 14, 15, 16, 17]


def test_golden_coupling():
    found = coupled_addition(3, 2, 3, start=1).tolist()  # 123+45=168
    assert found == [4, 3, 2, 1, 3, 2, 5, 4, 3, 2]
    turned_round = coupled_addition(3, 2, 3, start=1, is_reversed=True).tolist()
    assert turned_round == [4, 3, 2, 1, 3, 2, 1, 2, 3, 4]  # "=" has the id of "+"


@pytest.mark.parametrize(
    ("q", "seen"), [(20, {0: 11, 5: 10, 12: 8, 13: 7}), (31, {0: 13})], ids=["q20", "q31"]
)
def test_golden_self_extend(q, seen):
    rule = SelfExtend(group=4, window=8)
    found = rule.distances(torch.tensor([q]), torch.tensor(list(seen)))
    assert found.tolist() == [list(seen.values())]


def test_golden_self_extend_reach():
    assert SelfExtend(group=8, window=1024).reach(4096) == 25600


def test_golden_sinks():
    """Kept 0-3, 6, 7, 8 of nine tokens; their slots are 0-6."""
    kept = Sinks(sinks=4, window=3).kept(9)
    assert kept.tolist() == [0, 1, 2, 3, 6, 7, 8]


def test_golden_temperature_of_llama4():
    ids = torch.tensor([8190, 8191, 16383, 131071, 1048575, 9999999])
    expected = [1.0, 1.069315, 1.109861, 1.283321, 1.485981, 1.710743]
    plan = config.load_language("llama4")
    assert layer_gains(plan, 3, ids).tolist() == pytest.approx(expected, abs=6e-7)
    assert layer_gains(plan, 2, ids) is None


def test_golden_temperature_beyond_float32():
    """2**24 * 8192 - 1 and its follower differ by a step only as whole numbers."""
    last = 2**24 * 8192
    gains = Temperature(every=8192, scale=1.0).gains(torch.tensor([last - 1, last]))
    assert gains.tolist() == pytest.approx([1 + math.log(2**24), 1 + math.log(2**24 + 1)])
    assert Temperature(every=1).gains(torch.tensor([2**24 + 1])).item() > 1


def test_golden_nope_counts_predecessors():
    """A uniform causal head returns 1 / (i + 1) on an indicator of the first token."""
    plan = config.load_language("command_a")
    assert plan.kind(3).rope is None
    mask = layer_mask(plan, 3, torch.zeros(256, dtype=torch.int64))
    scores = torch.zeros(256, 256).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)[:, 0]
    for place, share in {0: 1, 1: 0.5, 9: 0.1, 99: 0.01, 255: 0.00390625}.items():
        assert weights[place].item() == pytest.approx(share, rel=1e-6)


def test_golden_latent_sizes():
    plan = config.load_language("deepseek_v3")
    assert plan.latent == Latent(
        still_dim=128, rope_dim=64, value_dim=128, kv_rank=512, q_rank=1536
    )
    assert (plan.latent.width, plan.latent.cached) == (192, 512 + 64)
    assert plan.softmax_scale(0) == pytest.approx(192**-0.5 * 1.873854, rel=1e-6)


@pytest.mark.parametrize(
    ("trained", "theta", "dims"), [(4096, 1e4, 92), (2048, 1e4, 82), (8192, 5e5, 70)]
)
def test_golden_critical_dim(trained, theta, dims):
    assert bounds.critical_dim(trained, theta, 128) == dims


@pytest.mark.parametrize(("context", "base"), [(16384, 7.17e4), (32768, 1.92e5), (2**20, 2.65e7)])
def test_golden_critical_base(context, base):
    """The sheet's 1M is 2**20."""
    assert bounds.critical_base(context, 4096) == pytest.approx(base, rel=2.5e-3)


# The sheet's first good bases are those of a coarse scan, which lie in islands of good ones.
@pytest.mark.parametrize(
    ("context", "good", "last"), [(1000, 4.28e3, 6.0e3), (2000, 1.47e4, 2.3e4)]
)
def test_golden_bases_of_men(context, good, last):
    assert bounds.first_failure(context, good, 64) is None
    scan = bounds.scan_bases(context, 64, low=last * 0.93, high=last * 2, step=1.005)
    assert float(f"{scan.last_failing:.1e}") == last  # two digits are printed
    assert good < scan.last_failing  # the good ones are no interval


def test_golden_base_of_men_at_4000():
    """2.91e4 ends an island that begins at 2.864e4."""
    assert bounds.first_failure(4000, 2.905e4, 64) is None
    assert bounds.first_failure(4000, 2.92e4, 64) is not None


def test_golden_bound_on_vision_grids():
    """16 pairs an axis: base 100 holds to 14 cells and fails by 32 (-0.14); base 10000 holds to 256."""
    assert bounds.first_failure(14, 100.0, 16) is None
    assert bounds.first_failure(32, 100.0, 16) is not None
    lowest = bounds.cosine_sum(torch.arange(33), 100.0, 16).min().item()
    assert lowest == pytest.approx(-0.14, abs=5e-3)
    assert bounds.first_failure(256, 1e4, 16) is None
    slow = 13 * vp.ladder(16, theta=1e4) < math.pi / 2
    assert int(slow.sum()) == 12  # of 16 pairs turn less than a quarter over 14 cells
