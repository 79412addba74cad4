"""Sine codes of detectors: counted, normalised, interleaved; masks with a named polarity; SAM 2's doubled ladder."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import sine as oracle
from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings.sine import Sine, SineSpec, doubled_sine

DIALECTS = ("detr", "deformable_detr")


def dims(width: int) -> Dims:
    return Dims(embed_dim=width, num_heads=1, depth=1)


def expected(valid, width: int, dialect: str, **how) -> torch.Tensor:
    mask = np.asarray(valid)
    return torch.from_numpy(oracle.code(mask, width, centre=dialect == "deformable_detr", **how))


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
@pytest.mark.parametrize("fields", [{}, {"dialect": "deformable_detr"}, {"hidden_dim": 6}])
def test_shape_of_a_code(hw, fields):
    module = Sine(SineSpec(**fields), dims(24))
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 24)
    assert module(Grid(*hw)).dtype == torch.float32
    assert module.masked(valid=torch.ones(2, *hw)).shape == (2, hw[0] * hw[1], 24)
    assert module.at(torch.rand(2, 9, 2)).shape == (2, 9, 24)


@given(
    grids(max_side=9),
    st.sampled_from(DIALECTS),
    st.booleans(),
    st.integers(1, 6),
    st.sampled_from([20.0, 10000.0]),
)
def test_reference_loops(hw, dialect, normalize, quarter, theta):
    """Every dialect equals its source's formula on any rectangle."""
    spec = SineSpec(dialect=dialect, normalize=normalize, theta=theta)
    out = Sine(spec, dims(4 * quarter))(Grid(*hw))
    loops = expected(np.ones(hw, dtype=int), 4 * quarter, dialect, normalize=normalize, theta=theta)
    torch.testing.assert_close(out.double(), loops, rtol=0, atol=2e-6)


@given(grids(max_side=8), st.sampled_from(DIALECTS), st.booleans(), seeds())
def test_reference_masks(hw, dialect, normalize, seed):
    """Any mask, holes included: cells are counted over the valid ones of their own row and column."""
    valid = torch.rand(2, *hw, generator=torch.Generator().manual_seed(seed)) > 0.4
    module = Sine(SineSpec(dialect=dialect, normalize=normalize), dims(16))
    out = module.masked(valid=valid)
    for image, code in zip(valid.int().numpy(), out, strict=True):
        loops = expected(image, 16, dialect, normalize=normalize)
        torch.testing.assert_close(code.double(), loops, rtol=0, atol=2e-6)


def test_reference_scale():
    """scale is the angle of position 1."""
    spec = SineSpec(scale=1.5)
    loops = expected(np.ones((3, 5), dtype=int), 8, "detr", scale=1.5)
    torch.testing.assert_close(Sine(spec, dims(8))(Grid(3, 5)).double(), loops, rtol=0, atol=1e-6)


def test_reference_projection():
    """XCiT: 32 channels an axis, then a 1x1 convolution, which is a linear map of each token."""
    module = Sine(SineSpec(hidden_dim=32), dims(10))
    code = expected(np.ones((3, 5), dtype=int), 64, "detr")
    weight, bias = (p.detach().double() for p in module.projection.parameters())
    out = module(Grid(3, 5)).detach().double()
    torch.testing.assert_close(out, code @ weight.T + bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [0.0, 1.0, 0.37, 15.0])
