"""The small hooks through which an Attachment acts: classes of this module, so that models copy and pickle.

GridHook opens a call, DropHook tells it which tokens were kept, MarkHook and LeaveHook mark the tensors that belong to
it, EnterHook finds it by the mark, TurnHook turns q and k. Recomputation under checkpointing passes the same input
tensor, or an alias of it, and so finds the same call. A model traced whole needs no marks: its blocks read the call in
progress and write to nothing, as checkpoints inside a graph demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.encodings import Conditional
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation
from visionpos.retrofit.attachment import TURNS, Attachment, Call
from visionpos.retrofit.passes import Relay, UsedHook, graph_task, mark, marked
from visionpos.retrofit.paths import counted, sides_of
from visionpos.retrofit.taps import turned

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.ports import Port


class GridHook:
    """After patch_embed: opens the call."""

    def __init__(self, owner: Attachment) -> None:
        self.owner = owner

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Begin a forward pass over the grid that the patches lie on."""
        if not self.owner.idle:
            grid = grid_seen(module, args, kwargs, output)
            self.owner.open(grid, output[0] if isinstance(output, tuple) else output)


def grid_seen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Grid:
    """Return the grid of patches that a patch embedding has just made.

    Raises:
        PositionError: if patches came with coordinates of their own.
    """
    if not isinstance(output, tuple) and hasattr(module, "dynamic_feat_size"):
        return Grid(*counted(module.dynamic_feat_size(args[0].shape[-2:])))
    if not isinstance(output, tuple):
        sides = sides_of(module) if output.ndim == 3 else counted(output.shape[-2:])
        assert sides is not None  # noqa: S101 (rows name patch modules that state their grid)
        return Grid(*sides)
    if isinstance(output[1], (tuple, list, torch.Size)):
        return Grid(int(output[1][0]), int(output[1][1]))
    image = args[0]
    given = [*args[1:], *kwargs.values()]
    if isinstance(image, torch.Tensor) and image.ndim == 4 and all(item is None for item in given):
        return Grid(
            *(side // step for side, step in zip(image.shape[-2:], module.patch_size, strict=True))
        )
    raise PositionError(
        "patch_coord is given, as in NaFlexVit's dict of patches; an attached encoding serves whole images "
        "[b, channels, height, width], all of one size. Pass images as one tensor, or detach the encoding."
    )


class MarkHook:
    """After the module before the first block: marks the tokens with their call."""

    def __init__(self, owner: Attachment, tag: str) -> None:
        self.owner, self.tag = owner, tag

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG002 (torch's signature)
        """Mark the output."""
        call: Call | None = self.owner.relay.get()
        if not torch.compiler.is_compiling() and not self.owner.idle and call is not None:
            mark(output, self.tag, call)


class BlockHooks:
    """Around a block: finds the call of the block's input, and hands it on with the output."""

    def __init__(
        self,
        owner: Attachment,
        tag: str,
        layer: int,
        *,
        depth: int,
        group: int = 0,
        item: int = 0,
        rest: bool = False,
    ) -> None:
        self.owner, self.tag, self.layer, self.group = owner, tag, layer, group
        self.last = layer == depth - 1
        self.item, self.rest = item, rest
        self.relay = Relay()  # (rotation or bias, backward pass) while the block runs

    def enter(self, x: Tensor) -> None:
        """Find the call of the block's input and form this layer's rotation."""
        if self.owner.idle:
            return
        call = self._call_of(x)
        prefix = self._prefix(call, x)
        if x.shape[1] != prefix + call.tokens:
            raise PositionError(
                f"block {self.layer} got {x.shape[1]} tokens; {call.tokens} patches and {prefix} prefix tokens were "
                "expected. Tokens may be dropped by patch_drop_rate alone, whose indices are followed; attach again "
                "after a change of prefix tokens."
            )
        traced = _traced_whole(x, self.tag)
        if self.rest or not traced:
            self.relay.put((self._given(call, prefix), graph_task()))
        if not traced:
            mark(x, self.tag, call)

    def _prefix(self, call: Call, x: Tensor) -> int:
        """Return the tokens in front of the grid, counted where some blocks have them and others not."""
        own: int = self.owner.encodings[self.group].dims.prefix
        return max(own, x.shape[1] - call.tokens) if self.rest else own

    def _given(self, call: Call, prefix: int) -> Any:
        """Return the rotation, or the bias, of this layer; the call itself where tokens are mixed."""
        owner = self.owner
        if isinstance(owner.encoding, Conditional):
            return call
        give = owner.rotation if isinstance(owner.encoding, TURNS) else owner.bias
        if self.group:
            return give(call, self.layer, prefix, self.group)
        return give(call, self.layer, prefix)

    def leave(self, x: Tensor, output: Any) -> None:
        """Mark the output with the call, so that the next block, now or in a recomputation, finds it."""
        if self.owner.idle:
            return
        traced = _traced_whole(x, self.tag)
        if self.rest or not traced:
            self.relay.put(None)
        if traced:
            return
        call: Call | None = getattr(x, self.tag, None)
        if call is not None and isinstance(output, torch.Tensor):
            mark(output, self.tag, call)
        if self.last and graph_task() == -1:
            self.owner.relay.put(None)  # the call is over: unmarked tokens must not find it later

    def handed(self, *_: Any) -> Any:
        """Return the rotation, or the bias, of this block in this call."""
        handed: tuple[Any, int] | None = self.relay.get()
        traced = torch.compiler.is_compiling()
        if handed is None and traced and self.owner.relay.get() is not None:
            prefix = self.owner.encodings[self.group].dims.prefix
            return self._given(self.owner.relay.get(), prefix)
        if handed is None or (handed[1] != graph_task() and not traced):
            raise PositionError(
                f"attention of block {self.layer} ran without its block, so the grid of this call is unknown. "
                "Checkpoint blocks by calling them: checkpoint(block, x, use_reentrant=False), not block.forward."
            )
        return handed[0]

    def _call_of(self, x: Tensor) -> Call:
        """Return the call that this tensor belongs to; in a backward pass never another one."""
        call: Call | None = marked(x, self.tag)
        task = graph_task()
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
        self.block.enter(args[self.block.item])


class LeaveHook:
    """Forward hook face of BlockHooks."""

    def __init__(self, block: BlockHooks) -> None:
        self.block, self.owner = block, block.owner

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Hand the call on with the block's output."""
        item = self.block.item
        self.block.leave(args[item], output[item] if isinstance(output, tuple) else output)


class TurnHook:
    """After what hands out q or k: turns them by the rotation of the block or attention it is in."""

    def __init__(
        self, within: Any, port: Port, number: int, head: int | None, used: UsedHook | None = None
    ) -> None:
        self.within, self.owner, self.used = within, within.owner, used
        self.tap, self.head, self.late = port.seams.taps[number], head, port.seams.late
        self.key = (number, head)
        self.heads = port.key_heads if self.tap.holds == "k" else port.heads
        self.head_dim, self.holder = port.head_dim, port.holder if port.seams.late else None

    def __call__(  # torch's signature
        self,
        module: Any,  # noqa: ARG002
        args: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor | None:
        """Return q and k turned, or None to leave them."""
        return None if self.owner.idle else self.turn(output, args)

    def turn(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Return a tensor that carries q or k, with them turned; `args` are those of the module that gave it."""
        if self.used is not None:
            self.used.use(self.key)
        handed = self.within.handed(args)
        by = handed if isinstance(handed, dict) else {"q": handed, "k": handed}
        heads = self.heads
        if self.head is not None:  # one module a head
            by, heads = {slot: _of_head(rotation, self.head) for slot, rotation in by.items()}, 1
        late = self._late()
        if late is None:
            return turned(x, self.tap, by, heads=heads, head_dim=self.head_dim)
        # The attention adds its biases after this port: they must turn too.
        out = turned(x + late, self.tap, by, heads=heads, head_dim=self.head_dim) - late
        return out.to(x.dtype)

    def _late(self) -> Tensor | None:
        biases = [getattr(self.holder, name) for name in self.late]
        return None if not biases or biases[0] is None else torch.cat(biases)


def _of_head(rotation: Any, head: int) -> Any:
    """Return the rotation of one head."""
    assert isinstance(rotation, Rotation)  # noqa: S101 (attach refuses turns of blocks here)
    if rotation.cos.ndim == 2:
        return rotation
    cos, sin = (part[..., head : head + 1, :, :] for part in (rotation.cos, rotation.sin))
    return Rotation(cos, sin, rotation.pairing, rotation.axes)


class FlagHook:
    """Around an attention whose port acts under a flag alone: sets it, and sets it back."""

    def __init__(self, owner: Attachment, flag: str, *, own: bool) -> None:
        self.owner, self.flag, self.own = owner, flag, own

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any = None) -> None:  # noqa: ARG002 (torch's signature)
        """Set the flag before the attention runs, and what it was before after it."""
        before = output is None
        setattr(module, self.flag, self.own or (before and not self.owner.idle))


def _traced_whole(x: Tensor, tag: str) -> bool:
    """Return whether a graph is traced from before the blocks: its tensors bear no mark."""
    return torch.compiler.is_compiling() and getattr(x, tag, None) is None
