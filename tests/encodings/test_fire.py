"""FIRE on a grid: what distance is measured against."""

import pytest
import torch

from tests.reference import pairs
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Fire, FireSpec, build
from visionpos.kernels.scores import score_mod

DIMS = Dims(embed_dim=12, num_heads=3, depth=1)


def fire(**fields) -> Fire:
    return Fire(FireSpec(**fields), DIMS, generator=torch.Generator().manual_seed(0))


def test_shape_of_shipped():
    spec = load_encoding("fire_2d")
    assert (spec.metric, spec.reach, spec.threshold, spec.hidden) == ("l2", "extent", 14.0, 32)
    module = build(spec, DIMS)
    assert sum(w.numel() for w in module.parameters()) == 2 * 32 + 33 * 3 + 2


@pytest.mark.parametrize("metric", ["l1", "l2", "linf"])
def test_invariant_far_corner_is_one(metric):
    """Under "extent" the corners of any grid larger than the threshold are at input 1."""
    module = fire(metric=metric, threshold=2.0)
    for hw in ((4, 7), (20, 9)):
        corner = module.values(torch.tensor([[hw[0] - 1.0, 1.0 - hw[1]]]), extent=(1, *hw))
        one = module.out(module.hidden(torch.ones(1)).relu())
        torch.testing.assert_close(corner[:, 0], one, rtol=1e-4, atol=1e-5)


def test_invariant_threshold_holds_small_grids():
    """Below the threshold a difference has one bias on every grid; above it the extent takes over."""
    module = fire(threshold=14.0)
    step = torch.tensor([[1.0, 0.0]])
    small = [module.values(step, extent=(1, side, side)) for side in (3, 7, 10)]
    assert torch.equal(small[0], small[1])
    assert torch.equal(small[0], small[2])
    assert not torch.equal(small[0], module.values(step, extent=(1, 30, 30)))


def test_invariant_a_zoom_nearly_keeps_the_picture():
    """Under "extent" a view at twice the tokens keeps its biases nearly; under "threshold" it does not."""
    gaps = {}
    for reach in ("extent", "threshold"):
        module = fire(reach=reach, threshold=2.0, warp=100.0)
        one = module.values(torch.tensor([[3.0, 4.0]]), extent=(1, 9, 9))
        two = module.values(torch.tensor([[6.0, 8.0]]), extent=(1, 17, 17))
        gaps[reach] = (one - two).abs().max().item()
    assert gaps["extent"] < gaps["threshold"] / 3


def test_invariant_source_keys():
    """mlp.0, mlp.2, c and L_multiplier times init_L, as chuanyang-Zheng/DAPE writes them."""
    module = fire()
    state = {
        "mlp.0.weight": module.hidden.weight.detach(),
        "mlp.0.bias": module.hidden.bias.detach(),
        "mlp.2.weight": module.out.weight.detach(),
        "mlp.2.bias": module.out.bias.detach(),
        "c": torch.tensor(0.3),
        "L_multiplier": torch.tensor(-0.5),
        "init_L": torch.tensor(512.0),
    }
    ours = Fire.from_source(state, FireSpec(), DIMS)
    assert (ours.warp.item(), ours.threshold.item()) == (pytest.approx(0.3), -256.0)
    x = ours.inputs(torch.tensor([3.0]), reach=10.0)
    assert x.item() == pytest.approx(
        torch.tensor(1.9).log().item() / (torch.tensor(77.8).log().item() + 1e-6)
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"metric": "l9"}, r"metric is 'l9'"),
        ({"reach": "key"}, r"reach is 'key'; it must be one of 'extent', 'threshold', 'query'"),
        ({"threshold": 0.0}, r"threshold is 0\.0, warp 0\.1 and hidden 32; finite numbers above 0"),
        ({"warp": float("nan")}, r"warp is nan; it must be a finite number"),
        ({"hidden": 0}, r"hidden 0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        FireSpec(**fields)


def test_error_extent():
    with pytest.raises(
        PositionError, match=r"extent is None; reach 'extent' measures .*'threshold'"
    ):
        fire().values(torch.zeros(1, 2))
    assert fire(reach="threshold").values(torch.zeros(1, 2)).shape == (3, 1)
    assert fire()(Grid(1, 1)).isfinite().all()


def test_error_source():
    with pytest.raises(PositionError, match=r"no entry L_multiplier"):
        Fire.from_source({"c": torch.tensor(0.1)}, FireSpec(), DIMS)


def network(module: Fire, inputs: list[float]) -> torch.Tensor:
    """Return the bias of inputs, unit after unit, `[heads, inputs]`."""
    x = torch.tensor(inputs, dtype=torch.float64).unsqueeze(-1)
    return module.out(module.hidden(x).relu()).mT


def causal(**fields) -> Fire:
    spec = FireSpec(reach="query", **{"threshold": 5.0, "metric": "l1", **fields})
    return Fire(spec, DIMS, generator=torch.Generator().manual_seed(3)).double()


def test_golden_inputs():
    """Facts 1.2: what the network is given at (query, key), for a warp of .1 and a threshold of 512."""
    golden = {(10, 9): 0.024098, (10, 0): 0.175255, (511, 0): 0.999515, (1023, 0): 1.0}
    golden[1023, 1022] = 0.020551
    module = Fire(FireSpec(reach="query"), DIMS)
    for (query, key), expected in golden.items():
        found = module.inputs(torch.tensor(float(query - key)), reach=torch.tensor(float(query)))
        assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "m"), [(9, 9), (1, 9), (3, 20), (1, 1)])
