"""Swin table: windows by named policies, class rows apart, sources' layouts, a stored index that must agree."""

import pytest
import torch
from hypothesis import given
from torch import nn

from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError, resample
from visionpos.config import load_encoding
from visionpos.encodings import SwinTable, SwinTableSpec, build
from visionpos.geometry.relative import distinct_offsets, relative_index

DIMS = Dims(embed_dim=12, num_heads=3, depth=1, prefix=1)


def swin(window_hw=(3, 5), seed=0, **fields) -> SwinTable:
    spec = SwinTableSpec(window_hw=window_hw, **fields)
    module = SwinTable(spec, DIMS, generator=torch.Generator().manual_seed(seed))
    module.table.data.normal_(generator=torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize(
    ("window_hw", "class_rows", "rows"),
    [((7, 7), False, 169), ((12, 12), False, 529), ((14, 14), True, 732), ((32, 32), True, 3972)],
)
def test_shape_of_published_tables(window_hw, class_rows, rows):
    """Users' cases C02 and C07: Swin 7 and 12, BEiT 14 and 32."""
    assert swin(window_hw, class_rows=class_rows).table.shape == (rows, 3)


@pytest.mark.parametrize("hw", [(1, 7), (7, 1), (3, 5), (5, 3), (13, 11)])
@pytest.mark.parametrize("class_rows", [False, True])
def test_shape_of_a_resized_table(hw, class_rows):
    moved = swin(class_rows=class_rows).resized(hw)
    assert moved.spec.window_hw == hw
    assert moved.table.shape == ((2 * hw[0] - 1) * (2 * hw[1] - 1) + 3 * class_rows, 3)
    assert moved.prefix_values() is None or moved.prefix_values().shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "window", "recipe", "class_rows"),
    [
        ("swin_7", (7, 7), "swin", False),
        ("swin_timm_7", (7, 7), "beit", False),
        ("beit_14", (14, 14), "beit", True),
        ("hf_beit_14", (14, 14), "hf_beit", True),
        ("maxvit_7", (7, 7), "beit", False),
    ],
)
def test_shape_of_shipped(name, window, recipe, class_rows):
    spec = load_encoding(name)
    assert (spec.window_hw, spec.recipe, spec.class_rows) == (window, recipe, class_rows)
    assert spec.windows == "resample"
    assert build(spec, DIMS).table.shape[0] == (2 * window[0] - 1) ** 2 + 3 * class_rows


@pytest.mark.parametrize("recipe", ["swin", "beit", "hf_beit", "timm"])
@given(hw=grids(max_side=7), seed=seeds())
def test_reference_one_interpolation(recipe, hw, seed):
    """forward on another window, resized() and resample() of the map of differences are one arithmetic."""
    module = swin(seed=seed, recipe=recipe, class_rows=True)
    old, new = Grid(5, 9), Grid(2 * hw[0] - 1, 2 * hw[1] - 1)
    rows = resample(module.table, source=old, target=new, recipe=recipe, suffix=3)
    moved = module.resized(hw)
    assert torch.equal(moved.table, rows)
    assert torch.equal(moved(Grid(*hw), prefix=1), module(Grid(*hw), prefix=1))


@given(hw=grids(max_side=5))
def test_invariant_crop_keeps_every_difference(hw):
    """Users' case C04: a window clamped to a small map keeps the numbers of its differences."""
    module = swin((5, 5), windows="crop")
    offsets = distinct_offsets(Grid(*hw))
    assert torch.equal(module.distinct(Grid(*hw)), module.values(offsets))
    other = swin((5, 5), windows="resample")
    if hw != (5, 5) and min(hw) > 1:
        assert not torch.equal(other.distinct(Grid(*hw)), module.values(offsets))


def test_invariant_class_rows_never_enter_the_map():
    """Users' case C07: the three last rows are kept as they are on every window."""
    module = swin(class_rows=True, recipe="beit")
    assert torch.equal(module.resized((6, 4)).table[-3:], module.table[-3:])
    own = module.prefix_values()
    assert torch.equal(own, module.table[-3:].mT)
    dense = module(Grid(6, 4), prefix=2)
    assert torch.equal(dense[:, 0, 2], own[:, 0])  # class to patch
    assert torch.equal(dense[:, 2, 0], own[:, 1])
    assert torch.equal(dense[:, 0, 1], own[:, 2])


