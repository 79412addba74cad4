"""Offset table: absolute differences, the origin kept by mirroring, strided queries, no cache."""

import numpy as np
import pytest
import torch
from hypothesis import given

import visionpos as vp
from tests.reference import resampling
from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import OffsetTable, OffsetTableSpec, build
from visionpos.geometry.relative import distinct_offsets

DIMS = Dims(embed_dim=12, num_heads=3, depth=1)


def offsets(window_hw=(3, 5), seed=0, **fields) -> OffsetTable:
    module = OffsetTable(OffsetTableSpec(window_hw=window_hw, **fields), DIMS).eval()
    module.table.data.normal_(generator=torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize(
    ("name", "window", "resize"),
    [("levit_14", (14, 14), "mirrored"), ("tiny_vit_7", (7, 7), "direct")],
)
def test_shape_of_shipped(name, window, resize):
    spec = load_encoding(name)
    assert (spec.window_hw, spec.resize) == (window, resize)
    module = build(spec, DIMS)
    assert module.table.shape == (window[0] * window[1], 3)
    assert (module.table == 0).all()


@pytest.mark.parametrize("hw", [(1, 7), (7, 1), (5, 3), (13, 11)])
@pytest.mark.parametrize("resize", ["mirrored", "direct"])
def test_shape_of_a_resized_table(hw, resize):
    moved = offsets(resize=resize).resized(hw)
    assert moved.spec.window_hw == hw
    assert moved.table.shape == (hw[0] * hw[1], 3)
    assert torch.equal(moved(Grid(*hw)), offsets(resize=resize)(Grid(*hw)))


@pytest.mark.parametrize("start", [0.0, 0.02])
def test_reference_start_values(start):
    """Zero as in the sources, or truncated normal from the passed generator."""
    spec = OffsetTableSpec(window_hw=(30, 40), std=start)
    table = OffsetTable(spec, DIMS, generator=torch.Generator().manual_seed(0)).table
    assert table.std().item() == pytest.approx(start, rel=0.05)


@given(hw=grids(max_side=7, min_side=2), seed=seeds())
def test_invariant_mirrored_resizing_is_even(hw, seed):
    """Pitfall 15: the two-sided table stays even about difference 0, so nothing depends on the sign."""
    module = offsets(seed=seed)
    table = module.distinct(Grid(*hw)).unflatten(1, tuple(2 * side - 1 for side in hw))
    torch.testing.assert_close(table, table.flip(1), rtol=0, atol=0)
    torch.testing.assert_close(table, table.flip(2), rtol=0, atol=0)


def test_invariant_mirroring_keeps_the_origin():
    """Pitfall 15: on a table that is 1 at difference 0 alone, enlarged, "direct" pulls the peak to one side.

    A one-sided table of the distance itself shows it best: mirrored, difference 0 keeps the least bias and the rise is
    even; direct, half a cell of the scale is lost at the origin.
    """
    ramp = torch.arange(7.0).view(7, 1).expand(7, 3)
    places = {}
    for resize in ("mirrored", "direct"):
        module = OffsetTable(OffsetTableSpec(window_hw=(7, 1), resize=resize), DIMS)
        module.table.data.copy_(ramp)
        places[resize] = module.resized((14, 1)).table[:, 0].detach()
    scale = 13 / 27  # source differences a target difference, on the two-sided maps of 13 and 27
    inner = torch.arange(4.0, 11.0) * scale
    torch.testing.assert_close(places["mirrored"][4:11], inner, rtol=0, atol=2e-3)
    direct = (torch.arange(4.0, 11.0) + 0.5) * 0.5 - 0.5
    torch.testing.assert_close(places["direct"][4:11], direct, rtol=0, atol=2e-3)


def test_reference_strided_queries():
    """LeViT's downsampling: the query at cell (i, j) stands at (2 i, 2 j) among the keys."""
    module = offsets((5, 7))
    queries, keys = vp.coordinates(Grid(3, 4)) * 2, vp.coordinates(Grid(5, 7))
    out = module.between(queries, keys)
    assert out.shape == (3, 12, 35)
    lattice = module.table.unflatten(0, (5, 7))
    for n, m in ((0, 0), (5, 33), (11, 1)):
        dy, dx = abs(2 * (n // 4) - m // 7), abs(2 * (n % 4) - m % 7)
        assert torch.equal(out[:, n, m], lattice[dy, dx])


def test_invariant_an_edit_shows_at_once():
    """timm issue 695, 1655: a bias cached in eval mode keeps the old numbers. Here nothing is cached."""
    module = offsets()
    before = module(Grid(3, 5))
    with torch.no_grad():
        module.table.add_(1.0)
    torch.testing.assert_close(module(Grid(3, 5)), before + 1.0)


def test_reference_recipe():
    """Mirrored resampling is the named recipe on the two-sided map, one side kept."""
    module = offsets((3, 4), recipe="swin").double()
    lattice = module.table.detach().numpy().reshape(3, 4, 3)
    wide = np.array([[lattice[abs(y), abs(x)] for x in range(-3, 4)] for y in range(-2, 3)])
    moved = resampling.resized(wide, (9, 5), "swin")[4:, 2:]
    ours = module.resized((5, 3)).table.detach().numpy().reshape(5, 3, 3)
    np.testing.assert_allclose(ours, moved, rtol=1e-12, atol=1e-12)


def test_invariant_source():
    """[num_heads, h * w] is turned; a stored index that agrees, or of another grid, is left behind."""
    module = offsets()
    places = distinct_offsets(Grid(3, 5)).abs()
    assert places.max() == 4
    cells = vp.coordinates(Grid(3, 5)).long()
    difference = (cells.unsqueeze(1) - cells).abs()
    index = difference[..., 0] * 5 + difference[..., 1]
    for stored in (index, torch.zeros(4, 4)):
        state = {
            "stages.3.attn.attention_biases": module.table.mT.detach(),
            "stages.3.attn.attention_bias_idxs": stored,
        }
        ours = OffsetTable.from_source(state, module.spec, DIMS)
        assert torch.equal(ours.table, module.table)
    turned = difference[..., 0] + difference[..., 1] * 3
    with pytest.raises(
        PositionError, match=r"attention_bias_idxs that do not read window \(3, 5\)"
    ):
        OffsetTable.from_source(
            {**state, "stages.3.attn.attention_bias_idxs": turned}, module.spec, DIMS
        )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"window_hw": (3, 0)}, r"window_hw is \(3, 0\)"),
        ({"resize": "square"}, r"resize is 'square'; it must be one of 'mirrored', 'direct'"),
        ({"recipe": "x"}, r"recipe is 'x'"),
        ({"std": -0.5}, r"std is -0\.5"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        OffsetTableSpec(**{"window_hw": (3, 5), **fields})


def test_error_outside_the_table():
    for point in ([[3.0, 0.0]], [[0.0, -5.0]], [[0.5, 0.0]]):
        with pytest.raises(
            PositionError, match=r"a table of window \(3, 5\) has whole differences"
        ):
            offsets().values(torch.tensor(point))
    assert offsets().values(torch.tensor([[3.0, 0.0]]), window_hw=(4, 5)).shape == (3, 1)
    with pytest.raises(PositionError, match=r"window_hw is \(1, 0\)"):
        offsets().resized((1, 0))


def test_error_source():
    with pytest.raises(PositionError, match=r"state has no entry attention_biases"):
        OffsetTable.from_source({}, OffsetTableSpec(window_hw=(3, 5)), DIMS)
    with pytest.raises(
        PositionError, match=r"shape \(3, 15\); window \(4, 4\) and 3 heads need \(3, 16\)"
    ):
        OffsetTable.from_source(
            {"attention_biases": torch.zeros(3, 15)}, OffsetTableSpec(window_hw=(4, 4)), DIMS
        )


def test_gradient_through_mirroring():
    """Every row is reached from both sides (float64 gradcheck)."""
    module = offsets((2, 3)).double()

    def run(table):
        del module.table
        module.table = table
        return module(Grid(3, 4)), module.values(torch.zeros(1, 2, dtype=torch.float64))

    assert torch.autograd.gradcheck(run, (module.table,))
