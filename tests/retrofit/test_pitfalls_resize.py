"""Sizes where a square guess, a swapped axis or a stale note would hide: rectangles, small maps, missing twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.models.beit import Beit
from torch import Tensor
from torch.nn import functional

import visionpos as vp
from tests.retrofit.attentions import CASES as VARIANT_CASES
from tests.retrofit.attentions import Variant
from tests.retrofit.attentions import features as features_of
from tests.retrofit.families import FAMILIES, Family, apart_from_twin, features
from tests.retrofit.zoo import apart, opened, vit
from visionpos import PositionError, retrofit
from visionpos.retrofit.tables import Table, tables_of

BY_NAME = {family.name: family for family in FAMILIES}
REFERENCE = ("._ref_grid_size", "._ref_window_sizes", "target_shift_size")


def moving(model: Any) -> dict[str, Table]:
    return {table.path: table for table in tables_of(model) if table.moves}


def mirrored(table: Table) -> Tensor:
    """Return the values of a table with rows and columns exchanged; those of an axis are the other axis's."""
    value, (height, width) = table.value.detach(), table.sides or (0, 0)
    moved = value  # the tables of an axis: the caller has taken the other axis's
    match table.seams.layout:
        case "nlc":
            cells = value[:, table.prefix :].unflatten(1, (height, width)).transpose(1, 2)
            moved = torch.cat([value[:, : table.prefix], cells.flatten(1, 2)], dim=1)
        case "nhwc" | "heads_map":
            moved = value.transpose(1, 2)
        case "nchw":
            moved = value.transpose(2, 3)
        case "offsets_heads":
            count = (2 * height - 1) * (2 * width - 1)
            cells = value[:count].unflatten(0, (2 * height - 1, 2 * width - 1)).transpose(0, 1)
            moved = torch.cat([cells.flatten(0, 1), value[count:]])
        case "heads_offsets":
            moved = value.unflatten(1, (height, width)).transpose(1, 2).flatten(1)
        case layout:
            assert layout in ("axis_h", "axis_w"), layout
    return moved


def partner(path: str, tables: dict[str, Table]) -> Table:
    """Return the table that holds a table's mirror image: itself, or that of the other axis."""
    names = {"rel_pos_h": "rel_pos_w", "height_rel": "width_rel"}
    names |= {two: one for one, two in names.items()}
    stem, _, last = path.rpartition(".")
    return tables[f"{stem}.{names[last]}" if last in names else path]


MIRRORED = [
    pytest.param(family, id=family.name)
    for family in FAMILIES
    if not family.heavy
    and family.name
    in {
        "deit_tiny_distilled_patch16_224",
        "beit_base_patch16_224",
        "convit_tiny",
        "tnt_s_patch16_224",
        "pit_ti_224",
        "crossvit_tiny_240",
        "volo_d1_224",
        "visformer_tiny",
        "hiera_tiny_224",
        "swin_tiny_patch4_window7_224",
        "maxvit_tiny_tf_224",
        "coatnet_nano_rw_224",
        "gcvit_xxtiny",
        "levit_128s",
        "efficientformer_l1",
        "efficientformerv2_s0",
        "mvitv2_tiny",
        "samvit_base_patch16",
        "botnet26t_256",
    }
]


@pytest.mark.parametrize("family", MIRRORED)
def test_invariant_transposed_tables_move_to_the_transposed_size(family: Family) -> None:
    """Height and width trade places before and after: a table that is resampled the wrong way round differs."""
    model, other = family.build(), family.build(family.start[::-1])
    mine, theirs = moving(model), moving(other)
    with torch.no_grad():
        for path, table in theirs.items():
            table.value.copy_(mirrored(partner(path, mine)))
    retrofit.resize(model, family.target)
    retrofit.resize(other, family.target[::-1])
    changed = 0
    for path, table in theirs.items():
        source = partner(path, mine)
        sides = source.sides or (0, 0)
        assert table.sides == sides[::-1]
        torch.testing.assert_close(table.value, mirrored(source), rtol=0, atol=3e-6)
        changed += sides[0] != sides[1] or source.seams.layout.startswith("axis")
    assert changed > 0


def test_reference_relative_features_of_convit() -> None:
    """GPSA sees x, y and squared distance on the rectangle, row-major; timm alone would build a square of n tokens."""
    model = BY_NAME["convit_tiny"].build()
    retrofit.resize(model, (48, 80))
    places = [(y, x) for y in range(3) for x in range(5)]
    expected = [[(x - b, y - a, (y - a) ** 2 + (x - b) ** 2) for y, x in places] for a, b in places]
    x = torch.randn(1, 3, 48, 80, generator=torch.Generator().manual_seed(0))
    assert features(model, x).isfinite().all()
    assert torch.equal(model.blocks[0].attn.rel_indices[0], torch.tensor(expected).float())


