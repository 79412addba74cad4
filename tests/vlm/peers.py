"""The size, grid and count functions of installed peers, under one signature: height and width to what a plan must say.

Nothing here computes a rule. A peer that raises, or that silently returns no rows, gives None: the plan must refuse.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.image_utils import SizeDict

from visionpos.errors import PositionError
from visionpos.vlm import Image, Plan, Video, family

Theirs = Callable[[int, int], Any]
Ours = Callable[[Plan], Any]


@dataclass
class Peer:
    """One function of a peer, and what of a plan it must equal."""

    name: str
    make: Callable[[], Theirs]
    ours: Ours
    options: dict[str, Any] = field(default_factory=lambda: {"dialect": "transformers"})
    frames: int = 0  # of a clip; 0 for images
    label: str = ""
    normal: int = 500  # sizes of the quick sweep
    many: int = 100_000  # sizes of the slow one

    def __str__(self) -> str:
        return "-".join(filter(None, [self.name, self.label, str(self.options.get("variant", ""))]))


def sizes(seed: int, count: int) -> Iterator[tuple[int, int]]:
    """Draw (height, width): plain, small, thin, and near whole multiples and simple ratios of tile sides."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.35:
            yield rng.randint(1, 1500), rng.randint(1, 1500)
        elif kind < 0.55:
            yield tuple(round(math.exp(rng.uniform(0, math.log(6000)))) for _ in range(2))  # type: ignore[misc]
        elif kind < 0.65:
            yield rng.randint(1, 64), rng.randint(1, 64)
        else:
            unit = rng.choice((14, 28, 32, 48, 224, 266, 336, 364, 378, 384, 448, 490, 512, 640))
            rows, cols = rng.randint(1, 12), rng.randint(1, 12)
            if kind < 0.85:
                scale = rng.choice((unit, rng.randint(1, 300)))
                yield rows * scale, cols * scale
            else:
                yield (
                    max(rows * unit + rng.randint(-1, 1), 1),
                    max(cols * unit + rng.randint(-1, 1), 1),
                )


def differences(peer: Peer, seed: int, count: int) -> list[Any]:
    """Return the sizes on which the plan and the peer part."""
    theirs, fam = peer.make(), family(peer.name, **peer.options)
    found = []
    for height, width in sizes(seed, count):
        media = (
            Video((height, width), frames=peer.frames) if peer.frames else Image((height, width))
        )
        try:
            got = peer.ours(fam.plan(media))
        except PositionError as refusal:
            got = (
                None if str((height, width)) in str(refusal) or "side" in str(refusal) else refusal
            )
        try:
            expected = theirs(height, width)
        except (ValueError, ZeroDivisionError, RuntimeError):
            expected = None
        if got != expected:
            found.append(((height, width), got, expected))
    return found


def meta(height: int, width: int) -> torch.Tensor:
    """A picture without pixels."""
    return torch.empty((1, 3, height, width), device="meta")


# What a plan says
def size(plan: Plan) -> tuple[int, int]:
    return plan.views[0].size_hw


def global_size(plan: Plan) -> tuple[int, int]:
    return next(view for view in plan.views if view.node == "global").size_hw


def tokens(plan: Plan) -> tuple[int, int]:
    return plan.views[0].tokens.shape[1:]


def cells(plan: Plan) -> int:
    return plan.cells


def with_newlines(plan: Plan) -> int:
    """Cells and one newline a row of the joined tiles."""
    return plan.cells + (plan.raster.tokens.height if plan.raster else 0)


def views(plan: Plan) -> int:
    return len(plan.views)


def tiles(plan: Plan) -> tuple[int, int]:
    return plan.tiles_rc or (1, 1)


def _module(name: str, file: str = "image_processing") -> Any:
    from importlib import import_module

    return import_module(f"transformers.models.{name}.{file}_{name}")


def _counted(method: Any, me: Any, *more: Any) -> Theirs:
    """A count that adds rows * columns and rows: without rows the tiles have vanished."""

    def theirs(height: int, width: int) -> int | None:
        rows_cols = me._get_unpadded_features
        seen: list[tuple[int, int]] = []

        def spy(*args: Any) -> Any:
            seen.append(rows_cols(*args))
            return seen[-1]

        total = method(
            SimpleNamespace(**{**vars(me), "_get_unpadded_features": spy}), height, width, *more
        )
        return total if seen[-1][0] > 0 else None

    return theirs


