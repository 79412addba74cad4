"""The seam table: for a model class, where its grid, tables, rotary encoding, blocks and patch dropout are.

Whatever attaches, resizes or describes reads these rows; `ports` has those of attention classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from visionpos.errors import PositionError
from visionpos.geometry import Grid

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModelSeams:
    """Where the position parts of one model class are, as attribute names of the model.

    `entry` is the module whose output enters the first block.
    """

    patch_embed: str
    table: str
    rope: str | None
    patch_drop: str
    entry: str
    blocks: str


_MODELS: dict[type, ModelSeams] = {
    VisionTransformer: ModelSeams(
        "patch_embed", "pos_embed", None, "patch_drop", "norm_pre", "blocks"
    ),
    Eva: ModelSeams("patch_embed", "pos_embed", "rope", "patch_drop", "norm_pre", "blocks"),
}


def row_of(model: nn.Module) -> ModelSeams:
    """Return the row of a model's class.

    Raises:
        PositionError: if the class has no row; the message lists those that have.
    """
    for kind in type(model).__mro__:
        if kind in _MODELS:
            return _MODELS[kind]
    known = ", ".join(kind.__name__ for kind in _MODELS)
    raise PositionError(
        f"model is a {type(model).__name__}, which has no row in the seam table; {known} and their subclasses have. "
        "Unwrap the timm model first (model.model, model.module), or create it without features_only."
    )


def grid_of(model: Any) -> Grid:
    """Return the token grid that the model's tables now serve.

    Raises:
        PositionError: if the model was made without an image size.
    """
    patch = getattr(model, row_of(model).patch_embed)
    if patch.grid_size is None:
        raise PositionError(
            "model has no grid: its patch_embed.img_size is None; a table cannot be placed without one. Create "
            "the model "
            "with img_size=."
        )
    return Grid(*(int(side) for side in patch.grid_size))


def table_prefix(model: Any) -> int:
    """Return how many leading rows of the model's table belong to prefix tokens."""
    return 0 if model.no_embed_class else int(model.num_prefix_tokens)
