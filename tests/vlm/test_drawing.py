"""Photos with tokens drawn on them, and clicks mapped to tokens and back."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Picture
from torch import Tensor

from visionpos.cli import commands
from visionpos.cli.folding import folded
from visionpos.errors import PositionError
from visionpos.vlm import Image, Text, family, family_names, tokens_at
from visionpos.vlm.pixels import draw_tokens, drawing, write_png
from visionpos.vlm.pixels.drawing import BREAK, FRAME, GAP_PX, LETTER_PX, SHOWN_PX

NAMES = family_names()
CAPTION_PX = LETTER_PX[1] + GAP_PX


def drawn(name: str, size_hw: tuple[int, int], before: int = 0) -> Tensor:
    """A grey photo with the tokens of a family on it, after so many tokens of text."""
    fam = family(name)
    picture = torch.full((3, *size_hw), 90, dtype=torch.uint8)
    segments = [Text(tokens=before), Image(size_hw)]
    return draw_tokens(picture, fam.plan(Image(size_hw)), fam.stream(segments), segment=1)


def where(picture: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """`[height, width]` bool: True where the picture has exactly this colour."""
    return (picture == torch.tensor(colour).view(3, 1, 1)).all(0)


# --- clicks ---------------------------------------------------------------------------------------


@given(st.sampled_from(NAMES), st.tuples(st.integers(30, 400), st.integers(30, 400)), st.data())
def test_invariant_click(name: str, size_hw: tuple[int, int], data: st.DataObject) -> None:
    """A click hits at most one token of every view, and each of them is where it was clicked."""
    plan = family(name).plan(Image(size_hw))
    point = tuple(data.draw(st.floats(0, side)) for side in size_hw)
    hit = tokens_at(plan, (point[0], point[1]))
    rects = plan.token_rects()[hit]
    clicked = torch.tensor(point, dtype=torch.float64)
    assert ((rects[:, :2] <= clicked) & (clicked <= rects[:, 2:])).all()
    starts = [part.tokens.size for part in plan.parts]
    of_part = torch.arange(len(starts)).repeat_interleave(torch.tensor(starts))[hit]
    if all(view.has_places for view in plan.views):
        assert len(of_part.unique()) == len(of_part)


@pytest.mark.parametrize("name", NAMES)
def test_reference_click_on_a_token(name: str) -> None:
    """The middle of every token's rectangle leads back to it, in the stream as well."""
    fam = family(name)
    segments = [Text(tokens=7), Image((97, 161))]
    plan, stream = fam.plan(segments[1]), fam.stream(segments)  # type: ignore[arg-type]
    rects = plan.token_rects()
    places = stream.is_feature.nonzero().flatten()
    assert len(places) == len(rects)
    for number in torch.linspace(0, len(rects) - 1, 23).int().tolist():
        top, left, bottom, right = rects[number].tolist()
        if top < bottom and left < right:
            assert number in tokens_at(plan, ((top + bottom) / 2, (left + right) / 2))
            assert places[number] >= 7


def test_reference_click_by_hand() -> None:
    """56 x 84 pixels are 2 x 3 tokens of 28; the far corner belongs to the last, a seam to the token after it."""
    plan = family("qwen2_vl").plan(Image((56, 84)))
    for point, expected in {
        (0.0, 0.0): [0], (27.9, 27.9): [0], (28.0, 27.9): [3], (27.9, 28.0): [1],
        (28.0, 28.0): [4], (56.0, 84.0): [5], (0.0, 84.0): [2],
    }.items():  # fmt: skip
        assert tokens_at(plan, point).tolist() == expected, point


def test_reference_click_in_two_views() -> None:
    """Llama 4 looks at a place in a tile and in the whole image; tiles come first."""
    plan = family("llama4").plan(Image((672, 672)))
    hit = tokens_at(plan, (336.0, 0.0))
    assert hit.tolist() == [2 * 144, 4 * 144 + 6 * 12]


def test_shape_click_on_queries_and_clips() -> None:
    """Queries all look at the whole view; a clip is hit in every time step."""
    assert len(tokens_at(family("idefics2").plan(Image((300, 400))), (5, 5))) == 64
    from visionpos.vlm import Video

    plan = family("qwen2_vl").plan(Video((360, 640), seconds=[0.0, 0.5, 1.0, 1.5]))
    assert len(tokens_at(plan, (100.0, 100.0))) == 2


@pytest.mark.parametrize(
    "point", [(-0.1, 5.0), (5.0, 84.1), (57.0, 0.0), (float("nan"), 1.0), (1.0, 2.0, 3.0)]
)
def test_error_click(point: tuple[float, ...]) -> None:
    plan = family("qwen2_vl").plan(Image((56, 84)))
    with pytest.raises(PositionError, match=r"point_yx is .*\(56, 84\).*Divide"):
        tokens_at(plan, point)  # type: ignore[arg-type]


