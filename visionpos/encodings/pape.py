"""PaPE: parabolas of the coordinate difference, shaped by the query token, as extra channels of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import check_prefix
from visionpos.encodings.doors import Dims, Extending
from visionpos.encodings.sources import required_entry
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.places import check_points
from visionpos.geometry.points import check_floats
from visionpos.geometry.precision import full_precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class PapeSpec:
    """Settings of parabolic position encoding.

    Args:
        parabolas: how many a head; 50 in the paper. The rotation-invariant variant has one bowl a head.
        variant: "full" learns directions and both coefficients; "rotation_invariant" has a fixed scale a head and a
            learned height alone, so only Euclid's distance counts.
        channels: how the same bias is written. "parabolas": 3 M + 2 more channels (2 axes + 1 in the rotation-invariant
            variant), as the paper and the source's first form; "folded": axes ** 2 + axes + 1, 7 on a grid whatever M.
        axes: 2 (y, x) or 3 (t, y, x).

    Raises:
        PositionError: if a field is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["pape"] = "pape"
    parabolas: int = 50
    variant: Literal["full", "rotation_invariant"] = "full"
    channels: Literal["parabolas", "folded"] = "parabolas"
    axes: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("axes", self.axes, (2, 3))
        if self.parabolas < 1:
            raise PositionError(f"parabolas is {self.parabolas}; at least 1 is required.")


