"""The door "add": an encoding that gives every token a vector; and the checks of devices and points it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from visionpos.encodings.guard import Guarded, check_home
from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid
from visionpos.geometry.places import check_points
from visionpos.geometry.points import check_floats
from visionpos.geometry.ranges import is_integer

__all__ = ["Additive", "blanked", "check_device", "check_points"]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from visionpos.encodings.doors import Dims
    from visionpos.geometry.grid import Grid


class Additive(Guarded, ABC):
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
        for grid in _listed(grids):
            check_grid(grid, "grids")
        longest = max((grid.size for grid in grids), default=0)
        rows = longest if length is None else length
        if not grids or not is_integer(rows) or rows < longest:
            raise PositionError(
                f"length is {rows!r} for {len(grids)} grids of up to {longest} tokens; at least one grid, and room for "
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
        check_floats(tokens, "tokens")
        check_floats(code, "code")
        fits = tokens.ndim == 3 and code.ndim in (2, 3) and is_integer(prefix) and prefix >= 0
        fits = fits and (code.ndim == 2 or code.shape[0] in (1, tokens.shape[0]))
        if not fits or tuple(code.shape[-2:]) != (tokens.shape[1] - prefix, tokens.shape[2]):
            raise PositionError(
                f"code has shape {tuple(code.shape)} for tokens {tuple(tokens.shape)} with prefix {prefix!r}; "
                "[n, embed_dim] for tokens [b, prefix + n, embed_dim] is required. Build it for the grid of "
                "these tokens."
            )
        return tokens + F.pad(code.to(tokens.dtype), (0, 0, prefix, 0))


def _listed(grids: Any) -> Any:
    """Return grids that can be counted and gone through, or refuse."""
    if not isinstance(grids, (list, tuple)):
        raise PositionError(
            f"grids is {grids!r}; a list of Grids, one a sample, is required. Write [grid] for a single one."
        )
    return grids


def check_device(weight: Tensor, device: torch.device | None) -> None:
    """Refuse a device other than that of a learned part: nothing is moved behind the caller's back.

    Raises:
        PositionError: naming both; "cuda" without an index is any CUDA device.
    """
    check_home(weight, device, "the table is")


def blanked(values: Tensor, valid: Any) -> Tensor:
    """Return values `[..., n, k]` with zeros where `valid [..., n]` is False.

    Raises:
        PositionError: if valid is not boolean, or not one flag a token.
    """
    flags = isinstance(valid, torch.Tensor) and valid.dtype == torch.bool
    if not flags or valid.shape != values.shape[:-1]:
        what = f"{valid.dtype} of shape {tuple(valid.shape)}" if hasattr(valid, "dtype") else valid
        raise PositionError(
            f"valid is {what}; bool of shape {tuple(values.shape[:-1])}, True "
            "where there is a token, is required. Negate a padding mask."
        )
    return torch.where(valid.unsqueeze(-1), values, torch.zeros_like(values))
