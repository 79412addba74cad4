"""Rows without their padding and back: any mask, stretches at either end and holes, as boolean indexing has it."""

import numpy as np
import pytest

from visionpos.vlm.padding import repadded, unpadded


def masks(kind: str) -> np.ndarray:
    """`[5, 7]` bool: real tokens in front, behind, in the middle, none at all, or anywhere."""
    rng = np.random.default_rng(3)
    keep = np.zeros((5, 7), dtype=bool)
    for row, count in zip(keep, (0, 1, 4, 6, 7), strict=True):
        first = {"front": 0, "behind": 7 - count, "middle": (7 - count) // 2}.get(kind, 0)
        row[first : first + count] = True
    return rng.random((5, 7)) < 0.6 if kind == "holes" else keep


@pytest.mark.parametrize("kind", ["front", "behind", "middle", "holes"])
def test_reference_boolean_indexing(kind: str) -> None:
    keep, values = masks(kind), np.arange(35).reshape(5, 7)
    line = unpadded(values, keep)
    assert line.tolist() == values[keep].tolist()
    back = repadded(np.stack([line, -line]), keep, 99)
    assert back.shape == (2, 5, 7)
    assert np.array_equal(back[0], np.where(keep, values, 99))
    assert np.array_equal(back[1], np.where(keep, -values, 99))


def test_shape_without_padding_or_tokens() -> None:
    values = np.arange(6).reshape(2, 3)
    assert unpadded(values, None).tolist() == [0, 1, 2, 3, 4, 5]
    nothing = np.zeros((2, 3), dtype=bool)
    assert unpadded(values, nothing).tolist() == []
    assert repadded(np.zeros((1, 0), dtype=np.int64), nothing, 7).tolist() == [[[7] * 3] * 2]
