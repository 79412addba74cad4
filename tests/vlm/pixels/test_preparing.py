"""What `prepare` gives: the places on the photo that the plan says, forms, batches, refusals. Parity: test_parity."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch import Tensor

from tests.vlm.test_pixels import write_video
from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Image, View, family, family_names
from visionpos.vlm.pixels import FrameSpec, frames, photo, prepare
from visionpos.vlm.pixels.laying import view_pixels

NAMES = family_names()
WITH_DIALECTS = [(name, dialect) for name in NAMES for dialect in family(name).dialects]


def ramp(height: int, width: int) -> Tensor:
    """A picture that says where it is: red grows downwards from 0 to 250, green to the right."""
    rows = (torch.arange(height) + 0.5) / height * 250
    cols = (torch.arange(width) + 0.5) / width * 250
    planes = torch.broadcast_tensors(rows[:, None], cols, torch.tensor(200.0))
    return torch.stack(planes).round().to(torch.uint8)


def cell_means(pixels: Tensor, view: View) -> Tensor:
    """`[rows, cols, 2]`: the mean red and green of every cell that lies on the picture whole, NaN elsewhere."""
    assert view.rulers is not None
    rows, cols = ([[int(edge) for edge in band] for band in one.bands()] for one in view.rulers)
    sums = torch.nn.functional.pad(pixels[:2].double(), (1, 0, 1, 0)).cumsum(1).cumsum(2)
    top, left, bottom, right = (float(edge) for edge in view.content_yxyx)
    means = torch.full((len(rows), len(cols), 2), torch.nan, dtype=torch.float64)
    for (i, (a, b)), (j, (c, d)) in product(enumerate(rows), enumerate(cols)):
        if a >= top and b <= bottom and c >= left and d <= right:
            total = sums[:, b, d] - sums[:, a, d] - sums[:, b, c] + sums[:, a, c]
            means[i, j] = total / ((b - a) * (d - c))
    return means


@pytest.mark.parametrize(("name", "dialect"), WITH_DIALECTS)
def test_invariant_pixels_are_where_the_plan_says(name: str, dialect: str) -> None:
    """In every family, every cell shows the rectangle of the photo that the plan gives it, within a fifth of a cell."""
    fam = family(name, dialect)
    for size_hw in ((150, 100), (225, 450)):
        plan = fam.plan(Image(size_hw))
        checked = 0
        for view, pixels in zip(
            plan.views, view_pixels(ramp(*size_hw), plan, fam.spec), strict=True
        ):
            assert tuple(pixels.shape) == (3, *view.size_hw)
            if not view.has_places:
                continue
            means = cell_means(pixels, view)
            rects = view.token_rects().view(*means.shape[:2], 4)
            sizes = (rects[..., 2:] - rects[..., :2]).clamp(min=1e-9)
            seen = means / 250 * torch.tensor(size_hw)
            off = ((seen - (rects[..., :2] + rects[..., 2:]) / 2) / sizes).abs()
            whole = ~off.isnan()
            checked += int(whole.sum())
            # A step of eight bits on the ramp is a pixel or two; a cell of a small photo may be no larger.
            slack = 0.2 + torch.tensor(size_hw) / 250 / sizes
            assert (off <= slack)[whole].all(), (size_hw, view.node, view.tile_rc)
        assert checked or not any(view.has_places for view in plan.views)


@pytest.mark.parametrize("name", NAMES)
def test_shape_every_family(name: str) -> None:
    """Every family prepares a photo: as many patches as the plan has, finite float32."""
    fam = family(name)
    ready = prepare(ramp(90, 140), fam)
    assert ready.values.dtype == torch.float32
    assert ready.values.isfinite().all()
    grids = ready.grid_thw
    assert tuple(len(rows) for rows in ready.patch_rows()) == tuple(grids.prod(1).tolist())
    assert ready.nodes == tuple(view.node for view in ready.plans[0].views)


def test_reference_normalised() -> None:
    """White is (1 - mean) / std, black -mean / std, and padding is the family's colour."""
    fam = family("llava_1_5")  # a wide photo on a square of its mean colour
    spec = fam.spec.pixels
    picture = torch.full((3, 100, 400), 255, dtype=torch.uint8)
    value = prepare(picture, fam).values[0]
    mean, std = (torch.tensor(one) for one in (spec.mean, spec.std))
    assert torch.allclose(value[:, 168, 168], (1 - mean) / std, atol=1e-6)
    assert torch.allclose(value[:, 5, 5], (torch.tensor(spec.pad) / 255 - mean) / std, atol=1e-6)
    assert value[:, 5, 5].abs().max() < 1 / 255 / min(spec.std)  # near the mean, so near zero


