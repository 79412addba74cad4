"""The doors by which position enters a model, as abstract modules, and the sizes of the model they serve.

A final encoding is a frozen Spec and one module that implements one door; the class of a module says where it enters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visionpos.encodings.additive import Additive, blanked, check_device, check_points
from visionpos.encodings.biasing import Biasing, Extending, QueryBiasing
from visionpos.encodings.guard import Guarded
from visionpos.encodings.rotary import Rotary, Turning
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid
    from visionpos.kernels.lookup import Lookup

__all__ = [
    "Additive",
    "Biasing",
    "Conditional",
    "Dims",
    "Extending",
    "PairBiasing",
    "QueryBiasing",
    "Rotary",
    "Turning",
    "blanked",
    "check_device",
    "check_points",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The sizes of the transformer that an encoding serves.

    Args:
        embed_dim: width of a token.
        num_heads: attention heads.
        depth: layers.
        prefix: leading tokens without position (class token, registers).
        head_dim: channels of a head; embed_dim / num_heads when None.
        suffix: trailing tokens without position (Llama 4's class token, SAM 2's object pointers).

    Raises:
        PositionError: if a size is below 1, or embed_dim is not divisible by num_heads.

    Example:
        >>> Dims(embed_dim=384, num_heads=6, depth=12, prefix=1).channels
        64
    """

    embed_dim: int
    num_heads: int
    depth: int
    prefix: int = 0
    head_dim: int | None = None
    suffix: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = (
            self.embed_dim,
            self.num_heads,
            self.depth,
            1 if self.head_dim is None else self.head_dim,
        )
        if min(sizes) < 1 or self.prefix < 0:
            raise PositionError(
                f"Dims are {sizes} with prefix {self.prefix}; sizes of at least 1 and a prefix of at least 0 are "
                "required."
            )
        if self.suffix < 0:
            raise PositionError(f"suffix is {self.suffix}; a count of at least 0 is required.")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise PositionError(
                f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}; whole heads are required. "
                "Pass head_dim if the attention has its own."
            )

    @property
    def channels(self) -> int:
        """Return the channels of a head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim


class Conditional(Guarded, ABC):
    """An encoding that makes position out of the tokens themselves, between blocks."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Return tokens `[b, prefix + n, embed_dim]` with position mixed in; prefix tokens pass unchanged."""


class PairBiasing(Guarded, ABC):
    """An encoding that adds to attention logits what a query, a key and their places say together.

    `forward` returns the bias of logits that are scaled by `scale`. Tokens are a line: those of a grid, row after row.
    """

    spec: Any
    dims: Dims

    @property
    def scale(self) -> float:
        """Return the factor on q.k that attention must be given."""
        return float(self.dims.channels**-0.5)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, m]` for k of the m tokens of a grid and q of its last n."""

    def lookups(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Lookup, ...]:  # noqa: ARG002 (those of a table)
        """Return the bias as products with tables of differences, where it is one.

        Raises:
            PositionError: if it is none.
        """
        raise PositionError(
            f"encoding is {type(self).__name__}, whose bias of a pair needs more than products with a table of "
            "differences; no score function holds it. Add what forward(q, k, grid) returns to the logits."
        )
