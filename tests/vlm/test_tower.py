"""Vision towers: the public tables of facts/mrope.md 5, and vision_utils of transformers on random grids."""

import random

import pytest
import torch
from hypothesis import given

from tests.strategies import seeds
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import Grid
from visionpos.vlm import family
from visionpos.vlm.tower import TowerSpec, tower_ids, tower_segments, tower_windows

# family -> merge of its tower, time axis, whole clips attend to themselves
TOWERS = {
    "qwen2_vl": (2, False, False), "qwen2_5_vl": (2, False, False), "qwen3_vl": (2, False, False),
    "qwen3_5": (2, False, False), "kimi_k25": (1, False, True), "glm4v": (2, False, False),
    "minimax_m3_vl": (2, True, True), "ernie4_5_vl": (2, False, False), "paddleocr_vl": (1, False, False),
    "qwen2_5_omni": (2, False, False), "qwen3_omni": (2, False, False),
}  # fmt: skip


def tower_of(name: str) -> TowerSpec:
    tower = family(name).spec.tower
    assert tower is not None
    return tower


def drawn(seed: int, merge: int = 2) -> list[Grid]:
    rng = random.Random(seed)
    return [
        Grid(merge * rng.randint(1, 12), merge * rng.randint(1, 12), frames=rng.randint(1, 4))
        for _ in range(rng.randint(1, 4))
    ]


def test_golden_blocks_of_two() -> None:
    got = tower_ids(tower_of("qwen2_vl"), [Grid(4, 4)])
    assert got[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert got[:, 1].tolist() == [0, 1, 0, 1, 2, 3, 2, 3] * 2


WINDOWS = {
    (1, 8, 8): (list(range(16)), [0, 64]),
    (1, 12, 10): ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18, 4, 9, 14, 19, 20, 21, 22, 23, 25, 26, 27,
                   28, 24, 29], [0, 64, 80, 112, 120]),
    (2, 4, 10): ([0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10, 11, 12, 13, 15, 16, 17, 18, 14, 19], [0, 32, 40, 72, 80]),
    (1, 16, 16): (None, [0, 64, 128, 192, 256]),
}  # fmt: skip


@pytest.mark.parametrize("shape", WINDOWS)
def test_golden_windows(shape: tuple[int, int, int]) -> None:
    order, ends = WINDOWS[shape]
    frames, height, width = shape
    got = tower_windows(tower_of("qwen2_5_vl"), [Grid(height, width, frames=frames)])
    assert order is None or got.cells.tolist() == order
    assert got.cu_seqlens.tolist() == ends
    assert got.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("name", TOWERS)
def test_reference_ids_and_segments(name: str) -> None:
    vision = pytest.importorskip("transformers.vision_utils")
    (merge, timed, whole), tower = TOWERS[name], tower_of(name)
    for seed in range(150):
        grids = drawn(seed)
        table = torch.tensor([grid.shape for grid in grids])
        expected = vision.get_vision_position_ids(table, merge, include_temporal=timed)
        assert torch.equal(tower_ids(tower, grids), expected), f"seed {seed}"
        ends, longest = tower_segments(tower, grids)
        theirs = vision.get_vision_cu_seqlens(table, merge_temporal=whole)
        assert torch.equal(ends, theirs), f"seed {seed}"
        assert longest == int(theirs.diff().max())


def test_reference_windows() -> None:
    """112 px windows of 14 px patches, merge 2."""
    vision = pytest.importorskip("transformers.vision_utils")
    tower = tower_of("qwen2_5_vl")
    for seed in range(150):
        grids = drawn(seed)
        table = torch.tensor([grid.shape for grid in grids])
        cells, ends = vision.get_vision_window_index(table, 2, 112, 14)
        got = tower_windows(tower, grids)
        assert torch.equal(got.cells, cells), f"seed {seed}"
        assert got.cu_seqlens.tolist() == list(ends), f"seed {seed}"


@given(seeds())
def test_invariant_windows_there_and_back(seed: int) -> None:
    """The inverse brings merged cells back; patches move in blocks with their cell, and no window leaves its frame."""
    grids = drawn(seed)
    got = tower_windows(tower_of("qwen2_5_vl"), grids)
    cells = torch.arange(len(got.cells))
    assert torch.equal(cells[got.cells][got.inverse], cells)
    assert torch.equal(got.patches.view(-1, 4) // 4, got.cells[:, None].expand(-1, 4))
    assert torch.equal(got.patches.sort().values, torch.arange(4 * len(cells)))
    frames, _ = tower_segments(tower_of("qwen2_5_vl"), grids)
    assert set(frames.tolist()) <= set(got.cu_seqlens.tolist())
    assert int(got.cu_seqlens.diff().max()) <= 64


def test_which_layers_attend_in_full() -> None:
    tower = tower_of("qwen2_5_vl")
    assert tower.full_layers == (7, 15, 23, 31)
    assert tower_of("qwen3_omni").window is None
    assert tower_of("qwen2_vl").full_layers == ()


def test_shape_no_images() -> None:
    tower = tower_of("qwen2_5_vl")
    assert tower_ids(tower, []).shape == (0, 2)
    assert tower_segments(tower, [])[0].tolist() == [0]
    assert tower_windows(tower, []).cu_seqlens.tolist() == [0]


def test_error_names_what_is_wrong() -> None:
    with pytest.raises(PositionError, match=r"no windows.*tower_segments"):
        tower_windows(tower_of("glm4v"), [Grid(4, 4)])
    with pytest.raises(PositionError, match="merge"):
        tower_ids(tower_of("qwen2_vl"), [Grid(3, 4)])
    with pytest.raises(ConfigError, match=r"merge is 0.*window None"):
        TowerSpec(merge=0)
