"""Fixed sin-cos: six dialects of one formula, which differ in order and in one exponent; images and clips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import sincos as oracle
from tests.strategies import grids, volumes
from visionpos import Dims, Grid, PositionError, SinCosSpec
from visionpos.config import load_encoding
from visionpos.encodings.sincos import dialect_of

DIALECTS = sorted(oracle.DIALECTS)
COLUMN_MAJOR = ["omdet_turbo", "timm_reversed"]
ROW_MAJOR = sorted(set(DIALECTS) - set(COLUMN_MAJOR))


def table(dialect: str, hw: tuple[int, int], dim: int, theta: float = 10000.0) -> torch.Tensor:
    spec = SinCosSpec(dialect=dialect, theta=theta)
    return vp.build(spec, Dims(embed_dim=dim, num_heads=1, depth=1))(Grid(*hw))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
@pytest.mark.parametrize("dim", [8, 12, 384])
def test_shape_of_a_table(dialect, hw, dim):
    out = table(dialect, hw, dim)
    assert out.shape == (hw[0] * hw[1], dim)
    assert out.dtype == torch.float32


# Facts 1A: token (row 0, col 1), D = 8.
GOLDEN = {
    "mae": [0.841471, 0.01, 0.540302, 0.99995, 0, 0, 1, 1],
    "vjepa": [0, 0, 1, 1, 0.841471, 0.01, 0.540302, 0.99995],
    "big_vision": [0.841471, 0.0001, 0.540302, 1.0, 0, 0, 1, 1],
    "timm": [0, 0, 0.841471, 0.01, 1, 1, 0.540302, 0.99995],
}


@pytest.mark.parametrize("dialect", GOLDEN)
def test_reference_golden_first_column(dialect):
    """Facts 1A: one token, four answers."""
    for hw in ((2, 3), (3, 2), (1, 5)):
        token = table(dialect, hw, 8)[1]
        torch.testing.assert_close(token, torch.tensor(GOLDEN[dialect]), rtol=0, atol=6e-7)


def test_reference_golden_mae_rectangle():
    """Facts 1A: token (row 1, col 2) of a 2x3 grid, D=8, MAE: x first, row-major."""
    expected = [0.909297, 0.019999, -0.416147, 0.9998, 0.841471, 0.01, 0.540302, 0.99995]
    torch.testing.assert_close(
        table("mae", (2, 3), 8)[5], torch.tensor(expected), rtol=0, atol=6e-7
    )


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("mae", "mae"),
        ("vjepa_sincos", "vjepa"),
        ("big_vision_sincos", "big_vision"),
        ("timm_sincos", "timm"),
    ],
)
def test_reference_shipped(name, dialect):
    """The shipped YAMLs are the golden dialects."""
    module = vp.build(load_encoding(name), Dims(embed_dim=8, num_heads=1, depth=1))
    token = module(Grid(2, 3))[1]
    torch.testing.assert_close(token, torch.tensor(GOLDEN[dialect]), rtol=0, atol=6e-7)


@given(
    grids(max_side=12),
    st.sampled_from(DIALECTS),
    st.integers(2, 8),
    st.sampled_from([100.0, 10000.0]),
)
def test_reference_loops(hw, dialect, quarter, theta):
    """Every dialect equals its source's formula on any rectangle."""
    expected = torch.from_numpy(oracle.DIALECTS[dialect](*hw, 4 * quarter, theta))
    out = table(dialect, hw, 4 * quarter, theta).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("dialect", "within"), [("mae", 6e-8), ("vjepa", 6e-8), ("timm", 1e-5), ("big_vision", 1e-5)]
)
def test_reference_precision_of_the_source(dialect, within):
    """MAE and V-JEPA compute in float64 and round once; timm and big_vision compute in float32."""
    expected = torch.from_numpy(oracle.DIALECTS[dialect](48, 64, 64))
    assert (table(dialect, (48, 64), 64).double() - expected).abs().max() <= within


