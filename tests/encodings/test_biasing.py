"""The door bias: what every function of coordinate differences owes, whatever its scheme."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import bias as oracle
from tests.reference import resampling
from tests.strategies import grids, seeds, shifts
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import (
    Alibi,
    AlibiSpec,
    Biasing,
    FireSpec,
    KerpleSpec,
    LogBiasSpec,
    LookHereSpec,
    OffsetTableSpec,
    SwinTableSpec,
    T5BiasSpec,
    spec_types,
)
from visionpos.geometry.relative import distances, distinct_offsets, relative_index

FEW = settings(max_examples=12)  # 18 schemes a law
DIMS = Dims(embed_dim=32, num_heads=4, depth=3, prefix=1)
WINDOW = (4, 6)
VIEWS = (("halves", 4),)
SPECS = {
    "swin": SwinTableSpec(window_hw=WINDOW),
    "beit": SwinTableSpec(window_hw=WINDOW, recipe="beit", class_rows=True),
    "swin_crop": SwinTableSpec(window_hw=(19, 19), windows="crop"),
    "offset": OffsetTableSpec(window_hw=WINDOW),
    "offset_direct": OffsetTableSpec(window_hw=WINDOW, resize="direct"),
    "log_microsoft": LogBiasSpec(pretrained_window_hw=(8, 5), hidden=16),
    "log_torchvision": LogBiasSpec(form="torchvision", hidden=16, prefix="learned"),
    "log_cr": LogBiasSpec(form="cr", hidden=16, out_bias=True),
    "alibi_l1": AlibiSpec(metric="l1"),
    "alibi_l2": AlibiSpec(metric="l2"),
    "alibi_linf": AlibiSpec(metric="linf"),
    "lookhere": LookHereSpec(views=VIEWS),
    "t5": T5BiasSpec(),
    "t5_layoutlmv3": T5BiasSpec(buckets=(64, 64), max_distance=(256, 256), scale="sqrt_head_dim"),
    "kerple_log": KerpleSpec(),
    "kerple_power": KerpleSpec(form="power", metric="l1"),
    "fire_extent": FireSpec(threshold=3.0),
    "fire_threshold": FireSpec(reach="threshold", metric="linf"),
}
# Other windows by their table, or in units of the window: the same difference has another bias at another size.
BY_SIZE = {"swin", "beit", "offset", "offset_direct", "log_torchvision", "fire_extent"}
MIRRORS = {
    "offset",
    "offset_direct",
    "fire_extent",
    "fire_threshold",
    "kerple_log",
    "kerple_power",
} | {f"alibi_{metric}" for metric in ("l1", "l2", "linf")}
QUARTERS = MIRRORS - {"offset", "offset_direct"}
RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (4, 9), (6, 6), WINDOW, (1, 1)]


def biasing(name: str, seed: int = 0, dims: Dims = DIMS) -> Biasing:
    """A module in float64 with every parameter drawn: zero and small start values hide errors."""
    module = vp.build(SPECS[name], dims).double()
    draws = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data.normal_(generator=draws)
    return module.eval()


def state(module: nn.Module) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy() for key, value in module.state_dict().items()}


def expected(name: str, module: Biasing, hw: tuple[int, int]) -> np.ndarray:
    """The bias of every pair of cells of a grid by the loops of tests/reference/bias.py."""
    return oracle.pairs(hw, LOOPS[type(SPECS[name])](SPECS[name], state(module), hw, module))


def swin(spec, weights, hw, _):
    old = tuple(2 * side - 1 for side in spec.window_hw)
    table, window = weights["table"][: old[0] * old[1]].reshape(*old, -1), spec.window_hw
    if spec.windows == "resample" and hw != window:
        new = tuple(2 * side - 1 for side in hw)
        table, window = resampling.resized(table, new, spec.recipe), hw
    return oracle.table_bias(table, window)


def lookhere(spec, *_):
    hidden = float(torch.finfo(torch.bfloat16).min)
    return oracle.lookhere(list(spec.views), spec.global_slope * spec.layer_slopes[0], hidden)


def t5(spec, weights, *_):
    divisor = DIMS.channels**0.5 if spec.scale == "sqrt_head_dim" else 1.0
    tables = [weights["tables.0"] / divisor, weights["tables.1"] / divisor]
    return oracle.t5(tables, spec.max_distance)


def kerple(spec, _, __, module):
    p, a = (value.detach().numpy() for value in (module.p(), module.a()))
    return oracle.kerple(p, a, spec.form, spec.metric)


def offset_table(table: np.ndarray, spec: OffsetTableSpec, hw: tuple[int, int]) -> np.ndarray:
    """LeViT's table `[h, w, heads]` on another grid, through the two-sided table it stands for, or not."""
    (h, w), lattice = spec.window_hw, table.reshape(*spec.window_hw, -1)
    if hw == spec.window_hw:
        return lattice
    if spec.resize == "direct":
        return resampling.resized(lattice, hw, spec.recipe)
    wide = np.array([[lattice[abs(y), abs(x)] for x in range(1 - w, w)] for y in range(1 - h, h)])
    moved = resampling.resized(wide, (2 * hw[0] - 1, 2 * hw[1] - 1), spec.recipe)
    return moved[hw[0] - 1 :, hw[1] - 1 :]


