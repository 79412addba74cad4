"""resize: every position part follows to a new image size, from its source, without loss, or nothing changes at all."""

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import resample_abs_pos_embed
from torch import Tensor

import visionpos as vp
from tests.reference import resampling as reference_resampling
from tests.retrofit.zoo import (
    CASES,
    NAMED,
    Case,
    apart,
    axial,
    create,
    hand_rotation,
    image,
    opened,
    vit,
)
from tests.strategies import grids
from tests.tolerances import assert_close_to
from visionpos import retrofit
from visionpos.errors import ConfigError, PositionError
from visionpos.retrofit.resize import table_record
from visionpos.retrofit.seams import grid_of, table_prefix

SIZES = [(96, 128), (32, 96), (96, 64), (64, 96), (16, 16), (16, 160), (128, 128)]
WITHOUT = ("rope_224", "rope_mixed_224", "dinov3", "rope_reg4")
TABLES = [
    pytest.param(case, marks=pytest.mark.slow) if "r26" in case.name else case
    for case in NAMED
    if not any(part in case.name for part in WITHOUT)
]


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def bookkeeping(model: Any) -> dict[str, Any]:
    """Return what a size is written down as, besides tensors."""
    patch = model.patch_embed
    plain = {
        name: getattr(patch, name, None)
        for name in ("img_size", "grid_size", "num_patches", "feature_size")
    }
    rope = getattr(model, "rope", None)
    return plain | {"feat_shape": None if rope is None else getattr(rope, "feat_shape", None)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity_with_timms_own_resize(case: Case) -> None:
    """Recipe "timm" is what set_input_size does, to a few units of float32; all bookkeeping is timm's own."""
    model, other = case.build(), case.build()
    size = (case.patch * 5, case.patch * 3)
    retrofit.resize(model, size, recipe="timm")
    other.set_input_size(img_size=size)
    assert bookkeeping(model) == bookkeeping(other)
    assert list(model.state_dict()) == list(other.state_dict())
    if model.pos_embed is not None:
        assert (model.pos_embed - other.pos_embed).abs().max() <= 6e-6
    x = image(size)
    with torch.no_grad():
        assert apart(model.forward_features(x), other.forward_features(x)) < 1e-5


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case.name)
def test_parity_with_a_model_created_at_the_size(case: Case) -> None:
    """Nothing that knows a size is forgotten: with the same weights the result is the model made at that size."""
    model = case.build()
    size = (case.patch * 5, case.patch * 3)
    retrofit.resize(model, size)
    fresh = create(case.name, size, **case.extra)
    fresh.load_state_dict(model.state_dict())
    assert bookkeeping(model) == bookkeeping(fresh)
    x = image(size)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), fresh.forward_features(x))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("timm", {"kernel": "bicubic", "a": -0.5, "antialias": True}),
        ("mae", {"kernel": "bicubic", "a": -0.75}),
        ("dinov2", {"kernel": "bicubic", "a": -0.75, "drift": 0.1}),
        ("big_vision", {"kernel": "bilinear", "align_corners": True}),
        ("nearest", {"kernel": "nearest"}),
    ],
)
@pytest.mark.parametrize("size", [(96, 128), (32, 48), (80, 16)], ids=str)
def test_reference_recipes_on_the_models_table(
    recipe: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    """The table on the new grid is that of the float64 loops, prefix rows untouched."""
    model = vit(reg_tokens=2)
    table = model.pos_embed.detach().clone()
    retrofit.resize(model, size, recipe=recipe)
    rows = reference_resampling.weights(4, size[0] // 16, **options)
    columns = reference_resampling.weights(6, size[1] // 16, **options)
    cells = table[0, 3:].double().numpy().reshape(4, 6, 64)
    wanted = reference_resampling.resize(cells, rows, columns).reshape(-1, 64)
    assert_close_to(model.pos_embed.detach()[0, 3:], torch.from_numpy(wanted), kind="applied")
    assert torch.equal(model.pos_embed[:, :3], table[:, :3])


@given(
    grids(max_side=9), grids(max_side=9), st.booleans(), st.sampled_from([0, 1, 4]), st.booleans()
)
def test_parity_recipe_timm_over_rectangles(
    source: tuple[int, int], target: tuple[int, int], cls: bool, reg: int, bare: bool
) -> None:
    kinds = {"class_token": cls, "reg_tokens": reg, "no_embed_class": bare}
    model = create(
        "vit_tiny_patch16_224",
        (16 * source[0], 16 * source[1]),
        depth=1,
        embed_dim=8,
        global_pool="avg",
        **kinds,
    )
    opened(model)
    prefix = 0 if bare else cls + reg
    wanted = resample_abs_pos_embed(
        model.pos_embed.detach().clone(),
        new_size=list(target),
        old_size=list(source),
        num_prefix_tokens=prefix,
    )
    retrofit.resize(model, (16 * target[0], 16 * target[1]), recipe="timm")
    assert (model.pos_embed - wanted).abs().max() <= 6e-6
    assert grid_of(model) == vp.Grid(*target)


def test_a_4x9_table_is_never_taken_for_6x6() -> None:
    """Equal token counts, different grids: the table is resampled, and knows its own sides."""
    model = vit((64, 144))
    table = model.pos_embed.detach().clone()
    retrofit.resize(model, (96, 96), recipe="timm")
    assert model.pos_embed.shape == table.shape
    wanted = resample_abs_pos_embed(table, new_size=[6, 6], old_size=[4, 9], num_prefix_tokens=1)
    assert (model.pos_embed - wanted).abs().max() <= 6e-6
    assert apart(model.pos_embed, table) > 0.1
    retrofit.resize(model, (144, 64), recipe="timm")
    wanted = resample_abs_pos_embed(table, new_size=[9, 4], old_size=[4, 9], num_prefix_tokens=1)
    assert (model.pos_embed - wanted).abs().max() <= 6e-6


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case.name)
def test_there_and_back_is_exact(case: Case) -> None:
    """A chain of sizes loses nothing: every table is evaluated from the one that was trained."""
    model, x = case.build(), case.image()
    before = state(model)
    with torch.no_grad():
        features = model.forward_features(x)
        for rows, columns in ((5, 7), (2, 3), (9, 1), case.grid_hw):
            retrofit.resize(model, (rows * case.patch, columns * case.patch))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(model.forward_features(x), features)


@pytest.mark.parametrize("recipe", [None, "timm", "nearest"])
def test_a_chain_is_the_straight_way(recipe: str | None) -> None:
    chain, straight = vit(), vit()
    for size in SIZES:
        retrofit.resize(chain, size, recipe="mae")
    retrofit.resize(chain, (96, 160), recipe=recipe)
    retrofit.resize(straight, (96, 160), recipe=recipe)
    assert torch.equal(chain.pos_embed, straight.pos_embed)


def test_training_in_between_makes_the_table_its_own_source() -> None:
    model, other = vit(), vit()
    retrofit.resize(model, (96, 128), recipe="timm")
    with torch.no_grad():
        model.pos_embed += 0.1
    trained = model.pos_embed.detach().clone()
    assert table_record(model) is None
    retrofit.resize(model, (64, 96), recipe="timm")
    wanted = resample_abs_pos_embed(trained, new_size=[4, 6], old_size=[6, 8], num_prefix_tokens=1)
    assert (model.pos_embed - wanted).abs().max() <= 6e-6
    assert apart(model.pos_embed, other.pos_embed) > 0.05
    record = table_record(model)
    assert (record.source_grid, record.grid) == (vp.Grid(6, 8), vp.Grid(4, 6))
    retrofit.resize(model, (96, 128), recipe="timm")
    assert torch.equal(model.pos_embed, trained)


def test_one_trained_row_is_enough() -> None:
    model = vit()
    retrofit.resize(model, (96, 128))
    with torch.no_grad():
        model.pos_embed[0, 0, 0] += 1e-3  # the class token's row alone
    retrofit.resize(model, (64, 96))
    assert table_record(model).source_grid == vp.Grid(6, 8)


def test_the_same_size_changes_nothing() -> None:
    model = vit()
    before, table = state(model), model.pos_embed
    retrofit.resize(model, (64, 96))
    assert model.pos_embed is table
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case.name)
def test_the_parameter_keeps_its_identity(case: Case) -> None:
    """An optimizer built before still holds the table; a frozen table stays frozen."""
    model = case.build()
    table, names = model.pos_embed, [name for name, _ in model.named_parameters()]
    table.requires_grad_(False)
    table.grad = None
    retrofit.resize(model, (case.patch * 5, case.patch * 3))
    assert model.pos_embed is table
    assert [name for name, _ in model.named_parameters()] == names
    assert not table.requires_grad
    assert table.is_leaf


@pytest.mark.parametrize("kind", ["AdamW", "amsgrad", "SGD", "RAdam", "Adafactor"])
def test_optimizer_goes_on(kind: str) -> None:
    """Moments follow the table cell by cell, second moments stay above zero, and the next step runs."""
    model = vit().train()
    made = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    }
    optimizer = made[kind](model.parameters())

    def step(size: tuple[int, int]) -> None:
        optimizer.zero_grad()
        model.forward_features(image(size)).square().sum().backward()
        optimizer.step()

    step((64, 96))
    step((64, 96))
    table = model.pos_embed
    old = {key: value.clone() for key, value in optimizer.state[table].items() if value.ndim == 3}
    retrofit.resize(model, (96, 128), recipe="timm", optimizer=optimizer)
    assert table.grad is None
    for key, value in old.items():
        moved = optimizer.state[table][key]
        if value.shape[1] != 25:
            assert torch.equal(moved, value)
            continue
        wanted = vp.resample(
            value, source=vp.Grid(4, 6), target=vp.Grid(6, 8), recipe="timm", prefix=1
        )
        positive = bool((value >= 0).all())
        assert_close_to(moved, wanted.clamp(min=0) if positive else wanted, kind="table")
        assert (moved >= 0).all() or not positive
    before = table.detach().clone()
    step((96, 128))
    assert not torch.equal(table, before)
    assert table.isfinite().all()
    retrofit.resize(model, (64, 96), optimizer=optimizer)
    step((64, 96))