def _llava_next() -> Theirs:
    cls = _module("llava_next", "processing").LlavaNextProcessor
    pins = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    me = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pins),
        patch_size=14,
        num_additional_image_tokens=0,
    )
    me._get_unpadded_features = lambda *args: cls._get_unpadded_features(me, *args)
    return _counted(cls._get_number_of_features, me, 336, 336)


def _llava_onevision() -> Theirs:
    cls = _module("llava_onevision", "processing").LlavaOnevisionProcessor
    pins = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    me = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pins),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    me._get_unpadded_features = lambda *args: cls._get_unpadded_features(me, *args)
    return _counted(cls._get_number_of_features, me, 384, 384)


def _granite() -> Theirs:
    cls = _module("granite4_vision", "processing").Granite4VisionProcessor
    pins = [[384 * i, 384 * j] for i in range(1, 5) for j in range(1, 5) if i * j <= 4]
    pins.sort(key=lambda hw: (hw[0] * hw[1], hw[1]))
    me = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pins), patch_size=16, num_additional_image_tokens=0,
        downsample_rate="1/2",
    )  # fmt: skip
    me._get_unpadded_features = lambda *args: cls._get_unpadded_features(me, *args)
    return _counted(cls._get_number_of_features, me, 384, 384)


def _got(px: int, most: int) -> Theirs:
    processor = _module("got_ocr2").GotOcr2ImageProcessor()
    options = {
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": most,
        "patch_size": {"height": px, "width": px},
    }
    return lambda height, width: processor.get_number_of_image_patches(height, width, options)


def _got_grid(px: int, most: int) -> Theirs:
    pick = _module("got_ocr2").get_optimal_tiled_canvas
    return lambda height, width: pick((height, width), (px, px), 1, most)[::-1]


def _cohere2() -> Theirs:
    pick = _module("cohere2_vision").get_optimal_tiled_canvas
    return lambda height, width: pick((height, width), (512, 512), 1, 12)[::-1]


def _pixtral(longest: int, unit: int) -> Theirs:
    resize = _module("pixtral").get_resize_output_image_size

    def theirs(height: int, width: int) -> Any:
        picture = np.broadcast_to(np.float32(0), (3, height, width))
        height, width = resize(picture, (longest, longest), (unit, unit), "channels_first")
        return (height, width) if min(height, width) else None

    return theirs


def _mistral_common(longest: int, patch: int, merge: int) -> Theirs:
    from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder

    encoder = ImageEncoder(
        ImageConfig(image_patch_size=patch, max_image_size=longest, spatial_merge_size=merge),
        SimpleNamespace(img=1, img_break=2, img_end=3),  # type: ignore[arg-type]
    )
    count = encoder._image_to_num_tokens
    return lambda height, width: count(SimpleNamespace(size=(width, height)))[::-1]  # type: ignore[arg-type]


def _llama4(*, max_canvas: bool) -> Theirs:
    module = _module("llama4")
    side = SizeDict(height=336, width=336)
    canvases = torch.tensor(module.find_supported_resolutions(max_num_chunks=16, patch_size=side))

    def theirs(height: int, width: int) -> tuple[int, int]:
        best = module.get_best_fit((height, width), canvases, resize_to_max_canvas=max_canvas)
        return int(best[0]) // 336, int(best[1]) // 336

    return theirs


def _llama4_sizes() -> Theirs:
    """Where the picture lies on its canvas: the published lines between picking and padding."""
    module, pick = _module("llama4"), _llama4(max_canvas=False)

    def theirs(height: int, width: int) -> tuple[int, int]:
        target = [336 * side for side in pick(height, width)]
        limit = tuple(
            min(max(side, 336), most) for side, most in zip((height, width), target, strict=True)
        )
        inner = module.get_max_res_without_distortion((height, width), limit)
        return max(inner[0], 1), max(inner[1], 1)

    return theirs


def content_extent(plan: Plan) -> tuple[int, int]:
    """How far the picture reaches on the canvas of all tiles."""
    last = [view for view in plan.views if view.node == "tile"] or list(plan.views)
    rows = [
        (view.tile_rc or (0, 0))[0] * view.size_hw[0] + int(view.content_yxyx[2])
        for view in last
        if view.content_yxyx[2]
    ]
    cols = [
        (view.tile_rc or (0, 0))[1] * view.size_hw[1] + int(view.content_yxyx[3])
        for view in last
        if view.content_yxyx[3]
    ]
    return max(rows), max(cols)