def test_reference_causal(n, m):
    """The paper's form, pair by pair, on both sides of the threshold."""
    module = causal()
    inputs = [pairs.fire_input(i, j, 0.1, 5.0) for i in range(m - n, m) for j in range(m)]
    expected = network(module, inputs).unflatten(-1, (n, m))
    torch.testing.assert_close(module.along(n, m), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(module(Grid(1, m))[:, m - n :], module.along(n, m))


def test_gradient_of_the_pieces_is_the_networks():
    """Straight pieces learn as the network does: warp, threshold and all four weights."""
    module = causal(threshold=3.0)
    ids = torch.arange(7, dtype=torch.float64)
    distance = (ids.unsqueeze(1) - ids).abs()
    inputs = module.inputs(distance, reach=ids.unsqueeze(1)).unsqueeze(-1)
    whole = module.out(module.hidden(inputs).relu()).movedim(-1, 0)
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).double()
    parts = list(module.parameters())
    expected = torch.autograd.grad((whole * weight).sum(), parts)
    found = torch.autograd.grad((module.along(7) * weight).sum(), parts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_invariant_units_without_slope():
    """A unit that never turns is on everywhere or nowhere."""
    module = causal()
    module.hidden.weight.data[:5] = 0.0
    module.hidden.bias.data[:3] = 0.25
    module.hidden.bias.data[3:5] = -0.25
    x = torch.linspace(0, 1, 33, dtype=torch.float64)
    torch.testing.assert_close(module.pieces().at(x), network(module, x.tolist()))


def test_invariant_a_fixed_threshold():
    """It stays out of the gradient and in the state dict."""
    module = causal(learn_threshold=False)
    module.along(7).sum().backward()
    assert module.threshold.grad is None
    assert module.warp.grad is not None
    assert "threshold" in module.state_dict()


def test_invariant_shift():
    """Facts 0: not shift-invariant once a query's place passes the threshold; below it, it is."""
    module = causal(threshold=20.0)
    ids = torch.arange(6).unsqueeze(-1)
    here = module.between(ids, ids)
    torch.testing.assert_close(module.between(ids + 10, ids + 10), here)
    assert not torch.allclose(module.between(ids + 100, ids + 100), here)


def test_invariant_two_documents_are_each_alone():
    """Ids that restart give a document what it has alone; ids that run on do not."""
    module = causal()
    alone = module.along(9)
    ids = torch.cat([torch.arange(12), torch.arange(9)]).unsqueeze(-1)
    torch.testing.assert_close(module.between(ids, ids)[:, 12:, 12:], alone)
    on = torch.arange(21).unsqueeze(-1)
    assert not torch.allclose(module.between(on, on)[:, 12:, 12:], alone)


def test_shape_of_a_line_in_both_directions():
    """Under "extent" a line of any length keeps its scale; under "threshold" differences are all."""
    module = Fire(FireSpec(threshold=3.0), DIMS)
    assert torch.equal(module.along(9), module(Grid(1, 9)))
    plain = Fire(FireSpec(reach="threshold"), DIMS)
    assert torch.equal(plain.along(4, 9), plain(Grid(1, 9))[:, 5:])


def test_error_causal():
    with pytest.raises(PositionError, match="reach is 'query', whose bias also depends"):
        causal().distinct(Grid(1, 5))
    with pytest.raises(PositionError, match="places is None"):
        causal().values(torch.zeros(3, 1))
    with pytest.raises(PositionError, match="queries has 2 axes"):
        causal().between(torch.zeros(3, 2), torch.zeros(3, 2))


def test_score_of_a_faint_warp():
    """A warp too faint for float32 makes every input 0, not 0 / 0."""
    bias = build(FireSpec(reach="query", warp=1e-9), Dims(embed_dim=8, num_heads=2, depth=1))
    add = score_mod(bias, Grid(1, 4))
    found = add(torch.tensor(0.0), *torch.tensor([0, 1, 3, 1]))
    expected = bias.out(bias.hidden(torch.zeros(1)).relu())[1]
    torch.testing.assert_close(found, expected)