def test_optimizer_that_does_not_hold_the_table() -> None:
    model = vit()
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    retrofit.resize(model, (96, 128), optimizer=optimizer)
    assert model.pos_embed.shape == (1, 49, 64)


def test_without_the_optimizer_the_next_step_fails_loudly() -> None:
    """What `optimizer=` is for: stale moments have the old shape."""
    model = vit().train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.forward_features(image((64, 96))).sum().backward()
    optimizer.step()
    retrofit.resize(model, (96, 128))
    optimizer.zero_grad()
    model.forward_features(image((96, 128))).sum().backward()
    with pytest.raises(RuntimeError, match=r"size"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_table_is_kept(dtype: torch.dtype) -> None:
    model = vit().to(dtype)
    before = model.pos_embed.detach().clone()
    retrofit.resize(model, (96, 128))
    assert model.pos_embed.dtype == dtype
    retrofit.resize(model, (64, 96))
    assert torch.equal(model.pos_embed, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_between_two_resizes(dtype: torch.dtype) -> None:
    """A cast changes no more of the table than rounding: the trained source is not thrown away for it."""
    model = vit()
    source = model.pos_embed.detach().clone()
    retrofit.resize(model, (96, 128))
    model.to(dtype)
    retrofit.resize(model, (64, 96))
    assert model.pos_embed.dtype == dtype
    assert torch.equal(model.pos_embed, source.to(dtype))


def test_a_copy_and_the_original_go_their_own_ways() -> None:
    model = vit()
    retrofit.resize(model, (96, 128))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.pos_embed += 1.0
    retrofit.resize(model, (64, 96))
    retrofit.resize(twin, (64, 96))
    assert torch.equal(model.pos_embed, vit().pos_embed)
    assert apart(twin.pos_embed, model.pos_embed) > 0.1


@pytest.mark.parametrize(
    "kind",
    [vp.AxialRopeSpec(), vp.MixedRopeSpec(), vp.SinCosSpec(), vp.LearnedSpec(grid_hw=(4, 6))],
    ids=lambda s: s.kind,
)
def test_attached_encodings_follow(kind: Any) -> None:
    """After a resize an attachment serves the new grid; the features are those of a model resized first."""
    torch.manual_seed(2)
    model, late = vit(), vit()
    torch.manual_seed(3)
    retrofit.attach(model, kind, strength=1.0)
    retrofit.resize(model, (96, 128))
    retrofit.resize(late, (96, 128))
    torch.manual_seed(3)
    retrofit.attach(late, kind, strength=1.0)
    x = image((96, 128))
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), late.forward_features(x))