def fire(spec, weights, hw, _):
    corner = oracle.distance((hw[0] - 1, hw[1] - 1), spec.metric)
    reach = corner if spec.reach == "extent" else 0.0
    c, least = abs(float(weights["warp"])), abs(float(weights["threshold"]))

    def one(d: oracle.Cell) -> np.ndarray:
        x = oracle.fire_input(oracle.distance(d, spec.metric), reach, c, least)
        hidden = np.maximum(weights["hidden.weight"][:, 0] * x + weights["hidden.bias"], 0)
        return weights["out.weight"] @ hidden + weights["out.bias"]

    return one


LOOPS = {
    SwinTableSpec: swin,
    OffsetTableSpec: lambda spec, weights, hw, _: oracle.offset_bias(
        offset_table(weights["table"], spec, hw)
    ),
    LogBiasSpec: lambda spec, weights, hw, _: oracle.log_bias(
        weights, spec.form, spec.pretrained_window_hw or hw
    ),
    AlibiSpec: lambda spec, *_: oracle.alibi(DIMS.num_heads, spec.metric),
    LookHereSpec: lookhere,
    T5BiasSpec: t5,
    KerpleSpec: kerple,
    FireSpec: fire,
}


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", SPECS)
def test_shape_of_every_bias(name, hw):
    """[num_heads, prefix + n, prefix + n], and one value for each distinct difference."""
    module, n = biasing(name), hw[0] * hw[1]
    assert isinstance(module, Biasing)
    for prefix in (0, 1, 4):
        assert module(Grid(*hw), prefix=prefix).shape == (4, prefix + n, prefix + n)
    assert module.distinct(Grid(*hw)).shape == (4, (2 * hw[0] - 1) * (2 * hw[1] - 1))


@FEW
@given(grids(max_side=5), seeds())
@pytest.mark.parametrize("name", SPECS)
def test_reference_every_bias(name, hw, seed):
    """Equal to the loops on every pair of cells: row-major, query minus key."""
    module = biasing(name, seed)
    out = module(Grid(*hw)).detach()
    target = torch.from_numpy(expected(name, module, hw))
    if name == "lookhere":  # the source rounds to bfloat16
        target = target.bfloat16().float()
        torch.testing.assert_close(out, target, rtol=0, atol=0)
    else:
        dtype = torch.float32 if name.startswith("alibi") else torch.float64
        assert_close_to(out, target, kind="applied" if dtype == torch.float32 else "table")


@FEW
@given(grids(max_side=6), seeds())
@pytest.mark.parametrize("name", SPECS)
def test_invariant_dense_is_the_function(name, hw, seed):
    """The dense tensor is values() at the differences of every pair: no second definition."""
    module, grid = biasing(name, seed), Grid(*hw)
    table = module.distinct(grid)
    if name not in BY_SIZE:
        torch.testing.assert_close(module.values(distinct_offsets(grid)), table, rtol=0, atol=0)
    dense = module(grid)
    i = seed % grid.size
    rows = relative_index(grid)[i]
    torch.testing.assert_close(dense[:, i], table[:, rows], rtol=0, atol=0)


