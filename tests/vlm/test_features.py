"""The stream's slots are the model's features: installed packing and merging code, run on numbered or random features.

Sizes are (height, width). The features of a tile carry their own place, so order is checked, not only length.
"""

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visionpos.vlm import Cells, Image, Marker, Plan, TokenStream, family

PHOTOS = [(336, 336), (400, 1000), (1000, 400), (479, 641), (1024, 1024), (97, 131)]
NEWLINE, SEPARATOR = -7.0, -9.0


def model(name: str, file: str = "modeling") -> Any:
    return import_module(f"transformers.models.{name}.{file}_{name}")


def both(name: str, size_hw: tuple[int, int], **options: Any) -> tuple[Plan, TokenStream]:
    fam = family(name, **options)
    return fam.plan(Image(size_hw)), fam.stream([Image(size_hw)])


def numbered(views: int, side: int) -> Tensor:
    """`[views, side * side, 4]`: view, row, column, 1."""
    view, row, col = torch.meshgrid(*map(torch.arange, (views, side, side)), indexing="ij")
    return torch.stack([view, row, col, torch.ones_like(view)], -1).reshape(views, -1, 4).float()


def slots(stream: TokenStream, cell: dict[str, list[Any]]) -> list[Any]:
    """What the stream expects in each slot that is not a token of the vocabulary, from the cells of each part."""
    taken = {key: iter(values) for key, values in cell.items()}
    out: list[Any] = []
    for run in stream.runs:
        if isinstance(run, Cells):
            key = f"{run.node} {run.view}" if f"{run.node} {run.view}" in taken else run.node
            out += [next(taken[key]) for _ in range(run.count)]
        elif isinstance(run, Marker) and run.stands_on:
            out.append(run.name)
    assert all(next(rest, None) is None for rest in taken.values())
    return out


def read(packed: Tensor) -> list[Any]:
    """Packed features as (view, row, column), or the name of a learned marker."""
    names = {NEWLINE: "image_newline", SEPARATOR: "view_separator"}
    rows = packed.reshape(-1, 4)
    return [tuple(int(x) for x in row[:3]) if row[3] == 1 else names[float(row[0])] for row in rows]


def global_cells(side: int, view: int = 0) -> list[tuple[int, int, int]]:
    return [(view, row, col) for row in range(side) for col in range(side)]


