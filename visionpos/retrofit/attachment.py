"""Attachment: one encoding on a model; and the call, what one forward pass knows.

State belongs to the call: the patch embedding opens it, blocks turn q and k by its rotation (see `hooks`). What is
handed on within a call stays in its thread. Hooks hold the Attachment, a submodule of the model, so that deepcopy and
pickle carry the pair along.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.encodings import Biasing, Encoding, Rotary, Turning
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.passes import Recall, Relay, graph_task

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry import BasisTurn, BlockTurn
    from visionpos.retrofit.lattice import Sites

    Turn = Rotation | BlockTurn | BasisTurn

TURNS = (Rotary, Turning)  # what turns q and k
_LARGEST = 3e38


class Call:
    """What one forward pass knows: its grid, where its tokens are, which of them were kept, how strongly they turn."""

    def __init__(
        self,
        grid: Grid,
        coords: Tensor | None,
        constant: float,
        task: int,
        device: torch.device,
    ) -> None:
        self.grid = grid
        self.device = device
        self.coords = coords  # [n, axes], or [draws, n, axes]
        self.constant = constant  # strength of this pass, unless it is learned
        self.kept: Tensor | None = None  # [b, kept] after patch dropout
        self.task = task
        # Prefix tokens -> what the layers share, where nothing learns.
        self.rotations: dict[int, Turn] = {}
        self.biases: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Return the patch tokens that reach the blocks."""
        return self.grid.size if self.kept is None else int(self.kept.shape[-1])


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

    Where layers differ in heads or channels, each size has an encoding of its own: `encoding` serves the first size,
    `others` the rest.

    Args:
        encoding: the module that knows positions.
        strength: 0 leaves the model's outputs bit-identical, 1 is full; angles and added vectors are scaled by it.
        learn: make the strength a learned parameter that starts at this value.
        generator: source of training-time coordinate draws; torch's default when None. Copies of the model use the
            default.
        others: the encodings of further sizes, by name.
        partial: whether attentions of the model are left out.

    Raises:
        PositionError: if an argument is of another kind.
    """

    learned_strength: nn.Parameter | None

    def __init__(
        self,
        encoding: Encoding,
        *,
        strength: float,
        learn: bool,
        generator: torch.Generator | None = None,
        others: Mapping[str, Encoding] | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__()
        check_kinds("encoding", encoding, nn.Module)
        check_kinds("learn", learn, bool)
        check_kinds("generator", generator, torch.Generator, None)
        check_kinds("partial", partial, bool)
        check_kinds("others", others, Mapping, None)
        self.encoding, others = encoding, others or {}
        for key, other in others.items():
            check_kinds(f"others[{key!r}]", other, nn.Module)
        self.others = nn.ModuleDict(others)
        # Whether a bias differs from layer to layer; no other takes a layer.
        self.layered = "layer" in inspect.signature(encoding.forward).parameters
        self.constant = _checked(strength)
        # One number in one dimension: FSDP shards no scalars.
        self.learned_strength = nn.Parameter(torch.tensor([self.constant])) if learn else None
        self.partial = partial
        self.relay = Relay()
        self.passes = Recall()
        self.source = _Source(generator)

    @property
    def encodings(self) -> list[Any]:
        """Return the encodings, one for each size of layers."""
        return [self.encoding, *self.others.values()]

    @property
    def strength(self) -> Tensor | float:
        """Return the strength: a number, or the learned parameter `[1]`."""
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
    def present(self) -> Tensor | float:
        """Return the strength of the pass in progress: a block that is recomputed has that of its forward pass."""
        return self._constant() if self.learned_strength is None else self.learned_strength

    def _constant(self) -> float:
        recalled: float | None = self.passes.recalled()
        return self.constant if recalled is None else recalled

    def _in(self, call: Call) -> Tensor | float:
        return call.constant if self.learned_strength is None else self.learned_strength

    @property
    def idle(self) -> bool:
        """Return whether the attachment leaves the model alone: a constant strength of 0."""
        return self.learned_strength is None and self._constant() == 0.0

    def open(self, grid: Grid, like: Tensor) -> None:
        """Begin a forward pass over a grid.

        Args:
            grid: tokens of this pass.
            like: `[b, ...]` patch tokens; their batch and device are used.
        """
        coords = None
        if isinstance(self.encoding, TURNS):
            scope = self.encoding.coords.scope if self.training else "forward"
            counts = {"forward": None, "block": self.encoding.dims.depth, "sample": like.shape[0]}
            coords = self.encoding.points(
                grid, device=like.device, generator=self.source.generator, draws=counts[scope]
            )
        self.relay.put(Call(grid, coords, self._constant(), graph_task(), like.device))

    def rotation(self, call: Call, layer: int, prefix: int, group: int = 0) -> Turn:
        """Return the rotation of all tokens of one layer, prefix tokens standing still."""
        if prefix in call.rotations and group == 0:
            return call.rotations[prefix]
        encoding = self.encodings[group]
        if not isinstance(encoding, TURNS) or call.coords is None:
            raise PositionError(
                f"encoding {type(encoding).__name__} gives no rotation; attach a rotary spec."
            )
        per_block = self.training and encoding.coords.scope == "block" and call.coords.ndim > 2
        coords = call.coords[layer] if per_block else call.coords
        strength = self._in(call)
        rotation: Turn
        if (
            isinstance(encoding, Rotary)
            and _is_full(strength)
            and call.kept is None
            and coords.ndim == 2
        ):
            rotation = encoding.over(coords, call.grid, layer, prefix=prefix)
        else:
            rotation = _turned(encoding, coords, layer, strength)
            rotation = rotation if call.kept is None else rotation.select(call.kept)
            rotation = rotation.padded(prefix)
        # A rotation that learns is formed in every block, so that checkpointing recomputes it there. A graph shares
        # equal expressions by itself, and a checkpoint inside a graph allows no writing.
        alike = not encoding.layerwise and not per_block and not _learns(rotation)
        if alike and group == 0 and not torch.compiler.is_compiling():
            call.rotations[prefix] = rotation
        return rotation

    def rotations(
        self, sites: Sites, layer: int, group: int, device: torch.device
    ) -> dict[str, Turn]:
        """Return the rotations of "q" and "k" in an attention that tells its own grid.

        In training every attention draws for itself, from torch's default generator, which checkpointing replays.
        """
        encoding, strength = self.encodings[group], self.present
        points = encoding.points(sites.grid, device=device)
        q = _turned(encoding, sites.queries(points), layer, strength)
        k = q if sites.alike else _turned(encoding, sites.keys(points), layer, strength)
        return {"q": q.padded(sites.prefix), "k": k.padded(sites.prefix)}

    def bias(self, call: Call, layer: int, prefix: int, group: int = 0) -> Tensor:
        """Return the bias of all pairs of tokens of one layer, `[1 or b, heads, n, n]`."""
        if prefix in call.biases and group == 0:
            return call.biases[prefix]
        encoding: Biasing = self.encodings[group]
        own = {"layer": layer} if self.layered else {}
        rows: Tensor = encoding(
            call.grid, prefix=prefix, device=call.device, **own
        )  # [heads, n, n]
        rows = rows * self._in(call)
        if call.kept is None:
            rows = rows.unsqueeze(0)
        else:
            front = torch.arange(prefix, device=call.kept.device).expand(call.kept.shape[0], -1)
            kept = torch.cat([front, call.kept + prefix], dim=1)  # [b, n]
            rows = rows[:, kept.unsqueeze(-1), kept.unsqueeze(-2)].transpose(0, 1)
        alike = not own and not rows.requires_grad
        if alike and group == 0 and not torch.compiler.is_compiling():
            call.biases[prefix] = rows
        return rows

    def biases(self, sites: Sites, layer: int, group: int, device: torch.device) -> Tensor:
        """Return the bias of every query and key in an attention that tells its own grid, `[heads, n, m]`."""
        encoding: Biasing = self.encodings[group]
        own = {"layer": layer} if self.layered else {}
        rows = encoding(sites.grid, prefix=sites.prefix, device=device, **own)
        if not sites.alike:  # queries stand on some points of the keys' grid
            points = torch.arange(sites.grid.size, device=rows.device).unsqueeze(-1)
            rows = rows[:, sites.queries(points).flatten()]
        scaled: Tensor = rows * self.present
        return scaled

    def added(self, grid: Grid, tokens: Tensor, group: int = 0) -> Tensor:
        """Return patch tokens `[b, n, d]` or `[b, y, x, d]` with the encoding's vectors added."""
        encoding: Any = self.encodings[group]
        rows: Tensor = encoding(grid, device=tokens.device)
        rows = rows if tokens.ndim == 3 else rows.unflatten(0, tokens.shape[1:3])
        moved: Tensor = tokens + (rows * self.present).to(tokens.dtype)
        return moved


def _turned(encoding: Any, coords: Tensor, layer: int, strength: Tensor | float) -> Turn:
    """Return what turns q or k at coordinates: its angles, which are linear in them, scaled by the strength."""
    full = _is_full(strength)
    if isinstance(encoding, Turning):
        turn: Turn = encoding.turns(coords if full else coords * strength, layer)
        return turn
    turns = encoding.angles(coords, layer)  # [(b,) (heads,) n, pairs]
    if coords.ndim > 2 and turns.ndim == 3:
        turns = turns.unsqueeze(1)  # one draw a sample: [b, 1, n, pairs]
    found: Rotation = encoding.rotation(turns if full else turns * strength)
    return found


def _is_full(strength: Tensor | float) -> bool:
    return isinstance(strength, float) and strength == 1.0


def _learns(turn: Turn) -> bool:
    """Return whether gradients flow through a turn."""
    return not isinstance(turn, Rotation) or turn.cos.requires_grad


def _checked(strength: Any) -> float:
    try:
        value = math.nan if isinstance(strength, str) else float(strength)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not abs(value) <= _LARGEST:  # learned strengths and angles are float32
        raise PositionError(
            f"strength is {strength!r:.60}; a finite number is required, 0 for none and 1 for full."
        )
    return value