@FEW
@given(shifts(max_shift=9), seeds())
@pytest.mark.parametrize("name", sorted(set(SPECS) - {"log_torchvision", "fire_extent"}))
def test_invariant_shift(name, shift, seed):
    """Queries and keys moved by one step together: no bias changes."""
    module = biasing(name, seed)
    queries, keys = vp.coordinates(Grid(3, 5)), vp.coordinates(Grid(4, 6))[::5]
    moved = torch.tensor(shift)
    torch.testing.assert_close(
        module.between(queries + moved, keys + moved), module.between(queries, keys), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", sorted(set(SPECS) - BY_SIZE))
def test_invariant_same_displacement_across_windows(name):
    """Facts 1D: a difference has one bias, whatever the window it is seen in."""
    module = biasing(name)
    small, large = (
        module.distinct(Grid(*hw)).unflatten(1, tuple(2 * side - 1 for side in hw))
        for hw in ((3, 5), (6, 11))
    )
    torch.testing.assert_close(small, large[:, 3:8, 6:15], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", sorted(BY_SIZE))
def test_invariant_same_displacement_is_disclaimed(name):
    """Tables that are resampled, and units of the current window, change it: see the docstrings."""
    module = biasing(name)
    small, large = (
        module.distinct(Grid(*hw)).unflatten(1, tuple(2 * side - 1 for side in hw))
        for hw in ((3, 5), (6, 11))
    )
    assert (small - large[:, 3:8, 6:15]).abs().max() > 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_invariant_mirrors_and_quarter_turns(name):
    """The symmetries that a docstring claims hold, and those it does not claim fail on drawn weights."""
    table = biasing(name).distinct(Grid(7, 7)).unflatten(1, (13, 13))

    def same(other):
        return torch.allclose(table, other, rtol=1e-6, atol=1e-9)

    assert same(table.flip(1)) == (name in MIRRORS)
    assert same(table.flip(2)) == (name in MIRRORS)
    assert same(table.mT) == (name in QUARTERS)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_token_order(name):
    """between() at shuffled, thinned coordinates gives forward's rows and columns: patch dropout needs no more."""
    module, grid = biasing(name), Grid(*WINDOW)
    kept = torch.randperm(grid.size)[:11]
    points = vp.coordinates(grid)[kept]
    if name in ("log_torchvision", "fire_extent"):  # they need to know the window too
        how = {"window_hw": WINDOW} if name == "log_torchvision" else {"extent": (1, *WINDOW)}
        thinned = module.values(points.unsqueeze(1) - points, **how)
    else:
        thinned = module.between(points, points)
    torch.testing.assert_close(thinned, module(grid)[:, kept][:, :, kept], rtol=1e-12, atol=0)


@FEW
@given(grids(max_side=4), st.integers(1, 4), seeds())
@pytest.mark.parametrize("name", SPECS)
def test_invariant_prefix(name, hw, prefix, seed):
    """Prefix tokens get their own values or zeros, and change nothing between patches."""
    module = biasing(name, seed)
    patches, whole = module(Grid(*hw)).detach(), module(Grid(*hw), prefix=prefix).detach()
    own = module.prefix_values()
    own = np.zeros((4, 3)) if own is None else own.detach().numpy()
    target = oracle.framed(patches.numpy(), own, prefix)
    torch.testing.assert_close(whole.double(), torch.from_numpy(target), rtol=0, atol=0)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_no_cache_between_equal_counts(name):
    """Facts 5.7: A, B, A with 36 cells each: B gets its own numbers, and A comes back to the bit."""
    module = biasing(name)
    first, other = module(Grid(4, 9)), module(Grid(6, 6))
    assert torch.equal(copy.deepcopy(module)(Grid(6, 6)), other)
    assert torch.equal(module(Grid(4, 9)), first)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_state(name):
    """Parameters are the whole state, copies are independent, a spec is a value that names its class."""
    module, spec = biasing(name), SPECS[name]
    assert not list(module.buffers())
    other = vp.build(spec, DIMS).double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(Grid(3, 5)), module(Grid(3, 5)))
    before = module(Grid(3, 5))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for weight in twin.parameters():
            weight.data.mul_(3)
        assert torch.equal(twin(Grid(3, 5)), before) != bool(list(twin.parameters()))
        assert torch.equal(module(Grid(3, 5)), before)
    assert spec_types()[spec.kind] is type(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(copy.deepcopy(spec))


@pytest.mark.parametrize("name", SPECS)
def test_invariant_half_precision(name):
    """bf16 weights are evaluated in float32, under autocast too, and rounded once at the end."""
    module = biasing(name).bfloat16()
    wide = copy.deepcopy(module).float()(Grid(5, 3), prefix=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(Grid(5, 3), prefix=1)
    if not list(module.parameters()):
        assert out.dtype == torch.float32
        assert torch.equal(out, wide)
    else:
        assert out.dtype == torch.bfloat16
        # Sums of T5 are of rounded numbers, each in bf16.
        torch.testing.assert_close(out.float(), wide, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"lookhere"}))
def test_invariant_generator_alone_decides(name):
    kind = type(vp.build(SPECS[name], DIMS))
    if kind is Alibi:
        return
    before = torch.get_rng_state()
    one, two, three = (
        kind(SPECS[name], DIMS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    drawn = [w for w in one.parameters() if w.unique().numel() > 3]
    fresh = [w for w in three.parameters() if w.unique().numel() > 3]
    assert not any(torch.equal(a, b) for a, b in zip(drawn, fresh, strict=True))


def test_error_prefix():
    with pytest.raises(PositionError, match=r"prefix is -1; a token count of at least 0"):
        biasing("alibi_l2")(Grid(3, 5), prefix=-1)


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"lookhere"}))
def test_error_device(name):
    """A bias with weights is not moved behind the caller's back; one without is built where asked."""
    module = biasing(name)
    if list(module.parameters()):
        with pytest.raises(
            PositionError, match=r"device is meta and the parameters are on cpu; .*\.to\(meta\)"
        ):
            module(Grid(3, 5), device=torch.device("meta"))
    else:
        assert module(Grid(3, 5), device=torch.device("meta")).is_meta


