"""lineage: where the positions of a model come from, for the header of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from visionpos.checkpoint import Lineage
from visionpos.config import plain
from visionpos.errors import PositionError
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.dynamic import is_dynamic
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.records import recipe_of_table, record_of
from visionpos.retrofit.rope import own_rope, spec_of_rope
from visionpos.retrofit.seams import blocks_of, find, grid_of, prefix_of, row_of, sides_of
from visionpos.retrofit.sizes import image_of
from visionpos.retrofit.tables import Table, position_modules, tables_of
from visionpos.retrofit.windows import last_policy, windows_of

if TYPE_CHECKING:
    from visionpos.retrofit.attachment import Attachment
    from visionpos.retrofit.paths import Sides


def lineage(model: nn.Module, *, source: str = "") -> Lineage:
    """Return where the positions of a model come from, for the header of its checkpoint.

    Args:
        model: a timm model whose class has a row in the seam table.
        source: free text: the checkpoint these weights started from.

    Raises:
        PositionError: if the class has no row, or source is no text.
    """
    check_kinds("source", source, str)
    whole: Any = model
    spec = spec_of_rope(own_rope(whole))
    cfg = getattr(whole, "pretrained_cfg", None) or {}
    grid = _grid(whole)
    return Lineage(
        model=cfg.get("architecture") or type(whole).__name__,
        image_size_hw=_image(whole, grid),
        grid_hw=grid,
        prefix=prefix_of(whole),
        tables={
            table.path: _entry(whole, table) for table in tables_of(whole) if _is_learned(table)
        },
        encodings={name: _attached(part) for name, part in attachments(model).items()},
        rope=None if spec is None else plain(spec),
        windows=_windows(whole),
        build=_build(whole),
        source=source,
    )


def _attached(part: Attachment) -> dict[str, Any]:
    """Return the lineage of an attachment."""
    learned = part.learned_strength is not None
    entry = {"spec": plain(part.encoding.spec), "learned": learned}
    entry |= {} if learned else {"strength": part.constant}
    return entry | ({"partial": True} if part.partial else {})


def _grid(model: Any) -> Sides | None:
    """Return the grid of the patch embedding; None for classes that keep none."""
    try:
        grid = grid_of(model)
    except PositionError:
        return None
    return grid.height, grid.width


def _image(model: Any, grid: Sides | None) -> Sides | None:
    """Return the image size; a model freed of a fixed one still has the grid that its table serves."""
    row = row_of(model)
    patch = find(model, row.patches[0]) if row.patches else None
    if patch is not None and grid is not None and getattr(patch, "img_size", None) is None:
        step = patch.feat_ratio(as_scalar=False)
        return grid[0] * int(step[0]), grid[1] * int(step[1])
    return image_of(model)


def _is_learned(table: Table) -> bool:
    return isinstance(table.value, nn.Parameter) and table.sides is not None


def _entry(model: Any, table: Table) -> dict[str, Any]:
    """Return the lineage of one table."""
    sides = table.sides or (1, 1)
    record = record_of(model, table.path, table.value)
    came = sides if record is None else (record.source_grid.height, record.source_grid.width)
    return {
        "grid_hw": list(sides),
        "source_grid_hw": list(came),
        "recipe": recipe_of_table(model, table) if record is None else record.recipe,
        "prefix": table.prefix,
    }


def _windows(model: Any) -> dict[str, Any]:
    """Return the policy, the windows of the stages, and the windows that coordinates are measured in."""
    row = row_of(model)
    if row.windows is None:
        return {}
    units = {
        path: list(unit)
        for path, module, found in position_modules(model)
        if found.reference is not None
        and (unit := sides_of(getattr(module, found.reference["attribute"], None))) is not None
        and min(unit) > 0
    }
    return {
        "policy": last_policy(model) or row.windows.default,
        "windows_hw": [list(window) for window in windows_of(row, model)],
        "trained_hw": units,
    }


def _build(model: Any) -> dict[str, Any]:
    """Return what two models of one name can differ in without a tensor that shows it."""
    blocks = blocks_of(model)
    block: Any = blocks[0][1] if blocks else None
    attention = next(
        (m for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)), None
    )
    shown = {
        "num_heads": getattr(attention, "num_heads", None),
        "head_dim": getattr(attention, "head_dim", None),
        "embed_dim": getattr(model, "embed_dim", None),
        "depth": len(blocks),
        "in_chans": getattr(model, "in_chans", None),
        "dynamic_img_size": bool(getattr(model, "dynamic_img_size", False)),
        **({"made_dynamic": True} if is_dynamic(model) else {}),
    }
    numbers = {key: value for key, value in shown.items() if isinstance(value, (int, float, str))}
    patch = sides_of(getattr(find(model, row_of(model).patch_embed), "patch_size", None))
    return numbers | {
        "global_pool": str(getattr(model, "global_pool", "")),
        "act": type(find(block, "mlp.act")).__name__,
        "norm": type(getattr(model, "norm", None)).__name__,
        "fc_norm": type(getattr(model, "fc_norm", None)).__name__,
        "patch_size": None if patch is None else list(patch),
    }
