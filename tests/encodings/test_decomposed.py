"""Decomposed bias: three different sides, keys of another stride, a window around the queries, prefix rows apart."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import SIZES, graphs_of
from tests.reference import bias as oracle
from tests.reference import resampling
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import DecomposedBias, DecomposedBiasSpec, QueryBiasing, build

DIMS = Dims(embed_dim=12, num_heads=3, depth=1)  # heads of 4 channels


def decomposed(extent=(3, 5), seed=0, **fields) -> DecomposedBias:
    module = build(DecomposedBiasSpec(extent=extent, **fields), DIMS).double().eval()
    draws = torch.Generator().manual_seed(seed)
    for table in module.tables:
        table.data.normal_(generator=draws)
    return module


def queries(n: int, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, n, 4, dtype=torch.float64, generator=draws)


def tables_at(module: DecomposedBias, lengths: list[int]) -> list:
    """The tables resampled linearly, by the loops."""
    out = []
    for table, length in zip(module.tables, lengths, strict=True):
        rows = table.detach().numpy()
        if len(rows) == length:
            out.append(rows)
        else:
            weights = resampling.weights(len(rows), length, kernel="bilinear")
            out.append(weights @ rows)
    return out


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (5, 3), (13, 11)])
@pytest.mark.parametrize("prefix", [0, 1, 4])
def test_shape_of_a_bias(hw, prefix):
    module, n = decomposed(), hw[0] * hw[1]
    assert isinstance(module, QueryBiasing)
    assert module(queries(prefix + n), Grid(*hw), prefix=prefix).shape == (
        2,
        3,
        prefix + n,
        prefix + n,
    )
    out = module(queries(prefix + n), Grid(*hw), keys=Grid(2, 3), prefix=prefix)
    assert out.shape == (2, 3, prefix + n, prefix + 6)


@pytest.mark.parametrize(
    ("name", "extent", "keys"),
    [
        ("sam_vit_global", (64, 64), "pooled"),
        ("sam_vit_window", (14, 14), "pooled"),
        ("mvitv2_56", (56, 56), "pooled"),
        ("botnet_14", (14, 14), "pooled"),
        ("halonet_14", (14, 14), "around"),
    ],
)
def test_shape_of_shipped(name, extent, keys):
    spec = load_encoding(name)
    assert (spec.extent, spec.keys, spec.scaled) == (extent, keys, False)
    module = build(spec, DIMS)
    assert [tuple(table.shape) for table in module.tables] == [(2 * side - 1, 4) for side in extent]


@given(grids(max_side=5), seeds())
def test_reference_every_grid(hw, seed):
    """q . R_y + q . R_x of every pair, tables of 3 and 5 resampled to the grid."""
    module, q = decomposed(seed=seed), queries(hw[0] * hw[1], seed)
    tables = tables_at(module, [2 * side - 1 for side in hw])
    expected = torch.from_numpy(oracle.decomposed(q.numpy(), tables, hw, hw))
    assert_close_to(module(q, Grid(*hw)).detach(), expected, kind="table")


@pytest.mark.parametrize("sides", [(2, 3, 5), (3, 1, 4), (4, 5, 2)])
def test_reference_three_different_sides(sides):
    """Users' case C06 (MONAI PR 8890): depth, height and width all different; each axis meets its own table."""
    module, q = decomposed(sides), queries(math.prod(sides))
    t, h, w = sides
    tables = [table.detach().numpy() for table in module.tables]
    expected = torch.from_numpy(oracle.decomposed(q.numpy(), tables, sides, sides))
    assert_close_to(module(q, Grid(h, w, frames=t)).detach(), expected, kind="table")


@settings(max_examples=30)
@given(grids(max_side=5), grids(max_side=5), seeds())
def test_reference_pooled_keys(hw, keys, seed):
    """MVITv2's two strides, wherever one divides the other: distances on the finer lattice."""
    assume(all(max(pair) % min(pair) == 0 for pair in zip(hw, keys, strict=True)))
    module, q = decomposed(seed=seed), queries(hw[0] * hw[1], seed)
    tables = tables_at(module, [2 * max(pair) - 1 for pair in zip(hw, keys, strict=True)])
    expected = torch.from_numpy(oracle.decomposed(q.numpy(), tables, hw, keys))
    out = module(q, Grid(*hw), keys=Grid(*keys)).detach()
    assert_close_to(out, expected, kind="table")


