"""Prompts for the models of tiny_models: tokens, types, grids and random patches, as a processor returns them."""

from typing import Any

import torch

from tests.vlm.tiny_models import END_ID, IMAGE_ID, START_ID, VIDEO_ID

PATCH_CHANNELS = 3 * 2 * 4 * 4  # colours, frames, patch
MERGE = 2
Part = int | tuple[str, tuple[int, int, int]]  # words, or ("image" | "video", grid in patches)


def prompt(parts: list[Part], seed: int = 0, *, frames: bool = False) -> dict[str, Any]:
    """One example. frames: every frame of a clip stands between a start and an end token of its own."""
    made = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    types: list[int] = []
    media: dict[str, list[Any]] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(2, 50, (part,), generator=made).tolist()
            types += [0] * part
            continue
        kind, grid = part
        media[kind].append(grid)
        steps, cells = grid[0], grid[1] * grid[2] // MERGE**2
        blocks = [cells] * steps if frames else [steps * cells]
        for block in blocks:
            ids += [START_ID, *[IMAGE_ID if kind == "image" else VIDEO_ID] * block, END_ID]
            types += [0, *[1 if kind == "image" else 2] * block, 0]
    out: dict[str, Any] = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if media[kind]:
            grids = torch.tensor(media[kind])
            out[f"{kind}_grid_thw"] = grids
            out[pixels] = torch.randn(int(grids.prod(1).sum()), PATCH_CHANNELS, generator=made)
    return out


def batched(example: dict[str, Any]) -> dict[str, Any]:
    """The example as a model takes it: `[1, n]`."""
    return {
        key: value.unsqueeze(0) if key in ("input_ids", "mm_token_type_ids") else value
        for key, value in example.items()
    }