def test_invariant_resizing_there_and_back_loses():
    """Which is why forward evaluates the trained table and never its own last result."""
    module = swin((6, 6))
    back = module.resized((9, 9)).resized((6, 6))
    assert (back.table - module.table).norm() / module.table.norm() > 0.05
    assert torch.equal(module.resized((6, 6)).table, module.table)


def test_invariant_resized_is_its_own():
    """A copy: training one leaves the other, and frozen stays frozen."""
    module = swin()
    module.table.requires_grad_(False)
    moved = module.eval().resized((3, 5))
    assert moved.table.data_ptr() != module.table.data_ptr()
    assert not moved.table.requires_grad
    assert not moved.training


@given(hw=grids(max_side=6))
def test_invariant_index_range(hw):
    """Facts 5.25: from 0 to (2h - 1)(2w - 1) - 1, each difference its own row."""
    index = relative_index(Grid(*hw))
    assert (index.min(), index.max()) == (0, (2 * hw[0] - 1) * (2 * hw[1] - 1) - 1)
    offsets = distinct_offsets(Grid(*hw))[index]
    cells = torch.cartesian_prod(torch.arange(hw[0]), torch.arange(hw[1])).view(-1, 2)
    assert torch.equal(offsets, (cells.unsqueeze(1) - cells).float())


@given(hw=grids(max_side=5))
def test_invariant_transposed_map(hw):
    """TensorFlow's map counts key minus query: turned round, it gives the bias that its own lookups give."""
    module = swin(hw)
    h, w = hw
    theirs = module.table.mT.unflatten(1, (2 * h - 1, 2 * w - 1)).flip(1, 2).detach()
    ours = SwinTable.from_source({"relative_position_bias_table": theirs}, module.spec, DIMS)
    assert torch.equal(ours.table, module.table)
    for query in (0, h * w - 1):
        for key in (0, h * w // 2):
            dy, dx = key // w - query // w, key % w - query % w
            expected = theirs[:, dy + h - 1, dx + w - 1]
            assert torch.equal(ours(Grid(*hw))[:, query, key], expected)


def test_invariant_source_keys():
    """The path before the name does not matter, buffers of other windows are left behind, the table is a copy."""
    module = swin()
    state = {
        "layers.0.blocks.1.attn.relative_position_bias_table": module.table.detach(),
        "layers.0.blocks.1.attn.relative_position_index": relative_index(Grid(4, 4)),
        "layers.0.blocks.1.attn.qkv.weight": torch.zeros(2),
    }
    ours = SwinTable.from_source(state, module.spec, DIMS)
    assert torch.equal(ours.table, module.table)
    assert ours.table.data_ptr() != module.table.data_ptr()
    assert isinstance(ours.table, nn.Parameter)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"window_hw": (0, 5)}, r"window_hw is \(0, 5\); 2 whole numbers of at least 1"),
        (
            {"window_hw": (3,)},
            r"window_hw is \(3,\); it must be \(a whole number, a whole number\)",
        ),
        ({"window_hw": (3, 4, 5)}, r"window_hw is \(3, 4, 5\)"),
        ({"window_hw": (3, 4.5)}, r"window_hw is \(3, 4\.5\)"),
        ({"windows": "scale"}, r"windows is 'scale'; it must be one of 'resample', 'crop'"),
        ({"recipe": "linear"}, r"recipe is 'linear'"),
        ({"std": -1.0}, r"std is -1\.0; a number of at least 0"),
        ({"std": float("nan")}, r"std is nan"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        SwinTableSpec(**{"window_hw": (3, 5), **fields})


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        (
            [[3.0, 0.0]],
            r"offsets reach 3\.0; a table of window \(3, 5\) has whole differences below",
        ),
        ([[0.0, -5.0]], r"offsets reach 5\.0; .*Pass window_hw"),
        ([[0.5, 0.0]], r"offsets reach 0\.5; .*round the coordinates"),
        ([[float("nan"), 0.0]], r"offsets holds NaN or infinity"),
        ([[0.0]], r"offsets have 1 axes; .*needs 2"),
    ],
)
def test_error_outside_the_table(offsets, match):
    with pytest.raises(PositionError, match=match):
        swin().values(torch.tensor(offsets))


def test_error_larger_window_under_crop():
    with pytest.raises(
        PositionError, match=r"window \(4, 5\) is larger than the trained \(3, 5\);.*'resample'"
    ):
        swin(windows="crop")(Grid(4, 5))