class Pape(Extending):
    """`-sum_m a_m (P_m d)^2 + sum_m b_m (P_m d)` for the difference d = query minus key, with a and b from the query.

    `a = softplus(W_a token)` and `b = W_b token` are read from the layer's input, P projects differences; one module a
    layer. The bias is multiplied, with q.k, by `scale`, the factor of the original head_dim: give it to attention,
    because the longer head's own would change both. Cells are numbered from 1 and prefix tokens stand at 0, as in the
    source; between patches only differences count (shift-relative). Memory grows as n, not n x n; the head is padded to
    a multiple of 8.

    Coordinates are multiplied in float32, but the channels get the dtype of q and k. In bfloat16 the squares of far
    cells drown near differences: at random weights on a 64 x 64 grid the logits of neighbours are off by up to 10,
    twice the bias that stands between them. Keep q and k in float32 there, or use `values`.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> pape = Pape(
        ...     PapeSpec(channels="folded"), Dims(embed_dim=16, num_heads=2, depth=1, prefix=1)
        ... )
        >>> q, k, tokens = torch.ones(1, 2, 16, 8), torch.ones(1, 2, 16, 8), torch.ones(1, 16, 16)
        >>> longer, _ = pape(q, k, tokens, Grid(3, 5), prefix=1)
        >>> longer.shape, round(pape.scale, 4)
        (torch.Size([1, 2, 16, 16]), 0.3536)

    Reference:
        PaPE (arXiv 2602.01418), DTU-PAS/parabolic-position-encoding pape/nn/positions. The source's later form adds
        axes ** 2 + 2 axes + 2 channels; "folded" merges two constants and two linear parts of it. Its option to
        normalise positions divides columns by the number of rows and is left out.
    """

    spec: PapeSpec

    def __init__(
        self, spec: PapeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        heads, axes = dims.num_heads, spec.axes
        full = spec.variant == "full"
        count = spec.parabolas if full else 1
        self.height = _uniform((heads, count, dims.embed_dim), dims.embed_dim, generator)
        self.slope = (
            _uniform((heads, count, dims.embed_dim), dims.embed_dim, generator) if full else None
        )
        shape = (heads, count, axes) if full else (heads,)
        self.projection = _uniform(shape, axes, generator)
        self.projection.requires_grad_(full)  # a fixed scale a head in the other variant

    def coefficients(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a, at least 0, and b (None in the rotation-invariant variant), `[b, num_heads, n, parabolas]`.

        Args:
            tokens: `[b, n, embed_dim]`, the input of the attention layer.
        """
        check_floats(tokens, "tokens")
        if tokens.ndim != 3 or tokens.shape[-1] != self.dims.embed_dim:
            raise PositionError(
                f"tokens have shape {tuple(tokens.shape)}; [b, n, {self.dims.embed_dim}] is required."
            )
        dtype = torch.promote_types(torch.float32, tokens.dtype)
        with full_precision(tokens.device):
            raised = torch.einsum("bnd,hmd->bhnm", tokens.to(dtype), self.height.to(dtype))
            sloped = (
                None
                if self.slope is None
                else torch.einsum("bnd,hmd->bhnm", tokens.to(dtype), self.slope.to(dtype))
            )
        return nn.functional.softplus(raised), sloped

    def values(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return `[b, num_heads, n, m]`, the bias before `scale`: it grows as n x m, for checks and small grids.

        Args:
            tokens: `[b, n, embed_dim]` of the queries.
            offsets: `[n, m, axes]`, query minus key, in cells.
        """
        check_points(offsets, self.spec.axes, "offsets")
        a, b = self.coefficients(tokens)
        if offsets.ndim != 3 or offsets.shape[0] != tokens.shape[1]:
            raise PositionError(
                f"offsets have shape {tuple(offsets.shape)} for tokens {tuple(tokens.shape)}; [n, m, "
                f"{self.spec.axes}], a row a token, is required."
            )
        across = self._projected(offsets.to(a.dtype))  # [heads, n, m, parabolas or axes]
        bowl = (a.unsqueeze(-2) * across.square()).sum(-1)
        return -bowl if b is None else (b.unsqueeze(-2) * across).sum(-1) - bowl

    def forward(
        self, q: Tensor, k: Tensor, tokens: Tensor, grid: Grid, *, prefix: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return q and k with the bias's channels, `[b, num_heads, prefix + n, head_dim + more]` in their dtypes.

        Args:
            q: `[b, num_heads, prefix + n, head_dim]`, not scaled.
            k: like q.
            tokens: `[b, prefix + n, embed_dim]`, the input of the attention layer.
            grid: lattice of the patches.
            prefix: leading tokens, which stand at coordinate 0.

        Raises:
            PositionError: if token counts disagree, prefix is negative, or the grid has other axes than the spec.
        """
        if (grid.frames > 1) and self.spec.axes == 2:
            raise PositionError(
                f"grid {grid.shape} (t, y, x) has frames and the spec 2 axes; they must agree. Set axes to 3."
            )
        check_prefix(prefix)
        if (q.ndim, k.ndim, tokens.ndim) != (4, 4, 3):
            raise PositionError(
                f"q, k and tokens have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(tokens.shape)}; [b, heads, "
                "n, head_dim] twice and [b, n, embed_dim] are required. Use unsqueeze(0) for one sample."
            )
        counts = (q.shape[-2], k.shape[-2], tokens.shape[-2])
        if any(count != prefix + grid.size for count in counts):
            raise PositionError(
                f"q, k and tokens have {counts} tokens; prefix {prefix} + grid {grid.shape} has "
                f"{prefix + grid.size}. Pass the grid of these tokens and their prefix."
            )
        dims, batch = self.dims, (tokens.shape[0],)
        sizes = (*batch, dims.num_heads, prefix + grid.size, dims.channels)
        if q.shape != sizes or k.shape != sizes or tokens.shape[-1] != dims.embed_dim:
            raise PositionError(
                f"q, k and tokens have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(tokens.shape)}; q and k of "
                f"[b, {dims.num_heads}, n, {dims.channels}] and tokens of [b, n, {dims.embed_dim}], one batch, are "
                "required. Repeat keys of fewer heads."
            )
        a, b = self.coefficients(tokens)
        points = coordinates(grid, CoordSpec(axes=self.spec.axes, offset=1.0), device=a.device)
        points = nn.functional.pad(points, (0, 0, prefix, 0))  # prefix tokens at 0
        # Only differences count: about the middle, squares are a quarter as large and rounded as little.
        points = (points - points.amax(0) / 2).to(a.dtype)
        parts = self._folded(a, b, points) if self.spec.channels == "folded" else None
        more_q, more_k = parts if parts is not None else self._parabolas(a, b, points)
        return _joined(q, more_q), _joined(k, more_k)

    def _projected(self, points: Tensor) -> Tensor:
        """Return `[num_heads, ..., parabolas]`, or the scaled axes in the rotation-invariant variant."""
        weight = self.projection.to(points.dtype)
        if weight.ndim == 1:
            return weight.view(-1, *[1] * points.ndim) * points
        return torch.einsum("...a,hma->h...m", points, weight)

    def _parabolas(self, a: Tensor, b: Tensor | None, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the paper's channels of q and k, `[b, heads, n, 3 M + 2]`."""
        across = self._projected(points).expand(a.shape[0], -1, -1, -1)  # [b, heads, n, M or axes]
        one = torch.ones_like(across[..., :1])
        square = -across.square()
        a = a.expand_as(across)
        q = [(a * square).sum(-1, keepdim=True), a, 2 * a * across]
        k = [one, square, across]
        if b is not None:
            q += [(b * across).sum(-1, keepdim=True), b]
            k += [one, -across]
        return torch.cat(q, -1), torch.cat(k, -1)

    def _folded(self, a: Tensor, b: Tensor | None, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same bias in `[b, heads, n, axes ** 2 + axes + 1]`: a constant, a square and a linear form."""
        weight = self.projection.to(a.dtype)
        if weight.ndim == 1:
            eye = torch.eye(points.shape[-1], dtype=a.dtype, device=a.device)
            bowl = (a * weight.square().view(-1, 1, 1)).unsqueeze(-1) * eye
        else:
            bowl = torch.einsum("bhnm,hmc,hmd->bhncd", a, weight, weight)
        pull = 2 * (bowl * points.unsqueeze(-2)).sum(-1)  # [b, heads, n, axes]
        level = -0.5 * (pull * points).sum(-1, keepdim=True)
        if b is not None:
            tilt = torch.einsum("bhnm,hmc->bhnc", b, weight)
            level = level + (tilt * points).sum(-1, keepdim=True)
            pull = pull - tilt
        square = (points.unsqueeze(-1) * points.unsqueeze(-2)).flatten(-2)
        k = torch.cat([torch.ones_like(points[:, :1]), square, points], -1)
        return torch.cat([level, -bowl.flatten(-2), pull], -1), k.expand(*a.shape[:2], -1, -1)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: PapeSpec, dims: Dims) -> Self:
        """Return a module with a source's weights.

        Args:
            state: state dict of one position encoder of the source: `ab.weight` and `position.weight`, or `a.weight`
                and `position_scales`. Its images count (x, y), which is turned to (y, x); its videos (t, y, x).
            spec: variant and parabolas of the source.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        module = cls(spec, dims)
        shape = module.height.shape
        if spec.variant == "full":
            both = required_entry(state, "ab.weight")
            columns = required_entry(state, "position.weight", ranks=(2,))
            turned = columns.flip(-1) if spec.axes == 2 else columns
            expected = (2 * shape[0] * shape[1], shape[2])
        else:
            both, turned = (
                required_entry(state, "a.weight"),
                required_entry(state, "position_scales"),
            )
            expected = (shape[0] * shape[1], shape[2])
        rows = spec.variant != "full" or turned.shape[-1] == spec.axes
        if tuple(both.shape) != expected or turned.numel() != module.projection.numel() or not rows:
            raise PositionError(
                f"state holds weights of shape {tuple(both.shape)} and {tuple(turned.shape)}; {dims.num_heads} heads, "
                f"{shape[1]} parabolas, {spec.axes} axes and embed_dim {dims.embed_dim} need {expected} and "
                f"{module.projection.numel()} numbers. Describe the source in the spec and the Dims."
            )
        halves = both.detach().clone().chunk(2 if module.slope is not None else 1)
        module.height = nn.Parameter(halves[0].reshape(shape))
        if module.slope is not None:
            module.slope = nn.Parameter(halves[1].reshape(shape))
        learned = module.projection.requires_grad
        numbers = turned.detach().clone().reshape(module.projection.shape)
        module.projection = nn.Parameter(numbers, requires_grad=learned)
        return module


def _uniform(
    shape: tuple[int, ...], fan_in: int, generator: torch.Generator | None
) -> nn.Parameter:
    """Return a weight with PyTorch's start values of a linear layer."""
    edge = fan_in**-0.5
    weight = torch.empty(shape)
    nn.init.uniform_(weight, -edge, edge, generator=generator)
    return nn.Parameter(weight)


def _joined(x: Tensor, more: Tensor) -> Tensor:
    """Return x with more channels, padded to a multiple of 8 as attention kernels like them."""
    width = x.shape[-1] + more.shape[-1]
    return nn.functional.pad(torch.cat([x, more.to(x.dtype)], -1), (0, -width % 8))
