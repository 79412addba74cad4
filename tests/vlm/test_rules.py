"""Position rules: every switch of the formula against the table of a family that needs it (facts/mrope.md 7)."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from visionpos import config
from visionpos.errors import ConfigError
from visionpos.vlm import Delta, PerSecond, Rule, ids_from_tokens
from visionpos.vlm.resize import Pixels

MROPE = ("time", "row", "col")


def place(
    rule: Rule, types: list[int], images: Any = None, videos: Any = None, **extra: Any
) -> Any:
    """One row; grids in patches, merge 2."""
    row = torch.tensor(types)
    return ids_from_tokens(row, row, images, videos, rule=rule, merge=2, **extra)


def test_golden_g16_rows_from_zero_with_a_newline_column_and_image_number() -> None:
    """HunyuanVL: four axes P, W, H, I; 2x2 cells and a newline a row are six placeholders."""
    rule = Rule(axes=("index", "col", "row", "ordinal"), origin="zero", row_ends="column")
    got = place(rule, [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0], [[1, 4, 4]])
    assert got.ids.tolist() == [
        list(range(11)),
        [0, 1, 2, 0, 1, 2, 0, 1, 2, 9, 10],
        [0, 1, 2, 0, 0, 0, 1, 1, 1, 9, 10],
        [0, 1, 2, 0, 0, 0, 0, 0, 0, 9, 10],
    ]
    assert int(got.delta) == 0


def test_golden_g16_image_number_is_a_row_s_own() -> None:
    """The second image of a prompt has ordinal 1; two rows with one image each have 0 and 0 (facts 0.3)."""
    rule = Rule(axes=("index", "ordinal"), origin="zero")
    twice = place(rule, [1, 0, 1], [[1, 2, 2]] * 2)
    assert twice.ids[1].tolist() == [0, 1, 1]
    rows = torch.tensor([[0, 1], [0, 1]])
    batch = ids_from_tokens(rows, rows, [[1, 2, 2]] * 2, rule=rule, merge=2)
    assert batch.ids[1].tolist() == [[0, 0], [0, 0]]


def test_golden_g17_frames_as_far_apart_as_they_are_wide() -> None:
    """hy_v4_vl: rows and columns start at the frame's own time; a newline column belongs to the grid."""
    rule = Rule(axes=MROPE, origin="time", frame_step="extent", row_ends="column")
    still = place(rule, [0, 0] + [1] * 6 + [0, 0], [[1, 4, 4]])
    assert still.ids.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert int(still.delta) == -3
    clip = place(rule, [0] + [2] * 12 + [0], videos=[[2, 4, 4]])
    assert clip.ids.tolist() == [
        [0] + [1] * 6 + [4] * 6 + [7],
        [0, 1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 5, 7],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7],
    ]
    assert int(clip.delta) == -6


def test_golden_g18_centred_grids_along_a_diagonal() -> None:
    """VideoRoPE: two ids a frame, the centre of every frame on its time, text after the last time + 1."""
    rule = Rule(axes=MROPE, origin="time", centre=True, frame_step=2, next="time")
    got = place(rule, [0, 0] + [2] * 18 + [0, 0], videos=[[3, 4, 6]])
    assert got.ids.tolist() == [
        [0, 1] + [2] * 6 + [4] * 6 + [6] * 6 + [7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 7, 8],
        [0, 1, 1, 2, 3, 1, 2, 3, 3, 4, 5, 3, 4, 5, 5, 6, 7, 5, 6, 7, 7, 8],
    ]
    assert int(got.delta) == -13


@pytest.mark.parametrize(("seconds", "times", "after", "delta"), [
    (1.0, [2, 27, 52], 53, 39), (0.5, [2, 14, 27], 28, 14), (0.3, [2, 9, 17], 18, 4),
])  # fmt: skip
def test_golden_g14_whole_ids_a_second(
    seconds: float, times: list[int], after: int, delta: int
) -> None:
    """Qwen2.5-Omni: 25 ids a second, truncated."""
    rule = Rule(axes=MROPE, frame_step=PerSecond(per_second=Fraction(25)))
    got = place(rule, [0, 0] + [2] * 12 + [0] * 3, videos=[[3, 4, 4]], seconds_per_grid=seconds)
    assert got.ids[0].tolist() == [
        0,
        1,
        *(t for t in times for _ in range(4)),
        after,
        after + 1,
        after + 2,
    ]
    assert int(got.delta) == delta


@pytest.mark.parametrize(("seconds", "times", "after", "delta"), [
    (1.0, [2, 15, 28], 29, 15), (0.5, [2, 8.5, 15], 16, 2), (0.3, [2, 5.9, 9.8], 10.8, -3.2),
])  # fmt: skip
def test_golden_g14_fractions_of_an_id(
    seconds: float, times: list[float], after: float, delta: float
) -> None:
    """Qwen3-Omni: 13 ids a second, not rounded; the text that follows inherits the fraction."""
    rule = Rule(axes=MROPE, frame_step=PerSecond(per_second=Fraction(13), rounding="none"))
    got = place(rule, [0, 0] + [2] * 12 + [0] * 3, videos=[[3, 4, 4]], seconds_per_grid=seconds)
    expected = [0, 1, *(t for t in times for _ in range(4)), after, after + 1, after + 2]
    assert got.ids.dtype == torch.float64
    assert got.ids[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert float(got.delta) == pytest.approx(delta, abs=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 4, 16, 64, 256])