def _kimi() -> Theirs:
    resize = _module("kimi_k25").navit_resize
    return lambda height, width: resize(height, width, 14, 2, 16384, 512)[1]


def _ocr(model: str, cls: str, most: int) -> Theirs:
    processor = getattr(_module(model), cls)()
    options = {"max_patches": most, "min_patches": 2}

    def theirs(height: int, width: int) -> int | None:
        if (
            model == "unlimited_ocr"
            and min(round(side * (1024 / max(height, width))) for side in (height, width)) < 1
        ):
            return None  # its resize to a height of 0 raises
        return processor.get_number_of_image_patches(height, width, options)

    return theirs


def _emu3() -> Theirs:
    resize = _module("emu3").smart_resize
    return lambda height, width: resize(height, width, 8, 512 * 512, 1024 * 1024)


def _naflex(budget: int) -> Theirs:
    resize = _module("siglip2").get_image_size_for_max_num_patches
    return lambda height, width: resize(height, width, 16, budget)


def _naflex_timm() -> Theirs:
    from timm.data.naflex_transforms import get_image_size_for_seq

    return lambda height, width: get_image_size_for_seq(
        (height, width), patch_size=16, max_seq_len=256
    )[1]


def _idefics2() -> Theirs:
    resize = _module("idefics2").get_resize_output_image_size

    def theirs(height: int, width: int) -> tuple[int, int]:
        picture = meta(height, width)
        return resize(picture, SimpleNamespace(shortest_edge=378, longest_edge=980))

    return theirs


def _idefics3(model: str, cls: str, longest: int, px: int) -> Theirs:
    """The real split, on pictures without pixels."""
    module = _module(model)
    processor = getattr(module, cls)()
    processor.resize = lambda _image, size, **_: meta(size.height, size.width)
    edge = SimpleNamespace(longest_edge=longest)

    def theirs(height: int, width: int) -> tuple[int, int]:
        height, width = module.get_resize_output_image_size(
            meta(height, width), resolution_max_side=edge.longest_edge
        )
        picture = processor.resize_for_vision_encoder(meta(height, width), px)
        rows, cols = (side / px for side in picture.shape[-2:])
        assert rows == int(rows)
        assert cols == int(cols)
        return (int(rows), int(cols)) if max(rows, cols) > 1 else (1, 1)

    return theirs


def _fuyu() -> Theirs:
    """The size that its resize asks its backend for; a side of 0 would be refused there."""
    cls = _module("fuyu").FuyuImageProcessor
    backend = cls.__mro__[1]
    processor, box = cls(), SizeDict(height=1080, width=1920)

    def theirs(height: int, width: int) -> tuple[int, int] | None:
        out = [(height, width)]
        kept = backend.resize

        def spy(_self: Any, image: Any, size: Any, **_: Any) -> Any:
            out.append((size.height, size.width))
            return image

        backend.resize = spy
        try:
            processor.resize(meta(height, width), box)
        finally:
            backend.resize = kept
        return out[-1] if min(out[-1]) else None

    return theirs


def content(plan: Plan) -> tuple[int, int]:
    top, left, bottom, right = (int(edge) for edge in plan.views[0].content_yxyx)
    return bottom - top, right - left


def _molmo2() -> Theirs:
    processor = _module("molmo2").Molmo2ImageProcessor()

    def theirs(height: int, width: int) -> tuple[int, int]:
        grid, crops = processor.get_image_grid_and_crops(height, width)
        return grid[0] * grid[1] + grid[2] * grid[3], crops

    return theirs


def _gemma3() -> Theirs:
    processor = _module("gemma3").Gemma3ImageProcessor()

    def theirs(height: int, width: int) -> list[tuple[int, int]]:
        crops = processor.pan_and_scan_batched(meta(height, width), 256, 4, 1.2)
        return [tuple(crop.shape[-2:]) for crop in crops]

    return theirs


def crop_sizes(plan: Plan) -> list[tuple[int, int]]:
    rects = [view.source_yxyx for view in plan.views if view.node == "tile"]
    return [(int(bottom - top), int(right - left)) for top, left, bottom, right in rects]


def _gemma4(soft: int) -> Theirs:
    resize = _module("gemma4").get_aspect_ratio_preserving_size
    return lambda height, width: resize(height, width, 16, soft * 9, 3)


