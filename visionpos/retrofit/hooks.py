"""The small hooks through which an Attachment acts: classes of this module, so that models copy and pickle.

GridHook opens a call, DropHook tells it which tokens were kept, MarkHook and LeaveHook mark the tensors that belong to
it, EnterHook finds it by the mark, TurnHook turns q and k. Recomputation under checkpointing passes the same input
tensor, or an alias of it, and so finds the same call. A model traced whole needs no marks: its blocks read the call in
progress and write to nothing, as checkpoints inside a graph demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from timm.layers import PatchDropout, patch_dropout_forward

from visionpos.attention import turn
from visionpos.encodings import Additive
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.attachment import Attachment, Call, Relay, graph_task

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry import Rotation
    from visionpos.retrofit.ports import PortSeams


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


class MarkHook:
    """After the module before the first block: marks the tokens with their call."""

    def __init__(self, owner: Attachment, tag: str) -> None:
        self.owner, self.tag = owner, tag

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG002 (torch's signature)
        """Mark the output."""
        call: Call | None = self.owner.relay.get()
        if not torch.compiler.is_compiling() and not self.owner.idle and call is not None:
            _mark(output, self.tag, call)


class BlockHooks:
    """Around a block: finds the call of the block's input, and hands it on with the output."""

    def __init__(self, owner: Attachment, tag: str, layer: int) -> None:
        self.owner, self.tag, self.layer = owner, tag, layer
        self.relay = Relay()  # (rotation, backward pass) while the block runs

    def enter(self, x: Tensor) -> None:
        """Find the call of the block's input and form this layer's rotation."""
        if self.owner.idle:
            return
        call, prefix = self._call_of(x), self.owner.encoding.dims.prefix
        if x.shape[1] != prefix + call.tokens:
            raise PositionError(
                f"block {self.layer} got {x.shape[1]} tokens; {call.tokens} patches and {prefix} prefix tokens were "
                "expected. Tokens may be dropped by patch_drop_rate alone, whose indices are followed; attach again "
                "after a change of prefix tokens."
            )
        if not _traced_whole(x, self.tag):
            self.relay.put((self.owner.rotation(call, self.layer, prefix), graph_task()))
            _mark(x, self.tag, call)

    def leave(self, x: Tensor, output: Any) -> None:
        """Mark the output with the call, so that the next block, now or in a recomputation, finds it."""
        if self.owner.idle or _traced_whole(x, self.tag):
            return
        self.relay.put(None)
        call: Call | None = getattr(x, self.tag, None)
        if call is not None and isinstance(output, torch.Tensor):
            _mark(output, self.tag, call)
        if self.layer == self.owner.encoding.dims.depth - 1 and graph_task() == -1:
            self.owner.relay.put(None)  # the call is over: unmarked tokens must not find it later

    def rotation(self) -> Rotation:
        """Return the rotation of this block in this call."""
        handed: tuple[Rotation, int] | None = self.relay.get()
        traced = torch.compiler.is_compiling()
        if handed is None and traced and self.owner.relay.get() is not None:
            prefix = self.owner.encoding.dims.prefix
            return self.owner.rotation(self.owner.relay.get(), self.layer, prefix)
        if handed is None or (handed[1] != graph_task() and not traced):
            raise PositionError(
                f"attention of block {self.layer} ran without its block, so the grid of this call is unknown. "
                "Checkpoint blocks by calling them: checkpoint(block, x, use_reentrant=False), not block.forward."
            )
        return handed[0]

    def _call_of(self, x: Tensor) -> Call:
        """Return the call that this tensor belongs to; in a backward pass never another one."""
        call: Call | None = getattr(x, self.tag, None)
        task = graph_task()
        if call is None and task != -1:
            # FSDP's hooks and re-entrant checkpointing recompute on another tensor in the memory of the input.
            call = getattr(_memory(x), self.tag, None)
        if call is not None:
            return call
        latest: Call | None = self.owner.relay.get()
        if latest is None and task == -1:
            raise PositionError(
                "a block ran before patch_embed, so its grid is unknown; run the whole model, or detach the encoding."
            )
        if latest is None or (latest.task != task and not torch.compiler.is_compiling()):
            raise PositionError(
                f"block {self.layer} is recomputed in a backward pass on a copy of its input, so its grid is unknown. "
                "Recompute on the input itself: checkpoint(block, x, use_reentrant=False)."
            )
        return latest


class EnterHook:
    """Forward pre-hook face of BlockHooks."""

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
        rotation = self.block.rotation()
        if self.layout == "bnhd":
            return turn(output.transpose(1, 2), rotation).transpose(1, 2)
        return turn(output, rotation)


class RecordingDrop(PatchDropout):  # type: ignore[misc]  # timm's types are skipped
    """PatchDropout that remembers which tokens it kept; the same draw, the same tokens as without it.

    A PatchDropout becomes one by its class alone, so that rate, mode and hooks stay those of the model's own object.
    """

    relay: Relay

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
        drop.__class__, drop.relay = RecordingDrop, Relay()

    @staticmethod
    def release(drop: Any) -> None:
        """Make it a PatchDropout again."""
        del drop.relay
        drop.__class__ = PatchDropout


def _mark(x: Tensor, tag: str, call: Call) -> None:
    """Say which call a tensor belongs to; its memory says it too, for aliases that are made in a backward pass."""
    setattr(x, tag, call)
    if not torch.compiler.is_compiling():
        setattr(_memory(x), tag, call)


def _traced_whole(x: Tensor, tag: str) -> bool:
    """Return whether a graph is traced from before the blocks: its tensors bear no mark."""
    return torch.compiler.is_compiling() and getattr(x, tag, None) is None


def _memory(x: Tensor) -> Any:
    """Return the storage of a tensor, or the tensor itself where it has none (vmap)."""
    try:
        return x.untyped_storage()
    except NotImplementedError:
        return x
