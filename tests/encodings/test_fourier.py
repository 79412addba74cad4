"""Fourier features: random matrices and ladders, on grids and at any points, five dialects."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import fourier as oracle
from tests.strategies import grids, seeds
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings.fourier import Fourier, FourierSpec

# Dialect -> settings, and the width that they give with two axes.
FILLINGS = {
    "tancik": ({"sigma": 0.7}, 12),
    "sam": ({"sigma": 0.7}, 12),
    "nerf": ({"bands": 3}, 12),
    "nerf_paper": ({"bands": 3}, 12),
    "perceiver": ({"bands": 3, "max_resolution": (6, 9)}, 12),
}


def dims(width: int) -> Dims:
    return Dims(embed_dim=width, num_heads=1, depth=1)


def fourier(dialect: str, seed: int = 0, **fields) -> Fourier:
    how, width = FILLINGS[dialect]
    spec = FourierSpec(dialect=dialect, **{**how, **fields})
    generator = torch.Generator().manual_seed(seed)
    return Fourier(spec, dims(width), generator=generator)


def loops(module: Fourier, point: list[float]) -> list[float]:
    """What the dialect's formula gives at one point in the module's own unit."""
    spec = module.spec
    if module.frequencies is not None:
        B = (module.frequencies.detach().double() / (2 * math.pi)).tolist()
        if spec.dialect == "tancik":
            return oracle.tancik(point, B)
        return oracle.sam([(p + 1) / 2 for p in point], B)
    if spec.dialect == "perceiver":
        return oracle.perceiver(point, spec.bands, list(spec.max_resolution))
    return {"nerf": oracle.nerf, "nerf_paper": oracle.nerf_paper}[spec.dialect](point, spec.bands)


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
@pytest.mark.parametrize("dialect", FILLINGS)
def test_shape_of_a_code(dialect, hw):
    module = fourier(dialect)
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 12)
    assert module(Grid(*hw)).dtype == torch.float32
    assert module.at(torch.rand(2, 9, 2)).shape == (2, 9, 12)
    assert module.at(torch.rand(2)).shape == (12,)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"dialect": "nerf", "bands": 4, "include_coords": True}, 18),
        ({"dialect": "nerf_paper", "bands": 10, "axes": 3}, 60),  # NeRF's 60 of a point
        (
            {
                "dialect": "perceiver",
                "bands": 64,
                "max_resolution": (224, 224),
                "include_coords": True,
            },
            258,
        ),
        ({"dialect": "tancik", "include_coords": True}, 14),
        ({"dialect": "sam", "axes": 3}, 14),
    ],
)
def test_shape_of_widths(fields, width):
    """Perceiver's 258 and NeRF's 60 features; a projection brings any of them to any width."""
    spec = FourierSpec(**fields)
    assert Fourier(spec, dims(width))(Grid(3, 5)).shape == (15, width)
    projected = FourierSpec(**{"bands": 5, **fields}, project=True)
    assert Fourier(projected, dims(7))(Grid(3, 5)).shape == (15, 7)


@given(st.sampled_from(sorted(FILLINGS)), st.floats(-1, 1), st.floats(-1, 1), seeds())
def test_reference_points(dialect, y, x, seed):
    """Every dialect equals its source's formula at any point."""
    module = fourier(dialect, seed)
    out = module.at(torch.tensor([y, x]))
    expected = loops(module, torch.tensor([y, x]).tolist())
    torch.testing.assert_close(
        out.detach().double(), torch.tensor(expected).double(), rtol=0, atol=1e-5
    )


UNITS = {
    "tancik": lambda i, n: (i + 0.5) / n,
    "sam": lambda i, n: 2 * (i + 0.5) / n - 1,
    "nerf": lambda i, n: 2 * (i + 0.5) / n - 1,
    "nerf_paper": lambda i, n: 2 * (i + 0.5) / n - 1,
    "perceiver": lambda i, n: -1 + 2 * i / (n - 1) if n > 1 else -1.0,
}


