"""Where sources part on more than a count: padding of crops, blocks of attention, the order inside a merged token.

Each is a row of configs/dialects/7_tiles.yaml.
"""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from visionpos.vlm import Image, Text, family


def test_ovis2_letterboxes_or_stretches_its_crops() -> None:
    """1000x400 in three crops of 333 or 334 by 400: the vendor keeps their ratio, transformers fills the tile."""
    for view in family("ovis2").plan(Image((400, 1000))).views[1:]:
        top, left, bottom, right = view.padding_px
        assert (top, bottom) == (0, 0)
        assert left + right in (74, 76)  # 448 - floor(448 * 333 or 334 / 400)
        assert abs(left - right) <= 1
    turned = family("ovis2").plan(Image((1000, 400))).views[1]
    assert sum(turned.padding_px[::2]) == 76
    for view in family("ovis2", dialect="transformers").plan(Image((400, 1000))).views[1:]:
        assert view.padding_px == (0, 0, 0, 0)


def test_count_of_cohere2_is_the_grid_s() -> None:
    """512 / 16 / 2 squared is 256 = 16 * 16 by accident; the grid says 18 * 18 at 504 / 14 / 2, not 14 * 14."""
    overlay = {"views": {"tile": {"px": 504}}, "grid": {"patch": 14}}
    stream = family("cohere2_vision", overlay=overlay).stream([Image((300, 300))])
    assert int(stream.is_feature.sum()) == 18 * 18


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_vl"])
def test_kimi_pads_where_its_class_may_crop(name: str) -> None:
    plan = family(name).plan(Image((100, 100)))
    assert plan.views[0].size_hw == (112, 112)
    assert plan.cells == 16
    steps = [
        {"kind": "patch_budget", "patch": 14, "at_most": 4096, "side_at_most": 1000000},
        {"kind": "canvas", "box": 84},
    ]
    crop = family(name, overlay={"views": {"global": {"size": steps}}})
    assert crop.plan(Image((100, 100))).cells == 9


def test_spans_give_either_block_of_molmo2() -> None:
    """One bidirectional block for all images, or one an image: the spans' segments tell them apart."""
    stream = family("molmo2").stream([Text("a b"), Image((97, 131)), Text("c"), Image((400, 700))])
    image = torch.full((len(stream),), -1)
    for span in stream.spans:
        if span.kind == "image":
            image[span.start : span.stop] = span.segment
    assert set(image.tolist()) == {-1, 1, 3}
    assert bool((image[stream.is_feature] >= 0).all())
    one_block = (image >= 0).unsqueeze(-1) & (image >= 0)
    within_image = (image.unsqueeze(-1) == image) & one_block
    assert int(within_image.sum()) < int(one_block.sum())
    assert bool((one_block | ~within_image).all())


def test_merged_patches_lie_channel_by_channel_or_patch_by_patch() -> None:
    """Mistral3 unfolds, InternVL shuffles: the weights are not interchangeable (facts/tiling.md 6 and 8)."""
    square = torch.arange(16.0)
    patches = torch.stack([square, square + 100], -1)  # [16, 2]
    config = SimpleNamespace(
        vision_config=SimpleNamespace(hidden_size=2, patch_size=14), spatial_merge_size=2
    )
    mistral = import_module("transformers.models.mistral3.modeling_mistral3").Mistral3PatchMerger
    merger = mistral(config)
    merger.merging_layer = torch.nn.Identity()
    unfolded = merger(patches, [(56, 56)])
    assert unfolded[0].tolist() == [0, 1, 4, 5, 100, 101, 104, 105]
    shuffle = import_module("transformers.models.internvl.modeling_internvl").InternVLModel
    shuffled = shuffle.pixel_shuffle(None, patches.view(1, 4, 4, 2), 0.5)
    assert shuffled[0, 0, 0].tolist() == [0, 100, 1, 101, 4, 104, 5, 105]
