"""Training jitter of every coordinate-driven rotary scheme: what it can and cannot change, and who shares a draw."""

import dataclasses

import pytest
import torch
from hypothesis import given

import visionpos as vp
from tests.strategies import grids, seeds
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, MixedRopeSpec, PositionError
from visionpos.encodings import (
    ComropeSpec,
    GoldenRopeSpec,
    LiereSpec,
    PeriodicRopeSpec,
    SectionRopeSpec,
    StringRopeSpec,
)

DIMS = Dims(embed_dim=48, num_heads=2, depth=3, prefix=1, suffix=1)  # heads of 24 channels

RELATIVE = {
    "axial": AxialRopeSpec(),
    "axial, half a axis": AxialRopeSpec(pairing="half_per_axis"),
    "dinov3": AxialRopeSpec(unit="turns", pairing="half", coords=CoordSpec(unit="centred")),
    "pixel": AxialRopeSpec(max_freq=10.0, coords=CoordSpec(unit="endpoint")),
    "clip": AxialRopeSpec(rotary_dim="most", coords=CoordSpec(axes=3)),
    "mixed": MixedRopeSpec(),
    "section": SectionRopeSpec(sections=(8, 12, 12), clamp=True),
    "golden": GoldenRopeSpec(),
    "periodic": PeriodicRopeSpec(coords=CoordSpec(unit="centred")),
    "comrope": ComropeSpec(block=4, std=0.3),
    "string": StringRopeSpec(),
    "circulant": StringRopeSpec(variant="circulant", block=4),
}
NOT_RELATIVE = {
    "liere": LiereSpec(block=8, start=1.0),
    "tiled": AxialRopeSpec(rotary_dim="most", coords=CoordSpec(axes=3), legacy_tiling=True),
}


def module_of(spec, **how):
    """The module of a spec with these augmentations, in training, parameters random."""
    coords = dataclasses.replace(spec.coords, **how)
    torch.manual_seed(5)
    module = vp.build(dataclasses.replace(spec, coords=coords), DIMS).train()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * 0.5)
    return module


def turned(module, x, points, layer=0):
    """q or k with one prefix and one suffix token, turned at these points."""
    if hasattr(module, "turn"):
        return module.turn(x, points, layer, prefix=1, suffix=1)
    return module.rotation(module.angles(points, layer)).apply(x, prefix=1, suffix=1)


def scores(module, points):
    q, k = torch.randn(
        2, 1, 2, points.shape[-2] + 2, 24, generator=torch.Generator().manual_seed(1)
    )
    return turned(module, q, points) @ turned(module, k, points).mT


@pytest.mark.parametrize("name", RELATIVE)
def test_invariant_shift_moves_patches_against_exempt_tokens_alone(name):
    """facts/timm.md 1.4: patch-to-patch logits stay (1.4e-5 there), prefix-to-patch logits do not."""
    module = module_of(RELATIVE[name], shift=0.7)
    grid = Grid(3, 5)
    still = vp.build(module.spec, DIMS).eval().points(grid)
    before, after = scores(module, still), scores(module, module.points(grid))
    patches = slice(1, -1)
    inside = (after - before)[..., patches, patches].abs().max()
    assert inside < 3e-4, inside
    for edge in ((after - before)[..., 0, patches], (after - before)[..., patches, -1]):
        assert edge.abs().max() > 1e-2
    corner = (after - before)[..., [0, 0, -1, -1], [0, -1, 0, -1]]
    assert torch.equal(corner, torch.zeros_like(corner))


@pytest.mark.parametrize("name", NOT_RELATIVE)
def test_invariant_shift_is_felt_where_it_is_disclaimed(name):
    module = module_of(NOT_RELATIVE[name], shift=0.7)
    still = vp.build(module.spec, DIMS).eval().points(Grid(3, 5))
    inside = (scores(module, module.points(Grid(3, 5))) - scores(module, still))[..., 1:-1, 1:-1]
    assert inside.abs().max() > 1e-2


@pytest.mark.parametrize("name", [*RELATIVE, *NOT_RELATIVE])
def test_invariant_evaluation_is_still(name):
    """None of the three acts in evaluation, whatever the generator says."""
    spec = {**RELATIVE, **NOT_RELATIVE}[name]
    module = module_of(spec, shift=0.5, jitter=2.0, rescale=2.0).eval()
    plain = module_of(spec).eval()
    assert torch.equal(module.points(Grid(3, 5)), plain.points(Grid(3, 5)))


@pytest.mark.parametrize("name", [*RELATIVE, *NOT_RELATIVE])
@pytest.mark.parametrize("how", [{"rescale": 2.0}, {"jitter": 2.0}])
def test_invariant_training_changes_distances(name, how):
    """Scale is what no rotary scheme can undo: every scheme sees it."""
    module = module_of({**RELATIVE, **NOT_RELATIVE}[name], **how)
    moved = module.points(Grid(3, 5), generator=torch.Generator().manual_seed(3))
    still = vp.build(module.spec, DIMS).eval().points(Grid(3, 5))
    inside = (scores(module, moved) - scores(module, still))[..., 1:-1, 1:-1]
    assert inside.abs().max() > 1e-3


