"""Image frames: what the numbers of clicks, boxes and masks refer to, and where they land."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import prompt as oracle
from visionpos.errors import PositionError
from visionpos.geometry import ImageFrame

SIDES = st.integers(2, 3000)
SAM = ImageFrame(source_hw=(1200, 1920), input_hw=(1024, 1024), resize="pad")
SAM2 = replace(SAM, resize="stretch")


@pytest.mark.parametrize("shape", [(2,), (5, 2), (2, 3, 5, 2), (0, 2)])
def test_shape_of_points_and_boxes(shape):
    assert SAM.points(torch.zeros(shape)).shape == shape
    boxes = torch.tensor([1.0, 2.0, 30.0, 40.0]).expand(*shape[:-1], 4)
    assert SAM.boxes(boxes).shape == (*shape[:-1], 4)


@pytest.mark.parametrize("source_hw", [(3, 5), (1, 64), (64, 1), (300, 451), (1200, 1920)])
def test_shape_of_scaled(source_hw):
    """The rule of ResizeLongestSide, and the whole input when stretched."""
    frame = ImageFrame(source_hw=source_hw, input_hw=(1024, 1024), resize="pad")
    assert frame.scaled_hw == oracle.longest_side(source_hw, 1024)
    assert replace(frame, resize="stretch").scaled_hw == (1024, 1024)


@given(
    st.tuples(SIDES, SIDES),
    st.sampled_from(["pad", "stretch"]),
    st.booleans(),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_reference_points(source_hw, resize, geometric, share):
    if min(oracle.longest_side(source_hw, 1024)) < 1:
        return
    centre = "geometric" if geometric else "reference"
    frame = ImageFrame(source_hw=source_hw, input_hw=(1024, 1024), resize=resize, centre=centre)
    click = (share[0] * source_hw[1], share[1] * source_hw[0])
    expected = oracle.to_input(click, source_hw, (1024, 1024), resize=resize, geometric=geometric)
    got = frame.points(torch.tensor(click, dtype=torch.float64))
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_reference_mixed_frames():
    """users.md G02: click (960, 300) in 1920x1200 is (512, 160) for SAM and (512, 256) for SAM 2."""
    click = torch.tensor([960.0, 300.0])
    assert SAM.points(click).tolist() == [512.0, 160.0]
    assert SAM2.points(click).tolist() == [512.0, 256.0]


def test_reference_geometric_centre():
    """Facts 2, SAM: x = 10 in 512 gives 20.5 with the +.5 of the encoder, 21 at the pixel's true centre."""
    frame = ImageFrame(source_hw=(512, 512), input_hw=(1024, 1024), resize="pad")
    click = torch.tensor([10.0, 10.0])
    assert (frame.points(click) + 0.5).tolist() == [20.5, 20.5]
    assert (replace(frame, centre="geometric").points(click) + 0.5).tolist() == [21.0, 21.0]


def test_reference_padding_leaves_coordinates():
    """Facts 5.20: padding is bottom and right, so it moves no coordinate; 972 of 1024 pixels are image."""
    frame = ImageFrame(source_hw=(972, 1024), input_hw=(1024, 1024), resize="pad")
    assert frame.scaled_hw == (972, 1024)
    assert frame.points(torch.tensor([100.0, 971.0])).tolist() == [100.0, 971.0]


def test_reference_quantised_clicks():
    """users.md G07: clicks stored as whole source pixels before scaling; the last pixel stays inside."""
    frame = replace(SAM2, quantise=True)
    clicks = torch.tensor([[960.9, 300.2], [1920.0, 1200.0]])
    whole = torch.tensor([[960.0, 300.0], [1919.0, 1199.0]])
    assert torch.equal(frame.points(clicks), SAM2.points(whole))
    assert not torch.equal(SAM2.points(clicks), SAM2.points(whole))


def test_reference_mask_goes_the_image_s_way():
    """users.md G06: the mask of a 2:1 image fills the upper half of the padded frame, not all of it."""
    frame = ImageFrame(source_hw=(64, 128), input_hw=(1024, 1024), resize="pad")
    out = frame.mask(torch.ones(2, 64, 128), (256, 256), fill=-7.0)
    assert out.shape == (2, 256, 256)
    torch.testing.assert_close(out[:, :128], torch.ones(2, 128, 256))
    assert (out[:, 128:] == -7).all()
    assert (replace(frame, resize="stretch").mask(torch.ones(64, 128), (256, 256)) == 1).all()


