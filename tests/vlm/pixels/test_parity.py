"""Pixels against the installed processors, as numbers that the encoder is given: same plan, kernel, padding, order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from skimage import data

from tests.vlm.pixels.processors import PROCESSORS, Processor
from tests.vlm.test_pixels import write_video
from visionpos.errors import PositionError
from visionpos.vlm import Family, family
from visionpos.vlm.pixels import FrameSpec, frames, photo, prepare

COFFEE = data.coffee()  # 400 x 600
PICTURES = {
    "wide": COFFEE[50:350, :500],
    "tiny": COFFEE[100:113, 200:240],
    # Noise overshoots any cubic kernel: clamps in another order show.
    "noise": np.random.default_rng(0).integers(0, 256, (337, 211, 3), dtype=np.uint8),
}
LARGE = {
    "tall": COFFEE.swapaxes(0, 1),
    "square": data.retina(),
    "large": np.array(Picture.fromarray(data.retina()).resize((2400, 1700))),
}


def made_by(peer: Processor, engine: str) -> Family:
    """The family with the resampling code of one kind of processor."""
    fam = family(peer.family, dialect=peer.dialect, variant=peer.variant)
    resample = fam.spec.pixels.resample
    if resample.engine == engine or not resample.antialias:
        return fam
    return family(
        peer.family, peer.dialect, peer.variant, {"pixels": {"resample": {"engine": engine}}}
    )


def steps_apart(ours: Any, theirs: Any, fam: Family) -> float:
    """Largest difference in 8-bit steps, of equal shapes."""
    ours, theirs = (one if isinstance(one, list) else [one] for one in (ours, theirs))
    assert [one.shape for one in ours] == [one.shape for one in theirs]
    apart = max(float((a - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return apart * max(fam.spec.pixels.std) * 255


def apart(peer: Processor, picture: np.ndarray, engine: str) -> float:
    fam, picture = made_by(peer, engine), np.ascontiguousarray(picture)
    try:
        theirs = peer.of(fam, picture, pillow=engine == "pillow")
    except ValueError:  # a size that the processor refuses
        with pytest.raises(PositionError, match=r"required|takes at most"):
            prepare(picture, fam)
        return 0.0
    ready = prepare(picture, fam)
    return steps_apart(list(ready.views) if isinstance(theirs, list) else ready.values, theirs, fam)


@pytest.mark.parametrize("peer", PROCESSORS, ids=str)
def test_parity_fast(peer: Processor) -> None:
    """The torchvision processors, on a wide photo, a tiny one and noise."""
    for name, picture in PICTURES.items():
        assert apart(peer, picture, "torchvision") <= peer.steps, name


@pytest.mark.parametrize("peer", [peer for peer in PROCESSORS if peer.slow], ids=str)
def test_parity_pillow(peer: Processor) -> None:
    """The Pillow processors, which differ from the fast ones by a step, and by many where a kernel overshoots."""
    for name in ("tiny", "noise"):
        assert apart(peer, PICTURES[name], "pillow") <= peer.steps, name


@pytest.mark.slow
@pytest.mark.parametrize("peer", PROCESSORS, ids=str)
def test_parity_large(peer: Processor) -> None:
    """The same on large photos."""
    for name, picture in LARGE.items():
        for engine in ("torchvision", "pillow") if peer.slow else ("torchvision",):
            assert apart(peer, picture, engine) <= peer.steps, (name, engine)


def test_parity_fast_and_pillow_processors_part() -> None:
    """Why an engine has a name: on noise the two processors of one model are many steps apart."""
    peer = next(one for one in PROCESSORS if one.family == "qwen2_vl")
    fam = made_by(peer, "torchvision")
    fast, slow = (peer.of(fam, PICTURES["noise"], pillow=pillow) for pillow in (False, True))
    assert steps_apart(fast, slow, fam) > 5


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
@pytest.mark.parametrize("picture", [*PICTURES, "tall"])
def test_parity_mistral_common(name: str, picture: str) -> None:
    """The vendor resizes floats with OpenCV, neither antialiased nor rounded."""
    from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder

    patch, most, merge = (16, 1024, 1) if name == "pixtral" else (14, 1540, 2)
    encoder = ImageEncoder(
        ImageConfig(image_patch_size=patch, max_image_size=most, spatial_merge_size=merge),
        SimpleNamespace(img=1, img_break=2, img_end=3),  # type: ignore[arg-type]
    )
    from mistral_common.protocol.instruct.chunk import ImageChunk

    pixels = np.ascontiguousarray((PICTURES | LARGE)[picture])
    theirs = torch.tensor(encoder(ImageChunk(image=Picture.fromarray(pixels))).image)[None]
    fam = family(name)
    assert steps_apart(prepare(pixels, fam).values, theirs, fam) < 1e-2


def test_parity_emu3() -> None:
    """A processor of the old kind: Pillow, one picture, normalised by numpy."""
    from transformers.models.emu3.image_processing_emu3 import Emu3ImageProcessor

    fam = family("emu3", dialect="transformers")
    theirs = Emu3ImageProcessor()(Picture.fromarray(COFFEE), return_tensors="pt")["pixel_values"]
    ours = prepare(COFFEE, fam).values
    assert steps_apart(ours, theirs, fam) < 1e-2


def test_families_with_a_pixel_oracle() -> None:
    assert len({peer.family for peer in PROCESSORS}) >= 40


@pytest.mark.parametrize("size_wh", [(900, 950), (1900, 980), (700, 1960)])
def test_parity_aria_split(size_wh: tuple[int, int]) -> None:
    """Canvases of whole tiles; those of half tiles are planned as whole ones, which the family's file says."""
    from transformers.models.aria.image_processing_aria import AriaImageProcessor

    picture = np.array(Picture.fromarray(COFFEE).resize(size_wh))
    fam = family("aria", dialect="transformers", variant="split")
    spec = fam.spec.pixels
    processor = AriaImageProcessor(
        split_image=True, image_mean=list(spec.mean), image_std=list(spec.std)
    )
    theirs = processor(picture, return_tensors="pt")["pixel_values"]
    assert steps_apart(prepare(picture, fam).values, theirs, fam) < 1e-3


