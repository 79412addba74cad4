"""The image processors of transformers, built from their classes with explicit arguments; nothing is fetched.

Mean and std are the family's own, so that a difference is one of geometry, kernel, padding or order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visionpos.vlm import Family, Image

Read = Callable[[Any], Any]  # what of a processor's answer the encoder is given


def values(out: Any) -> Tensor:
    return out["pixel_values"]


def flat(out: Any) -> Tensor:
    """Views of all images, without the axis of images."""
    return out["pixel_values"].flatten(0, 1) if out["pixel_values"].ndim == 5 else values(out)


def unpadded(out: Any) -> Tensor:
    return out["pixel_values"][out["pixel_attention_mask"].bool()]


def cropped(out: Any) -> list[Tensor]:
    """Views of their own sizes, cut out of the common one by their masks."""
    pairs = zip(out["pixel_values"][0], out["pixel_attention_mask"][0].bool(), strict=True)
    return [view[:, mask.any(1)][:, :, mask.any(0)] for view, mask in pairs]


def local_first(out: Any) -> list[Tensor]:
    return [*(torch.as_tensor(one) for one in out.get("pixel_values_local", [])), *values(out)]


def global_last(out: Any) -> Tensor:
    """Phi-4 stacks the whole image first and writes it last."""
    stacked = out["image_pixel_values"][0]
    return torch.cat([stacked[1:], stacked[:1]])


def positioned(out: Any) -> Tensor:
    return out["pixel_values"][0][(out["image_position_ids"][0] >= 0).all(-1)]


@dataclass
class Processor:
    """One processor, its arguments, and which family and dialect it is the peer of."""

    family: str
    model: str
    cls: str
    arguments: dict[str, Any] = field(default_factory=dict)
    read: Read = values
    dialect: str | None = None
    variant: str | None = None
    slow: bool = True  # whether there is a Pillow processor as well
    steps: float = 1e-3  # largest difference in 8-bit steps
    own_numbers: bool = False  # the class has the family's numbers, in another form

    def __str__(self) -> str:
        return "-".join(filter(None, [self.family, self.dialect, self.variant]))

    def of(self, fam: Family, picture: np.ndarray, *, pillow: bool = False) -> Any:
        """Return what the processor makes of `[height, width, 3]` uint8."""
        file = f"image_processing_{'pil_' if pillow else ''}{self.model}"
        cls = getattr(
            import_module(f"transformers.models.{self.model}.{file}"), self.cls + "Pil" * pillow
        )
        numbers = {"image_mean": list(fam.spec.pixels.mean), "image_std": list(fam.spec.pixels.std)}
        processor = cls(**({} if self.own_numbers else numbers), **self.arguments)
        out = processor(picture, return_tensors="pt")
        return (
            fuyu_patches(processor, out, fam, picture) if self.model == "fuyu" else self.read(out)
        )


def fuyu_patches(processor: Any, out: Any, fam: Family, picture: np.ndarray) -> Tensor:
    """What the model cuts out of the full canvas that the processor pads to; wider pictures are not padded at all."""
    padded = torch.as_tensor(out["images"][0][0])
    height, width = fam.plan(Image(size_hw=picture.shape[:2])).views[0].size_hw
    return processor.patchify_image(padded[None, :, :height, :width])[0]


def square(px: int) -> dict[str, int]:
    return {"height": px, "width": px}


def pins(px: int, most: int, side: int = 99) -> list[list[int]]:
    """Candidates of (height, width), those of equal area in order of width."""
    found = [
        (i * j, j, [px * i, px * j])
        for i in range(1, most + 1)
        for j in range(1, most + 1)
        if i * j <= most and max(i, j) <= side
    ]
    return [pin for *_, pin in sorted(found)]


NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
GOT = "GotOcr2ImageProcessor"
HF = "transformers"
SCAN = {
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip
PROCESSORS = [
    Processor(
        "llava_1_5",
        "llava",
        "LlavaImageProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": square(336)},
        dialect=HF,
    ),
    Processor(
        "llava_1_5",
        "llava",
        "LlavaImageProcessor",
        {"size": square(336), "do_pad": True, "do_center_crop": False},
    ),
    Processor(
        "llava_next",
        "llava_next",
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": square(336), "image_grid_pinpoints": NEXT},
        flat,
        HF,
    ),
    Processor(
        "llava_onevision",
        "llava_onevision",
        "LlavaOnevisionImageProcessor",
        {"size": square(384), "image_grid_pinpoints": pins(384, 36, 6)},
        flat,
        HF,
    ),
    Processor(
        "granite4_vision",
        "llava_next",
        "LlavaNextImageProcessor",
        {"size": square(384), "crop_size": square(384), "image_grid_pinpoints": pins(384, 4)},
        flat,
    ),
    Processor(
        "internvl",
        "got_ocr2",
        GOT,
        {"size": square(448), "crop_to_patches": True, "max_patches": 12},
    ),
    Processor(
        "aya_vision",
        "got_ocr2",
        GOT,
        {"size": square(364), "crop_to_patches": True, "max_patches": 12},
    ),
    Processor(
        "pixtral",
        "pixtral",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 1024}, "patch_size": square(16)},
        dialect=HF,
    ),
    Processor(
        "mistral3",
        "pixtral",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 1540}, "patch_size": square(28)},
        dialect=HF,
    ),
    Processor("idefics2", "idefics2", "Idefics2ImageProcessor", {}, flat),
    Processor(
        "idefics2",
        "idefics2",
        "Idefics2ImageProcessor",
        {"do_image_splitting": True},
        cropped,
        variant="split",
    ),
    Processor(
        "idefics3",
        "idefics3",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        flat,
    ),
    Processor(
        "smolvlm",
        "smolvlm",
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        flat,
    ),
    Processor("gemma3", "gemma3", "Gemma3ImageProcessor", {"size": square(896)}),
    Processor(
        "gemma3",
        "gemma3",
        "Gemma3ImageProcessor",
        {"size": square(896), **SCAN},
        variant="pan_and_scan",
    ),
    Processor("gemma4", "gemma4", "Gemma4ImageProcessor", {}, positioned),
    Processor("paligemma", "siglip", "SiglipImageProcessor", {"size": square(224)}),
    # It normalises in bfloat16: half a step.
    Processor("llama4", "llama4", "Llama4ImageProcessor", {}, flat, slow=False, steps=0.6),
    Processor("cohere2_vision", "cohere2_vision", "Cohere2VisionImageProcessor", {}, slow=False),
    Processor("perception_lm", "perception_lm", "PerceptionLMImageProcessor", {}, flat, slow=False),
    Processor(
        "ovis2",
        "ovis2",
        "Ovis2ImageProcessor",
        {"size": square(448), "crop_to_patches": True, "max_patches": 9},
        dialect=HF,
    ),
    Processor("aria", "aria", "AriaImageProcessor"),
    Processor("chameleon", "chameleon", "ChameleonImageProcessor", dialect=HF, own_numbers=True),
    Processor(
        "phi4_multimodal",
        "phi4_multimodal",
        "Phi4MultimodalImageProcessor",
        {},
        global_last,
        slow=False,
    ),
    Processor(
        "deepseek_ocr",
        "unlimited_ocr",
        "UnlimitedOcrImageProcessor",
        {"crop_to_patches": True, "max_patches": 6},
        local_first,
        slow=False,
    ),
    Processor("deepseek_ocr2", "deepseek_ocr2", "DeepseekOcr2ImageProcessor", {}, local_first),
    Processor("qwen2_vl", "qwen2_vl", "Qwen2VLImageProcessor", dialect=HF),
    Processor(
        "qwen3_vl",
        "qwen2_vl",
        "Qwen2VLImageProcessor",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        dialect=HF,
    ),
    Processor("glm4v", "glm4v", "Glm4vImageProcessor"),
    Processor("glm46v", "glm46v", "Glm46VImageProcessor"),
    Processor(
        "glm_image",
        "glm_image",
        "GlmImageImageProcessor",
        {
            "patch_size": 16,
            "temporal_patch_size": 1,
            "merge_size": 1,
            "size": {"shortest_edge": 262144, "longest_edge": 4194304},
        },
    ),
    Processor(
        "cohere_compass",
        "cohere_compass",
        "CohereCompassImageProcessor",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 1048576}},
        dialect=HF,
    ),
    Processor("glm5_next", "glm5_next", "Glm5NextImageProcessor"),
    Processor("ernie4_5_vl", "ernie4_5_vl_moe", "Ernie4_5_VLMoeImageProcessor"),
    Processor("paddleocr_vl", "paddleocr_vl", "PaddleOCRVLImageProcessor"),
    Processor("hunyuan_vl", "hunyuan_vl", "HunYuanVLImageProcessor"),
    Processor("hy_v4_vl", "hy_v4_vl", "HYV4VLImageProcessor"),
    Processor("minimax_m3_vl", "minimax_m3_vl", "MiniMaxM3VLImageProcessor", slow=False),
    Processor("video_llama_3", "video_llama_3", "VideoLlama3ImageProcessor"),
    Processor("kimi_k25", "kimi_k25", "Kimi_K25ImageProcessor", slow=False),
    Processor("minicpm_v4_6", "minicpmv4_6", "MiniCPMV4_6ImageProcessor"),
    Processor("naflex", "siglip2", "Siglip2ImageProcessor", {}, unpadded),
    Processor("lfm2_vl", "lfm2_vl", "Lfm2VlImageProcessor", {}, unpadded, slow=False),
    Processor(
        "molmo2",
        "molmo2",
        "Molmo2ImageProcessor",
        {},
        lambda out: values(out).flatten(0, -2),
        slow=False,
    ),
    Processor("fuyu", "fuyu", "FuyuImageProcessor", slow=False, own_numbers=True),
]