@pytest.mark.parametrize("width", [4, 8, 12, 64])
def test_reference_doubled(position, width):
    out = doubled_sine(torch.tensor([position]), width)[0].double()
    torch.testing.assert_close(
        out, torch.tensor(oracle.doubled(position, width)).double(), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize(
    ("name", "dialect", "theta", "hidden"),
    [
        ("detr_sine", "detr", 10000.0, None),
        ("deformable_detr_sine", "deformable_detr", 10000.0, None),
        ("dab_detr_sine", "detr", 20.0, None),
        ("xcit_fourier", "detr", 10000.0, 32),
    ],
)
def test_reference_shipped(name, dialect, theta, hidden):
    """The shipped YAMLs are the golden dialects."""
    spec = load_encoding(name)
    assert (spec.dialect, spec.theta, spec.hidden_dim) == (dialect, theta, hidden)
    if hidden is None:
        loops = expected(np.ones((2, 3), dtype=int), 8, dialect, theta=theta)
        out = vp.build(spec, dims(8))(Grid(2, 3)).double()
        torch.testing.assert_close(out, loops, rtol=0, atol=1e-6)


@given(grids(max_side=9), st.sampled_from(DIALECTS))
def test_invariant_whole_mask(hw, dialect):
    """A mask without padding changes nothing, said either way round."""
    module = Sine(SineSpec(dialect=dialect), dims(16))
    alone = module(Grid(*hw))
    for how in ({"valid": torch.ones(1, *hw)}, {"padding": torch.zeros(1, *hw, dtype=torch.bool)}):
        torch.testing.assert_close(module.masked(**how)[0], alone, rtol=0, atol=1e-6)


@given(grids(max_side=6), st.sampled_from(DIALECTS), st.integers(0, 4), st.integers(0, 4))
def test_invariant_padding(hw, dialect, below, right):
    """An image padded at the bottom and right keeps the code it has alone, cell by cell."""
    module = Sine(SineSpec(dialect=dialect), dims(16))
    padding = torch.ones(1, hw[0] + below, hw[1] + right, dtype=torch.bool)
    padding[0, : hw[0], : hw[1]] = False
    lattice = module.masked(padding=padding)[0].unflatten(0, tuple(padding.shape[1:]))
    inside = lattice[: hw[0], : hw[1]].flatten(0, 1)
    torch.testing.assert_close(inside, module(Grid(*hw)), rtol=0, atol=1e-6)
    assert torch.equal(lattice, module.masked(valid=~padding)[0].unflatten(0, padding.shape[1:]))


def test_invariant_empty_columns():
    """Facts 8: a column without a valid cell is at position 0; Deformable-DETR takes the sine of -3e6 there."""
    valid = torch.zeros(1, 3, 5)
    valid[0, :, :2] = 1
    zero = Sine(SineSpec(), dims(8)).at(torch.zeros(1, 2))[0, :4]
    for dialect in DIALECTS:
        out = Sine(SineSpec(dialect=dialect), dims(8)).masked(valid=valid)[0].unflatten(0, (3, 5))
        assert (out[:, 2:, :4] == zero).all()


@given(grids(max_side=9), st.sampled_from(DIALECTS))
def test_invariant_transpose(hw, dialect):
    """Turning the grid swaps the halves."""
    module = Sine(SineSpec(dialect=dialect), dims(16))
    upright = module(Grid(*hw)).unflatten(0, hw)
    lying = module(Grid(hw[1], hw[0])).unflatten(0, (hw[1], hw[0])).transpose(0, 1)
    assert torch.equal(lying, upright.roll(8, dims=-1))


@given(grids(max_side=9), st.sampled_from(DIALECTS))
def test_invariant_at_equals_forward(hw, dialect):
    """Cell i of N stands at i / N (DETR) or at its centre (Deformable-DETR)."""
    module = Sine(SineSpec(dialect=dialect), dims(16))
    taken = 0.0 if dialect == "detr" else 0.5
    y, x = ((torch.arange(n) + 1 - taken) / n for n in hw)
    points = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
    torch.testing.assert_close(module.at(points), module(Grid(*hw)), rtol=0, atol=7e-6)  # 2 pi 1e-6


@pytest.mark.parametrize("dialect", DIALECTS)
def test_invariant_norm(dialect):
    norms = Sine(SineSpec(dialect=dialect), dims(16))(Grid(13, 11)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(8)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_invariant_size_free(dialect):
    """Normalised by the count, the last row of any grid has the same code, up to the half cell."""
    module = Sine(SineSpec(), dims(16))
    ends = [module(Grid(side, 3))[-1] for side in (2, 7, 50)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=6e-6)


def test_invariant_doubled_frequencies():
    """The ladder has half of the frequencies that its width would hold, each twice."""
    out = doubled_sine(torch.linspace(0, 1, 9), 16)
    assert torch.equal(out[:, 0::2], out[:, 1::2])
    assert (out[:, 0:4:2] - out[:, 2:6:2]).abs().amax(0).min() > 1e-3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"dialect": "dino"}, r"dialect is 'dino'; it must be one of 'detr', 'deformable_detr'"),
        ({"scale": 0.0}, r"scale is 0\.0; a finite angle above 0"),
        ({"scale": float("inf")}, r"scale is inf"),
        ({"hidden_dim": 3}, r"hidden_dim is 3; an even number of at least 2"),
        ({"hidden_dim": 0}, r"hidden_dim is 0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        SineSpec(**fields)


def test_error_build():
    with pytest.raises(PositionError, match=r"embed_dim is 10; a multiple of 4.*Set hidden_dim"):
        Sine(SineSpec(), dims(10))
    with pytest.raises(PositionError, match=r"theta is -1\.0"):
        Sine(SineSpec(theta=-1.0), dims(8))
    with pytest.raises(PositionError, match=r"channels is 6; a positive multiple of 4"):
        doubled_sine(torch.zeros(1), 6)


def test_error_masks():
    module = Sine(SineSpec(), dims(8))
    mask = torch.ones(1, 3, 5)
    for how in ({}, {"valid": mask, "padding": mask}):
        with pytest.raises(PositionError, match=r"exactly one mask is required.*valid=.*"):
            module.masked(**how)
    with pytest.raises(PositionError, match=r"the mask has shape \(3, 5\); \[b, h, w\]"):
        module.masked(valid=mask[0])


def test_error_points():
    module = Sine(SineSpec(), dims(8))
    with pytest.raises(PositionError, match=r"shares_yx has 3 axes"):
        module.at(torch.zeros(2, 3))
    with pytest.raises(PositionError, match=r"shares_yx holds NaN"):
        module.at(torch.full((1, 2), float("nan")))
    with pytest.raises(PositionError, match=r"normalize is False; a share of the image"):
        Sine(SineSpec(normalize=False), dims(8)).at(torch.zeros(1, 2))


def test_error_state():
    spec, state = SineSpec(hidden_dim=6), {"token_projection.weight": torch.zeros(8, 12, 1, 1)}
    with pytest.raises(PositionError, match=r"no entry token_projection\.bias"):
        Sine.from_timm(state, spec, dims(8))
    state["token_projection.bias"] = torch.zeros(9)
    with pytest.raises(PositionError, match=r"projection\.bias of timm has shape \(9,\)"):
        Sine.from_timm(state, spec, dims(8))


def test_gradient_of_the_projection():
    module = Sine(SineSpec(hidden_dim=4), dims(3)).double()

    def run(weight, bias):
        learned = {"projection.weight": weight, "projection.bias": bias}
        return torch.func.functional_call(module, learned, (Grid(2, 3),))

    assert torch.autograd.gradcheck(run, tuple(module.projection.parameters()))


@pytest.mark.parametrize("how", ["valid", "padding"])
def test_compile_masks(how):
    """One graph for masks of six sizes; value and dtype agree with eager (facts/users.md B06)."""
    module = Sine(SineSpec(dialect="deformable_detr"), dims(24))
    masks = []
    for size in SIZES:
        mask = torch.zeros(2, *size, dtype=torch.bool)
        mask[:, :2, :3] = True
        masks.append((mask,))
    assert graphs_of(lambda mask: module.masked(**{how: mask}).bfloat16(), masks) == 1


@pytest.mark.slow
def test_compile_inductor_keeps_the_dtype():
    """facts/users.md B06: the compiler rewrites cumsum(ones) and loses its dtype; bf16 layers must get bf16."""
    module = Sine(SineSpec(), dims(24))

    def run(mask):
        return module.masked(valid=mask).bfloat16(), module(Grid(5, 7)).bfloat16()

    mask = torch.ones(2, 5, 7)
    for out, eager in zip(torch.compile(run)(mask), run(mask), strict=True):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, eager, rtol=0, atol=8e-3)


