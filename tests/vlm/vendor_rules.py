"""Rules of published vendor code that is not installed, written anew from what that code computes, step by step.

Sides are (height, width) in pixels. A rule that would raise, or resize a picture to nothing, gives None.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

F32 = np.float32
Size = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """What a vendor makes of a picture.

    Args:
        tiles: rows and columns of tiles; None where the picture is not cut.
        content: (height, width) of the picture on the canvas of all tiles, or of each piece.
        whole: (height, width) of the picture in the whole-image view; None where there is none.
        cells: features, or None where tiles alone are compared.
    """

    tiles: Size | None
    content: Any
    whole: Size | None
    cells: int


def _float32_fit(height: int, width: int, limit: Size) -> Size:
    """The largest size in a box, both sides scaled and cut off in float32."""
    scale = min(F32(limit[0]) / F32(height), F32(limit[1]) / F32(width))
    return int(F32(height) * scale), int(F32(width) * scale)


def molmo(height: int, width: int) -> Seen | None:
    """allenai/Molmo-7B image_preprocessing_molmo.py: 12 crops of 336 that share 112 pixels; scales in float32."""
    grids = sorted(
        ((i, j) for i in range(1, 13) for j in range(1, 13) if i * j <= 12),
        key=lambda grid: (grid[0] * grid[1], grid[0]),
    )
    with np.errstate(divide="ignore"):
        needed = (F32(np.array(grids) * 224) / F32([height - 112, width - 112])).min(1)
    at = needed.argmax() if (needed < 1).all() else np.where(needed < 1, F32(10e9), needed).argmin()
    rows, cols = grids[at]
    content = _float32_fit(height, width, (rows * 224 + 112, cols * 224 + 112))
    whole = _float32_fit(height, width, (336, 336))
    if min(*content, *whole) < 1:
        return None
    pooled = [(count * 16 + 8 + 1) // 2 for count in (rows, cols)]
    return Seen((rows, cols), content, whole, 144 + pooled[0] * pooled[1])


VL2_SIZES = [
    (384 * cols, 384 * rows)
    for cols, rows in (
        (1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1), (2, 3), (3, 2),
        (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3),
    )
]  # fmt: skip


def contained(height: int, width: int, box_wh: tuple[int, int]) -> Size:
    """The size that Pillow's ImageOps.contain gives."""
    box_w, box_h = box_wh
    if width / height > box_w / box_h:
        return round(height / width * box_w), box_w
    if width / height < box_w / box_h:
        return box_h, round(width / height * box_h)
    return box_h, box_w


