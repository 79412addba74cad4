"""The ports: for a model, where q and k pass before their product, and what sizes they have there.

A model enters; its ports leave, in order of its blocks. `port_rows` has the rows of attention classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visionpos.encodings import Dims
from visionpos.errors import PositionError
from visionpos.retrofit.port_rows import PortSeams, case_of, known_attentions, placed
from visionpos.retrofit.seams import blocks_of, class_row, find, prefix_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Port:
    """One attention of a model.

    Args:
        layer: number of the block it is in; of the attention, where its grid is its own.
        path: of the attention.
        holder: the attention.
        seams: its case in the table.
        model: the model.
    """

    layer: int
    path: str
    holder: Any
    seams: PortSeams
    model: Any

    @property
    def heads(self) -> int:
        """Return the query heads that pass the port."""
        return int(getattr(self.holder, self.seams.heads)) * self.seams.heads_factor

    @property
    def key_heads(self) -> int:
        """Return the key heads that pass the port."""
        heads = getattr(self.holder, self.seams.heads)
        return int(getattr(self.holder, "num_kv_heads", heads)) * self.seams.heads_factor

    @property
    def head_dim(self) -> int:
        """Return the channels of a head at the port."""
        for name in ("key_dim", "head_dim", "dim_head"):
            if hasattr(self.holder, name):
                return int(getattr(self.holder, name))
        # EvaAttention before timm 1.0.26 kept no note of it; neither do window attentions.
        proj = self.holder.proj
        wide = proj.in_features if hasattr(proj, "in_features") else proj.in_channels
        return int(wide) // int(getattr(self.holder, self.seams.heads))

    @property
    def local(self) -> bool:
        """Return whether the attention itself tells its grid, so that no call need be known."""
        return self.seams.grid.kind != "call"

    @property
    def prefix(self) -> int:
        """Return the tokens in front of the grid, where the attention itself tells its grid."""
        prefix = self.seams.prefix
        if prefix is None:
            return 0
        return prefix if isinstance(prefix, int) else int(find(self.model, prefix) or 0)

    @property
    def sides(self) -> tuple[nn.Module, ...]:
        """Return the modules that hand out q and k."""
        return tuple(module for _, _, module in self.taps())

    @property
    def refusal(self) -> str | None:
        """Return why q and k cannot be turned here, None if they can."""
        if self.seams.refuse is None:
            return None
        return self.seams.refuse.format(name=type(self.holder).__name__)

    def taps(self) -> list[tuple[int, int | None, Any]]:
        """Return (number of the tap, head, module) of everything that hands out q or k; arguments are left out.

        Raises:
            PositionError: if a module is gone.
        """
        found: list[tuple[int, int | None, Any]] = []
        for number, tap in enumerate(self.seams.taps):
            if tap.at.startswith("@"):
                continue
            stem, _, star = tap.at.partition(".*")
            module = find(self.holder, stem)
            if module is None:
                raise PositionError(
                    f"port {self.path}.{stem} is gone; the model was fused or scripted. Attach before fusing."
                )
            each = enumerate(module) if tap.at.endswith("*") else [(None, module)]
            found += [(number, head, part) for head, part in each]
            assert not star  # noqa: S101 (rows write a star at the end alone)
        return found

    def placed(self) -> tuple[tuple[str, Any], ...]:
        """Return (name, module) of every part that hands out q or k."""
        stems = [
            (tap.at.partition(".*")[0], tap.at.endswith("*"))
            for tap in self.seams.taps
            if not tap.at.startswith("@")
        ]
        found = []
        for stem, many in stems:
            module = find(self.holder, stem)
            found += (
                [(f"{stem}.{number}", part) for number, part in enumerate(module)]
                if many
                else [(stem, module)]
            )
        return tuple(found)


def attentions_of(model: Any) -> list[Port]:
    """Return every attention between tokens, or between channels, that the table knows, in order."""
    blocks = [path for path, _ in blocks_of(model)] if class_row(model) is not None else []
    found: list[Port] = []
    for path, module in model.named_modules():
        case = case_of(module, path)
        if case is None or path.startswith("visionpos."):
            continue
        seams = placed(model, path, case)
        layer = next((i for i, block in enumerate(blocks) if _inside(path, block)), None)
        if seams.grid.kind != "call":
            layer = sum(port.local for port in found)
        if layer is not None:
            found.append(Port(layer, path, module, seams, model))
    return found


def ports_of(model: Any) -> list[Port]:
    """Return every port at which q and k can be turned, in order.

    Raises:
        PositionError: if a block has none: the attention is of a class that visionpos does not know.
    """
    found = attentions_of(model)
    if class_row(model) is not None and prefix_row_is_flat(model):
        _check_blocks(model, found)
    return [port for port in found if port.refusal is None]


def prefix_row_is_flat(model: Any) -> bool:
    """Return whether every block of the model's class is an attention over the grid of the call."""
    row = class_row(model)
    return row is not None and row[1].grid in ("patch_embed", "coords") and row[1].layout == "nlc"


def _check_blocks(model: Any, found: list[Port]) -> None:
    for path, block in blocks_of(model):
        if not any(_inside(port.path, path) for port in found):
            raise PositionError(
                f"block {path} is a {type(block).__name__} without an attention that visionpos knows; "
                f"{', '.join(known_attentions())} are known. Use the door add instead."
            )


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def groups_of(ports: list[Port]) -> dict[tuple[int, int, bool], list[Port]]:
    """Return (heads, head_dim, local) -> ports that one encoding serves, in order of their first port."""
    groups: dict[tuple[int, int, bool], list[Port]] = {}
    for port in ports:
        groups.setdefault((port.heads, port.head_dim, port.local), []).append(port)
    return groups


def group_dims(model: Any, ports: list[Port]) -> Dims:
    """Return the sizes of the encoding that serves a group of ports."""
    first = ports[0]
    prefix = first.prefix if first.local else prefix_of(model)
    return Dims(
        embed_dim=int(getattr(model, "embed_dim", 0) or 0)
        if _is_int(getattr(model, "embed_dim", None)) and not first.local
        else first.heads * first.head_dim,
        num_heads=first.heads,
        depth=len(ports) if first.local else len(blocks_of(model)),
        prefix=prefix,
        head_dim=first.head_dim,
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def dims_of(model: Any) -> Dims:
    """Return the sizes that an encoding for this model must have, read from the model.

    Raises:
        PositionError: if there is no attention to serve, or its layers do not agree on heads or channels.
    """
    groups = groups_of(ports_of(model))
    if len(groups) != 1:
        raise PositionError(
            f"layers have different (heads, head_dim) {sorted({key[:2] for key in groups})}; one encoding serves "
            "layers of one size. attach builds one for each, as do groups_of and group_dims."
        )
    return group_dims(model, next(iter(groups.values())))
