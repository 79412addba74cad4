"""rotate over memory layouts, in place and in packed projections: the oracle is the plain form on contiguous copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from visionpos import Rotation
from visionpos.attention import rotate, rotate_, rotate_packed_
from visionpos.attention.overlap import meet, meets_itself
from visionpos.errors import PositionError
from visionpos.geometry import rotate as plain

PAIRINGS = ("half", "adjacent", "half_per_axis", "adjacent_tiled")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 4e-2}


def rotation(*shape: int, pairing: str = "half", dtype: torch.dtype = torch.float32) -> Rotation:
    axes = 2 if "_" in pairing else None
    return Rotation.of(3 * torch.randn(*shape, dtype=dtype), pairing, axes=axes)


def close(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(
        a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 0, atol=CLOSE[a.dtype]
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (1, 1)], ids=str)
def test_layouts_are_one_rotation(pairing: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    b, n, d, prefix, suffix = 2, 15, 72, 2, 1
    q, k = (torch.randn(b, count, n, d).to(dtype) for count in heads)
    rot = rotation(n - prefix - suffix, 32, pairing=pairing)
    how = {"prefix": prefix, "suffix": suffix}
    wanted = plain(q, k, rot, **how)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k)]
    before = [x.clone() for x in swapped]
    got = rotate(*swapped, rot, layout="bnhd", **how)
    assert pairing == "adjacent_tiled" or all(x.is_contiguous() for x in got)
    assert all(close(x.transpose(1, 2), y) for x, y in zip(got, wanted, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(swapped, before, strict=True))
    flat = [x[0].transpose(0, 1).contiguous() for x in (q, k)]
    got = rotate(*flat, rot, layout="thd", **how)
    assert all(close(x.transpose(0, 1), y[0]) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "thd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_rotate(pairing: str, layout: str, dtype: torch.dtype) -> None:
    shape = {"bhnd": (2, 3, 9, 40), "bnhd": (2, 9, 3, 40), "thd": (9, 3, 40)}[layout]
    q, k = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    rot = rotation(8, 16, pairing=pairing)
    wanted = rotate(q, k, rot, prefix=1, layout=layout)  # type: ignore[arg-type]
    places = q.data_ptr(), k.data_ptr()
    got = rotate_(q, k, rot, prefix=1, layout=layout)  # type: ignore[arg-type]
    assert got[0] is q
    assert (q.data_ptr(), k.data_ptr()) == places
    assert all(close(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (2, 3)], ids=str)
def test_packed_in_place(pairing: str, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """Shared tables, tables a head, a sample, and both; queries and keys turn, values and class token stay."""
    qkv = torch.randn(2, 10, 3, 3, 24).to(dtype)
    rot = rotation(*lead, 9, 8, pairing=pairing)
    q, k, v = (part.clone() for part in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    wanted = plain(q, k, rot, prefix=1)
    assert rotate_packed_(qkv, rot, prefix=1) is qkv
    got = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    assert close(got[0], wanted[0])
    assert close(got[1], wanted[1])
    assert torch.equal(got[2], v)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_packed_grouped_queries(pairing: str) -> None:
    heads = torch.randn(2, 7, 6 + 2 * 2, 16)
    rot = rotation(7, 8, pairing=pairing)
    q, k = heads[:, :, :6].transpose(1, 2).clone(), heads[:, :, 6:8].transpose(1, 2).clone()
    v = heads[:, :, 8:].clone()
    wanted = plain(q, k, rot)
    rotate_packed_(heads, rot, kv_heads=2)
    assert close(heads[:, :, :6].transpose(1, 2), wanted[0])
    assert close(heads[:, :, 6:8].transpose(1, 2), wanted[1])
    assert torch.equal(heads[:, :, 8:], v)


@pytest.mark.parametrize("pairing", ["half", "adjacent", "half_per_axis"])
@pytest.mark.parametrize("form", ["rotate_", "packed", "bnhd"])
def test_gradient_is_that_of_the_plain_form(pairing: str, form: str) -> None:
    def run(fast: bool) -> Tensor:
        torch.manual_seed(1)
        leaf = torch.randn(2, 9, 3, 3, 16, dtype=torch.float64, requires_grad=True)
        rot = rotation(8, 8, pairing=pairing, dtype=torch.float64)
        qkv = leaf * 1.0
        q, k, v = (qkv[:, :, at].transpose(1, 2) for at in range(3))
        if not fast:
            q, k = plain(q, k, rot, prefix=1)
        elif form == "rotate_":
            q, k = rotate_(q * 1.0, k * 1.0, rot, prefix=1)
        elif form == "bnhd":
            q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), rot, prefix=1, layout="bnhd")
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        else:
            packed = rotate_packed_(qkv, rot, prefix=1)
            q, k, v = (packed[:, :, at].transpose(1, 2) for at in range(3))
        weight = torch.randn(3, 2, 3, 9, 16, dtype=torch.float64)
        ((q * weight[0]).sum() + (k.tanh() * weight[1]).sum() + (v * weight[2]).sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=1e-12)


def test_difference_a_saved_square_is_refused_not_silently_wrong() -> None:
    """Liger 0.8.5 turns the caller's storage without a version bump: q * q saved before it gets a wrong gradient."""
    leaf = torch.randn(1, 5, 2, 8, requires_grad=True)
    q, k = (leaf * 1.0).transpose(1, 2), torch.randn(1, 2, 5, 8)
    energy = (q * q).sum()
    rotate_(q, k, rotation(5, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        energy.backward()


def test_difference_a_shared_gradient_is_not_written_to() -> None:
    """Liger's backward turns the gradient that came in, which another branch may hold (facts/kernels.md 1)."""
    leaf = torch.randn(1, 2, 5, 8, requires_grad=True)
    q, _ = rotate_(leaf * 1.0, torch.randn(1, 2, 5, 8), rotation(5, 4))
    grad = torch.randn_like(q)
    held = grad.clone()
    q.backward(grad)
    assert torch.equal(grad, held)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_compile_fullgraph_in_place_and_layouts(pairing: str) -> None:
    torch._dynamo.reset()
    rot = rotation(9, 8, pairing=pairing)

    def run(q: Tensor, k: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        one = rotate_(q * 1.0, k * 1.0, rot, layout="bnhd")
        return *one, rotate_packed_(qkv * 1.0, rot), *rotate(q, k, rot, layout="bnhd")

    given_ = torch.randn(2, 9, 3, 16), torch.randn(2, 9, 1, 16), torch.randn(2, 9, 3, 3, 16)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(*given_), run(*given_), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)
    torch._dynamo.reset()


@given(
    st.integers(0, 3), st.integers(0, 4), st.integers(0, 6), st.sampled_from([2, 6, 16, 34]),
    st.integers(0, 2), st.sampled_from(PAIRINGS[:3]),
)  # fmt: skip
def test_invariant_every_size(
    b: int, heads: int, n: int, pairs: int, prefix: int, pairing: str
) -> None:
    """No batch, no head, no token, one token: the shapes of the inputs come back, turned like the plain form."""
    q = torch.randn(b, n + prefix, heads, 2 * pairs)
    rot = rotation(n, pairs, pairing=pairing)
    wanted, _ = plain(q.transpose(1, 2), q.transpose(1, 2), rot, prefix=prefix)
    got, _ = rotate(q, q, rot, prefix=prefix, layout="bnhd")
    assert close(got.transpose(1, 2), wanted)
    own = q.clone()
    rotate_(own, torch.randn_like(q), rot, prefix=prefix, layout="bnhd")
    assert close(own, got)


def test_error_places() -> None:
    rot, x = rotation(5, 4), torch.randn(1, 2, 5, 8)
    with pytest.raises(PositionError, match="share memory"):
        rotate_(x, x, rot)
    with pytest.raises(PositionError, match="entries that share memory"):
        rotate_(torch.randn(1, 1, 5, 8).expand(1, 2, 5, 8), x, rot)
    with pytest.raises(PositionError, match="k is a leaf that trains"):
        rotate_(x, torch.randn(1, 2, 5, 8, requires_grad=True), rot)
    learned = Rotation.of(torch.randn(5, 4, requires_grad=True))
    with pytest.raises(PositionError, match="rotation learns"):
        rotate_(x.clone(), x, learned)
    held = x.clone()
    with pytest.raises(PositionError, match="k is a leaf"):
        rotate_(held, torch.randn(1, 2, 5, 8, requires_grad=True), rot)
    assert torch.equal(held, x)  # nothing was written before all was looked at
    with pytest.raises(PositionError, match="layout is 'nbhd'"):
        rotate(x, x, rot, layout="nbhd")  # type: ignore[arg-type]
    with pytest.raises(PositionError, match=r"q has shape .*layout 'thd' has 3 dimensions"):
        rotate(x, x, rot, layout="thd")
    with pytest.raises(PositionError, match="tokens must be rotation"):
        rotate_(x.clone(), x, rot, prefix=1)
    for bad in (torch.randn(1, 5, 2, 2, 8), torch.randn(1, 5, 6, 8), torch.randn(5, 48), None):
        with pytest.raises(PositionError, match="qkv has shape"):
            rotate_packed_(bad, rot)  # type: ignore[arg-type]
    with pytest.raises(PositionError, match="kv_heads is 3"):
        rotate_packed_(torch.randn(1, 5, 6, 8), rot, kv_heads=3)
    with pytest.raises(PositionError, match="qkv is a leaf"):
        rotate_packed_(torch.randn(1, 5, 3, 2, 8, requires_grad=True), rot)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("trains", [False, True])
def test_packed_whose_kinds_lie_inside_heads(lead: tuple[int, ...], *, trains: bool) -> None:
    """Megatron's `[b, n, heads, 3, head_dim]`, transposed to the form asked for, has no view of all heads in a row."""
    base = torch.randn(2, 9, 3, 3, 20, dtype=torch.float64, requires_grad=trains)
    rot = rotation(*lead, 7, 8, dtype=torch.float64)
    qkv = (base * 1).transpose(2, 3)
    before = qkv.detach().clone()
    out = rotate_packed_(qkv, rot, prefix=1, suffix=1)
    assert out is qkv
    q, k = plain(*(before[:, :, i].transpose(1, 2) for i in (0, 1)), rot, prefix=1, suffix=1)
    wanted = torch.stack([q.transpose(1, 2), k.transpose(1, 2), before[:, :, 2]], dim=2)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-14)
    if trains:  # a turn keeps lengths: the gradient of a squared norm is twice what was there
        out.square().sum().backward()
        assert base.grad is not None
        assert torch.allclose(base.grad, 2 * base, rtol=0, atol=1e-13)


@pytest.mark.parametrize("how", ["unbind", "split", "no_grad"])
def test_error_views_that_autograd_does_not_let_be_written_to(how: str) -> None:
    """The usual line q, k, v = qkv.unbind(2), in training; without gradients it works."""
    rot, qkv = rotation(5, 8), torch.randn(3, 1, 2, 5, 16, requires_grad=True)
    cut = (qkv * 1).unbind() if how == "unbind" else (qkv * 1).split(1)
    if how == "no_grad":
        leaf = qkv * 1
        with torch.no_grad():
            cut = (leaf[0], leaf[1], leaf[2])
    before = [part.detach().clone() for part in cut[:2]]
    parts = [part.reshape(1, 2, 5, 16) for part in cut[:2]]
    with pytest.raises(PositionError, match="q is one of several views"):
        rotate_(*parts, rot)
    assert all(torch.equal(x, y) for x, y in zip(cut, before, strict=False))
    with torch.no_grad():
        wanted = plain(*parts, rot)
        assert all(close(x, y) for x, y in zip(rotate_(*parts, rot), wanted, strict=True))


def test_error_tensors_of_inference_mode() -> None:
    rot = rotation(5, 8)
    with torch.inference_mode():
        q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
        wanted = plain(q, k, rot)
        assert close(rotate_(q, k, rot)[0], wanted[0])
    with pytest.raises(PositionError, match="q was made in inference mode"):
        rotate_(q, k, rot)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_forward_mode_and_vmap(pairing: str) -> None:
    """A turn is linear: what goes forward is the turn of the tangent."""
    rot, q, t = rotation(5, 8, pairing=pairing), torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16)
    with forward_ad.dual_level():
        both = rotate(forward_ad.make_dual(q, t), forward_ad.make_dual(2 * q, t), rot)
        found = [forward_ad.unpack_dual(x).tangent for x in both]
    assert all(x is not None and close(x, rot.apply(t)) for x in found)
    turned = torch.vmap(lambda x: rotate_(x.clone(), 2 * x, rot)[0])(q)
    assert close(turned, plain(q, q, rot)[0])


