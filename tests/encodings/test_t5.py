"""T5 buckets on a grid: boundaries, dead rows, LayoutLM's tables and its division."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import bias as oracle
from tests.reference import pairs
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import T5Bias, T5BiasSpec, build

DIMS = Dims(embed_dim=12, num_heads=3, depth=1)


def t5(**fields) -> T5Bias:
    module = T5Bias(T5BiasSpec(**fields), DIMS)
    for table in module.tables:
        table.data.normal_()
    return module


@pytest.mark.parametrize(
    ("name", "buckets", "scale"),
    [("layoutlmv2_2d", (64, 64), "none"), ("layoutlmv3", (32, 64, 64), "sqrt_head_dim")],
)
def test_shape_of_shipped(name, buckets, scale):
    spec = load_encoding(name)
    assert (spec.buckets, spec.scale) == (buckets, scale)
    assert [table.shape for table in build(spec, DIMS).tables] == [(rows, 3) for rows in buckets]


@pytest.mark.parametrize(
    ("buckets", "reach"), [(32, 128), (64, 256), (32, 256), (16, 128), (128, 1024), (4, 3)]
)
def test_reference_every_boundary(buckets, reach):
    """Facts 1.2: float32 and float64 logarithms agree on every boundary."""
    offsets = torch.arange(-reach - 5, reach + 6.0)
    expected = torch.tensor([oracle.t5_bucket(-int(step), buckets, reach) for step in offsets])
    module = t5(buckets=(buckets,), max_distance=(reach,))
    for dtype in (torch.float32, torch.float64):
        rows = module.buckets(offsets.to(dtype).unsqueeze(-1))
        assert torch.equal(rows[:, 0], expected)
    assert rows.max() < buckets
    assert rows.min() == 0


def test_invariant_unused_rows():
    """Row buckets // 2 is dead on any grid; on a 14x14 grid most others are too."""
    module = t5()
    assert module.unused() == [[16], [16]]
    on_grid = module.unused(Grid(14, 3))
    assert 16 in on_grid[0]
    assert len(on_grid[0]) == 32 - (
        1 + 9 + 9
    )  # 0, then 1-8 exact and 9 by 12-13, of each sign; 8 holds 8-11
    assert on_grid[1] == sorted(set(range(32)) - {0, 1, 2, 17, 18})


@given(st.integers(-300, 300))
def test_invariant_a_dead_row_changes_nothing(step):
    module = t5()
    before = module.values(torch.tensor([[float(step), -float(step)]]))
    for table in module.tables:
        table.data[16] = 1e6
    assert torch.equal(module.values(torch.tensor([[float(step), -float(step)]])), before)


def test_invariant_gradients_reach_the_tables():
    """transformers' LayoutLMv3 looks its tables up under no_grad, so they never learn; here they do."""
    module = t5(scale="sqrt_head_dim")
    module(Grid(14, 5)).square().sum().backward()
    for axis, table in enumerate(module.tables):
        still = (table.grad == 0).all(-1).nonzero().flatten().tolist()
        assert still == module.unused(Grid(14, 5))[axis]


def test_invariant_scale():
    """LayoutLMv3's sum divided by sqrt(head_dim) = 2, before the logits."""
    plain = t5()
    scaled = T5Bias(T5BiasSpec(scale="sqrt_head_dim"), DIMS)
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(scaled(Grid(3, 5)) * 2, plain(Grid(3, 5)))


def test_invariant_axes_are_apart():
    """y reads the first table and x the second; frames come first of three."""
    module = t5()
    y, x = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    zero = module.tables[0][0] + module.tables[1][0]
    torch.testing.assert_close(
        module.values(y)[:, 0], zero - module.tables[0][0] + module.tables[0][2]
    )
    torch.testing.assert_close(
        module.values(x)[:, 0], zero - module.tables[1][0] + module.tables[1][2]
    )
    clip = t5(buckets=(8, 32, 16), max_distance=(8, 128, 64))
    assert clip(Grid(3, 5, frames=2)).shape == (3, 30, 30)


def test_invariant_fractions_are_cut():
    """Page units may carry fractions: they are cut towards 0, as integer boxes are."""
    module = t5()
    cut = module.values(torch.tensor([[1.9, -0.9]]))
    assert torch.equal(cut, module.values(torch.tensor([[1.0, 0.0]])))


