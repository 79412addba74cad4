"""An image folder as batches that are a function of the step alone: a resumed run sees what an undisturbed one sees.

Nothing here has a state. Epoch order, size of the batch, crops and flips are drawn from generators seeded by (seed,
what is drawn, its number), so there is no sampler to save, and any number of threads or processes draws the same.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional as transforms

from visionpos.errors import PositionError
from visionpos.vlm import pixels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

Size = tuple[int, int]  # (height, width) in pixels
_AHEAD = 2  # batches that are decoded while the model works


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2^63) for whatever the parts name; the same parts give the same seed on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class Photos:
    """The photos of one image folder, `root/class/name.jpg`, in alphabetical order.

    Args:
        root: the folder, for messages.
        samples: (path, label) of every photo.
        classes: name of every label.
        mean: per channel, of pixels in [0, 1].
        std: per channel.
    """

    root: Path
    samples: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, root: Path, **statistics: tuple[float, ...]) -> Photos:
        """Return the photos of a folder.

        Raises:
            PositionError: if there are none.
        """
        try:
            found = ImageFolder(str(root))
        except OSError as error:
            raise PositionError(
                f"data {root} is no image folder ({str(error).splitlines()[0]}); {root}/CLASS/NAME.jpg is required. "
                "Give --data a folder with train/ and, to measure, val/."
            ) from None
        return cls(root, tuple(found.samples), tuple(found.classes), **statistics)

    def digest(self) -> str:
        """Return a short name for which photos there are, wherever the folder lies."""
        names = [(path.removeprefix(str(self.root)), label) for path, label in self.samples]
        return hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()

    def normalised(self, picture: Tensor) -> Tensor:
        """Return a uint8 photo as the model takes it, `[3, height, width]` float32."""
        return transforms.normalize(picture.float() / 255, mean=list(self.mean), std=list(self.std))

    def whole(self, index: int, size_hw: Size) -> tuple[Tensor, int]:
        """Return the middle of a photo in the shape of `size_hw`, and its label."""
        path, label = self.samples[index]
        picture = pixels.photo(path)
        scale = max(side / have for side, have in zip(size_hw, picture.shape[-2:], strict=True))
        covering = [
            max(side, round(have * scale))
            for side, have in zip(size_hw, picture.shape[-2:], strict=True)
        ]
        picture = transforms.resize(picture, covering, antialias=True)
        return self.normalised(transforms.center_crop(picture, list(size_hw))), label

    def crop(self, index: int, size_hw: Size, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return a random crop of a photo, half of them mirrored, and its label."""
        path, label = self.samples[index]
        picture = pixels.photo(path)
        area, shape, top, left, mirror = torch.rand(5, generator=generator).tolist()
        height, width = picture.shape[-2:]
        # 35 to 100 % of the area, in the shape of the target but for a factor of 3/4 to 4/3.
        pixels_wanted = height * width * (0.35 + 0.65 * area)
        ratio = size_hw[1] / size_hw[0] * math.exp((2 * shape - 1) * math.log(4 / 3))
        box_width = min(width, max(1, round(math.sqrt(pixels_wanted * ratio))))
        box_height = min(height, max(1, round(math.sqrt(pixels_wanted / ratio))))
        corner = (int(top * (height - box_height + 1)), int(left * (width - box_width + 1)))
        picture = transforms.resized_crop(
            picture, *corner, box_height, box_width, list(size_hw), antialias=True
        )
        return self.normalised(picture.flip(-1) if mirror < 0.5 else picture), label


@dataclass(frozen=True)
class Batches:
    """Batches of random crops; the batch of a step is known without those before it.

    Args:
        photos: where they come from.
        sizes_hw: one of them is drawn for every batch, the same in all processes.
        batch_size: photos a step, of all processes together.
        seed: of everything that is drawn.
        rank: which share of every batch is returned.
        world: number of shares.
        workers: threads that decode.
    """

    photos: Photos
    sizes_hw: tuple[Size, ...]
    batch_size: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    workers: int = 2

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world:
            fits = self.world * max(1, self.batch_size // self.world)
            raise PositionError(
                f"batch_size is {self.batch_size} for {self.world} processes; a positive multiple is required, so that "
                f"the mean of their gradients is that of the batch. Use {fits}."
            )

    def size_hw(self, step: int) -> Size:
        """Return the image size of a step."""
        draw = torch.Generator().manual_seed(seed_of(self.seed, "size", step))
        return self.sizes_hw[int(torch.randint(len(self.sizes_hw), (), generator=draw))]

    def steps(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images `[b, 3, height, width]` and labels `[b]` of the steps from start to stop, decoded ahead."""
        with ThreadPoolExecutor(max_workers=max(1, self.workers)) as pool:
            steps = iter(range(start, stop))
            waiting: deque[Iterator[tuple[Tensor, int]]] = deque(
                pool.map(self._sample, self._numbers(step)) for step in islice(steps, _AHEAD)
            )
            while waiting:
                images, labels = zip(*waiting.popleft(), strict=True)
                waiting.extend(
                    pool.map(self._sample, self._numbers(step)) for step in islice(steps, 1)
                )
                yield torch.stack(images), torch.tensor(labels)

    def _numbers(self, step: int) -> range:
        """Return the numbers, counted from the first step of the run, of this share's photos."""
        share = self.batch_size // self.world
        first = step * self.batch_size + self.rank * share
        return range(first, first + share)

    def _sample(self, number: int) -> tuple[Tensor, int]:
        epoch, place = divmod(number, len(self.photos.samples))
        draw = torch.Generator().manual_seed(seed_of(self.seed, "crop", number))
        index = _order(len(self.photos.samples), self.seed, epoch)[place]
        return self.photos.crop(index, self.size_hw(number // self.batch_size), draw)


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the photos in an epoch."""
    draw = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
    order: list[int] = torch.randperm(count, generator=draw).tolist()
    return order