@given(grids(max_side=6, min_side=2), seeds())
def test_invariant_rescale_keeps_directions_and_jitter_keeps_axes(hw, seed):
    """One factor for all offsets; or one an axis. Neither mixes y with x, nor reorders neighbours."""
    still = vp.offsets(vp.coordinates(Grid(*hw)))
    for how, factors in (({"rescale": 3.0}, 1), ({"jitter": 3.0}, 2)):
        module = vp.build(AxialRopeSpec(coords=CoordSpec(**how)), DIMS).train()
        moved = module.points(Grid(*hw), generator=torch.Generator().manual_seed(seed))
        ratio = (vp.offsets(moved) / still)[still.abs().sum(-1) > 0]
        y, x = (ratio[:, axis][ratio[:, axis].isfinite()] for axis in (0, 1))
        assert (y - y[0]).abs().max() < 1e-4
        assert (x - x[0]).abs().max() < 1e-4
        assert min(y[0], x[0]) >= 1 / 3 - 1e-4
        assert max(y[0], x[0]) <= 3 + 1e-4
        assert (abs(y[0] - x[0]) < 1e-4) == (factors == 1)


def test_invariant_scope_forward():
    """One draw for all layers of a pass: the caller holds the points."""
    module = module_of(RELATIVE["dinov3"], rescale=2.0)
    points = module.points(Grid(3, 5))
    assert torch.equal(module.angles(points, 0), module.angles(points, 2))


def test_invariant_scope_block():
    """One draw a layer, in the order in which the layers would draw for themselves."""
    module = module_of(RELATIVE["dinov3"], rescale=2.0, jitter=1.5, scope="block")
    torch.manual_seed(2)
    together = module.points(Grid(3, 5), draws=DIMS.depth)
    torch.manual_seed(2)
    apart = [module.points(Grid(3, 5)) for _ in range(DIMS.depth)]
    assert torch.equal(together, torch.stack(apart))
    assert len({float(points.abs().max()) for points in apart}) == DIMS.depth


@pytest.mark.parametrize("name", ["dinov3", "mixed", "golden", "comrope", "string"])
def test_invariant_scope_sample(name):
    """One draw a sample: a batch turned at once is every sample turned by itself."""
    module = module_of(RELATIVE[name], rescale=2.0, scope="sample")
    points = module.points(Grid(3, 5), draws=4)  # [b, n, axes]
    q = torch.randn(4, 2, 17, 24)
    if hasattr(module, "turn"):
        out = module.turn(q, points, 1, prefix=1, suffix=1)
    else:
        turns = module.angles(points, 1)
        turns = turns if turns.ndim == 4 else turns.unsqueeze(1)  # [b, heads or 1, n, pairs]
        out = module.rotation(turns).apply(q, prefix=1, suffix=1)
    for sample in range(4):
        alone = turned(module, q[sample : sample + 1], points[sample], 1)
        torch.testing.assert_close(out[sample : sample + 1], alone, rtol=0, atol=1e-5)
    assert not torch.equal(points[0], points[1])


def test_invariant_generator_is_the_only_source():
    module = module_of(RELATIVE["mixed"], shift=0.2, rescale=2.0)
    before = torch.get_rng_state()
    one, two = (
        module.points(Grid(3, 5), generator=torch.Generator().manual_seed(9)) for _ in range(2)
    )
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("axes", [2, 3])
def test_invariant_first_says_who_draws_first(axes):
    """The same numbers, given to the other spatial axis; time keeps its own."""
    how = {"shift": 0.5, "jitter": 2.0, "axes": axes}
    coords = torch.ones(1, axes)
    torch.manual_seed(1)
    y_first = vp.augment(coords, CoordSpec(**how))
    torch.manual_seed(1)
    x_first = vp.augment(coords, CoordSpec(first="x", **how))
    order = [*range(axes - 2), axes - 1, axes - 2]
    assert torch.equal(x_first, y_first[:, order])


def test_error_first():
    with pytest.raises(vp.PositionError, match=r"first is 'z'; it must be one of 'y', 'x'"):
        CoordSpec(first="z")


def test_compile_training():
    """Drawing inside a graph, without a break, gives the draws of eager code."""
    module = module_of(RELATIVE["dinov3"], shift=0.1, jitter=1.5, rescale=2.0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: module(Grid(3, 5)).apply(q), backend="eager", fullgraph=True)
    q = torch.randn(1, 2, 15, 24)
    torch.manual_seed(4)
    expected = module(Grid(3, 5)).apply(q)
    torch.manual_seed(4)
    assert torch.equal(compiled(q), expected)


ROTARY = {
    "axial": vp.AxialRopeSpec(coords=CoordSpec(jitter=1.5)),
    "golden": vp.GoldenRopeSpec(),
    "circle": vp.CircleRopeSpec(sections=(2, 3, 3)),
    "mixed": vp.MixedRopeSpec(coords=CoordSpec(shift=0.5, scope="sample")),
    "liere": vp.LiereSpec(coords=CoordSpec(unit="span", rescale=2.0, scope="block")),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ROTARY)
def test_shape_of_draws_is_that_of_training(name, training):
    """draws=3 is [3, n, axes] in either mode, one draw has no dimension, and no draw at all is refused."""
    dims = (
        Dims(embed_dim=48, num_heads=2, depth=3)
        if name != "circle"
        else Dims(embed_dim=64, num_heads=2, depth=3)
    )
    module = vp.build(ROTARY[name], dims).train(training)
    still = vp.build(ROTARY[name], dims).eval().points(Grid(3, 5))
    drawn = module.points(Grid(3, 5), draws=3)
    assert drawn.shape == (3, 15, still.shape[-1])
    assert module.points(Grid(3, 5)).shape == still.shape
    if not training:
        assert torch.equal(drawn, still.expand(3, -1, -1))
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(PositionError, match=rf"draws is {bad!r}; a whole number of at least 1"):
            module.points(Grid(3, 5), draws=bad)