@pytest.mark.parametrize("name", ["swin", "offset", "log_microsoft", "lookhere", "t5"])
def test_error_axes(name):
    """A bias of (y, x) refuses a clip and offsets of three axes."""
    with pytest.raises(PositionError, match=r"frames|3 axes"):
        biasing(name)(Grid(3, 5, frames=2))
    with pytest.raises(PositionError, match=r"3 axes"):
        biasing(name).values(torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["alibi_l2", "kerple_log", "fire_extent", "fire_threshold"])
def test_shape_of_a_clip(name):
    """A bias of distance takes time as one more axis: equal frames are nearer than others."""
    out = biasing(name)(Grid(3, 5, frames=2))
    assert out.shape == (4, 30, 30)
    still = distances(distinct_offsets(Grid(3, 5, frames=2)), "l2").unflatten(0, (3, 5, 9))
    assert still[0].min() == 1.0


def test_error_metric():
    with pytest.raises(PositionError, match=r"metric is 'l3'; it must be 'l1', 'l2' or 'linf'"):
        distances(torch.zeros(1, 2), "l3")


@pytest.mark.parametrize("name", [n for n in SPECS if not n.startswith(("alibi", "lookhere"))])
def test_gradient_of_every_weight(name):
    """Every learned number is reached, at the trained window and away from it (float64 gradcheck)."""
    small = replace(DIMS, num_heads=2, embed_dim=4)
    spec = SPECS[name]
    if isinstance(spec, SwinTableSpec | OffsetTableSpec):
        spec = replace(spec, window_hw=(3, 2))
    if isinstance(spec, LogBiasSpec | FireSpec):
        spec = replace(spec, hidden=3)
    module = vp.build(spec, small).double()
    for weight in module.parameters():
        weight.data.normal_()
    names = [key for key, _ in module.named_parameters()]

    def run(*weights):
        given_ = dict(zip(names, weights, strict=True))
        return tuple(
            torch.func.functional_call(module, given_, (grid,), {"prefix": 1})
            for grid in (Grid(3, 2), Grid(2, 3) if name != "swin_crop" else Grid(1, 2))
        )

    assert torch.autograd.gradcheck(run, tuple(module.parameters()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fire_extent", "swin") else pytest.mark.slow)
        for name in sorted(set(SPECS) - {"beit"})
    ],
)
def test_compile_one_graph_over_six_sizes(name):
    """Six rectangles, one graph, the eager numbers to the bit."""
    module = biasing(name).float()
    assert graphs_of(lambda h, w: module(Grid(h, w), prefix=1), SIZES) == 1


@pytest.mark.slow
def test_compile_geometric_a_graph_a_size():
    """The geometric ratio is searched in Python: fullgraph still, but one graph a size. Resize before compiling."""
    module = biasing("beit").float()
    assert 1 <= graphs_of(lambda h, w: module(Grid(h, w), prefix=1), SIZES[:2]) <= 2


@pytest.mark.parametrize("name", SPECS)
def test_device(name, device):
    """On a device everything is built there, and equals the CPU's numbers."""
    module = biasing(name).float()
    here = module(Grid(3, 5), prefix=1)
    there = module.to(device)(Grid(3, 5), prefix=1, device=torch.device(device.type))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("name", SPECS)
def test_device_fake_cuda(name):
    """Fake CUDA tensors raise at any operation that mixes devices; without device= the weights say where."""
    module, cuda = biasing(name).float(), torch.device("cuda", 0)
    with FakeTensorMode():
        for part in module.modules():
            for key, weight in list(part.named_parameters(recurse=False)):
                setattr(part, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        how = {} if list(module.parameters()) else {"device": cuda}
        assert module(Grid(3, 5), prefix=1, **how).device == cuda
        assert module(Grid(3, 5), device=torch.device("cuda")).device.type == "cuda"


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"log_torchvision", "fire_extent"}))
def test_invariant_vmap(name):
    """Samples one by one, or mapped over: tables asked a mapped tensor for its values."""
    module = biasing(name)
    offsets = torch.stack([vp.coordinates(Grid(2, 3)), -vp.coordinates(Grid(2, 3))])
    mapped = torch.func.vmap(module.values)(offsets)
    torch.testing.assert_close(mapped, torch.stack([module.values(one) for one in offsets]))
