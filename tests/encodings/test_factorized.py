"""Factorised tables: a row vector and a column vector for every cell; absolute or fractional; joined three ways."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import tables as oracle
from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings.factorized import Factorized, FactorizedSpec

COMBINE = ("add", "product", "stack")
RECIPES = ("nearest", "nearest_idefics2", "nearest_transformers", "sam", "timm", "siglip2_naflex")
DIMS = Dims(embed_dim=6, num_heads=1, depth=1)


def factorized(seed: int = 0, dtype=torch.float64, **fields) -> Factorized:
    """Tables of 9 rows and 12 columns with values of the size of 1."""
    spec = FactorizedSpec(**{"table_hw": (9, 12), "std": 1.0, **fields})
    return Factorized(spec, DIMS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(module: Factorized) -> tuple[np.ndarray, np.ndarray]:
    return module.rows.detach().numpy(), module.columns.detach().numpy()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (9, 12)])
@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("coords", ["absolute", "fractional"])
def test_shape_of_a_code(hw, combine, coords):
    module = factorized(combine=combine, coords=coords)
    assert module.rows.shape == (9, 3 if combine == "stack" else 6)
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 6)
    assert module.at(torch.zeros(2, 4, 2), hw).shape == (2, 4, 6)


def test_shape_of_fractional_grids():
    """Fractional tables serve any size, absolute ones what they have."""
    assert factorized(coords="fractional")(Grid(31, 2)).shape == (62, 6)


@given(
    grids(max_side=9),
    st.sampled_from(COMBINE),
    st.sampled_from([(0, 1), (1, 0)]),
    st.integers(0, 2),
    seeds(),
)
def test_reference_absolute(hw, combine, order, offset, seed):
    """Row y and column x are looked up, joined, row-major."""
    spec = {"combine": combine, "axis_order": order, "offset": offset, "table_hw": (11, 11)}
    module = factorized(seed, **spec)
    rows, columns = numbers(module)
    loops = oracle.joined(
        rows[offset : offset + hw[0]], columns[offset : offset + hw[1]], combine, order
    )
    torch.testing.assert_close(module(Grid(*hw)).detach(), torch.from_numpy(loops))


@given(grids(max_side=30), st.sampled_from(COMBINE), st.sampled_from(RECIPES), seeds())
def test_reference_fractional(hw, combine, recipe, seed):
    """Each axis is spread over the grid by the recipe; whole-number buckets are floor(i n / h)."""
    module = factorized(seed, coords="fractional", combine=combine, recipe=recipe)
    rows, columns = (
        table if len(table) == side else oracle.line(table, side, recipe)
        for table, side in zip(numbers(module), hw, strict=True)
    )
    loops = torch.from_numpy(oracle.joined(rows, columns, combine))
    torch.testing.assert_close(module(Grid(*hw)).detach(), loops, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 64), st.integers(1, 200))
def test_reference_buckets_are_integers(side, cells):
    """Facts 1H: the intended bucket is floor(i n / h), exact at any size."""
    spec = FactorizedSpec(table_hw=(side, 1), coords="fractional")
    module = Factorized(spec, DIMS)
    with torch.no_grad():
        module.rows.copy_(torch.arange(float(side)).unsqueeze(-1).expand(-1, 6))
        module.columns.zero_()
    buckets = [i * side // cells for i in range(cells)]
    assert module(Grid(cells, 1))[:, 0].tolist() == buckets
    at = module.at(vp.coordinates(Grid(cells, 1)), (cells, 1))
    assert at[:, 0].tolist() == buckets


@given(grids(max_side=14), st.sampled_from(["sam", "timm"]))
def test_reference_square_aspect(hw, recipe):
    """timm's ar_preserving: the tables span the longer side, the shorter axis reads their first part."""
    module = factorized(coords="fractional", aspect="square", recipe=recipe)
    lines = [
        oracle.line(table, max(hw), recipe)[:side]
        for table, side in zip(numbers(module), hw, strict=True)
    ]
    lines = [
        table if len(table) == max(hw) == side else line
        for table, side, line in zip(numbers(module), hw, lines, strict=True)
    ]
    loops = torch.from_numpy(oracle.joined(*lines, "add"))
    torch.testing.assert_close(module(Grid(*hw)).detach(), loops, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "table_hw", "combine", "coords"),
    [
        ("navit_factorized", (64, 64), "add", "absolute"),
        ("navit_fractional", (64, 64), "add", "fractional"),
        ("detr_learned", (50, 50), "stack", "absolute"),
        ("pix2struct", (4096, 4096), "add", "absolute"),
        ("gemma4_vision", (10240, 10240), "add", "absolute"),
        ("naflexvit_factorized", (16, 16), "add", "fractional"),
    ],
)
def test_reference_shipped(name, table_hw, combine, coords):
    spec = load_encoding(name)
    assert (spec.table_hw, spec.combine, spec.coords) == (table_hw, combine, coords)


