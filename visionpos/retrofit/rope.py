"""The model's own rotary encoding, read as a Spec of this package.

And the module that replaces it where timm's own cannot keep the wanted extent at a new size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from torch import nn

from visionpos.encodings import AxialRope, AxialRopeSpec, Dims, MixedRope, MixedRopeSpec
from visionpos.errors import PositionError
from visionpos.geometry import CoordSpec, Grid, Rotation, angles, augment, coordinates
from visionpos.geometry.fields import check_kind
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.attachment import TURNS
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.paths import whole_sides
from visionpos.retrofit.ports import dims_of, ports_of
from visionpos.retrofit.seams import find, place, row_of

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.coords import Extent

RopeSpec = AxialRopeSpec | MixedRopeSpec
_PAIR = "it must be (height, width) in tokens. Pass two whole numbers above 0."


def own_rope(model: Any) -> Any:
    """Return the model's own rotary module, or None."""
    name = row_of(model).rope
    return None if name is None else find(model, name)


def spec_of_rope(rope: Any) -> RopeSpec | None:
    """Return the Spec that gives the same rotation as a timm rotary module, or None if no Spec says it.

    Known are RotaryEmbeddingCat with temperature bands on indices (EVA-02, PE, RoPE-ViT axial), RotaryEmbeddingDinoV3
    and RotaryEmbeddingMixed with x first. Pixel bands, other grids of timm and its M-RoPE are left to timm.
    """
    if rope is None:  # what a model without one has
        return None
    if not isinstance(rope, nn.Module):
        raise PositionError(
            f"rope is {rope!r:.60}; a rotary module is required. Pass model.rope of a timm model that has one."
        )
    if isinstance(rope, GridRope):
        return rope.spec
    if isinstance(rope, RotaryEmbeddingMixed) and rope.grid_indexing == "xy":
        return MixedRopeSpec(theta=float(rope.temperature), coords=_moves(CoordSpec(), rope))
    if isinstance(rope, RotaryEmbeddingDinoV3) and (
        rope.min_period is None or rope.grid_indexing == "ij"
    ):
        return _dinov3_spec(rope)
    # Before timm 1.0.29 there was no grid_type: in_pixels alone said what the bands multiply.
    on_indices = getattr(rope, "grid_type", "index") == "index"
    if isinstance(rope, RotaryEmbeddingCat) and not rope.in_pixels and on_indices:
        return _cat_spec(rope)
    return None


def _cat_spec(rope: Any) -> AxialRopeSpec:
    """Return the Spec of timm's concatenated axial rotary encoding."""
    trained = (
        None if rope.ref_feat_shape is None else tuple(int(side) for side in rope.ref_feat_shape)
    )
    coords = CoordSpec(
        offset=float(rope.grid_offset),
        extent="trained" if trained else None,
        trained_shape=trained,
    )
    return AxialRopeSpec(
        theta=float(rope.temperature),
        coords=_moves(coords, rope),
        pairing="half" if getattr(rope, "rotate_half", False) else "adjacent",
        axis_order=(1, 0) if rope.grid_indexing == "xy" else None,
    )


def _dinov3_spec(rope: Any) -> AxialRopeSpec:
    """Return the Spec of timm's DINOv3 rotary encoding."""
    coords = CoordSpec(
        unit="centred", offset=float(rope.grid_offset), normalize=rope.normalize_coords
    )
    periods = None if rope.min_period is None else (float(rope.min_period), float(rope.max_period))
    return AxialRopeSpec(
        theta=100.0 if rope.temperature is None else float(rope.temperature),
        coords=_moves(coords, rope),
        pairing="half" if rope.rotate_half else "adjacent",
        axis_order=(1, 0) if rope.grid_indexing == "xy" else None,
        unit="radians" if periods else "turns",
        periods=periods,
    )


def _moves(coords: CoordSpec, rope: Any) -> CoordSpec:
    """Return the coordinates with timm's training-time augmentation (absent before timm 1.0.31)."""
    moved = dataclasses.replace(
        coords,
        shift=getattr(rope, "shift_coords", None),
        jitter=getattr(rope, "jitter_coords", None),
        rescale=getattr(rope, "rescale_coords", None),
    )
    x_first = moved.augments and rope.grid_indexing == "xy"
    return dataclasses.replace(moved, first="x") if x_first else moved