def test_error_partial_overlap_and_neighbours_that_do_not() -> None:
    """Heads in common would turn twice; queries and keys of one projection lie between each other and share nothing."""
    rot = rotation(5, 4)
    base = torch.randn(2, 4, 5, 8)
    for q, k in (
        (base[:, :2], base[:, 1:3]),
        (base[:1], base[:, 3:]),
        (base[:, :3], base[:, 2:]),
        (base[:, 2:], base[:, :3]),
    ):
        if q.shape[0] == 1:
            rotate_(q[:, :2].clone(), k.clone(), rot)
            continue
        held = base.clone()
        with pytest.raises(PositionError, match="share memory"):
            rotate_(q, k, rot)
        assert torch.equal(base, held)
    qkv = torch.randn(2, 5, 10, 8)
    q, k = qkv[:, :, :6].transpose(1, 2), qkv[:, :, 6:8].transpose(1, 2)
    wanted = plain(q.clone(), k.clone(), rot)
    got = rotate_(q, k, rot)
    assert all(close(x, y) for x, y in zip(got, wanted, strict=True))
    front, back = base[:, :2], base[:, 2:]
    assert rotate_(front, back, rot)[0] is front


def test_error_overlap_of_other_strides() -> None:
    """Every second head, rows of a sliding window: entry by entry, whatever the strides; what lies between may turn."""
    rot, base = rotation(5, 4), torch.randn(2, 4, 5, 8)
    held = base.clone()
    rows = torch.randn(24).as_strided(
        (1, 1, 5, 8), (24, 24, 4, 1)
    )  # each begins inside the one before
    for q, k in (
        (base, base[:, 1::2]),
        (base[:, ::2], base[:, 1:3]),
        (base.view(1, 8, 5, 8)[:, 1:], base[:1]),
        (base[:1, :1], base[:, :1].expand(2, 3, 5, 8)),
        (rows, torch.randn(1, 1, 5, 8)),
        (torch.randn(1, 1, 5, 8), rows),
    ):
        with pytest.raises(PositionError, match="share memory"):
            rotate_(q, k, rot)
    assert torch.equal(base, held)
    wanted = plain(base[:, ::2], base[:1, 1::2], rot)
    got = rotate_(base[:, ::2], base[:1, 1::2], rot)
    assert all(close(x, y) for x, y in zip(got, wanted, strict=True))
    rotate_(torch.randn(1, 2, 5, 8).expand(0, 2, 5, 8), base[:0], rot)  # nothing is shared


