"""Streams and plans: which token stands where, what it is called, and what part of the picture it looks at."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import grids
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm import Cells, Image, Marker, Special, Text, TokenStream, Video, Words, family
from visionpos.vlm.instants import elapsed_steps, exact, named_instants
from visionpos.vlm.markers import StreamSpec, VideoStreamSpec, Wrap, Written
from visionpos.vlm.serialize import image_runs, video_runs
from visionpos.vlm.tiling import Plan, View

HALVES = [at / 2 for at in range(5)]  # five frames, 2 fps: an odd count
START, END = "<|vision_start|>", "<|vision_end|>"
IDS = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


def plan_of(tokens: Grid, instants: tuple[float, ...] | None = None) -> Plan:
    size = (tokens.height * 28, tokens.width * 28)
    patches = Grid(tokens.height * 2, tokens.width * 2, frames=tokens.frames)
    view = View(
        size_hw=size,
        source_yxyx=(0, 0, *size),
        content_yxyx=(0, 0, *size),
        patches=patches,
        tokens=tokens,
    )
    return Plan(size_hw=size, views=(view,), instants=instants)


def names(runs: list) -> str:
    return " ".join(TokenStream(tuple(runs)).names)


def test_the_contract_line() -> None:
    """DESIGN.md 5: without a tokenizer a word is a token, and the stream says so."""
    fam = family("qwen2_5_vl")
    clip = Video(size_hw=(360, 640), seconds=HALVES)
    stream = fam.stream([Text("Describe"), Image(size_hw=(480, 640)), clip])
    assert stream.length == len(stream) == 1 + (391 + 2) + (3 * 13 * 23 + 2)
    assert stream.text_is_symbolic
    assert stream.names[:3] == ("Describe", START, "<|image_pad|>")
    assert [span.kind for span in stream.spans] == ["text", "image", "video"]
    assert [span.segment for span in stream.spans] == [0, 1, 2]
    assert stream.spans[2].grid == Grid(13, 23, frames=3)
    kinds, counts = stream.modality.unique(return_counts=True)
    assert dict(zip(kinds.tolist(), counts.tolist(), strict=True)) == {0: 5, 1: 391, 2: 897}


def test_golden_block_clip_is_one_span() -> None:
    """Qwen2-VL (facts/mrope.md 3): one block a clip, no time text."""
    stream = family("qwen2_vl").stream(
        [Text(tokens=1), Video((56, 84), seconds=HALVES[:4]), Text(tokens=2)]
    )
    assert stream.names[:2] == ("text", START)
    assert stream.names[-3:] == (END, "text", "text")
    assert not stream.text_is_symbolic
    assert len([run for run in stream.runs if isinstance(run, Cells)]) == 1
    assert [(span.kind, span.start) for span in stream.spans] == [
        ("text", 0),
        ("video", 2),
        ("text", len(stream) - 2),
    ]


def test_golden_timestamped_frames() -> None:
    """Qwen3-VL (facts/mrope.md 3, G7): text, start, cells, end for every two frames; the last frame is repeated."""
    fam = family("qwen3_vl")
    stream = fam.stream([Text("Watch"), Video((64, 96), seconds=HALVES)])
    cells = fam.plan(Video((64, 96), seconds=HALVES)).cells // 3
    expected = ["Watch"]
    for seconds in ("0.2", "1.2", "2.0"):  # 0.25 and 1.25 in binary round half to even
        expected += [f"<{seconds}", "seconds>", START, *["<|video_pad|>"] * cells, END]
    assert list(stream.names) == expected
    frames = [span for span in stream.spans if span.kind == "video"]
    assert [span.frame for span in frames] == [0, 1, 2]
    assert {span.grid for span in frames} == {Grid(*frames[0].grid.shape[1:])}
    texts = [span for span in stream.spans if span.kind == "text"]
    assert [span.segment for span in texts] == [0, 1, 1, 1]  # timestamps belong to their clip


@pytest.mark.parametrize(("indices", "fps", "written"), [
    ([0, 54, 108, 162, 217, 271, 325, 379], 30.0, ["0.9", "4.5", "8.1", "11.7"]),
    ([0, 1, 2, 3, 4, 5, 6, 7], 2.0, ["0.2", "1.2", "2.2", "3.2"]),
    ([0, 1, 2, 3, 4, 5, 6, 7], 24.0, ["0.0", "0.1", "0.2", "0.3"]),
])  # fmt: skip
def test_golden_time_text(indices: list[int], fps: float, written: list[str]) -> None:
    """facts/mrope.md 13.15; a source frame counts by the source's fps."""
    clip = Video((64, 64), seconds=[index / fps for index in indices])
    words = [
        name
        for name in family("qwen3_vl").stream([clip]).names
        if name.startswith("<") and "|" not in name
    ]
    assert words == [f"<{seconds}" for seconds in written]


def test_golden_source_frame_300_at_30_fps_is_10_seconds() -> None:
    clip = Video((64, 64), seconds=[300 / 30, 300 / 30])
    assert family("qwen3_vl").stream([clip]).names[0] == "<10.0"