def deepseek_vl2(height: int, width: int) -> Seen | None:
    """deepseek-ai/DeepSeek-VL2 processing_deepseek_vl_v2.py: effective pixels, then least waste; ImageOps.pad."""
    best, most, least = None, 0, math.inf
    for box_w, box_h in VL2_SIZES:
        scale = min(box_w / width, box_h / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        waste = box_w * box_h - used
        if used > most or (used == most and waste < least):
            best, most, least = (box_w, box_h), used, waste
    if best is None:
        return None
    content, whole = contained(height, width, best), contained(height, width, (384, 384))
    if min(*content, *whole) < 1:
        return None
    rows, cols = best[1] // 384, best[0] // 384
    return Seen((rows, cols), content, whole, 14 * 14 * (1 + rows * cols))


def phi3_5(height: int, width: int, crops: int = 16) -> Seen | None:
    """microsoft/Phi-3.5-vision processing_phi3_v.py, HD_transform: as long as the crops wrap, turned if it is tall."""
    tall = width < height
    if tall:
        height, width = width, height
    ratio, scale = width / height, 1
    while scale * np.ceil(scale / ratio) <= crops:
        scale += 1
    scale -= 1
    new_w = scale * 336
    new_h = int(new_w / ratio)
    if new_h < 1:
        return None
    rows, cols = math.ceil(new_h / 336), scale
    tiles, content = (rows, cols), (new_h, new_w)
    if tall:
        tiles, content = tiles[::-1], content[::-1]
    return Seen(tiles, content, None, 144 * (1 + rows * cols))


def _minicpm_size(height: float, width: float, *, upscale: bool) -> Size:
    if height * width > 448 * 448 or upscale:
        ratio = width / height
        height = int(448 / math.sqrt(ratio))
        width = int(height * ratio)
    return tuple(max(round(side / 14) * 14, 14) for side in (height, width))  # type: ignore[return-value]


def minicpm_v2(height: int, width: int) -> Seen:
    """OpenBMB/MiniCPM-V finetune/dataset.py slice_image: up to nine slices of about 448 x 448."""
    count = min(math.ceil(width * height / (448 * 448)), 9)
    if count <= 1:
        return Seen(None, None, _minicpm_size(height, width, upscale=True), 64)
    log_ratio, best, least = math.log(width / height), (1, 1), math.inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > 9:
            continue
        for cols in (m for m in range(1, number + 1) if number % m == 0):
            error = abs(log_ratio - math.log(cols / (number // cols)))
            if error < least:
                best, least = (cols, number // cols), error
    cols, rows = best
    sides = [
        max(round(side / many) * many, many) / many
        for side, many in ((height, rows), (width, cols))
    ]
    piece = _minicpm_size(*sides, upscale=True)
    whole = _minicpm_size(height, width, upscale=False)
    return Seen((rows, cols), piece, whole, 64 * (1 + rows * cols))


def kimi_vl(height: int, width: int) -> Size | None:
    """moonshotai/Kimi-VL image_processing_kimi_vl.py with pad_input: a patch budget, then whole cells, 511 at most."""
    patches = (width // 14) * (height // 14)
    if patches > 4096:
        scale = math.sqrt(4096 / patches)
        height, width = int(height * scale), int(width * scale)
    height, width = (side + (28 - side % 28) % 28 for side in (height, width))
    return None if max(height, width) // 14 >= 512 else (height, width)


def _cuts(side: int, count: int) -> list[int]:
    step = side // count
    return [step] * (count - 1) + [side - step * (count - 1)]


def _pieces(height: int, width: int, grid: Size) -> list[Size]:
    return [(high, wide) for high in _cuts(height, grid[0]) for wide in _cuts(width, grid[1])]


def _kept(high: int, wide: int) -> float:
    """The area of a crop after its longer side is brought down to a tile."""
    long, short = max(high, wide), min(high, wide)
    return 448 * (short / long * 448) if long > 448 else long * short


def _ovis2_grid(height: int, width: int) -> Size:
    grids = [(rows, cols) for rows in range(1, 10) for cols in range(1, 10) if rows * cols <= 9]
    kept = {
        grid: sum(_kept(*piece) for piece in _pieces(height, width, grid)) / (width * height)
        for grid in grids
    }
    good = [grid for grid in grids if kept[grid] > 0.9]
    if good:
        return min(good, key=lambda grid: (grid[0] * grid[1], -kept[grid]))
    return min(grids, key=lambda grid: (-kept[grid], grid[0] * grid[1]))


def _ovis2_size(high: int, wide: int) -> Size:
    if wide == high:
        return 448, 448
    return (int(high / wide * 448), 448) if wide > high else (448, int(wide / high * 448))


def ovis2(height: int, width: int) -> Seen | None:
    """AIDC-AI/Ovis base_visual_tokenizer.py: fewest crops that keep nine tenths; each fitted into 448 and padded."""
    grid = _ovis2_grid(height, width)
    pieces = _pieces(height, width, grid)
    if min(map(min, pieces)) < 1:
        return None
    sizes, whole = [_ovis2_size(*piece) for piece in pieces], _ovis2_size(height, width)
    if min(map(min, [*sizes, whole])) < 1:
        return None
    if grid == (1, 1):
        return Seen(None, None, whole, 256)
    return Seen(grid, sizes, whole, 256 * (1 + grid[0] * grid[1]))


def nvlm_d(height: int, width: int) -> Seen:
    """nvidia/NVLM-D-72B, whose dynamic_preprocess is InternVL's with at most six tiles, and a thumbnail."""
    aspect = width / height
    grids = {
        (i, j) for n in range(1, 7) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= 6
    }
    best, least = (1, 1), math.inf
    for cols, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        apart = abs(aspect - cols / rows)
        if apart < least:
            best, least = (cols, rows), apart
        elif apart == least and width * height > 0.5 * 448 * 448 * cols * rows:
            best = (cols, rows)
    cols, rows = best
    tiles = None if cols * rows == 1 else (rows, cols)
    return Seen(tiles, None, (448, 448), 256 * (cols * rows + 1 if tiles else 1))
