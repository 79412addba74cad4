"""A learned table that becomes an attachment, and fades out while a rotation fades in."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import visionpos as vp
from tests.retrofit.zoo import Case, apart, image, vit
from tests.tolerances import assert_close_to
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit import Schedule

CASES = (
    Case("vit_tiny_patch16_224"),  # one class row in the table
    Case("deit3_small_patch16_224"),  # none
    Case("vit_pwee_patch16_reg1_gap_256"),  # a register, and no row for it
    Case("vit_base_patch16_siglip_224"),  # no prefix token, attention pooling
    Case("vit_tiny_patch16_224", extra={"reg_tokens": 2}),  # rows for class token and registers
    Case("eva02_tiny_patch14_224", 14, "adjacent"),
    Case("vit_small_patch16_rope_mixed_ape_224", 16, "adjacent"),
)
IDS = [f"{case.name}{case.extra or ''}" for case in CASES]
SCHEDULE = Schedule(steps=4)


@torch.no_grad()
def scaled(case: Case, factor: float) -> Any:
    """Return the model with the cells of its table scaled by hand, prefix rows as they are: the oracle of a fade."""
    model = case.build()
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    model.pos_embed[:, prefix:] *= factor
    return model


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_lift_table_is_bit_identical(case: Case) -> None:
    model, x = case.build(), case.image()
    with torch.no_grad():
        expected = model.forward_features(x)
        lifted = retrofit.lift_table(model)
        assert torch.equal(model.forward_features(x), expected)
        inner = model.forward_intermediates(x, intermediates_only=True, norm=True)[-1]
        other = case.build().forward_intermediates(x, intermediates_only=True, norm=True)[-1]
        assert torch.equal(inner, other)
    assert model.pos_embed is None
    assert "pos_embed" not in model.state_dict()
    assert lifted.encoding.table.shape == (24, model.embed_dim)


@pytest.mark.parametrize("factor", [0.0, 0.25, 0.7])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_lift_table_strength_scales_the_cells_alone(case: Case, factor: float) -> None:
    """Rows of class token and registers stay in full, as the docstring says."""
    model, x = case.build(), case.image()
    retrofit.lift_table(model).set_strength(factor)
    with torch.no_grad():
        expected = scaled(case, factor).forward_features(x)
        assert_close_to(model.forward_features(x), expected)
    assert apart(expected, case.build().forward_features(x)) > 1e-2


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fade_table_detach_at_the_end_changes_nothing(case: Case) -> None:
    """0: the old model. Between: both. At the end the table is gone, and the outputs stay."""
    model, x = case.build(), case.image()
    spec = vp.AxialRopeSpec(pairing=case.pairing or "adjacent")
    with torch.no_grad():
        old = model.forward_features(x)
        ramp = retrofit.fade_table(model, spec, SCHEDULE, name="new")
        assert torch.equal(model.forward_features(x), old)
        halfway = scaled(case, 0.5)
        retrofit.attach(halfway, spec, strength=0.5)
        assert ramp.set(2, model) == {"table": 0.5, "new": 0.5}
        assert_close_to(model.forward_features(x), halfway.forward_features(x))
        assert ramp.set(4, model) == {"table": 0.0, "new": 1.0}
        expected = model.forward_features(x)
        retrofit.detach(model, "table")
        assert torch.equal(model.forward_features(x), expected)
        assert apart(expected, old) > 1e-2
    assert list(retrofit.attachments(model)) == ["new"]


def test_fade_table_alone_beside_an_own_rope() -> None:
    model = Case("vit_small_patch16_rope_mixed_ape_224", 16, "adjacent").build()
    ramp = retrofit.fade_table(model, None, SCHEDULE)
    assert ramp.set(3, model) == {"table": 0.25}
    assert list(retrofit.attachments(model)) == ["table"]


@pytest.mark.parametrize("schedule", [SCHEDULE, Schedule(steps=4, start=0.2, end=0.8)])
def test_fade_table_starts_where_its_ramp_starts(schedule: Schedule) -> None:
    """Without a call of the ramp: a model that is evaluated before training is that of step 0."""
    model = vit()
    ramp = retrofit.fade_table(model, vp.AxialRopeSpec(), schedule, name="new")
    strengths = {name: part.strength for name, part in retrofit.attachments(model).items()}
    assert strengths == ramp.at(0) == {"table": schedule.end, "new": schedule.start}


def test_fade_table_trains_both_and_the_table_last() -> None:
    """Gradients of the table shrink with its strength, and its Parameter is in the groups without decay."""
    model = vit().train()
    ramp = retrofit.fade_table(model, vp.MixedRopeSpec(), SCHEDULE, name="new")
    table = retrofit.attachments(model)["table"].encoding.table
    groups = retrofit.parameter_groups(model, weight_decay=0.1)
    (mine,) = [group for group in groups if any(weight is table for weight in group["params"])]
    assert mine["weight_decay"] == 0.0
    norms = []
    for step in range(5):
        ramp.set(step, model)
        model.zero_grad()
        model(image((64, 96))).square().mean().backward()
        norms.append(0.0 if table.grad is None else float(table.grad.norm()))
    assert norms == sorted(norms, reverse=True)
    assert norms[0] > 0 == norms[-1]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_fade_table_save_load_and_describe(name: str, tmp_path: Path) -> None:
    case = Case(name, 14 if "14" in name else 16, "adjacent")
    model, x = case.build(), case.image()
    ramp = retrofit.fade_table(model, vp.AxialRopeSpec(), SCHEDULE, name="new")
    ramp.set(1, model)
    details = {part.path: part.detail for part in retrofit.describe(model)}
    assert "pos_embed" not in details
    assert "strength 0.75" in details["visionpos.table"]
    assert "learned(" in details["visionpos.table"]
    assert "strength 0.25" in details["visionpos.new"]
    retrofit.save(model, tmp_path / "half.safetensors")
    found = vp.checkpoint.read_lineage(tmp_path / "half.safetensors")
    assert found.tables == {}
    assert found.encodings["table"]["spec"]["grid_hw"] == [4, 6]
    again = case.build()
    for weight in again.parameters():
        weight.data.mul_(2.0)
    retrofit.fade_table(again, vp.AxialRopeSpec(), SCHEDULE, name="new")
    retrofit.load(again, tmp_path / "half.safetensors")
    with torch.no_grad():
        assert torch.equal(again.forward_features(x), model.forward_features(x))
    with pytest.raises(PositionError, match="does not fit this model"):
        retrofit.load(case.build(), tmp_path / "half.safetensors")


@pytest.mark.parametrize("gone", [False, True])
def test_fade_table_restore_from_the_file_alone(gone: bool, tmp_path: Path) -> None:
    """Also after the table has gone: the model that `restore` builds has none either."""
    torch.manual_seed(5)
    model: Any = retrofit.create("vit_tiny_patch16_224", size_hw=(64, 96))
    ramp = retrofit.fade_table(model, vp.AxialRopeSpec(), SCHEDULE, name="new")
    ramp.set(4 if gone else 3, model)
    if gone:
        retrofit.detach(model, "table")
    retrofit.save(model, tmp_path / "faded.safetensors")
    again: Any = retrofit.restore(tmp_path / "faded.safetensors")
    assert again.pos_embed is None
    x = image((64, 96))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_lift_table_follows_a_resize_as_the_table_would() -> None:
    """Before or after: the attachment is evaluated on the new grid from the grid it was trained on."""
    before, after, plain = vit(), vit(), vit()
    retrofit.resize(before, (96, 48))
    retrofit.lift_table(before)
    retrofit.lift_table(after)
    retrofit.resize(after, (96, 48))
    retrofit.resize(plain, (96, 48))
    x = image((96, 48))
    with torch.no_grad():
        expected = plain.forward_features(x)
        assert_close_to(before.forward_features(x), expected)
        assert_close_to(after.forward_features(x), expected)
    assert retrofit.attachments(before)["table"].encoding.spec.grid_hw == (4, 6)


def test_lift_table_serves_dynamic_sizes_like_interpolate() -> None:
    """The oracle is F.interpolate, bicubic and antialiased, which timm runs for every image."""
    model, timms = vit(dynamic_img_size=True), vit(dynamic_img_size=True)
    retrofit.lift_table(model, recipe="timm")
    table = timms.pos_embed.detach()
    cells = table[:, 1:].reshape(1, 4, 6, -1).permute(0, 3, 1, 2)
    moved = F.interpolate(cells, size=(7, 5), mode="bicubic", antialias=True)
    rows = retrofit.attachments(model)["table"].encoding(vp.Grid(7, 5))
    assert_close_to(rows, moved[0].flatten(1).T)
    x = image((112, 80))
    with torch.no_grad():
        assert_close_to(model.forward_features(x), timms.forward_features(x))


def test_lift_table_copies_and_keeps_whether_it_trains() -> None:
    model = vit()
    model.pos_embed.requires_grad_(False)
    source = copy.deepcopy(model.state_dict())
    lifted = retrofit.lift_table(model)
    weight: Tensor = lifted.encoding.table
    assert not weight.requires_grad
    assert torch.equal(weight, source["pos_embed"][0, 1:])
    assert torch.equal(model.cls_token, source["cls_token"] + source["pos_embed"][:, :1])


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: Case("deit_tiny_distilled_patch16_224").build(),
            "VisionTransformerDistilled, whose positions are no table that",
        ),
        (
            lambda: Case("vit_small_patch16_dinov3", 16, "half").build(),
            "model has no learned table",
        ),
    ],
)
def test_fade_table_error(build: Any, match: str) -> None:
    model = build()
    keys = list(model.state_dict())
    with pytest.raises(PositionError, match=match):
        retrofit.fade_table(model, vp.AxialRopeSpec(pairing="half"), SCHEDULE)
    assert list(model.state_dict()) == keys


def test_fade_table_error_of_names_and_recipes() -> None:
    model = vit()
    keys = list(model.state_dict())
    with pytest.raises(PositionError, match="name is 'table', which the lifted table has"):
        retrofit.fade_table(model, vp.AxialRopeSpec(), SCHEDULE, name="table")
    with pytest.raises(PositionError, match="recipe"):
        retrofit.fade_table(model, vp.AxialRopeSpec(), SCHEDULE, recipe="no such one")
    assert list(model.state_dict()) == keys
    retrofit.attach(model, vp.SinCosSpec(), name="table")
    with pytest.raises(PositionError, match="'table' is already attached"):
        retrofit.lift_table(model)