def test_texts_are_joined_before_they_are_tokenised() -> None:
    """A merge may cross from a word of the prompt into a timestamp, as in the published processors."""
    seen: list[str] = []

    def tokenizer(text: str) -> list[int]:
        seen.append(text)
        return [len(text)]

    clip = Video((64, 64), seconds=[0.0, 0.5])
    stream = family("qwen3_vl").stream(
        [Text("Look: "), Text("now "), clip, Text("Done")], tokenizer
    )
    assert seen == ["Look: now <0.2 seconds>", "Done"]
    assert not stream.text_is_symbolic
    assert stream.runs[0] == Words(segment=0, text=seen[0], count=1, token_ids=(23,))
    assert stream.names[0] == "#23"


def test_token_ids_from_a_mapping() -> None:
    ids = {**IDS, "Hi": 5, "<|im_start|>": 151644}
    stream = family("qwen2_vl").stream([Special("<|im_start|>"), Text("Hi"), Image((56, 84))], ids)
    assert stream.token_ids(ids).tolist() == [151644, 5, 151652, *[151655] * 6, 151653]
    assert [span.kind for span in stream.spans] == ["special", "text", "image"]
    known = family("qwen2_vl").stream([Text(token_ids=[8, 9])])
    assert known.token_ids().tolist() == [8, 9]


def test_a_known_length_wins_over_the_tokenizer() -> None:
    stream = family("qwen2_vl").stream(
        [Text("many words here", tokens=2), Text("")], lambda text: [1] * len(text)
    )
    assert stream.length == 2


def test_error_token_ids() -> None:
    fam = family("qwen2_vl")
    with pytest.raises(PositionError, match=r"text is symbolic.*stream\(\.\.\., tokenizer=\)"):
        fam.stream([Text("Describe")]).token_ids(IDS)
    with pytest.raises(PositionError, match=r"segment 0 is a bare count of 3 tokens.*token_ids"):
        fam.stream([Text(tokens=3)]).token_ids(IDS)
    with pytest.raises(PositionError, match=r"tokenizer is None.*vision_start"):
        fam.stream([Image((56, 56))]).token_ids()
    with pytest.raises(PositionError, match=r"'<\|image_pad\|>' is 0 tokens"):
        fam.stream([Image((56, 56))]).token_ids({START: 1, END: 2})


def test_error_clip_without_times() -> None:
    """A written time or a counted second is never made up."""
    clip = Video((64, 64), frames=4)
    with pytest.raises(
        PositionError,
        match=r"segment 1: Video has no seconds.*writes the time.*seconds=",
    ):
        family("qwen3_vl").stream([Text("a"), clip])
    fam = family("qwen2_5_vl")
    with pytest.raises(PositionError, match=r"Video in segment 0 has no seconds.*counts them"):
        fam.position_ids(fam.stream([clip]))
    assert family("qwen2_vl").stream([clip]).length


def test_the_law_of_the_stream() -> None:
    """before, child, end, between, child, end, ..., after (facts/family_grammar.md 1.5)."""
    wrap = Wrap(before="(", between=",", end=";", after=")")
    plan = plan_of(Grid(2, 3))
    runs = image_runs(
        plan,
        StreamSpec(order=("global",), image=Wrap(before=("a", "b")), global_=wrap),
        segment=4,
        cell="x",
    )
    assert names(runs) == "a b ( x x x ; , x x x ; )"
    breaks = Wrap(between="|")
    runs = image_runs(
        plan,
        StreamSpec(order=("global",), global_=breaks, image=Wrap(after="]")),
        segment=0,
        cell="x",
    )
    assert names(runs) == "x x x | x x x ]"  # Pixtral: a break between rows, an end after the last
    cells = [run for run in runs if isinstance(run, Cells)]
    assert [(run.row, run.col, run.count) for run in cells] == [(0, 0, 3), (1, 0, 3)]
    breaking = [run for run in runs if isinstance(run, Marker)]
    assert [(run.node, run.edge, run.view) for run in breaking] == [
        ("global", "between", 0),
        ("image", "after", -1),
    ]
    (span,) = TokenStream(tuple(runs)).spans
    assert (span.start, span.stop, span.grid) == (0, 7, Grid(2, 3))


def test_the_law_of_clips() -> None:
    plan = plan_of(Grid(1, 2, frames=3), instants=(0.25, 1.0, 2.0))
    spec = VideoStreamSpec(
        video=Wrap(before="[", after="]", between="/"),
        frame=Wrap(before=Written(text="{seconds:g} s")),
    )
    assert (
        names(video_runs(plan, spec, segment=0, cell="x")) == "[ 0.25 s x x / 1 s x x / 2 s x x ]"
    )
    assert names(video_runs(plan, VideoStreamSpec(), segment=0, cell="x")) == "x x x x x x"