def test_invariant_mae_is_vjepa_with_halves_swapped():
    """Facts 1A: transformers swaps the halves of its builder for vit_mae, for this reason."""
    assert torch.equal(table("mae", (3, 5), 32), table("vjepa", (3, 5), 32).roll(16, dims=-1))


@given(grids(max_side=10), st.sampled_from(ROW_MAJOR))
def test_invariant_transpose(hw, dialect):
    """Turning the grid swaps the channels of the two axes."""
    upright = table(dialect, hw, 16).unflatten(0, hw)
    lying = table(dialect, (hw[1], hw[0]), 16).unflatten(0, (hw[1], hw[0])).transpose(0, 1)
    swapped = (
        upright.unflatten(-1, (2, 2, 4)).flip(-2).flatten(-3)
        if dialect == "timm"  # [sin y, sin x, cos y, cos x]
        else upright.roll(8, dims=-1)
    )
    assert torch.equal(lying, swapped)


@given(grids(max_side=8), st.sampled_from(ROW_MAJOR), st.integers(1, 5), st.integers(1, 5))
def test_invariant_wider_view(hw, dialect, more_rows, more_columns):
    """A larger grid runs the indices on: the smaller table is its top left corner."""
    small = table(dialect, hw, 16).unflatten(0, hw)
    wide = (hw[0] + more_rows, hw[1] + more_columns)
    corner = table(dialect, wide, 16).unflatten(0, wide)[: hw[0], : hw[1]]
    assert torch.equal(corner, small)


@given(grids(max_side=9), st.sampled_from(DIALECTS))
def test_invariant_norm(hw, dialect):
    """Sine and cosine of every band: all tokens have norm sqrt(D / 2)."""
    norms = table(dialect, hw, 16).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 8**0.5))


def test_invariant_last_frequency():
    """Facts 1A: big_vision's last frequency is exactly 1 / theta, the others stop one step short."""
    far = (1, 1001)
    assert table("big_vision", far, 64)[1000, 15].item() == pytest.approx(0.0998334, abs=1e-6)
    assert table("mae", far, 64)[1000, 15].item() > 0.15


@pytest.mark.parametrize(
    ("dialect", "dim", "least"),
    [("mae", 6, 4), ("timm", 2, 4), ("vjepa", 10, 4), ("big_vision", 4, 8), ("big_vision", 10, 8)],
)
def test_error_embed_dim(dialect, dim, least):
    """Facts 1A: big_vision at D=4 divides by zero; it is refused, not NaN."""
    match = rf"embed_dim is {dim}; sin-cos '{dialect}' needs a multiple of 4, at least {least}"
    with pytest.raises(PositionError, match=match):
        vp.build(SinCosSpec(dialect=dialect), Dims(embed_dim=dim, num_heads=1, depth=1))


def test_error_dialect():
    with pytest.raises(
        PositionError,
        match=r"dialect is 'moco'; it must be one of 'mae', 'timm', 'big_vision', 'vjepa', 'timm_rev",
    ):
        SinCosSpec(dialect="moco")


def test_error_theta():
    with pytest.raises(PositionError, match=r"theta is 0\.0"):
        vp.build(SinCosSpec(theta=0.0), Dims(embed_dim=8, num_heads=1, depth=1))


@pytest.mark.parametrize("theta", [-1.0, float("inf")])
def test_error_theta_of_big_vision(theta):
    with pytest.raises(PositionError, match=r"theta is"):
        vp.build(
            SinCosSpec(dialect="big_vision", theta=theta), Dims(embed_dim=8, num_heads=1, depth=1)
        )


def test_invariant_huge_theta_of_big_vision():
    """1e300 is a legal base: the last frequency is 1 / theta, and nothing overflows on the way."""
    spec = SinCosSpec(dialect="big_vision", theta=1e300)
    module = vp.build(spec, Dims(embed_dim=8, num_heads=1, depth=1))
    assert module(Grid(2, 3)).isfinite().all()


# Column-major dialects: facts 1A, timm reverse_coord and OmDet-Turbo.