def test_reference_a_window_around_the_queries():
    """HaloNet: the key at row j of the window stands j - halo rows from the block's first; no scaling."""
    block, halo = (2, 3), 1
    window = tuple(side + 2 * halo for side in block)
    module, q = decomposed(window, keys="around"), queries(6)
    out = module(q, Grid(*block), keys=Grid(*window)).detach()
    for n, query in enumerate(oracle.cells(*block)):
        for m, key in enumerate(oracle.cells(*window)):
            rows = [query[a] - key[a] + window[a] - 1 for a in (0, 1)]
            vector = module.tables[0][rows[0]] + module.tables[1][rows[1]]
            torch.testing.assert_close(out[..., n, m], q[:, :, n] @ vector.detach())


@given(grids(max_side=5), seeds())
def test_invariant_differences_of_each_axis_only(hw, seed):
    """Equal queries everywhere: the bias is a function of the difference, axis by axis."""
    module = decomposed(seed=seed)
    q = queries(1, seed).expand(-1, -1, hw[0] * hw[1], -1)
    out = module(q, Grid(*hw)).unflatten(2, hw).unflatten(-1, hw)[0, 0]  # [h, w, h, w]
    if min(hw) > 1:
        torch.testing.assert_close(out[1:, 1:, 1:, 1:], out[:-1, :-1, :-1, :-1], rtol=0, atol=1e-12)
        rows, columns = out[:, 0, :, 0] - out[0, 0, 0, 0], out[0, :, 0, :] - out[0, 0, 0, 0]
        joined = rows[:, None, :, None] + columns[None, :, None, :] + out[0, 0, 0, 0]
        torch.testing.assert_close(out, joined, rtol=0, atol=1e-11)


@given(st.integers(1, 3), seeds())
def test_invariant_prefix(prefix, seed):
    """The class token adds rows and columns of zeros and changes nothing else."""
    module, q = decomposed(), queries(prefix + 15, seed)
    whole, patches = module(q, Grid(3, 5), prefix=prefix), module(q[:, :, prefix:], Grid(3, 5))
    assert torch.equal(whole[:, :, prefix:, prefix:], patches)
    assert (whole[:, :, :prefix] == 0).all()
    assert (whole[..., :prefix] == 0).all()


def test_invariant_scaled():
    """BoTNet's scale_pos_embed multiplies by head_dim ** -0.5; MViTv2 and SAM use q as it is."""
    module, scaled, q = decomposed(), decomposed(scaled=True), queries(15)
    torch.testing.assert_close(scaled(q, Grid(3, 5)), module(q, Grid(3, 5)) * 0.5)


def test_invariant_linear_in_the_query():
    module = decomposed()
    one, two = queries(15, 1), queries(15, 2)
    both = module(one + 3 * two, Grid(3, 5))
    torch.testing.assert_close(both, module(one, Grid(3, 5)) + 3 * module(two, Grid(3, 5)))


def test_invariant_equal_counts():
    """Grids of 15 tokens: 3x5 and 5x3 part, and the first comes back to the bit."""
    module, q = decomposed(), queries(15)
    first = module(q, Grid(3, 5))
    assert not torch.equal(module(q, Grid(5, 3)), first)
    assert torch.equal(module(q, Grid(3, 5)), first)
    before = q.clone()
    module(q, Grid(5, 3))
    assert torch.equal(q, before)


def test_invariant_copies_and_state():
    module, q = decomposed(), queries(15)
    assert not list(module.buffers())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(q, Grid(3, 5)), module(q, Grid(3, 5)))
    other = decomposed(seed=5)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, Grid(3, 5)), module(q, Grid(3, 5)))


@pytest.mark.parametrize("names", [("rel_pos_h", "rel_pos_w"), ("height_rel", "width_rel")])
def test_invariant_source_keys(names):
    """MViTv2's tables as they are; BoTNet's count key minus query and are turned round."""
    module = decomposed()
    state = {
        f"blocks.0.attn.{key}": t.detach() for key, t in zip(names, module.tables, strict=True)
    }
    ours = DecomposedBias.from_source(state, module.spec, DIMS)
    for own, table in zip(ours.tables, module.tables, strict=True):
        assert torch.equal(own, table.flip(0) if "height" in names[0] else table)
        assert own.data_ptr() != table.data_ptr()


