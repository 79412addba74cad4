"""What a user does without thinking of positions: keeps a loss, compiles first, shares a block."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json

import pytest
import timm
import torch
from torch import nn

import visionpos as vp
from tests.retrofit.families import FAMILIES, features
from tests.retrofit.zoo import apart, image, vit
from visionpos import PositionError, checkpoint, config, retrofit
from visionpos.retrofit.biasing import ADDED, class_of

FULL = {"strength": 1.0}


def test_state_ends_with_the_call():
    """Tokens that bear no mark of a call find none, not the last one of equal token count."""
    model = vit(dynamic_img_size=True)
    retrofit.attach(model, vp.AxialRopeSpec(), **FULL)
    with torch.no_grad():
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(image((64, 96))))).clone()
        model(image((96, 64)))
        with pytest.raises(PositionError, match="a block ran before patch_embed"):
            model.blocks(tokens)


def test_resize_between_steps_while_the_last_loss_is_kept():
    """The ordinary loop: the old graph is alive when the size changes."""
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table, losses = model.pos_embed, []
    for size in ((64, 96), (96, 64), (32, 48)):
        retrofit.resize(model, size, optimizer=optimizer)
        loss = model(image(size)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    assert model.pos_embed is table
    assert table.grad.shape == table.shape


def test_error_optimizer_of_no_kind():
    model = vit()
    before = model.pos_embed.clone()
    with pytest.raises(PositionError, match="optimizer is a int"):
        retrofit.resize(model, (96, 64), optimizer=5)
    assert torch.equal(model.pos_embed, before)


def test_attach_after_compile_is_seen():
    """A graph that was traced before is dropped, not run on without the encoding."""
    model = vit()
    compiled = torch.compile(model, backend="eager")
    x = image((64, 96))
    with torch.no_grad():
        plain = compiled(x)
        retrofit.attach(model, vp.SinCosSpec(), **FULL)
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(compiled(x), plain)
        retrofit.detach(model)
        assert torch.equal(compiled(x), plain)


def test_error_shared_block():
    model = vit()
    model.blocks[1] = model.blocks[0]
    with pytest.raises(PositionError, match="holds one block several times"):
        retrofit.attach(model, vp.AxialRopeSpec(), **FULL)


def test_attach_in_inference_mode_can_train():
    model = vit()
    with torch.inference_mode():
        part = retrofit.attach(model, vp.MixedRopeSpec(), **FULL)
    model(image((64, 96))).sum().backward()
    assert part.encoding.frequencies.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "name", ["timesformer", "naflexvit_factorized", "spherope", "detr_learned"]
)
def test_describe_specs_with_fields_of_their_own(name):
    """Specs without defaults are described like others."""
    spec = config.load_encoding(name)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=0)
    retrofit.attach(model, spec, strength=0.0)
    details = [part.detail for part in retrofit.describe(model) if part.kind == "attached"]
    assert spec.kind in details[0]


def test_resize_gives_every_rotary_spec_its_extent():
    model = vit()
    golden = config.load_encoding("golden_gate")
    spec = dataclasses.replace(golden, coords=vp.CoordSpec(unit="centred"))
    part = retrofit.attach(model, spec, **FULL)
    before = part.encoding.spec.coords
    retrofit.resize(model, (96, 128), extent="index")
    after = part.encoding.spec.coords
    assert dataclasses.replace(after, extent=None, trained_shape=None) == dataclasses.replace(
        before, extent=None, trained_shape=None
    )
    assert after.extent == "index"


@pytest.mark.parametrize("build", [{"num_heads": 6}, {"global_pool": "avg", "fc_norm": False}])
def test_error_restore_of_another_build(tmp_path, build):
    """A name does not say everything: a model built with other options is refused, not silently another."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **build)
    retrofit.save(model, tmp_path / "a.safetensors")
    with pytest.raises(PositionError, match=r"build\.(num_heads|head_dim|global_pool)"):
        retrofit.restore(tmp_path / "a.safetensors")


def test_restore_keeps_dynamic_sizes(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True)
    retrofit.save(model.eval(), tmp_path / "a.safetensors")
    x = image((96, 64))
    with torch.no_grad():
        assert torch.equal(retrofit.restore(tmp_path / "a.safetensors")(x), model(x))


@pytest.mark.parametrize("field", ["model", "encodings", "tables", "build"])
@pytest.mark.parametrize("value", [None, 5, ["x"]])
def test_error_tampered_header(tmp_path, field, value):
    path = tmp_path / "a.safetensors"
    header = {"format": 1, **checkpoint.Lineage(model="vit_tiny_patch16_224").data(), field: value}
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(path), metadata={"visionpos": json.dumps(header)})
    with pytest.raises(PositionError, match="unreadable position lineage"):
        retrofit.restore(path)


