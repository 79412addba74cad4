"""Plans: where tiles and tokens lie on the photo, exactly, and what the grammar refuses."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Cells, Image, Marker, family, family_names
from visionpos.vlm.picking import Attempt, PickSpec, Source, picked
from visionpos.vlm.views import Ruler

TILED = ["internvl", "llama4", "llava_next", "llava_onevision", "idefics3", "phi3_5_vision", "phi4_multimodal",
         "deepseek_vl2", "deepseek_ocr", "deepseek_ocr2", "molmo", "molmo2", "minicpm_v4_6", "ovis2", "lfm2_vl",
         "perception_lm", "cohere2_vision", "granite4_vision"]  # fmt: skip


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("size_hw", [(400, 1000), (641, 479), (1024, 1024), (97, 131)])
def test_tiles_show_every_pixel_of_the_photo_once(name: str, size_hw: tuple[int, int]) -> None:
    """Without margins the source rectangles of the tiles are a partition, exactly."""
    plan = family(name).plan(Image(size_hw))
    tiles = [view for view in plan.views if view.node == "tile"]
    if not tiles:
        assert plan.tiles_rc is None
        return
    area = sum((b - t) * (r - left) for t, left, b, r in (view.source_yxyx for view in tiles))
    if name.startswith("molmo"):
        assert area >= size_hw[0] * size_hw[1]
    else:
        assert area == size_hw[0] * size_hw[1]
    assert [view.tile_rc for view in tiles] == [
        (row, col) for row in range(plan.tiles_rc[0]) for col in range(plan.tiles_rc[1])  # type: ignore[index]
    ]  # fmt: skip
    for view in tiles:
        top, left, bottom, right = view.source_yxyx
        assert 0 <= top <= bottom <= size_hw[0]
        assert 0 <= left <= right <= size_hw[1]
        assert min(view.padding_px) >= 0


@pytest.mark.parametrize("name", family_names())
def test_tokens_lie_on_the_photo_in_raster_order(name: str) -> None:
    """Every rectangle is inside the photo; down a column tops never fall, along a row lefts never fall."""
    size_hw = (400, 700)
    plan = family(name).plan(Image(size_hw))
    for part in plan.parts:
        rects = part.token_rects().reshape(*part.tokens.shape[1:], 4)
        assert (rects >= 0).all()
        assert (rects[..., 2] <= size_hw[0] + 1e-9).all()
        assert (rects[..., 3] <= size_hw[1] + 1e-9).all()
        assert (rects[1:, :, 0] >= rects[:-1, :, 0] - 1e-9).all()
        assert (rects[:, 1:, 1] >= rects[:, :-1, 1] - 1e-9).all()
        assert (rects[..., 2:] >= rects[..., :2] - 1e-9).all()


def test_joined_cells_of_a_kept_raster() -> None:
    """LLaVA-NeXT, 336x672 on 2 tiles: no padding, so cell (r, c) is 14 pixels of the photo."""
    plan = family("llava_next", dialect="transformers").plan(Image((336, 672)))
    assert plan.raster is not None
    assert plan.raster.tokens.shape == (1, 24, 48)
    rects = plan.raster.token_rects().reshape(24, 48, 4)
    assert rects[3, 40].tolist() == [42, 560, 56, 574]
    assert plan.token_rects().shape == (576 + 24 * 48, 4)
    assert plan.token_rects()[0].tolist() == [
        0,
        0,
        14,
        28,
    ]  # the whole view is squeezed to a square


def test_joined_cells_of_siglip_leave_the_rest_of_each_tile_out() -> None:
    """384 / 14 is 27 patches and 6 pixels that no patch sees, in every tile."""
    plan = family("llava_onevision").plan(Image((384, 768)))
    assert plan.raster is not None
    rows, cols = plan.raster.bands()
    assert cols[26] == (364, 378)
    assert cols[27] == (384, 398)
    assert len(rows) == 27


def test_margins_belong_to_the_canvas() -> None:
    """Molmo: 336-pixel crops every 224 pixels; an odd raster ends with half a cell."""
    plan = family("molmo").plan(Image((560, 560)))
    assert plan.tiles_rc == (2, 2)
    assert [view.source_yxyx[:2] for view in plan.views[1:]] == [
        (0, 0),
        (0, 224),
        (224, 0),
        (224, 224),
    ]
    odd = family("molmo2").plan(Image((378 + 266, 378)))
    assert odd.raster is not None
    assert odd.raster.tokens.shape[1:] == (23, 14)
    assert odd.raster.bands()[1][0] == (0, 28)
    assert odd.raster.bands()[1][13] == (
        364,
        378,
    )  # 27 patches pooled by two: the last cell holds one


def test_padding_has_no_area() -> None:
    """Llama 4 pads at the end: the last tile of a picture that only grazes it shows a sliver."""
    plan = family("llama4").plan(Image((337, 337)))
    assert plan.tiles_rc == (2, 2)
    corner = plan.views[3]
    assert corner.source_yxyx == (336, 336, 337, 337)
    assert corner.padding_px == (0, 0, 335, 335)
    rects = corner.token_rects()
    assert (rects[0] == torch.tensor([336.0, 336.0, 337.0, 337.0], dtype=torch.float64)).all()
    assert ((rects[1:, 2:] - rects[1:, :2]).prod(-1) == 0).all()


def test_queries_look_at_their_whole_view() -> None:
    rects = family("idefics2").plan(Image((400, 600))).token_rects()
    assert rects.shape == (64, 4)
    assert rects.unique(dim=0).tolist() == [[0, 0, 400, 600]]


def test_pieces_are_exact_fractions() -> None:
    """MiniCPM shares 1000 pixels by three; Gemma 3 rounds up and leaves the last crop shorter."""
    plan = family("minicpm_v4_6").plan(Image((1000, 400)))
    assert [view.source_yxyx[0] for view in plan.views[1:]] == [
        0,
        Fraction(1000, 3),
        Fraction(2000, 3),
    ]
    crops = family("gemma3", variant="pan_and_scan").plan(Image((400, 1000))).views[1:]
    assert [view.source_yxyx[1::2] for view in crops] == [(0, 334), (334, 668), (668, 1000)]
    quadrants = family("idefics2", variant="split").plan(Image((479, 641))).views[:4]
    assert [view.source_yxyx for view in quadrants] == [
        (0, 0, 239, 320), (0, 320, 239, 641), (239, 0, 479, 320), (239, 320, 479, 641),
    ]  # fmt: skip


def test_centre_crop_shows_the_middle() -> None:
    """Chameleon: 480x640 becomes 512x683, of which columns 85 to 597 are kept."""
    (view,) = family("chameleon").plan(Image((480, 640))).views
    top, left, bottom, right = view.source_yxyx
    assert (top, bottom) == (0, 480)
    assert (left, right) == (Fraction(85 * 640, 683), Fraction(597 * 640, 683))
    assert view.padding_px == (0, 0, 0, 0)
    padded = family("llava_1_5").plan(Image((100, 300))).views[0]
    assert padded.source_yxyx == (0, 0, 100, 300)
    assert padded.padding_px == (112, 0, 112, 0)


def test_ruler_of_interpolated_cells() -> None:
    ruler = Ruler(cells=2, patch_px=10, merge=1, patches=5, skip=1, kept=3)
    assert ruler.bands() == [(10, 25), (25, 40)]
    joined = Ruler(cells=4, patch_px=10, merge=1, patches=2, tiles=2, stride_px=25, tile_cells=2)
    assert joined.bands() == [(0, 10), (10, 20), (25, 35), (35, 45)]


def test_the_law_of_tiles() -> None:
    """before, child, end, between, child, end, ..., after on every node of the tree (facts/family_grammar.md 1.5)."""
    nodes = ("image", "global", "tiles", "tile_row", "tile")
    signs = {"before": "(", "between": ",", "end": ";", "after": ")"}
    mark = {node: {edge: node + sign for edge, sign in signs.items()} for node in nodes}
    overlay = {
        "views": {"tile": {"px": 2}, "pick": {"from": {"tiles": None, "list": [[2, 2]]}}, "when": None},
        "grid": {"patch": 1, "merge": 2}, "stream": {"replace": True, "order": ["tiles", "global"], **mark},
    }  # fmt: skip
    stream = family("internvl", overlay=overlay).stream([Image((9, 9))])
    tile = "tile( x tile; tile)".replace("x", "<IMG_CONTEXT>")
    row = f"tile_row( {tile} tile_row; tile_row, {tile} tile_row; tile_row)"
    tiles = f"tiles( {row} tiles; tiles, {row} tiles; tiles)"
    whole = "global( <IMG_CONTEXT> global; global)"
    assert " ".join(stream.names) == f"image( {tiles} image; image, {whole} image; image)"
    found = [(run.node, run.edge) for run in stream.runs if isinstance(run, Marker)]
    assert found[:4] == [
        ("image", "before"),
        ("tiles", "before"),
        ("tile_row", "before"),
        ("tile", "before"),
    ]
    views = [run.view for run in stream.runs if isinstance(run, Cells)]
    assert views == [0, 1, 2, 3, 4]


def test_spans_of_views_and_rows() -> None:
    stream = family("llava_next").stream([Image((400, 1000))])  # 24 x 60 kept
    whole, tiles = stream.spans
    assert (whole.node, whole.start, whole.stop) == ("global", 0, 576)
    assert (tiles.node, tiles.start, tiles.stop) == ("tiles", 576, len(stream) - 1)
    rows = [span for span in stream.row_spans if span.node == "tiles"]
    assert [(row.row, row.stop - row.start) for row in rows] == [(at, 60) for at in range(24)]
    assert rows[1].start == rows[0].stop + 1  # a newline between
    flat = family("internvl").stream([Image((448, 896))])
    assert {row.stop - row.start for row in flat.row_spans} == {16}


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 40))
def test_brute_force_closest_ratio(height: int, width: int, most: int) -> None:
    """InternVL's rule as its code runs: replace on a smaller distance, or on a tie if the picture fills half."""
    spec = PickSpec(
        from_=Source(tiles=(1, most)),
        attempts=(Attempt(by=("ratio", "half_area")),),
        arithmetic="float64",
    )
    grids = sorted(
        {(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if c * r <= most},
        key=lambda grid: (grid[0] * grid[1], grid[0]),
    )
    best, least = (1, 1), float("inf")
    for cols, rows in grids:
        distance = abs(width / height - cols / rows)
        if distance < least or (
            distance == least and width * height > 0.5 * 448 * 448 * cols * rows
        ):
            best, least = (cols, rows), min(distance, least)
    assert picked(spec, (height, width), 448) == best


def test_error_picks_are_refused_at_load() -> None:
    def overlay(pick: Any) -> dict[str, Any]:
        return {"views": {"pick": pick}}

    for change, message in [
        ({"attempts": []}, r"pick has no attempts"),
        ({"attempts": [{"by": ["ratios"]}]}, r"pick key 'ratios' is unknown; it must be one of effective, area"),
        ({"attempts": [{"by": []}]}, r"pick key '' is unknown"),
        ({"from": {"list": [[1, 1]]}}, r"exactly one is required"),
        ({"from": {"tiles": [5, 4]}}, r"offers no grid"),
        ({"attempts": [{"by": ["area"], "only": {"covering": 1}}]}, r"unknown key .*covering"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            family("internvl", overlay=overlay(change))
    with pytest.raises(ConfigError, match=r"neither global nor pick"):
        family("pixtral", overlay={"views": {"global": None}})
    with pytest.raises(ConfigError, match=r"margin_px 336; 0 <= margin_px < px"):
        family("molmo", overlay={"views": {"tile": {"margin_px": 336}}})
    with pytest.raises(ConfigError, match=r"queries is 0"):
        family("aria", overlay={"grid": {"queries": 0}})
    with pytest.raises(ConfigError, match=r"names {rowe}; it may name row, col"):
        family("idefics3", overlay={"stream": {"tile": {"before": "<{rowe}>"}}})


def test_error_a_view_too_small_for_a_token() -> None:
    overlay = {"views": {"global": {"size": [{"kind": "stretch", "box": 20}]}}}
    with pytest.raises(
        PositionError, match=r"gemma3: a view of \(20, 20\).*\(0, 0\) rows and columns.*56 pixels"
    ):
        family("gemma3", overlay=overlay).plan(Image((9, 9)))


def test_error_a_marker_that_names_what_its_node_lacks() -> None:
    fam = family("pixtral", overlay={"stream": {"image": {"after": "<row_{row}>"}}})
    with pytest.raises(
        PositionError,
        match=r"segment 0: marker '<row_{row}>' names 'row'.*it has index, rows, cols",
    ):
        fam.stream([Image((9, 9))])


def test_overlays_inside_overlays_keep_their_nulls() -> None:
    """A dialect that removes a view, written inside a variant: it acts when the dialect is laid on, not before."""
    fam = family("aria", variant="split", dialect="transformers")
    assert fam.spec.views.global_ is None
    assert family("aria", variant="split").spec.views.global_ is not None
    assert family("aria", dialect="vendor").dialects == ("vendor",)
    assert family("exaone4_5").dialects == ("vendor",)
    assert family("ovis2").spec.views.tile.cut == "floor_rest"  # type: ignore[union-attr]
    assert family("ovis2", dialect="transformers").spec.views.tile.size is None  # type: ignore[union-attr]
    assert family("deepseek_ocr2").spec.stream.global_.is_empty


@pytest.mark.parametrize("name", family_names())
def test_sequential_ids_need_no_grids(name: str) -> None:
    """Where ids just count, token tensors give the stream's ids whatever the placeholders are."""
    fam = family(name)
    if fam.spec.rule is None or not fam.spec.rule.is_sequential:
        return
    stream = fam.stream([Image((97, 131))])
    read = fam.position_ids_from_tokens(stream.modality, stream.modality)
    assert read.ids.tolist() == [list(range(len(stream)))] == fam.position_ids(stream).ids.tolist()
