"""From a family's stream to its ids, end to end, on the public tables of facts/mrope.md 7 and facts/tiling.md 7."""

from typing import Any

import pytest

from visionpos.errors import PositionError
from visionpos.vlm import Image, Text, TokenStream, Video, family


def small(px: int) -> dict[str, Any]:
    """Every picture is stretched to so many pixels a side."""
    steps = [{"kind": "stretch", "box": px}]
    return {"views": {"global": {"size": steps}}, "video": {"size": steps}}


def test_golden_g16_hunyuan_newlines_are_a_column() -> None:
    overlay = {"views": small(64)["views"]}  # 2 x 2 cells
    fam = family("hunyuan_vl", overlay=overlay)
    pos = fam.position_ids(fam.stream([Text(tokens=1), Image((9, 9))]))
    assert pos.ids.tolist() == [
        list(range(11)),
        [0, 1, 2, 0, 1, 2, 0, 1, 2, 9, 10],
        [0, 1, 2, 0, 0, 0, 1, 1, 1, 9, 10],
        [0, 1, 2, 0, 0, 0, 0, 0, 0, 9, 10],
    ]


def test_golden_g17_hy_v4_images_and_clips() -> None:
    fam = family("hy_v4_vl", overlay=small(64))
    still = fam.position_ids(fam.stream([Text(tokens=2), Image((9, 9)), Text(tokens=2)]))
    assert still.ids.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert int(still.delta) == -3
    clip = fam.position_ids(fam.stream([Text(tokens=1), Video((9, 9), frames=2), Text(tokens=1)]))
    assert clip.ids.tolist() == [
        [0] + [1] * 6 + [4] * 6 + [7],
        [0, 1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 5, 7],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7],
    ]
    assert int(clip.delta) == -6


def test_golden_v2pe_tiles_share_one_line() -> None:
    """Images of one and of three views at stride 16: starts at 2 and 23, ends at 19 and 72, first cell at 2.0625."""
    fam = family("internvl_v2pe")
    stream = fam.stream(
        [Text(tokens=2), Image((448, 448)), Text(tokens=3), Image((448, 896)), Text(tokens=1)]
    )
    (ids,) = fam.position_ids(stream).ids.tolist()
    starts = [ids[at] for at, name in enumerate(stream.names) if name == "<img>"]
    ends = [ids[at] for at, name in enumerate(stream.names) if name == "</img>"]
    assert (starts, ends) == ([2, 23], [19, 72])
    assert ids[3] == 2.0625
    assert ids[-1] == 73


@pytest.mark.parametrize("name", ["glm4v", "glm46v", "qwen3_5", "cosmos3"])
def test_frames_of_a_clip_are_images(name: str) -> None:
    """Each time step restarts at the position after its text and moves it on by max(rows, columns)."""
    fam = family(name)
    clip = Video((112, 224), seconds=[0.0, 0.5, 1.0, 1.5])
    stream = fam.stream([clip])
    (rows, cols) = fam.plan(clip).views[0].tokens.shape[1:]
    ids = fam.position_ids(stream).ids
    for span in (span for span in stream.spans if span.kind == "video"):
        cells = ids[:, span.start : span.stop].reshape(3, rows, cols)
        start = int(cells[0, 0, 0])
        assert cells[0].unique().tolist() == [start]
        assert cells[1, :, 0].tolist() == list(range(start, start + rows))
        assert cells[2, 0].tolist() == list(range(start, start + cols))
        assert int(ids[0, span.stop]) == start + max(rows, cols)


@pytest.mark.parametrize(("name", "written"), [
    ("glm4v", ["0", "1"]), ("glm46v", ["0.0 seconds", "1.0 seconds"]), ("kimi_k25", ["00:00:00.000"]),
    ("video_llama_3", ["Time 0.0s:", ",", "Time 0.5s:", ",", "Time 1.0s:", ",", "Time 1.5s:"]),
    ("minimax_m3_vl", ["]<]0.0 seconds[>[", "]<]1.0 seconds[>["]),
    ("internvl", ["Frame1:", "\n", "Frame2:", "\n", "Frame3:", "\n", "Frame4:"]),
])  # fmt: skip
def test_what_is_written_beside_frames(name: str, written: list[str]) -> None:
    """Texts of a clip of four frames at 2 fps, as each family words them (facts/mrope.md 3, facts/tiling.md 6)."""
    seen: list[str] = []

    def tokenizer(text: str) -> list[int]:
        seen.append(text)
        return [1]

    family(name).stream([Video((112, 224), seconds=[0.0, 0.5, 1.0, 1.5])], tokenizer)
    texts = [text for text in seen if text != "video"]
    assert "".join(texts).replace(" ", "") == "".join(written).replace(" ", "")


def test_clock_of_a_long_clip() -> None:
    """Hours, minutes, seconds and truncated milliseconds."""
    seen: list[str] = []
    clip = Video((112, 224), seconds=[3661.9996, 3662.0, 3662.1, 3662.2])
    family("kimi_k25").stream([clip], lambda text: seen.append(text) or [1])  # type: ignore[func-returns-value]
    assert seen[0] == "01:01:01.999"


@pytest.mark.parametrize("name", ["hunyuan_vl", "hy_v4_vl"])
def test_a_stream_without_the_markers_that_a_rule_counts_is_refused(name: str) -> None:
    stream = family(name).stream([Text(tokens=3), Image((128, 224)), Text(tokens=9)])
    bare = TokenStream(tuple(r for r in stream.runs if getattr(r, "edge", "") != "end"))
    with pytest.raises(PositionError, match="a marker at the end of every row"):
        family(name).position_ids(bare)
