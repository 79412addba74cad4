"""Overlap: whether tensors share memory, entry by entry; what is turned in place must not be turned twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def meet(q: Tensor, k: Tensor) -> bool:
    """Return whether two tensors share an entry; interleaved ones, as in a packed projection, do not."""
    if not q.numel() or not k.numel() or q.device != k.device:
        return False
    apart, size = k.data_ptr() - q.data_ptr(), q.element_size()
    if apart >= _reach(q) * size or -apart >= _reach(k) * k.element_size():
        return False
    if q.dtype != k.dtype or apart % size:
        return True
    if q.stride() == k.stride():
        sizes = zip(q.stride(), q.shape, k.shape, strict=True)
        both = [(step, of_q, of_k) for step, of_q, of_k in sizes if max(of_q, of_k) > 1]
        if _nest([(step, max(of_q, of_k)) for step, of_q, of_k in both]):
            return _reached(apart // size, sorted(both, reverse=True))
    return _marked(q, k, apart // size)


def meets_itself(x: Tensor) -> bool:
    """Return whether entries of one tensor share memory, as those of `expand` and of sliding windows do."""
    if not x.numel() or _nest(_dims(x)):
        return False
    return int(_marks(x, 0, _reach(x)).sum()) < x.numel()


def _dims(x: Tensor) -> list[tuple[int, int]]:
    """Return the strides and sizes that tell entries apart."""
    return [(step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _reach(x: Tensor) -> int:
    """Return the entries of memory from the first of x to its last."""
    return 1 + sum(step * (size - 1) for step, size in _dims(x))


def _nest(dims: list[tuple[int, int]]) -> bool:
    """Return whether every step is longer than all that smaller steps reach: then no two entries meet."""
    reach = 0
    for step, size in sorted(dims):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _reached(apart: int, dims: list[tuple[int, int, int]]) -> bool:
    """Return whether a place in q and one in k can be the same, `apart` entries between their beginnings.

    Args:
        apart: from the beginning of q to that of k.
        dims: strides, longest first, with the sizes of q and of k; they nest.
    """
    if not dims:
        return apart == 0
    (step, of_q, of_k), *rest = dims
    steps = {apart // step, -(-apart // step)}
    return any(-of_k < taken < of_q and _reached(apart - taken * step, rest) for taken in steps)


def _marked(q: Tensor, k: Tensor, apart: int) -> bool:
    """Return the same for any strides, by a mark for every entry of memory between them: one byte, on the host."""
    of_q, of_k = max(-apart, 0), max(apart, 0)
    reach = max(of_q + _reach(q), of_k + _reach(k))
    return bool((_marks(q, of_q, reach) & _marks(k, of_k, reach)).any())


def _marks(x: Tensor, begin: int, reach: int) -> Tensor:
    """Return `[reach]` bool: where x has an entry, counted from `begin` entries before it."""
    marks = torch.zeros(reach, dtype=torch.bool, device="cpu")
    dims = [(step, size) for step, size in _dims(x) if step]
    steps, sizes = [step for step, _ in dims], [size for _, size in dims]
    marks.as_strided(sizes, steps, begin).fill_(True)  # noqa: FBT003 (torch's own)
    return marks
