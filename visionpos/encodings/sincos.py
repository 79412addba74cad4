"""Fixed sin-cos: sines and cosines of each axis in their own channels. MAE, timm, big_vision, V-JEPA; images, clips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F

from visionpos.encodings.doors import Additive, Dims, check_points
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, ladder
from visionpos.geometry.grid import Grid
from visionpos.geometry.ranges import check_theta
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample

if TYPE_CHECKING:
    from torch import Tensor

Dialect = Literal["mae", "timm", "big_vision", "vjepa", "timm_reversed", "omdet_turbo"]


class _Order(NamedTuple):
    """What sets one dialect apart."""

    axis_order: tuple[int, int]  # which of (y, x) fills the first channels: (1, 0) is x first
    per_axis: bool  # [sin, cos] of one axis, then of the next; else all sines, then all cosines
    inclusive: bool  # the last frequency is exactly 1 / theta
    dtype: torch.dtype  # in which the source computes
    column_major: bool = (
        False  # tokens are numbered down the columns, which is a fault on rectangles
    )


_ORDERS: dict[str, _Order] = {
    "mae": _Order((1, 0), per_axis=True, inclusive=False, dtype=torch.float64),
    "timm": _Order((0, 1), per_axis=False, inclusive=False, dtype=torch.float32),
    "big_vision": _Order((1, 0), per_axis=True, inclusive=True, dtype=torch.float32),
    "vjepa": _Order((0, 1), per_axis=True, inclusive=False, dtype=torch.float64),
    "timm_reversed": _Order(
        (1, 0), per_axis=False, inclusive=False, dtype=torch.float32, column_major=True
    ),
    "omdet_turbo": _Order(
        (1, 0), per_axis=True, inclusive=False, dtype=torch.float32, column_major=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinCosSpec:
    """Settings of fixed sin-cos features.

    Args:
        dialect: channel order and frequency ladder of one source: "mae" x first; "timm" [sin y, sin x, cos y, cos x];
            "big_vision" x first, last frequency exactly 1/theta; "vjepa" y first. Two number the tokens down the
            columns, which is wrong on rectangles and pinned for what was trained so: "timm_reversed" (timm's
            reverse_coord) and "omdet_turbo" (OmDet-Turbo and the original RT-DETR).
        theta: ladder base.
        axes: 2 (y, x), whose frames share their code, or 3 (t, y, x): "vjepa" gives t half of the channels and y and x
            a quarter each; "big_vision" (vit-pytorch's 3-D SimpleViT) a sixth to each wave, x first.
        uniform_power: three axes of "vjepa" alone: the same width for all, 2 * ceil(D / 6), cut to D at the end, so
            that x loses channels.
        extent: what a larger grid means. "index" regenerates: indices run on, the same frequency a patch. "trained"
            stretches: cell centres keep their place in the picture of `trained_shape`.
        trained_shape: sides of the trained grid, one an axis; needed by extent "trained".
        recipe: with extent "trained", interpolate the table of the trained grid by this recipe, as those do who find
            it stored in a checkpoint ("mae"), instead of stretching coordinates.

    Raises:
        PositionError: for an unknown dialect, or settings that do not belong together.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["sincos"] = "sincos"
    dialect: Dialect = "mae"
    theta: float = 10000.0
    axes: Literal[2, 3] = 2
    uniform_power: bool = False
    extent: Literal["index", "trained"] = "index"
    trained_shape: tuple[int, ...] | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        if self.axes != 2 and (self.axes, self.dialect) not in ((3, "vjepa"), (3, "big_vision")):
            raise PositionError(
                f"axes is {self.axes} in dialect {self.dialect!r}; 3 axes exist in 'vjepa' and 'big_vision', all "
                "others have 2. Use axes=2: the frames of a clip then share their code."
            )
        if self.uniform_power and (self.axes, self.dialect) != (3, "vjepa"):
            raise PositionError(
                f"uniform_power is True in dialect {self.dialect!r} with {self.axes} axes; only 'vjepa' with 3 axes "
                "has it. Leave it False."
            )
        self._check_extent()

    def _check_extent(self) -> None:
        shape = self.trained_shape
        if self.extent == "index" and (shape is not None or self.recipe is not None):
            raise PositionError(
                f"trained_shape {shape} and recipe {self.recipe!r} mean nothing to extent 'index', which runs the "
                "indices on. Set extent='trained', or leave both out."
            )
        if self.extent == "trained" and (
            shape is None or len(shape) != self.axes or not all(side >= 1 for side in shape)
        ):
            raise PositionError(
                f"trained_shape is {shape} for {self.axes} axes; extent 'trained' needs one side of at least 1 an "
                "axis, ordered (t,) y, x. Give the grid the model was trained on."
            )
        if self.recipe is not None:
            recipe_of(self.recipe)


class SinCos(Additive):
    """Fixed sin-cos features on cell indices; no parameters, any grid.

    On the trained grid every extent gives the same table. Frames of a clip share their code with two axes.

    Raises:
        PositionError: if embed_dim cannot be shared out between the axes.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> table = SinCos(SinCosSpec(), Dims(embed_dim=8, num_heads=1, depth=1))(Grid(2, 3))
        >>> table[1].round(decimals=4)
        tensor([0.8415, 0.0100, 0.5403, 0.9999, 0.0000, 0.0000, 1.0000, 1.0000])

    Reference:
        facebookresearch/mae util/pos_embed.py (x first although its variables say h; swapping them "right" breaks every
        checkpoint), timm build_sincos2d_pos_embed, google-research/big_vision models/vit.py, facebookresearch/jepa
        src/models/utils/pos_embs.py. timm's interleave_sin_cos is "vjepa" in float32, not a dialect of its own.
    """

    spec: SinCosSpec

    def __init__(self, spec: SinCosSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        least, step = _sizes(spec)
        if dims.embed_dim % step or dims.embed_dim < least or self._starved():
            raise PositionError(
                f"embed_dim is {dims.embed_dim}; sin-cos {spec.dialect!r} needs a multiple of {step}, at least {least}"
                + (", that leaves the last axis a channel." if spec.uniform_power else ".")
            )
        self._ladder(least // (2 * spec.axes), None)  # refuse an impossible theta now

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]` float32."""
        spec = self.spec
        if spec.recipe is None or spec.trained_shape is None:
            return self._lattice(grid, device, spec.trained_shape)
        # Tables are resized in space; time is regenerated.
        frames = grid.frames if spec.axes == 3 else 1
        source = Grid(spec.trained_shape[-2], spec.trained_shape[-1], frames)
        target = Grid(grid.height, grid.width, frames)
        table = self._lattice(source, device, None)
        moved = resample(table, source=source, target=target, recipe=spec.recipe)
        return moved.repeat(grid.frames // frames, 1)

    def at(self, coords: Tensor) -> Tensor:
        """Return the code at any points, `[..., n, embed_dim]` float32.

        Args:
            coords: `[..., n, axes]` in cells of the trained grid, (t,) y, x; whole numbers are cell centres.

        Raises:
            PositionError: if coords are of another rank or not finite, or a grid's code is not a function of the place
                alone: its tokens are numbered down the columns, or its table is interpolated by a recipe.
        """
        check_points(coords, self.spec.axes, "coords", rank=2)
        if self._order.column_major or self.spec.recipe is not None:
            raise PositionError(
                f"dialect is {self.spec.dialect!r} and recipe {self.spec.recipe!r}; at() needs a code that is a "
                "function of the place: row-major, and without a recipe. Pick the rows of forward(grid) instead."
            )
        return self._code(list(coords.to(self._order.dtype).unbind(-1)))

    @property
    def _order(self) -> _Order:
        return _ORDERS[self.spec.dialect]

    def _shares(self) -> list[tuple[int, int]]:
        """Return (axis, pairs) in channel order."""
        width = self.dims.embed_dim
        if self.spec.axes == 2:
            return [(axis, width // 4) for axis in self._order.axis_order]
        if self.spec.dialect == "big_vision":
            return [(axis, width // 6) for axis in (2, 1, 0)]
        if self.spec.uniform_power:
            return [(axis, math.ceil(width / 6)) for axis in (0, 1, 2)]
        return [(0, width // 4), (1, width // 8), (2, width // 8)]

    def _starved(self) -> bool:
        """Return whether the cut at embed_dim leaves the last axis no channel."""
        return sum(2 * pairs for _, pairs in self._shares()[:-1]) >= self.dims.embed_dim

    def _ladder(self, pairs: int, device: torch.device | None) -> Tensor:
        """Return the frequencies of one axis: `theta ** -(k / pairs)`, or `-(k / (pairs - 1))` if inclusive."""
        theta, dtype = self.spec.theta, self._order.dtype
        if not self._order.inclusive:
            return ladder(pairs, theta=theta, device=device, dtype=dtype)
        rows = ladder(pairs - 1, theta=theta, device=device, dtype=dtype)
        return torch.cat([rows, torch.full_like(rows[:1], 1.0 / theta)])

    def _lattice(
        self, grid: Grid, device: torch.device | None, trained: tuple[int, ...] | None
    ) -> Tensor:
        """Return `[n, embed_dim]`; with a trained shape its cells are cells of that grid, centre over centre."""
        axes = self.spec.axes
        places = []
        for axis, side in enumerate(grid.shape[3 - axes :]):
            line = coordinates(Grid(1, side), CoordSpec(axes=1), device=device)
            tick = line.squeeze(-1).to(self._order.dtype)
            if trained is not None:  # exact where the sides agree: the factor is 1
                tick = (tick + 0.5) * (trained[axis] / side) - 0.5
            places.append(tick.view([-1 if other == axis else 1 for other in range(axes)]))
        code = self._code(places)  # [(t,) y, x, embed_dim]
        if self._order.column_major:
            code = code.transpose(-3, -2)
        flat = code.flatten(0, -2)
        return flat.repeat(grid.frames, 1) if axes == 2 and grid.frames > 1 else flat

    def _code(self, places: list[Tensor]) -> Tensor:
        """Return sines and cosines in channel order; places hold one tensor an axis, which broadcast."""
        sines, cosines = [], []
        for axis, pairs in self._shares():
            rungs = self._ladder(pairs, places[axis].device).unsqueeze(0)  # [1, pairs]
            turns = angles(places[axis].unsqueeze(-1), rungs)
            sines.append(turns.sin().to(torch.float32))
            cosines.append(turns.cos().to(torch.float32))
        parts = sines + cosines
        if self._order.per_axis:
            parts = [wave for pair in zip(sines, cosines, strict=True) for wave in pair]
        shape = torch.broadcast_shapes(*(place.shape for place in places))
        code = torch.cat([part.expand(*shape, -1) for part in parts], dim=-1)
        # Uniform power is cut to size; sixths are filled up with zeros.
        return F.pad(code, (0, self.dims.embed_dim - code.shape[-1]))


def _sizes(spec: SinCosSpec) -> tuple[int, int]:
    """Return the least embed_dim and its step."""
    if spec.axes == 2:
        return (8, 4) if _ORDERS[spec.dialect].inclusive else (4, 4)
    if spec.dialect == "big_vision":
        return (12, 1)
    return (6, 2) if spec.uniform_power else (8, 8)


def dialect_of(
    table: Tensor, grid: Grid, *, prefix: int = 0, theta: float = 10000.0, atol: float = 1e-4
) -> Dialect | None:
    """Return the dialect that makes a stored fixed table, or None: which axis a checkpoint's channels hold is tried.

    Args:
        table: `[..., prefix + n, embed_dim]`, as stored in a state dict (MAE's `pos_embed`).
        grid: its grid, which is not square if the answer is to tell row-major from column-major.
        prefix: leading rows of the class token.
        theta: ladder base.
        atol: largest difference allowed.

    Raises:
        PositionError: if the rows are not those of the grid.

    Example:
        >>> made = SinCos(SinCosSpec(dialect="vjepa"), Dims(embed_dim=8, num_heads=1, depth=1))(
        ...     Grid(2, 3)
        ... )
        >>> dialect_of(made, Grid(2, 3))
        'vjepa'
    """
    rows = table.detach().flatten(0, -2)[prefix:]
    if rows.shape[0] != grid.size:
        raise PositionError(
            f"table has {rows.shape[0]} rows after prefix {prefix} and grid {grid.shape} {grid.size} cells; the two "
            "must agree. Pass the grid of the table."
        )
    dims = Dims(embed_dim=rows.shape[-1], num_heads=1, depth=1)
    for dialect in get_args(Dialect):
        spec = SinCosSpec(dialect=dialect, theta=theta)
        least, step = _sizes(spec)
        if dims.embed_dim % step or dims.embed_dim < least:
            continue
        made = SinCos(spec, dims)(grid, device=rows.device)
        if bool((made - rows.to(made.dtype)).abs().max() <= atol):
            found: Dialect = dialect
            return found
    return None
