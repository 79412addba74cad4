"""Gradients of learned turns, in the passes that eager mode takes: against float64 by hand, pair after pair."""

import pytest
import torch
from torch import Tensor

import visionpos as vp
from visionpos.geometry import rotate as plain
from visionpos.geometry.separable import joined
from visionpos.kernels import rotate as kernel

PAIRINGS = ("adjacent", "half")


@pytest.fixture(params=[7, None], ids=["blocks", "whole"])
def blocks(request, monkeypatch) -> None:
    """Blocks of so few numbers that there are many, the last of them shorter; and one block."""
    if request.param:
        monkeypatch.setattr(kernel, "_PRODUCT", request.param)


def split(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    parts = x.chunk(2, -1) if pairing == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    return parts[0], parts[1]


def by_hand(pairs: list[tuple[Tensor, Tensor]], shape: torch.Size, pairing: str) -> list[Tensor]:
    """Return the gradients of cosines and sines in float64: sums of a g + b h and of a h - b g."""
    along, around = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for x, y in pairs:
        (a, b), (g, h) = split(x.detach().double(), pairing), split(y.double(), pairing)
        along += (a * g + b * h).sum_to_size(shape)
        around += (a * h - b * g).sum_to_size(shape)
    return [along, around]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("apart", [False, True], ids=["parts of one", "apart"])
@pytest.mark.parametrize(
    ("b", "heads", "lead"),
    [(1, (3, 3), (3,)), (2, (3, 3), (3,)), (1, (4, 1), ()), (2, (2, 1), ()), (2, (2, 2), (2, 1))],
    ids=str,
)
@pytest.mark.usefixtures("blocks")
def test_gradient_of_tables(b, heads, lead, apart, pairing):
    """Tables a head, a sample and shared; more samples, fewer keys; parts of a complex tensor, and two of their own."""
    n, pairs, prefix = 5, 6, 1
    angles = torch.randn(*lead, n, pairs)
    whole = torch.polar(torch.ones_like(angles), angles)
    cos, sin = (x.clone() if apart else x for x in (whole.real, whole.imag))
    cos.requires_grad_(), sin.requires_grad_()
    q, k = (torch.randn(b, count, prefix + n, 2 * pairs + 2).requires_grad_() for count in heads)
    out = vp.rotate(q, k, vp.Rotation(cos, sin, pairing), prefix=prefix)
    grads = [torch.randn_like(x) for x in out]
    kept = [x.clone() for x in (q, k, *grads, cos, sin)]
    found = torch.autograd.grad(out, (cos, sin, q, k), grads)
    places = [
        tuple(x[:, :, prefix:, : 2 * pairs] for x in one) for one in zip((q, k), grads, strict=True)
    ]
    for ours, wanted in zip(found, by_hand(places, cos.shape, pairing), strict=False):
        assert (ours - wanted).norm() < 1e-6 * wanted.norm()
    u = torch.polar(torch.ones_like(angles.double()), -angles.double())
    for ours, grad in zip(found[2:], grads, strict=True):
        assert torch.equal(ours[:, :, :prefix], grad[:, :, :prefix])
        assert torch.equal(ours[..., 2 * pairs :], grad[..., 2 * pairs :])
        first, second = split(grad[:, :, prefix:, : 2 * pairs].double(), pairing)
        back = torch.complex(first, second) * u
        for part, wanted in zip(
            split(ours[:, :, prefix:, : 2 * pairs], pairing), (back.real, back.imag), strict=True
        ):
            assert (part - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert all(torch.equal(x, y) for x, y in zip((q, k, *grads, cos, sin), kept, strict=True))


@pytest.mark.parametrize(
    ("hw", "frames", "prefix", "b"),
    [((3, 5), 1, 0, 1), ((5, 3), 1, 2, 1), ((1, 7), 3, 1, 2), ((7, 1), 2, 0, 1), ((1, 1), 1, 1, 1)],
    ids=str,
)
@pytest.mark.usefixtures("blocks")
def test_gradient_of_mixed_frequencies(hw, frames, prefix, b):
    """By differentiation of the plain form in float64: angles, their cosines and sines, products."""
    grid = vp.Grid(*hw, frames=frames)
    module = vp.build(vp.MixedRopeSpec(), vp.Dims(embed_dim=24, num_heads=2, depth=2))
    q, k = torch.randn(2, b, 2, prefix + grid.size, 12).requires_grad_().unbind()
    grads = torch.randn_like(q), torch.randn_like(k)
    out = vp.rotate(q, k, module(grid, layer=1), prefix=prefix)
    inputs = (q, k, module.frequencies)
    found = torch.autograd.grad(out, inputs, grads, retain_graph=True)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    angles = torch.einsum("na,hap->hnp", module.points(grid).double(), wide[2][1])
    plain = vp.Rotation(angles.cos(), angles.sin(), "adjacent")
    turned = [torch.cat([x[:, :, :prefix], plain.apply(x[:, :, prefix:])], dim=2) for x in wide[:2]]
    wanted = torch.autograd.grad(turned, wide, [grad.double() for grad in grads])
    for ours, target in zip(found, wanted, strict=True):
        assert (ours - target).norm() <= 2e-6 * target.norm()
    # The form that can be differentiated again has the same numbers.
    again = torch.autograd.grad(out, inputs, grads, create_graph=True)
    for ours, target in zip(again, wanted, strict=True):
        assert ours.requires_grad
        assert (ours - target).norm() <= 2e-6 * target.norm()


@pytest.mark.usefixtures("blocks")
def test_gradient_gradcheck_twice():
    module = vp.build(vp.MixedRopeSpec(), vp.Dims(embed_dim=8, num_heads=1, depth=1)).double()
    q, k = torch.randn(2, 1, 1, 7, 8, dtype=torch.float64).requires_grad_().unbind()

    def turned(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, ...]:
        parts = {"frequencies": freqs}
        rotation = torch.func.functional_call(module, parts, (vp.Grid(2, 3),))
        return vp.rotate(q, k, rotation, prefix=1)

    given = q, k, module.frequencies.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(turned, given)
    assert torch.autograd.gradgradcheck(turned, given)


def test_joined_reads_no_foreign_memory():
    """Parts of one tensor are read in place; what only looks like parts is copied."""
    whole = torch.randn(3, 5, 2)
    turns = torch.view_as_complex(whole)
    assert joined(turns.real, turns.imag).data_ptr() == turns.data_ptr()
    assert torch.equal(joined(turns.real, turns.imag), turns)
    row = torch.randn(31)
    for cos, sin in (
        (turns.imag, turns.real),
        (turns.real, turns.real),
        (row[1:21:2], row[2:22:2]),  # begins at an odd place, where no complex number can
        (row[:10], row[1:11]),
        (row[0:30:3], row[1:31:3]),
    ):
        target = cos + 1j * sin
        assert torch.equal(joined(cos, sin), target)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("form", ["q and k", "packed", "packed for every head"])
def test_gradient_of_gradient_in_place(form, pairing):
    """A penalty on gradients sees the turn in place: what autograd.grad is not let through, it leaves out silently."""
    torch.manual_seed(0)
    lead = (3,) if form == "packed for every head" else ()
    rotation = vp.Rotation.of(torch.randn(*lead, 4, 3, dtype=torch.float64), pairing)
    leaf = torch.randn(2, 5, 3, 3, 8, dtype=torch.float64)
    weight = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64)

    def run(*, in_place: bool) -> list[Tensor]:
        x, w = (part.clone().requires_grad_() for part in (leaf, weight))
        whole = x * 1.0
        q, k, v = (whole[:, :, at].transpose(1, 2) for at in range(3))
        if not in_place:
            q, k = plain(q, k, rotation, prefix=1)
        elif form == "q and k":
            q, k = vp.rotate_(q * 1.0, k * 1.0, rotation, prefix=1)
        else:
            whole = vp.rotate_packed_(whole, rotation, prefix=1)
            q, k, v = (whole[:, :, at].transpose(1, 2) for at in range(3))
        energy = sum((part**3 * one).sum() for part, one in zip((q, k, v), w, strict=True))
        (grad,) = torch.autograd.grad(energy, x, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), (x, w)))

    for one, other in zip(run(in_place=True), run(in_place=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_conjugates_turn_back(pairing):
    """The sines of `turns.conj()` are a view that negates memory; read as they lie, they turn the wrong way."""
    turns = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    back = vp.Rotation(turns.conj().real, turns.conj().imag, pairing)
    assert back.sin.is_neg()
    x, norms = torch.randn(2, 3, 5, 8), {"norm": "l2", "eps": 0.0}
    there = vp.Rotation(turns.real, turns.imag, pairing)
    torch.testing.assert_close(vp.turn(vp.turn(x, there), back), x)
    torch.testing.assert_close(vp.rotate_(*vp.rotate(x, 2 * x, there), back)[1], 2 * x)
    unit = x / x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(vp.norm_rotate(vp.turn(x, there), x, back, **norms)[0], unit)
    negated = torch._neg_view(x)
    torch.testing.assert_close(vp.turn(vp.turn(negated, there), back), -x)
