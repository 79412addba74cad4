"""Coordinates: where the tokens of a grid are; `augment` moves them in training.

A Grid and a CoordSpec enter; `[n, axes]` numbers leave, axes ordered (t,) y, x, tokens row-major.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice, check_fields, check_kind
from visionpos.geometry.grid import check_grid
from visionpos.geometry.places import check_points

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

Unit = Literal["index", "centred", "endpoint", "fractional", "span"]
Normalize = Literal["separate", "min", "max"]
Extent = Literal["trained", "index"]
Scope = Literal["forward", "block", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordSpec:
    """How token coordinates are numbered, which extent they keep, and how training perturbs them.

    Args:
        unit: "index" counts cells 0, 1, ...; "centred" puts cell centres on [-1, 1] (DINOv3); "endpoint" puts
            the first and last cell exactly on -1 and 1; "fractional" puts cell centres on [0, 1] (NaViT); "span" puts
            the first and last cell exactly on 0 and 1 (LieRE).
        axes: 1 raster position, 2 (y, x), 3 (t, y, x).
        offset: added to every index before anything else, in cells (Perception Encoder and Llama 4 use 1).
        normalize: which side divides "centred" and "fractional" coordinates: each axis its own ("separate"),
            or the shortest or longest spatial side for both ("min", "max").
        extent: what a larger grid means. "trained": the same view with more tokens, coordinates keep the span
            of `trained_shape`. "index": a wider view at the same scale, the spacing of cells is kept. None is
            the habit of the unit: "index" for indices, "trained" for all others.
        trained_shape: sides of the grid the weights were trained on, one an axis. Needed by the extent that is
            not the habit of the unit.
        scale: multiplies every axis last: below 1 packs cells closer (position interpolation), one factor an axis.
        shift: training only: one number an axis, uniform in [-shift, shift], is added.
        jitter: training only: each axis is scaled by a log-uniform factor in [1/jitter, jitter].
        rescale: training only: all axes are scaled by one log-uniform factor in [1/rescale, rescale].
        scope: who shares a draw: a whole "forward" (timm), each "block" (the original DINOv3), each "sample".
        first: the spatial axis that takes the first of two draws: "y" (DINOv3), or "x" as timm's "xy" grids and its
            RoPE-Mixed do. It matters for equal draws under one seed alone.

    Raises:
        PositionError: naming the field that is out of range.

    What each augmentation can and cannot change: see `augment`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    unit: Unit = "index"
    axes: int = 2
    offset: float = 0.0
    normalize: Normalize = "separate"
    extent: Extent | None = None
    trained_shape: tuple[int, ...] | None = None
    scale: tuple[float, ...] | None = None
    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None
    scope: Scope = "forward"
    first: Literal["y", "x"] = "y"

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("axes", self.axes, (1, 2, 3))
        self._check_effect()
        self._check_trained_shape()
        self._check_augmentation()

    def _check_effect(self) -> None:
        """Refuse a field that would be ignored."""
        pinned = self.unit in ("endpoint", "span")
        if pinned and self.offset:
            raise PositionError(
                f"offset is {self.offset} with unit {self.unit!r}, whose ends are pinned; it would have no effect. "
                "Leave it at 0, or use unit 'centred'."
            )
        wide = self.extent == "index" and self.unit != "index"
        if self.normalize != "separate" and (self.unit == "index" or pinned or wide):
            raise PositionError(
                f"normalize is {self.normalize!r} with unit {self.unit!r} and extent {self.extent!r}; nothing is "
                "divided by a side there, so it would have no effect. Leave it at 'separate'."
            )

    def _check_trained_shape(self) -> None:
        shape = self.trained_shape
        if self.scale is not None and (len(self.scale) != self.axes or min(self.scale) <= 0):
            raise PositionError(
                f"scale is {self.scale} for {self.axes} axes; one finite factor above 0 an axis is required."
            )
        if shape is not None and (len(shape) != self.axes or min(shape) < 1):
            raise PositionError(
                f"trained_shape is {shape} for {self.axes} axes; one side of at least 1 an axis, ordered "
                "(t,) y, x, is required."
            )
        if shape is None and self.extent is not None and self.extent != self.habit:
            raise PositionError(
                f"extent {self.extent!r} with unit {self.unit!r} needs trained_shape, which is None; give the "
                "sides of the grid that the weights were trained on."
            )
        if self.unit == "endpoint" and self.extent == "index":
            raise PositionError(
                "extent 'index' is not defined for unit 'endpoint', whose ends are pinned to -1 and 1; "
                "use unit 'centred'."
            )

    def _check_augmentation(self) -> None:
        if self.shift is not None and self.shift < 0:
            raise PositionError(
                f"shift is {self.shift}; a finite number of at least 0 is required."
            )
        for name in ("jitter", "rescale"):
            factor = getattr(self, name)
            if factor is not None and factor < 1:
                raise PositionError(
                    f"{name} is {factor}; a finite factor of at least 1 is required (2 means half to double)."
                )

    @property
    def habit(self) -> Extent:
        """Return the extent that the unit keeps when nothing is said."""
        return "index" if self.unit == "index" else "trained"

    @property
    def augments(self) -> bool:
        """Return whether training perturbs these coordinates."""
        return any(value is not None for value in (self.shift, self.jitter, self.rescale))


