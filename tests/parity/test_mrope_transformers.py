"""Ids, rotations, sizes and frame counts equal those of the installed transformers, in dialect `transformers`."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tolerances import assert_close_to
from tests.vlm.prompts import Batch, draw
from visionpos.vlm import Image, Text, Video, family

transformers = pytest.importorskip("transformers")

FEW, MANY = range(150), range(150, 2000)


def model_of(name: str) -> Any:
    """The class that owns get_rope_index."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    models = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
    return models[name]


def theirs(name: str, batch: Batch, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own ids and deltas; the method needs two numbers of a config and no weights."""
    model = model_of(name)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    self.get_vision_position_ids = partial(model.get_vision_position_ids, self)
    return model.get_rope_index(
        self,
        batch.input_ids,
        batch.types,
        image_grid_thw=batch.grids("images"),
        video_grid_thw=batch.grids("videos"),
        attention_mask=batch.mask,
        **extra,
    )


def check(name: str, seed: int) -> None:
    batch = draw(seed, per_frame=name == "qwen3_vl")
    seconds = torch.tensor([float(value) for value in batch.seconds]) if batch.seconds else None
    extra = {"second_per_grid_ts": seconds} if name == "qwen2_5_vl" else {}
    ids, deltas = theirs(name, batch, **extra)
    ours = family(name, dialect="transformers").position_ids_from_tokens(
        batch.input_ids,
        batch.types,
        batch.grids("images"),
        batch.grids("videos"),
        batch.mask,
        seconds,
    )
    assert torch.equal(ours.ids, ids), f"seed {seed}"
    assert torch.equal(ours.delta, deltas[:, 0]), f"seed {seed}"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_reference_rope_index(name: str) -> None:
    for seed in FEW:
        check(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_reference_rope_index_many(name: str) -> None:
    for seed in MANY:
        check(name, seed)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_reference_no_mask(name: str) -> None:
    batch = draw(7, per_frame=name == "qwen3_vl", rows=(1, 1))
    batch.mask = torch.ones_like(batch.mask)
    ids, _ = theirs(name, batch)
    seconds = 1.0 if name == "qwen2_5_vl" else None
    ours = family(name, dialect="transformers").position_ids_from_tokens(
        batch.input_ids,
        batch.types,
        batch.grids("images"),
        batch.grids("videos"),
        seconds_per_grid=seconds,
    )
    assert ours.mask is None
    assert torch.equal(ours.ids, ids)


@pytest.mark.parametrize("float_kind", [float, torch.tensor])
@pytest.mark.parametrize("fps", [1, 3, 24, 25, 29.97, 41, 47, 55, 60])
def test_reference_float_order_of_time_ids(fps: float, float_kind: Any) -> None:
    """transformers truncates float32 products; the dialect repeats that, from floats and from tensors."""
    frames = 768
    types = torch.tensor([[0] + [2] * frames + [0]])
    batch = Batch(types, torch.ones_like(types), [], [(frames, 2, 2)], [])
    seconds = [float_kind(2 / fps)]
    ids, _ = theirs("qwen2_5_vl", batch, second_per_grid_ts=seconds)
    given = torch.stack(seconds) if float_kind is torch.tensor else seconds
    ours = family("qwen2_5_vl", dialect="transformers").position_ids_from_tokens(
        types, types, None, batch.grids("videos"), seconds_per_grid=given
    )
    assert torch.equal(ours.ids, ids)


def rotary(name: str) -> Any:
    """transformers' rotary module with the checkpoint's values."""
    if name == "qwen3_vl":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
        return Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=128, rope_parameters=rope))
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = Qwen2VLTextConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    return Qwen2VLRotaryEmbedding(config)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_reference_cos_sin_bit_equal(name: str) -> None:
    """Ours is half width: their second half repeats the first."""
    ids = torch.randint(0, 40000, (3, 2, 57))
    cos, sin = rotary(name)(torch.zeros(1), ids)
    ours = family(name).rotation(ids)
    assert ours.pairing == "half"
    assert_close_to(ours.cos[:, 0], cos[..., :64], kind="exact")
    assert_close_to(ours.sin[:, 0], sin[..., :64], kind="exact")
    assert_close_to(ours.full_width()[0][:, 0], cos, kind="exact")


SIZES = [(224, 224), (480, 640), (1080, 1920), (70, 70), (10, 1000), (1, 200), (97, 131)]
# Exact quotients, where floats and fractions part (1152x1440 and 14x686).
SIZES += [
    (1152, 1440),
    (14, 686),
    (28, 343),
    (2890, 1920),
    (3000, 20),
    (1, 1),
    (37, 41),
    (448, 512),
]


@pytest.mark.parametrize(
    ("name", "processor"), [("qwen2_vl", (14, 3136)), ("qwen3_vl", (16, 65536))]
)
def test_reference_image_sizes(name: str, processor: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    patch, least = processor
    most = 1003520 if patch == 14 else 16777216
    for size_hw in SIZES:
        expected = smart_resize(*size_hw, 2 * patch, least, most)
        assert family(name).plan(Image(size_hw)).views[0].size_hw == expected, size_hw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processor"), [("qwen2_vl", (14, 3136)), ("qwen3_vl", (16, 65536))]
)
def test_reference_image_sizes_many(name: str, processor: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    from visionpos.vlm.resize import resized

    patch, least = processor
    most = 1003520 if patch == 14 else 16777216
    steps = family(name).spec.views.global_.size
    drawn = torch.randint(1, 2500, (20000, 2)).tolist()
    drawn += (torch.randint(1, 60, (20000, 2)) * 14).tolist() + (
        torch.randint(1, 99, (20000, 2)) * 32
    ).tolist()
    for height, width in drawn:
        if max(height, width) <= 200 * min(height, width):
            assert resized(steps, (height, width)) == smart_resize(
                height, width, 2 * patch, least, most
            )


def test_reference_video_sizes() -> None:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as per_frame
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as per_clip

    for size_hw in SIZES:
        for frames in (2, 3, 4, 5, 7, 16, 301):
            clip = Video(size_hw, frames=frames)
            expected = per_frame(*size_hw, 28, 100352, 602112)
            assert family("qwen2_vl").plan(clip).views[0].size_hw == expected
            if max(size_hw) / min(size_hw) <= 100:
                expected = per_clip(frames, *size_hw, 2, 32, 131072, 786432)
                assert family("qwen3_vl").plan(clip).views[0].size_hw == expected


def test_reference_frame_count() -> None:
    """The number of sampled frames, on short, long and odd clips."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen2VLVideoProcessor()
    for total, fps in [(300, 30.0), (7, 30.0), (2, 1.0), (101, 29.97), (5000, 24.0), (60000, 25.0)]:
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        expected = len(processor.sample_frames(metadata, fps=2.0))
        assert family("qwen2_vl").frame_count(total, fps) == expected, (total, fps)


def test_reference_timestamps() -> None:
    """The text before each frame of Qwen3-VL."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    for fps, indices in [
        (30.0, [0, 54, 108, 162, 217, 271, 325, 379]),
        (25.0, [0, 12, 25]),
        (24, [1, 2]),
    ]:
        expected = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)  # type: ignore[arg-type]
        clip = Video((64, 64), seconds=[index / fps for index in indices])
        assert family("qwen3_vl").plan(clip).instants == tuple(expected)


def test_reference_stream_to_transformers() -> None:
    """A planned stream, handed to transformers as types and grids, gets the same ids there."""
    clip = Video((120, 200), seconds=[at / 2 for at in range(5)])
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        fam = family(name, dialect="transformers")
        stream = fam.stream(
            [Text(tokens=3), Image((100, 60)), Text(tokens=2), clip, Text(tokens=4)]
        )
        types = stream.modality[None]
        images, videos = [fam.plan(media).grid_thw[0] for media in (Image((100, 60)), clip)]
        batch = Batch(types, torch.ones_like(types), [images], [videos], [])
        extra = {"second_per_grid_ts": [1.0]} if name == "qwen2_5_vl" else {}
        ids, deltas = theirs(name, batch, **extra)
        ours = fam.position_ids(stream)
        assert torch.equal(ours.ids, ids[:, 0])
        assert int(ours.delta) == int(deltas[0, 0])
