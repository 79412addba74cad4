"""Ports that tell their own grid: windows, maps, strided keys. What turns q and k is formed where they pass.

No call need be known, so that recomputation under checkpointing, which runs the attention again, is right by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.retrofit.attachment import TURNS, Attachment
from visionpos.retrofit.lattice import reader_of
from visionpos.retrofit.passes import Relay

if TYPE_CHECKING:
    from visionpos.retrofit.hooks import TurnHook
    from visionpos.retrofit.lattice import Reader
    from visionpos.retrofit.ports import Port


# Kinds whose grid can be told from what the parts of an attention are called with, as well as from its own input.
_TOLD_BY_PARTS = ("attribute", "patches", "square", "nhwc", "nchw", "unrolled")


class LocalHooks:
    """Around an attention: places its tokens, forms its rotations or its bias, and takes them back afterwards."""

    def __init__(self, owner: Attachment, port: Port, layer: int, group: int) -> None:
        self.owner, self.layer, self.group = owner, layer, group
        self.reader, self.holder = reader_of(port), port.holder
        self.relay = Relay()  # rotations of q and k, or a bias, while the attention runs
        lattice, taps = port.seams.grid.kind, port.seams.taps
        # FastViT's maps are rows before they are projected.
        self.stateless = lattice in _TOLD_BY_PARTS and (lattice != "nchw" or taps[0].maps)
        self.several = len(taps) > 1

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Form what this attention needs for the tokens it is called with."""
        if not self.owner.idle and not self._writes_nothing():
            self.relay.put(self._formed(module, args, kwargs))

    def leave(self) -> None:
        """Forget it."""
        if not self.owner.idle and not self._writes_nothing():
            self.relay.put(None)

    def handed(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Return the rotations, or the bias, of the attention that runs; `args` are those of the part that asks."""
        if self._writes_nothing():
            return self._formed(self.holder, args, kwargs or {})
        handed = self.relay.get()
        if handed is None:
            raise PositionError(
                "a part of an attention ran without the attention, so its grid is unknown; run the whole attention, or "
                "detach the encoding."
            )
        return handed

    def _formed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, device = self.owner, args[0].device
        sites = self.reader.sites(module, args, kwargs)
        if isinstance(owner.encoding, TURNS):
            return owner.rotations(sites, self.layer, self.group, device)
        return owner.biases(sites, self.layer, self.group, device)

    def _writes_nothing(self) -> bool:
        """Return whether a graph is traced, whose checkpoints allow no writing, and nothing need be written."""
        if not (self.stateless and torch.compiler.is_compiling()):
            return False
        encoding: Any = self.owner.encoding
        drawn = isinstance(encoding, TURNS) and encoding.coords.augments and encoding.training
        return not (drawn and self.several)  # q and k of one attention share a draw


class LocalEnterHook:
    """Forward pre-hook face of LocalHooks; turns q or k that come as an argument."""

    def __init__(self, local: LocalHooks, arguments: dict[int, TurnHook]) -> None:
        self.local, self.owner, self.arguments = local, local.owner, arguments

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare the attention."""
        self.local.enter(module, args, kwargs)
        if self.owner.idle or not self.arguments:
            return None
        moved = list(args)
        for index, hook in self.arguments.items():
            if index >= len(args) or args[index] is None:
                raise PositionError(
                    f"{type(module).__name__} got no argument {index}, which carries q; it is required while an "
                    "encoding is attached. Pass it by place."
                )
            moved[index] = hook.turn(args[index], args)
        return tuple(moved), kwargs


class LocalLeaveHook:
    """Forward hook face of LocalHooks."""

    def __init__(self, local: LocalHooks) -> None:
        self.local, self.owner = local, local.owner

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """End the attention."""
        self.local.leave()


class SeenHook:
    """At the module that sees an attention's map, or is called with its sides: tells the reader."""

    def __init__(self, owner: Attachment, reader: Reader) -> None:
        self.owner, self.reader = owner, reader

    def __call__(
        self,
        module: Any,  # noqa: ARG002 (torch's signature)
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any = None,
    ) -> None:
        """Remember the sides: of an argument by name, else of the map that leaves the module or enters it."""
        if self.owner.idle:
            return
        lattice = self.reader.lattice
        if lattice.name:
            given = kwargs[lattice.name] if lattice.name in kwargs else args[lattice.index]
            self.reader.see(given)
            return
        seen = args if output is None else output
        while isinstance(seen, (tuple, list)):
            seen = seen[0]
        self.reader.see(seen.shape[-2:])
