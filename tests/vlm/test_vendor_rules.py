"""Plans, streams and pixels against oracles written from vendor code that is not installed (vendor_rules.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image as Picture
from PIL import ImageOps
from skimage import data

from tests.vlm import vendor_rules
from tests.vlm.peers import sizes
from tests.vlm.vendor_rules import Seen
from visionpos.errors import PositionError
from visionpos.vlm import Family, Image, Plan, family
from visionpos.vlm.pixels import prepare

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)
COFFEE = np.ascontiguousarray(data.coffee()[50:350, :500])


def extent(view: Any) -> tuple[int, int]:
    """How large the picture is inside a view."""
    top, left, bottom, right = (int(edge) for edge in view.content_yxyx)
    return bottom - top, right - left


def on_canvas(plan: Plan) -> tuple[int, int]:
    """How large the picture is on the canvas of tiles that neither overlap nor are resized alone."""
    tiles = [view for view in plan.views if view.node == "tile"]
    _, cols = plan.tiles_rc or (1, 1)
    first = [extent(view)[0] for view in tiles[::cols]]
    return sum(first), sum(extent(view)[1] for view in tiles[:cols])


def whole(plan: Plan, side: Callable[[Any], tuple[int, int]] = extent) -> tuple[int, int]:
    return side(next(view for view in plan.views if view.node == "global"))


def molmo(plan: Plan) -> Seen:
    rows, cols = plan.tiles_rc or (1, 1)
    tiles = [view for view in plan.views if view.node == "tile"]
    shown = (
        # Tiles share 112 pixels: each but the last adds what the next does not show.
        [tiles[row * cols].content_yxyx for row in range(rows)],
        [tiles[col].content_yxyx for col in range(cols)],
    )
    low = [
        min(
            224 * at + int(edges[axis])
            for at, edges in enumerate(shown[axis])
            if edges[axis + 2] > edges[axis]
        )
        for axis in (0, 1)
    ]
    high = [
        max(
            224 * at + int(edges[axis + 2])
            for at, edges in enumerate(shown[axis])
            if edges[axis + 2] > edges[axis]
        )
        for axis in (0, 1)
    ]
    return Seen(plan.tiles_rc, (high[0] - low[0], high[1] - low[1]), whole(plan), plan.cells)


def joined(plan: Plan) -> Seen:
    return Seen(plan.tiles_rc, on_canvas(plan), whole(plan), plan.cells)


def phi3_5(plan: Plan) -> Seen:
    return Seen(plan.tiles_rc, on_canvas(plan), None, plan.cells)


def minicpm(plan: Plan) -> Seen:
    piece = plan.views[1].size_hw if plan.tiles_rc else None
    return Seen(plan.tiles_rc, piece, plan.views[0].size_hw, plan.cells)


def pieces(plan: Plan) -> Seen:
    tiles = [extent(view) for view in plan.views if view.node == "tile"]
    return Seen(plan.tiles_rc, tiles or None, whole(plan), plan.cells)


def tiled(plan: Plan) -> Seen:
    return Seen(plan.tiles_rc, None, (448, 448), plan.cells)


RULES: dict[str, tuple[Callable[[int, int], Any], Callable[[Plan], Any]]] = {
    "molmo": (vendor_rules.molmo, molmo),
    "deepseek_vl2": (vendor_rules.deepseek_vl2, joined),
    "phi3_5_vision": (vendor_rules.phi3_5, phi3_5),
    "minicpm_v2": (vendor_rules.minicpm_v2, minicpm),
    "kimi_vl": (vendor_rules.kimi_vl, lambda plan: plan.views[0].size_hw),
    "ovis2": (vendor_rules.ovis2, pieces),
    "nvlm_d": (vendor_rules.nvlm_d, tiled),
}


def differences(name: str, seed: int, count: int) -> list[Any]:
    (theirs, ours), fam, found = RULES[name], family(name), []
    for height, width in sizes(seed, count):
        try:
            got = ours(fam.plan(Image((height, width))))
        except PositionError as refusal:
            got = None if str((height, width)) in str(refusal) else refusal
        expected = theirs(height, width)
        if got != expected:
            found.append(((height, width), got, expected))
    return found


@pytest.mark.parametrize("name", RULES)
def test_reference_sizes(name: str) -> None:
    assert differences(name, seed=5, count=1500) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RULES)
def test_reference_a_hundred_thousand_sizes(name: str) -> None:
    assert differences(name, seed=6, count=100_000) == []


# Pixels: Pillow and torchvision called as the vendor's code calls them


def normalised(picture: Any, mean: list[float], std: list[float]) -> torch.Tensor:
    """`[3, height, width]` of a Pillow picture."""
    values = torch.tensor(np.asarray(picture)).movedim(-1, 0).float() / 255
    return (values - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def steps_apart(ours: torch.Tensor, theirs: torch.Tensor, fam: Family) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) * max(fam.spec.pixels.std) * 255


def cut(picture: torch.Tensor, px: int) -> list[torch.Tensor]:
    """Tiles, row by row."""
    rows, cols = (side // px for side in picture.shape[-2:])
    return [
        picture[:, row * px : (row + 1) * px, col * px : (col + 1) * px]
        for row in range(rows)
        for col in range(cols)
    ]


PICTURES = [COFFEE, COFFEE.swapaxes(0, 1), COFFEE[:13, :40]]


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_deepseek_vl2(pixels: np.ndarray) -> None:
    """ImageOps.pad of Pillow, onto the mean cut off to a whole step."""
    pixels = np.ascontiguousarray(pixels)
    fam, picture = family("deepseek_vl2"), Picture.fromarray(pixels)
    rows, cols = vendor_rules.deepseek_vl2(*pixels.shape[:2]).tiles
    views = [ImageOps.pad(picture, (384, 384), color=(127, 127, 127))]
    local = ImageOps.pad(picture, (384 * cols, 384 * rows), color=(127, 127, 127))
    theirs = [normalised(views[0], *HALF), *cut(normalised(local, *HALF), 384)]
    assert steps_apart(prepare(pixels, fam).values, torch.stack(theirs), fam) < 1e-3


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_phi3_5(pixels: np.ndarray) -> None:
    """White above and below (a tall picture is turned first); the whole view interpolates what was normalised."""
    from torchvision.transforms import functional as tv

    pixels = np.ascontiguousarray(pixels)
    fam, picture = family("phi3_5_vision"), Picture.fromarray(pixels)
    tall = picture.width < picture.height
    if tall:
        picture = picture.transpose(Picture.Transpose.TRANSPOSE)
    height, width = sorted(vendor_rules.phi3_5(*pixels.shape[:2]).content)
    picture = tv.resize(picture, [height, width])
    room = -height % 336
    picture = tv.pad(picture, [0, room // 2, 0, room - room // 2], fill=[255, 255, 255])
    if tall:
        picture = picture.transpose(Picture.Transpose.TRANSPOSE)
    canvas = normalised(picture, *CLIP)
    whole_view = F.interpolate(canvas[None], size=(336, 336), mode="bicubic")[0]
    theirs = torch.stack([*cut(canvas, 336), whole_view])
    # Turned, a picture is resized in columns first, which are rounded to whole steps before the rows.
    most = 1.01 * max(CLIP[1]) / min(CLIP[1]) if tall else 1e-2
    assert steps_apart(prepare(pixels, fam).values, theirs, fam) < most


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_molmo(pixels: np.ndarray) -> None:
    """Floats by torchvision, black padding, crops of 336 every 224 pixels, patches flattened y, x, colour."""
    from torchvision.transforms import InterpolationMode, Resize

    pixels = np.ascontiguousarray(pixels)
    fam, seen = family("molmo"), vendor_rules.molmo(*pixels.shape[:2])
    rows, cols = seen.tiles

    def laid(size: tuple[int, int], box: tuple[int, int]) -> torch.Tensor:
        floats = torch.tensor(pixels).movedim(-1, 0).float() / 255
        small = Resize(list(size), InterpolationMode.BILINEAR, antialias=True)(floats)
        top, left = ((side - inner) // 2 for side, inner in zip(box, size, strict=True))
        sheet = torch.zeros(3, *box)
        sheet[:, top : top + size[0], left : left + size[1]] = small
        return (sheet - torch.tensor(CLIP[0]).view(3, 1, 1)) / torch.tensor(CLIP[1]).view(3, 1, 1)

    canvas = laid(seen.content, (rows * 224 + 112, cols * 224 + 112))
    views = [laid(seen.whole, (336, 336))]
    views += [
        canvas[:, y : y + 336, x : x + 336]
        for y in range(0, rows * 224, 224)
        for x in range(0, cols * 224, 224)
    ]
    theirs = torch.cat([
        view.unflatten(1, (24, 14)).unflatten(3, (24, 14)).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        for view in views
    ])  # fmt: skip
    ours = prepare(pixels, fam).values
    assert steps_apart(ours.reshape(theirs.shape), theirs, fam) < 1e-2


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_minicpm_v2(pixels: np.ndarray) -> None:
    """The source and a refined picture by Pillow's bicubic; patches of a view side by side in one strip."""
    pixels = np.ascontiguousarray(np.kron(pixels, np.ones((2, 2, 1), dtype=np.uint8)))
    fam, picture = family("minicpm_v2"), Picture.fromarray(pixels)
    seen = vendor_rules.minicpm_v2(*pixels.shape[:2])
    kernel = Picture.Resampling.BICUBIC
    views = [normalised(picture.resize(seen.whole[::-1], kernel), *HALF)]
    if seen.tiles:
        rows, cols = seen.tiles
        high, wide = seen.content
        refined = normalised(picture.resize((cols * wide, rows * high), kernel), *HALF)
        views += [
            refined[:, y : y + high, x : x + wide]
            for y in range(0, rows * high, high)
            for x in range(0, cols * wide, wide)
        ]
    ready = prepare(pixels, fam)
    strips = [
        F.unfold(view[None], 14, stride=14)[0]
        .view(3, 14, 14, -1)
        .transpose(2, 3)
        .reshape(3, 14, -1)
        for view in views
    ]
    theirs = torch.cat(strips, dim=-1)
    assert steps_apart(ready.values.reshape(theirs.shape), theirs, fam) < 1e-3


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_kimi_vl(pixels: np.ndarray) -> None:
    """Black below and to the right, laid before normalisation."""
    pixels = np.ascontiguousarray(np.kron(pixels, np.ones((3, 3, 1), dtype=np.uint8)))
    fam, (height, width) = family("kimi_vl"), pixels.shape[:2]
    picture = Picture.fromarray(pixels)
    patches = (width // 14) * (height // 14)
    if patches > 4096:
        scale = (4096 / patches) ** 0.5
        picture = picture.resize(
            (int(width * scale), int(height * scale)), Picture.Resampling.BICUBIC
        )
    sheet_hw = vendor_rules.kimi_vl(height, width)
    sheet = Picture.new("RGB", sheet_hw[::-1])
    sheet.paste(picture, (0, 0))
    theirs = normalised(sheet, *HALF).unflatten(1, (-1, 14)).unflatten(3, (-1, 14))
    theirs = theirs.permute(1, 3, 0, 2, 4).flatten(0, 1)
    assert steps_apart(prepare(pixels, fam).values, theirs, fam) < 1e-3


@pytest.mark.parametrize("pixels", PICTURES, ids=("wide", "tall", "tiny"))
def test_parity_pixels_ovis2(pixels: np.ndarray) -> None:
    """Each crop by itself, laid on zeros after normalisation: the mean, within half a step."""
    pixels = np.ascontiguousarray(np.kron(pixels, np.ones((2, 2, 1), dtype=np.uint8)))
    fam, picture = family("ovis2"), Picture.fromarray(pixels)
    seen = vendor_rules.ovis2(*pixels.shape[:2])

    def letterboxed(crop: Any, size: tuple[int, int]) -> torch.Tensor:
        small = normalised(crop.resize(size[::-1], Picture.Resampling.BICUBIC), *CLIP)
        top, left = ((448 - side) // 2 for side in size)
        sheet = torch.zeros(3, 448, 448)
        sheet[:, top : top + size[0], left : left + size[1]] = small
        return sheet

    views = [letterboxed(picture, seen.whole)]
    if seen.tiles:
        rows, cols = seen.tiles
        ys = [picture.height // rows * row for row in range(rows)] + [picture.height]
        xs = [picture.width // cols * col for col in range(cols)] + [picture.width]
        crops = [
            picture.crop((xs[c], ys[r], xs[c + 1], ys[r + 1]))
            for r in range(rows)
            for c in range(cols)
        ]
        views += [letterboxed(crop, size) for crop, size in zip(crops, seen.content, strict=True)]
    assert steps_apart(prepare(pixels, fam).values, torch.stack(views), fam) < 0.6
