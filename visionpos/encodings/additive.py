"""The door "add": an encoding that gives every token a vector; and the checks of devices and points it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from visionpos.encodings.doors import Dims
    from visionpos.geometry.grid import Grid


class Additive(nn.Module, ABC):
    """An encoding that gives every token a vector to add."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]`, row-major over the grid, without prefix rows."""

    def batch(
        self,
        grids: Sequence[Grid],
        *,
        length: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the codes of images of several sizes as one padded batch, each image as if it were alone.

        Args:
            grids: one grid a sample; never read off the tokens' largest coordinates, which dropping tokens changes.
            length: tokens a sample; the longest sample when None.
            device: where to build.

        Returns:
            `[b, length, embed_dim]`, zero after the last token of each sample.

        Raises:
            PositionError: if there is no grid, or a grid has more tokens than length.
        """
        longest = max((grid.size for grid in grids), default=0)
        rows = longest if length is None else length
        if not grids or rows < longest:
            raise PositionError(
                f"length is {rows} for {len(grids)} grids of up to {longest} tokens; at least one grid, and room for "
                "the longest, are required. Raise length, or shrink the images."
            )
        codes = [self(grid, device=device) for grid in grids]
        return torch.stack([F.pad(code, (0, 0, 0, rows - code.shape[0])) for code in codes])

    def added(self, tokens: Tensor, code: Tensor, *, prefix: int = 0) -> Tensor:
        """Return tokens with a code added; prefix tokens pass unchanged.

        Once, at the input: the result goes into the first block. At every layer to q and k only, as in DETR: in each
        attention q and k are projected from the result, v from the tokens themselves, which stay clean of position.

        Args:
            tokens: `[b, prefix + n, embed_dim]`, not changed.
            code: `[n, embed_dim]`, or `[b, n, embed_dim]` where samples differ; cast to the tokens' dtype.
            prefix: leading tokens without position.

        Raises:
            PositionError: if the code is not for these tokens.
        """
        if prefix < 0 or tuple(code.shape[-2:]) != (tokens.shape[1] - prefix, tokens.shape[2]):
            raise PositionError(
                f"code has shape {tuple(code.shape)} for tokens {tuple(tokens.shape)} with prefix {prefix}; "
                "[n, embed_dim] of the tokens after the prefix is required. Build it for the grid of these tokens."
            )
        return tokens + F.pad(code.to(tokens.dtype), (0, 0, prefix, 0))


def check_device(weight: Tensor, device: torch.device | None) -> None:
    """Refuse a device other than that of a learned part: nothing is moved behind the caller's back.

    Raises:
        PositionError: naming both; "cuda" without an index is any CUDA device.
    """
    here = weight.device
    if device is None or (device.type == here.type and device.index in (None, here.index)):
        return
    raise PositionError(
        f"device is {device} and the table is on {here}; move the module with .to({device})."
    )


def check_points(
    points: Tensor, axes: int, name: str, *, extent: tuple[float, ...] | Tensor | None = None
) -> None:
    """Refuse points of another rank, and, where that costs no wait for a device, points that are nowhere.

    Args:
        points: `[..., axes]`.
        axes: numbers a point must have.
        name: of the argument.
        extent: sides of the lattice in cells; points must lie between its outer edges, half a cell around its centres.

    Raises:
        PositionError: naming the argument, if the rank differs; on the CPU also for NaN, infinity and points outside.
    """
    if points.ndim < 1 or points.shape[-1] != axes:
        raise PositionError(
            f"{name} has {points.shape[-1] if points.ndim else 0} axes, shape {tuple(points.shape)}; [..., n, {axes}], "
            "one number an axis, is required."
        )
    eager = not isinstance(points, FakeTensor) and not torch.compiler.is_compiling()
    if points.device.type != "cpu" or not eager or not points.numel():
        return
    if not bool(points.isfinite().all()):
        raise PositionError(
            f"{name} holds NaN or infinity; finite coordinates are required. Give padding any finite place, and mask "
            "it out."
        )
    if extent is not None:
        _check_inside(points, torch.as_tensor(extent), name)


def _check_inside(points: Tensor, extent: Tensor, name: str) -> None:
    """Refuse points beyond the outer edges of a lattice."""
    sides = extent.unsqueeze(-2) if extent.ndim > 1 else extent
    fits = sides.shape[-1] == points.shape[-1] and sides.ndim <= points.ndim
    if not fits or not bool((sides > 0).all()):
        return  # a wrong extent has a message of its own
    slack = 1e-4  # coordinates computed in float32
    outside = (points < -0.5 - slack) | (points > sides - 0.5 + slack)
    if bool(outside.any()):
        worst = points[outside].tolist()[0]
        raise PositionError(
            f"{name} reach {worst:g}, outside a lattice of {extent.tolist()} cells, which ends half a cell around its "
            "centres; points inside are required. Clamp them, pass the sides of the whole lattice, or mask padding "
            "out with valid=."
        )


def blanked(values: Tensor, valid: Tensor) -> Tensor:
    """Return values `[..., n, k]` with zeros where `valid [..., n]` is False.

    Raises:
        PositionError: if valid is not boolean, or not one flag a token.
    """
    if valid.dtype != torch.bool or valid.shape != values.shape[:-1]:
        raise PositionError(
            f"valid is {valid.dtype} of shape {tuple(valid.shape)}; bool of shape {tuple(values.shape[:-1])}, True "
            "where there is a token, is required. Negate a padding mask."
        )
    return torch.where(valid.unsqueeze(-1), values, torch.zeros_like(values))
