"""FIRE on a grid: what distance is measured against."""

import pytest
import torch

from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Fire, FireSpec, build

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
        ({"reach": "query"}, r"reach is 'query'; it must be one of 'extent', 'threshold'"),
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