@given(grids(max_side=9), st.integers(1, 4))
def test_shape_runs_cover_the_grid(size: tuple[int, int], frames: int) -> None:
    """With or without row markers, the cells of a clip are its grid."""
    plan = plan_of(Grid(*size, frames=frames))
    for spec in (
        VideoStreamSpec(),
        VideoStreamSpec(frame=Wrap(end="n")),
        VideoStreamSpec(frame=Wrap(after="e")),
    ):
        runs = video_runs(plan, spec, segment=0, cell="x")
        assert sum(run.count for run in runs if isinstance(run, Cells)) == plan.cells


def test_plan_rectangles_tile_the_original() -> None:
    """Every token's rectangle on the photo, in stream order, in pixels before resizing."""
    plan = family("qwen2_vl").plan(Image((480, 640)))  # 17 x 23 tokens
    rects = plan.token_rects()
    assert rects.shape == (391, 4)
    height, width = 480 / 17, 640 / 23
    expected = torch.tensor([[height, 2 * width, 2 * height, 3 * width]], dtype=torch.float64)
    torch.testing.assert_close(rects[25:26], expected)
    assert rects[-1, 2:].tolist() == [480.0, 640.0]
    assert ((rects[:, 2:] - rects[:, :2]).prod(-1).sum() - 480 * 640).abs() < 1e-6
    assert plan.grid_thw == ((1, 34, 46),)
    clip = family("qwen2_vl").plan(Video((480, 640), seconds=HALVES))
    assert clip.token_rects().shape[0] == clip.cells
    assert clip.repeated_frames == 1


def test_plan_rectangles_leave_padding_out() -> None:
    """A picture of 20 x 40 in the upper left of a canvas of 60 x 60: cells beyond it have no area."""
    view = View(
        size_hw=(60, 60),
        source_yxyx=(0, 0, 10, 20),
        content_yxyx=(0, 0, 20, 40),
        patches=Grid(3, 3),
        tokens=Grid(3, 3),
    )
    rects = view.token_rects()
    assert view.padding_px == (0, 0, 40, 20)
    assert rects[:3].tolist() == [[0, 0, 10, 10], [0, 10, 10, 20], [0, 20, 10, 20]]
    assert ((rects[:, 2:] - rects[:, :2]).prod(-1) > 0).sum() == 2


def test_plan_rectangles_of_a_crop_centred_in_its_canvas() -> None:
    """Rows 100 to 140 and columns 50 to 90 of a photo, drawn at half size amid a border of 10 pixels."""
    view = View(
        size_hw=(40, 40),
        source_yxyx=(100, 50, 140, 90),
        content_yxyx=(10, 10, 30, 30),
        patches=Grid(4, 2),
        tokens=Grid(4, 2),
    )
    assert view.padding_px == (10, 10, 10, 10)
    assert view.token_rects().tolist() == [
        [100, 50, 100, 70], [100, 70, 100, 90], [100, 50, 120, 70], [100, 70, 120, 90],
        [120, 50, 140, 70], [120, 70, 140, 90], [140, 50, 140, 70], [140, 70, 140, 90],
    ]  # fmt: skip


def test_instants_are_exact() -> None:
    """Variable spacing, an odd count, a start away from zero, and floats that are no binary fractions."""
    assert elapsed_steps((3.0, 3.1, 3.3, 4.9, 5.0), 2) == (0, Fraction(3, 10), 2)
    assert named_instants((3.0, 3.5, 4.0), 2, "mean_of_ends") == (3.25, 4.0)
    assert named_instants((3.0, 3.5, 4.0), 2, "first") == (3.0, 4.0)
    for fps in range(1, 121):
        for index in (1, 7, 100, 99991):
            assert exact(index / fps) == Fraction(index, fps)
    assert exact(1001 / 30000) == Fraction(1001, 30000)
    assert exact(torch.tensor(0.08).item(), single=True) == Fraction(2, 25)


def test_time_ids_of_a_variable_rate_clip() -> None:
    """The first frame of every pair counts: 0, 0.5, 2.25 and 5 s at two ids a second."""
    clip = Video((56, 56), seconds=[1.0, 1.4, 1.5, 3.0, 3.25, 3.3, 6.0])
    fam = family("qwen2_5_vl")
    times = fam.position_ids(fam.stream([clip])).ids[0, 1:-1].reshape(4, -1)[:, 0] - 1
    assert times.tolist() == [0, 1, 4, 10]


def test_sampled_fps_counts_as_processors_do() -> None:
    """Frames 0, 12, 25, 37 at 25 fps are 2 fps to a processor: exact steps of one second."""
    seconds = [0.0, 12 / 25, 25 / 25, 37 / 25, 50 / 25, 62 / 25]
    fam = family("qwen2_5_vl")

    def times(clip: Video) -> list[int]:
        ids = fam.position_ids(fam.stream([clip])).ids[0, 1:-1]
        return (ids.reshape(3, -1)[:, 0] - 1).tolist()

    assert times(Video((56, 56), seconds=seconds, sampled_fps=2.0)) == [0, 2, 4]
    assert times(Video((56, 56), frames=6, sampled_fps=1.5)) == [0, 2, 5]
