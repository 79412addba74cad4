"""Learned table: evaluated, not resized; it travels with its grid."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import resampling as oracle
from tests.strategies import grids, seeds
from visionpos import Dims, Grid, LearnedSpec, LearnedTable, PositionError
from visionpos.config import load_encoding

DIMS = Dims(embed_dim=6, num_heads=1, depth=1, prefix=1)
RECIPES = sorted(oracle.SOURCES)


def learned(recipe: str = "timm", prefix_rows: int = 1, seed: int = 0) -> LearnedTable:
    """A 4x9 table in float64."""
    spec = LearnedSpec(grid_hw=(4, 9), recipe=recipe, prefix_rows=prefix_rows)
    return LearnedTable(spec, DIMS, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (6, 6), (4, 9)])
@pytest.mark.parametrize("prefix_rows", [0, 1, 5])
def test_shape_of_a_table(hw, prefix_rows):
    """Prefix rows are stored first and are no part of a grid's rows."""
    module = learned(prefix_rows=prefix_rows)
    assert module.table.shape == (prefix_rows + 36, 6)
    assert module.prefix().shape == (prefix_rows, 6)
    assert module.cells().shape == (36, 6)
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 6)


@pytest.mark.parametrize(
    ("name", "side", "recipe"),
    [
        ("vit_learned_14", 14, "timm"),
        ("dinov2_learned_37", 37, "dinov2"),
        ("dinov2_reg_learned_37", 37, "dinov2_reg"),
    ],
)
def test_shape_of_shipped(name, side, recipe):
    """Facts 2, DINOv2: (1 + M^2, D) with M = 37, registers have no row."""
    spec = load_encoding(name)
    assert (spec.grid_hw, spec.recipe, spec.prefix_rows) == ((side, side), recipe, 1)
    assert vp.build(spec, DIMS).table.shape == (1 + side * side, 6)


@given(st.sampled_from(RECIPES), grids(max_side=11), seeds())
def test_reference_every_recipe(recipe, hw, seed):
    """The module serves its spec's recipe: the loops' table on any other grid."""
    module = learned(recipe, seed=seed)
    cells = module.cells().detach()
    lattice = cells.unflatten(0, (4, 9)).numpy()
    expected = torch.from_numpy(oracle.resized(lattice, hw, recipe)).flatten(0, 1)
    out = module(Grid(*hw)).detach()
    torch.testing.assert_close(out, cells if hw == (4, 9) else expected, rtol=1e-11, atol=1e-11)


def test_reference_start_values():
    """Truncated normal of standard deviation .02, from the passed generator."""
    spec = LearnedSpec(grid_hw=(30, 50))
    one, two = (
        LearnedTable(spec, Dims(embed_dim=64, num_heads=1, depth=1), generator=g)
        for g in (torch.Generator().manual_seed(1), torch.Generator().manual_seed(1))
    )
    assert torch.equal(one.table, two.table)
    assert one.table.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(one.table.mean().item()) < 1e-3


def test_invariant_own_grid_is_the_table():
    """On the trained grid the rows are the parameter's numbers, exact, in memory of the caller's own."""
    module = learned()
    out = module(Grid(4, 9))
    assert torch.equal(out, module.table[1:])
    assert out.data_ptr() != module.table[1:].data_ptr()


