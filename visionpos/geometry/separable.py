"""Separable: cosines and sines of a whole grid from those of its sides, for frequencies a head.

An angle that is a sum over axes is a product of turns: rows times columns trigonometric values in place of cells. For a
64 x 64 grid that is 128 rows of them and one complex product, in place of 4096.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from visionpos.geometry.lattice import ticks
from visionpos.geometry.points import known, readable

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


def is_lattice(cells: Tensor, grid: Grid) -> bool:
    """Return whether coordinates `[n, 2]` are those of rows and columns, which frames of a clip share.

    Shifts and stretches keep them so.

    Looked up on the CPU alone; False where it would cost a wait, in a graph, and where coordinates learn.
    """
    if cells.shape != (grid.size, 2) or cells.requires_grad or not readable(cells):
        return False
    lattice = cells.unflatten(0, grid.shape)
    lines = lattice[:1, :, :1, 0], lattice[:1, :1, :, 1]
    return all(
        torch.equal(lattice[..., axis], line.expand(grid.shape)) for axis, line in enumerate(lines)
    )


def lattice_turns(
    cells: Tensor, grid: Grid, freqs: Tensor, *, prefix: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `angles(cells, freqs)` at every cell of a grid, as one product a cell.

    Against float64 they are off by about half as much as cosines of float32 angles are: the large angle of a cell is
    never formed.

    Args:
        cells: `[n, 2]` coordinates for which `is_lattice` holds.
        grid: their grid.
        freqs: `[heads, 2, pairs]` radians per coordinate unit, which may learn.
        prefix: leading tokens that do not turn.

    Returns:
        cos and sin `[heads, prefix + n, pairs]`, the real and imaginary parts of one complex tensor.

    Example:
        >>> from visionpos.geometry.coords import coordinates
        >>> from visionpos.geometry.grid import Grid
        >>> grid, freqs = Grid(2, 3), torch.tensor([[[1.0, 0.5], [0.1, 2.0]]])
        >>> cos, sin = lattice_turns(coordinates(grid), grid, freqs)
        >>> cos.shape, bool((cos**2 + sin**2 - 1).abs().max() < 1e-6)
        (torch.Size([1, 6, 2]), True)
    """
    dtype = torch.promote_types(torch.float32, torch.promote_types(cells.dtype, freqs.dtype))
    y, x = (line.to(dtype) for line in ticks(cells, grid))
    cos, sin = _Turns.apply(freqs.to(dtype), y, x, grid.frames, prefix)
    return cos, sin


def joined(cos: Tensor, sin: Tensor) -> Tensor:
    """Return cosines and sines as complex numbers, without a copy where they are the parts of some."""
    strides, size = cos.stride(), cos.element_size()
    apart = sin.data_ptr() - cos.data_ptr()
    # Two storages may be views of one array of numpy, and a negated view does not hold its numbers.
    one = cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
    plain = one and not (cos.is_neg() or sin.is_neg())
    if (
        plain
        and apart == size
        and strides == sin.stride()
        and all(step % 2 == 0 for step in strides)
    ):
        whole = torch.as_strided(cos, (*cos.shape, 2), (*strides, 1))
        return (
            torch.view_as_complex(whole)
            if cos.storage_offset() % 2 == 0
            else torch.complex(cos, sin)
        )
    return torch.complex(cos, sin)


class _Turns(Function):
    """Cosines and sines of a lattice; the gradient of a frequency is a weighted sum of those of its angles."""

    @staticmethod
    def forward(
        ctx: Any, freqs: Tensor, y: Tensor, x: Tensor, frames: int, prefix: int
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[heads, prefix + n, pairs]`."""
        down, across = (
            torch.complex(angle.cos(), angle.sin())
            for angle in (
                freqs[:, :1] * y.unsqueeze(-1),
                freqs[:, 1:] * x.unsqueeze(-1),
            )
        )
        heads, pairs, n = freqs.shape[0], freqs.shape[2], frames * len(y) * len(x)
        turns = down.new_empty(heads, prefix + n, pairs)
        turns[:, :prefix] = 1
        cells = turns[:, prefix:].unflatten(1, (frames, len(y), len(x)))
        torch.mul(down.unsqueeze(2), across.unsqueeze(1), out=cells[:, 0])
        if frames > 1:
            cells[:, 1:] = cells[:, :1]
        cos, sin = turns.real, turns.imag
        ctx.prefix, ctx.frames = prefix, frames
        ctx.save_for_backward(cos, sin, y, x)
        return cos, sin

    @staticmethod
    def backward(
        ctx: Any, grad_cos: Tensor, grad_sin: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the frequencies."""
        cos, sin, y, x = ctx.saved_tensors
        cos, sin, on_cos, on_sin = (p[:, ctx.prefix :] for p in (cos, sin, grad_cos, grad_sin))
        shape = ctx.frames, len(y), len(x)
        if torch.is_grad_enabled() or not known(on_cos):
            angle = (cos * on_sin - sin * on_cos).unflatten(1, shape).sum(1)
            rows, columns = angle.sum(2), angle.sum(1)
        else:
            found = [
                _sums(turns, grads, shape)
                for turns, grads in zip(joined(cos, sin), joined(on_cos, on_sin), strict=True)
            ]
            rows, columns = (torch.stack(lines) for lines in zip(*found, strict=True))
        grads = (rows * y.unsqueeze(-1)).sum(1), (columns * x.unsqueeze(-1)).sum(1)
        return torch.stack(grads, dim=1), None, None, None, None


def _sums(turns: Tensor, grads: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a head's angles, `[n, pairs]`, summed over columns and over rows.

    They are the imaginary parts of conj(turn) times the complex gradient; a head stays in the cache, and whole numbers
    are summed, since torch is slow over steps of 2.
    """
    both = torch.view_as_real(turns.conj_physical().mul_(grads)).flatten(1).unflatten(0, shape)
    cells = both.sum(0) if shape[0] > 1 else both[0]
    return cells.sum(1)[..., 1::2], cells.sum(0)[..., 1::2]
