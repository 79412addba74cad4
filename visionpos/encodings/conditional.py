"""Conditional encoding (PEG): a depthwise convolution over the token map makes position out of its zero border.

CPVT, Twins, CoaT, DaViT, FastViT and CSATv2 are the same function by options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Conditional, Dims
from visionpos.encodings.guard import check_dtype
from visionpos.encodings.sources import checked_state, filled
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.ranges import is_integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid

Before = Literal["stage", "block", "branch", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PegSpec:
    """Settings of a conditional encoding, and where in the model it stands: `after` some blocks, or `before` some.

    Args:
        kernel: side of the convolution, odd: 3 (CPVT, Twins), 7 (FastViT), 27 (a variant of the CPVT paper).
        after: the blocks it follows, one convolution each: (0,) or (0, 1, 2, 3, 4) in CPVT; "stage": the first block
            of the stage that these Dims describe (Twins).
        before: what it precedes, with `after` None: "stage" the stage's blocks, once (FastViT); "block" every block,
            one convolution shared by all (CoaT); "branch" every attention, inside its residual branch (CSATv2);
            "layer" every attention and every MLP, one convolution each (DaViT).
        residual: whether the tokens are added to the convolution's output; False where the identity is folded into the
            kernel (FastViT after reparameterisation), see `Peg.folded`.
        activation: "gelu" on the convolution's output (a DaViT option), or "none".
        bias: whether the convolution has a bias.
        padding: "zeros", from which position comes; "circular" has no border, so the output cannot tell where a token
            is.

    Raises:
        PositionError: if the kernel is even or below 1, not exactly one of after and before is given, or a choice is
            unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["peg"] = "peg"
    kernel: int = 3
    after: tuple[int, ...] | Literal["stage"] | None = (0,)
    before: Before | None = None
    residual: bool = True
    activation: Literal["none", "gelu"] = "none"
    bias: bool = True
    padding: Literal["zeros", "circular"] = "zeros"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PositionError(
                f"kernel is {self.kernel}; an odd side of at least 1 is required, so that it has a centre."
            )
        if (self.after is None) == (self.before is None):
            raise PositionError(
                f"after is {self.after!r} and before {self.before!r}; exactly one of the two is required. Set "
                "the other to None."
            )
        if isinstance(self.after, tuple) and (
            not self.after or min(self.after) < 0 or list(self.after) != sorted(set(self.after))
        ):
            raise PositionError(
                f"after is {self.after}; block indices from 0, rising, each once, are required."
            )

    def slots(self, depth: int) -> int:
        """Return how many convolutions a model of `depth` blocks has."""
        if isinstance(self.after, tuple):
            return len(self.after)
        return {"branch": depth, "layer": 2 * depth}.get(self.before or "", 1)


