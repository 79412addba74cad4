"""Token dropping and resolution sampling of NaViT: moments, counts, bounds, and one state one draw."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import grids as sides
from tests.strategies import seeds
from visionpos import Grid
from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import (
    Image,
    drop_rates,
    family,
    keep_tokens,
    pack_images,
    resampled,
    sample_sides,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("mean", "std", "most"), [(0.5, 0.1, 1.0), (0.3, 0.25, 0.9), (0.6, 0.05, 0.7)]
)
def test_reference_rates_are_beta(mean: float, std: float, most: float) -> None:
    rates = drop_rates(100_000, mean=mean, std=std, most=most, generator=generator())
    assert rates.min() >= 0
    assert rates.max() <= most
    assert rates.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(1e5))
    assert rates.std().item() == pytest.approx(std, rel=0.02)
    # The third moment tells a Beta from a clipped normal: skewness of Beta(a, b) on [0, most].
    share = mean / most
    weight = mean * (most - mean) / std**2 - 1
    a, b = share * weight, (1 - share) * weight
    skew = 2 * (b - a) * math.sqrt(a + b + 1) / ((a + b + 2) * math.sqrt(a * b))
    standard = (rates - rates.mean()) / rates.std()
    assert standard.pow(3).mean().item() == pytest.approx(skew, abs=0.05)


@given(st.lists(sides(max_side=9), max_size=8), st.floats(0, 0.999), seeds())
def test_invariant_counts(drawn: list[tuple[int, int]], rate: float, seed: int) -> None:
    """Every image keeps max(1, int(n (1 - rate))) tokens, as timm and vit-pytorch; one state, one choice."""
    grids = [Grid(*hw) for hw in drawn]
    rates = torch.linspace(0, rate, max(len(grids), 1))[: len(grids)].double()
    keep = keep_tokens(grids, rates, generator=generator(seed))
    parts = keep.split([grid.size for grid in grids]) if grids else ()
    wanted = [max(1, int(g.size * (1 - r))) for g, r in zip(grids, rates.tolist(), strict=True)]
    assert [int(part.sum()) for part in parts] == wanted
    assert torch.equal(keep, keep_tokens(grids, rates, generator=generator(seed)))


def test_invariant_every_cell_is_as_likely() -> None:
    keep = keep_tokens([Grid(3, 5)] * 8000, 0.6, generator=generator()).view(8000, 15)
    shares = keep.double().mean(0)
    assert (shares - 0.4).abs().max() < 5 * math.sqrt(0.24 / 8000)
    pairs = keep.double().T @ keep.double() / 8000  # and without order: 6 of 15, so 30 of 210 pairs
    assert (pairs[~torch.eye(15, dtype=torch.bool)] - 30 / 210).abs().max() < 0.03


def test_invariant_draws_come_from_the_generator() -> None:
    source = generator()
    before = torch.get_rng_state()
    first = keep_tokens([Grid(9, 9)], 0.5, generator=source)
    assert not torch.equal(first, keep_tokens([Grid(9, 9)], 0.5, generator=source))
    a = drop_rates(4, mean=0.5, std=0.2, generator=generator(1))
    assert torch.equal(a, drop_rates(4, mean=0.5, std=0.2, generator=generator(1)))
    assert not torch.equal(a, drop_rates(4, mean=0.5, std=0.2, generator=generator(2)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mean", [-0.5, 0.0, 1.0])
def test_reference_sides(mean: float) -> None:
    """Sides follow the truncated normal: its quantiles by a fine sum over the density."""
    drawn = sample_sides(50_000, 64, 256, law="normal", mean=mean, generator=generator())
    place = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    mass = torch.exp(-0.5 * (place - mean) ** 2).cumsum(0)
    for share in (0.1, 0.5, 0.9):
        wanted = 160 + 96 * place[(mass / mass[-1] < share).sum()].item()
        assert drawn.quantile(share).item() == pytest.approx(wanted, abs=2.0)
    flat = sample_sides(50_000, 64, 256, generator=generator())
    assert flat.quantile(0.25).item() == pytest.approx(112, abs=2.0)


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=6),
    st.floats(1, 1000),
    st.integers(1, 32),
)
def test_invariant_resampled(sizes: list[tuple[int, int]], side: float, patch: int) -> None:
    """Sizes are whole patches, each within half a patch of the exact aspect and area."""
    out = resampled(sizes, side, patch)
    for (height, width), new in zip(sizes, out.tolist(), strict=True):
        scale = side / math.sqrt(height * width)
        for old, one in zip((height, width), new, strict=True):
            assert one % patch == 0
            assert one >= patch
            assert one == patch or abs(one - old * scale) <= patch / 2 + 1e-6
        Grid.of_image((new[0], new[1]), patch)
    turned = resampled([(w, h) for h, w in sizes], side, patch)
    assert torch.equal(turned, out.flip(-1))


def test_shape_edges() -> None:
    assert keep_tokens([], 0.5, generator=generator()).shape == (0,)
    assert resampled([(480, 640), (640, 480)], torch.tensor([240.0, 120.0]), 16).tolist() == [
        [208, 272],
        [144, 96],
    ]
    assert keep_tokens([Grid(1, 1)], 0.99, generator=generator()).tolist() == [True]


def test_error_values() -> None:
    source = generator()
    cases = [
        (lambda: drop_rates(2, mean=0.5, std=0.5, generator=source), "std 0.5.*Lower std"),
        (lambda: drop_rates(2, mean=0.9, std=0.1, most=0.8, generator=source), "most 0.8"),
        (lambda: keep_tokens([Grid(2, 2)], 1.0, generator=source), "rates hold 1.0.*below 1"),
        (lambda: keep_tokens([Grid(2, 2)], float("nan"), generator=source), "rates hold nan"),
        (lambda: keep_tokens([Grid(2, 2)], torch.zeros(3), generator=source), "for 1 images"),
        (lambda: sample_sides(1, 256, 64, generator=source), "low_px is 256"),
        (lambda: sample_sides(1, 8, 64, law="normal", mean=3, generator=source), "mean is 3"),
        (lambda: sample_sides(1, 8, 64, law="beta", generator=source), "law is 'beta'"),
        (lambda: resampled([(0, 3)], 224, 16), "down to 0"),
        (lambda: resampled([(2, 3)], 224, 0), "patch is 0"),
        (lambda: resampled([(float("inf"), 3)], 224, 16), "up to inf.*finite"),
        (lambda: resampled([(3, 4)], 1e30, 16), "reach 1e.30.*at most 2147483647"),
        (lambda: resampled([(3,)], 224, 16), "two numbers an image"),
        (lambda: drop_rates(-1, mean=0.5, std=0.1, generator=source), "images is -1"),
        (lambda: sample_sides(2.5, 8, 64, generator=source), "images is 2.5"),
        (lambda: sample_sides(1, 8, 64, law="normal", std=1e9, generator=source), "is uniform"),
        (lambda: keep_tokens([Grid(2, 2)], "a", generator=source), "rates is 'a'"),
        (lambda: resampled([(2, 3)], torch.ones(2), 16), "for 1 images"),
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()


def test_navit_plans_what_resampling_gives() -> None:
    """The family's sizes are those of `resampled`, ties to even, each side from its own exact root."""
    sizes = [(600, 800), (20, 3000), (3000, 20), (1, 1), (7, 7), (641, 479), (1, 4000)]
    sizes += [(13 * at % 997 + 1, 29 * at % 1009 + 1) for at in range(500)]
    for variant, side in ((None, 224), ("64", 64), ("128", 128), ("384", 384), ("512", 512)):
        fam = family("navit", variant=variant)
        planned = [fam.plan(Image(size)).views[0].size_hw for size in sizes]
        assert planned == [tuple(size) for size in resampled(sizes, side, patch=16).tolist()]
    native = family("navit", variant="native")
    assert native.plan(Image((24, 7))).views[0].size_hw == (32, 16)
    plans = [fam.plan(Image(size)) for size in ((48, 64), (97, 131), (600, 20))]
    packed = pack_images([plan.views[0].tokens for plan in plans], 2048)
    assert packed.counts.tolist() == [plan.cells for plan in plans]


def test_navit_ties_go_to_even_multiples() -> None:
    """A square of 24 or 40 pixels is 1.5 or 2.5 patches of 16."""
    for side, expected in ((24, 32), (40, 32), (56, 64), (72, 64), (3, 16)):
        steps = [{"kind": "area", "px": side * side, "unit": 16}]
        fam = family("navit", overlay={"views": {"global": {"size": steps}}})
        assert fam.plan(Image((7, 7))).views[0].size_hw == (expected, expected)
    steps = [{"kind": "area", "px": 9, "unit": 16, "chained": True}]
    with pytest.raises(ConfigError, match=r"area step has unit with chained"):
        family("navit", overlay={"views": {"global": {"size": steps}}})
