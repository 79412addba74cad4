"""Cases of the Triton rotation forward: tables in every layout, and angles formed in the kernel."""

# Cases are many, and close over all that makes them.
# ruff: noqa: C901, PLR0915, PLR0917

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.kernels.oracle import check, in_layout, interleaved_axes, turned
from visionpos.kernels.triton_rotate import launch_rotate, launch_rotate_coords

Case = tuple[str, Callable[[], None]]


def tables() -> Iterator[Case]:
    sizes = [
        # d, pairs, heads, kv, n, layout, pairing, lead, prefix, suffix
        (64, 32, 3, 3, 7, "bhnd", "half", (), 0, 0),
        (64, 32, 4, 2, 13, "bnhd", "adjacent", (), 1, 0),
        (64, 32, 6, 1, 5, "packed", "half", (), 5, 0),  # all but none exempt
        (72, 36, 5, 2, 11, "packed", "half", (), 1, 2),
        (72, 36, 4, 4, 11, "bnhd", "adjacent", (4,), 0, 1),
        (80, 40, 7, 7, 9, "packed", "half", (2, 1), 0, 0),
        (80, 40, 4, 4, 9, "bhnd", "adjacent", (2, 4), 1, 1),
        (88, 44, 3, 1, 5, "bnhd", "half", (), 0, 0),
        (88, 44, 6, 6, 5, "packed", "adjacent", (6,), 0, 0),
        (96, 48, 7, 2, 6, "thd", "adjacent", (), 0, 0),
        (128, 64, 5, 1, 17, "thd", "half", (), 0, 0),
        (128, 64, 2, 2, 17, "bhnd", "adjacent", (2, 2), 3, 0),
        (32, 16, 2, 2, 65, "bnhd", "half", (2,), 0, 2),
        (256, 128, 2, 1, 9, "packed", "adjacent", (), 1, 0),
        (256, 128, 2, 2, 9, "bnhd", "half", (2,), 0, 0),
        (64, 16, 3, 2, 7, "packed", "half", (), 1, 1),  # partial, with a tail
        (80, 20, 3, 3, 7, "bnhd", "adjacent", (), 0, 0),
        (80, 30, 3, 3, 7, "bhnd", "half", (3,), 0, 1),
        (64, 32, 3, 3, 1, "bhnd", "half", (), 0, 0),
        (64, 32, 3, 3, 7, "channels_first", "adjacent", (), 0, 0),
        (50, 25, 3, 3, 7, "packed", "half", (), 0, 0),  # nothing divides by 8
    ]
    for place, (d, pairs, heads, kv, n, layout, pairing, lead, prefix, suffix) in enumerate(sizes):
        # Every second size in place, and always where there is a tail to leave alone.
        both = (False, True) if place % 2 or 2 * pairs < d else (False,)
        for in_place in both if layout != "channels_first" else (False,):

            def run(
                in_place=in_place, d=d, pairs=pairs, heads=heads, kv=kv, n=n, layout=layout,
                pairing=pairing, lead=lead, prefix=prefix, suffix=suffix,
            ):  # fmt: skip
                q, k = in_layout(layout, 2, heads, kv, n, d)
                rows = q.shape[2] - prefix - suffix
                angles = torch.randn(*lead, rows, pairs, dtype=torch.float64) * 3
                expected = [turned(x, angles, pairing, prefix, suffix) for x in (q, k)]
                cos, sin = angles.cos().float(), angles.sin().float()
                given = {"out_q": q, "out_k": k} if in_place else {}
                outs = launch_rotate(
                    q, k, cos, sin, pairing=pairing, prefix=prefix, suffix=suffix, **given
                )
                assert not in_place or (outs[0] is q and outs[1] is k)
                check(outs, tuple(expected))

            where = "in_place" if in_place else "new"
            yield (
                f"{layout}-{pairing}-{d}/{2 * pairs}-{heads}:{kv}-{lead}-{prefix}+{suffix}-{where}",
                run,
            )
    yield from table_variants()


def table_variants() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):

        def halves(dtype=dtype):
            q, k = (x.to(dtype) for x in in_layout("bnhd", 2, 4, 2, 9, 64))
            angles = torch.randn(9, 32, dtype=torch.float64)
            outs = launch_rotate(q, k, angles.cos().float(), angles.sin().float())
            assert outs[0].dtype == dtype
            check(outs, (turned(q, angles, "half"), turned(k, angles, "half")))

        yield f"dtype-{dtype}", halves

    def back_and_forth():
        q, k = in_layout("packed", 2, 4, 2, 9, 80)
        angles = torch.randn(9, 40)
        there = launch_rotate(q, k, angles.cos(), angles.sin(), pairing="adjacent")
        back = launch_rotate(*there, angles.cos(), angles.sin(), pairing="adjacent", conj=True)
        check(back, (q, k))

    def q_alone():
        q, _ = in_layout("bhnd", 1, 3, 3, 7, 64)
        angles = torch.randn(7, 32)
        outs = launch_rotate(q, None, angles.cos(), angles.sin())
        check(outs, (turned(q, angles, "half"), None))

    def neighbours_untouched():
        """What lies between and beyond the views is not written."""
        room = torch.randn(2, 3, 9, 100)
        before, view = room.clone(), room[:, 1:, 1:8, 10:90]
        angles = torch.randn(7, 36)
        launch_rotate(view, None, angles.cos(), angles.sin(), out_q=view)
        expected = before.double()
        expected[:, 1:, 1:8, 10:90] = turned(before[:, 1:, 1:8, 10:90], angles, "half")
        check((room,), (expected,))

    def expanded():
        """The gradient of a sum: every stride is 0."""
        q = torch.ones(1, 1, 1, 1).expand(2, 3, 7, 64)
        angles = torch.randn(7, 32)
        check(launch_rotate(q, None, angles.cos(), angles.sin())[:1], (turned(q, angles, "half"),))

    def exempt_bits():
        """Exempt tokens keep their bits, whatever they hold."""
        q = torch.randn(1, 2, 6, 64)
        q[:, :, 0] = torch.tensor([float("inf"), -0.0]).repeat(32)
        angles = torch.randn(5, 32)
        out, _ = launch_rotate(q, None, angles.cos(), angles.sin(), prefix=1)
        assert torch.equal(out[:, :, 0].view(torch.int32), q[:, :, 0].view(torch.int32))

    def control():
        """A wrong angle is seen."""
        q, k = in_layout("bhnd", 1, 2, 2, 5, 64)
        angles = torch.randn(5, 32, dtype=torch.float64)
        outs = launch_rotate(q, k, angles.cos().float(), angles.sin().float())
        try:
            check(outs, (turned(q, angles + 1e-4, "half"), turned(k, angles, "half")))
        except AssertionError:
            return
        raise AssertionError("an angle off by 1e-4 passed")

    for function in (back_and_forth, q_alone, neighbours_untouched, expanded, exempt_bits, control):
        yield function.__name__, function