def coordinates(
    grid: Grid, spec: CoordSpec | None = None, *, device: torch.device | None = None
) -> Tensor:
    """Return where every token of a grid is.

    Args:
        grid: the lattice; with 2 axes the frames of a clip share their (y, x).
        spec: numbering and extent; plain indices (y, x) when None.
        device: where to build.

    Returns:
        `[n, axes]` float32, axes ordered (t,) y, x. No augmentation is applied: see `augment`.

    Example:
        >>> coordinates(Grid(2, 2), CoordSpec(unit="centred"))
        tensor([[-0.5000, -0.5000],
                [-0.5000,  0.5000],
                [ 0.5000, -0.5000],
                [ 0.5000,  0.5000]])

    Reference:
        DINOv3 (arXiv 2508.10104), facebookresearch/dinov3 layers/rope_position_encoding.py; EVA-02's rescaling to
        the pre-training grid, baaivision/EVA.
    """
    check_grid(grid)
    spec = CoordSpec() if spec is None else spec
    check_kind("spec", spec, CoordSpec)
    sides = {1: (grid.size,), 2: (grid.height, grid.width), 3: grid.shape}[spec.axes]
    ticks = [
        _ticks(side, _denominator(sides, axis, spec), axis, spec, device)
        for axis, side in enumerate(sides)
    ]
    if spec.scale is not None:
        ticks = [tick * factor for tick, factor in zip(ticks, spec.scale, strict=True)]
    lattice = torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1).flatten(0, -2)  # [n, axes]
    return lattice.repeat(grid.frames, 1) if spec.axes == 2 and grid.frames > 1 else lattice


def _denominator(sides: tuple[int, ...], axis: int, spec: CoordSpec) -> int:
    """Return the side that divides an axis; "min" and "max" look at the two spatial sides only."""
    if spec.normalize == "separate" or axis < len(sides) - 2:
        return sides[axis]
    return min(sides[-2:]) if spec.normalize == "min" else max(sides[-2:])


def _ticks(
    side: int, denominator: int, axis: int, spec: CoordSpec, device: torch.device | None
) -> Tensor:
    """Return the coordinates along one axis, `[side]`."""
    index = torch.arange(side, device=device, dtype=torch.float32) + spec.offset
    trained = None if spec.trained_shape is None else spec.trained_shape[axis]
    if spec.unit == "index":
        return index / side * trained if spec.extent == "trained" and trained else index
    if spec.unit == "endpoint":
        return _end_points(-1.0, 1.0, side, device)
    if spec.unit == "span":
        reach = side / trained if spec.extent == "index" and trained else 1.0
        return _end_points(0.0, reach, side, device)
    centre = index + 0.5
    if spec.extent == "index" and trained:
        # A wider view grows on both sides of the centre, so that 0 stays the middle of the picture.
        share = (centre - side / 2) / trained + 0.5
    else:
        share = centre / denominator
    return 2.0 * share - 1.0 if spec.unit == "centred" else share


def _end_points(low: float, high: float, side: int, device: torch.device | None) -> Tensor:
    """Return `side` points from low to high, both included; a single one lies on low. One graph for all sides."""
    cells = torch.arange(side, device=device)
    step = torch.full((), (high - low) / max(side - 1, 1), dtype=torch.float32, device=device)
    # As linspace does: counted from the nearer end, by a float32 step, rounded once; hence its bits (on the CPU).
    up, down = cells * step.double() + low, high - (side - 1 - cells) * step.double()
    return torch.where(cells < max(side // 2, 1), up, down).to(torch.float32)


def offsets(coords: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the difference of every query coordinate to every key coordinate, query minus key.

    Args:
        coords: `[n, axes]` of the queries.
        others: `[m, axes]` of the keys; the queries themselves when None.

    Returns:
        `[n, m, axes]`: grows as n x m.

    Example:
        >>> offsets(torch.tensor([[0.0, 0.0], [2.0, 1.0]]))[1, 0]
        tensor([2., 1.])

    Raises:
        PositionError: if the two have other axes, or (on the CPU) hold NaN or infinity.
    """
    others = coords if others is None else others
    check_points(coords, None, "coords", rank=2)
    check_points(others, coords.shape[-1], "others", rank=2)
    return coords.unsqueeze(-2) - others.unsqueeze(-3)