def test_reference_extent_of_an_attached_rotation() -> None:
    """ "trained" keeps the span of the grid the model served, "index" runs on, and None keeps the habit: index."""
    x = image((96, 128))
    plain = vit()
    retrofit.resize(plain, (96, 128))
    for extent, scale in (
        ("trained", np.array([4 / 6, 6 / 8])),
        ("index", np.ones(2)),
        (None, np.ones(2)),
    ):
        model, by_hand = vit(), copy.deepcopy(plain)
        attachment = retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
        retrofit.resize(model, (96, 128), extent=extent)
        table = axial(6, 8).reshape(6, 8, 2, 8) * scale[:, None]
        hand_rotation(by_hand, table.reshape(48, 16), prefix=1)
        with torch.no_grad():
            assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6
        assert attachment.encoding.coords.extent == ("trained" if extent == "trained" else None)


def test_extent_of_two_attachments_and_the_models_own() -> None:
    model = Case("vit_small_patch16_dinov3").build()
    retrofit.attach(model, vp.AxialRopeSpec(pairing="half"), strength=0.5, name="one")
    retrofit.attach(model, vp.MixedRopeSpec(pairing="half"), strength=0.5, name="two")
    retrofit.attach(model, vp.SinCosSpec(), strength=0.5, name="three")
    retrofit.resize(model, (96, 128), extent="trained")
    specs = {name: part.encoding.spec for name, part in retrofit.attachments(model).items()}
    assert specs["one"].coords.trained_shape == (4, 6)
    assert specs["two"].coords.trained_shape == (4, 6)
    assert not isinstance(model.rope, retrofit.GridRope)
    with torch.no_grad():
        assert model.forward_features(image((96, 128))).isfinite().all()