@given(grids(max_side=9), st.sampled_from(COLUMN_MAJOR))
def test_invariant_column_major(hw, dialect):
    """Tokens run down the columns: token k is (y = k mod h, x = k div h), right on squares alone."""
    height, width = hw
    usual = table("vjepa" if dialect == "omdet_turbo" else "timm", hw, 16).unflatten(0, hw)
    if dialect == "omdet_turbo":
        usual = usual.roll(8, dims=-1)  # x first
    else:
        usual = usual.unflatten(-1, (2, 2, 4)).flip(-2).flatten(-3)  # [sin x, sin y, cos x, cos y]
    pinned = table(dialect, hw, 16)
    for k in range(height * width):
        torch.testing.assert_close(pinned[k], usual[k % height, k // height], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dialect", COLUMN_MAJOR)
def test_invariant_column_major_on_squares(dialect):
    """Facts 1A: no effect at all on a square grid, against the same dialect in its right form."""
    right = {"omdet_turbo": "vjepa", "timm_reversed": "timm"}[dialect]
    square = table(dialect, (5, 5), 16)
    torch.testing.assert_close(square, table(right, (5, 5), 16), rtol=0, atol=1e-6)
    assert (table(dialect, (3, 5), 16) - table(right, (3, 5), 16)).abs().max() > 0.5


# Three axes.


def clip(dialect: str, thw: tuple[int, int, int], dim: int, **how) -> torch.Tensor:
    spec = SinCosSpec(dialect=dialect, axes=3, **how)
    frames, height, width = thw
    return vp.build(spec, Dims(embed_dim=dim, num_heads=1, depth=1))(Grid(height, width, frames))


@given(volumes(max_side=5, max_frames=4), st.integers(1, 4))
def test_reference_vjepa_3d(thw, eighth):
    """V-JEPA 3-D: t has half of the channels, y and x a quarter each, tokens t, y, x."""
    expected = torch.from_numpy(oracle.vjepa_3d(*thw, 8 * eighth))
    torch.testing.assert_close(clip("vjepa", thw, 8 * eighth).double(), expected, rtol=0, atol=6e-8)


@given(volumes(max_side=5, max_frames=4), st.sampled_from([6, 10, 12, 16, 18, 40, 64]))
def test_reference_vjepa_uniform_power(thw, dim):
    """Each axis 2 ceil(D / 6) wide, cut to D: x loses channels unless D is a multiple of 6."""
    expected = torch.from_numpy(oracle.vjepa_3d(*thw, dim, uniform=True))
    out = clip("vjepa", thw, dim, uniform_power=True)
    assert out.shape == (thw[0] * thw[1] * thw[2], dim)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=6e-8)


@given(volumes(max_side=5, max_frames=4), st.integers(12, 40))
def test_reference_big_vision_3d(thw, dim):
    expected = torch.from_numpy(oracle.big_vision_3d(*thw, dim))
    torch.testing.assert_close(clip("big_vision", thw, dim).double(), expected, rtol=0, atol=3e-6)


def test_invariant_frames_of_a_clip():
    """Three axes: frames differ in their own channels alone. Two axes: frames share their code."""
    frames = clip("vjepa", (2, 3, 5), 16).unflatten(0, (2, 15))
    assert torch.equal(frames[0, :, 8:], frames[1, :, 8:])
    assert (frames[0, :, :8] - frames[1, :, :8]).abs().amax(-1).min() > 0.01
    flat = vp.build(SinCosSpec(), Dims(embed_dim=16, num_heads=1, depth=1))
    both = flat(Grid(3, 5, frames=2)).unflatten(0, (2, 15))
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("how", [{}, {"uniform_power": True}])
def test_compile_3d(how):
    spec = SinCosSpec(dialect="vjepa", axes=3, **how)
    module = vp.build(spec, Dims(embed_dim=48, num_heads=2, depth=1))
    assert graphs_of(lambda h, w: module(Grid(h, w, 3)), SIZES) == 1


@pytest.mark.parametrize(
    ("fields", "dim", "match"),
    [
        ({"dialect": "vjepa", "axes": 3}, 12, r"embed_dim is 12; .*multiple of 8, at least 8"),
        ({"dialect": "big_vision", "axes": 3}, 11, r"embed_dim is 11; .*at least 12"),
        (
            {"dialect": "vjepa", "axes": 3, "uniform_power": True},
            8,
            r"embed_dim is 8; .*leaves the last axis a channel",
        ),
        (
            {"dialect": "vjepa", "axes": 3, "uniform_power": True},
            4,
            r"embed_dim is 4; .*at least 6",
        ),
    ],
)
def test_error_embed_dim_3d(fields, dim, match):
    """uniform_power at D = 8 gives t and y all channels and x none: refused."""
    with pytest.raises(PositionError, match=match):
        vp.build(SinCosSpec(**fields), Dims(embed_dim=dim, num_heads=1, depth=1))


# What a larger grid means: facts/users.md A16.


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("recipe", [None, "mae", "timm"])
def test_invariant_policies_agree_on_the_trained_grid(dialect, recipe):
    """A16: regenerate and interpolate are identical at the trained grid, to the bit."""
    spec = SinCosSpec(dialect=dialect, extent="trained", trained_shape=(3, 5), recipe=recipe)
    module = vp.build(spec, Dims(embed_dim=16, num_heads=1, depth=1))
    assert torch.equal(module(Grid(3, 5)), table(dialect, (3, 5), 16))


def test_invariant_policies_part_elsewhere():
    """A16: at 6x10 from 3x5, regenerating runs on to row 5, stretching ends at row 2.25, interpolating blurs."""
    dims = Dims(embed_dim=16, num_heads=1, depth=1)
    run_on, stretched, blurred = (
        vp.build(SinCosSpec(dialect="vjepa", **how), dims)(Grid(6, 10)).unflatten(0, (6, 10))
        for how in (
            {},
            {"extent": "trained", "trained_shape": (3, 5)},
            {"extent": "trained", "trained_shape": (3, 5), "recipe": "mae"},
        )
    )
    place = torch.atan2(
        stretched[:, 0, 0], stretched[:, 0, 4]
    )  # the fastest pair of y turns one radian a cell
    expected = torch.tensor([-0.25, 0.25, 0.75, 1.25, 1.75, 2.25])
    torch.testing.assert_close(place, expected, rtol=0, atol=1e-6)
    assert torch.atan2(run_on[2, 0, 0], run_on[2, 0, 4]).item() == pytest.approx(2.0, abs=1e-6)
    assert (run_on - stretched).abs().max() > 0.5
    assert (stretched - blurred).norm() / stretched.norm() < 0.1
    assert (stretched - blurred).abs().max() > 1e-3


@given(grids(max_side=9), st.sampled_from(["mae", "vjepa"]))
def test_reference_stretched(hw, dialect):
    """Cell centres keep their place in the picture: (i + 1/2) old / new - 1/2."""
    spec = SinCosSpec(dialect=dialect, extent="trained", trained_shape=(4, 7))
    module = vp.build(spec, Dims(embed_dim=16, num_heads=1, depth=1))
    y, x = ((torch.arange(n) + 0.5) * old / n - 0.5 for n, old in zip(hw, (4, 7), strict=True))
    points = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
    torch.testing.assert_close(module(Grid(*hw)), module.at(points), rtol=0, atol=2e-6)


@given(grids(max_side=9))
def test_reference_interpolated(hw):
    """With a recipe the trained table itself is resampled, as checkpoints that store it are."""
    spec = SinCosSpec(extent="trained", trained_shape=(4, 7), recipe="mae")
    module = vp.build(spec, Dims(embed_dim=16, num_heads=1, depth=1))
    expected = vp.resample(
        table("mae", (4, 7), 16), source=Grid(4, 7), target=Grid(*hw), recipe="mae"
    )
    assert torch.equal(module(Grid(*hw)), expected)


def test_invariant_stretched_in_time():
    """Three axes stretch time as well: 4 frames seen at 8."""
    spec = SinCosSpec(dialect="vjepa", axes=3, extent="trained", trained_shape=(4, 3, 5))
    module = vp.build(spec, Dims(embed_dim=16, num_heads=1, depth=1))
    eight = module(Grid(3, 5, frames=8)).unflatten(0, (8, 15))
    points = vp.coordinates(Grid(3, 5, frames=8), vp.CoordSpec(axes=3)).unflatten(0, (8, 15))[5]
    points[:, 0] = 2.25
    torch.testing.assert_close(eight[5], module.at(points), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"recipe": "mae"}])