def test_reference_start_values():
    """DETR draws from [0, 1), the others from a normal of the spec's deviation; the generator alone decides."""
    uniform = factorized(start="uniform", table_hw=(400, 400), dtype=torch.float32).rows
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    normal = factorized(std=0.5, table_hw=(400, 400), dtype=torch.float32).rows
    assert normal.std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(factorized(3).columns, factorized(3).columns)
    assert not torch.equal(factorized(3).columns, factorized(4).columns)


@given(
    grids(max_side=9),
    st.sampled_from(COMBINE),
    st.sampled_from(["absolute", "fractional"]),
    seeds(),
)
def test_invariant_at_equals_forward(hw, combine, coords, seed):
    """Tokens dropped and shuffled keep their code: the order is free, the grid is an argument."""
    module = factorized(combine=combine, coords=coords, recipe="sam")
    order = torch.randperm(hw[0] * hw[1], generator=torch.Generator().manual_seed(seed))
    order = order[: 1 + len(order) // 2]
    out = module.at(vp.coordinates(Grid(*hw)).double()[order], hw)
    torch.testing.assert_close(out, module(Grid(*hw))[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("aspect", ["stretch", "square"])
def test_invariant_batch_is_one_by_one(recipe, aspect):
    """A padded batch of three sizes: every sample as if alone, padding zero."""
    module = factorized(coords="fractional", recipe=recipe, aspect=aspect)
    shapes = [(3, 5), (8, 2), (4, 4)]
    coords, valid = torch.full((3, 20, 2), -7.0, dtype=torch.float64), torch.zeros(3, 20).bool()
    for i, hw in enumerate(shapes):
        coords[i, : hw[0] * hw[1]] = vp.coordinates(Grid(*hw)).double()
        valid[i, : hw[0] * hw[1]] = True
    out = module.at(coords, torch.tensor(shapes), valid=valid)
    for i, hw in enumerate(shapes):
        alone = module.at(vp.coordinates(Grid(*hw)).double(), hw)
        torch.testing.assert_close(out[i, : hw[0] * hw[1]], alone, rtol=1e-12, atol=1e-12)
        assert (out[i, hw[0] * hw[1] :] == 0).all()
    whole = module.batch([Grid(*hw) for hw in shapes], length=20)
    torch.testing.assert_close(whole, out, rtol=1e-9, atol=1e-9)


@given(grids(max_side=9))
def test_invariant_transpose(hw):
    """With the two tables swapped, turning the grid turns the code."""
    module, turned = factorized(table_hw=(9, 9)), factorized(table_hw=(9, 9))
    with torch.no_grad():
        turned.rows.copy_(module.columns)
        turned.columns.copy_(module.rows)
    lying = turned(Grid(hw[1], hw[0])).unflatten(0, (hw[1], hw[0])).transpose(0, 1)
    torch.testing.assert_close(lying.flatten(0, 1), module(Grid(*hw)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"table_hw": (0, 4)}, r"table_hw is \(0, 4\); 2 whole numbers of at least 1"),
        ({"table_hw": (4, 4, 4)}, r"table_hw is \(4, 4, 4\)"),
        (
            {"coords": "relative"},
            r"coords is 'relative'; it must be one of 'absolute', 'fractional'",
        ),
        ({"combine": "cat"}, r"combine is 'cat'; .*'stack'"),
        ({"axis_order": (1, 1)}, r"axis_order is \(1, 1\)"),
        ({"aspect": "keep"}, r"aspect is 'keep'"),
        ({"start": "ones"}, r"start is 'ones'"),
        ({"recipe": "linear"}, r"recipe is 'linear'; it must be"),
        ({"offset": -1}, r"offset is -1 and std 0\.02"),
        ({"std": -1.0}, r"std -1\.0"),
        ({"coords": "fractional", "offset": 1}, r"offset is 1 with fractional coords"),
        ({"aspect": "square"}, r"aspect is 'square' with absolute coords"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        FactorizedSpec(**{"table_hw": (4, 4), **fields})


def test_error_odd_halves():
    with pytest.raises(PositionError, match=r"embed_dim is 7; an even number.*combine='add'"):
        Factorized(
            FactorizedSpec(table_hw=(4, 4), combine="stack"),
            Dims(embed_dim=7, num_heads=1, depth=1),
        )


def test_error_grid():
    """Facts 5.26 (detr 251): a table of 50 overflowed at feature side > 50 with a CUDA assert."""
    module = vp.build(load_encoding("detr_learned"), DIMS)
    assert module(Grid(50, 50)).shape == (2500, 6)
    with pytest.raises(PositionError, match=r"grid has 51 rows and the table 50 entries.*smaller"):
        module(Grid(51, 3))
    with pytest.raises(PositionError, match=r"grid has 51 columns and the table 50 entries"):
        module(Grid(3, 51))
    with pytest.raises(PositionError, match=r"grid has 9 rows and the table 9 entries, 1 of them"):
        factorized(offset=1)(Grid(9, 3))


def test_error_points():
    module = factorized()
    with pytest.raises(PositionError, match=r"reach from entry -1 to 2 of axis 1 .* table has 12"):
        module.at(torch.tensor([[0, -1], [1, 2]]))
    with pytest.raises(PositionError, match=r"reach from entry 0 to 9 of axis 0 .* table has 9"):
        module.at(torch.tensor([[0.0, 1.0], [9.0, 2.0]]))
    with pytest.raises(PositionError, match=r"coords_yx has 3 axes"):
        module.at(torch.zeros(4, 3))
    with pytest.raises(PositionError, match=r"extent_hw is None with fractional coords"):
        factorized(coords="fractional").at(torch.zeros(4, 2))
    with pytest.raises(PositionError, match=r"extent_hw has shape"):
        factorized(coords="fractional").at(torch.zeros(2, 4, 2), torch.zeros(2, 4, 2))
    with pytest.raises(PositionError, match=r"valid is torch\.int64 of shape \(4,\); bool"):
        module.at(torch.zeros(4, 2), valid=torch.ones(4).long())


def test_error_state():
    spec = FactorizedSpec(table_hw=(4, 4))
    with pytest.raises(PositionError, match=r"no entry pos_embed_y or .*row_embedder\.weight"):
        Factorized.from_source({"pos_embed": torch.zeros(1, 16, 6)}, spec, DIMS)
    state = {"pos_embed_y": torch.zeros(1, 4, 6), "pos_embed_x": torch.zeros(1, 5, 6)}
    with pytest.raises(PositionError, match=r"columns of the state dict has shape \(5, 6\)"):
        Factorized.from_source(state, spec, DIMS)


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("fields", [{}, {"coords": "fractional", "recipe": "sam"}])
def test_gradient_of_the_tables(combine, fields):
    module = factorized(combine=combine, table_hw=(3, 4), **fields)
    points = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)

    def run(rows, columns):
        learned = {"rows": rows, "columns": columns}

        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = module

            def forward(self):
                return self.inner(Grid(2, 3)), self.inner.at(points, (2, 3))

        return torch.func.functional_call(
            Both(), {f"inner.{key}": value for key, value in learned.items()}, ()
        )

    assert torch.autograd.gradcheck(run, (module.rows, module.columns))


@pytest.mark.parametrize("fields", [{"table_hw": (20, 20)}, {"coords": "fractional"}])
def test_compile_points(fields):
    """Batches of padded points: one graph over six lengths."""
    module = factorized(dtype=torch.float32, **fields)
    calls = [
        (
            torch.randint(2, (2, h * w, 2)).float(),
            torch.tensor([[h, w], [w, h]]),
            torch.rand(2, h * w) > 0.2,
        )
        for h, w in SIZES
    ]
    assert graphs_of(lambda p, e, v: module.at(p, e, valid=v), calls) == 1


def test_device_fake_cuda():
    cuda = torch.device("cuda", 0)
    for fields in ({}, {"coords": "fractional"}, {"coords": "fractional", "recipe": "timm"}):
        module = factorized(**fields)
        with FakeTensorMode():
            module.rows = nn.Parameter(torch.empty(9, 6, device=cuda))
            module.columns = nn.Parameter(torch.empty(12, 6, device=cuda))
            assert module(Grid(3, 5)).device == cuda
            assert module.at(torch.empty(7, 2, device=cuda), (3, 5)).device == cuda
