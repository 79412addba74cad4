"""The ports: for an attention class, where q and k pass before their product, and what sizes they have there.

A model enters; its ports leave, in order of its blocks. `seams` has the rows of model classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from timm import layers
from timm.layers import Attention, AttentionRope
from timm.models import vision_transformer
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock

from visionpos.encodings import Dims
from visionpos.errors import PositionError
from visionpos.retrofit.seams import row_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass(frozen=True, slots=True)
class PortSeams:
    """Where q and k of one attention class can be turned: the outputs of two norm modules, and their layout."""

    q: str
    k: str
    layout: Literal["bhnd", "bnhd"]
    heads_factor: int = 1  # differential attention splits every head in two


_PORTS: dict[type, PortSeams] = {
    Attention: PortSeams("q_norm", "k_norm", "bhnd"),
    AttentionRope: PortSeams("q_norm", "k_norm", "bhnd"),
    EvaAttention: PortSeams("q_norm", "k_norm", "bhnd"),
    ParallelScalingBlock: PortSeams("q_norm", "k_norm", "bnhd"),
}
# Differential attention came with timm 1.0.23.
_DIFFERENTIAL = (
    getattr(layers, "DiffAttention", None),
    getattr(vision_transformer, "DiffParallelScalingBlock", None),
)
_PORTS |= {
    kind: PortSeams("q_norm", "k_norm", "bhnd", heads_factor=2) for kind in _DIFFERENTIAL if kind
}


@dataclass(frozen=True, slots=True)
class Port:
    """One attention of a model: the block it is in, and the modules whose outputs are q and k."""

    layer: int
    path: str
    holder: Any
    seams: PortSeams

    @property
    def heads(self) -> int:
        """Return the query heads that pass the port."""
        return int(self.holder.num_heads) * self.seams.heads_factor

    @property
    def key_heads(self) -> int:
        """Return the key heads that pass the port."""
        return (
            int(getattr(self.holder, "num_kv_heads", self.holder.num_heads))
            * self.seams.heads_factor
        )

    @property
    def head_dim(self) -> int:
        """Return the channels of a head at the port."""
        if hasattr(self.holder, "head_dim"):
            return int(self.holder.head_dim)
        # EvaAttention before timm 1.0.26 kept no note of it.
        return int(self.holder.proj.in_features) // int(self.holder.num_heads)

    @property
    def sides(self) -> tuple[nn.Module, nn.Module]:
        """Return the modules that hand out q and k."""
        return getattr(self.holder, self.seams.q), getattr(self.holder, self.seams.k)


def ports_of(model: Any) -> list[Port]:
    """Return every port of the model, in order of its blocks.

    Raises:
        PositionError: if a block has none: the attention is of a class that the seam table does not know.
    """
    found: list[Port] = []
    name = row_of(model).blocks
    for layer, block in enumerate(getattr(model, name)):
        here = list(_ports_in(block, layer, f"{name}.{layer}"))
        if not here:
            raise PositionError(
                f"block {name}.{layer} is a {type(block).__name__} without an attention that the seam table knows; "
                f"{', '.join(kind.__name__ for kind in _PORTS)} are known. Use the door add instead."
            )
        found += here
    return found


def _ports_in(block: nn.Module, layer: int, path: str) -> Iterator[Port]:
    """Yield the ports inside one block."""
    for name, module in block.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind in _PORTS]
        if kinds:
            yield Port(layer, f"{path}.{name}".rstrip("."), module, _PORTS[kinds[0]])


def dims_of(model: Any) -> Dims:
    """Return the sizes that an encoding for this model must have, read from the model.

    Raises:
        PositionError: if the layers do not agree on heads or channels.
    """
    ports = ports_of(model)
    sizes = {(port.heads, port.head_dim) for port in ports}
    if len(sizes) > 1:
        raise PositionError(
            f"layers have different (heads, head_dim) {sorted(sizes)}; one encoding serves layers of one size. Use the "
            "door add instead."
        )
    heads, head_dim = sizes.pop()
    return Dims(
        embed_dim=int(model.embed_dim),
        num_heads=heads,
        depth=len(getattr(model, row_of(model).blocks)),
        prefix=int(model.num_prefix_tokens),
        head_dim=head_dim,
    )