@given(st.sampled_from(RECIPES), grids(max_side=8), seeds())
def test_invariant_at_equals_forward(recipe, hw, seed):
    """at() on a shuffled, thinned grid gives forward's rows: dropped tokens need no second table."""
    module = learned(recipe)
    order = torch.randperm(hw[0] * hw[1], generator=torch.Generator().manual_seed(seed))
    order = order[: 1 + len(order) // 2]
    out = module.at(vp.coordinates(Grid(*hw))[order], hw)
    torch.testing.assert_close(out, module(Grid(*hw))[order], rtol=1e-10, atol=1e-10)


def test_invariant_packed_images():
    """Images of several sizes in one call: each gives what it gives alone (NaFlex in one product)."""
    module = learned("siglip2_naflex")
    for hw in ((3, 5), (7, 2)):
        coords = vp.coordinates(Grid(*hw))
        both = torch.stack([coords, coords.flip(0)])
        out = module.at(both, hw)
        torch.testing.assert_close(out[0], module(Grid(*hw)))
        torch.testing.assert_close(out[1], module(Grid(*hw)).flip(0))


def test_invariant_half_precision_rounds_once():
    """A bf16 table is evaluated in float32 and comes back in bf16."""
    module = learned().bfloat16()
    out = module(Grid(6, 6))
    assert out.dtype == torch.bfloat16
    wide = learned().bfloat16().float()(Grid(6, 6)).bfloat16()
    assert torch.equal(out, wide)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"grid_hw": (0, 9)}, r"Grid height is 0"),
        (
            {"grid_hw": (4, 9.5)},
            r"grid_hw is \(4, 9\.5\); it must be \(a whole number, a whole number\)",
        ),
        ({"recipe": "linear"}, r"recipe is 'linear'; it must be a Recipe or one of beit"),
        ({"prefix_rows": -1}, r"prefix_rows is -1 and std 0\.02; numbers of at least 0"),
        ({"std": -0.1}, r"std -0\.1"),
        ({"std": float("nan")}, r"std is nan; it must be a finite number"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        LearnedSpec(**{"grid_hw": (4, 9), **fields})


def test_error_device():
    """A table is not moved behind the caller's back."""
    with pytest.raises(
        PositionError, match=r"device is meta and the table is on cpu; .*\.to\(meta\)"
    ):
        learned()(Grid(3, 5), device=torch.device("meta"))


def test_error_points():
    with pytest.raises(PositionError, match=r"extent_hw is \(0, 5\)"):
        learned().at(torch.zeros(1, 2), (0, 5))
    with pytest.raises(PositionError, match=r"coords_yx has 3 axes"):
        learned().at(torch.zeros(1, 3), (3, 5))


def test_error_load_another_grid():
    """A 4x9 table is never loaded as 6x6 + prefix by accident of counts: other shapes are refused."""
    other = LearnedTable(LearnedSpec(grid_hw=(6, 7)), DIMS)
    match = r"^table has shape \(37, 6\) in the state dict; LearnedTable needs \(42, 6\)\. Build"
    with pytest.raises(PositionError, match=match):
        other.load_state_dict(learned().state_dict())


@pytest.mark.parametrize("recipe", ["timm", "dinov2", "qwen3_vl", "siglip2_naflex"])
def test_gradient_of_the_table(recipe):
    """Evaluation is linear in the table: on another grid, on its own, and at points (float64 gradcheck)."""
    points = torch.tensor([[0.25, 1.5], [1.0, 0.0]], dtype=torch.float64)

    def run(table):
        module = learned(recipe)
        del module.table
        module.table = table
        return module(Grid(2, 3)), module(Grid(4, 9)), module.at(points, (2, 3))

    assert torch.autograd.gradcheck(run, (learned(recipe).table,))


def test_gradient_reaches_the_prefix():
    """Prefix rows learn through prefix(), and get nothing from the cells."""
    module = learned()
    module(Grid(3, 5)).sum().backward()
    assert (module.table.grad[0] == 0).all()
    module.prefix().sum().backward()
    assert (module.table.grad[0] == 1).all()


@pytest.mark.parametrize("grid_hw", [(3, 4, 5), (3,)])
def test_error_grid_hw_is_a_pair(grid_hw):
    """A spec written in Python: three numbers make a table of 60 rows, one number a TypeError."""
    with pytest.raises(PositionError, match=r"grid_hw is \(3"):
        LearnedSpec(grid_hw=grid_hw)


def test_device_without_an_index():
    """The table's own device, spelled without its index, is its device."""
    module = learned()
    with FakeTensorMode():
        module.table = nn.Parameter(torch.empty(37, 6, device=torch.device("cuda", 0)))
        assert module(Grid(3, 5), device=torch.device("cuda")).device.type == "cuda"


# Batches of several sizes: NaFlex in one product, free of token order.


@pytest.mark.parametrize("recipe", [*RECIPES])
@pytest.mark.parametrize("aspect", ["stretch", "square"])
def test_invariant_batch_is_one_by_one(recipe, aspect):
    """A padded batch of three sizes: every sample as if alone; padding is zero whatever its coordinates."""
    spec = LearnedSpec(grid_hw=(4, 9), recipe=recipe, aspect=aspect)
    module = LearnedTable(spec, DIMS).double()
    shapes = [(3, 5), (8, 2), (6, 6)]
    coords, valid = torch.full((3, 40, 2), math.nan), torch.zeros(3, 40, dtype=torch.bool)
    for i, hw in enumerate(shapes):
        coords[i, : hw[0] * hw[1]] = vp.coordinates(Grid(*hw))
        valid[i, : hw[0] * hw[1]] = True
    out = module.at(coords, torch.tensor(shapes), valid=valid)
    assert out.isfinite().all()
    for i, hw in enumerate(shapes):
        alone = module.at(vp.coordinates(Grid(*hw)), hw)
        torch.testing.assert_close(out[i, : hw[0] * hw[1]], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone, module(Grid(*hw)), rtol=1e-9, atol=1e-9)
        assert (out[i, hw[0] * hw[1] :] == 0).all()
    padded = module.batch([Grid(*hw) for hw in shapes], length=40)
    torch.testing.assert_close(padded, out, rtol=1e-9, atol=1e-9)


@given(grids(max_side=7), seeds())
def test_invariant_dropped_patches_change_nothing(hw, seed):
    """Facts 2 (big_vision, timm): the grid is not read off the largest coordinate, so dropping the last row is safe."""
    module = learned("siglip2_naflex")
    coords = vp.coordinates(Grid(*hw)).unsqueeze(0)
    keep = torch.randperm(hw[0] * hw[1], generator=torch.Generator().manual_seed(seed))[:3]
    out = module.at(coords[:, keep], torch.tensor([hw]))
    torch.testing.assert_close(out, module.at(coords, torch.tensor([hw]))[:, keep])


@given(grids(max_side=9), st.sampled_from(["timm", "paddleocr_vl", "qwen3_vl"]))
def test_reference_square_aspect(hw, recipe):
    """timm's ar_preserving: the table over the square of the longer side, cut at the grid's own sides."""
    spec = LearnedSpec(grid_hw=(4, 9), recipe=recipe, aspect="square")
    module = LearnedTable(spec, DIMS).double()
    side = max(hw)
    lattice = module.cells().detach().unflatten(0, (4, 9)).numpy()
    square = torch.from_numpy(oracle.resized(lattice, (side, side), recipe))
    out = module(Grid(*hw)).detach().unflatten(0, hw)
    expected = module.cells().unflatten(0, (4, 9)) if hw == (4, 9) else square[: hw[0], : hw[1]]
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "grid_hw", "recipe", "aspect"),
    [
        ("siglip2_naflex", (16, 16), "siglip2_naflex", "stretch"),
        ("idefics2_vision", (70, 70), "nearest_idefics2", "stretch"),
        ("minicpm_v_vision", (70, 70), "nearest_idefics2", "stretch"),
        ("radio_v3_learned", (128, 128), "qwen3_vl", "square"),
    ],
)
def test_reference_shipped_vlm(name, grid_hw, recipe, aspect):
    spec = load_encoding(name)
    assert (spec.grid_hw, spec.recipe, spec.aspect, spec.prefix_rows) == (
        grid_hw,
        recipe,
        aspect,
        0,
    )