def test_reference_forms() -> None:
    """One patch of each form, cut by hand."""
    picture = torch.randint(0, 256, (3, 56, 84), dtype=torch.uint8, generator=torch.Generator())
    kimi = prepare(picture, family("kimi_k25"))  # no resizing: 4 x 6 patches of 14
    whole = kimi.views[0]
    assert whole.shape == (3, 56, 84)
    assert torch.equal(kimi.values[7], whole[:, 14:28, 14:28])  # the eighth: row 1, column 1
    qwen = prepare(picture, family("qwen2_vl"))
    square = qwen.views[0][:, 14:28, 14:28]  # the fourth of the first block
    assert torch.equal(qwen.values[3], square[:, None].expand(-1, 2, -1, -1).reshape(-1))
    fuyu = prepare(picture, family("fuyu"))
    assert torch.equal(fuyu.values[3], fuyu.views[0][:, 30:60, :30].permute(1, 2, 0).reshape(-1))
    strip = prepare(picture, family("minicpm_v4_6"))
    cols = strip.grid_thw[0, 2]
    assert strip.values.shape == (1, 3, 14, 14 * strip.grid_thw[0].prod())
    at = int(cols + 1) * 14  # row 1, column 1
    assert torch.equal(strip.values[0, :, :, at : at + 14], strip.views[0][:, 14:28, 14:28])


def test_invariant_batch() -> None:
    """A batch holds what its photos give one by one, padded below and on the right."""
    fam = family("pixtral", dialect="transformers")
    photos = [ramp(64, 200), ramp(150, 90), ramp(10, 10)]
    ready = prepare(photos, fam)
    assert ready.counts == (1, 1, 1)
    values, mask = ready.padded()
    for number, one in enumerate(photos):
        alone = prepare(one, fam).views[0]
        assert torch.equal(ready.views[number], alone)
        assert torch.equal(values[number][mask[number].expand(3, -1, -1)], alone.flatten())
        assert mask[number].sum() == alone[0].numel()
        assert values[number, :, ~mask[number]].abs().sum() == 0
    tiled = prepare([ramp(400, 300), ramp(448, 448)], family("internvl"))
    assert tiled.counts == (len(tiled.plans[0].views), 1)
    assert len(tiled.values) == sum(tiled.counts)


def test_invariant_images_of_a_prompt_are_counted() -> None:
    """LLaVA-OneVision cuts an image only where it is alone."""
    fam = family("llava_onevision")
    assert prepare(ramp(400, 300), fam).counts[0] > 1
    assert prepare([ramp(400, 300), ramp(300, 400)], fam).counts == (1, 1)


def test_shape_clip(tmp_path: Path) -> None:
    """A clip and a photo in one batch; frames are counted as views for an encoder of pictures."""
    clip = frames(write_video(tmp_path / "a.avi", 9, 4.0), spec=FrameSpec(count=4, multiple=1))
    ready = prepare([clip, ramp(60, 80)], family("qwen2_5_vl"))
    assert ready.nodes == ("clip", "global")
    assert len(ready.values) == int(ready.grid_thw.prod(1).sum())
    assert ready.grid_thw[0, 0] == 2
    pictures = prepare(clip, family("internvl"))
    assert pictures.values.shape == (4, 3, 448, 448)