def test_parity_several_images() -> None:
    """LLaVA-OneVision: of several images each is padded to a square in the mean colour, and none is cut."""
    from transformers.models.llava_onevision.image_processing_llava_onevision import (
        LlavaOnevisionImageProcessor,
    )

    fam = family("llava_onevision", dialect="transformers")
    spec = fam.spec.pixels
    processor = LlavaOnevisionImageProcessor(
        image_mean=list(spec.mean), image_std=list(spec.std), size={"height": 384, "width": 384}
    )
    pictures = [PICTURES["wide"], PICTURES["noise"]]
    theirs = processor([[np.ascontiguousarray(one) for one in pictures]], return_tensors="pt")
    ready = prepare([np.ascontiguousarray(one) for one in pictures], fam)
    assert ready.counts == (1, 1)
    shown = theirs["pixel_values"].flatten(0, 1)
    assert steps_apart(ready.values, shown, fam) < 1e-3


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_parity_clip(name: str, tmp_path: Any) -> None:
    """A clip of five frames: the last one is repeated, patches hold two frames each."""
    if name == "qwen2_vl":
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import (
            Qwen2VLVideoProcessor as VideoProcessor,
        )
    else:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
            Qwen3VLVideoProcessor as VideoProcessor,
        )
    clip = frames(write_video(tmp_path / "clip.avi", 9, 4.0), spec=FrameSpec(count=5, multiple=1))
    fam = family(name, dialect="transformers")
    limits = (100352, 602112) if name == "qwen2_vl" else (131072, 786432)
    spec = fam.spec.pixels
    processor = VideoProcessor(
        image_mean=list(spec.mean), image_std=list(spec.std), do_sample_frames=False,
        size={"shortest_edge": limits[0], "longest_edge": limits[1]},
    )  # fmt: skip
    theirs = processor(clip.pixels, return_tensors="pt")
    ready = prepare(clip, fam)
    assert ready.grid_thw.tolist() == theirs["video_grid_thw"].tolist()
    assert steps_apart(ready.values, theirs["pixel_values_videos"], fam) < 1e-3


def test_parity_file(tmp_path: Any) -> None:
    """A path, turned by EXIF, gives what the upright array gives."""
    exif = Picture.Exif()
    exif[0x0112] = 6  # its first row is the visual right side
    turned = Picture.fromarray(np.ascontiguousarray(np.rot90(COFFEE)))
    turned.save(tmp_path / "photo.png", exif=exif)
    fam = family("internvl")
    assert torch.equal(
        prepare(tmp_path / "photo.png", fam).values,
        prepare(photo(COFFEE), fam).values,
    )
