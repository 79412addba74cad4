"""Fading: a model's learned table becomes an attachment, whose strength can go to 0 while a rotation takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from visionpos.encodings import LearnedSpec
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_kind
from visionpos.retrofit.attach import attach, attachments
from visionpos.retrofit.callbacks import Ramp
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.plan import door_of
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.records import table_record
from visionpos.retrofit.schedule import Schedule
from visionpos.retrofit.seams import grid_of

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.encodings import EncodingSpec
    from visionpos.geometry import Grid
    from visionpos.retrofit.attachment import Attachment


def fade_table(
    model: nn.Module,
    spec: EncodingSpec | None,
    schedule: Schedule,
    *,
    name: str | None = None,
    recipe: str | None = None,
    generator: torch.Generator | None = None,
) -> Ramp:
    """Prepare a cross-fade, in place: the learned table goes as another encoding comes. Return the ramp that does it.

    The table is lifted (see `lift_table`) and `spec` attached; both start at the strengths of step 0, so with a
    schedule from 0 to 1 the model's outputs are unchanged. `ramp.set(step, model)` before each step, or a callback,
    moves the table from `schedule.end` to `schedule.start` and the new encoding from `schedule.start` to
    `schedule.end`. At table strength 0, `detach(model, "table")` removes it with the outputs bit-identical.

    Build the optimizer afterwards: the table is a new Parameter. An attachment at strength exactly 0 gets no gradient,
    which DDP wants to be told (find_unused_parameters=True).

    Args:
        model: a timm VisionTransformer or Eva with a table.
        spec: what takes over; None for a model whose own rotary encoding stays as it is, and only the table goes.
        schedule: strength of the new encoding; the table's is its reverse.
        name: of the new encoding; the spec's kind when None.
        recipe: how the table serves other grids; the recipe of the source that wrote the weights when None.
        generator: source of training-time coordinate draws of the new encoding.

    Raises:
        PositionError: as `lift_table` and `attach`; the model is then unchanged.

    Example:
        >>> import timm, visionpos as vp
        >>> from visionpos import retrofit
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> ramp = fade_table(model, vp.AxialRopeSpec(), retrofit.Schedule(steps=100), name="rope")
        >>> ramp.set(25, model)
        {'table': 0.75, 'rope': 0.25}
    """
    check_kind("schedule", schedule, Schedule)
    check_kinds("name", name, str, None)
    _check_liftable(model, recipe)
    schedules = {"table": schedule.reversed()}
    if spec is not None:
        door_of(spec)
        name = spec.kind if name is None else name
        if name == "table":
            raise PositionError(
                "name is 'table', which the lifted table has; another is required. Pass name='new', for one."
            )
        attach(model, spec, name=name, strength=schedule.at(0), generator=generator)
        schedules[name] = schedule
    lift_table(model, recipe=recipe).set_strength(schedule.reversed().at(0))
    return Ramp(schedules)


@torch.inference_mode(mode=False)
@torch.no_grad()
def lift_table(model: nn.Module, *, recipe: str | None = None) -> Attachment:
    """Turn the model's learned table into the attachment `visionpos.table` at strength 1, in place, and return it.

    `model.pos_embed` becomes None; outputs at the table's own grid stay bit-identical in one precision (under autocast
    the sum is rounded to the patch tokens' dtype). The rows of cells are what fades. Rows of prefix tokens have no
    position: they are added to `cls_token` and `reg_token` for good, and stay when the table goes. Other grids are
    served at run time by the recipe, in plain products that every exporter knows. `pos_drop`, which timm's
    VisionTransformer skips without a table, no longer acts.

    Args:
        model: a timm VisionTransformer or Eva with a table, or a subclass that adds it in their way.
        recipe: how other grids are served; the recipe of the source that wrote the weights when None.

    Raises:
        PositionError: if there is no table, the class adds it in its own way, or "table" is attached already.
    """
    whole: Any = model
    _check_liftable(whole, recipe)
    table, rows = whole.pos_embed, 0 if whole.no_embed_class else whole.num_prefix_tokens
    trained, grid, resampled_by = _trained(whole)
    spec = LearnedSpec(
        grid_hw=(grid.height, grid.width), recipe=recipe or resampled_by or recipe_for(whole)[0]
    )
    lifted = attach(whole, spec, name="table", strength=1.0)
    cells = trained[0, rows:].to(table).clone()
    lifted.encoding.table = nn.Parameter(cells, requires_grad=table.requires_grad)
    if rows:
        _fold(whole, table[:, :rows])
    whole.pos_embed = None
    return lifted


def adds_plainly(model: Any) -> bool:
    """Return whether a model adds its table as timm's VisionTransformer or Eva does."""
    plain = (VisionTransformer._pos_embed, Eva._pos_embed)  # noqa: SLF001 (timm has no other seam)
    return getattr(type(model), "_pos_embed", None) in plain


def _check_liftable(model: Any, recipe: str | None) -> None:
    """Refuse a model whose table cannot become an attachment, before anything changes."""
    if not adds_plainly(model):
        raise PositionError(
            f"model is a {type(model).__name__}, whose positions are no table that VisionTransformer or Eva would add; "
            "only theirs can be lifted. Keep the table, and attach beside it."
        )
    if model.pos_embed is None:
        raise PositionError(
            "model has no learned table; one is required. attach the new encoding alone, and let a Ramp set it."
        )
    if "table" in attachments(model):
        raise PositionError("name 'table' is already attached; detach(model, 'table') first.")
    grid = grid_of(model)
    LearnedSpec(grid_hw=(grid.height, grid.width), recipe=recipe or recipe_for(model)[0])


def _trained(model: Any) -> tuple[Tensor, Grid, str | None]:
    """Return the table `[1, prefix + n, d]` as it was trained, its grid, and how it was resampled since."""
    record = table_record(model)
    if record is None:
        return model.pos_embed.detach(), grid_of(model), None
    return record.source, record.source_grid, record.recipe


def _fold(model: Any, rows: Tensor) -> None:
    """Add the table's prefix rows `[1, prefix, d]` to the prefix tokens, in timm's order."""
    start = 0
    for token in (model.cls_token, model.reg_token):
        if token is not None:
            token.data = token.data + rows[:, start : start + token.shape[1]]
            start += token.shape[1]
    assert start == rows.shape[1], "table_prefix counts class and register tokens"  # noqa: S101 (no other prefix)
