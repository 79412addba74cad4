"""Parts: every position part of a model as something that can be moved, or taken out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from visionpos.audit.model_axes import AxisMove, LambdaMove
from visionpos.audit.model_biases import ConvMove, FeatureMove, IndexMove, LogMove
from visionpos.audit.model_codes import CodeMove, FollowMove, LookupMove, WaveMove
from visionpos.audit.model_moves import AttachedMove, Move, NoMove
from visionpos.audit.model_rope import RopeMove
from visionpos.audit.model_tables import TableMove
from visionpos.encodings import LearnedSpec
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.ports import dims_of
from visionpos.retrofit.rope import own_rope
from visionpos.retrofit.seams import row_of
from visionpos.retrofit.sizes import image_of
from visionpos.retrofit.tables import Table, tables_of

# Kind of the seam table -> kind of the Spec whose outcomes it shares.
_LIKE = {
    "rel_table": "swin_table",
    "abs_offset": "offset_table",
    "log_mlp": "log_bias",
    "axis_table": "decomposed_bias",
    "offset_feature": "gpsa",
    "conv": "peg",
    "abs_tiled": "abswin",
}
_STILL = {
    "abs": "is one of several tables that are added as one; a token has no row of its own.",
    "axis_table": "stands alone: differences along the other axis have no table beside it.",
    "fourier": "gives waves of a whole grid alone.",
    "lambda": "is a convolution over a layer's values, without pairs of tokens; it knows the order of the map alone.",
    "rotary": "belongs to no path that tokens take through this model.",
}


def cheap_copy(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy in eval mode that shares the weights, but for those of position parts; it may be moved at will.

    A model of another dtype is copied whole.

    Raises:
        PositionError: if the model cannot be copied.
    """
    floats = [weight for weight in model.parameters() if weight.is_floating_point()]
    alike = all(weight.dtype == dtype for weight in floats)
    own = positional_weights(model)
    memo: dict[int, Any] = (
        {id(weight): weight for weight in model.parameters() if id(weight) not in own}
        if alike
        else {}
    )
    try:
        made = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise PositionError(
            f"model cannot be copied ({' '.join(str(error).split())[:150]}); an audit never writes to the model it is "
            "given. Pass one that deepcopy takes: no hooks with locks or generators, no tensors with a graph."
        ) from error
    made.eval()
    return made if alike else made.to(dtype)


def positional_weights(model: nn.Module) -> set[int]:
    """Return the ids of all weights that belong to a position part."""
    found: set[int] = set()
    for table in tables_of(model):
        value = table.value
        weights = [value] if isinstance(value, nn.Parameter) else list(value.parameters())
        found |= {id(weight) for weight in weights}
    for part in attachments(model).values():
        found |= {id(weight) for weight in part.parameters()}
    return found


def moves_of(model: Any, grid: Grid, size_hw: tuple[int, int] | None = None) -> list[Move]:
    """Return every position part of a model, in the order in which tokens meet them.

    Args:
        model: a copy that may be written to.
        grid: of the patch tokens.
        size_hw: image that has this grid; that which the model serves when None.
    """
    rope, tables = own_rope(model), tables_of(model)
    size = image_of(model) if size_hw is None else size_hw
    found = [
        _move(table, grid, size, tables)
        for table in tables
        if rope is None or not _within(table, rope, model)
    ]
    if rope is not None:
        found.append(_rope(str(row_of(model).rope), rope, model, grid))
    for name, part in attachments(model).items():
        if not part.idle:
            found += [
                AttachedMove(f"visionpos.{name}", one, grid, _dtype(model))
                for one in part.encodings
            ]
    return found


def _within(table: Table, rope: nn.Module, model: Any) -> bool:
    path = str(row_of(model).rope)
    return table.path == path or table.path.startswith(f"{path}.") or table.owner is rope