def test_reference_both_branches_of_crossvit() -> None:
    """Every branch has the grid of its own convolution, and timm's resampled table; timm counts rectangles wrongly."""
    model = BY_NAME["crossvit_tiny_240"].build()
    tables = [model.pos_embed_0.detach().clone(), model.pos_embed_1.detach().clone()]
    retrofit.resize(model, (180, 264), recipe="timm")
    grids = []
    for patch in model.patch_embed:
        patch.proj.register_forward_hook(lambda _m, _a, out: grids.append(tuple(out.shape[-2:])))
    assert features(model, torch.zeros(1, 3, 180, 264)).isfinite().all()
    assert grids == [(15, 22), (10, 15)]  # 168 x 246 pixels in patches of 16, the rest is left out
    for branch, (table, old) in enumerate(zip(tables, ((20, 20), (14, 14)), strict=True)):
        wanted = resample_abs_pos_embed(
            table, new_size=list(grids[branch]), old_size=list(old), num_prefix_tokens=1
        )
        moved = getattr(model, f"pos_embed_{branch}")
        assert (moved - wanted).abs().max() <= 6e-6
        assert model.patch_embed[branch].num_patches == grids[branch][0] * grids[branch][1]
    notes = [part.detail for part in retrofit.describe(model) if part.kind == "table"]
    assert all("fixed grid, every image is rescaled to it" in note for note in notes)


def test_reference_axis_tables_of_mvit() -> None:
    """Rows follow the height and columns the width, each by one linear interpolation."""
    model = BY_NAME["mvitv2_tiny"].build()
    before = {path: table.value.detach().clone() for path, table in moving(model).items()}
    retrofit.resize(model, (96, 160))
    assert features(model, torch.zeros(1, 3, 96, 160)).isfinite().all()
    for path, table in moving(model).items():
        axis = 0 if path.endswith("_h") else 1
        rows = 2 * ((before[path].shape[0] + 1) // 2 * (96, 160)[axis] // 64) - 1
        wanted = functional.interpolate(before[path].T[None], size=rows, mode="linear")[0].T
        torch.testing.assert_close(table.value.detach(), wanted, rtol=0, atol=3e-6)


def test_reference_offsets_of_efficientformer() -> None:
    """Two tokens share a bias if rows and columns are as far apart; timm can build the square 7 x 7 only."""
    model = BY_NAME["efficientformer_l1"].build()
    features(model, torch.zeros(1, 3, 224, 224))  # fills the cache of the old grid
    retrofit.resize(model, (96, 160))
    (attention,) = (
        part
        for part in model.modules()
        if type(part).__module__.endswith("efficientformer") and type(part).__name__ == "Attention"
    )
    places = [(y, x) for y in range(3) for x in range(5)]
    expected = [[abs(y - a) * 5 + abs(x - b) for y, x in places] for a, b in places]
    found = attention.get_attention_biases(torch.device("cpu"))
    assert torch.equal(found, attention.attention_biases[:, torch.tensor(expected)])


SMALL = [
    ("swin_tiny_patch4_window7_224", (32, 32)),
    ("swin_tiny_patch4_window7_224", (4, 32)),
    ("swinv2_cr_tiny_224", (64, 32)),
    ("hiera_tiny_224", (32, 64)),
    ("levit_128s", (16, 32)),
    ("maxvit_tiny_tf_224", (32, 64)),
    ("visformer_tiny", (32, 64)),
    ("volo_d1_224", (16, 48)),
    ("efficientformerv2_s0", (32, 64)),
    ("vit_tiny_patch16_224", (16, 16)),
]


@pytest.mark.parametrize(("name", "size"), SMALL, ids=str)
def test_parity_smallest_maps(name: str, size: tuple[int, int]) -> None:
    """A map of one cell, or one row: what timm creates there, and nothing that is no number."""
    family = BY_NAME[name]
    model = family.build()
    retrofit.resize(model, size)
    twin = timm.create_model(
        name, num_classes=0, **{**family.options, "img_size": size, **(family.twin or {})}
    )
    twin.load_state_dict(model.state_dict())
    lines = apart_from_twin(model, twin.eval())
    assert [line for line in lines if not any(word in line for word in REFERENCE)] == []
    x = family.image(size)
    assert features(model, x).isfinite().all()
    assert torch.equal(features(model, x), features(twin, x))


@pytest.mark.parametrize("size", [(32, 64), (64, 64)], ids=str)
def test_shape_smallest_windows_of_gcvit(size: tuple[int, int]) -> None:
    """Where the map is smaller than the share of a window, the window is the map, at least one cell."""
    model = BY_NAME["gcvit_xxtiny"].build()
    retrofit.resize(model, size)
    for level, stage in enumerate(model.stages):
        sides = (size[0] // 4 // 2**level, size[1] // 4 // 2**level)
        assert tuple(stage.feat_size) == sides
        assert all(1 <= block.window_size[0] <= sides[0] for block in stage.blocks)
        assert all(1 <= block.window_size[1] <= sides[1] for block in stage.blocks)
    assert features(model, torch.randn(1, 3, *size)).isfinite().all()


ATTACHED = [
    case
    for case in VARIANT_CASES
    if not case.values[0].slow and (case.values[0].ports or case.values[0].biased)
]


@pytest.mark.parametrize("variant", ATTACHED)
def test_a_b_a_with_an_attachment(variant: Variant) -> None:
    """Away, run there, and back: every bit is as before, and away is what attaching there gives."""
    away = (variant.size_hw[0] * 2, variant.size_hw[1] * 2)
    spec: Any = vp.AlibiSpec()
    if variant.ports:
        spec = vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim)
    model, x = variant.build(), variant.image(1)
    retrofit.attach(model, spec, strength=1.0, partial=True)
    at_home = features_of(model, x)
    retrofit.resize(model, away)
    late = variant.build()
    retrofit.resize(late, away)
    retrofit.attach(late, spec, strength=1.0, partial=True)
    there = replace(variant, size_hw=away).image(1)
    assert torch.equal(features_of(model, there), features_of(late, there))
    retrofit.resize(model, variant.size_hw)
    assert torch.equal(features_of(model, x), at_home)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name)
        for family in FAMILIES
        if not family.heavy and not family.sizeless
    ],
)
def test_shape_timms_notes_have_the_new_size(family: Family) -> None:
    """What timm exports and creates again from is the size that the model has now."""
    model = family.build()
    if not hasattr(model, "_traits"):
        pytest.skip("before timm 1.0.31 models keep no such notes")
    retrofit.resize(model, family.target)
    assert tuple(model._traits["img_size"]) == family.target
    if "img_size" in model._model_args:
        assert tuple(model._model_args["img_size"]) == family.target