HOSTILE = [
    (100, 96),
    (64, 100),
    (0, 96),
    (64, 0),
    (-64, 96),
    (64,),
    (64, 96, 3),
    64,
    None,
    ("64", "wide"),
    (float("nan"), 96),
    (float("inf"), 96),
    (64.5, 96),
    (True, 16),
    "64",
    (1 << 70, 96),
]


@pytest.mark.parametrize("size", HOSTILE, ids=str)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224"])
def test_error_size_leaves_the_model_as_it_was(name: str, size: Any) -> None:
    model = Case(name).build()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    before, books, parameters = state(model), bookkeeping(model), list(model.parameters())
    with pytest.raises(PositionError, match=r"size_hw .*multiples of the patch"):
        retrofit.resize(model, size, extent="trained")
    assert_unchanged(model, before, books, parameters)


def assert_unchanged(
    model: Any, before: dict[str, Tensor], books: Any, parameters: list[Any]
) -> None:
    assert bookkeeping(model) == books
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert table_record(model) is None
    with torch.no_grad():
        model.forward_features(image((64, 96)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "bicubic"}, r"recipe is 'bicubic'; it must be a Recipe or one of"),
        ({"recipe": "beit"}, r"geometric"),
        ({"extent": "wider"}, r"extent is 'wider'; it must be 'trained', 'index' or None"),
        ({"extent": ""}, r"extent is ''"),
    ],
)
def test_error_options_leave_the_model_as_it_was(options: dict[str, Any], message: str) -> None:
    model = vit()
    before, books, parameters = state(model), bookkeeping(model), list(model.parameters())
    with pytest.raises(PositionError, match=message):
        retrofit.resize(model, (96, 128), **options)
    assert_unchanged(model, before, books, parameters)


def test_error_extent_of_an_attachment_leaves_the_model_as_it_was() -> None:
    """Coordinates pinned to the edges cannot run on: found out before the table moves."""
    model = vit()
    coords = vp.CoordSpec(unit="endpoint")
    attachment = retrofit.attach(model, vp.AxialRopeSpec(coords=coords), strength=1.0)
    before, books, parameters = state(model), bookkeeping(model), list(model.parameters())
    with pytest.raises(PositionError, match=r"extent 'index' is not defined for unit 'endpoint'"):
        retrofit.resize(model, (96, 128), extent="index")
    assert_unchanged(model, before, books, parameters)
    assert attachment.encoding.coords == coords