@pytest.mark.parametrize(
    ("form", "box"),
    [
        ("xyxy", [100, 200, 400, 260]),
        ("xywh", [100, 200, 300, 60]),
        ("cxcywh", [250, 230, 300, 60]),
    ],
)
@pytest.mark.parametrize("frame", [SAM, SAM2, replace(SAM, centre="geometric")])
def test_reference_box_forms(frame, form, box):
    """Three spellings of one box; its corners move as points do."""
    got = replace(frame, box_form=form).boxes(torch.tensor(box).float())
    corners = frame.points(torch.tensor([[100.0, 200.0], [400.0, 260.0]]))
    assert torch.equal(got, corners.flatten())


@given(
    st.tuples(SIDES, SIDES),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from(["reference", "geometric"]),
)
def test_invariant_normalised_names_the_same_place(source_hw, share, centre):
    """Fractions are of the source: x / W pixel numbers (reference), or (x + .5) / W places (geometric)."""
    if min(oracle.longest_side(source_hw, 1024)) < 1:
        return
    frame = ImageFrame(source_hw=source_hw, input_hw=(1024, 1024), resize="pad", centre=centre)
    height, width = source_hw
    pixel = torch.tensor([share[0] * (width - 1), share[1] * (height - 1)], dtype=torch.float64)
    half = 0.5 if centre == "geometric" else 0.0
    fraction = (pixel + half) / torch.tensor([width, height])
    got = replace(frame, unit="normalised").points(fraction)
    torch.testing.assert_close(got, frame.points(pixel), rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(st.floats(0, 1200), st.floats(0, 1900)), min_size=1, max_size=4))
def test_invariant_order(points_rc):
    """(row, column) is (y, x): the same places, for points and boxes."""
    rc = torch.tensor(points_rc, dtype=torch.float64)
    assert torch.equal(replace(SAM, order="rc").points(rc), SAM.points(rc.flip(-1)))
    for form, rows in (
        ("xyxy", (200, 100, 260, 400)),
        ("xywh", (200, 100, 60, 300)),
        ("cxcywh", (230, 250, 60, 300)),
    ):
        box = torch.tensor(rows).float()
        swapped = box.unflatten(-1, (2, 2)).flip(-1).flatten(-2)
        got = replace(SAM, order="rc", box_form=form).boxes(box)
        assert torch.equal(got, replace(SAM, box_form=form).boxes(swapped))


@given(st.tuples(SIDES, SIDES), st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_invariant_geometric_keeps_the_image_point(source_hw, share):
    """The centre option commutes with resizing: the fraction of the image is the same before and after."""
    frame = ImageFrame(
        source_hw=source_hw, input_hw=(640, 480), resize="stretch", centre="geometric"
    )
    height, width = source_hw
    pixel = torch.tensor([share[0] * width, share[1] * height], dtype=torch.float64)
    there = (frame.points(pixel) + 0.5) / torch.tensor([480.0, 640.0])
    torch.testing.assert_close(
        there, (pixel + 0.5) / torch.tensor([width, height]), rtol=1e-9, atol=1e-9
    )


def test_invariant_inputs_stay_and_fillers_are_zero():
    points = torch.tensor([[5.0, 7.0], [-9.0, float("nan")], [5000.0, 0.0]])
    kept = points.clone()
    out = SAM.points(points, torch.tensor([1, -1, -10]))
    assert out[1:].tolist() == [[0, 0], [0, 0]]
    assert torch.equal(out[0], SAM.points(points[0]))
    assert torch.equal(points.nan_to_num(), kept.nan_to_num())


def test_invariant_half_precision_clicks_are_scaled_in_float32():
    assert (
        SAM2.points(torch.tensor([[1000.0, 1000.0]], dtype=torch.bfloat16)).dtype == torch.float32
    )
    assert SAM2.points(torch.tensor([[3, 4]])).dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"resize": "crop"}, r"resize is 'crop'; it must be one of 'pad', 'stretch'"),
        ({"unit": "px"}, r"unit is 'px'; it must be one of 'pixels', 'normalised'"),
        ({"order": "yx"}, r"order is 'yx'; it must be one of 'xy', 'rc'"),
        ({"box_form": "ltrb"}, r"box_form is 'ltrb'; it must be one of 'xyxy', 'xywh', 'cxcywh'"),
        ({"centre": "half"}, r"centre is 'half'"),
        ({"source_hw": (0, 5)}, r"source_hw is \(0, 5\); two whole numbers"),
        ({"source_hw": (5, 5, 3)}, r"source_hw is \(5, 5, 3\)"),
        ({"input_hw": (1024.0, 1024)}, r"input_hw is \(1024\.0, 1024\)"),
        ({"source_hw": (1, 5000)}, r"source_hw \(1, 5000\) becomes \(0, 1024\).*Crop the strip"),
    ],
)
def test_error_frame(fields, match):
    with pytest.raises(PositionError, match=match):
        replace(SAM, **fields)