def test_save_follows_links_and_refuses_devices(tmp_path):
    target, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    checkpoint.save(link, {"x": torch.ones(1)}, checkpoint.Lineage())
    assert link.is_symlink()
    assert checkpoint.load(target)[0]["x"] == 1
    with pytest.raises(PositionError, match="no regular file"):
        checkpoint.save(tmp_path, {"x": torch.ones(1)}, checkpoint.Lineage())


def test_error_rotation_that_would_grow_keys():
    """Frequencies a head on keys of one head: the result would have more heads than the keys."""
    rot = vp.Rotation.of(torch.zeros(4, 5, 8))
    with pytest.raises(PositionError, match=r"leading sizes \(4,\) and x \(2, 1\)"):
        vp.rotate(torch.ones(2, 4, 5, 16), torch.ones(2, 1, 5, 16), rot)
    with pytest.raises(PositionError, match="float tensor is required"):
        rot.apply(torch.ones(2, 4, 5, 16, dtype=torch.int64))


WRONG = [None, "x", 0.5, [1], {"x": 0.5}, float("nan")]
SCHEDULE = retrofit.Schedule(steps=10)
DIMS = vp.Dims(embed_dim=64, num_heads=2, depth=1)


def attached():
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(), name="rope")
    return model


def rotary():
    return timm.create_model("eva02_tiny_patch14_224", depth=1, embed_dim=64, num_heads=2).rope


def grid_rope():
    return retrofit.GridRope(rotary(), vp.AxialRopeSpec(), DIMS, vp.Grid(2, 2))