def test_error_a_table_of_another_grid() -> None:
    """A table whose rows do not fit the grid is refused, not squared."""
    model = vit()
    model.pos_embed = torch.nn.Parameter(torch.randn(1, 37, 64))
    with pytest.raises(PositionError, match=r"table has 37 rows; prefix 1 \+ grid 4x6"):
        retrofit.resize(model, (96, 128))
    assert model.patch_embed.img_size == (64, 96)


def test_error_models_without_a_row_or_a_grid() -> None:
    with pytest.raises(PositionError, match=r"no class that visionpos knows"):
        retrofit.resize(timm.create_model("resnet18"), (64, 64))
    wrapped = timm.create_model("vit_tiny_patch16_224", depth=3, features_only=True)
    with pytest.raises(PositionError, match=r"Unwrap the timm model first"):
        retrofit.resize(wrapped, (64, 64))
    model = vit(dynamic_img_size=True)
    model.patch_embed.grid_size = None
    with pytest.raises(PositionError, match=r"model has no grid.*img_size="):
        retrofit.resize(model, (96, 128))


def test_numbers_that_are_whole_are_sizes() -> None:
    """numpy integers and floats without a remainder do not surprise."""
    model = vit()
    retrofit.resize(model, (np.int64(96), np.int64(128)))
    assert model.patch_embed.img_size == (96, 128)
    assert all(type(side) is int for side in model.patch_embed.img_size)


@pytest.mark.parametrize("patch", [(16, 8), (8, 16)], ids=str)
def test_patches_that_are_no_squares(patch: tuple[int, int]) -> None:
    model = vit(patch_size=patch)
    retrofit.resize(model, (6 * patch[0], 5 * patch[1]))
    assert grid_of(model) == vp.Grid(6, 5)
    with pytest.raises(PositionError, match=r"not divisible into patches of \(16, 8\)|\(8, 16\)"):
        retrofit.resize(model, (6 * patch[0], 5 * patch[1] + 4))


def test_hybrid_counts_the_stride_of_its_stem() -> None:
    model = Case("vit_small_r26_s32_224", 32, grid_hw=(2, 3)).build()
    retrofit.resize(model, (96, 128))
    assert grid_of(model) == vp.Grid(3, 4)
    with pytest.raises(PositionError, match=r"patches of \(32, 32\)"):
        retrofit.resize(model, (96, 112))


def test_training_goes_on_with_patch_dropout_and_checkpoints() -> None:
    model = vit(patch_drop_rate=0.5).train()
    model.set_grad_checkpointing(True)
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.5, learn_strength=True)
    retrofit.resize(model, (96, 128), extent="trained")
    model.forward_features(image((96, 128))).square().sum().backward()
    assert model.pos_embed.grad.shape == (1, 49, 64)


def test_a_grid_that_the_model_can_serve_at_run_time() -> None:
    """A dynamic model resamples from the resized table; at its own size the table is read as it is."""
    model = vit(dynamic_img_size=True)
    retrofit.resize(model, (96, 128))
    static = vit()
    retrofit.resize(static, (96, 128))
    x = image((96, 128))
    with torch.no_grad():
        assert apart(model.forward_features(x), static.forward_features(x)) < 1e-6
        assert model.forward_features(image((32, 64))).shape == (2, 9, 64)


RECIPES_OF = {
    "vit_small_patch14_dinov2.lvd142m": "dinov2",
    "vit_small_patch14_reg4_dinov2.lvd142m": "dinov2_reg",
    "vit_base_patch16_siglip_224.webli": "big_vision",
    "vit_base_patch16_siglip_256.v2_webli": "big_vision",
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": "big_vision",
    "vit_base_patch16_224.mae": "mae",
    "deit3_small_patch16_224.fb_in1k": "mae",
    "deit_tiny_distilled_patch16_224.fb_in1k": "mae",
    "eva02_tiny_patch14_224.mim_in22k": "mae",
    "vit_small_patch16_rope_ape_224.naver_in1k": "mae",
    "vit_base_patch32_clip_224.openai": "timm",
    "vit_pe_core_tiny_patch16_384.fb": "perception_encoder",
    "vit_small_patch16_224.dino": "dinov2",
    "flexivit_small.1200ep_in1k": "flexivit",
    "vit_base_patch16_224.orig_in21k": "big_vision",
    "vit_base_patch16_224.sam_in1k": "big_vision",
    "vit_medium_patch16_gap_256.sw_in12k_ft_in1k": "timm",
}


