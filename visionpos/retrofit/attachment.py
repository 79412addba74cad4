"""Attachment: one encoding on a model, and the small hooks through which it acts.

State belongs to the call: the patch embedding opens a Call, each block finds the Call of its input tensor, q and k
are turned by that Call's rotation. Recomputation under checkpointing passes the same input tensor and so finds the
same Call. What is handed on within a call stays in its thread. Hooks hold the Attachment, a submodule of the model, so
that deepcopy and pickle carry the pair along.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import PatchDropout, patch_dropout_forward
from torch import nn

from visionpos.attention import turn
from visionpos.encodings import Additive, Encoding, Rotary
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.seams import PortSeams


class Call:
    """What one forward pass knows: its grid, where its tokens are, which of them were kept, how strongly they turn."""

    def __init__(self, grid: Grid, coords: Tensor | None, constant: float, task: int) -> None:
        self.grid = grid
        self.coords = coords  # [n, axes], or [draws, n, axes]
        self.constant = (
            constant  # of this pass: a schedule may move on before the backward pass recomputes it
        )
        self.kept: Tensor | None = None  # [b, kept] after patch dropout
        self.task = task
        self.rotation: Rotation | None = None  # shared by the layers, where nothing learns

    @property
    def tokens(self) -> int:
        """Return the patch tokens that reach the blocks."""
        return self.grid.size if self.kept is None else int(self.kept.shape[-1])


class _Relay:
    """What one hook hands to the next within a call: a slot a thread. A copy of the model starts with empty slots."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.traced = False
        self.own = threading.local()

    def put(self, value: Any) -> None:
        """Hand a value on."""
        self.latest, self.traced = value, torch.compiler.is_compiling()
        if not self.traced:
            self.own.value = value

    def get(self) -> Any:
        """Return what was handed on last, in this thread; a graph is traced in one thread, and knows no slots."""
        if torch.compiler.is_compiling() or self.traced:
            return self.latest
        return getattr(self.own, "value", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Relay:
        return _Relay()

    def __reduce__(self) -> tuple[type[_Relay], tuple[()]]:
        return (_Relay, ())


class _Source:
    """A random generator that copies leave behind: they use torch's default."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        return _Source()

    def __reduce__(self) -> tuple[type[_Source], tuple[()]]:
        return (_Source, ())


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
        self.source = _Source(generator)

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
                grid, device=like.device, generator=self.source.generator, draws=draws
            )
        self.relay.put(Call(grid, coords, self.constant, graph_task()))

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
        if self.learned_strength is not None or call.constant != 1.0:
            strength = call.constant if self.learned_strength is None else self.learned_strength
            turns = turns * strength
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
    """After a patch dropout: records which tokens were kept."""

    def __init__(self, owner: Attachment) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Record the kept indices: a second output, or what a RecordingDrop remembers."""
        call: Call | None = self.owner.relay.get()
        if not self.owner.idle and call is not None:
            call.kept = output[1] if isinstance(output, tuple) else module.relay.get()


class BlockHooks:
    """Around a block: finds the call of the block's input, and hands it on with the output."""

    def __init__(self, owner: Attachment, name: str, layer: int) -> None:
        self.owner, self.layer = owner, layer
        self.tag = f"_visionpos_{name}"
        self.relay = _Relay()  # (rotation, backward pass) while the block runs

    def enter(self, x: Tensor) -> None:
        """Find the call of the block's input and form this layer's rotation."""
        if self.owner.idle:
            return
        call = self._call_of(x)
        prefix = self.owner.encoding.dims.prefix
        if x.shape[1] != prefix + call.tokens:
            raise PositionError(
                f"block {self.layer} got {x.shape[1]} tokens; {call.tokens} patches and {prefix} prefix tokens were "
                "expected. Tokens may be dropped by patch_drop_rate alone, whose indices are followed; attach again "
                "after a change of prefix tokens."
            )
        self.relay.put((self.owner.rotation(call, self.layer, prefix), graph_task()))
        setattr(x, self.tag, call)

    def leave(self, x: Tensor, output: Any) -> None:
        """Tag the output with the call, so that a checkpointed run of several blocks finds it."""
        self.relay.put(None)
        if self.owner.idle:
            return
        call = getattr(x, self.tag, None)
        if call is not None and isinstance(output, torch.Tensor):
            setattr(output, self.tag, call)

    def _call_of(self, x: Tensor) -> Call:
        """Return the call that this tensor belongs to; in a backward pass never another one."""
        call: Call | None = getattr(x, self.tag, None)
        if call is not None:
            return call
        latest: Call | None = self.owner.relay.get()
        task = graph_task()
        if latest is None and task == -1:
            raise PositionError(
                "a block ran before patch_embed, so its grid is unknown; run the whole model, or detach the encoding."
            )
        if latest is None or (latest.task != task and not torch.compiler.is_compiling()):
            raise PositionError(
                f"block {self.layer} is recomputed in a backward pass on a copy of its input, so its grid is unknown "
                "(re-entrant checkpointing). Use checkpoint(block, x, use_reentrant=False)."
            )
        return latest


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
        handed: tuple[Rotation, int] | None = self.block.relay.get()
        if handed is None or (not torch.compiler.is_compiling() and handed[1] != graph_task()):
            raise PositionError(
                f"attention of block {self.block.layer} ran without its block, so the grid of this call is unknown. "
                "Checkpoint blocks by calling them: checkpoint(block, x, use_reentrant=False), not block.forward."
            )
        if self.layout == "bnhd":
            return turn(output.transpose(1, 2), handed[0]).transpose(1, 2)
        return turn(output, handed[0])


class RecordingDrop(PatchDropout):  # type: ignore[misc]  # timm's types are skipped
    """PatchDropout that remembers which tokens it kept; the same draw, the same tokens as without it.

    A PatchDropout becomes one by its class alone, so that rate, mode and hooks stay those of the model's own object.
    """

    relay: _Relay

    def forward(self, x: Tensor) -> Tensor:
        """Return the kept tokens, `[b, prefix + kept, d]`."""
        tokens: Tensor
        tokens, kept = patch_dropout_forward(
            x, self.prob, self.num_prefix_tokens, self.ordered, self.training
        )
        self.relay.put(kept)
        return tokens

    @staticmethod
    def take(drop: Any) -> None:
        """Make a PatchDropout record."""
        drop.__class__, drop.relay = RecordingDrop, _Relay()

    @staticmethod
    def release(drop: Any) -> None:
        """Make it a PatchDropout again."""
        del drop.relay
        drop.__class__ = PatchDropout


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
