"""KERPLE on a grid: two positive numbers a head that cannot leave their range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Kerple, KerpleSpec, build

DIMS = Dims(embed_dim=12, num_heads=3, depth=1)
numbers = st.floats(-1.0, 5.0)


def kerple(**fields) -> Kerple:
    return Kerple(KerpleSpec(**fields), DIMS, generator=torch.Generator().manual_seed(0))


def test_shape_of_shipped():
    spec = load_encoding("kerple_log_2d")
    assert (spec.form, spec.metric) == ("log", "l2")
    assert [tuple(w.shape) for w in build(spec, DIMS).parameters()] == [(3,), (3,)]


@pytest.mark.parametrize("form", ["log", "power"])
def test_reference_start_values(form):
    """Facts 1.2: p from U(0, 2), a from U(0, 1), at least .01."""
    module = Kerple(KerpleSpec(form=form), Dims(embed_dim=4096, num_heads=4096, depth=1))
    p, a = module.p(), module.a()
    assert p.min() >= 0.01
    assert p.max() <= 2.0
    assert p.mean().item() == pytest.approx(1.0, abs=0.05)
    assert a.min() >= 0.01
    assert a.max() <= 1.0
    assert a.mean().item() == pytest.approx(0.5, abs=0.03)


@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3))
@pytest.mark.parametrize("form", ["log", "power"])
def test_reference_clamps(form, p, a):
    """Facts 8: both forms clamp from below at .01; only the power form clamps p at 2 from above."""
    module = kerple(form=form)
    module.set(p=torch.tensor(p), a=torch.tensor(a))
    top = 2.0 if form == "power" else float("inf")
    expected = torch.tensor(p).clamp(0.01, top), torch.tensor(a).clamp(min=0.01)
    torch.testing.assert_close(module.p().detach(), expected[0], rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(module.a().detach(), expected[1], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["log", "power"])
def test_invariant_a_large_step_stays_in_range(form):
    """The source clamps behind the optimizer's back; here no step can leave the range, or stop the gradient."""
    module = kerple(form=form)
    optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
    for _ in range(5):
        optimizer.zero_grad()
        (-module(Grid(5, 7))).mean().backward()
        assert all(w.grad.isfinite().all() for w in module.parameters())
        optimizer.step()
    assert (module.p() >= 0.01).all()
    assert (module.a() >= 0.01).all()
    assert (module.p() <= (2.0 if form == "power" else 1e9)).all()


def test_invariant_source_keys():
    """bias_p and bias_a, [num_heads, 1, 1]."""
    p, a = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([0.1, 0.2, 3.0])
    state = {"rpe.bias_p": p.view(3, 1, 1), "rpe.bias_a": a.view(3, 1, 1)}
    module = Kerple.from_source(state, KerpleSpec(), DIMS)
    far = module.values(torch.tensor([[3.0, 4.0]]))[:, 0]
    torch.testing.assert_close(far, -p * (1 + a * 5).log(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"form": "exp"}, r"form is 'exp'; it must be one of 'log', 'power'"),
        ({"metric": "l0"}, r"metric is 'l0'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        KerpleSpec(**fields)


def test_error_source():
    with pytest.raises(PositionError, match=r"no entry bias_a"):
        Kerple.from_source({"bias_p": torch.ones(3, 1, 1)}, KerpleSpec(), DIMS)
    state = {"bias_p": torch.ones(8, 1, 1), "bias_a": torch.ones(8, 1, 1)}
    with pytest.raises(PositionError, match=r"bias_p of 8 heads and the model has 3"):
        Kerple.from_source(state, KerpleSpec(), DIMS)


@pytest.mark.parametrize("form", ["log", "power"])
def test_gradient_at_zero_distance(form):
    """0 ** p has a gradient too: zero, not NaN."""
    module = kerple(form=form)
    module.values(torch.zeros(1, 2)).sum().backward()
    assert all((w.grad == 0).all() for w in module.parameters())


@pytest.mark.parametrize(
    ("form", "p", "expected"),
    [("log", 1.0, [-0.405465, -1.098612, -2.197225]), ("power", 0.5, [-0.5, -1.0, -2.0])],
)
def test_golden_line(form, p, expected):
    """Facts 1.2: a = .5 at distances 1, 4 and 16, either side, on a line and on a row of a grid."""
    module = kerple(form=form).double()
    module.set(p=torch.full((3,), p), a=torch.full((3,), 0.5))
    steps = torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64).unsqueeze(-1)
    for side in (steps, -steps):
        out = module.values(side)[1]
        torch.testing.assert_close(
            out, torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=0
        )
    line = module.along(17)[1]
    assert line[16, [15, 12, 0]].tolist() == pytest.approx(expected, rel=2e-6)
    assert torch.equal(module(Grid(1, 17)).float(), module.along(17).float())
    assert torch.equal(module.along(3, 17), module.along(17)[:, 14:])


def test_invariant_shipped_numbers_stay_in_range_while_they_learn():
    """A step of any size leaves p and a above 0.01: softplus, no clamp behind the optimizer's back."""
    module = kerple(form="power")
    for weight in module.parameters():
        weight.data.fill_(-1e4)
    assert module.p().min() >= 0.01
    assert module.a().min() >= 0.01
    module.along(5).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())


def test_error_numbers_of_other_heads():
    module = build(KerpleSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
    for p, what in ((torch.ones(3), r"p has shape \(3,\); \(2,\)"), (1.0, "p is float")):
        with pytest.raises(PositionError, match=what):
            module.set(p=p, a=torch.ones(2))