@given(st.sampled_from(sorted(FILLINGS)), grids(max_side=6))
def test_reference_grids(dialect, hw):
    """The unit of each dialect's grids: cell centres on [0, 1] or [-1, 1], or outer cells on -1 and 1; row-major."""
    module, unit = fourier(dialect), UNITS[dialect]
    expected = [
        loops(module, [unit(y, hw[0]), unit(x, hw[1])]) for y in range(hw[0]) for x in range(hw[1])
    ]
    out = module(Grid(*hw)).detach().double()
    torch.testing.assert_close(out, torch.tensor(expected).double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dialect", ["nerf", "nerf_paper"])
def test_reference_three_axes(dialect):
    module = Fourier(FourierSpec(dialect=dialect, bands=4, axes=3), dims(24))
    point = [0.3, -0.2, 0.7]
    torch.testing.assert_close(
        module.at(torch.tensor(point)).double(),
        torch.tensor(loops(module, point)).double(),
        rtol=0,
        atol=1e-5,
    )


def test_reference_coordinates_in_front():
    """NeRF's code and Perceiver put the coordinates first, in the order of their axes: x first, y first."""
    point = torch.tensor([0.25, -0.75])
    nerf = Fourier(FourierSpec(dialect="nerf", bands=3, include_coords=True), dims(14))
    assert nerf.at(point)[:2].tolist() == [-0.75, 0.25]
    perceiver = Fourier(
        FourierSpec(dialect="perceiver", bands=3, max_resolution=(6, 9), include_coords=True),
        dims(14),
    )
    assert perceiver.at(point)[:2].tolist() == [0.25, -0.75]
    assert torch.equal(perceiver.at(point)[2:], fourier("perceiver").at(point))


def test_reference_nerf_with_and_without_pi():
    """Facts 2: many ports drop the pi. At p = 1/2 the slowest octave is sin(pi/2) = 1, or sin(1/2) = .479426."""
    point = torch.tensor([0.0, 0.5])
    paper, code = (fourier(dialect).at(point) for dialect in ("nerf_paper", "nerf"))
    assert paper[0].item() == pytest.approx(1.0, abs=1e-6)
    assert code[0].item() == pytest.approx(0.479426, abs=1e-6)


def test_reference_sigma_of_two_units():
    """Facts 2: SAM differs from Tancik by sin first and by [-1, 1], which doubles the effective sigma."""
    sam, tancik = fourier("sam"), fourier("tancik")
    with torch.no_grad():
        tancik.frequencies.copy_(2 * sam.frequencies)
    shares = torch.rand(9, 2)
    sines, cosines = sam.at(2 * shares - 1).unflatten(-1, (2, 6)).unbind(-2)
    offset = tancik.frequencies.sum(0) / 2  # 2 p - 1 = 2 (p - 1/2)
    turns = torch.atan2(sines, cosines) + offset
    expected = torch.cat([turns.cos(), turns.sin()], dim=-1)
    torch.testing.assert_close(tancik.at(shares), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dialect", "bands"),
    [
        ("sam_fourier", "sam", None),
        ("tancik_gaussian", "tancik", None),
        ("nerf_ladder", "nerf_paper", 10),
        ("nerf_code", "nerf", 10),
        ("perceiver_fourier", "perceiver", 64),
    ],
)
def test_reference_shipped(name, dialect, bands):
    spec = load_encoding(name)
    assert (spec.dialect, spec.bands) == (dialect, bands)


def test_reference_start_values():
    """Frequencies are 2 pi times a normal of deviation sigma; the passed generator alone decides."""
    spec = FourierSpec(dialect="sam", sigma=3.0, bands=5000, project=True)
    drawn = Fourier(spec, dims(8)).frequencies
    assert (drawn / (2 * math.pi)).std().item() == pytest.approx(3.0, rel=0.03)
    assert torch.equal(fourier("sam", 5).frequencies, fourier("sam", 5).frequencies)
    assert not torch.equal(fourier("sam", 5).frequencies, fourier("sam", 6).frequencies)


@given(st.sampled_from(sorted(FILLINGS)), grids(max_side=7), seeds())
def test_invariant_at_equals_forward(dialect, hw, seed):
    """A click on a cell's centre has the cell's code, in any order."""
    module = fourier(dialect, seed)
    order = torch.randperm(hw[0] * hw[1])
    points = module.points(Grid(*hw))[order]
    torch.testing.assert_close(
        points, vp.coordinates(Grid(*hw), module.coords)[order], rtol=0, atol=1e-6
    )
    assert torch.equal(module.at(points), module(Grid(*hw))[order])


@pytest.mark.parametrize("dialect", FILLINGS)
def test_invariant_shift(dialect):
    """Dot products of two codes see the difference of the points alone."""
    module = fourier(dialect)
    a, b, shift = torch.rand(3, 5, 2)
    one = (module.at(a) * module.at(b)).sum(-1)
    other = (module.at(a + shift) * module.at(b + shift)).sum(-1)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_invariant_same_view_at_any_grid():
    """Fractional and centred units keep the span: the middle cell of any odd grid has one code."""
    for dialect in ("tancik", "sam", "nerf", "perceiver"):
        module = fourier(dialect)
        middles = [module(Grid(side, 5))[(side // 2) * 5 + 2] for side in (3, 7, 15)]
        for other in middles[1:]:
            torch.testing.assert_close(other, middles[0], rtol=0, atol=2e-5)


def test_invariant_own_coords():
    """The numbering of grids can be set: NeRF's ladder on [0, 1]."""
    spec = FourierSpec(dialect="nerf_paper", bands=3, coords=CoordSpec(unit="fractional"))
    module = Fourier(spec, dims(12))
    points = vp.coordinates(Grid(3, 5), CoordSpec(unit="fractional"))
    assert torch.equal(module(Grid(3, 5)), fourier("nerf_paper").at(points))


def test_invariant_training_moves_and_eval_does_not():
    """Jitter of the coordinates is drawn in training alone, from a passed generator; a shift keeps all products."""
    unit = CoordSpec(unit="centred", shift=0.3)
    module = fourier("sam", coords=unit)
    still = module.eval()(Grid(3, 5))
    assert torch.equal(module(Grid(3, 5)), still)
    module.train()
    drawn = [
        module(Grid(3, 5), generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert (drawn[0] - drawn[2]).abs().max() > 1e-3
    assert (drawn[0] - still).abs().max() > 1e-3
    torch.testing.assert_close(drawn[0] @ drawn[0].T, still @ still.T, rtol=0, atol=1e-4)
    each = module.at(module.points(Grid(3, 5), draws=4))
    assert each.shape == (4, 15, 12)
    assert (each[0] - each[1]).abs().max() > 1e-3
    plain = fourier("sam").train()  # without augmentation training changes nothing
    assert torch.equal(plain(Grid(3, 5)), plain.eval()(Grid(3, 5)))


def test_invariant_points_keep_float32():
    """Facts 1E: transformers rounds coordinates to bf16, 642 of 1024 pixels stay distinct. Here all do."""
    module = fourier("sam").bfloat16()
    pixels = (torch.arange(1024) + 0.5) / 1024 * 2 - 1
    points = torch.stack([torch.zeros(1024), pixels], dim=-1)
    assert len(torch.unique(points.bfloat16()[:, 1])) == 642
    code = module.at(points)
    assert code.dtype == torch.float32
    assert len(torch.unique(code, dim=0)) == 1024


def test_invariant_frozen_unless_learned():
    assert not fourier("sam").frequencies.requires_grad
    assert fourier("sam", learned=True).frequencies.requires_grad
    assert not list(fourier("nerf").parameters())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"dialect": "rff"}, r"dialect is 'rff'; it must be one of 'tancik', 'sam', 'nerf'"),
        ({"axes": 1}, r"axes is 1; it must be one of 2, 3"),
        ({"axes": 3, "coords": CoordSpec()}, r"axes is 3 and coords CoordSpec"),
        ({"bands": 0}, r"bands is 0 in dialect 'tancik'; at least 1"),
        ({"dialect": "nerf"}, r"bands is None in dialect 'nerf'; .*10 in NeRF"),
        ({"dialect": "nerf", "bands": 3, "learned": True}, r"learned is True in dialect 'nerf'"),
        ({"dialect": "perceiver", "bands": 3}, r"max_resolution is None in dialect 'perceiver'"),
        ({"max_resolution": (6, 9)}, r"max_resolution is \(6, 9\) in dialect 'tancik'"),
        (
            {"dialect": "perceiver", "bands": 3, "max_resolution": (6,)},
            r"max_resolution is \(6,\)",
        ),
        (
            {"dialect": "perceiver", "bands": 3, "max_resolution": (6, 1)},
            r"max_resolution is \(6, 1\)",
        ),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        FourierSpec(**fields)


def test_error_width():
    with pytest.raises(PositionError, match=r"features are 12 channels wide and embed_dim is 16"):
        Fourier(FourierSpec(dialect="nerf", bands=3), dims(16))
    with pytest.raises(PositionError, match=r"features are 6 channels wide and embed_dim is 7"):
        Fourier(FourierSpec(), dims(7))
    with pytest.raises(PositionError, match=r"sigma is -1\.0; a finite number above 0"):
        Fourier(FourierSpec(sigma=-1.0), dims(8))


def test_error_points():
    for points, match in (
        (torch.zeros(4, 3), r"points has 3 axes, shape \(4, 3\)"),
        (torch.full((4, 2), math.inf), r"points holds NaN or infinity"),
        (torch.tensor(0.5), r"points has 0 axes"),
    ):
        with pytest.raises(PositionError, match=match):
            fourier("sam").at(points)


def test_error_state():
    spec = FourierSpec(dialect="sam")
    with pytest.raises(PositionError, match=r"no entry positional_encoding_gaussian_matrix"):
        Fourier.from_segment_anything({"B": torch.zeros(2, 6)}, spec, dims(12))
    state = {"pe_layer.positional_encoding_gaussian_matrix": torch.zeros(2, 5)}
    with pytest.raises(PositionError, match=r"frequencies of segment-anything has shape \(2, 5\)"):
        Fourier.from_segment_anything(state, spec, dims(12))


def test_gradient_of_frequencies():
    spec = FourierSpec(dialect="sam", bands=3, learned=True, project=True)
    module = Fourier(spec, dims(2)).double()
    points = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def run(points, *weights):
        learned = dict(zip(dict(module.named_parameters()), weights, strict=True))

        class At(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = module

            def forward(self, points):
                return self.inner.at(points)

        named = {f"inner.{key}": value for key, value in learned.items()}
        return torch.func.functional_call(At(), named, (points,))

    assert torch.autograd.gradcheck(run, (points, *module.parameters()))


@pytest.mark.parametrize("dialect", FILLINGS)
def test_compile_points(dialect):
    module = fourier(dialect)
    calls = [(torch.rand(2, h * w, 2),) for h, w in SIZES]
    assert graphs_of(module.at, calls) == 1


def test_device_fake_cuda():
    cuda = torch.device("cuda", 0)
    for dialect in FILLINGS:
        module = fourier(dialect)
        with FakeTensorMode():
            if module.frequencies is not None:
                shape = module.frequencies.shape
                module.frequencies = nn.Parameter(torch.empty(shape, device=cuda))
            assert module(Grid(3, 5), device=cuda).device == cuda
            assert module.at(torch.empty(7, 2, device=cuda)).device == cuda


@pytest.mark.parametrize("dialect", ["nerf", "nerf_paper"])
def test_error_bands_that_overflow(dialect):
    """2 ** 129 is no float32 number: refused by the spec. The most that it takes stays finite."""
    for bands in (97, 130, 2000):
        with pytest.raises(PositionError, match=rf"bands is {bands} in dialect '{dialect}'.*96"):
            FourierSpec(dialect=dialect, bands=bands)
    spec = FourierSpec(dialect=dialect, bands=96, project=True)
    module = Fourier(spec, dims(8))
    assert module.freqs().isfinite().all()
    assert module(Grid(3, 5)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        FourierSpec(dialect="tancik"),
        FourierSpec(dialect="sam", learned=True),
        FourierSpec(dialect="nerf", bands=4),
        FourierSpec(dialect="nerf_paper", bands=4),
        FourierSpec(dialect="perceiver", bands=4, max_resolution=(9, 9)),
    ],
)
def test_invariant_default_dtype(spec, dtype):
    """torch's default dtype rounds neither a frequency nor a coordinate, whole ones included."""
    sizes, draws = Dims(embed_dim=16, num_heads=1, depth=1), torch.Generator()
    before, whole = Fourier(spec, sizes, generator=draws.manual_seed(3)), torch.tensor([[1, 0]])
    grid, points = before(Grid(3, 5)), before.at(whole)
    torch.set_default_dtype(dtype)
    try:
        after = Fourier(spec, sizes, generator=draws.manual_seed(3))
        codes = after(Grid(3, 5)), after.at(whole)
    finally:
        torch.set_default_dtype(torch.float32)
    for got, expected in zip(codes, (grid, points), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)