def test_device_masks(device):
    module = Sine(SineSpec(hidden_dim=4), dims(8))
    mask = torch.rand(2, 3, 5) > 0.3
    here = module.masked(valid=mask)
    there = module.to(device).masked(valid=mask.to(device))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


def test_device_fake_cuda():
    module, cuda = Sine(SineSpec(hidden_dim=4), dims(8)), torch.device("cuda", 0)
    with FakeTensorMode():
        for key, weight in list(module.projection.named_parameters()):
            setattr(module.projection, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        assert module(Grid(3, 5)).device == cuda
        assert module.masked(valid=torch.ones(1, 3, 5, device=cuda)).device == cuda
        assert module.at(torch.empty(7, 2, device=cuda)).device == cuda
        assert doubled_sine(torch.empty(7, device=cuda), 8).device == cuda


@pytest.mark.parametrize("name", ["valid", "padding"])
def test_error_masks_that_are_added_to_logits(name):
    """0 and -inf were read as padding and image: the other way round."""
    module = Sine(SineSpec(), Dims(embed_dim=16, num_heads=1, depth=1))
    added = torch.zeros(1, 3, 5)
    added[..., 3:] = -math.inf
    with pytest.raises(
        PositionError, match=rf"{name} holds -inf; True and False, or 1 and 0.*mask == 0"
    ):
        module.masked(**{name: added})
    with pytest.raises(PositionError, match=rf"{name} is .*; a tensor \[b, h, w\]"):
        module.masked(**{name: [[[1]]]})
    whole = module.masked(valid=torch.ones(1, 3, 5))
    assert torch.equal(whole, module.masked(valid=torch.ones(1, 3, 5, dtype=torch.int64)))
    assert torch.equal(whole, module.masked(padding=torch.zeros(1, 3, 5)))


def test_error_a_lone_point():
    module = Sine(SineSpec(), Dims(embed_dim=16, num_heads=1, depth=1))
    with pytest.raises(PositionError, match=r"shares_yx has shape \(2,\); .*unsqueeze\(0\)"):
        module.at(torch.tensor([0.5, 0.5]))