class GridRope(nn.Module):
    """A rotary module with timm's interface whose coordinates follow a CoordSpec of this package.

    It stands in for `model.rope` where the wanted extent is not the habit of timm's module. A learned `freqs` keeps its
    name, shape and Parameter object.
    """

    freqs: nn.Parameter | None
    anchor: Tensor

    def __init__(self, rope: Any, spec: RopeSpec, dims: Dims, grid: Grid) -> None:
        super().__init__()
        check_kinds("rope", rope, nn.Module)
        check_kinds("spec", spec, AxialRopeSpec, MixedRopeSpec)
        check_kind("dims", dims, Dims)
        check_kind("grid", grid, Grid)
        self.spec = spec
        self.freqs = rope.freqs if isinstance(spec, MixedRopeSpec) else None
        self.axial = AxialRope(spec if isinstance(spec, AxialRopeSpec) else AxialRopeSpec(), dims)
        fixed = getattr(rope, "feat_shape", None) is not None
        self.feat_shape: tuple[int, int] | None = (grid.height, grid.width) if fixed else None
        # Empty: it only follows the model from device to device.
        device = next((part.device for part in [*rope.parameters(), *rope.buffers()]), None)
        self.register_buffer("anchor", torch.empty(0, device=device), persistent=False)
        self.train(rope.training)

    def update_feat_shape(self, feat_shape: tuple[int, int]) -> None:
        """Serve another grid from now on; a module without a fixed grid is asked for one at every call.

        Raises:
            PositionError: if it is no (height, width) of whole numbers above 0.
        """
        if whole_sides(feat_shape) is None:
            raise PositionError(f"feat_shape is {feat_shape!r:.60}; {_PAIR}")
        if self.feat_shape is not None:
            self.feat_shape = (int(feat_shape[0]), int(feat_shape[1]))

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that must not decay."""
        return {"freqs"} if self.freqs is not None else set()

    def get_embed(
        self, shape: tuple[int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return timm's table `[n, 2 head_dim]`, or `[depth, heads, n, 2 head_dim]` for mixed: sines, then cosines."""
        sides: Any = self.feat_shape if shape is None else shape
        if sides is None:
            raise PositionError(
                "shape is None and the model has no fixed grid; pass (height, width)."
            )
        if not isinstance(sides, (tuple, list)) or len(sides) != 2:
            raise PositionError(f"shape is {sides!r:.60}; {_PAIR}")
        coords = coordinates(Grid(*sides), self.spec.coords, device=self.anchor.device)
        coords = augment(coords, self.spec.coords) if self.training else coords
        if self.freqs is not None:
            turns = angles(coords, MixedRope.from_timm(self.freqs))
            dtype = self.freqs.dtype if dtype is None else dtype
        else:
            turns = self.axial.angles(coords)
        cos, sin = Rotation.of(turns, self.spec.pairing).full_width()
        table = torch.cat([sin, cos], dim=-1)
        return table if dtype is None else table.to(dtype)


def spec_at_extent(model: Any, extent: Extent, source: Grid) -> RopeSpec | None:
    """Return the Spec with which the model's own rotary encoding keeps an extent, or None if it need not change.

    Args:
        model: the model, not changed.
        extent: "trained" or "index".
        source: grid the weights serve now.

    Raises:
        PositionError: if the encoding is of a kind that no Spec says, or cannot keep this extent.
    """
    rope = own_rope(model)
    if rope is None:
        return None
    spec = spec_of_rope(rope)
    if spec is None:
        raise PositionError(
            f"extent {extent!r} cannot be given to a {type(rope).__name__}; its coordinates are timm's own. Leave "
            "extent=None."
        )
    coords = with_extent(spec.coords, extent, source)
    return None if coords == spec.coords else dataclasses.replace(spec, coords=coords)


def attached_at_extent(model: Any, extent: Extent, source: Grid) -> list[tuple[Any, Any]]:
    """Return (encoding, Spec) with which attached rotations keep an extent; the model is not changed.

    Raises:
        PositionError: if an encoding numbers its tokens in its own way, or attentions have grids of their own.
    """
    specs: list[tuple[Any, Any]] = []
    for name, part in attachments(model).items():
        if not isinstance(part.encoding, TURNS):
            continue
        spec: Any = part.encoding.spec
        how = ""
        if not isinstance(getattr(spec, "coords", None), CoordSpec):
            how = f"{type(spec).__name__} numbers its tokens in its own way"
        elif any(port.local for port in ports_of(model)):
            how = f"attentions of a {type(model).__name__} have grids of their own, not the image's"
        if how:
            raise PositionError(
                f"extent {extent!r} cannot be given to the attached {name!r}; {how}. Leave extent=None, or detach it "
                "first."
            )
        moved = dataclasses.replace(spec, coords=with_extent(spec.coords, extent, source))
        specs += [(encoding, moved) for encoding in part.encodings]
    return specs


def give_rope(model: Any, spec: RopeSpec, grid: Grid) -> None:
    """Let the model's own rotary encoding follow a Spec from now on, on the grid that the model serves."""
    place(model, str(row_of(model).rope), GridRope(own_rope(model), spec, dims_of(model), grid))


def with_extent(coords: CoordSpec, extent: Extent, source: Grid) -> CoordSpec:
    """Return coordinates that keep an extent from now on, starting from what they give on `source`.

    Args:
        coords: the present numbering.
        extent: "trained" keeps the span that `source` has now, "index" keeps the step between its cells.
        source: grid that the weights serve now.

    Raises:
        PositionError: if the unit cannot keep the extent: "endpoint", or a common divisor of unequal sides, whose
            centre would move against the prefix tokens.
    """
    if extent == (coords.extent or coords.habit):
        return coords
    if coords.normalize != "separate" and len({*source.shape[1:]}) > 1:
        raise PositionError(
            f"extent {extent!r} cannot be given to coordinates with normalize={coords.normalize!r} on a grid of "
            f"{source.height}x{source.width}; only a square keeps its centre. Leave extent=None."
        )
    sides = {1: (source.size,), 2: (source.height, source.width), 3: source.shape}[coords.axes]
    scale = coords.scale or (1.0,) * coords.axes
    if extent != coords.habit:
        # On the square that is left every divisor is the own side, and afterwards none is used.
        return dataclasses.replace(coords, extent=extent, trained_shape=sides, normalize="separate")
    # Back to the habit of the unit: what trained_shape did becomes a constant scale.
    trained = coords.trained_shape or sides
    ratio = [side / old for side, old in zip(sides, trained, strict=True)]
    factors = ratio if coords.habit == "trained" else [1.0 / share for share in ratio]
    changed = tuple(old * factor for old, factor in zip(scale, factors, strict=True))
    scale_or_none = None if all(factor == 1.0 for factor in changed) else changed
    return dataclasses.replace(coords, extent=None, trained_shape=None, scale=scale_or_none)
