"""Planning against processors: time to plan an image, paired with the same family's processor and count function.

Run by `python -m benchmarks.planning`. Processors see pixels, so noise is made for them outside the timing; what
both say about the number of views or tokens is compared first. Ratios below 1 mean less time than the peer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.paired import ratio
from visionpos.vlm import Image, Plan, family

PHOTOS = [(336, 336), (400, 1000), (479, 641), (1024, 1024), (1080, 1920)]  # (height, width)
COUNT = "get_number_of_image_patches"


def processor(model: str, cls: str, **options: Any) -> Any:
    """Return an image processor of transformers."""
    module = import_module(f"transformers.models.{model}.image_processing_{model}")
    return getattr(module, cls)(**options)


def patches(out: Any) -> int:
    """Return the number of patches that a processor of the Qwen line made."""
    return int(out["image_grid_thw"].prod(-1).sum())


PAIRS: list[tuple[str, str | None, str, str, dict[str, Any], Callable[[Any], int], Callable[[Plan], int]]] = [
    ("qwen2_vl", None, "qwen2_vl", "Qwen2VLImageProcessor", {}, patches, lambda plan: 4 * plan.cells),
    ("internvl", None, "got_ocr2", "GotOcr2ImageProcessor",
     {"crop_to_patches": True, "max_patches": 12, "size": {"height": 448, "width": 448}},
     lambda out: len(out["pixel_values"]), lambda plan: len(plan.views)),
    ("llama4", None, "llama4", "Llama4ImageProcessor", {},
     lambda out: len(out["pixel_values"]), lambda plan: len(plan.views)),
    ("cohere2_vision", None, "cohere2_vision", "Cohere2VisionImageProcessor", {},
     lambda out: len(out["pixel_values"]), lambda plan: len(plan.views)),
    ("idefics3", None, "idefics3", "Idefics3ImageProcessor", {},
     lambda out: out["pixel_values"].shape[1], lambda plan: len(plan.views)),
    ("naflex", None, "siglip2", "Siglip2ImageProcessor", {},
     lambda out: int(out["spatial_shapes"].prod()), lambda plan: plan.cells),
    ("molmo2", None, "molmo2", "Molmo2ImageProcessor", {},
     lambda out: next(len(value) for key, value in out.items() if "pool" in key), lambda plan: plan.cells),
    ("pixtral", "transformers", "pixtral", "PixtralImageProcessor", {"patch_size": {"height": 16, "width": 16}},
     lambda out: int(torch.as_tensor(out["image_sizes"]).prod()) // 256, lambda plan: plan.cells),
]  # fmt: skip


def row(
    name: str,
    dialect: str | None,
    model: str,
    cls: str,
    options: dict[str, Any],
    theirs: Callable[[Any], int],
    ours: Callable[[Plan], int],
) -> dict[str, Any]:
    """Return the ratios of one family, over all photos."""
    fam, peer = family(name, dialect), processor(model, cls, **options)
    images = [Image(size) for size in PHOTOS]
    pixels = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in PHOTOS]
    for image, picture in zip(images, pixels, strict=True):
        expected = theirs(peer(picture, return_tensors="pt"))
        assert ours(fam.plan(image)) == expected, (name, image, expected)

    def plans() -> list[Plan]:
        return [fam.plan(image) for image in images]

    def streams() -> list[int]:
        return [len(fam.stream([image])) for image in images]

    def processed() -> list[Any]:
        return [peer(picture, return_tensors="pt") for picture in pixels]

    out: dict[str, Any] = {
        "family": name,
        "plan / processor": ratio(plans, processed, rounds=5),
        "stream / processor": ratio(streams, processed, rounds=5),
    }
    count = getattr(peer, COUNT, None)
    if count is not None:
        out["plan / count"] = ratio(plans, lambda: [count(*size, options) for size in PHOTOS])
    return out


def linear() -> dict[str, Any]:
    """Return how much longer a stream of 400 images takes than one of 100, per image: 1 is linear."""
    fam = family("internvl")
    few, many = ([Image(PHOTOS[at % 5]) for at in range(count)] for count in (100, 400))
    four = ratio(lambda: fam.stream(many), lambda: fam.stream(few), rounds=5)
    return {"family": "internvl", "400 images / 100 images, per image": four / 4}


def main() -> None:
    """Print one JSON line a family."""
    for pair in PAIRS:
        sys.stdout.write(json.dumps(row(*pair)) + "\n")
    sys.stdout.write(json.dumps(linear()) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