# --- drawings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shape_every_family(name: str) -> None:
    """Every family can be drawn: a frame at least, in a picture of a readable size."""
    got = drawn(name, (90, 140))
    assert got.dtype == torch.uint8
    assert where(got, FRAME).any()
    panels = (
        2 if any(view.node == "tile" for view in family(name).plan(Image((90, 140))).views) else 1
    )
    assert max(got.shape[1:]) <= panels * (SHOWN_PX[1] + 500)  # captions may be wider than a panel


@pytest.mark.parametrize("size_hw", [(1, 1), (5, 7), (600, 30), (30, 600), (3000, 2000)])
def test_shape_readable(size_hw: tuple[int, int]) -> None:
    """A tiny photo is enlarged, a large one shrunk, a thin one keeps its ratio."""
    got = drawn("naflex", size_hw)
    frame = where(got, FRAME).nonzero()
    extent = frame.max(0).values - frame.min(0).values + 1
    assert SHOWN_PX[0] - 1 <= extent.max() <= SHOWN_PX[1]
    assert abs(extent[0] / extent[1] - size_hw[0] / size_hw[1]) <= 2 * size_hw[0] / size_hw[1]


def test_reference_frames_are_tiles() -> None:
    """Two tiles side by side: a frame runs down the middle of the tile panel, and none across it."""
    got = drawn("internvl", (448, 896))
    panel = where(got, FRAME)[CAPTION_PX:, (got.shape[2] + GAP_PX) // 2 :]  # the second of two
    height, width = panel.shape
    across, down = (panel.float().mean(axis) > 0.9 for axis in (0, 1))
    expected = {0, 1, 2, width - 1, width - 2, width - 3}
    middle = set(across.nonzero().flatten().tolist()) - expected
    assert middle
    assert all(abs(at - width / 2) <= 3 for at in middle)
    assert set(down.nonzero().flatten().tolist()) == {0, 1, 2, height - 1, height - 2, height - 3}


@pytest.mark.parametrize(("name", "kept"), [("pixtral", 4), ("fuyu", 3), ("qwen2_vl", 0)])
def test_reference_breaks(name: str, kept: int) -> None:
    """A bar for every break: Pixtral parts 5 rows by 4, Fuyu ends all 3, Qwen none."""
    got = where(drawn(name, (80, 128)), BREAK)[CAPTION_PX:]
    column = got[:, got.any(0)][:, 0] if got.any() else torch.zeros(0, dtype=torch.bool)
    begins = (column[1:] & ~column[:-1]).sum() if len(column) else 0
    assert begins == kept


def test_reference_separators() -> None:
    """Llama 4 parts tiles of a row, and ends every row of tiles: a bar for each."""
    got = where(drawn("llama4", (672, 672)), BREAK)[CAPTION_PX:]
    assert len(torch.unique((got.nonzero()[:, 1].float() / 40).round())) == 2  # two places across


def test_reference_numbers() -> None:
    """Numbers are places in the stream: text before the photo changes them, and nothing else."""
    first, again, later = (drawn("qwen2_vl", (112, 112), before=n) for n in (3, 3, 5))
    assert torch.equal(first, again)
    changed = (first[:, CAPTION_PX:] != later[:, CAPTION_PX:]).any(0)
    assert changed.any()
    cells = changed[: changed.shape[0] // 4 * 4, : changed.shape[1] // 4 * 4].unflatten(0, (4, -1))
    assert cells.unflatten(2, (4, -1)).any(1).any(-1).all()  # in each of the 4 x 4 cells


def test_invariant_padding_is_not_drawn() -> None:
    """The drawing has the photo's ratio, also where a family pads it to a square."""
    got = drawn("llava_1_5", (100, 400))
    frame = where(got, FRAME).nonzero()
    extent = frame.max(0).values - frame.min(0).values + 1
    assert extent[1] / extent[0] == pytest.approx(4, abs=0.05)


def test_invariant_picture_is_untouched() -> None:
    picture = torch.full((3, 60, 80), 90, dtype=torch.uint8)
    fam = family("naflex")
    draw_tokens(picture, fam.plan(Image((60, 80))), fam.stream([Image((60, 80))]))
    assert (picture == 90).all()


def test_error_drawing() -> None:
    fam = family("naflex")
    stream, plan = fam.stream([Text("a"), Image((60, 80))]), fam.plan(Image((60, 80)))
    with pytest.raises(PositionError, match=r"picture is \(80, 60\).*plan is for \(60, 80\)"):
        draw_tokens(torch.zeros(3, 80, 60, dtype=torch.uint8), plan, stream, 1)
    for segment in (0, 2):
        with pytest.raises(PositionError, match=rf"segment {segment} of the stream.*the photo"):
            draw_tokens(torch.zeros(3, 60, 80, dtype=torch.uint8), plan, stream, segment)


def test_reference_png(tmp_path: Path) -> None:
    """Two drawings stand below each other, in the order given."""
    black, white = torch.zeros(3, 20, 30, dtype=torch.uint8), torch.full((3, 10, 40), 255).byte()
    write_png(tmp_path / "two.png", [black, white])
    read = np.asarray(Picture.open(tmp_path / "two.png"))
    assert read.shape == (20 + 12 + 10, 40, 3)
    assert (read[:20, :30] == 0).all()
    assert (read[32:] == 255).all()


# --- command line ---------------------------------------------------------------------------------


@pytest.fixture
def stream(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def stream(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["visionpos", "stream", *map(str, words)])
        code = 0
        try:
            commands.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return stream


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Picture.fromarray(np.full((60, 96, 3), 128, np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("name", NAMES)
def test_command_plans_every_family(stream, photo: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    """`visionpos stream --family NAME photo` prints the plan of every family."""
    code, out, err = stream(photo, "--family", name, "--json")
    assert code == 0, err
    fam = family(name)
    said = json.loads(out)
    assert [row["view"] for row in said["plan"]] == [
        view.node for view in fam.plan(Image((60, 96))).views
    ]
    assert said["features"] == fam.plan(Image((60, 96))).cells


def test_command_draws(stream, photo: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """`--draw` writes what `draw_tokens` gives, for every photo of the prompt, and says so in one line more."""
    output = tmp_path / "out.png"
    words = (photo, photo, "--family", "llava_next", "--text", "two words")
    without = stream(*words)
    code, out, err = stream(*words, "--draw", output)
    said = f"wrote {output}: photo.png tokens 2..976, photo.png tokens 978..1952\n"
    assert (code, out, err) == (without[0], without[1] + said, without[2])
    fam, image = family("llava_next"), Image((60, 96))
    tokens = fam.stream([Text("two words"), image, image])
    grey = torch.full((3, 60, 96), 128, dtype=torch.uint8)
    pictures = [
        draw_tokens(grey, fam.plan(image, 2), tokens, at, caption="photo.png") for at in (1, 2)
    ]
    write_png(tmp_path / "expected.png", pictures)
    assert output.read_bytes() == (tmp_path / "expected.png").read_bytes()


def test_command_draws_no_text(stream, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = stream("--text", "a", "--draw", tmp_path / "out.png")
    assert code == 2
    assert "no photo is given" in err
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(("name", "message"), [
    ("out.jpg", r"is no PNG; the name of a file that ends in \.png"),
    ("out", r"is no PNG"),
    ("nodir/out.png", r"is in no existing folder; create .*nodir first"),
])  # fmt: skip
def test_command_draws_where_it_can(
    stream, photo: Path, tmp_path: Path, name: str, message: str
) -> None:  # type: ignore[no-untyped-def]
    code, out, err = stream(photo, "--draw", tmp_path / name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)
    assert "Errno" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["photo.png"]


def test_command_says_in_json_what_it_drew(stream, photo: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, out, _ = stream(photo, "--family", "qwen2_vl", "--draw", tmp_path / "out.png", "--json")
    fam = family("qwen2_vl")
    last = 1 + fam.plan(Image((60, 96))).cells - 1
    photos = [{"photo": "photo.png", "segment": 0, "first": 1, "last": last}]
    assert json.loads(out)["drawing"] == {"file": str(tmp_path / "out.png"), "photos": photos}


@pytest.mark.parametrize(("name", "views"), [("qwen2_vl", "1 view,"), ("internvl", "2 views,")])
def test_caption_counts_views(name: str, views: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []
    kept = drawing._captioned
    monkeypatch.setattr(
        drawing, "_captioned", lambda image, text: (captions.append(text), kept(image, text))[1]
    )
    drawn(name, (448, 896))
    assert any(views in caption for caption in captions)
    assert "view(s)" not in "".join(captions)


# The table of a stream


def test_table_folds_what_repeats(stream, photo: Path) -> None:  # type: ignore[no-untyped-def]
    """Rows of cells and newlines are one row of the table, whatever the number of tokens."""
    _, out, _ = stream(photo, "--family", "llava_next")
    fam, table = family("llava_next"), out.partition("dialect vendor \n")[2]
    rows = [line for line in out.splitlines() if line.count("│") == 6]
    assert len(rows) == 3
    stream_ = fam.stream([Image((60, 96))])
    newlines = stream_.names.count("image_newline")
    assert f"{newlines - 1} x (image_newline, 24 <image>)" in out, table
    assert f"length {stream_.length}" in out


@settings(max_examples=200)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 5))
def test_invariant_folded_rows_cover_the_stream(names: list[str], times: int) -> None:
    """Rows lie end to end and what they say, written out, is the stream."""
    tokens = names * times
    rows = folded(tokens)
    written: list[str] = []
    for text, start, count in rows:
        assert start == len(written)
        many = re.fullmatch(r"(\d+) x \((.*)\)", text)
        if many is None:
            written += [text] * count
            continue
        parts = [part.rpartition(" ") for part in many[2].split(", ")]
        written += [name for number, _, name in parts for _ in range(int(number or 1))] * int(
            many[1]
        )
        assert len(written) == start + count
    assert written == tokens


def test_table_shows_line_ends(stream, photo: Path) -> None:  # type: ignore[no-untyped-def]
    _, out, _ = stream(photo, "--family", "gemma3")
    assert r"│ '\n\n' " in out
    assert all(
        line.endswith(("│", "┃", "┓", "┩", "┘", " ", "0")) or "dialect" in line
        for line in out.splitlines()
    )
