"""Fixed sin-cos: four dialects of one formula, which differ in order and in one exponent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.reference import sincos as oracle
from tests.strategies import grids
from visionpos import Dims, Grid, PositionError, SinCosSpec
from visionpos.config import load_encoding

DIALECTS = sorted(oracle.DIALECTS)


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


@given(grids(max_side=10), st.sampled_from(DIALECTS))
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


@given(grids(max_side=8), st.sampled_from(DIALECTS), st.integers(1, 5), st.integers(1, 5))
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
        PositionError, match=r"dialect is 'moco'; it must be one of mae, timm, big_vision, vjepa"
    ):
        SinCosSpec(dialect="moco")


def test_error_theta():
    with pytest.raises(PositionError, match=r"theta is 0\.0"):
        vp.build(SinCosSpec(theta=0.0), Dims(embed_dim=8, num_heads=1, depth=1))


@pytest.mark.xfail(strict=True, reason="bug: theta is raised to a power before it is checked")
@pytest.mark.parametrize("theta", [-1.0, 1e300])
def test_error_theta_of_big_vision(theta):
    with pytest.raises(PositionError, match=r"theta is"):
        vp.build(
            SinCosSpec(dialect="big_vision", theta=theta), Dims(embed_dim=8, num_heads=1, depth=1)
        )
