"""The check of orders: whether images of a batch, and patches with their coordinates, may come in any order."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.model_found import HALF, apart, found_of
from visionpos.audit.model_inputs import unfolded
from visionpos.audit.model_subject import Subject, features
from visionpos.audit.model_watch import tensor_of
from visionpos.audit.result import Found
from visionpos.retrofit.sizes import multiple_of

ROWS = 5e-6
"""Of the norm: sums taken in another order differ by less, in float32."""


def order(subject: Subject) -> Found:
    """Return whether another order gets the same answers: of images in a batch, of patches with coordinates."""
    model = subject.fresh()
    generator = torch.Generator().manual_seed(2)
    others = torch.randn(2, *subject.image.shape[1:], generator=generator).to(subject.image)
    batch = torch.cat([subject.image, others])
    order_ = torch.tensor([2, 0, 1])
    whole, turned = features(model, batch), features(model, batch[order_])
    alone = features(model, subject.image)
    numbers: dict[str, float] = {}
    if whole.shape[0] == len(batch):
        numbers["an image's answer depends on its place in the batch"] = apart(
            turned, whole[order_.to(whole.device)]
        )
        numbers["an image's answer depends on its neighbours in the batch"] = apart(
            whole[:1], alone
        )
    if subject.folds:
        numbers |= _patches(subject, model)
    if not numbers:
        return Found(
            detector="order",
            value=None,
            threshold=ROWS,
            alarm=False,
            says="features have no batch.",
        )
    what, value = max(numbers.items(), key=lambda item: item[1])
    limit = ROWS if subject.dtype.itemsize > 2 else HALF
    return found_of(
        "order",
        value,
        limit,
        f"{what}.",
        "Hand patches over whole and in raster order, or evaluate tables at coordinates: LearnedTable.at.",
        "the order of images, and of patches with their coordinates, changes nothing.",
    )


@torch.no_grad()
def _patches(subject: Subject, model: Any) -> dict[str, float]:
    """Return what another order of (patch, coordinate) pairs, and the absence of some, does."""
    step = multiple_of(subject.model, subject.row)
    patches = unfolded(subject.image, step)
    height, width = subject.grid.height, subject.grid.width
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([y.flatten(), x.flatten()], -1).unsqueeze(0).to(subject.device)
    count = subject.count
    valid = torch.ones(1, count, dtype=torch.bool, device=subject.device)
    turn = torch.randperm(count, generator=torch.Generator().manual_seed(3)).to(subject.device)

    def answer(chosen: Tensor, there: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.forward_features(patches[:, chosen], places[:, chosen], there)
        return tensor_of(found)

    rows = torch.arange(count, device=subject.device)
    found: dict[str, float] = {}
    try:
        still = answer(rows, valid)
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError):
        return found  # its patches come in another form
    front = still.shape[1] - count
    turned = answer(turn, valid)[:, front:][:, torch.argsort(turn)]
    what = "patches with their coordinates in another order are taken for others: coordinates are ignored"
    found[what] = apart(turned, still[:, front:])
    gone = rows[count // 2 : count // 2 + 3] if width > 1 else rows[:0]
    kept = rows[(rows.unsqueeze(-1) != gone).all(-1)]
    if len(kept) in (0, count):
        return found
    masked = valid.clone()
    masked[:, gone] = False
    wanted = answer(rows, masked)[:, front:][:, kept]
    what = "patches behind absent ones get the places of others"
    try:
        given = answer(kept, valid[:, kept])[:, front:]
        found[what] = apart(given, wanted)
    except (RuntimeError, AssertionError, ValueError, IndexError):
        found[f"{what}, or the call fails"] = float("inf")
    return found
