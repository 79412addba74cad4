"""Attachment: one encoding on a model, and the small hooks through which it acts.

State belongs to the call: the patch embedding opens a Call, each block finds the Call of its input tensor, q and k
are turned by that Call's rotation. Recomputation under checkpointing passes the same input tensor and so finds the
same Call. Hooks hold the Attachment, a submodule of the model, so that deepcopy and pickle carry the pair along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.attention import turn
from visionpos.encodings import Additive, Encoding, Rotary
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.seams import PortSeams


class Call:
    """What one forward pass knows: its grid, where its tokens are, and which of them were kept."""

    def __init__(self, grid: Grid, coords: Tensor | None, task: int) -> None:
        self.grid = grid
        self.coords = coords  # [n, axes], or [draws, n, axes]
        self.kept: Tensor | None = None  # [b, kept] after patch dropout
        self.task = task
        self.rotation: Rotation | None = None  # shared by the layers, where nothing learns

    @property
    def tokens(self) -> int:
        """Return the patch tokens that reach the blocks."""
        return self.grid.size if self.kept is None else int(self.kept.shape[-1])


class _Relay:
    """The call in progress. It is never copied: a copy of the model starts without one."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.generator: torch.Generator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Relay:
        return _Relay()

    def __reduce__(self) -> tuple[type[_Relay], tuple[()]]:
        return (_Relay, ())


