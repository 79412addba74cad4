"""rotate_at and norm_rotate: the oracle is the paper's formula in float64, step by step."""

import pytest
import torch
from torch import Tensor

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Grid, PositionError, Rotation
from visionpos.geometry import rotate as plain

GRID = Grid(3, 5)


def halves(q: Tensor, turns: Tensor, pairing: str) -> Tensor:
    """Return q turned, written out in float64."""
    a, b = (
        q.double().chunk(2, -1)
        if pairing == "half"
        else (q[..., ::2].double(), q[..., 1::2].double())
    )
    c, s = turns.cos(), turns.sin()
    one, two = a * c - b * s, a * s + b * c
    return (
        torch.cat([one, two], -1) if pairing == "half" else torch.stack([one, two], -1).flatten(-2)
    )


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("kind", ["shared", "heads", "samples", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_reference_rotate_at(pairing: str, kind: str, dtype: torch.dtype, layout: str) -> None:
    coords = vp.coordinates(GRID)
    coords = torch.stack([coords, coords + 0.25]) if kind in ("samples", "both") else coords
    freqs = torch.randn(3, 2, 8) if kind in ("heads", "both") else torch.randn(2, 8)
    q, k = torch.randn(2, 2, 3, 16, 16).to(dtype).unbind()
    wide = coords.double().unsqueeze(-3) if freqs.ndim == 3 or coords.ndim == 3 else coords.double()
    turns = wide @ freqs.double()
    given = (q, k) if layout == "bhnd" else (q.transpose(1, 2), k.transpose(1, 2))
    got = vp.rotate_at(*given, coords, freqs, pairing=pairing, prefix=1, layout=layout)
    for found, y in zip(got, (q, k), strict=True):
        x = found if layout == "bhnd" else found.transpose(1, 2)
        assert x.dtype == dtype
        assert torch.equal(x[:, :, :1], y[:, :, :1])
        wanted = halves(y[:, :, 1:], turns, pairing)
        if dtype == torch.float64:  # angles of float32 coordinates and frequencies are float32's
            torch.testing.assert_close(x[:, :, 1:], wanted, rtol=0, atol=1e-5)
        else:
            assert_close_to(x[:, :, 1:], wanted)


def test_exact_at_a_million() -> None:
    """facts/kernels.md 2.4: float32 is off by up to 6e-2 rad at 10^6; exact keeps 1e-6."""
    n, pairs = 64, 32
    ids = torch.arange(1_000_000 - n, 1_000_000).unsqueeze(-1)
    freqs = 1e6 ** (-torch.arange(pairs, dtype=torch.float64) / pairs).unsqueeze(0)
    q = torch.zeros(1, 1, n, 2 * pairs)
    q[..., :pairs] = 1.0
    wanted = (ids.double() @ freqs).cos()
    exact, _ = vp.rotate_at(q, q, ids, freqs, accuracy="exact")
    assert (exact[0, 0, :, :pairs] - wanted).abs().max() < 1e-6
    near, _ = vp.rotate_at(q, q, ids, freqs.float())
    assert 1e-3 < (near[0, 0, :, :pairs] - wanted).abs().max() < 0.1


def test_gradient_rotate_at() -> None:
    coords = vp.coordinates(Grid(2, 2)).double()
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64).requires_grad_().unbind()
    freqs = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        return vp.rotate_at(q, k, coords, freqs, prefix=1, accuracy="exact")

    leaves = [part.detach().clone().requires_grad_() for part in (q, k, freqs)]
    assert torch.autograd.gradcheck(run, leaves)


def test_scale_is_the_attention_factor() -> None:
    q = torch.randn(1, 1, 15, 16)
    freqs = vp.axial_freqs(16)
    one, _ = vp.rotate_at(q, q, vp.coordinates(GRID), freqs, scale=1.25)
    other, _ = vp.rotate_at(q, q, vp.coordinates(GRID), freqs)
    torch.testing.assert_close(one, 1.25 * other)


@pytest.mark.parametrize("norm", ["rms", "layer", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["once", "twice", "none"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_reference_norm_rotate(norm: str, dtype: torch.dtype, rounding: str, layout: str) -> None:
    q, k = torch.randn(2, 6, 9, 32).to(dtype), torch.randn(2, 2, 9, 32).to(dtype)
    rotation = Rotation.of(3 * torch.randn(8, 12))
    weight, bias = torch.randn(2, 32).to(dtype).unbind()
    how = {"bias_q": bias} if norm == "layer" else {}
    given = (q, k) if layout == "bhnd" else (q.transpose(1, 2), k.transpose(1, 2))
    got = vp.norm_rotate(
        *given,
        rotation,
        norm=norm,
        weight_q=weight,
        rounding=rounding,
        prefix=1,
        layout=layout,
        eps=1e-5,
        **how,
    )
    for x, y, w, b in zip(got, (q, k), (weight, None), (how.get("bias_q"), None), strict=True):
        wide = y.double()
        if norm == "rms":
            wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        elif norm == "layer":
            off = wide - wide.mean(-1, keepdim=True)
            wide = off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        else:
            wide = wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-5)
        wide = wide if w is None else wide * w.double()
        wide = wide if b is None else wide + b.double()
        wanted, _ = plain(wide, wide, rotation, prefix=1)
        assert x.dtype == dtype
        assert_close_to(x if layout == "bhnd" else x.transpose(1, 2), wanted)


def test_reference_norm_is_torchs_and_twice_is_transformers() -> None:
    """ "once" gives the bits of torch's rms_norm in bfloat16, "twice" those of transformers' Qwen3RMSNorm."""
    q = torch.randn(2, 4, 9, 32).bfloat16()
    still = Rotation.of(torch.zeros(9, 16))
    weight = torch.randn(32).bfloat16()
    once, _ = vp.norm_rotate(q, q, still, weight_q=weight)
    expected = torch.nn.functional.rms_norm(q.float(), (32,), weight.float(), 1e-6).bfloat16()
    assert torch.equal(once, expected)
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3").Qwen3RMSNorm(32)
    qwen.weight.data = weight
    twice, _ = vp.norm_rotate(q, q, still, weight_q=weight, rounding="twice")
    assert torch.equal(twice, qwen(q))


@pytest.mark.parametrize("norm", ["rms", "layer", "l2"])
def test_gradient_norm_rotate(norm: str) -> None:
    q, k = (torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    rotation = Rotation.of(torch.randn(3, 3, dtype=torch.float64))

    def run(q: Tensor, k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return vp.norm_rotate(q, k, rotation, norm=norm, weight_q=weight)

    assert torch.autograd.gradcheck(run, (q, k, weight))


def test_compile_both() -> None:
    torch._dynamo.reset()
    coords, freqs = vp.coordinates(GRID), vp.axial_freqs(16)
    rotation = Rotation.of(vp.angles(coords, freqs))

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return *vp.rotate_at(q, k, coords, freqs), *vp.norm_rotate(q, k, rotation)

    q, k = torch.randn(2, 2, 3, 15, 16).unbind()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(q, k), run(q, k), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_error_names() -> None:
    q, rotation = torch.randn(1, 2, 15, 16), Rotation.of(torch.zeros(15, 8))
    with pytest.raises(PositionError, match=r"accuracy is 'best'"):
        vp.rotate_at(q, q, vp.coordinates(GRID), vp.axial_freqs(16), accuracy="best")
    with pytest.raises(PositionError, match=r"coords have 3 axes and freqs 2"):
        vp.rotate_at(q, q, torch.zeros(15, 3), vp.axial_freqs(16))
    with pytest.raises(PositionError, match=r"coords is NoneType"):
        vp.rotate_at(q, q, None, vp.axial_freqs(16))
    with pytest.raises(PositionError, match=r"norm is 'batch'"):
        vp.norm_rotate(q, q, rotation, norm="batch")
    with pytest.raises(PositionError, match=r"weight_k has shape \(8,\)"):
        vp.norm_rotate(q, q, rotation, weight_k=torch.ones(8))
    with pytest.raises(PositionError, match=r"x has 15 tokens, the rotation 14"):
        vp.norm_rotate(q, q, Rotation.of(torch.zeros(14, 8)))


def test_error_names_the_layout_that_fits() -> None:
    q, rotation = torch.randn(2, 15, 6, 16), Rotation.of(torch.zeros(14, 8))
    with pytest.raises(PositionError, match=r"x has 6 tokens.*layout='bnhd'"):
        vp.rotate(q, q, rotation, prefix=1)
    with pytest.raises(PositionError, match=r"x has 15 tokens.*prefix count"):
        vp.rotate(q.transpose(1, 2), q.transpose(1, 2), rotation)


def test_error_arguments_of_another_kind() -> None:
    q, rot = torch.randn(1, 2, 5, 8), Rotation.of(torch.randn(5, 4))
    coords, freqs, weight = torch.randn(5, 2), torch.randn(2, 4), torch.randn(8)
    refused = {
        "rotation is NoneType": lambda: vp.norm_rotate(q, q, None),
        "rotation is tuple": lambda: vp.turn(q, (rot.cos, rot.sin)),
        "q is ndarray": lambda: vp.norm_rotate(q.numpy(), q, rot),
        "k is list": lambda: vp.norm_rotate(q, [], rot),
        "weight_q is list": lambda: vp.norm_rotate(q, q, rot, weight_q=[1.0] * 8),
        "weight_k is torch.int64": lambda: vp.norm_rotate(q, q, rot, weight_k=weight.long()),
        "bias_q is torch.float32 on meta": lambda: vp.norm_rotate(
            q, q, rot, bias_q=weight.to("meta")
        ),
        "eps is -1.0": lambda: vp.norm_rotate(q, q, rot, eps=-1.0),
        "eps is nan": lambda: vp.norm_rotate(q, q, rot, eps=float("nan")),
        "eps is '1e-6'": lambda: vp.norm_rotate(q, q, rot, eps="1e-6"),
        r"freqs are torch.float32 of shape \(4,\)": lambda: vp.rotate_at(q, q, coords, freqs[0]),
        "freqs are torch.complex64": lambda: vp.rotate_at(q, q, coords, freqs.cfloat()),
        "coords are torch.complex64": lambda: vp.rotate_at(q, q, coords.cfloat(), freqs),
        "coords are torch.bool": lambda: vp.rotate_at(q, q, coords > 0, freqs),
        r"coords has shape \(2,\)": lambda: vp.rotate_at(q, q, coords[0], freqs),
    }
    for message, call in refused.items():
        with pytest.raises(PositionError, match=message):
            call()
