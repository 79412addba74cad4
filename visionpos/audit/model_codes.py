"""Moves of codes: what a model adds to its tokens is read off it, and what it would add elsewhere is added to that.

Tables that are resampled, tiled or summed at every call, and waves, have no rows that could be put elsewhere. Which
encoding says the same is tried, not asked; a code that none says stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.doors import door_of
from visionpos.audit.layer import Placed, cells_of, index_of
from visionpos.audit.model_inputs import as_rows, channels_of, layout_of
from visionpos.audit.model_moves import Change, Move
from visionpos.encodings import AbsWinSpec, Dims, FactorizedSpec, LearnedSpec, SineSpec, build
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.recipes import RECIPES
from visionpos.retrofit.places import embeds_of
from visionpos.retrofit.ports import attentions_of
from visionpos.retrofit.records import recipe_of_table
from visionpos.retrofit.seams import blocks_of, find

_SAME = 1e-4
"""Of the largest entry: an encoding that is this near says what the model adds."""


class _EnoughError(Exception):
    """Ends a pass once what is looked for was seen."""


class CodeMove(Move):
    """One table of those that a model adds to its tokens in a way of its own."""

    def __init__(self, table: Any, spec: Any, grid: Grid, size_hw: tuple[int, int] | None) -> None:
        super().__init__(table.path, spec)
        self.table, self.grid, self.size = table, grid, size_hw

    def __call__(self, change: Change) -> None:
        """Add what the table would add elsewhere, less what it adds."""
        places = embeds_of(self.table.model)
        if self.size is None or len(places) != 1:
            raise PositionError(
                f"{self.path} is added to tokens of more than one size, or of images whose size is not told."
            )
        code = observed(self.table, self.grid, self.size)  # [n, d]
        encoding = _said_by(candidates(self.table), self.grid, code, self.path)
        placed, still = change.placed(self.grid), Placed(cells_of(self.grid), self.grid)
        if placed.grid == still.grid and bool((placed.cells == placed.cells.round()).all()):
            apart = code[index_of(placed.cells, self.grid).to(code.device)] - code
        else:
            door: Any = door_of(encoding)
            apart = (door.given(placed) - door.given(still)).to(code)
        place = places[0]

        def add(_: Any, __: Any, output: Any) -> Any:
            maps = output[0] if isinstance(output, tuple) else output
            more = apart.to(maps)
            if place.layout == "prefixed":
                more = nn.functional.pad(more, (0, 0, maps.shape[1] - len(more), 0))
            elif layout_of(place, maps) == "nchw":
                more = more.mT.reshape(maps.shape[1:])
            elif maps.ndim == 4:
                more = more.reshape(maps.shape[1:])
            return (maps + more, *output[1:]) if isinstance(output, tuple) else maps + more

        place.module.register_forward_hook(add)


def observed(table: Any, grid: Grid, size_hw: tuple[int, int]) -> Tensor:
    """Return `[n, d]`, what a table adds to the tokens of an image: a pass with it, less one without.

    Raises:
        PositionError: if it is not simply added to one token a cell before the first block.
    """
    model, weight = table.model, table.value
    generator = torch.Generator().manual_seed(0)
    shape = (1, channels_of(model), *size_hw)
    noise = torch.randn(shape, generator=generator)
    found = []
    for image in (noise * 0, noise):
        entering = image.to(weight)
        rows = [_entered(model, entering, grid)]
        empty = nn.Parameter(torch.zeros_like(weight), requires_grad=False)
        table.owner._parameters[table.name] = empty  # noqa: SLF001 (setattr would register it anew)
        try:
            rows.append(_entered(model, entering, grid))
        finally:
            table.owner._parameters[table.name] = weight  # noqa: SLF001
        found.append(rows[0] - rows[1])
    if float((found[0] - found[1]).abs().max()) > _SAME * float(found[0].abs().max()):
        raise PositionError(f"{table.path} is more than added to tokens; it cannot be moved.")
    return found[0]


@torch.no_grad()
def _entered(model: Any, image: Tensor, grid: Grid) -> Tensor:
    """Return the patch tokens `[n, d]` of a pass, with all that is added to them."""
    seen: list[Tensor] = []

    def keep(value: Any) -> None:
        maps = value[0] if isinstance(value, tuple) else value
        channels_first = maps.ndim == 4 and maps.shape[-2:] == (grid.height, grid.width)
        layout = "nlc" if maps.ndim == 3 else "nchw" if channels_first else "nhwc"
        seen.append(as_rows(maps, layout).detach().clone())
        raise _EnoughError

    place = embeds_of(model)[0]
    if place.layout == "prefixed":
        handle = place.module.register_forward_hook(lambda _, __, output: keep(output))
    else:
        lattices = (port.seams.grid for port in attentions_of(model))
        anchors = [find(model, one.anchor) for one in lattices if one.kind == "unrolled"]
        first = anchors[0] if anchors else blocks_of(model)[0][1]
        handle = first.register_forward_pre_hook(lambda _, args: keep(args))
    try:
        model.forward_features(image)
    except _EnoughError:
        pass
    finally:
        handle.remove()
    front = seen[0].shape[1] - grid.size if seen else -1
    if front < 0:
        raise PositionError("a table is added where tokens are not those of the image's own grid.")
    return seen[0][0, front:]


def candidates(table: Any) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Yield (Spec, weights by name) of encodings that may say what a table adds."""
    value, layout = table.value.detach(), table.seams.layout
    rows = (value.flatten(2).mT[0] if layout == "nchw" else value.flatten(0, -2))[table.prefix :]
    recipe = recipe_of_table(table.model, table).removeprefix("direct:")
    recipes = {RECIPES[name]: name for name in reversed((recipe, *RECIPES)) if name in RECIPES}
    names = list(reversed(recipes.values()))
    none = torch.zeros_like(rows[:1])
    if table.seams.kind == "abs_tiled":
        sides = table.sides
        yield AbsWinSpec(global_hw=(1, 1), window_hw=sides), {"whole": none, "window": rows}
        return
    for name in names:
        for aspect in ("stretch", "square"):
            if layout == "axis_line":
                lines = {"coords": "fractional", "recipe": name, "aspect": aspect}
                count = len(rows)
                yield (
                    FactorizedSpec(table_hw=(count, 1), **lines),  # type: ignore[arg-type]
                    {"rows": rows, "columns": none},
                )
                yield (
                    FactorizedSpec(table_hw=(1, count), **lines),  # type: ignore[arg-type]
                    {"rows": none, "columns": rows},
                )
            elif table.sides is not None:
                yield (
                    LearnedSpec(grid_hw=table.sides, recipe=name, aspect=aspect),
                    {"table": rows},
                )


