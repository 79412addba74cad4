"""Which recipe resizes a checkpoint's table: the one of the source that wrote the weights, by the model's name.

The table is data, configs/retrofit/recipes.yaml; the first pattern that matches wins.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from visionpos.config import read_yaml, shipped
from visionpos.errors import ConfigError
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.kinds import check_model


def recipe_for(model: Any) -> tuple[str, str]:
    """Return (recipe, reason) for a model's tables.

    The name is the architecture and tag that timm's pretrained_cfg records, e.g. "vit_small_patch14_dinov2.lvd142m".

    Raises:
        PositionError: if model is no module, and has no pretrained_cfg.
    """
    if not hasattr(model, "pretrained_cfg"):  # whatever has one is asked
        check_model(model)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name, tag = cfg.get("architecture") or "", cfg.get("tag") or ""
    full = f"{name}.{tag}" if tag else name
    for pattern, recipe in _patterns():
        if fnmatchcase(full, pattern):
            return recipe, f"{full or 'unnamed model'} matches {pattern!r}"
    raise ConfigError("recipes.yaml has no final pattern '*'; add one.")


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, str], ...]:
    """Return (pattern, recipe) rows of the shipped table, checked."""
    data = read_yaml(
        shipped("retrofit")["recipes"].read_text(encoding="utf-8"), source="recipes.yaml"
    )
    rows = tuple((str(row["match"]), str(row["recipe"])) for row in data["recipes"])
    for _, recipe in rows:
        recipe_of(recipe)
    return rows
