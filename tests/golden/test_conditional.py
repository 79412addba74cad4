"""Golden numbers of facts/vision_pe.md 2 (PEG) and of ConViT's start."""

import math

import pytest
import torch

from visionpos import Dims, Grid
from visionpos.encodings import Gpsa, GpsaSpec, Peg, PegSpec


@pytest.mark.parametrize(("padding", "sums"), [("zeros", (5, 7, 10)), ("circular", (10, 10, 10))])
def test_golden_peg_ones(padding, sums):
    """All-ones kernel on an all-ones 4x4 map: corner 5, edge 7, inside 10; circular padding 10 everywhere."""
    peg = Peg(PegSpec(padding=padding), Dims(embed_dim=1, num_heads=1, depth=1))
    with torch.no_grad():
        peg.convs[0].weight.fill_(1)
        out = peg(torch.ones(1, 16, 1), Grid(4, 4)).reshape(4, 4)
    assert (out[0, 0], out[0, 1], out[1, 1]) == sums
    corner, edge, inside = sums
    rows = [
        [corner, edge, edge, corner],
        *[[edge, inside, inside, edge]] * 2,
        [corner, edge, edge, corner],
    ]
    assert torch.equal(out, torch.tensor(rows).float())


def test_golden_peg_start():
    """std sqrt(2 / 9) = .4714, as the start of every published 3x3 PEG."""
    peg = Peg(PegSpec(), Dims(embed_dim=20000, num_heads=1, depth=1))
    assert math.sqrt(2 / 9) == pytest.approx(0.4714, abs=1e-4)
    assert peg.convs[0].weight.std().item() == pytest.approx(0.4714, abs=3e-3)


def test_golden_gpsa_start():
    """facts/timm.md 1.5: (dx, dy, d^2) with d^2 weight -1; a gate of 1 is a share of sigmoid(1) = .7311."""
    gpsa = Gpsa(GpsaSpec(), Dims(embed_dim=4, num_heads=4, depth=1))
    assert gpsa.weight.tolist() == [[-1, -1, -1], [-1, 1, -1], [1, -1, -1], [1, 1, -1]]
    assert gpsa.shares().tolist() == pytest.approx([0.731059] * 4, abs=1e-6)