def test_golden_v2pe_small_steps_for_cells(stride: int) -> None:
    """V2PE (facts/tiling.md 7): visual token k of 256 stands at p + k * stride / 256, image end at p + stride + 1."""
    rule = Rule(axes=("index",), cell_step=Fraction(stride, 256), next="ceil_max")
    far = 10**6
    got = place(rule, [0] * far + [1] * 256 + [0], [[1, 32, 32]])
    step = stride / 256
    p = far - 1  # the start marker
    assert got.ids[0, far : far + 256].tolist() == [p + k * step for k in range(1, 257)]
    assert got.ids[0, -1].item() == p + stride + 1


def test_v2pe_with_step_one_is_one_dimensional() -> None:
    got = place(Rule(axes=("index",)), [0, 1, 1, 1, 1, 0], [[1, 4, 4]])
    assert got.ids.tolist() == [list(range(6))]


def test_golden_g20_start_after_the_marker() -> None:
    """glm_image: 2 text, start, (1, 2, 3) tokens, end; merge 1."""
    types = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0])
    got = ids_from_tokens(
        types, types, [[1, 2, 3]], rule=Rule(axes=MROPE, delta=Delta(from_="none"))
    )
    assert got.ids.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]
    assert int(got.delta) == 0


@pytest.mark.parametrize(("arithmetic", "fps", "frame", "value"), [
    ("exact", 25, 5, 10), ("float32_seconds", 25, 5, 9), ("float32_step", 3, 15, 249), ("exact", 3, 15, 250),
])  # fmt: skip
def test_golden_float_orders_of_25_ids_a_second(
    arithmetic: Any, fps: int, frame: int, value: int
) -> None:
    """facts/mrope.md 9: seconds a step are 2 / fps."""
    rule = PerSecond(per_second=Fraction(25), arithmetic=arithmetic)
    assert rule.offsets(Fraction(2, fps), 768)[frame] == value


def test_golden_how_often_float32_is_wrong() -> None:
    """165 of the first 768 ids at 25 ids a second and 25 fps (facts/mrope.md 9)."""
    exact, rounded = (
        PerSecond(per_second=Fraction(25), arithmetic=arithmetic).offsets(Fraction(2, 25), 768)
        for arithmetic in ("exact", "float32_seconds")
    )
    assert int((exact != rounded).sum()) == 165


@pytest.mark.parametrize(("data", "message"), [
    ({"axes": []}, r"axes are \(\).*at least one"),
    ({"axes": ["row", "row"]}, r"axes are \('row', 'row'\).*each once"),
    ({"axes": ["depth"]}, r"rule.yaml: axes.0 = 'depth'"),
    ({"axes": ["time"], "cell_step": 0}, r"cell_step is 0.*above 0"),
    ({"axes": ["row", "col"], "origin": "zero"}, r"origin 'zero'.*'index'.*Add it"),
    ({"axes": ["time", "ordinal"]}, r"'ordinal'.*'index'"),
    ({"axes": ["time"], "frame_step": {"per_second": 0}}, r"per_second is 0.*tokens_per_second"),
    ({"axes": ["time"], "frame_step": {"per_second": 13, "rounding": "none", "arithmetic": "float32_step"}},
     r"arithmetic is 'float32_step' with rounding 'none'"),
    ({"axes": ["time"], "frame_step": -1}, r"frame_step is -1.*never fall"),
    ({"axes": ["time"], "frame_stp": 2}, r"unknown key frame_stp"),
    ({"axes": ["time"], "place": "canvas"}, r"place 'canvas'.*need axes \[time, row, col\]"),
    ({"axes": ["time", "row"], "circle": {}}, r"circle Circle.*need axes \[time, row, col\]"),
    ({"axes": ["time", "row"], "place": "aligned"}, r"place 'aligned'; \[index\] in whole steps"),
    ({"axes": ["time"], "audio_in_video": {"interleave": "time"}}, r"axes \('time',\); a block with axes"),
    ({"axes": ["time", "row", "col"], "video": "frames", "audio_in_video": {"interleave": "time"}},
     r"'frames'.*a block"),
    ({"axes": ["time"], "audio_in_video": {"interleave": "chunks"}}, r"chunk_seconds is None.*chunks need it"),
    ({"axes": ["time"], "audio_in_video": {"interleave": "chunks", "chunk_seconds": -2}},
     r"chunk_seconds is -2.*above 0"),
    ({"axes": ["time"], "temporal_merge": 0}, r"temporal_merge is 0 and edge_cells 0; at least 1 and 0"),
    ({"axes": ["row"], "row_step": "-1/2"}, r"row_step is -1/2.*above 0"),
    ({"axes": ["index"], "cell_step": [1, 0]}, r"cell_step is .*above 0"),
])  # fmt: skip
def test_error_names_key_and_value(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.parse(Rule, data, source="rule.yaml")


def test_error_of_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"min_px 10, max_px 5.*min_px <= max_px"):
        Pixels(multiple=28, min_px=10, max_px=5)