@pytest.mark.parametrize(
    ("key", "shape", "how"),
    [
        ("pos_embed", (1, 37, 6), {}),
        ("vit.embeddings.position_embeddings", (1, 37, 6), {}),
        ("vision.position_embedding.weight", (37, 6), {}),
        ("pos_embedding", (1, 37, 6), {}),
    ],
)
def test_reference_from_source(key, shape, how):
    """The names of timm, transformers, SigLIP and big_vision; rows as stored."""
    table = torch.randn(shape)
    module = LearnedTable.from_source(
        {key: table}, LearnedSpec(grid_hw=(4, 9), prefix_rows=1), DIMS
    )
    assert torch.equal(module.table, table.flatten(0, -2))
    assert torch.equal(module.prefix(), table.flatten(0, -2)[:1])


def test_reference_from_source_maps():
    """NHWC (1, h, w, d) and NCHW (1, d, h, w) maps hold the same rows."""
    table, spec = torch.randn(1, 4, 9, 6), LearnedSpec(grid_hw=(4, 9))
    last = LearnedTable.from_source({"embeds.pos_embed": table}, spec, DIMS)
    state = {"pos_embed": table.permute(0, 3, 1, 2)}
    first = LearnedTable.from_source(state, spec, DIMS, channels="first")
    assert torch.equal(last.table, first.table)
    assert torch.equal(last.table[9], table[0, 1, 0])