@pytest.mark.filterwarnings("ignore:.*non-tuple:UserWarning")  # of timm's own resampling
def test_reference_rows_of_a_beit_table() -> None:
    """14 x 14 has 732 rows and 32 x 32 has 3972; the last three belong to the class token and are not resampled."""
    model = opened(
        timm.create_model("beit_base_patch16_224", depth=1, embed_dim=24, num_heads=3)
    ).eval()
    attention = model.blocks[0].attn
    table = attention.relative_position_bias_table.detach().clone()
    assert table.shape == (732, 3)
    retrofit.resize(model, (512, 512))
    moved = attention.relative_position_bias_table.detach()
    assert moved.shape == (3972, 3)
    assert torch.equal(moved[-3:], table[-3:])
    wanted = resize_rel_pos_bias_table(table, new_window_size=(32, 32), new_bias_shape=(3972, 3))
    assert apart(moved, wanted) < 1e-5
    retrofit.resize(model, (224, 336))
    assert attention.relative_position_bias_table.shape == (27 * 41 + 3, 3)
    assert torch.equal(attention.relative_position_bias_table[-3:], table[-3:])


def test_a_table_shared_by_all_layers() -> None:
    """BEiT's shared table is one part, moves once, and a bias of one's own is added to it, not put in its place."""

    def build(size: tuple[int, int]) -> Any:
        kinds: dict[str, Any] = {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False}
        small: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 0}
        return opened(
            Beit(img_size=size, use_abs_pos_emb=False, init_values=0.1, **small, **kinds)
        ).eval()

    model = build((64, 64))
    paths = [part.path for part in retrofit.describe(model) if part.kind == "rel_table"]
    assert paths == ["rel_pos_bias.relative_position_bias_table"]
    retrofit.resize(model, (96, 160))
    twin = build((96, 160))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 96, 160, generator=torch.Generator().manual_seed(0))
    plain = features(model, x)
    assert torch.equal(plain, features(twin, x))
    attachment = retrofit.attach(model, vp.AlibiSpec(), strength=1.0)
    bias = attachment.encoding(vp.Grid(6, 10), prefix=1).detach()
    own = twin.rel_pos_bias
    with torch.no_grad():
        both = own() + bias
        own.forward = lambda: both
    assert apart(features(model, x), features(twin, x)) < 1e-6
    assert apart(plain, features(twin, x)) > 1e-4