@given(st.data())
def test_overlap_is_counted_entry_by_entry(data: st.DataObject) -> None:
    """Against sets of addresses, for any strides and beginnings."""
    steps = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), min_size=3, max_size=3)
    sizes = st.lists(st.integers(0, 4), min_size=3, max_size=3)
    base, first = torch.zeros(256), data.draw(steps)
    both = [
        base.as_strided(data.draw(sizes), found, data.draw(st.integers(0, 40)))
        for found in (first, data.draw(st.one_of(st.just(first), steps)))
    ]
    places = [
        torch.arange(256).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()
        for x in both
    ]
    assert meet(*both) == bool(set(places[0]) & set(places[1]))
    assert [meets_itself(x) for x in both] == [len(set(one)) < len(one) for one in places]


def test_error_views_of_leaves_and_odd_arguments() -> None:
    rot, leaf = rotation(5, 4), torch.randn(2, 4, 5, 8, requires_grad=True)
    q, packed = torch.randn(2, 4, 5, 8), torch.randn(1, 5, 48, requires_grad=True)
    held = q.clone()
    with pytest.raises(PositionError, match="k is a leaf that trains, or a view of one"):
        rotate_(q, leaf[:, :2], rot)
    assert torch.equal(q, held), "nothing is written before all is looked at"
    with pytest.raises(PositionError, match="qkv is a leaf"):
        rotate_packed_(packed.view(1, 5, 3, 2, 8), rot)
    for kv_heads in (1.0, "1", True):
        with pytest.raises(PositionError, match="kv_heads is"):
            rotate_packed_(torch.randn(1, 5, 6, 8), rot, kv_heads=kv_heads)
    for call in (
        lambda: rotate_(q, leaf.detach(), None),
        lambda: rotate_packed_(torch.randn(1, 5, 3, 2, 8), (rot.cos, rot.sin)),
    ):
        with pytest.raises(PositionError, match=r"rotation is .*; a Rotation is required"):
            call()
    with pytest.raises(PositionError, match=r"layout is \['bhnd'\]"):
        rotate(q, q, rot, layout=["bhnd"])
    assert rotate_packed_(torch.randn(1, 5, 3, 0, 8), rot).shape == (1, 5, 3, 0, 8)
