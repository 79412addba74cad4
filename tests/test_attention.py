"""turn: the fast forms round once, as the plain form or better, over every layout, and leave their inputs alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tolerances import assert_close_to
from visionpos.attention import turn
from visionpos.errors import PositionError
from visionpos.geometry import Rotation
from visionpos.kernels.rotate import How, is_pairwise, turn_into

PAIRINGS = ("half", "adjacent")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def packed(b: int, heads: int, n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return q as timm makes it: a strided view into one projection of q, k and v."""
    qkv = torch.randn(b, n, 3 * heads * d).to(dtype)
    return qkv.reshape(b, n, 3, heads, d).permute(2, 0, 3, 1, 4).unbind(0)[1]


def layouts(b: int, heads: int, n: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the same kind of tensor in every memory layout that reaches a port."""
    plain = torch.randn(b, heads, n, d).to(dtype)
    return {
        "contiguous": plain,
        "packed": packed(b, heads, n, d, dtype),
        "bnhd": torch.randn(b, n, heads, d).to(dtype).transpose(1, 2),
        "odd offset": torch.randn(b * heads * n * d + 1).to(dtype)[1:].view(b, heads, n, d),
        "odd row stride": torch.randn(b, heads, n, d + 1).to(dtype)[..., :d],
        "even row stride": torch.randn(b, heads, n, d + 2).to(dtype)[..., 2:],
        "strided channels": torch.randn(b, heads, n, 2 * d).to(dtype)[..., ::2],
        "channels not last": torch.randn(b, heads, d, n).to(dtype).transpose(2, 3),
        "expanded": torch.randn(1, heads, n, d).to(dtype).expand(b, heads, n, d),
    }


def rotation(shape: tuple[int, ...], pairing: str, dtype: torch.dtype = torch.float32) -> Rotation:
    return Rotation.of(3 * torch.randn(shape).to(dtype), pairing)


def assert_rounded(out: Tensor, x: Tensor, rot: Rotation) -> None:
    """Fail unless every channel is that of the float64 formula, but for the rounding of the arithmetic and the store.

    Two products and a sum in the dtype of the arithmetic are off by 1.5 units of roundoff of |a c| + |b s| each; a
    fused multiply-add by less.
    """
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, rot.cos.dtype))
    a, b = pairs_of(x[..., : 2 * rot.pairs].double(), rot.pairing)
    # What enters the arithmetic is exact; the tables may be rounded to its dtype first.
    c, s = rot.cos.to(wide).double(), rot.sin.to(wide).double()
    exact = joined(a * c - b * s, b * c + a * s, rot.pairing)
    size = joined((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs(), rot.pairing)
    slack = 2 * torch.finfo(wide).eps * size
    if x.dtype != wide:
        slack = (
            slack
            + (exact.abs() + slack) * torch.finfo(x.dtype).eps / 2
            + torch.finfo(x.dtype).smallest_normal
        )
    off = (out[..., : 2 * rot.pairs].double() - exact).abs()
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert bool((off <= slack).all()), f"off by up to {float((off / slack).max()):.2f} of the bound"
    assert torch.equal(out[..., 2 * rot.pairs :], x[..., 2 * rot.pairs :])


def pairs_of(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    if pairing == "half":
        return x.chunk(2, -1)  # type: ignore[return-value]
    return x[..., 0::2], x[..., 1::2]


def joined(a: Tensor, b: Tensor, pairing: str) -> Tensor:
    return torch.cat([a, b], -1) if pairing == "half" else torch.stack([a, b], -1).flatten(-2)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [32, 16, 12, 2], ids=lambda count: f"turned{count}")
def test_reference_rounding_over_layouts(pairing: str, dtype: torch.dtype, turned: int) -> None:
    for name, x in layouts(2, 3, 7, 32, dtype).items():
        rot = rotation((7, turned // 2), pairing)
        before = x.clone()
        out = turn(x, rot)
        assert_rounded(out, x, rot)
        assert torch.equal(x, before), f"{name}: the input was written to"
        assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_rounding_over_table_dtypes(
    pairing: str, table: torch.dtype, dtype: torch.dtype
) -> None:
    x, rot = packed(2, 3, 7, 16, dtype), rotation((7, 8), pairing, torch.float64)
    rot = Rotation(rot.cos.to(table), rot.sin.to(table), pairing)
    assert_rounded(turn(x, rot), x, rot)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shape", [(3, 7, 8), (2, 1, 7, 8), (2, 3, 7, 8), (1, 1, 7, 8)], ids=str)
def test_reference_tables_a_head_and_a_sample(pairing: str, shape: tuple[int, ...]) -> None:
    for x in layouts(2, 3, 7, 16, torch.float32).values():
        rot = rotation(shape, pairing)
        assert_rounded(turn(x, rot), x, rot)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.integers(1, 20), st.booleans())
def test_reference_rounding_over_sizes(b: int, heads: int, n: int, pairs: int, half: bool) -> None:
    """Vector loops have tails: every remainder must be right."""
    x, rot = packed(b, heads, n, 2 * pairs), rotation((n, pairs), "half" if half else "adjacent")
    assert_rounded(turn(x, rot), x, rot)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.integers(1, 3))
def test_reference_bits_of_apply_for_adjacent_pairs_in_whole_vectors(
    b: int, heads: int, n: int, eights: int
) -> None:
    x, rot = packed(b, heads, n, 16 * eights), rotation((n, 8 * eights), "adjacent")
    assert_close_to(turn(x, rot), rot.apply(x), kind="exact")


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_reference_by_hand(pairing: str) -> None:
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 9.0]]]], dtype=torch.float64)
    quarter = Rotation.of(torch.tensor([[torch.pi / 2, torch.pi]], dtype=torch.float64), pairing)
    expected = {"half": [-3.0, -2.0, 1.0, -4.0, 9.0], "adjacent": [-2.0, 1.0, -3.0, -4.0, 9.0]}
    assert_close_to(
        turn(x, quarter).flatten(), torch.tensor(expected[pairing], dtype=torch.float64)
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_shape_empty(pairing: str) -> None:
    for shape in ((0, 3, 7, 8), (2, 0, 7, 8), (2, 3, 0, 8)):
        rot = rotation((shape[2], 4), pairing)
        assert turn(torch.randn(shape), rot).shape == shape


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_invariant_zero_angle_is_the_identity(pairing: str) -> None:
    for dtype in DTYPES:
        x = packed(2, 3, 7, 16, dtype)
        assert torch.equal(turn(x, Rotation.of(torch.zeros(7, 8), pairing)), x)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_invariant_special_values_stay_where_they_are(pairing: str) -> None:
    """An infinite or missing channel spoils its own pair and no other."""
    for bad in (float("inf"), float("nan")):
        x, rot = torch.randn(1, 1, 3, 16), rotation((3, 8), pairing)
        x[0, 0, 1, 2] = bad
        assert torch.equal(turn(x, rot).isfinite(), rot.apply(x).isfinite())
        assert int(turn(x, rot).isfinite().logical_not().sum()) == 2


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("learns", list(itertools.product([False, True], repeat=2))[1:], ids=str)
@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8)], ids=str)
def test_gradient_equals_that_of_apply(
    pairing: str, learns: tuple[bool, bool], shape: tuple[int, ...]
) -> None:
    """Training runs through the fast forms too: q or the angles, or both, may learn."""

    def run(form: str) -> list[Tensor]:
        torch.manual_seed(3)
        qkv = torch.randn(2, 7, 3 * 3 * 16, requires_grad=learns[0])
        angle = torch.randn(shape, requires_grad=learns[1])
        x = qkv.reshape(2, 7, 3, 3, 16).permute(2, 0, 3, 1, 4).unbind(0)[1]
        rot = Rotation.of(angle, pairing)
        out = turn(x, rot) if form == "turn" else rot.apply(x)
        (out * torch.randn(out.shape)).sum().backward()
        return [leaf.grad for leaf in (qkv, angle) if leaf.grad is not None]

    fast, plain = run("turn"), run("apply")
    assert len(fast) == sum(learns)
    for one, other in zip(fast, plain, strict=True):
        assert_close_to(one, other)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_gradcheck(pairing: str) -> None:
    x = torch.randn(1, 2, 3, 18, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, angle: Tensor) -> Tensor:
        return turn(x, Rotation.of(angle, pairing))

    assert torch.autograd.gradcheck(function, (x, angle))
    assert torch.autograd.gradgradcheck(function, (x, angle))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_of_a_frozen_input_under_no_grad_and_inference(pairing: str) -> None:
    x, rot = packed(2, 3, 7, 16), rotation((7, 8), pairing)
    expected = turn(x, rot)
    assert_rounded(expected, x, rot)
    with torch.no_grad():
        assert torch.equal(turn(x.clone().requires_grad_(), rot), expected)
    with torch.inference_mode():
        assert torch.equal(turn(x, rot), expected)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_invariant_autocast_does_not_touch_the_angles(pairing: str) -> None:
    x, rot = packed(2, 3, 7, 16), rotation((7, 8), pairing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = turn(x, rot)
    assert_rounded(out, x, rot)


def test_error_tokens_and_channels() -> None:
    with pytest.raises(PositionError, match=r"x has 6 tokens, the rotation 7"):
        turn(torch.randn(1, 1, 6, 16), rotation((7, 8), "half"))
    with pytest.raises(PositionError, match=r"x has 14 channels a head and the rotation turns 16"):
        turn(torch.randn(1, 1, 7, 14), rotation((7, 8), "adjacent"))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_compile_fullgraph_equals_eager(pairing: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(turn, backend="aot_eager", fullgraph=True)
    x, rot = packed(2, 3, 7, 16), rotation((7, 8), pairing)
    assert_rounded(compiled(x, rot), x, rot)
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace` is deprecated:FutureWarning", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:FutureWarning")
def test_compile_jit_trace_takes_the_plain_form() -> None:
    rot = rotation((7, 8), "adjacent")
    traced = torch.jit.trace(lambda x: turn(x, rot), packed(2, 3, 7, 16))
    x = packed(2, 3, 7, 16)
    assert torch.equal(traced(x), turn(x, rot))
    assert "view_as_complex" not in str(traced.graph)


def test_is_pairwise_reads_no_foreign_memory() -> None:
    """Pairs may be read as complex numbers only where every pair starts at an even place."""
    answers = {name: is_pairwise(x) for name, x in layouts(2, 3, 7, 16, torch.float32).items()}
    assert answers == {
        "contiguous": True,
        "packed": True,
        "bnhd": True,
        "odd offset": False,
        "odd row stride": False,
        "even row stride": True,
        "strided channels": False,
        "channels not last": False,
        "expanded": True,
    }


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 700, 64), (1, 1, 9000, 72), (40, 12, 90, 16), (700, 1, 1, 1000)], ids=str
)
def test_blocks_cover_every_place_once(
    pairing: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Larger than a block in every way: samples, heads, rows, channels; NaN stays where nothing is written."""
    x, rot = torch.randn(shape).to(dtype), rotation((shape[2], shape[3] // 2), pairing)
    wide = torch.promote_types(torch.float32, dtype)
    for out in (torch.full_like(x, float("nan")), x.clone()):
        source = x if bool(out.isnan().any()) else out
        assert turn_into(out, source, rot.cos.to(wide), rot.sin.to(wide), How(pairing)) is out
        assert_rounded(out, x, rot)