# What is called with a wrong value, how its message begins, and which of the values it takes.
REFUSES = {
    "Attachment.encoding": (
        lambda bad: retrofit.Attachment(bad, strength=0.0, learn=False),
        "encoding is",
    ),
    "Attachment.others": (
        lambda bad: retrofit.Attachment(nn.Identity(), strength=0.0, learn=False, others=bad),
        "others",
        [None],
    ),
    "Attachment.learn": (
        lambda bad: retrofit.Attachment(nn.Identity(), strength=0.0, learn=bad),
        "learn is",
    ),
    "GridRope.rope": (
        lambda bad: retrofit.GridRope(bad, vp.AxialRopeSpec(), DIMS, vp.Grid(2, 2)),
        "rope is",
    ),
    "GridRope.spec": (lambda bad: retrofit.GridRope(rotary(), bad, DIMS, vp.Grid(2, 2)), "spec is"),
    "GridRope.dims": (
        lambda bad: retrofit.GridRope(rotary(), vp.AxialRopeSpec(), bad, vp.Grid(2, 2)),
        "dims is",
    ),
    "GridRope.grid": (
        lambda bad: retrofit.GridRope(rotary(), vp.AxialRopeSpec(), DIMS, bad),
        "grid is",
    ),
    "GridRope.get_embed": (lambda bad: grid_rope().get_embed(bad), "shape is", [None]),
    "GridRope.update": (lambda bad: grid_rope().update_feat_shape(bad), "feat_shape is"),
    "LightningRamp": (retrofit.LightningRamp, "ramp is"),
    "LightningRamp.models": (
        lambda bad: retrofit.LightningRamp(retrofit.Ramp({}), bad),
        "model is",
    ),
    "LightningRamp.state": (
        lambda bad: retrofit.LightningRamp(retrofit.Ramp({})).load_state_dict(bad),
        "state is",
    ),
    "TrainerRamp": (retrofit.TrainerRamp, "ramp is"),
    "TrainerRamp.models": (lambda bad: retrofit.TrainerRamp(retrofit.Ramp({}), bad), "model is"),
    "Ramp": (retrofit.Ramp, "schedules"),
    "Ramp.schedule": (lambda bad: retrofit.Ramp({"rope": bad}), r"schedules\['rope'\] is"),
    "Ramp.set": (lambda bad: retrofit.Ramp({"rope": SCHEDULE}).set(1, bad), "model is"),
    "Ramp.step": (lambda bad: retrofit.Ramp({"rope": SCHEDULE}).set(bad, attached()), "step is"),
    "adapt_channels": (lambda bad: retrofit.adapt_channels(bad, 4), "model is"),
    "adapt_channels.count": (lambda bad: retrofit.adapt_channels(vit(), bad), "in_chans"),
    "attach": (lambda bad: retrofit.attach(bad, vp.AxialRopeSpec()), "model is"),
    "attach.spec": (lambda bad: retrofit.attach(vit(), bad), "spec is"),
    "attach.strength": (
        lambda bad: retrofit.attach(vit(), vp.AxialRopeSpec(), strength=bad),
        "strength is",
        [0.5],
    ),
    "attach.learn": (
        lambda bad: retrofit.attach(vit(), vp.AxialRopeSpec(), learn_strength=bad),
        "learn_strength is",
    ),
    "attach.name": (
        lambda bad: retrofit.attach(vit(), vp.AxialRopeSpec(), name=bad),
        "name is",
        [None, "x"],
    ),
    "attach.generator": (
        lambda bad: retrofit.attach(vit(), vp.AxialRopeSpec(), generator=bad),
        "generator is",
        [None],
    ),
    "attach.partial": (
        lambda bad: retrofit.attach(vit(), vp.AxialRopeSpec(), partial=bad),
        "partial is",
    ),
    "attachable": (retrofit.attachable, "model is"),
    "attachments": (retrofit.attachments, "model is"),
    "create": (retrofit.create, "(name is|model 'x' is not known)"),
    "create.size": (
        lambda bad: retrofit.create("vit_tiny_patch16_224", size_hw=bad),
        "size_hw",
        [None],
    ),
    "create.classes": (
        lambda bad: retrofit.create("levit_128s", num_classes=bad),
        "num_classes is",
    ),
    "create.seed": (lambda bad: retrofit.create("levit_128s", seed=bad), "seed is"),
    "create.dynamic": (
        lambda bad: retrofit.create("levit_128s", dynamic=bad),
        "dynamic is",
        [None],
    ),
    "create.weights": (
        lambda bad: retrofit.create("levit_128s", weights=bad),
        "(weights is|path)",
        [None, "x"],
    ),
    "describe": (retrofit.describe, "model is"),
    "detach": (retrofit.detach, "model is"),
    "detach.name": (lambda bad: retrofit.detach(attached(), bad), "name", [None]),
    "dims_of": (retrofit.dims_of, "model is"),
    "fade_table": (lambda bad: retrofit.fade_table(bad, None, SCHEDULE), "model is"),
    "fade_table.spec": (lambda bad: retrofit.fade_table(vit(), bad, SCHEDULE), "spec is", [None]),
    "fade_table.schedule": (lambda bad: retrofit.fade_table(vit(), None, bad), "schedule is"),
    "fade_table.recipe": (
        lambda bad: retrofit.fade_table(vit(), None, SCHEDULE, recipe=bad),
        "recipe",
        [None],
    ),
    "freeze": (lambda bad: retrofit.freeze(bad, (64, 96)), "model is"),
    "freeze.size": (lambda bad: retrofit.freeze(vit(), bad), "size"),
    "grid_of": (retrofit.grid_of, "model is"),
    "lift_table": (retrofit.lift_table, "model is"),
    "lineage": (retrofit.lineage, "model is"),
    "lineage.source": (lambda bad: retrofit.lineage(vit(), source=bad), "source is", ["x"]),
    "load": (lambda bad: retrofit.load(bad, "nowhere.safetensors"), "model is"),
    "load.path": (lambda bad: retrofit.load(vit(), bad), "path"),
    "make_dynamic": (retrofit.make_dynamic, "model is"),
    "parameter_groups": (retrofit.parameter_groups, "model is"),
    "parameter_groups.decay": (
        lambda bad: retrofit.parameter_groups(vit(), weight_decay=bad),
        "weight_decay is",
        [0.5],
    ),
    "parameter_groups.layers": (
        lambda bad: retrofit.parameter_groups(vit(), layer_decay=bad),
        "layer_decay",
        [None, 0.5],
    ),
    "recipe_for": (retrofit.recipe_for, "model is"),
    "resize": (lambda bad: retrofit.resize(bad, (96, 64)), "model is"),
    "resize.size": (lambda bad: retrofit.resize(vit(), bad), "size_hw"),
    "resize.recipe": (lambda bad: retrofit.resize(vit(), (96, 64), recipe=bad), "recipe", [None]),
    "resize.extent": (lambda bad: retrofit.resize(vit(), (96, 64), extent=bad), "extent", [None]),
    "resize.patch": (lambda bad: retrofit.resize(vit(), (96, 64), patch=bad), "patch", [None]),
    "restore": (retrofit.restore, "path"),
    "read_record": (retrofit.read_record, "path"),
    "lineage_record": (retrofit.lineage_record, "model is"),
    "lineage_record.over": (
        lambda bad: retrofit.lineage_record(vit(), bad),
        "over is",
        [None, {"x": 0.5}],
    ),
    "save": (lambda bad: retrofit.save(bad, "nowhere/x.safetensors"), "model is"),
    "save.path": (lambda bad: retrofit.save(vit(), bad), "path is", ["x"]),
    "spec_of_rope": (retrofit.spec_of_rope, "rope is", [None]),
}


@pytest.mark.parametrize("name", REFUSES)
def test_error_values_of_another_kind(name):
    """Nothing fails in the depths: the argument, its value and what is required are named."""
    call, match, takes = (*REFUSES[name], [])[:3]
    for bad in WRONG:
        if not any(bad is good or bad == good for good in takes):
            with pytest.raises(PositionError, match=match):
                call(bad)


