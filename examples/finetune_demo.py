"""The fine-tune on real photos, small enough for two CPU cores; run by `make finetune-demo`.

Twelve photos of scikit-image are the classes; tiles of their left parts train, tiles of their right parts measure. A
timm ViT learns at 96×96 with nothing attached. Then finetune.py moves it to 160×240 with RoPE-Mixed, in batches of
three sizes, and the result is restored from its file alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import finetune
import torch
from PIL import Image
from skimage import data
from torchvision.transforms.v2 import functional as transforms

from visionpos import retrofit
from visionpos.vlm import pixels

NAMES = (
    "astronaut", "brick", "cat", "coffee", "coins", "grass",
    "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket",
)  # fmt: skip
TILE_HW = (96, 144)
SHORT_SIDE = 288  # pixels that a photo is scaled to before it is cut


def write_photos(folder: Path) -> None:
    """Cut the photos into an image folder: train/CLASS and val/CLASS, with a tile's width between the two parts."""
    for name in NAMES:
        picture = transforms.resize(
            pixels.photo(getattr(data, name)()), [SHORT_SIDE], antialias=True
        )
        height, width = picture.shape[-2:]
        for part, first, last in (("train", 0, 0.5 * width), ("val", 0.5 * width, width)):
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            for top in range(0, height - TILE_HW[0] + 1, TILE_HW[0] // 2):
                for left in range(int(first), int(last) - TILE_HW[1] + 1, TILE_HW[1] // 3):
                    tile = picture[:, top : top + TILE_HW[0], left : left + TILE_HW[1]]
                    picture_of = Image.fromarray(tile.permute(1, 2, 0).numpy())
                    picture_of.save(place / f"{top:04d}_{left:04d}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_out/finetune"))
    parser.add_argument("--steps", type=int, default=200, help="of each of the two runs")
    options = parser.parse_args()
    start, photos = time.perf_counter(), options.output / "photos"
    write_photos(photos)
    count = len(list(photos.rglob("*.png")))
    base, tuned = options.output / "base", options.output / "tuned"
    shared = (
        f"--data {photos} --model test_vit --from-size 96x96 --batch-size 32 --save-every 50 "
        f"--steps {options.steps} --ramp {options.steps // 3}"
    )
    learn = f"--output {base} --encoding none --lr 2e-3 --layer-decay 1"
    move = f"--output {tuned} --weights {base}/model.safetensors --size 160x240 --mix 192x160,96x96 --lr 1e-3"
    print(f"1. A timm ViT learns {len(NAMES)} photos ({count} tiles) at 96x96, nothing attached")
    code = finetune.main(f"{shared} {learn}".split())
    print("2. RoPE-Mixed is attached, the model moves to 160x240, batches have three sizes")
    code = code or finetune.main(f"{shared} {move} --checkpointing".split())
    if code == 0:
        model = retrofit.restore(tuned / "model.safetensors")
        shape = tuple(model(torch.zeros(1, 3, 160, 240)).shape)
        print(f"3. Restored from that file alone: logits {shape}")
        print(f"   run `visionpos describe {tuned / 'model.safetensors'}` to see its positions")
    print(f"done in {time.perf_counter() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