def test_error_from_source():
    """facts/users.md A12, A14: prefix rows are said, never guessed; a table with others is refused."""
    spec = LearnedSpec(grid_hw=(14, 14), prefix_rows=1)
    with pytest.raises(
        PositionError, match=r"table of the state dict has shape \(196, 6\); \(197, 6\)"
    ):
        LearnedTable.from_source({"pos_embed": torch.zeros(1, 196, 6)}, spec, DIMS)
    with pytest.raises(PositionError, match=r"no entry pos_embed or"):
        LearnedTable.from_source({"decoder_pos_embed": torch.zeros(1, 197, 6)}, spec, DIMS)
    two = {"a.pos_embed": torch.zeros(1, 197, 6), "b.pos_embed": torch.zeros(1, 197, 6)}
    with pytest.raises(PositionError, match=r"state holds 2 entries named pos_embed"):
        LearnedTable.from_source(two, spec, DIMS)


def test_error_aspect():
    with pytest.raises(
        PositionError, match=r"aspect is 'crop'; it must be one of 'stretch', 'square'"
    ):
        LearnedSpec(grid_hw=(4, 9), aspect="crop")


def test_error_batches():
    module = learned()
    coords = torch.zeros(2, 5, 2)
    with pytest.raises(
        PositionError, match=r"extent_hw has shape \(2, 5, 2\) for points \(2, 5, 2\)"
    ):
        module.at(coords, torch.ones(2, 5, 2))
    with pytest.raises(PositionError, match=r"valid is torch\.bool of shape \(2, 4\)"):
        module.at(coords, (3, 5), valid=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(PositionError, match=r"coords_yx holds NaN or infinity"):
        module.at(torch.full((1, 2), math.nan), (3, 5))
    with pytest.raises(
        PositionError, match=r"coords_yx reach 3, outside a lattice of \[3, 5\] cells.*Clamp"
    ):
        module.at(torch.tensor([[3.0, 1.0]]), (3, 5))
    with pytest.raises(PositionError, match=r"coords_yx reach -1, outside a lattice of \[\[3, 5\]"):
        module.at(coords - torch.tensor([[[0, 0]], [[0, 1]]]), torch.tensor([[3, 5], [4, 4]]))
    with pytest.raises(PositionError, match=r"length is 14 for 1 grids of up to 15 tokens"):
        module.batch([Grid(3, 5)], length=14)
    with pytest.raises(PositionError, match=r"length is 0 for 0 grids"):
        module.batch([])


@pytest.mark.parametrize("recipe", ["siglip2_naflex", "timm", "qwen3_vl", "nearest_idefics2"])
@pytest.mark.parametrize("aspect", ["stretch", "square"])
def test_compile_batches(recipe, aspect):
    """A batch with extents of its own a sample: one graph over six lengths, no sync."""
    module = LearnedTable(LearnedSpec(grid_hw=(4, 9), recipe=recipe, aspect=aspect), DIMS)
    calls = [
        (torch.rand(2, h * w, 2), torch.tensor([[h, w], [w, h]]), torch.rand(2, h * w) > 0.2)
        for h, w in SIZES
    ]
    assert graphs_of(lambda p, e, v: module.at(p, e, valid=v), calls) == 1


def test_gradient_of_batches():
    """Extents a sample, padding, nearest buckets: gradients reach the rows that were read (float64 gradcheck)."""
    coords = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[2.0, 1.0], [0.0, 0.0]]]).double()
    valid = torch.tensor([[True, True], [True, False]])
    for recipe in ("siglip2_naflex", "nearest_transformers"):
        module = learned(recipe)

        def run(table, module=module):
            cells = module
            del cells.table
            cells.table = table
            return cells.at(coords, torch.tensor([[3, 2], [5, 4]]), valid=valid)

        assert torch.autograd.gradcheck(run, (learned(recipe).table,))