def coords() -> Iterator[Case]:
    for accuracy in ("reference", "exact"):
        for pairing, d, lead in (("half", 128, ()), ("adjacent", 72, (2,)), ("half", 80, (1,))):

            def mapped(accuracy=accuracy, pairing=pairing, d=d, lead=lead):
                q, k = in_layout("packed", 2, 3, 1, 9, d)
                ids = torch.randint(0, 50, (*lead, 3, 7))
                axis = interleaved_axes(d // 2, 3)
                freqs = 100.0 ** -(torch.arange(d // 2, dtype=torch.float64) * 2 / d)
                angles = ids.double().mT[..., axis] * freqs
                angles = angles.unsqueeze(-3) if lead else angles
                outs = launch_rotate_coords(
                    q, k, ids, freqs, axis_of_pair=axis, pairing=pairing, prefix=1, suffix=1,
                    accuracy=accuracy, scale=1.25,
                )  # fmt: skip
                expected = (turned(x, angles, pairing, 1, 1, 1.25) for x in (q, k))
                check(outs, tuple(expected))

            def mixed(accuracy=accuracy, pairing=pairing, d=d, lead=lead):
                q, k = in_layout("bnhd", 2, 4, 4, 8, d)
                yx, freqs = torch.rand(*lead, 2, 7) * 4, torch.randn(4, 2, d // 2)
                angles = torch.einsum("...an,hap->...hnp", yx.double(), freqs.double())
                outs = launch_rotate_coords(
                    q, k, yx, freqs, pairing=pairing, prefix=1, accuracy=accuracy
                )
                check(outs, tuple(turned(x, angles, pairing, 1) for x in (q, k)))

            def shared(accuracy=accuracy, pairing=pairing, d=d, lead=lead):
                q, k = in_layout("bhnd", 2, 4, 2, 7, d)
                tyx, freqs = torch.rand(*lead, 3, 7) * 4, torch.randn(3, d // 2)
                angles = torch.einsum("...an,ap->...np", tyx.double(), freqs.double())
                angles = angles.unsqueeze(-3) if lead else angles
                outs = launch_rotate_coords(q, k, tyx, freqs, pairing=pairing, accuracy=accuracy)
                check(outs, tuple(turned(x, angles, pairing) for x in (q, k)))

            for function in (mapped, mixed, shared):
                yield f"{function.__name__}-{accuracy}-{pairing}-{d}-{lead}", function
    for low, high in ((0, 300), (10**4, 10**5), (10**6 - 100, 10**6 + 100)):

        def exact(low=low, high=high):
            """Right to 1e-6 rad, against float64, at every position."""
            angles, cos, sin = read_out("exact", low, high)
            assert max((cos - angles.cos()).abs().max(), (sin - angles.sin()).abs().max()) < 1e-6

        def reference(low=low, high=high):
            """The float32 product's own sine, as transformers computes it."""
            _, cos, sin = read_out("reference", low, high)
            ids, freqs = ladder(low, high)
            angles = (ids.float()[:, None] * freqs.float()).double()
            assert max((cos - angles.cos()).abs().max(), (sin - angles.sin()).abs().max()) < 1e-6

        yield f"exact-{low}", exact
        yield f"reference-{low}", reference

    def reference_is_inexact():
        """The two accuracies are two: at 10^6 the float32 product is off by far more than 1e-6."""
        angles, cos, _ = read_out("reference", 10**6 - 100, 10**6 + 100)
        assert (cos - angles.cos()).abs().max() > 1e-3

    yield "reference_is_inexact", reference_is_inexact


def ladder(low: int, high: int) -> tuple[Tensor, Tensor]:
    ids = torch.linspace(low, high, 64).round().to(torch.int32)
    return ids, 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)


def read_out(accuracy: str, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """The angles in float64, and the cosines and sines that the kernel forms, read from (1, 0) pairs."""
    ids, freqs = ladder(low, high)
    q = torch.zeros(1, 1, len(ids), 64)
    q[..., :32] = 1
    axis = torch.zeros(32, dtype=torch.int32)
    out, _ = launch_rotate_coords(q, None, ids[None], freqs, axis_of_pair=axis, accuracy=accuracy)
    return ids.double()[:, None] * freqs, out[0, 0, :, :32].double(), out[0, 0, :, 32:].double()