def test_invariant_stated_rules_of_reading() -> None:
    """Grey, palette, transparent, 16-bit and animated pictures are read by the rules of `photo`."""
    fam = family("naflex")
    rgba = np.dstack([np.zeros((20, 30, 3), np.uint8), np.zeros((20, 30), np.uint8)])
    assert torch.equal(prepare(rgba, fam).values, torch.ones_like(prepare(rgba, fam).values))
    wide = (np.arange(600).reshape(20, 30) * 100).astype(np.uint16)
    assert torch.equal(
        prepare(wide, fam).values,
        prepare((wide >> 8).astype(np.uint8), fam).values,
    )
    palette = Picture.fromarray(np.asarray(ramp(20, 30).permute(1, 2, 0))).quantize(200)
    assert torch.equal(prepare(palette, fam).values, prepare(photo(palette), fam).values)


def test_invariant_animation_is_its_first_frame(tmp_path: Path) -> None:
    fam = family("naflex")
    shades = [Picture.fromarray(np.full((20, 30), shade, np.uint8)) for shade in (40, 200)]
    shades[0].save(tmp_path / "two.gif", save_all=True, append_images=shades[1:], duration=50)
    first, alone = prepare(tmp_path / "two.gif", fam), prepare(shades[0], fam)
    assert torch.equal(first.values, alone.values)


def test_error_sources(tmp_path: Path) -> None:
    """What cannot be read or planned is refused with its number in the batch."""
    good, fam = ramp(40, 60), family("qwen2_vl")
    (tmp_path / "text.jpg").write_text("no picture")
    Picture.fromarray(np.zeros((300, 300, 3), np.uint8)).save(tmp_path / "whole.png")
    cut = (tmp_path / "whole.png").read_bytes()[:-40]
    (tmp_path / "cut.png").write_bytes(cut)
    for bad, complaint in (
        (tmp_path / "gone.jpg", "is not a file"),
        (None, "path is None; the path of a photo file"),
        (b"\xff\xd8\xff", "path is b.*BytesIO"),
        (tmp_path / "text.jpg", "not an image"),
        (tmp_path / "cut.png", "cannot be decoded"),
        (torch.rand(3, 40, 60), "float32.*uint8 or uint16"),
        (np.zeros((40, 60, 3)), "float64.*uint8 or uint16"),
        (torch.zeros(40, 60, 3, dtype=torch.uint8), "channels first"),
        (np.zeros((3, 40, 60), np.uint8), r"\[60, 3, 40\], channels first"),
        (np.zeros((0, 60, 3), np.uint8), "at least one pixel"),
        (torch.zeros(3, 4, 4000, dtype=torch.uint8), "qwen2_vl.*ratio"),
    ):
        with pytest.raises(PositionError, match=f"source 1: .*{complaint}"):
            prepare([good, bad], fam)
    with pytest.raises(PositionError, match="sources is empty"):
        prepare([], fam)


def test_error_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Picture.fromarray(np.zeros((20, 30), np.uint8)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Picture, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(PositionError, match=r"source 0: .*bomb.png.*MAX_IMAGE_PIXELS"):
        prepare(tmp_path / "bomb.png", family("fuyu"))


def test_error_plan_of_another_size() -> None:
    fam = family("internvl")
    with pytest.raises(PositionError, match=r"\(60, 40\).*plan is for \(40, 60\).*upright"):
        view_pixels(ramp(60, 40), fam.plan(Image((40, 60))), fam.spec)


def test_error_no_pixel_rule() -> None:
    with pytest.raises(PositionError, match=r"no pixel rule.*Add `pixels:`"):
        prepare(ramp(40, 60), family("qwen2_vl", overlay={"pixels": None}))


@pytest.mark.parametrize(
    ("pixels", "complaint"),
    [
        ({"std": [0.5, 0.0, 0.5]}, "std above 0"),
        ({"pad": [0, 0, 256]}, r"pad in 0\.\.255"),
        ({"resample": {"engine": "opencv"}}, "antialias: false and floats: true"),
        ({"resample": {"engine": "pillow", "floats": True}}, "Pillow antialiases 8-bit"),
        ({"resample": {"kernel": "nearest"}}, "kernel"),
        ({"patches": {"form": "strip", "vector": "yxc"}}, "form 'strip'"),
        ({"patches": {"temporal": 0}}, "temporal 0"),
        ({"colour": 1}, "unknown key.*colour"),
    ],
)
def test_error_data(pixels: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        family("naflex", overlay={"pixels": pixels})
