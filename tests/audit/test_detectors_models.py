"""Detectors on timm models, plain and retrofitted: what is on record is found without being told where."""

import pytest
import timm
import torch

import visionpos as vp
from visionpos import retrofit
from visionpos.audit.detectors import applies, detect, did_fail


def vit(**options):
    small = {"embed_dim": 48, "num_heads": 3, "depth": 2, "num_classes": 0, "img_size": 64}
    return timm.create_model("vit_tiny_patch16_224", **small | options)


def said(target, *names):
    found = {one.detector: one for one in detect(target, list(names) or None)}
    assert not [one for one in found.values() if did_fail(one)]
    return found


def alarms(target, *names):
    return {name for name, one in said(target, *names).items() if one.alarm}


SPECS = [vp.AxialRopeSpec(), vp.MixedRopeSpec(), vp.AlibiSpec(), vp.SinCosSpec()]


@pytest.mark.parametrize("spec", [None, *SPECS], ids=lambda one: getattr(one, "kind", "plain"))
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_healthy_model_raises_no_alarm(spec, dynamic) -> None:
    model = vit(dynamic_img_size=dynamic)
    if spec is not None:
        retrofit.attach(model, spec, strength=1.0)
    found = said(model)
    assert not [one for one in found.values() if one.alarm]
    assert applies(found["shared_state"])
    assert applies(found["frozen_copy"])


def test_a_model_is_as_it_was() -> None:
    model = vit(dynamic_img_size=True).train()
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.5)
    model.set_grad_checkpointing(enable=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    detect(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())
    assert model.grad_checkpointing
    assert [part.constant for part in retrofit.attachments(model).values()] == [0.5]
    assert torch.equal(torch.get_rng_state(), state)


def closed_over(model):
    """A retrofit as it is often written: hooks that close over the model, and one place for the grid of the call."""
    axial = vp.build(vp.MixedRopeSpec(), retrofit.dims_of(model))
    model.extra = axial
    now = {}

    def note(_module, args, _out):
        now["grid"] = vp.Grid(args[0].shape[-2] // 16, args[0].shape[-1] // 16)

    def turn(_module, _args, out):
        return axial(now["grid"]).padded(1).apply(out)

    model.patch_embed.register_forward_hook(note)
    for block in model.blocks:
        block.attn.q_norm.register_forward_hook(turn)
        block.attn.k_norm.register_forward_hook(turn)
    return model


def test_a_grid_in_one_place_is_caught_across_checkpointed_crops() -> None:
    assert alarms(closed_over(vit(dynamic_img_size=True)), "shared_state") == {"shared_state"}


def test_a_copy_that_follows_the_original_is_caught() -> None:
    model = vit()
    table, model.pos_embed = model.pos_embed, None
    model.visionpos = torch.nn.ParameterDict({"table": table})
    model.patch_embed.register_forward_hook(lambda _m, _i, out: out + table[:, 1:])
    assert alarms(model, "frozen_copy") == {"frozen_copy"}


def test_rows_shifted_by_a_class_token_are_caught() -> None:
    y, x = torch.meshgrid(torch.arange(8) / 8, torch.arange(8) / 8, indexing="ij")
    waves = torch.rand(2, 48, generator=torch.Generator().manual_seed(0)) * 6
    smooth = (y[..., None] * waves[0] + x[..., None] * waves[1]).sin().flatten(0, 1)
    model = vit(img_size=128)
    for shift, caught in ((0, set()), (1, {"class_token_offset"})):
        with torch.no_grad():
            model.pos_embed[0, 1:] = smooth.roll(shift, 0)
        assert alarms(model, "class_token_offset") == caught


def test_a_position_that_does_nothing_is_caught() -> None:
    model = vit()
    with torch.no_grad():
        model.pos_embed.mul_(1e-7)
    assert alarms(model, "dead_scheme") == {"dead_scheme"}


def test_attention_that_pairs_otherwise_than_its_table_is_caught() -> None:
    options = {"img_size": 64, "num_classes": 0, "depth": 2, "embed_dim": 64, "num_heads": 2}
    model = timm.create_model("vit_small_patch16_rope_224", **options)
    assert alarms(model, "pairing_mismatch") == set()
    model.blocks[0].attn.rotate_half = not model.blocks[0].attn.rotate_half
    assert alarms(model, "pairing_mismatch") == {"pairing_mismatch"}


def test_defects_on_record_are_found_in_timm() -> None:
    """Order dependence of NaFlex, a fixed rotary table, a bias kept in eval mode, frequencies cast to bfloat16."""
    few = {"num_classes": 0, "depth": 2, "embed_dim": 64, "num_heads": 2}
    naflex = timm.create_model("naflexvit_base_patch16_gap", **few)
    assert "order_dependence" in alarms(naflex, "order_dependence")
    rope = timm.create_model("vit_small_patch16_rope_224", img_size=64, **few)
    assert "stale_cache" in alarms(rope, "stale_cache")
    mixed = timm.create_model("vit_small_patch16_rope_mixed_224", img_size=64, **few)
    assert "precision" in alarms(mixed, "precision")
    levit = timm.create_model("levit_128s", num_classes=0)
    assert "stale_cache" in alarms(levit, "stale_cache")


def test_patches_with_coordinates_pass_where_the_table_is_sampled_at_them() -> None:
    few = {"num_classes": 0, "depth": 2, "embed_dim": 64, "num_heads": 2}
    model = timm.create_model("naflexvit_base_patch16_gap", pos_embed="none", **few)
    assert alarms(model, "order_dependence") == set()


def test_a_model_of_another_kind_is_answered() -> None:
    found = detect(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()))
    assert not [one for one in found if one.alarm]
    assert not applies(next(one for one in found if one.detector == "frozen_copy"))
