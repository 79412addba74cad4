"""Defects found in public kernels (facts/kernels.md 1), each as a test that ours pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import visionpos as vp
from visionpos.geometry import Rotation
from visionpos.geometry import rotate as plain

FREQS = torch.tensor([[1.0, 0.3, 0.1, 0.03], [0.7, 0.2, 0.05, 0.01]])
COORDS = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0))
TURNS = vp.angles(COORDS, FREQS)
Form = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forms(pairing: str) -> dict[str, Form]:
    """Every function that turns q and k into new memory."""
    rotation = Rotation.of(TURNS, pairing)
    return {
        "rotate": lambda q, k: vp.rotate(q, k, rotation),
        "rotate_at": lambda q, k: vp.rotate_at(q, k, COORDS, FREQS, pairing=pairing),
        "turn": lambda q, k: (vp.turn(q, rotation), vp.turn(k, rotation)),
        "norm_rotate rms": lambda q, k: vp.norm_rotate(q, k, rotation),
        "norm_rotate layer": lambda q, k: vp.norm_rotate(q, k, rotation, norm="layer"),
        "norm_rotate l2": lambda q, k: vp.norm_rotate(q, k, rotation, norm="l2"),
        "bnhd": lambda q, k: tuple(
            one.transpose(1, 2)
            for one in vp.rotate(q.transpose(1, 2), k.transpose(1, 2), rotation, layout="bnhd")
        ),
    }


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("name", forms("half"))
def test_difference_what_was_saved_before_is_still_there(name: str, pairing: str) -> None:
    """Liger 0.8.5 turns the storage of a q that lies as [b, n, heads, d]: q * q saved before gets a wrong gradient.

    The gradient of sum(q * q) + sum(turned * w) is 2 q and what the turn alone gives.
    """
    leaf, other = torch.randn(2, 2, 15, 3, 8).unbind()
    leaf.requires_grad_()
    weight = torch.randn(2, 3, 15, 8)
    whole, held = leaf * 1.0, other.clone()
    q, k = whole.transpose(1, 2), other.transpose(1, 2)
    before, version = whole.detach().clone(), whole._version
    energy = (q * q).sum()
    turned, _ = forms(pairing)[name](q, k)
    assert whole._version == version
    assert torch.equal(whole.detach(), before)
    assert torch.equal(other, held)
    (alone,) = torch.autograd.grad((turned * weight).sum(), leaf, retain_graph=True)
    (both,) = torch.autograd.grad(energy + (turned * weight).sum(), leaf)
    torch.testing.assert_close(both, 2 * before + alone)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("name", forms("half"))
def test_difference_branches_may_share_a_gradient(name: str, pairing: str) -> None:
    """Liger's backward turns the gradient where it lies, also where another branch holds the same tensor.

    The turned tensor and y get one gradient tensor from their sum, so y's must come out as it went in.
    """
    leaf = torch.randn(2, 3, 15, 8, requires_grad=True)
    y = torch.randn(2, 3, 15, 8, requires_grad=True)
    weight = torch.randn(2, 3, 15, 8)
    turned, _ = forms(pairing)[name](leaf * 1.0, leaf.detach())
    (turned + y * 1.0).backward(weight)
    assert torch.equal(y.grad, weight)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("form", ["rotate_", "packed", "rms"])
def test_difference_compiled_writes_have_gradients(form: str, pairing: str) -> None:
    """A custom op that writes to its input and has no formula loses the turn from gradients, compiled too."""
    torch._dynamo.reset()
    leaf, weight = torch.randn(2, 15, 3, 3, 8), torch.randn(3, 2, 3, 15, 8)
    rotation = Rotation.of(TURNS, pairing)
    scale = torch.rand(8) + 0.5

    def turned(qkv: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (qkv[:, :, at].transpose(1, 2) for at in range(3))
        if form == "rms":
            return *vp.norm_rotate(q, k, rotation, weight_q=scale), v
        if form == "rotate_":
            return *vp.rotate_(q * 1.0, k * 1.0, rotation), v
        out = vp.rotate_packed_(qkv * 1.0, rotation)
        return tuple(out[:, :, at].transpose(1, 2) for at in range(3))

    def textbook(qkv: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (qkv[:, :, at].transpose(1, 2) for at in range(3))
        if form == "rms":
            rms = torch.nn.functional.rms_norm
            q, k = rms(q, (8,), scale, 1e-6), rms(k, (8,), None, 1e-6)
        return *plain(q, k, rotation), v

    def gradients(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_(), scale.clone().requires_grad_()]
        out = function(*leaves)
        total = sum((one * part).sum() for one, part in zip(out, weight, strict=True))
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return [one for one in found if one is not None]

    compiled = torch.compile(turned, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled), gradients(textbook), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["timm", "dinov2", "torchvision", "big_vision"])
@pytest.mark.parametrize("rows", [6, 9])
def test_difference_a_table_of_one_column(recipe: str, rows: int) -> None:
    """torch 2.14 gives zeros for an antialiased resize of H x 1 to H x 1 on the CPU; the same table lying is right."""
    ramp = torch.arange(6.0).repeat(4, 1).T[None]  # [1, 6, 4]
    standing, lying = (
        vp.resample(ramp, source=vp.Grid(*source), target=vp.Grid(*target), recipe=recipe)
        for source, target in (((6, 1), (rows, 1)), ((1, 6), (1, rows)))
    )
    assert standing.shape == (1, rows, 4)
    torch.testing.assert_close(standing, lying)
    if rows == 6:
        torch.testing.assert_close(standing, ramp)
    else:
        assert (standing.diff(dim=1) > 0).all(), "a ramp stays one"


def test_difference_every_sample_has_its_own_positions() -> None:
    """Liger ignores position_ids: rows of a batch that start elsewhere turn as the first does."""
    q = torch.randn(1, 3, 15, 8).expand(2, 3, 15, 8)
    shifted = torch.stack([COORDS, COORDS + 7])
    out, _ = vp.rotate_at(q, q, shifted, FREQS)
    for row in range(2):
        alone, _ = plain(q[:1], q[:1], Rotation.of(vp.angles(shifted[row], FREQS)))
        torch.testing.assert_close(out[row], alone[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out[0], out[1], atol=1e-2)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_difference_tables_are_not_rounded_to_the_tensors(pairing: str) -> None:
    """apex, vLLM and transformers hold cosines in the dtype of q: twice the error of one rounding in bfloat16.

    Against float64 the error stays that of rounding the result: half a unit in the last place, and one in a thousand
    beyond for float32 arithmetic.
    """
    q = torch.randn(2, 4, 15, 8).bfloat16()
    out, _ = vp.rotate(q, q, Rotation.of(TURNS, pairing))
    exact, _ = plain(q.double(), q.double(), Rotation.of(TURNS.double(), pairing))
    step = torch.exp2(
        exact.abs().clamp_min(2**-20).log2().floor() - 8
    )  # half a unit in the last place
    assert ((out.double() - exact).abs() <= 1.001 * step + 1e-6).all()
    rough = Rotation.of(TURNS, pairing)
    rough = Rotation(rough.cos.bfloat16(), rough.sin.bfloat16(), pairing)
    peer, _ = plain(q.float(), q.float(), rough)
    assert not ((peer.bfloat16().double() - exact).abs() <= 1.001 * step + 1e-6).all()
