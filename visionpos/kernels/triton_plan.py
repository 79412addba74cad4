"""Which program holds what: tiles, strides and constants of a kernel launch, from tensors alone.

The plan of a launch is data, so the ahead-of-time gate compiles exactly what a GPU would run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.kernels.triton_angles import MAP
from visionpos.kernels.triton_language import check_launchable
from visionpos.kernels.triton_sources import angle_arguments, check_source

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.kernels.triton_sources import Source

# Pairs a program holds at a time: eight a thread, which is two 16-byte loads of half precision.
_TILE_PAIRS = 1024
# Tiles of q a program turns with one tile of angles, and programs below which a GPU would idle.
_TILES, _FEW_PROGRAMS = 4, 512
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OUTPUTS = ("oq", "ok")


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel with its arguments and grid."""

    kernel: Any
    arguments: dict[str, Any]
    programs: int
    options: dict[str, Any] = field(
        # Contraction would break the exact products of the range reduction, and parity with eager arithmetic.
        default_factory=lambda: {"num_warps": 4, "enable_fp_fusion": False}
    )

    def run(self) -> None:
        """Run the kernel."""
        device = self.arguments["q"].device
        check_launchable(device.type)
        if not self.programs:
            return
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.programs,)](**self.arguments, **self.options)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program divides heads and pairs: GROUP heads side by side in WIDTH columns, BLOCK tokens."""

    width: int
    group: int
    block: int
    q_tiles: int
    k_tiles: int
    splits: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor | None,
        pairs: int,
        *,
        flat: bool,
        parts: int,
        tiles: int = _TILES,
    ) -> Tile:
        """Return the division for `q` and `k` `[b, heads, n, head_dim]`.

        `flat` allows several heads a tile; tiles hold one of so many `parts` of what a program can.
        """
        heads, kv_heads = q.shape[1], 0 if k is None else k.shape[1]
        width, group = _width(pairs, max(heads, 1) if flat else 1)
        block = 1 if q.shape[2] == 1 else max(1, _TILE_PAIRS // parts // width)
        of_q, of_k = math.ceil(heads / group), math.ceil(kv_heads / group)
        spread = q.shape[0] * math.ceil(q.shape[2] / block) * max(of_q, of_k, 1)
        while tiles > 1 and spread // tiles < _FEW_PROGRAMS:
            tiles //= 2
        splits = max(1, math.ceil(max(of_q, of_k) / tiles))
        return cls(width, group, block, math.ceil(of_q / splits), math.ceil(of_k / splits), splits)


def _width(pairs: int, heads: int) -> tuple[int, int]:
    """Return the columns of a tile and the heads in it, so that few columns idle."""
    whole = 1 << (pairs - 1).bit_length()
    best = (pairs / whole, whole, 1)
    for width in (64, 128, 256):
        group = min(width // pairs, heads)
        share = group * pairs / width
        if group > 1 and best[0] < 0.84 and share > best[0]:
            best = (share, width, group)
    return best[1], best[2]


def planned(
    kernel: Any,
    q: Tensor,
    k: Tensor | None,
    out_q: Tensor,
    out_k: Tensor | None,
    source: Source,
    *,
    pairing: str,
    prefix: int,
    suffix: int,
    conj: bool,
    tail: int,
    normed: bool = False,
    saved: tuple[Tensor, Tensor | None] | None = None,
) -> Launch:
    """Return the launch that every kernel shares; the caller adds its own arguments.

    Args:
        kernel: a Triton kernel that takes what `turn_kernel` takes.
        q: `[b, heads, n, head_dim]` with any strides.
        k: like q, with any number of heads, or None.
        out_q: like q, with neighbouring channels.
        out_k: like k.
        source: where the angles come from.
        pairing: "half" or "adjacent".
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        conj: turn back instead.
        tail: channels beyond the pairs that the kernel copies.
        normed: the kernel needs whole heads, one a row.
        saved: the inputs of the forward pass, for a kernel that takes `x_q` and `x_k`.

    Raises:
        PositionError: if shapes, dtypes or pairing do not fit.
    """
    pairs = source.pairs
    _check(q, k, source, pairing)
    check_source(source, q.shape[0])
    _check_places(q, k, source, prefix, suffix)
    of_k, of_out_k = (q[:, :0], out_q[:, :0]) if k is None or out_k is None else (k, out_k)
    tensors = {"q": q, "k": of_k, "oq": out_q, "ok": of_out_k}
    _check_outputs(out_q, of_out_k)
    if saved is not None:
        tensors |= {"xq": saved[0], "xk": of_k if saved[1] is None else saved[1]}
    steps, unit = _steps(tensors)
    angles = angle_arguments(source, q.shape[0])
    # Half a tile keeps to the registers where a kernel holds a tail, a norm or two tensors at once: for adjacent pairs
    # at no cost, as for pairs that a thread cannot load eight at a time; else at 8 instead of 16 bytes a load.
    free = pairing == "adjacent" or pairs % 8 != 0
    tight = free or angles["MODE"] == MAP or q.dtype == torch.float16
    halved = q.element_size() == 4 or tail > 0 or (saved is not None and tight) or (normed and free)
    # A norm on its way back holds most.
    parts = 1 + halved if not (normed and saved) else 4 if tail or q.element_size() == 4 else 2
    flat = not normed and not tail and _narrow(tensors)
    tile = Tile.of(q, k, pairs, flat=flat, parts=parts)
    blocks = math.ceil(q.shape[2] / tile.block)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "out_q": out_q, "out_k": out_k, **steps, **angles,
        "tokens": q.shape[2], "rows": source.rows, "prefix": prefix, "q_heads": q.shape[1],
        "k_heads": of_k.shape[1], "blocks": blocks, "splits": tile.splits,
        "PAIRS": pairs, "BLOCK": tile.block, "WIDTH": tile.width, "GROUP": tile.group, "Q_TILES": tile.q_tiles,
        "K_TILES": tile.k_tiles, "UNIT": unit, "TAIL": tail, "REST": 1 << max(tail - 1, 0).bit_length(),
        "ADJACENT": pairing == "adjacent", "CONJ": conj, "PER_HEAD": source.heads > 1,
    }  # fmt: skip
    programs = q.shape[0] * blocks * tile.splits if q.shape[1] else 0
    launch = Launch(kernel, arguments, programs)
    if saved is not None:
        launch.options["maxnreg"] = (
            96  # addresses are recomputed then, rather than kept in up to 30 registers more
        )
    return launch


def _steps(tensors: dict[str, Tensor]) -> tuple[dict[str, int], int]:
    """Return the strides by argument name, divided by the constant that the kernels multiply back."""
    strides = {
        f"{name}_{part}": 0 if size == 1 else step
        for name, tensor in tensors.items()
        for part, step, size in zip("bhnd", tensor.stride(), tensor.shape, strict=True)
        if part != "d" or name not in _OUTPUTS
    }
    unit = math.gcd(8, *(step for name, step in strides.items() if not name.endswith("_d")))
    return {
        name: step if name.endswith("_d") else step // unit for name, step in strides.items()
    }, unit


def _narrow(tensors: dict[str, Tensor]) -> bool:
    """Return whether the offsets between the heads of one tile fit into 32 bits."""
    return all(abs(tensor.stride(1)) * 16 < 2**31 for tensor in tensors.values())


def _check(q: Tensor, k: Tensor | None, source: Source, pairing: str) -> None:
    if pairing not in ("half", "adjacent"):
        raise PositionError(
            f"pairing is {pairing!r}; 'half' or 'adjacent' is required. Other pairings run in visionpos.rotate."
        )
    for name, x in (("q", q), ("k", k)):
        if x is not None and (
            x.ndim != 4 or x.dtype not in _DTYPES or x.shape[-1] < 2 * source.pairs
        ):
            raise PositionError(
                f"{name} is {tuple(x.shape)} {x.dtype} and {source.pairs} pairs turn; [b, heads, n, head_dim] in "
                "float32, bfloat16 or float16 with head_dim at least 2 * pairs is required. Pass a view of that shape."
            )
    if k is not None and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise PositionError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; both must agree but for heads. Launch keys of another "
            "length on their own, with k=None."
        )


def _check_places(q: Tensor, k: Tensor | None, source: Source, prefix: int, suffix: int) -> None:
    if min(prefix, suffix) < 0 or q.shape[2] != source.rows + prefix + suffix:
        raise PositionError(
            f"q has {q.shape[2]} tokens, the angles {source.rows}, prefix is {prefix} and suffix {suffix}; tokens "
            "must be angles + prefix + suffix. Pass the number of exempt tokens of the model."
        )
    if source.heads > 1 and {source.heads} != {x.shape[1] for x in (q, k) if x is not None}:
        raise PositionError(
            f"angles are given for {source.heads} heads, q has {q.shape[1]} and k {None if k is None else k.shape[1]}; "
            "all must agree. Launch grouped keys on their own, with k=None."
        )


def _check_outputs(*outputs: Tensor) -> None:
    for out in outputs:
        shared = any(
            step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)
        )
        if shared or out.stride(-1) != 1:
            raise PositionError(
                f"the output has strides {out.stride()}; elements of their own and neighbouring channels are required. "
                "Leave out_q and out_k out to get new tensors."
            )
