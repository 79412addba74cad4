"""Blocks: turns of more than two channels at once, for schemes that no table of cosines and sines can hold.

Rotation matrices, or a basis and the rotation inside it, enter with q or k; the turned tensor leaves. Both turns have
the face of a `Rotation`: `n`, `padded`, `select` and `apply`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.kept import picked
from visionpos.geometry.precision import full_precision
from visionpos.geometry.ranges import check_exempt
from visionpos.geometry.turned import check_turned

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.rotation import Rotation


def skew(entries: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices from the entries above their diagonal.

    Args:
        entries: `[..., size * (size - 1) / 2]`, row by row.
        size: rows and columns.

    Returns:
        `[..., size, size]`, entry (i, j) above the diagonal and minus it below.

    Raises:
        PositionError: if the count of entries does not fit the size.

    Example:
        >>> skew(torch.tensor([1.0, 2.0, 3.0]), 3)
        tensor([[ 0.,  1.,  2.],
                [-1.,  0.,  3.],
                [-2., -3.,  0.]])
    """
    if size < 2 or entries.shape[-1] != size * (size - 1) // 2:
        raise PositionError(
            f"entries are {entries.shape[-1]} for size {size}; a size of at least 2 and its {size * (size - 1) // 2} "
            "entries above the diagonal are required."
        )
    place = torch.arange(size, device=entries.device)
    rows, columns = place.unsqueeze(1), place.unsqueeze(0)
    low, high = torch.minimum(rows, columns), torch.maximum(rows, columns)
    index = (low * (2 * size - low - 1) // 2 + high - low - 1).clamp(min=0)
    full: Tensor = entries.index_select(-1, index.flatten())
    matrices: Tensor = full.unflatten(-1, (size, size)) * (columns - rows).sign()
    return matrices


def exponential(generators: Tensor) -> Tensor:
    """Return the matrix exponential of `[..., size, size]` generators, in float32 or better, whatever autocast says.

    A skew-symmetric generator gives a rotation.
    """
    dtype = torch.promote_types(generators.dtype, torch.float32)
    with full_precision(generators.device):
        turned: Tensor = torch.linalg.matrix_exp(generators.to(dtype))
    return turned


def cayley(generators: Tensor) -> Tensor:
    """Return the orthogonal matrices `(1 - S)(1 + S)^-1` of skew-symmetric `[..., size, size]` S, float32 or better."""
    dtype = torch.promote_types(generators.dtype, torch.float32)
    s = generators.to(dtype)
    eye = torch.eye(s.shape[-1], dtype=dtype, device=s.device)
    # 1 - S and 1 + S commute, so the inverse may stand on the left.
    basis: Tensor = torch.linalg.solve(eye + s, eye - s)
    return basis


def real_fourier_basis(block: int, blocks: int, *, device: torch.device | None = None) -> Tensor:
    """Return the orthonormal waves of cyclic blocks, as columns that pair up cosine and sine.

    Args:
        block: channels of a block, at least 1.
        blocks: how many blocks stand side by side.
        device: where to build.

    Returns:
        `[block * blocks, block * blocks]` float64: columns 2k, 2k + 1 are cosine and sine of one number of cycles in
        one block, block by block; then the waves without a partner: constant, and alternating in even blocks.

    Example:
        >>> basis = real_fourier_basis(6, 2)
        >>> torch.allclose(basis.T @ basis, torch.eye(12).double())
        True
    """
    place = torch.arange(block, dtype=torch.float64, device=device)
    cycles = torch.arange(1, (block + 1) // 2, dtype=torch.float64, device=device)
    turns = place.unsqueeze(1) * cycles * (2 * torch.pi / block)
    paired = torch.stack([turns.cos(), turns.sin()], dim=-1).flatten(1) * (2 / block) ** 0.5
    single = [torch.ones_like(place), 1 - 2 * (place % 2)][: 2 - block % 2]
    alone = torch.stack(single, dim=-1) / block**0.5
    eye = torch.eye(blocks, dtype=torch.float64, device=device)
    return torch.cat([torch.kron(eye, paired), torch.kron(eye, alone)], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTurn:
    """One matrix a token and block of neighbouring channels.

    Args:
        matrices: `[..., n, blocks, size, size]`; leading sizes broadcast against batch and heads. Their memory is
            `n * head_dim * size` numbers a head, against `n * head_dim` of a Rotation.
    """

    matrices: Tensor

    def __post_init__(self) -> None:
        if self.matrices.ndim < 4 or self.matrices.shape[-1] != self.matrices.shape[-2]:
            raise PositionError(
                f"matrices have shape {tuple(self.matrices.shape)}; [..., n, blocks, size, size] is required."
            )

    @property
    def n(self) -> int:
        """Return the number of tokens."""
        return self.matrices.shape[-4]

    def select(self, indices: Tensor) -> BlockTurn:
        """Return the turn of the kept tokens, `[kept]` or `[b, kept]`; errors as in `Rotation.select`."""
        return BlockTurn(picked(self.matrices, indices, own=4))

    def padded(self, prefix: int = 0, suffix: int = 0) -> BlockTurn:
        """Return the turn with tokens that do not turn before and after."""
        check_exempt(prefix, suffix)
        if not prefix and not suffix:
            return self
        size = self.matrices.shape[-1]
        eye = torch.eye(size, dtype=self.matrices.dtype, device=self.matrices.device)
        shape = list(self.matrices.shape)
        still = [
            eye.expand(*shape[:-4], count, *shape[-3:])
            for count in (prefix, suffix)  # [..., count, blocks, size, size]
        ]
        return BlockTurn(torch.cat([still[0], self.matrices, still[1]], dim=-4))

    def apply(self, x: Tensor, *, prefix: int = 0, suffix: int = 0) -> Tensor:
        """Return `x` with every block of channels turned.

        Args:
            x: `[b, heads, n, head_dim]`, not changed; channels beyond the blocks pass through.
            prefix: leading tokens that do not turn.
            suffix: trailing tokens that do not turn.

        Returns:
            Shape and dtype of x; the arithmetic runs in float32 or better, whatever autocast says.

        Raises:
            PositionError: if tokens or channels do not fit.
        """
        blocks, size = self.matrices.shape[-3:-1]
        turned = int(blocks * size)
        check_turned(x, self.matrices.shape[:-4], self.matrices.device)
        _check_fit(x, self.n, turned, prefix, suffix)
        moved = self.padded(prefix, suffix).matrices
        dtype = torch.promote_types(x.dtype, moved.dtype)
        columns = x[..., :turned].to(dtype).unflatten(-1, (blocks, size)).unsqueeze(-1)
        with full_precision(x.device):
            out = (moved.to(dtype) @ columns).squeeze(-1).flatten(-2).to(x.dtype)
        return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class BasisTurn:
    """A Rotation that turns planes of another basis: `x -> basis R basis^T x`.

    Args:
        rotation: turns the coordinates of x in the basis.
        basis: `[heads, head_dim, head_dim]` or `[head_dim, head_dim]`, orthogonal; its columns are the new directions.
    """

    rotation: Rotation
    basis: Tensor

    @property
    def n(self) -> int:
        """Return the number of tokens."""
        return self.rotation.n

    def select(self, indices: Tensor) -> BasisTurn:
        """Return the turn of the kept tokens, `[kept]` or `[b, kept]`."""
        return BasisTurn(self.rotation.select(indices), self.basis)

    def padded(self, prefix: int = 0, suffix: int = 0) -> BasisTurn:
        """Return the turn with tokens that do not turn before and after."""
        return BasisTurn(self.rotation.padded(prefix, suffix), self.basis)

    def apply(self, x: Tensor, *, prefix: int = 0, suffix: int = 0) -> Tensor:
        """Return `x` turned; arguments, result and errors as in `BlockTurn.apply`."""
        turned = int(self.basis.shape[-1])
        self.rotation.check_lead(x)
        check_turned(x, self.basis.shape[:-2], self.basis.device)
        _check_fit(x, self.n, turned, prefix, suffix)
        dtype = torch.promote_types(x.dtype, self.basis.dtype)
        head, basis = x[..., :turned].to(dtype), self.basis.to(dtype)
        with full_precision(x.device):
            inside = head @ basis
            moved = self.rotation.apply(inside, prefix=prefix, suffix=suffix)
            # x + basis (moved - inside), so that tokens that do not turn keep every bit.
            out = (head + (moved - inside) @ basis.mT).to(x.dtype)
        return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)


def _check_fit(x: Tensor, n: int, turned: int, prefix: int, suffix: int) -> None:
    check_exempt(prefix, suffix)
    if x.shape[-2] != n + prefix + suffix:
        raise PositionError(
            f"x has {x.shape[-2]} tokens, the turn {n} and prefix + suffix is {prefix + suffix}; tokens must be turn + "
            "prefix + suffix. Pass the prefix count of the model, or select() kept tokens."
        )
    if x.shape[-1] < turned:
        raise PositionError(
            f"x has {x.shape[-1]} channels a head and the turn takes {turned}; at most head_dim can turn. Build the "
            "encoding with this head_dim."
        )