class Attachment(nn.Module):
    """An encoding that sits on a model as the submodule `visionpos.<name>`.

    Args:
        encoding: the module that knows positions.
        strength: 0 leaves the model's outputs bit-identical, 1 is full; angles and added vectors are scaled by it.
        learn: make the strength a learned parameter that starts at this value.
        generator: source of training-time coordinate draws; torch's default when None. Copies of the model use the
            default.
    """

    learned_strength: nn.Parameter | None

    def __init__(
        self,
        encoding: Encoding,
        *,
        strength: float,
        learn: bool,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.constant = _checked(strength)
        self.learned_strength = nn.Parameter(torch.tensor(self.constant)) if learn else None
        self.relay = _Relay()
        self.relay.generator = generator

    @property
    def strength(self) -> Tensor | float:
        """Return the strength: a number, or the learned parameter."""
        return self.constant if self.learned_strength is None else self.learned_strength

    def set_strength(self, strength: float) -> None:
        """Set the strength, in place if it is learned.

        Raises:
            PositionError: if it is not a finite number.
        """
        value = _checked(strength)
        if self.learned_strength is None:
            self.constant = value
        else:
            with torch.no_grad():
                self.learned_strength.fill_(value)

    @property
    def idle(self) -> bool:
        """Return whether the attachment leaves the model alone: a constant strength of 0."""
        return self.learned_strength is None and self.constant == 0.0

    def open(self, grid: Grid, like: Tensor) -> None:
        """Begin a forward pass over a grid.

        Args:
            grid: tokens of this pass.
            like: `[b, ...]` patch tokens; their batch and device are used.
        """
        coords = None
        if isinstance(self.encoding, Rotary):
            scope = self.encoding.coords.scope if self.training else "forward"
            draws = {"forward": None, "block": self.encoding.dims.depth, "sample": like.shape[0]}[
                scope
            ]
            coords = self.encoding.points(
                grid, device=like.device, generator=self.relay.generator, draws=draws
            )
        self.relay.call = Call(grid, coords, graph_task())

    def rotation(self, call: Call, layer: int, prefix: int) -> Rotation:
        """Return the rotation of all tokens of one layer, prefix tokens standing still."""
        if call.rotation is not None:
            return call.rotation
        if not isinstance(self.encoding, Rotary) or call.coords is None:
            raise PositionError(
                f"encoding {type(self.encoding).__name__} gives no rotation; attach a rotary spec."
            )
        per_block = self.training and self.encoding.coords.scope == "block" and call.coords.ndim > 2
        coords = call.coords[layer] if per_block else call.coords
        turns = self.encoding.angles(coords, layer)  # [(b,) (heads,) n, pairs]
        if coords.ndim > 2 and turns.ndim == 3:
            turns = turns.unsqueeze(1)  # one draw a sample: [b, 1, n, pairs]
        if self.learned_strength is not None or self.constant != 1.0:
            turns = turns * self.strength
        rotation = Rotation.of(turns, self.encoding.pairing)
        rotation = rotation if call.kept is None else rotation.select(call.kept)
        rotation = rotation.padded(prefix)
        # A rotation that learns is formed in every block, so that checkpointing recomputes it there.
        if not self.encoding.layerwise and not per_block and not turns.requires_grad:
            call.rotation = rotation
        return rotation

    def added(self, grid: Grid, tokens: Tensor) -> Tensor:
        """Return patch tokens `[b, n, d]` or `[b, y, x, d]` with the encoding's vectors added."""
        if not isinstance(self.encoding, Additive):
            return tokens
        rows: Tensor = self.encoding(grid, device=tokens.device)
        rows = rows if tokens.ndim == 3 else rows.unflatten(0, tokens.shape[1:3])
        moved: Tensor = tokens + (rows * self.strength).to(tokens.dtype)
        return moved


class GridHook:
    """After patch_embed: opens the call, and adds what an additive encoding gives."""

    def __init__(self, owner: Attachment) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Return the patch tokens with the encoding added, or None to leave them."""
        if self.owner.idle:
            return None
        grid = Grid(*module.dynamic_feat_size(args[0].shape[-2:]))
        if isinstance(self.owner.encoding, Additive):
            return self.owner.added(grid, output)
        self.owner.open(grid, output)
        return None


class DropHook:
    """After a patch dropout that returns indices: records which tokens were kept."""

    def __init__(self, owner: Attachment) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Record `output[1]`, the kept indices."""
        call = self.owner.relay.call
        if not self.owner.idle and call is not None:
            call.kept = output[1]


class BlockHooks:
    """Around a block: finds the call of the block's input, and hands it on with the output."""

    def __init__(self, owner: Attachment, name: str, layer: int) -> None:
        self.owner, self.layer = owner, layer
        self.tag = f"_visionpos_{name}"
        self.relay = _BlockRelay()

    def enter(self, x: Tensor) -> None:
        """Find the call of the block's input and form this layer's rotation."""
        if self.owner.idle:
            return
        call = self.owner.relay.call if torch.compiler.is_compiling() else self._call_of(x)
        if call is None:
            raise PositionError(
                "a block ran before patch_embed, so its grid is unknown; run the whole model, or detach the encoding."
            )
        prefix = x.shape[1] - call.tokens
        if prefix < 0:
            raise PositionError(
                f"block {self.layer} got {x.shape[1]} tokens for a grid of {call.tokens}; tokens were dropped or "
                "merged "
                "between patch_embed and the block. Use patch_drop_rate, whose kept indices are followed."
            )
        self.relay.rotation = self.owner.rotation(call, self.layer, prefix)
        self.relay.task = graph_task()
        if not torch.compiler.is_compiling():
            setattr(x, self.tag, call)

    def leave(self, x: Tensor, output: Any) -> None:
        """Tag the output with the call, so that a checkpointed run of several blocks finds it."""
        self.relay.rotation = None
        if self.owner.idle or torch.compiler.is_compiling():
            return
        call = getattr(x, self.tag, None)
        if call is not None and isinstance(output, torch.Tensor):
            setattr(output, self.tag, call)

    def _call_of(self, x: Tensor) -> Call | None:
        """Return the call that this tensor belongs to; in a backward pass never another one."""
        call: Call | None = getattr(x, self.tag, None)
        if call is not None:
            return call
        latest = self.owner.relay.call
        if latest is not None and latest.task != graph_task():
            raise PositionError(
                f"block {self.layer} is recomputed in a backward pass on a copy of its input, so its grid is unknown "
                "(re-entrant checkpointing). Use checkpoint(block, x, use_reentrant=False)."
            )
        return latest


class _BlockRelay:
    """The rotation that one block is using right now; never copied."""

    def __init__(self) -> None:
        self.rotation: Rotation | None = None
        self.task = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> _BlockRelay:
        return _BlockRelay()

    def __reduce__(self) -> tuple[type[_BlockRelay], tuple[()]]:
        return (_BlockRelay, ())


class EnterHook:
    """Forward pre-hook face of BlockHooks: a module-level class, so that models pickle."""

    def __init__(self, block: BlockHooks) -> None:
        self.block, self.owner = block, block.owner

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:  # noqa: ARG002 (torch's signature)
        """Prepare the block for its input."""
        self.block.enter(args[0])


class LeaveHook:
    """Forward hook face of BlockHooks."""

    def __init__(self, block: BlockHooks) -> None:
        self.block, self.owner = block, block.owner

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Hand the call on with the block's output."""
        self.block.leave(args[0], output)


class TurnHook:
    """After q_norm or k_norm: turns q or k by the rotation of the block it is in."""

    def __init__(self, block: BlockHooks, seams: PortSeams) -> None:
        self.block, self.owner, self.layout = block, block.owner, seams.layout

    def __call__(  # torch's signature
        self,
        module: Any,  # noqa: ARG002
        args: tuple[Tensor, ...],  # noqa: ARG002
        output: Tensor,
    ) -> Tensor | None:
        """Return q or k turned, or None to leave it."""
        if self.owner.idle:
            return None
        relay = self.block.relay
        if relay.rotation is None or (
            not torch.compiler.is_compiling() and relay.task != graph_task()
        ):
            raise PositionError(
                f"attention of block {self.block.layer} ran without its block, so the grid of this call is unknown. "
                "Checkpoint blocks by calling them: checkpoint(block, x, use_reentrant=False), not block.forward."
            )
        if self.layout == "bnhd":
            return turn(output.transpose(1, 2), relay.rotation).transpose(1, 2)
        return turn(output, relay.rotation)


class RecordingDrop(nn.Module):
    """PatchDropout that remembers which tokens it kept; the same draw, the same tokens as without it."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Return the kept tokens, `[b, prefix + kept, d]`."""
        tokens: Tensor = self.drop(x)[0]
        return tokens


def graph_task() -> int:
    """Return the number of the backward pass in progress, -1 outside one."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())  # noqa: SLF001 (no public name; checkpoint itself relies on it)


def _checked(strength: float) -> float:
    value = float(strength)
    if not torch.isfinite(torch.tensor(value)):
        raise PositionError(
            f"strength is {strength}; a finite number is required, 0 for none and 1 for full."
        )
    return value