def raster_cells(plan: Plan, side: int, px: int, patch: int, first: int) -> list[tuple[int, ...]]:
    """The (view, row, column) of every cell of the joined tiles, from where the plan says it lies on the canvas."""
    assert plan.raster is not None
    assert plan.tiles_rc is not None
    rows, cols = ([start for start, _ in ruler.bands()] for ruler in plan.raster.rulers)
    return [
        (int(first + top // px * plan.tiles_rc[1] + left // px), int(top % px // patch), int(left % px // patch))
        for top in rows
        for left in cols
    ]  # fmt: skip


@pytest.mark.parametrize("size_hw", [*PHOTOS, (165, 80), (55, 152), (328, 861), (20, 400)])
def test_llava_next_packs_what_the_stream_says(size_hw: tuple[int, int]) -> None:
    plan, stream = both("llava_next", size_hw, dialect="transformers")
    pins = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    me = SimpleNamespace(config=SimpleNamespace(
        vision_config=SimpleNamespace(image_size=336, patch_size=14), image_grid_pinpoints=pins
    ))  # fmt: skip
    packed, lengths = model("llava_next").LlavaNextModel.pack_image_features(
        me, [numbered(len(plan.views), 24)], torch.tensor([size_hw]), "default", torch.full((4,), NEWLINE)
    )  # fmt: skip
    assert len(stream) == int(lengths[0])
    cells = {"global": global_cells(24), "tiles": raster_cells(plan, 24, 336, 14, 1)}
    assert slots(stream, cells) == read(packed[0])


@pytest.mark.parametrize("size_hw", [*PHOTOS, (832, 1872), (1164, 956), (3024, 4032)])
def test_llava_onevision_packs_what_the_stream_says(size_hw: tuple[int, int]) -> None:
    plan, stream = both("llava_onevision", size_hw, dialect="transformers")
    pins = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    me = SimpleNamespace(config=SimpleNamespace(
        vision_config=SimpleNamespace(image_size=384, patch_size=14), image_grid_pinpoints=pins
    ))  # fmt: skip
    packed, lengths = model("llava_onevision").LlavaOnevisionModel.pack_image_features(
        me, [numbered(len(plan.views), 27)], torch.tensor([size_hw]), torch.full((4,), NEWLINE)
    )  # fmt: skip
    assert len(stream) == int(lengths[0])
    assert stream.names.count("image_newline") == int((packed[0][:, 0] == NEWLINE).sum())
    newlines = [at for at, name in enumerate(stream.names) if name == "image_newline"]
    assert newlines == (packed[0][:, 0] == NEWLINE).nonzero().flatten().tolist()


def test_llava_onevision_with_several_images_is_one_view_and_a_newline_each() -> None:
    stream = family("llava_onevision").stream([Image((400, 1000)), Image((1000, 400))])
    assert len(stream) == 2 * 730
    assert [run.count for run in stream.runs] == [729, 1, 729, 1]


@pytest.mark.parametrize("size_hw", [*PHOTOS, (20, 3000)])
def test_deepseek_ocr_packs_what_the_stream_says(size_hw: tuple[int, int]) -> None:
    plan, stream = both("deepseek_ocr", size_hw)
    views = [view for view in plan.views if view.node == "tile"]
    local = numbered(len(views) + 1, 10)[1:] if views else None

    def tower(pixels: Any, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=pixels, hidden_states=None, attentions=None)

    cls = model("unlimited_ocr").UnlimitedOcrModel
    me = SimpleNamespace(
        vision_tower=tower, multi_modal_projector=nn.Identity(), image_newline=torch.full((4,), NEWLINE),
        view_separator=torch.full((4,), SEPARATOR),
    )  # fmt: skip
    packed = inspect.unwrap(cls.get_image_features)(
        me, numbered(1, 16), local, [len(views)], [plan.tiles_rc[::-1] if plan.tiles_rc else [1, 1]]
    ).pooler_output[0]
    assert len(stream) == len(packed)
    cells = {"global": global_cells(16)}
    if plan.tiles_rc:
        cells["tiles"] = raster_cells(plan, 10, 640, 64, 1)
    assert slots(stream, cells) == read(packed)


@pytest.mark.parametrize("size_hw", [*PHOTOS, (20, 3000), (3024, 4032)])
def test_phi4_multimodal_packs_what_the_stream_says(size_hw: tuple[int, int]) -> None:
    plan, stream = both("phi4_multimodal", size_hw)
    assert plan.tiles_rc is not None
    rows, cols = plan.tiles_rc
    mask = torch.zeros(1, 1 + rows * cols, 32, 32)
    mask[:, 0] = 1
    box = plan.raster.content_yxyx  # type: ignore[union-attr]
    useful = [
        32 * count - (448 * count - int(end)) // 14
        for count, end in zip(plan.tiles_rc, box[2:], strict=True)
    ]
    canvas = torch.zeros(32 * rows, 32 * cols)
    canvas[: useful[0], : useful[1]] = 1
    mask[0, 1:] = canvas.reshape(rows, 32, cols, 32).transpose(1, 2).reshape(-1, 32, 32)
    plain = nn.Linear(4, 4)
    nn.init.eye_(plain.weight)
    nn.init.zeros_(plain.bias)
    me = SimpleNamespace(
        img_processor=SimpleNamespace(embeddings=SimpleNamespace(patch_embedding=plain)), img_projection_up=plain,
        img_projection_down=plain, crop_size=448, image_dim_out=4, drop=nn.Identity(),
        get_img_features=lambda pixels, **_: torch.rand(len(pixels), 256, 4),
        sub_img_feature_extensor=torch.full((1, 1, 1, 4), 3.0), global_img_feature_extensor=torch.full((1, 1, 4), 5.0),
        config=SimpleNamespace(vision_config=SimpleNamespace(image_token_id=9)),
    )  # fmt: skip
    slots_in_text = torch.full((1, len(stream)), 9)
    # index_put refuses another number of features than placeholders: this is the model's own check.
    merged = model("phi4_multimodal").Phi4MultimodalImageEmbedding.forward(
        me, slots_in_text, torch.zeros(1, len(stream), 4), torch.zeros(1, 1 + rows * cols, 3, 2, 2),
        torch.tensor([[448 * rows, 448 * cols]]), mask,
    )  # fmt: skip
    marks = [
        at for at, name in enumerate(stream.names) if name in ("sub_extensor", "global_extensor")
    ]
    assert (
        marks
        == ((merged[0] - merged[0, :, :1]).abs().max(-1).values < 1e-6).nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("size_hw", PHOTOS)
def test_mistral3_merges_to_the_cells(size_hw: tuple[int, int]) -> None:
    plan, stream = both("mistral3", size_hw, dialect="transformers")
    merger = model("mistral3").Mistral3PatchMerger(SimpleNamespace(
        vision_config=SimpleNamespace(hidden_size=4, patch_size=14), spatial_merge_size=2
    ))  # fmt: skip
    size = plan.views[0].size_hw
    merged = merger(torch.randn(size[0] // 14 * (size[1] // 14), 4), [size])
    assert len(merged) == plan.cells == int(stream.is_feature.sum())
    height = plan.views[0].tokens.height
    assert len(stream) == len(merged) + height  # a break or the end after every row
    assert stream.names.count("[IMG_BREAK]") == height - 1
    assert stream.names[-1] == "[IMG_END]"


def tiled(name: str, merge: Any, side: int, **options: Any) -> None:
    """Every view is merged to so many features as the stream has cells for it."""
    for size_hw in PHOTOS:
        plan, stream = both(name, size_hw, **options)
        features = merge(torch.randn(len(plan.views), side * side, 64))
        assert features.shape[:-1].numel() == plan.cells == int(stream.is_feature.sum()), size_hw
        spans = [span.stop - span.start for span in stream.spans if span.kind == "image"]
        assert spans == [features.shape[-2]] * len(plan.views)


def test_internvl_shuffles_to_the_cells() -> None:
    cls = model("internvl").InternVLModel
    tiled(
        "internvl",
        lambda x: cls.pixel_shuffle(None, x.view(len(x), 32, 32, 64), 0.5).flatten(1, 2),
        32,
    )


def test_idefics3_connects_to_the_cells() -> None:
    cls = model("idefics3").Idefics3Connector
    tiled("idefics3", lambda x: cls.pixel_shuffle(None, x, 2), 26)
    tiled("smolvlm", lambda x: cls.pixel_shuffle(None, x, 4), 32)
    tiled("smolvlm2", lambda x: cls.pixel_shuffle(None, x, 3), 27)


def test_llama4_shuffles_to_the_cells() -> None:
    tiled("llama4", lambda x: model("llama4").pixel_shuffle(x, 0.5), 24)


def test_cohere2_and_ovis2_and_perception_lm_merge_to_the_cells() -> None:
    def merge(features: Tensor) -> Tensor:
        square = features.mT.unflatten(2, (32, 32))
        return nn.functional.avg_pool2d(square, 2).flatten(2).mT

    tiled("cohere2_vision", merge, 32)
    tiled("ovis2", merge, 32, dialect="transformers")
    tiled("perception_lm", merge, 32)


def test_gemma3_pools_to_the_cells() -> None:
    config = SimpleNamespace(
        vision_config=SimpleNamespace(hidden_size=64, image_size=896, patch_size=14, layer_norm_eps=1e-6),
        text_config=SimpleNamespace(hidden_size=8), mm_tokens_per_image=256,
    )  # fmt: skip
    projector = model("gemma3").Gemma3MultiModalProjector(config)
    for size_hw in PHOTOS:
        plan, stream = both("gemma3", size_hw, variant="pan_and_scan")
        features = projector(torch.randn(len(plan.views), 64 * 64, 64))
        assert features.shape[:2].numel() == plan.cells == int(stream.is_feature.sum())


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_minicpm_merges_to_the_cells(mode: str) -> None:
    config = SimpleNamespace(
        merge_kernel_size=(2, 2), merger_times=1 if mode == "4x" else 2, vision_config=SimpleNamespace(hidden_size=4),
        text_config=SimpleNamespace(hidden_size=4),
    )  # fmt: skip
    merger = model("minicpmv4_6").MiniCPMV4_6Merger(config)
    for size_hw in PHOTOS:
        plan, stream = both("minicpm_v4_6", size_hw, variant="4x" if mode == "4x" else None)
        grids = [view.patches.shape[1:] for view in plan.views]
        patches = torch.randn(1, sum(h * w for h, w in grids), 4)
        features = merger(patches, torch.tensor(grids))
        spans = [span.stop - span.start for span in stream.spans if span.kind == "image"]
        assert [len(one) for one in features] == spans


def test_molmo2_pools_to_the_cells() -> None:
    """The pooling index table of a real picture: one row of patch indices a cell, whole image first."""
    processor = model("molmo2", "image_processing").Molmo2ImageProcessor()
    for size_hw in PHOTOS[:4]:
        plan, stream = both("molmo2", size_hw)
        picture = torch.randint(0, 255, (3, *size_hw), dtype=torch.uint8)
        out = processor(picture, return_tensors="pt")
        (table,) = (value for key, value in out.items() if "pool" in key)
        assert len(table) == plan.cells == int(stream.is_feature.sum()), size_hw
        # The first 14 x 14 rows pool the 27 x 27 patches of the whole image: where the plan says each cell lies.
        rows, cols = (ruler.bands() for ruler in plan.views[0].rulers or ())
        for at, pooled in enumerate(table[: 14 * 14].tolist()):
            (top, bottom), (left, right) = rows[at // 14], cols[at % 14]
            real = [index for index in pooled if index >= 0]
            assert {index // 27 for index in real} == set(range(int(top) // 14, int(bottom) // 14))
            assert {index % 27 for index in real} == set(range(int(left) // 14, int(right) // 14))


@pytest.mark.parametrize(
    ("name", "height", "width"), [("qwen2_vl", 97, 131), ("qwen3_vl", 480, 640)]
)
def test_qwen_merges_to_the_cells(name: str, height: int, width: int) -> None:
    plan, stream = both(name, (height, width))
    patches = plan.views[0].patches
    merger = model("qwen2_vl").PatchMerger(dim=8, context_dim=4, spatial_merge_size=2)
    assert len(merger(torch.randn(patches.size, 4))) == plan.cells == int(stream.is_feature.sum())
