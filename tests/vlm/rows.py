"""One row written as text, image and clip, and its ids: what tables of positions are checked with."""

from typing import Any

import torch

from visionpos.vlm import family

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
DIALECTS = ["vendor", "transformers"]
IMAGE, CLIP = 1, 2

Part = int | tuple[int, tuple[int, int, int]]  # number of text tokens, or (type, patch grid)


def tensors(parts: list[Part]) -> dict[str, Any]:
    """One row as a processor returns it."""
    types: list[int] = []
    grids: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], CLIP: []}
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
            continue
        kind, (frames, height, width) = part
        grids[kind].append((frames, height, width))
        types += [kind] * (frames * height * width // 4)
    row = torch.tensor(types)
    return {
        "input_ids": row,
        "modality": row,
        "image_grids": grids[IMAGE],
        "video_grids": grids[CLIP],
    }


def place(name: str, dialect: str, parts: list[Part], seconds: Any = 1.0) -> Any:
    return family(name, dialect=dialect).position_ids_from_tokens(
        **tensors(parts), seconds_per_grid=seconds
    )


def numbers(text: str) -> list[int]:
    """`0 1 2*4` as [0, 1, 2, 2, 2, 2]."""
    out = []
    for word in text.split():
        value, _, times = word.partition("*")
        out += [int(value)] * int(times or 1)
    return out


def image(height: int, width: int) -> Part:
    return IMAGE, (1, height, width)


def clip(frames: int, height: int, width: int) -> Part:
    return CLIP, (frames, height, width)