def test_compile_trained_extent(how):
    spec = SinCosSpec(extent="trained", trained_shape=(3, 5), **how)
    module = vp.build(spec, Dims(embed_dim=48, num_heads=2, depth=1))
    assert graphs_of(lambda h, w: module(Grid(h, w)), SIZES) == 1


@pytest.mark.parametrize("dialect", ROW_MAJOR)
def test_invariant_at_equals_forward(dialect):
    """at() on cell indices, in any order, is the row of the cell."""
    module = vp.build(SinCosSpec(dialect=dialect), Dims(embed_dim=16, num_heads=1, depth=1))
    cells = vp.coordinates(Grid(4, 4)).flip(0)
    torch.testing.assert_close(module.at(cells), module(Grid(4, 4)).flip(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"axes": 3}, r"axes is 3 in dialect 'mae'; 3 axes exist in 'vjepa' and 'big_vision'"),
        ({"axes": 1, "dialect": "vjepa"}, r"axes is 1; it must be one of 2, 3"),
        ({"uniform_power": True}, r"uniform_power is True in dialect 'mae' with 2 axes"),
        ({"extent": "wide"}, r"extent is 'wide'; it must be one of 'index', 'trained'"),
        ({"extent": "trained"}, r"trained_shape is None for 2 axes; .*Give the grid"),
        ({"extent": "trained", "trained_shape": (3,)}, r"trained_shape is \(3,\) for 2 axes"),
        ({"extent": "trained", "trained_shape": (3, 0)}, r"trained_shape is \(3, 0\)"),
        (
            {"trained_shape": (3, 5)},
            r"trained_shape \(3, 5\) and recipe None mean nothing to .*'index'",
        ),
        ({"recipe": "mae"}, r"recipe 'mae' mean nothing to extent 'index'"),
        (
            {"extent": "trained", "trained_shape": (3, 5), "recipe": "linear"},
            r"recipe is 'linear'; it must be",
        ),
    ],
)
def test_error_settings(fields, match):
    with pytest.raises(PositionError, match=match):
        SinCosSpec(**fields)


def test_error_points():
    module = vp.build(SinCosSpec(), Dims(embed_dim=8, num_heads=1, depth=1))
    with pytest.raises(PositionError, match=r"coords has 3 axes, shape \(4, 3\)"):
        module.at(torch.zeros(4, 3))
    with pytest.raises(PositionError, match=r"coords holds NaN or infinity"):
        module.at(torch.tensor([[0.0, float("nan")]]))


# Which dialect made a stored table: facts 5.23, facts/users.md B01.


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_invariant_dialect_of(dialect, prefix):
    """MAE stores its table behind a zero row for the class token; which axis its channels hold can be tried."""
    made = table(dialect, (3, 5), 16).unsqueeze(0)
    stored = torch.cat([torch.zeros(1, prefix, 16), made], dim=1)
    assert dialect_of(stored, Grid(3, 5), prefix=prefix) == dialect
    assert dialect_of(stored + 0.1, Grid(3, 5), prefix=prefix) is None


def test_error_dialect_of():
    with pytest.raises(PositionError, match=r"table has 16 rows after prefix 0 .* 15 cells"):
        dialect_of(torch.zeros(1, 16, 8), Grid(3, 5))