@pytest.mark.parametrize("name", RECIPES_OF)
def test_recipe_of_the_source_that_wrote_the_weights(name: str) -> None:
    assert timm.is_model_pretrained(name), "timm knows this checkpoint"
    model = create(name, None, depth=1)
    recipe, reason = retrofit.recipe_for(model)
    assert recipe == RECIPES_OF[name]
    assert name in reason
    assert "matches" in reason


def test_recipe_of_every_checkpoint_is_known() -> None:
    """Every pretrained name of both classes gets a recipe that exists."""
    seen = set()
    for name in (
        timm.list_pretrained("*vit*")
        + timm.list_pretrained("*deit*")
        + timm.list_pretrained("eva*")
    ):
        architecture, _, tag = name.partition(".")
        stub = type("Stub", (), {"pretrained_cfg": {"architecture": architecture, "tag": tag}})
        recipe, _ = retrofit.recipe_for(stub())
        assert recipe in vp.RECIPES
        seen.add(recipe)
    assert {"timm", "mae", "dinov2", "dinov2_reg", "big_vision"} <= seen


def test_recipe_without_a_name() -> None:
    assert retrofit.recipe_for(torch.nn.Identity())[0] == "timm"
    assert "unnamed model" in retrofit.recipe_for(torch.nn.Identity())[1]


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_dinov2", "vit_base_patch16_siglip_224", "deit3_small_patch16_224"]
)
def test_the_default_recipe_is_used(name: str) -> None:
    """A different recipe gives a different table, so the choice is not idle."""
    case = next(case for case in NAMED if case.name == name)
    size = (case.patch * 2, case.patch * 3)
    tables = {}
    for recipe in (None, retrofit.recipe_for(case.build())[0], "timm"):
        model = case.build()
        retrofit.resize(model, size, recipe=recipe)
        tables[recipe] = model.pos_embed.detach().clone()
        assert table_record(model).recipe == (recipe or retrofit.recipe_for(model)[0])
    own = retrofit.recipe_for(case.build())[0]
    assert torch.equal(tables[None], tables[own])
    assert apart(tables[own], tables["timm"]) > 0.01


def test_recipe_table_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visionpos.retrofit.recipes._patterns", lambda: (("eva*", "mae"),))
    with pytest.raises(ConfigError, match=r"no final pattern"):
        retrofit.recipe_for(torch.nn.Identity())


@pytest.mark.parametrize(
    ("cls", "reg", "bare"),
    [(c, r, b) for c in (True, False) for r in (0, 1, 4) for b in (False, True)],
    ids=str,
)
def test_prefix_rows_are_read_from_the_model(cls: bool, reg: int, bare: bool) -> None:
    model = vit(
        class_token=cls, reg_tokens=reg, no_embed_class=bare, global_pool="token" if cls else "avg"
    )
    rows = 0 if bare else cls + reg
    assert table_prefix(model) == rows
    before = model.pos_embed.detach().clone()
    retrofit.resize(model, (96, 128))
    assert model.pos_embed.shape == (1, rows + 48, 64)
    assert torch.equal(model.pos_embed[:, :rows], before[:, :rows])
    with torch.no_grad():
        assert model.forward_features(image((96, 128))).shape == (2, cls + reg + 48, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_224",
        "vit_small_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "deit3_small_patch16_224",
        "eva02_small_patch14_224",
        "vit_small_patch16_dinov3",
        "vit_small_patch16_rope_mixed_ape_224",
    ],
)
def test_models_of_full_depth(name: str) -> None:
    """Registered models as they are: resize to a rectangle, there and back, against timm."""
    model, other = timm.create_model(name).eval(), timm.create_model(name).eval()
    opened(model)
    opened(other)
    patch = model.patch_embed.patch_size[0]
    home, size = model.patch_embed.img_size, (patch * 10, patch * 15)
    before = state(model)
    retrofit.resize(model, size, recipe="timm")
    other.set_input_size(img_size=size)
    x = image(size, batch=1)
    with torch.no_grad():
        assert apart(model.forward_features(x), other.forward_features(x)) < 1e-5
    retrofit.resize(model, home)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