@pytest.mark.parametrize(
    ("point", "match"),
    [
        ([1921.0, 3.0], r"point \[1921\.0, 3\.0\] does not lie inside x 0\.\.1920, y 0\.\.1200"),
        ([3.0, 1300.0], r"point \[3\.0, 1300\.0\].*order and box_form"),
        ([-1.0, 3.0], r"point \[-1\.0, 3\.0\]"),
        ([math.nan, 3.0], r"point \[nan, 3\.0\].*finite"),
        ([3.0, math.inf], r"point \[3\.0, inf\]"),
    ],
)
def test_error_points_outside(point, match):
    """Facts 5.22 and users.md G09: a click outside the declared frame is refused, the first one named."""
    with pytest.raises(PositionError, match=match):
        SAM.points(torch.tensor([[5.0, 5.0], point]))


def test_error_swapped_and_normalised_points():
    """(row, column) read as (x, y) leaves a landscape's height; pixels are no fractions."""
    with pytest.raises(PositionError, match=r"point \[1100\.0, 1800\.0\].*read as 'xy'"):
        SAM.points(torch.tensor([1100.0, 1800.0]))
    with pytest.raises(
        PositionError, match=r"inside x 0\.\.1, y 0\.\.1, the source image in normalised"
    ):
        replace(SAM, unit="normalised").points(torch.tensor([960.0, 300.0]))


@pytest.mark.parametrize(
    ("fields", "box", "match"),
    [
        # fiftyone PR 7075: a pixel box where normalised cxcywh is meant, and the other way round
        (
            {"unit": "normalised", "box_form": "cxcywh"},
            [100.0, 200, 300, 60],
            r"does not lie inside x 0\.\.1",
        ),
        (
            {},
            [0.1, 0.2, 0.4, 0.6],
            r"no larger than a pixel as 'xyxy' in pixels.*Set box_form and unit",
        ),
        ({}, [100.0, 200, 60, 40], r"box \[100\.0, 200\.0, 60\.0, 40\.0\] is empty, turned round"),
        (
            {"box_form": "xywh"},
            [1000.0, 200, 1400, 260],
            r"box .* does not lie inside.*read as 'xywh'",
        ),
        ({"box_form": "xywh"}, [100.0, 200, 0, 10], r"empty"),
        (
            {"box_form": "cxcywh"},
            [10.0, 200, 100, 40],
            r"box \[10\.0, 200\.0, 100\.0, 40\.0\] does not lie inside",
        ),
        ({}, [1.0, 2.0, math.nan, 9.0], r"box \[1\.0, 2\.0, nan, 9\.0\]"),
    ],
)
def test_error_boxes(fields, box, match):
    good = [0.2, 0.3, 0.4, 0.4] if fields.get("unit") else [300.0, 300, 400, 400]
    with pytest.raises(PositionError, match=match):
        replace(SAM, **fields).boxes(torch.tensor([good, box]))


def test_error_shapes():
    with pytest.raises(PositionError, match=r"points have shape \(4,\)"):
        SAM.points(torch.zeros(4))
    with pytest.raises(
        PositionError, match=r"points have shape \(3, 2\) and labels \(2,\).*one label a point"
    ):
        SAM.points(torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(PositionError, match=r"boxes have shape \(2,\)"):
        SAM.boxes(torch.zeros(2))
    with pytest.raises(
        PositionError, match=r"mask has size \(256, 256\); the source image's \(1200, 1920\)"
    ):
        SAM.mask(torch.zeros(256, 256), (256, 256))


def test_gradient_reaches_clicks():
    """Points are moved by a linear map, so a click can be optimised (float64 gradcheck)."""
    points = torch.tensor([[5.0, 7.0], [500.0, 1100.0]], dtype=torch.float64, requires_grad=True)
    for frame in (SAM, replace(SAM2, centre="geometric")):
        assert torch.autograd.gradcheck(frame.points, (points,))


def test_device(device):
    points, boxes = torch.tensor([[5.0, 7.0]]), torch.tensor([[5.0, 7.0, 50.0, 70.0]])
    torch.testing.assert_close(SAM.points(points.to(device)).cpu(), SAM.points(points))
    torch.testing.assert_close(SAM.boxes(boxes.to(device)).cpu(), SAM.boxes(boxes))


def test_reference_quantised_fractions():
    """A fraction names the pixel that it lies in, floor(share * W), whatever pixel numbers stand for."""
    shares = torch.tensor([[0.5, 0.25], [0.0, 0.0], [1.0, 1.0], [0.5005, 0.2496]])
    whole = torch.tensor([[960.0, 300.0], [0.0, 0.0], [1919.0, 1199.0], [960.0, 299.0]])
    for centre in ("reference", "geometric"):
        frame = replace(SAM2, centre=centre)
        got = replace(frame, unit="normalised", quantise=True).points(shares)
        assert torch.equal(got, frame.points(whole))