def test_every_public_name_is_in_the_list():
    without = {"Part", "Schedule"}  # a row that is read; test_schedule has the other
    named = {name.partition(".")[0] for name in REFUSES}
    assert named == set(retrofit.__all__) - without


def test_ramp_of_a_bare_schedule():
    with pytest.raises(PositionError, match=r"a dict from names of attachments to Schedules"):
        retrofit.Ramp(SCHEDULE)


class Around(nn.Module):
    """An adapter that calls what it is put around, hooks and all."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


class Past(Around):
    """One that runs the forward of what it is put around, without its hooks."""

    def forward(self, *args, **kwargs):
        return self.base.forward(*args, **kwargs)


def bare(base):
    """Return a copy without hooks, as a module of the user's own would be."""
    other = copy.deepcopy(base)
    for part in other.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.clear()
        if hasattr(part, ADDED):
            delattr(part, ADDED)
            part.__class__ = class_of(part)
    return other


# Family, door, the part that is replaced. Every kind of port, at the attention and where it acts.
PARTS = [
    (name, door, part)
    for name, door, parts in (
        (
            "vit_tiny_patch16_224",
            "rotate",
            ("blocks.1.attn", "blocks.1.attn.q_norm", "blocks.0.attn.k_norm"),
        ),
        ("vit_tiny_patch16_224", "bias", ("blocks.1.attn",)),
        ("eva02_tiny_patch14_224", "rotate", ("blocks.0.attn", "blocks.0.attn.k_norm")),
        ("beit_base_patch16_224", "rotate", ("blocks.0.attn", "blocks.1.attn.qkv")),
        ("beit_base_patch16_224", "bias", ("blocks.0.attn",)),
        (
            "swin_tiny_patch4_window7_224",
            "rotate",
            ("layers.1.blocks.0.attn", "layers.0.blocks.0.attn.qkv"),
        ),
        ("swin_tiny_patch4_window7_224", "bias", ("layers.1.blocks.0.attn",)),
        (
            "swinv2_tiny_window8_256",
            "rotate",
            ("layers.0.blocks.1.attn", "layers.0.blocks.0.attn.qkv"),
        ),
        (
            "swinv2_tiny_window8_256",
            "bias",
            ("layers.0.blocks.1.attn", "layers.1.blocks.0.attn.cpb_mlp"),
        ),
        (
            "swinv2_cr_tiny_224",
            "bias",
            ("stages.0.blocks.1.attn", "stages.0.blocks.0.attn.meta_mlp"),
        ),
        (
            "levit_128s",
            "rotate",
            ("stages.0.blocks.0.attn", "stages.1.downsample.attn_downsample.kv"),
        ),
        ("levit_128s", "bias", ("stages.0.blocks.0.attn", "stages.1.downsample.attn_downsample")),
        (
            "maxvit_tiny_tf_224",
            "rotate",
            ("stages.0.blocks.0.attn_block.attn", "stages.1.blocks.0.attn_grid.attn.qkv"),
        ),
        (
            "maxvit_tiny_tf_224",
            "bias",
            ("stages.0.blocks.0.attn_block.attn", "stages.1.blocks.0.attn_grid.attn.rel_pos"),
        ),
    )
    for part in parts
]


@pytest.mark.parametrize(("name", "door", "part"), PARTS)
def test_a_part_replaced_after_attach(name, door, part):
    """An adapter is right, or refused at the next pass: never a model without positions that says nothing."""
    family = next(one for one in FAMILIES if one.name == name)
    spec = vp.AxialRopeSpec() if door == "rotate" else vp.AlibiSpec()
    stem, _, last = part.rpartition(".")

    def replaced(by):
        model = family.build()
        retrofit.attach(model, spec, strength=1.0)
        owner = model.get_submodule(stem)
        setattr(owner, last, by(getattr(owner, last)))
        return model

    x = family.image(family.start)
    model = family.build()
    plain = features(model, x)
    retrofit.attach(model, spec, strength=1.0)
    wanted = features(model, x)
    assert apart(wanted, plain) > 1e-5
    if not part.endswith("rel_pos"):  # its method is called, not the module
        # What stands around a part that hands out q or k may add to it: only known wrappers are taken at their word.
        with contextlib.suppress(PositionError):
            assert torch.equal(features(replaced(Around), x), wanted)
        with contextlib.suppress(PositionError):
            assert torch.equal(features(replaced(Past), x), wanted)
    model = replaced(bare)
    refusal = r"ran without .*, where the encoding acts|since the encoding was attached"
    with pytest.raises(PositionError, match=refusal):
        features(model, x)
    retrofit.detach(model)
    assert torch.equal(features(model, x), plain)