def _dtype(model: nn.Module) -> torch.dtype:
    return next(
        (weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32
    )


def _rope(path: str, rope: Any, model: Any, grid: Grid) -> Move:
    if not hasattr(rope, "get_embed"):
        return NoMove(path, None, "is asked for no grid; its places cannot be changed.")
    return RopeMove(path, rope, dims_of(model), grid, _dtype(model))


def _move(table: Table, grid: Grid, size_hw: tuple[int, int] | None, tables: list[Table]) -> Move:
    kind = table.seams.kind
    spec = SimpleNamespace(kind=_LIKE[kind]) if kind in _LIKE else None
    makers: list[Callable[[], Move | None]] = [
        lambda: _told(table, grid, tables),
        lambda: _within_pairs(table, spec, tables),
        lambda: _added(table, spec, grid, size_hw),
    ]
    made = next((move for maker in makers if (move := maker()) is not None), None)
    if made is not None:
        return made
    if kind == "conv":
        return ConvMove(table.path, table.base, spec)
    if kind == "offset_feature":
        return FeatureMove(table, spec, grid)
    why = _STILL.get(kind, "is laid out in a way that no token has a row of its own.")
    return NoMove(table.path, spec, why)


def _told(table: Table, grid: Grid, tables: list[Table]) -> Move | None:
    """Return the move of a part that is asked for a grid or for coordinates, or that another one tells where it is."""
    kind = table.seams.kind
    if kind == "fourier" and isinstance(table.value, nn.Conv2d):
        return WaveMove(table)
    if kind == "index_lookup":
        return LookupMove(table, grid)
    follows = kind == "rotary" and any(one.seams.kind == "index_lookup" for one in tables)
    return FollowMove(table.path) if follows else None


def _within_pairs(table: Table, spec: Any, tables: list[Table]) -> Move | None:
    """Return the move of a part that works on pairs of tokens inside a layer."""
    kind = table.seams.kind
    other = _beside(table, tables) if kind == "axis_table" else None
    if other is not None:
        return AxisMove(table, spec, other)
    if table.module is None or table.sides is None:
        return None
    movers: dict[str, Callable[[Any, Any], Move]] = {
        "log_mlp": LogMove,
        "lambda": LambdaMove,
        "rel_table": IndexMove,
        "abs_offset": IndexMove,
    }
    return movers[kind](table, spec) if kind in movers else None


def _beside(table: Table, tables: list[Table]) -> Table | None:
    """Return the table of the other axis in the same attention."""
    others = (one for one in tables if one.owner is table.owner and one.path != table.path)
    return next((one for one in others if one.seams.kind == "axis_table"), None)


def _added(table: Table, spec: Any, grid: Grid, size_hw: tuple[int, int] | None) -> Move | None:
    """Return the move of a table that is added to tokens; None where its rows belong to no plane of cells."""
    kind, layout, sides = table.seams.kind, table.seams.layout, table.sides
    if table.module is not None or kind not in ("abs", "abs_tiled"):
        return None
    if kind == "abs" and layout == "axis_line":
        spec = SimpleNamespace(kind="factorized", coords="fractional")
    elif layout not in ("nlc", "nc", "nhwc", "nchw"):
        return None
    elif kind == "abs":
        if sides is None or tuple(sides) == (grid.height, grid.width) or table.moves:
            return TableMove(table, grid)
        spec = LearnedSpec(grid_hw=sides)
    return CodeMove(table, spec, grid, size_hw)


@torch.no_grad()
def take_out(model: Any) -> None:
    """Take every position part out of a copy: tables become zero, rotations stand still, attachments rest.

    Raises:
        PositionError: if a part cannot be told from what it stands in.
    """
    rope = own_rope(model)
    for table in tables_of(model):
        if rope is None or not _within(table, rope, model):
            _empty(table)
    if rope is not None:
        if not hasattr(rope, "get_embed"):
            raise PositionError(f"{row_of(model).rope} cannot be taken out: it gives no table.")
        freeze_rope(rope)
    for part in attachments(model).values():
        part.set_strength(0.0)


def _empty(table: Table) -> None:
    value = table.value
    if table.seams.kind == "rotary" or table.path.endswith("reparam_conv"):
        raise PositionError(f"{table.path} cannot be taken out: nothing shows what would be left.")
    for weight in [value] if isinstance(value, nn.Parameter) else list(value.parameters()):
        weight.zero_()
    for cache in () if table.module is None else table.module.clear:
        setattr(table.base, cache, {})


def freeze_rope(rope: Any) -> None:
    """Let a model's own rotary module turn nothing: sines of 0, cosines of 1."""
    inner = rope.get_embed

    def get_embed(*args: Any, **named: Any) -> Any:
        table = inner(*args, **named)
        half = table.shape[-1] // 2
        return torch.cat(
            [torch.zeros_like(table[..., :half]), torch.ones_like(table[..., half:])], -1
        )

    rope.get_embed = get_embed
