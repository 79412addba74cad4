"""Golden rotations of facts/vision_pe.md 5."""

import pytest
import torch

import visionpos as vp
from visionpos import Rotation


def test_golden_right_angle():
    """(1, 0) turned by 90 degrees is (0, 1), in both pairings."""
    turns = torch.full((1, 2), torch.pi / 2, dtype=torch.float64)
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    half = Rotation.of(turns, "half").apply(x).flatten().tolist()
    adjacent = Rotation.of(turns, "adjacent").apply(x).flatten().tolist()
    assert half == pytest.approx([-3, -4, 1, 2])
    assert adjacent == pytest.approx([-2, 1, -4, 3])


def test_golden_tiled_with_adjacent_is_no_rotation():
    """Facts 5.13: e0 at position 1 (D=4): cos and sin tiled over adjacent pairs shrink it to .54; ours keep 1."""
    turns = vp.angles(torch.tensor([[1.0]]), vp.ladder(2, theta=10000.0)[None])
    e0 = torch.eye(4)[None, None, :1]
    turned = Rotation.of(turns, "adjacent").apply(e0).flatten()
    torch.testing.assert_close(turned, torch.tensor([0.5403, 0.8415, 0, 0]), rtol=0, atol=5e-5)
    assert turned.norm().item() == pytest.approx(1.0)
    cos, sin = (torch.cat([part, part], -1)[0] for part in (turns.cos(), turns.sin()))
    bug = e0.flatten() * cos + torch.tensor([0.0, 1.0, 0.0, 0.0]) * sin
    torch.testing.assert_close(bug, torch.tensor([0.5403, 0.01, 0, 0]), rtol=0, atol=5e-5)
