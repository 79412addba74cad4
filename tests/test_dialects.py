"""The dialect registry: every reading is what its source gives, and docs/dialects.md is printed from it."""

from pathlib import Path

import pytest
import torch

import visionpos as vp
from visionpos.dialects import compare, dialect_rows, markdown, reading_value

ROWS = dialect_rows()
COMPUTED = [row for row in ROWS if row.probe != "stated"]
READINGS = [(row, reading) for row in COMPUTED for reading in row.readings]
DIMS = vp.Dims(embed_dim=48, num_heads=3, depth=2)


@pytest.mark.parametrize(
    ("row", "reading"), READINGS, ids=lambda part: getattr(part, "names", ("",))[0]
)
def test_reference_readings(row, reading):
    """Values were measured on the sources in float32, or follow from their formulas, and have six digits."""
    expected = torch.tensor(reading.value, dtype=torch.float64)
    assert torch.allclose(reading_value(row, reading), expected, rtol=3e-7, atol=3e-6)


@pytest.mark.parametrize("row", COMPUTED, ids=lambda row: row.topic)
def test_invariant_readings_of_a_row_differ(row):
    """A row that shows no difference has no place here."""
    values = [reading_value(row, reading) for reading in row.readings]
    for i, first in enumerate(values):
        for second in values[i + 1 :]:
            assert first.shape != second.shape or (first - second).abs().max() > 1e-4


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.probe == "stated"], ids=lambda row: row.what
)
def test_stated_rows_name_a_test_that_exists(row):
    """What the registry does not compute is pinned elsewhere, and says where."""
    path, _, name = row.at["test"].partition("::")
    text = (Path(__file__).parent.parent / path).read_text(encoding="utf-8")
    assert name.startswith("test_")  # a file alone pins nothing
    assert f"def {name}(" in text
    assert len({reading.value for reading in row.readings}) == len(row.readings)


def test_docs_are_current():
    text = (Path(__file__).parent.parent / "docs" / "dialects.md").read_text(encoding="utf-8")
    assert text == markdown(), "run `make docs`"


def test_compare_finds_the_drift_of_dinov2():
    """The 0.1 moves a 37x37 table by about 16 % at 24 to 32 cells on white noise, and by nothing on its own grid."""
    same = compare("dinov2", "hf_dinov2", dims=DIMS, grid=vp.Grid(37, 37), to=vp.Grid(37, 37))
    assert same.largest == 0.0
    far = compare("hf_dinov2", "dinov2", dims=DIMS, grid=vp.Grid(37, 37), to=vp.Grid(32, 32))
    assert 0.14 < far.relative < 0.18  # facts: 0.159


def test_compare_names_the_cell():
    """Recipes with pinned and free corners agree in the middle of an odd grid and part at the border."""
    pinned = compare("paddleocr_vl", "qwen3_vl", dims=DIMS, grid=vp.Grid(3, 1), to=vp.Grid(5, 1))
    assert pinned.token_yx[0] in (1, 3)


def test_compare_sees_pairings_and_tiling():
    """The same angles on other channels are another rotation."""
    from visionpos import config

    dims = vp.Dims(embed_dim=384, num_heads=6, depth=2)
    half = compare(
        vp.AxialRopeSpec(pairing="half"),
        vp.AxialRopeSpec(),
        dims=dims,
        grid=vp.Grid(3, 5),
        to=vp.Grid(3, 5),
    )
    assert half.relative > 0.1
    tiled, untiled = (config.load_encoding(name) for name in ("vjepa2", "vjepa2_untiled"))
    assert compare(tiled, untiled, dims=dims, grid=vp.Grid(3, 5), to=vp.Grid(3, 5)).relative > 0.1


def test_error_recipe_beside_encoding():
    with pytest.raises(vp.PositionError, match="only two of one kind"):
        compare("timm", vp.SinCosSpec(), dims=DIMS, grid=vp.Grid(3, 5), to=vp.Grid(3, 5))


def test_error_two_doors():
    with pytest.raises(vp.PositionError, match="enter by the same door"):
        compare(
            vp.SinCosSpec(), vp.AxialRopeSpec(), dims=DIMS, grid=vp.Grid(3, 5), to=vp.Grid(3, 5)
        )
    with pytest.raises(vp.PositionError, match=r"recipe is 'nope'; it must be a Recipe or one of"):
        compare("nope", "timm", dims=DIMS, grid=vp.Grid(3, 5), to=vp.Grid(3, 5))
