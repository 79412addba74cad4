"""DAPE: a bias adapted by the logits it is added to, head mixing with head. v1 looks at one pair, v2 at neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.biasing import Biasing
from visionpos.encodings.doors import Dims, PairBiasing
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_logits, check_pair
from visionpos.geometry.precision import full_precision

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class DapeSpec:
    """Settings of an adapted bias.

    Args:
        base: the bias that is adapted, with the settings it has by itself; "none" adapts the logits alone.
        kernel: keys that the network looks at around a pair, odd: 1 in v1, 3 in v2. Beyond 1 what lies after the
            query is hidden from it first, as v2 does.
        hidden: width of the network; 32.

    Raises:
        PositionError: for an unknown base, an even kernel, or a width below 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["dape"] = "dape"
    base: Literal["none", "alibi", "kerple", "fire"] = "kerple"
    kernel: int = 1
    hidden: int = 32

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PositionError(
                f"kernel is {self.kernel}; an odd number of keys is required, so that the pair is in the middle."
            )
        if self.hidden < 1:
            raise PositionError(f"hidden is {self.hidden}; a width of at least 1 is required.")


class Dape(PairBiasing):
    """`B + f(A, B)` for logits A and a bias B: f is a network over the heads, of every pair; one layer's own.

    f runs from 2 num_heads numbers (num_heads without a base) to `hidden`, a leaky ReLU, and num_heads; with a kernel
    above 1 both layers also look at neighbouring keys, and keys after the query count as 0. It reads every logit, so no
    score function holds it: memory of `forward` is `hidden` n x m numbers a sample.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> dape = Dape(DapeSpec(base="alibi"), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> dape(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4), Grid(1, 5)).shape
        torch.Size([1, 2, 3, 5])

    Reference:
        DAPE (arXiv 2405.14722), DAPE v2 (arXiv 2410.04798); chuanyang-Zheng/DAPE DAPE.py and
        megatron/model/positional_embeddings.py. Deliberate difference: FIRE keeps its ReLU here, where DAPE's copy of
        it has a leaky one. A base of other settings is passed as a module.
    """

    spec: DapeSpec
    base: Biasing | None

    def __init__(
        self,
        spec: DapeSpec,
        dims: Dims,
        *,
        base: Biasing | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.base = self._own_base(generator) if base is None else base
        _check_base(self.base, dims.num_heads)
        inputs = dims.num_heads * (1 if self.base is None else 2)
        self.hidden = _blank_row(inputs, spec.hidden, spec.kernel)
        self.out = _blank_row(spec.hidden, dims.num_heads, spec.kernel)
        for layer in (self.hidden, self.out):  # PyTorch's own start, from the passed generator
            edge = (layer.in_channels * spec.kernel) ** -0.5
            for weight in layer.parameters():
                nn.init.uniform_(weight, -edge, edge, generator=generator)

    def _own_base(self, generator: torch.Generator | None) -> Biasing | None:
        """Return the base that the spec names."""
        if self.spec.base == "none":
            return None
        front: Any = import_module(
            "visionpos.encodings"
        )  # schemes know each other by the register alone
        kind = self.spec.base
        fields = {"reach": "query"} if kind == "fire" else {}
        drawn = {} if kind == "alibi" else {"generator": generator}  # ALiBi has nothing to draw
        scheme: Any = getattr(front, front.SCHEMES[kind][2])
        module: Biasing = scheme(front.spec_type(kind)(**fields), self.dims, **drawn)
        return module

    def of_logits(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Return `[b, num_heads, n, m]`, what is to be added to the logits.

        Args:
            logits: `[b, num_heads, n, m]`, scaled, finite: masks come after. Queries are the last n of m tokens.
            bias: `[num_heads, n, m]` of the base; None without one.

        Raises:
            PositionError: if the two have other heads or pairs, or there is a bias without a base, or none with one.
        """
        check_logits(logits, self.dims.num_heads)
        _check_bias(bias, None if self.base is None else logits)
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        n, m = logits.shape[-2:]
        seen = wide
        if bias is not None:
            seen = torch.cat([wide, bias.to(wide.dtype).expand_as(wide)], dim=1)
        if self.spec.kernel > 1:
            seen = seen.tril(m - n)
        with full_precision(wide.device):
            reached = nn.functional.leaky_relu(_across(seen, self.hidden))
            found = _across(reached, self.out)
        return (found if bias is None else found + bias).to(logits.dtype)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, m]`, to be added to scaled logits.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled: the last n tokens of the line.
            k: `[b, num_heads, m, head_dim]`.
            grid: the line of the m keys, `Grid(1, m)`; another grid is read row after row.

        Raises:
            PositionError: if q or k is no tokens of the grid.
        """
        check_grid(grid)
        sizes = self.dims.num_heads, self.dims.channels
        check_pair(q, k, sizes, grid.size)
        base = self.base
        bias = None if base is None else base.along(q.shape[-2], grid.size, device=q.device)
        return self.of_logits((q @ k.mT) * self.scale, bias)


def _check_base(base: object, heads: int) -> None:
    """Refuse what is no bias of these heads."""
    if base is None or (isinstance(base, Biasing) and base.dims.num_heads == heads):
        return
    what = type(base).__name__
    if isinstance(base, Biasing):
        what = f"{what} of {base.dims.num_heads} heads"
    raise PositionError(
        f"base is {what}; a bias of differences with {heads} heads is required, as the network mixes them. Build "
        "ALiBi, KERPLE, FIRE, T5 or Sandwich with the same Dims."
    )


def _check_bias(bias: Tensor | None, logits: Tensor | None) -> None:
    """Refuse a bias that is not one number a head and pair of logits; None stands for no base."""
    found = None if bias is None else tuple(bias.shape)
    needed = None if logits is None else tuple(logits.shape[1:])
    if found != needed:
        raise PositionError(
            f"bias has shape {found}; {needed} is required, that of the base for these logits. Make it with "
            "base.along(n, m), and pass None without a base."
        )


def _blank_row(inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
    """Return a convolution along keys whose start values are left to the caller."""
    sides = {"kernel_size": (1, kernel), "padding": (0, kernel // 2)}
    layer = nn.Conv2d(inputs, outputs, **sides, device="meta")  # type: ignore[arg-type]
    return layer.to_empty(device=torch.get_default_device())


def _across(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """Return a convolution along keys in the dtype of x."""
    bias: Tensor | None = layer.bias
    return nn.functional.conv2d(
        x,
        layer.weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        padding=(0, layer.kernel_size[1] // 2),
    )
