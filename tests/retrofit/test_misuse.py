"""What a user does without thinking of positions: keeps a loss, compiles first, shares a block."""

from __future__ import annotations

import dataclasses
import json

import pytest
import timm
import torch

import visionpos as vp
from tests.retrofit.zoo import image, vit
from visionpos import PositionError, checkpoint, config, retrofit

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