def test_error_window_hw():
    with pytest.raises(PositionError, match=r"window_hw is \(0, 1\)"):
        swin().values(torch.zeros(1, 2), window_hw=(0, 1))
    with pytest.raises(PositionError, match=r"window_hw is \(2, 0\)"):
        swin().resized((2, 0))


def test_error_table_of_another_window():
    state = {"relative_position_bias_table": torch.zeros(169, 3)}
    match = r"table of shape \(169, 3\); window \(8, 8\) .*needs \(225, 3\).*resized\(\)"
    with pytest.raises(PositionError, match=match):
        SwinTable.from_source(state, SwinTableSpec(window_hw=(8, 8)), DIMS)
    with pytest.raises(PositionError, match=r"class_rows True and 3 heads needs \(172, 3\)"):
        SwinTable.from_source(state, SwinTableSpec(window_hw=(7, 7), class_rows=True), DIMS)
    with pytest.raises(PositionError, match=r"map of shape \(3, 5, 9\); window \(5, 3\) needs"):
        SwinTable.from_source(
            {"relative_position_bias_table": torch.zeros(3, 5, 9)},
            SwinTableSpec(window_hw=(5, 3)),
            DIMS,
        )


def test_error_state_without_or_with_many_tables():
    """Users' case C11: tables of many layers are not one shared table."""
    spec, name = SwinTableSpec(window_hw=(3, 5)), "relative_position_bias_table"
    with pytest.raises(
        PositionError, match=r"state has no entry relative_position_bias_table, only x"
    ):
        SwinTable.from_source({"x": torch.zeros(1)}, spec, DIMS)
    layers = {f"blocks.{i}.attn.{name}": torch.zeros(45, 3) for i in range(12)}
    with pytest.raises(
        PositionError, match=r"12 entries named .*blocks\.0\.attn.*single attention"
    ):
        SwinTable.from_source(layers, spec, DIMS)


def test_error_index_in_another_order():
    """Facts 5.25: a 3x4 index built with swapped ranges holds negatives; its table would be misread."""
    h, w = 3, 4
    cells = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    difference = cells.unsqueeze(1) - cells
    swapped = (difference[..., 0] + w - 1) * (2 * w - 1) + difference[..., 1] + h - 2
    swapped[0, 0] = -4
    spec = SwinTableSpec(window_hw=(h, w))
    state = {"relative_position_bias_table": torch.zeros(35, 3)}
    match = r"relative index from -4 to \d+ that is not the row-major .*window \(3, 4\)"
    with pytest.raises(PositionError, match=match):
        SwinTable.from_source({**state, "relative_position_index": swapped}, spec, DIMS)
    right = {**state, "relative_position_index": relative_index(Grid(h, w)).flatten()}
    SwinTable.from_source(right, spec, DIMS)
    # Column-major windows: same counts, another order.
    turned = relative_index(Grid(w, h))
    with pytest.raises(PositionError, match=r"Check the order"):
        SwinTable.from_source({**state, "relative_position_index": turned}, spec, DIMS)


def test_invariant_index_with_class_rows():
    """BEiT's index has a first row and column of its own; what stands there is no difference."""
    module = swin(class_rows=True)
    index = torch.full((16, 16), 45)
    index[1:, 1:] = relative_index(Grid(3, 5))
    state = {
        "relative_position_bias_table": module.table.detach(),
        "relative_position_index": index,
    }
    ours = SwinTable.from_source(state, module.spec, DIMS)
    assert torch.equal(ours(Grid(3, 5), prefix=1), module(Grid(3, 5), prefix=1))
    with pytest.raises(PositionError, match=r"not the row-major"):
        SwinTable.from_source(
            {**state, "relative_position_index": index.flip(0)}, module.spec, DIMS
        )


def test_gradient_of_values():
    """The function of differences learns too, on its own window and on another (float64 gradcheck)."""
    module = swin((2, 3), class_rows=True).double()
    points = torch.tensor([[1.0, -2.0], [0.0, 0.0]], dtype=torch.float64)

    def run(table):
        del module.table
        module.table = table
        return (
            module.values(points),
            module.values(points, window_hw=(3, 4)),
            module.prefix_values(),
        )

    assert torch.autograd.gradcheck(run, (module.table,))