@torch.no_grad()
def _said_by(
    tried: Iterator[tuple[Any, dict[str, Tensor]]], grid: Grid, code: Tensor, path: str
) -> Any:
    """Return the first encoding that gives a code on a grid.

    Raises:
        PositionError: if there is none.
    """
    wanted = code.detach().float().cpu()
    for spec, weights in tried:
        # Weights are drawn, and then given: the user's generator must not move on.
        with torch.random.fork_rng(devices=[]):
            encoding: Any = build(
                spec, Dims(embed_dim=wanted.shape[-1], num_heads=1, depth=1)
            ).eval()
        for name, value in weights.items():
            owner, _, last = name.rpartition(".")
            holder = encoding.get_submodule(owner)
            setattr(holder, last, nn.Parameter(value.float().cpu(), requires_grad=False))
        try:
            given = encoding(grid)
        except PositionError:
            continue
        if given.shape == wanted.shape and float((given - wanted).abs().max()) <= _SAME * float(
            wanted.abs().max()
        ):
            return encoding
    raise PositionError(
        f"{path} gives a code that no Spec says; what it would give elsewhere is not known."
    )


class WaveMove(Move):
    """Waves of a whole grid, projected: any place can be put into them."""

    def __init__(self, table: Any) -> None:
        self.module, self.value = table.base, table.value
        weight = self.value.weight
        hidden = weight.shape[1] // 2
        theta = float(getattr(self.module, "temperature", 10000.0))
        super().__init__(table.path, SineSpec(hidden_dim=hidden, theta=theta))

    def __call__(self, change: Change) -> None:
        """Let the module give the waves of other places."""
        grid = Grid(3, 5)
        given = self._asked(grid)
        weights = {"projection.weight": self.value.weight.detach().flatten(1)}
        if self.value.bias is not None:
            weights["projection.bias"] = self.value.bias.detach()
        code = given.flatten(2).mT[0]
        door: Any = door_of(_said_by(iter([(self.spec, weights)]), grid, code, self.path))

        def give(_: Any, __: Any, output: Tensor) -> Tensor:
            own = Grid(*output.shape[-2:])
            moved = door.given(change.placed(own)) - door.given(Placed(cells_of(own), own))
            waves: Tensor = output + moved.mT.reshape(output.shape[1:]).to(output)
            return waves

        give_still = door.given(change.placed(grid))  # refuses before anything runs
        assert len(give_still) == grid.size  # noqa: S101 (one row a cell)
        self.module.register_forward_hook(give)

    def _asked(self, grid: Grid) -> Tensor:
        """Return the waves of a grid, `[1, d, y, x]`; sides are told one by one or together.

        Raises:
            PositionError: if the module cannot be asked for a grid.
        """
        sides = (1, grid.height, grid.width)
        for arguments in (sides, (sides,)):
            try:
                given: Tensor = self.module(*arguments)
            except (TypeError, RuntimeError, AttributeError):
                continue
            return given
        raise PositionError(f"{self.path} is asked for no grid; its places cannot be changed.")


class LookupMove(Move):
    """Tables that are read at the coordinates which come with the patches: other coordinates come."""

    def __init__(self, table: Any, grid: Grid) -> None:
        super().__init__(table.path, None)
        self.table, self.grid = table, grid

    def __call__(self, change: Change) -> None:
        """Let patches come with the coordinates of their new places."""
        places = change.cells(self.grid)[:, 1:]
        count = self.table.value.shape[-2]
        if bool((places != places.round()).any()) or bool(((places < 0) | (places >= count)).any()):
            raise PositionError(
                f"{self.path} has rows for whole coordinates from 0 to {count - 1} alone."
            )

        def enter(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            coords = places.long().to(args[0].device)
            told = {**named, "patch_coord": coords.expand(args[0].shape[0], -1, -1)}
            return args[:1], told

        self.table.owner.register_forward_pre_hook(enter, with_kwargs=True)


class FollowMove(Move):
    """A rotation that is told where tokens stand by what hands out the patches, and so follows it."""

    inside = True

    def __init__(self, path: str) -> None:
        super().__init__(path, SimpleNamespace(kind="axial_rope"))

    def __call__(self, change: Change) -> None:
        """Do nothing: the coordinates come from elsewhere."""