class Peg(Conditional):
    """Depthwise convolutions over the token map, one a place; call slot i at the i-th place.

    The bias and kernel act alike everywhere; only the zero border tells a corner from an edge from the inside, so with
    one 3x3 convolution a token learns whether it is at the border, and deeper layers carry that inwards. Not
    shift-relative, and no coordinates enter: any grid, any aspect. Frames of a clip are convolved one by one.

    Raises:
        PositionError: if `after` names a block that the model does not have.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> peg = Peg(PegSpec(), Dims(embed_dim=8, num_heads=1, depth=12, prefix=1))
        >>> peg(torch.zeros(2, 1 + 15, 8), Grid(3, 5)).shape
        torch.Size([2, 16, 8])

    Reference:
        CPVT (arXiv 2102.10882; its repository holds no code), Meituan-AutoML/Twins gvt.py, timm twins, coat, davit,
        fastvit and csatv2. Start values: normal of variance 2 / kernel^2, bias 0 (Twins). Deliberate differences:
        tokens `[b, n, d]` where some sources take maps, any prefix, nothing is added in place.
    """

    spec: PegSpec

    def __init__(
        self, spec: PegSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if isinstance(spec.after, tuple) and spec.after[-1] >= dims.depth:
            raise PositionError(
                f"after is {spec.after} and the model has {dims.depth} blocks; indices below depth are required."
            )
        self.convs = nn.ModuleList(
            nn.Conv2d(
                dims.embed_dim,
                dims.embed_dim,
                spec.kernel,
                padding=spec.kernel // 2,
                groups=dims.embed_dim,
                bias=spec.bias,
                padding_mode=spec.padding,
            )
            for _ in range(spec.slots(dims.depth))
        )
        for key, weight in self.named_parameters():
            if key.endswith("bias"):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=math.sqrt(2.0) / spec.kernel, generator=generator)

    def forward(
        self, tokens: Tensor, grid: Grid, *, slot: int = 0, masked: Tensor | None = None
    ) -> Tensor:
        """Return tokens with position mixed in; prefix and suffix tokens pass unchanged.

        Args:
            tokens: `[b, prefix + n + suffix, embed_dim]`, row-major.
            grid: the lattice of the n tokens.
            slot: which of the convolutions: the i-th place that the spec names, counted from 0.
            masked: `[b, n]` bool, True where a token's content is hidden. It is zeroed before the convolution, so it
                cannot leak into its neighbours; the token itself stays what it was, plus what its neighbours say.

        Returns:
            `[b, prefix + n + suffix, embed_dim]`, a new tensor.

        Raises:
            PositionError: if tokens and grid disagree, there is no such slot, mask and tokens disagree, or a circular
                border is wider than the grid.
        """
        self._check(tokens, grid, slot, masked)
        prefix, end = self.dims.prefix, self.dims.prefix + grid.size
        patches = tokens[:, prefix:end]
        seen = patches if masked is None else patches.masked_fill(masked.unsqueeze(-1), 0.0)
        rows = seen.unflatten(1, grid.shape).flatten(0, 1)  # [b * t, h, w, d]
        moved: Tensor = self.convs[slot](rows.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if self.spec.activation == "gelu":
            moved = nn.functional.gelu(moved)
        moved = moved.reshape(patches.shape)
        if self.spec.residual:
            moved = patches + moved
        if prefix or self.dims.suffix:
            return torch.cat([tokens[:, :prefix], moved, tokens[:, end:]], dim=1)
        return moved

    def _check(self, tokens: Tensor, grid: Grid, slot: int, masked: Tensor | None) -> None:
        spec, dims = self.spec, self.dims
        exempt = dims.prefix + dims.suffix
        if tokens.ndim != 3 or tokens.shape[1:] != (exempt + grid.size, dims.embed_dim):
            raise PositionError(
                f"tokens have shape {tuple(tokens.shape)}; [b, {exempt} + {grid.size}, {dims.embed_dim}] is required "
                f"for grid {grid.shape}. Pass the grid of these tokens."
            )
        check_dtype(tokens, self.convs, "tokens")
        if not is_integer(slot) or not 0 <= slot < len(self.convs):
            raise PositionError(
                f"slot is {slot!r}; the encoding has {len(self.convs)}, counted from 0."
            )
        flags = isinstance(masked, torch.Tensor) and masked.dtype == torch.bool
        if masked is not None and not (flags and masked.shape == (tokens.shape[0], grid.size)):
            what = (
                f"{masked.dtype} of shape {tuple(masked.shape)}"
                if hasattr(masked, "dtype")
                else masked
            )
            raise PositionError(
                f"masked is {what}; bool [{tokens.shape[0]}, {grid.size}] is "
                "required, True where a token is hidden, without prefix."
            )
        if spec.padding == "circular" and spec.kernel // 2 > min(grid.height, grid.width):
            raise PositionError(
                f"kernel {spec.kernel} reaches {spec.kernel // 2} cells around a grid of {grid.shape}; a circular "
                "border goes round once at most. Use padding='zeros', or a smaller kernel."
            )

    def folded(self) -> Peg:
        """Return the same function with the identity inside the kernel: one convolution, no addition (FastViT).

        Raises:
            PositionError: if there is no residual to fold, or an activation stands between.
        """
        spec = self.spec
        if not spec.residual or spec.activation != "none":
            raise PositionError(
                f"residual is {spec.residual} and activation {spec.activation!r}; a residual without activation is "
                "required, nothing else can be folded into a kernel."
            )
        state = {key: value.clone() for key, value in self.state_dict().items()}
        for key, value in state.items():
            if key.endswith("weight"):
                value[..., spec.kernel // 2, spec.kernel // 2] += 1.0
        return filled(Peg(replace(spec, residual=False), self.dims), state, source="itself")

    @classmethod
    def from_timm(cls, state: Mapping[str, Tensor], spec: PegSpec, dims: Dims) -> Peg:
        """Return the encoding with a source's weights.

        Args:
            state: the entries of its PEG modules in the order of their places, as `pos_block.i.proj.0.{weight,bias}`
                (Twins), `cpe1.proj.*` (CoaT, DaViT), `pos_emb.pos_enc.*` or `pos_emb.reparam_conv.*` (FastViT),
                `pos_embed.proj.*` (CSATv2). A stage has an encoding of its own: pass the entries of one width.
            spec: the filling; residual False for `reparam_conv`, whose kernel holds the identity.
            dims: sizes of the stage.

        Raises:
            PositionError: if entries are missing, too many, of another shape, or `reparam_conv` meets a residual.
        """
        stems = list(dict.fromkeys(key.rpartition(".")[0] for key in checked_state(state)))
        fused = [stem for stem in stems if stem.endswith("reparam_conv")]
        if fused and spec.residual:
            raise PositionError(
                f"{fused[0]} holds the identity in its kernel and residual is True; the tokens would be added twice. "
                "Set residual=False."
            )
        own = {}
        for key, value in state.items():
            stem, _, leaf = key.rpartition(".")
            own[f"convs.{stems.index(stem)}.{leaf}"] = value
        return filled(cls(spec, dims), own, source="timm")
