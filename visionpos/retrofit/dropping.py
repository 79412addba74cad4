"""Patch dropout: a call is told which tokens were kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm.layers import PatchDropout, patch_dropout_forward

from visionpos.retrofit.attachment import Attachment, Call
from visionpos.retrofit.passes import Relay

if TYPE_CHECKING:
    from torch import Tensor


class DropHook:
    """After a patch dropout: records which tokens were kept."""

    def __init__(self, owner: Attachment) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Record the kept indices: a second output, or what a RecordingDrop remembers."""
        call: Call | None = self.owner.relay.get()
        if not self.owner.idle and call is not None:
            call.kept = output[1] if isinstance(output, tuple) else module.relay.get()


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