# What users wrote, as sizes: (grid before, grid after) in cells; all of equal or misleading counts.
COUNTS = [((2, 8), (4, 4)), ((4, 16), (8, 8)), ((64, 8), (25, 20)), ((8, 32), (10, 18))]


@pytest.mark.parametrize(("old", "new"), COUNTS, ids=str)
def test_parity_equal_counts_are_still_other_grids(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    """Equal counts, and counts that are squares of nothing: the grid before is known, not guessed."""
    model = vit((16 * old[0], 16 * old[1]), depth=1)
    table = model.pos_embed.detach().clone()
    wanted = resample_abs_pos_embed(
        table, new_size=list(new), old_size=list(old), num_prefix_tokens=1
    )
    retrofit.resize(model, (16 * new[0], 16 * new[1]), recipe="timm")
    assert (model.pos_embed - wanted).abs().max() <= 6e-6
    if model.pos_embed.shape == table.shape:
        assert apart(model.pos_embed, table) > 0.1


def test_a_resized_rectangle_serves_other_images_at_run_time() -> None:
    """Spectrogram to a rectangle, then an image of a third shape: its table comes from the second grid, at run time."""
    model = vit((128, 512), depth=1, dynamic_img_size=True)
    retrofit.resize(model, (160, 288))
    other = vit((160, 288), depth=1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        table = resample_abs_pos_embed(
            other.pos_embed, new_size=[6, 20], old_size=[10, 18], num_prefix_tokens=1
        )
    small = vit((96, 320), depth=1)
    state = other.state_dict()
    small.load_state_dict({**state, "pos_embed": table})
    x = torch.randn(1, 3, 96, 320, generator=torch.Generator().manual_seed(0))
    assert apart(features(model, x), features(small, x)) < 1e-6


def test_no_class_token_is_counted_where_there_is_none() -> None:
    """SigLIP at 384 in patches of 14 has 27 x 27 = 729 tokens and no class token; 728 and 730 are wrong."""
    with torch.device("meta"):
        model = timm.create_model("vit_so400m_patch14_siglip_384", depth=1, num_classes=0)
    (part,) = (part for part in retrofit.describe(model) if part.kind == "table")
    assert (part.shape[1], part.grid_hw, part.prefix) == (729, (27, 27), 0)


@pytest.mark.parametrize("name", ["hiera_small_abswin_256", "sam2_hiera_tiny"])
def test_error_windows_that_do_not_tile_the_map(name: str) -> None:
    """472 pixels are 118 cells, and windows of 8 leave 6 of them over."""
    model = BY_NAME[name].build()
    with pytest.raises(PositionError, match=r"472.*multiple of 32.*\(448, 448\) or \(480, 480\)"):
        retrofit.resize(model, (472, 472))
    assert retrofit.lineage(model).image_size_hw != (472, 472)


REFUSED = {
    "sam2_hiera_tiny": ((80, 96), r"not a multiple of 32; HieraDet"),
    "gcvit_xxtiny": ((240, 256), r"not a multiple of 32; GlobalContextVit"),
    "coatnet_nano_rw_224": ((80, 96), r"not a multiple of 32; MaxxVit"),
    "mvitv2_tiny": ((80, 96), r"not a multiple of 32; MultiScaleVit"),
    "resnet50_clip": ((80, 96), r"not a multiple of 32; ByobNet"),
    "volo_d1_224": ((72, 96), r"not a multiple of 16; VOLO.*\(64, 96\) or \(80, 96\)"),
    "tiny_vit_5m_224": ((80, 96), r"not a multiple of 32; TinyVit"),
    "efficientvit_m0": ((72, 96), r"not a multiple of 16; EfficientVitMsra"),
    "samvit_base_patch16": ((72, 96), r"not divisible into patches of \(16, 16\)"),
    "qwen3_vit_88m": ((72, 96), r"not divisible into patches of \(16, 16\)"),
    "naflexvit_base_patch16_gap": ((72, 96), r"not a multiple of 16; NaFlexVit"),
    "gemma4_vit_167m": ((97, 113), r"not a multiple of 16; Gemma4VitClassifier"),
    "csatv2": ((96, 128), r"not a multiple of 64; CSATv2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_sizes_that_a_class_would_crop_or_fail_at(name: str) -> None:
    family, (size, message) = BY_NAME[name], REFUSED[name]
    sizes = {} if family.sizeless else {"img_size": family.start}
    with torch.device("meta"):
        model = timm.create_model(name, **{**family.options, **sizes})
    with pytest.raises(PositionError, match=message):
        retrofit.resize(model, size)