@pytest.mark.parametrize("axes", [2, 3])
def test_invariant_source_keys(axes):
    """Tables are stored [num_heads, buckets], y and x by name; the 1-D one belongs to the token index."""
    buckets, reach = ((64, 64), (256, 256)) if axes == 2 else ((32, 64, 64), (128, 256, 256))
    module = t5(buckets=buckets, max_distance=reach)
    names = ("rel_pos_bias", "rel_pos_y_bias", "rel_pos_x_bias")[-axes:]
    state = {
        f"encoder.{key}.weight": t.mT.detach() for key, t in zip(names, module.tables, strict=True)
    }
    ours = T5Bias.from_source(state, module.spec, DIMS)
    points = torch.randint(0, 200, (7, axes)).float()
    assert torch.equal(ours.between(points, points), module.between(points, points))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"buckets": (32,)}, r"buckets are \(32,\) and max_distance \(128, 128\); 1 to 3 axes"),
        ({"buckets": (30, 32)}, r"buckets are \(30, 32\) .*multiple of 4"),
        ({"buckets": (0, 32)}, r"buckets are \(0, 32\)"),
        ({"max_distance": (8, 128)}, r"max_distance \(8, 128\); .*above a quarter"),
        ({"buckets": (), "max_distance": ()}, r"buckets are \(\)"),
        ({"scale": "head"}, r"scale is 'head'; it must be one of 'none', 'sqrt_head_dim'"),
        ({"std": -0.1}, r"std is -0\.1"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        T5BiasSpec(**fields)


def test_error_source():
    spec = T5BiasSpec(buckets=(64, 64), max_distance=(256, 256))
    with pytest.raises(PositionError, match=r"no entry rel_pos_y_bias\.weight"):
        T5Bias.from_source({"rel_pos_x_bias.weight": torch.zeros(3, 64)}, spec, DIMS)
    state = {f"rel_pos_{axis}_bias.weight": torch.zeros(3, 32) for axis in "xy"}
    with pytest.raises(
        PositionError, match=r"shape \(3, 32\); 64 buckets and 3 heads need \(3, 64\)"
    ):
        T5Bias.from_source(state, spec, DIMS)


LINE = {"buckets": (32,), "max_distance": (128,)}
# Facts 1.2: key minus query -> bucket, of transformers' T5Attention.
BOTH = {-200: 15, -128: 15, -64: 14, -32: 12, -16: 10, -9: 8, -1: 1, 0: 0, 1: 17, 8: 24, 16: 26}
BOTH |= {64: 30, 91: 31, 128: 31, 200: 31}
RANGES = {8: (-11, -8), 9: (-15, -12), 10: (-22, -16), 11: (-31, -23), 12: (-45, -32)}
RANGES |= {13: (-63, -46), 14: (-90, -64), 15: (-200, -91)}
CAUSAL = {5: 0, 1: 0, 0: 0, -1: 1, -15: 15, -16: 16, -17: 16, -18: 16, -32: 21, -64: 26, -100: 30}
CAUSAL |= {-112: 30, -113: 31, -500: 31}


def test_golden_line_both():
    module = t5(**LINE)
    steps = torch.tensor(list(BOTH)).unsqueeze(-1)
    assert module.buckets(-steps)[:, 0].tolist() == list(BOTH.values())
    for row, (first, last) in RANGES.items():
        inside = torch.arange(first, last + 1).unsqueeze(-1)
        assert set(module.buckets(-inside).flatten().tolist()) == {row}
        assert set(module.buckets(inside).flatten().tolist()) == {row + 16}
    assert module.unused() == [[16]]


def test_golden_line_causal():
    module = t5(**LINE, direction="causal")
    steps = torch.tensor(list(CAUSAL)).unsqueeze(-1)
    assert module.buckets(-steps)[:, 0].tolist() == list(CAUSAL.values())
    assert module.unused() == [[]]
    assert module.unused(Grid(1, 19)) == [list(range(17, 32))]  # 16, 17 and 18 share row 16


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (2, 5), (6, 40), (64, 1024)])
def test_reference_causal_every_boundary(buckets, reach):
    module = t5(buckets=(buckets,), max_distance=(reach,), direction="causal")
    steps = torch.arange(-5, reach + 6)
    expected = [pairs.t5_causal_bucket(int(step), 0, buckets, reach) for step in steps]
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert module.buckets(steps.to(dtype).unsqueeze(-1))[:, 0].tolist() == expected


def test_invariant_buckets_of_halves_are_promoted():
    """Differences that a half holds get the bucket of float32: a logarithm of halves would move boundaries."""
    module = t5(**LINE)
    steps = torch.arange(-256, 257).unsqueeze(-1)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(module.buckets(steps.to(dtype)), module.buckets(steps))
    rounded = ((steps[257:].bfloat16() / 8).log() / torch.tensor(16.0).bfloat16().log() * 8).trunc()
    exact = ((steps[257:].double() / 8).log() / torch.tensor(16.0).double().log() * 8).trunc()
    assert (rounded.double() != exact).any()


def test_error_positions_in_halves():
    module, ids = t5(**LINE), torch.arange(300).unsqueeze(-1)
    assert module.between(ids, ids).shape == (3, 300, 300)
    with pytest.raises(PositionError, match=r"queries are torch\.bfloat16 and reach 300"):
        module.between(ids.bfloat16(), ids.bfloat16())


def test_shape_of_lines():
    """A line is Grid(1, n); `along` has more keys than queries; another grid is read row after row."""
    module = t5(**LINE, direction="causal")
    ids = torch.arange(11).unsqueeze(-1)
    whole = module.between(ids, ids)
    assert torch.equal(module(Grid(1, 11)), whole)
    assert torch.equal(module.along(4, 11), whole[:, 7:])
    assert torch.equal(module(Grid(3, 5)), module(Grid(1, 15)))
    assert torch.equal(module(Grid(3, 5), prefix=1)[:, 1:, 1:], module(Grid(1, 15)))


def test_invariant_two_documents_are_each_alone():
    """Ids that restart give each document of a row what it has alone, past 2 ** 24 too."""
    module = t5(**LINE)
    alone = module.along(5)
    ids = torch.cat([torch.arange(7), torch.arange(5)]).unsqueeze(-1)
    assert torch.equal(module.between(ids, ids)[:, 7:, 7:], alone)
    far = torch.arange(5).unsqueeze(-1) + 2**30
    assert torch.equal(module.between(far, far), alone)
    with pytest.raises(PositionError, match=r"below 16777216 alone"):
        module.between(far.float(), far.float())


def test_error_line_spec():
    with pytest.raises(
        PositionError, match=r"multiple of 2 buckets each and a max_distance above half"
    ):
        T5BiasSpec(buckets=(32,), max_distance=(16,), direction="causal")
    with pytest.raises(PositionError, match=r"direction is 'left'"):
        T5BiasSpec(direction="left")
    with pytest.raises(PositionError, match=r"queries is 6 and keys 5"):
        t5(**LINE).along(6, 5)
    with pytest.raises(PositionError, match=r"offsets have 1 axes and the spec 2 tables"):
        t5().along(5)