def test_invariant_source_of_a_clip():
    module = decomposed((2, 3, 5))
    names = ("rel_pos_t", "rel_pos_h", "rel_pos_w")
    state = {key: t.detach() for key, t in zip(names, module.tables, strict=True)}
    ours = DecomposedBias.from_source(state, module.spec, DIMS)
    q = queries(30)
    assert torch.equal(ours(q, Grid(3, 5, frames=2)), module(q, Grid(3, 5, frames=2)))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"extent": (3,)}, r"extent is \(3,\); 2 whole numbers"),
        ({"extent": (2, 3, 4, 5)}, r"extent is \(2, 3, 4, 5\)"),
        ({"extent": (3, 0)}, r"extent is \(3, 0\)"),
        ({"extent": (2, 3, -1)}, r"extent is \(2, 3, -1\); 3 whole numbers"),
        ({"keys": "strided"}, r"keys is 'strided'; it must be one of 'pooled', 'around'"),
        ({"recipe": "x"}, r"recipe is 'x'"),
        ({"std": -1.0}, r"std is -1\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        DecomposedBiasSpec(**{"extent": (3, 5), **fields})


def test_error_tokens():
    with pytest.raises(
        PositionError, match=r"q has 15 tokens of 4 channels; prefix 1 \+ grid \(1, 3, 5\)"
    ):
        decomposed()(queries(15), Grid(3, 5), prefix=1)
    with pytest.raises(PositionError, match=r"of 6 channels; .*head_dim 4 are required"):
        decomposed()(torch.zeros(1, 3, 15, 6), Grid(3, 5))
    with pytest.raises(
        PositionError, match=r"grid \(2, 3, 5\) .* has frames .*Give extent a side for t"
    ):
        decomposed()(queries(30), Grid(3, 5, frames=2))
    with pytest.raises(PositionError, match=r"keys \(2, 3, 5\)"):
        decomposed()(queries(15), Grid(3, 5), keys=Grid(3, 5, frames=2))


def test_error_source():
    with pytest.raises(PositionError, match=r"no entry rel_pos_h or height_rel, only rel_pos_w"):
        DecomposedBias.from_source(
            {"rel_pos_w": torch.zeros(9, 4)}, DecomposedBiasSpec(extent=(3, 5)), DIMS
        )
    state = {"rel_pos_h": torch.zeros(9, 4), "rel_pos_w": torch.zeros(5, 4)}
    with pytest.raises(
        PositionError, match=r"rel_pos_h of shape \(9, 4\); side 3 of extent \(3, 5\) .*\(5, 4\)"
    ):
        DecomposedBias.from_source(state, DecomposedBiasSpec(extent=(3, 5)), DIMS)


def test_gradient_of_tables_and_query():
    """Tables learn, away from the trained extent too, and the query gets its share (float64 gradcheck)."""
    module = decomposed((2, 3))
    q = queries(3)[:1, :, :, :].clone().requires_grad_()

    def run(rows, columns, q):
        given_ = {"tables.0": rows, "tables.1": columns}
        return torch.func.functional_call(module, given_, (q, Grid(1, 3)), {"keys": Grid(2, 2)})

    assert torch.autograd.gradcheck(run, (*module.tables, q))


def test_compile_one_graph_over_six_sizes():
    module = decomposed((3, 19)).float()

    def run(q, h, w):
        return module(q, Grid(h, w), prefix=1)

    calls = [(queries(1 + h * w).float(), h, w) for h, w in SIZES]
    assert graphs_of(run, calls) == 1


def test_device(device):
    module, q = decomposed().float(), queries(16).float()
    here = module(q, Grid(3, 5), keys=Grid(2, 3), prefix=1)
    there = module.to(device)(q.to(device), Grid(3, 5), keys=Grid(2, 3), prefix=1)
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


def test_device_fake_cuda():
    module, cuda = decomposed().float(), torch.device("cuda", 0)
    with FakeTensorMode():
        for axis, table in enumerate(module.tables):
            module.tables[axis] = nn.Parameter(torch.empty(table.shape, device=cuda))
        q = torch.empty(2, 3, 16, 4, device=cuda)
        assert module(q, Grid(3, 5), keys=Grid(7, 2), prefix=1).device == cuda