def _minicpm(mode: str) -> Theirs:
    processor = _module("minicpmv4_6").MiniCPMV4_6ImageProcessor()

    def theirs(height: int, width: int) -> Any:
        grid = processor.get_sliced_grid((height, width), 9, 448)
        whole = processor.find_best_resize(
            (height, width), 448, 14, mode, allow_upscale=grid is None
        )
        if grid is None:
            return whole, None, None
        refined = processor.get_refine_size(
            (height, width), grid, 448, 14, mode, allow_upscale=True
        )
        return whole, tuple(grid), (refined[0] // grid[0], refined[1] // grid[1])

    return theirs


def minicpm(plan: Plan) -> Any:
    tile = plan.views[1].size_hw if plan.tiles_rc else None
    return plan.views[0].size_hw, plan.tiles_rc, tile


def _phi4() -> Theirs:
    module = _module("phi4_multimodal")
    processor = module.Phi4MultimodalImageProcessor()

    def theirs(height: int, width: int) -> Any:
        kept = module.tvF.resize, module.tvF.pad
        module.tvF.resize = lambda _image, size: meta(*size)
        module.tvF.pad = lambda image, padding, **_: meta(
            image.shape[-2] + padding[3], image.shape[-1] + padding[2]
        )
        try:
            small = SimpleNamespace(shape=(3, height, width), device="cpu")
            canvas, mask = processor.dynamic_preprocess(small, 448, 14, 32)
        finally:
            module.tvF.resize, module.tvF.pad = kept
        kept_cells = mask[0::2, 0::2]
        return tuple(canvas.shape[-2:]), int(kept_cells.sum()), int(kept_cells[:, 0].sum())

    return theirs


def phi4(plan: Plan) -> Any:
    assert plan.raster is not None
    assert plan.tiles_rc is not None
    raster = plan.raster.tokens
    return tuple(448 * count for count in plan.tiles_rc), raster.size, raster.height


def _aria(px: int) -> Theirs:
    return (  # type: ignore[no-any-return]
        _module("aria")
        .AriaImageProcessor(split_image=True, max_image_size=px)
        .get_number_of_image_patches
    )


def _ovis2() -> Theirs:
    pick = _module("ovis2").get_min_tile_covering_grid
    return lambda height, width: pick((height, width), 448, 9)[::-1]


def _lfm2() -> Theirs:
    processor = _module("lfm2_vl").Lfm2VlImageProcessor()

    def theirs(height: int, width: int) -> Any:
        size_wh = processor.smart_resize(height, width, 2, 64, 256, 16)
        if not processor._is_image_too_large(height, width, 256, 16, 2, 2.0):
            return size_wh[::-1], (1, 1)
        cols, rows, *_ = processor._get_grid_layout(height, width, 2, 10, 512)
        return size_wh[::-1], (rows, cols)

    return theirs


def _perception_lm() -> Theirs:
    processor = _module("perception_lm").PerceptionLMImageProcessor()
    processor._find_supported_aspect_ratios = cache(processor._find_supported_aspect_ratios)

    def theirs(height: int, width: int) -> tuple[int, int]:
        found = processor._fit_image_to_canvas(width, height, 448)
        return (found or processor._find_closest_aspect_ratio(width, height, 448))[::-1]

    return theirs


def _smart(
    model: str, factor: int, least: int, most: int, file: str = "image_processing"
) -> Theirs:
    resize = _module(model, file).smart_resize
    return lambda height, width: resize(height, width, factor, least, most)


def _smart_clip(model: str, factor: int, least: int, most: int, frames: int, file: str) -> Theirs:
    resize = _module(model, file).smart_resize
    return lambda height, width: resize(frames, height, width, 2, factor, least, most)


def _qwen3_clip(frames: int) -> Theirs:
    return _smart_clip("qwen3_vl", 32, 131072, 786432, frames, "video_processing")


def _glm_clip(model: str, frames: int) -> Theirs:
    return _smart_clip(model, 28, 12544, 47040000, frames, "video_processing")


def _smart_exact(model: str, *limits: int) -> Theirs:
    """smart_resize of GLM-5-Next, whose limits count units."""
    resize = _module(model).smart_resize
    return lambda height, width: resize(2, height, width, 2, 28, *limits)


def _row_budget(frames: int) -> Theirs:
    cls = _module("hy_v4_vl", "video_processing").HYV4VLVideoProcessor
    return lambda height, width: cls.smart_resize(height, width, frames, factor=32)


def _always(model: str, cls: str, **attributes: Any) -> Theirs:
    """The processor's own count of a family whose images all have as many tokens."""
    count = getattr(_module(model, "processing"), cls)._get_num_multimodal_tokens
    me = SimpleNamespace(**attributes, _merge_kwargs=lambda **_: {"images_kwargs": {}})
    return lambda height, width: count(me, image_sizes=[(height, width)])["num_image_tokens"][0]


VENDOR: dict[str, Any] = {}
HF = {"dialect": "transformers"}
PEERS = [
    Peer("llava_next", _llava_next, with_newlines),
    Peer("llava_next_video", _llava_next, with_newlines),
    Peer("llava_onevision", _llava_onevision, with_newlines),
    Peer("granite4_vision", _granite, with_newlines, VENDOR),
    Peer("internvl", lambda: _got(448, 12), views, VENDOR),
    Peer("internvl", lambda: _got_grid(448, 12), tiles, VENDOR, label="grid"),
    Peer("internvl", lambda: _got_grid(448, 40), tiles, {"variant": "max_40"}),
    Peer("got_ocr2", lambda: _got_grid(448, 12), tiles, VENDOR),
    Peer("aya_vision", lambda: _got(364, 12), views, VENDOR),
    Peer("pixtral", lambda: _pixtral(1024, 16), size),
    Peer("mistral3", lambda: _pixtral(1540, 28), size),
    Peer("pixtral", lambda: _mistral_common(1024, 16, 1), tokens, VENDOR, label="mistral_common"),
    Peer("mistral3", lambda: _mistral_common(1540, 14, 2), tokens, VENDOR, label="mistral_common"),
    Peer("llama4", lambda: _llama4(max_canvas=False), tiles, VENDOR),
    Peer("llama4", lambda: _llama4(max_canvas=True), tiles, {"variant": "max_canvas"}),
    Peer("llama4", _llama4_sizes, content_extent, VENDOR, label="content"),
    Peer("kimi_k25", _kimi, size, VENDOR),
    Peer("deepseek_ocr", lambda: _ocr("unlimited_ocr", "UnlimitedOcrImageProcessor", 6), views),
    Peer("deepseek_ocr2", lambda: _ocr("deepseek_ocr2", "DeepseekOcr2ImageProcessor", 6), views, VENDOR),
    Peer("emu3", _emu3, size),
    Peer("naflex", lambda: _naflex(256), size, VENDOR),
    Peer("naflex", lambda: _naflex(1024), size, {"variant": "1024"}),
    Peer("naflex", _naflex_timm, size, VENDOR, label="timm", normal=200, many=20_000),
    Peer("idefics2", _idefics2, size, VENDOR),
    Peer("idefics3", lambda: _idefics3("idefics3", "Idefics3ImageProcessor", 1456, 364), tiles, VENDOR),
    Peer("smolvlm", lambda: _idefics3("smolvlm", "SmolVLMImageProcessor", 2048, 512), tiles, VENDOR),
    Peer("smolvlm2", lambda: _idefics3("smolvlm", "SmolVLMImageProcessor", 1536, 384), tiles, VENDOR),
    Peer("fuyu", _fuyu, content, VENDOR),
    Peer("molmo2", _molmo2, lambda plan: (plan.cells, len(plan.views)), VENDOR),
    Peer("gemma3", _gemma3, crop_sizes, {"variant": "pan_and_scan"}),
    Peer("gemma4", lambda: _gemma4(280), size, VENDOR),
    Peer("gemma4", lambda: _gemma4(1120), size, {"variant": "1120"}),
    Peer("minicpm_v4_6", lambda: _minicpm("16x"), minicpm, VENDOR),
    Peer("minicpm_v4_6", lambda: _minicpm("4x"), minicpm, {"variant": "4x"}),
    Peer("phi4_multimodal", _phi4, phi4, VENDOR),
    Peer("aria", lambda: _aria(980), views, {"dialect": "transformers", "variant": "split"}),
    Peer("ovis2", _ovis2, tiles),
    Peer("lfm2_vl", _lfm2, lambda plan: (global_size(plan), tiles(plan)), VENDOR),
    Peer("perception_lm", _perception_lm, tiles, VENDOR),
    Peer("cohere2_vision", _cohere2, tiles, VENDOR),
    Peer("qwen2_vl", lambda: _smart("qwen2_vl", 28, 3136, 1003520), size),
    Peer("qwen2_vl", lambda: _smart("qwen2_vl", 28, 100352, 602112, "video_processing"), size, frames=4, label="clip"),
    Peer("qwen3_vl", lambda: _smart("qwen2_vl", 32, 65536, 16777216), size),
    *(
        Peer("qwen3_vl", lambda n=n: _qwen3_clip(n), size, frames=n, label=f"clip{n}")
        for n in (2, 3, 7, 40)
    ),
    # Families whose processor is another's class, with its own numbers.
    *(
        Peer(name, lambda: _smart("qwen2_vl", 28, 3136, 1003520), size, options)
        for name, options in (("qwen2_5_vl", HF), ("qwen2_5_omni", HF), ("exaone4_5", VENDOR))
    ),
    *(
        Peer(
            name, lambda: _smart("qwen2_vl", 28, 100352, 602112, "video_processing"), size, options, frames=4,
            label="clip",
        )
        for name, options in (("qwen2_5_vl", HF), ("qwen2_5_omni", HF), ("exaone4_5", VENDOR))
    ),
    *(
        Peer(name, lambda: _smart("qwen2_vl", 32, 65536, 16777216), size)
        for name in ("qwen3_omni", "qwen3_5", "cosmos3")
    ),
    *(Peer(name, lambda: _qwen3_clip(7), size, frames=7, label="clip7") for name in ("qwen3_5", "cosmos3")),
    *(
        Peer(name, lambda: _smart_clip("glm4v", 28, 12544, 11760000, 2, "image_processing"), size, VENDOR)
        for name in ("glm4v_moe", "glm_ocr")
    ),
    Peer("glm46v", lambda: _smart_clip("glm46v", 28, 12544, 11760000, 2, "image_processing"), size, VENDOR),
    *(
        Peer(name, lambda: _glm_clip("glm4v", 5), size, VENDOR, frames=5, label="clip5")
        for name in ("glm4v_moe", "glm_ocr")
    ),
    Peer("minicpm_v4_7", lambda: _minicpm("16x"), minicpm, VENDOR),
    Peer("minicpm_v4_7", lambda: _minicpm("4x"), minicpm, {"variant": "4x"}),
    Peer(
        "llava_1_5",
        lambda: _always(
            "llava", "LlavaProcessor", image_processor=SimpleNamespace(crop_size={"height": 336, "width": 336}),
            patch_size=14, num_additional_image_tokens=1, vision_feature_select_strategy="default",
        ),
        cells,
    ),
    Peer(
        "chameleon", lambda: _always("chameleon", "ChameleonProcessor", image_seq_length=1024),
        lambda plan: plan.cells + 2,  # its start and end
    ),
    Peer("paligemma", lambda: _always("paligemma", "PaliGemmaProcessor", image_seq_length=256), cells, VENDOR),
    Peer("gemma3", lambda: _always("gemma3", "Gemma3Processor", image_seq_length=256), cells, VENDOR),
    Peer("cohere_compass", lambda: _smart("cohere_compass", 32, 65536, 1048576), size),
    Peer("glm4v", lambda: _smart_clip("glm4v", 28, 12544, 11760000, 2, "image_processing"), size, VENDOR),
    *(
        Peer(name, lambda name=name, n=n: _glm_clip(name, n), size, VENDOR, frames=n, label=f"clip{n}")
        for name in ("glm4v", "glm46v")
        for n in (2, 5, 64)
    ),
    Peer("glm5_next", lambda: _smart_exact("glm5_next", 16, 8000), size, VENDOR),
    Peer("ernie4_5_vl", lambda: _smart("ernie4_5_vl_moe", 28, 3136, 4842768), size),
    Peer("paddleocr_vl", lambda: _smart("paddleocr_vl", 28, 147456, 2359296), size),
    Peer("hunyuan_vl", lambda: _smart("hunyuan_vl", 32, 262144, 4194304), size, VENDOR),
    Peer("hy_v4_vl", lambda: _smart("hy_v4_vl", 32, 262144, 4194304), size, VENDOR),
    *(Peer("hy_v4_vl", lambda n=n: _row_budget(n), size, VENDOR, frames=n, label=f"clip{n}") for n in (1, 8, 200)),
    Peer("minimax_m3_vl", lambda: _smart("minimax_m3_vl", 28, 3136, 451584), size, VENDOR),
    Peer("video_llama_3", lambda: _smart("video_llama_3", 14, 3136, 1003520), size, VENDOR),
    Peer("glm_image", lambda: _smart("glm_image", 16, 262144, 4194304), size, VENDOR),
]  # fmt: skip
