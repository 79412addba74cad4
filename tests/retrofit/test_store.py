"""save, load, create and restore: a run that is stored and resumed is the run that was not, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import visionpos as vp
from tests.retrofit.zoo import CASES, Case, create, image, opened, vit
from visionpos import checkpoint, retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.resize import table_record

SPECS = {
    "axial": vp.AxialRopeSpec(),
    "mixed": vp.MixedRopeSpec(),
    "learned": vp.LearnedSpec(grid_hw=(3, 5), std=0.5),
    "sincos": vp.SinCosSpec(),
}


def built(
    kind: str, *, seed: int = 0, strength: float = 0.5, learn: bool = True, **changes: Any
) -> Any:
    """Return a resized model with an attachment; seeds differ so that nothing agrees by chance."""
    torch.manual_seed(seed)
    model = opened(create("vit_tiny_patch16_224", **changes), seed)
    retrofit.attach(model, SPECS[kind], strength=strength, learn_strength=learn, name="mine")
    retrofit.resize(model, (96, 64))
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    model.train()
    for step in steps:
        optimizer.zero_grad()
        model.forward_features(image((96, 64), seed=step)).square().mean().backward()
        optimizer.step()


def assert_same_state(one: Any, other: Any) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("kind", SPECS)
def test_resumed_training_is_unbroken_training(tmp_path: Path, kind: str) -> None:
    """Attach, train, save, load into a fresh model, train on: the weights of a run without a break."""
    unbroken, first = built(kind), built(kind)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (unbroken, first)]
    train(unbroken, optimizers[0], range(6))
    train(first, optimizers[1], range(3))
    retrofit.save(first, tmp_path / "run.safetensors", source="a test")
    memory = optimizers[1].state_dict()

    second = built(kind, seed=99, strength=0.1)
    lineage = retrofit.load(second, tmp_path / "run.safetensors")
    assert lineage.source == "a test"
    assert_same_state(second, first)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-3)
    optimizer.load_state_dict(memory)
    train(second, optimizer, range(3, 6))
    assert_same_state(second, unbroken)
    x = image((96, 64))
    with torch.no_grad():
        assert torch.equal(second.eval().forward_features(x), unbroken.eval().forward_features(x))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip_of_every_model(tmp_path: Path, case: Case) -> None:
    model, other, x = case.build(), create(case.name, case.size_hw, **case.extra), case.image()
    pairing = case.pairing or "adjacent"
    for one in (model, other):
        retrofit.attach(one, vp.MixedRopeSpec(pairing=pairing), strength=0.5)
        retrofit.attach(one, vp.AxialRopeSpec(pairing=pairing), strength=0.5, learn_strength=True)
    retrofit.save(model, tmp_path / "a.safetensors")
    retrofit.load(other, tmp_path / "a.safetensors")
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), other.forward_features(x))


def test_constant_strengths_are_set_to_the_files(tmp_path: Path) -> None:
    """A fade that had come to 0.7 goes on from 0.7: a strength that does not learn is in no state dict."""
    model, other = (built("axial", learn=False, strength=s) for s in (0.7, 0.0))
    retrofit.save(model, tmp_path / "a.safetensors")
    retrofit.load(other, tmp_path / "a.safetensors")
    assert other.visionpos.mine.strength == 0.7
    x = image((96, 64))
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), other.forward_features(x))


def test_a_loaded_table_still_knows_its_source(tmp_path: Path) -> None:
    """There and back stays exact across a file: the table that was trained travels along."""
    model = vit()
    trained = model.pos_embed.detach().clone()
    retrofit.resize(model, (96, 128))
    retrofit.save(model, tmp_path / "a.safetensors")
    assert "visionpos_source.pos_embed" in load_file(tmp_path / "a.safetensors")
    other = create("vit_tiny_patch16_224", (96, 128))
    retrofit.load(other, tmp_path / "a.safetensors")
    assert table_record(other).source_grid == vp.Grid(4, 6)
    retrofit.resize(other, (64, 96))
    assert torch.equal(other.pos_embed, trained)


def test_a_loaded_table_that_was_trained_after_its_resize(tmp_path: Path) -> None:
    """Trained since, a table is its own source; the file must not bring the old one back."""
    model = vit()
    retrofit.resize(model, (96, 128))
    with torch.no_grad():
        model.pos_embed += 0.5
    retrofit.save(model, tmp_path / "a.safetensors")
    other = create("vit_tiny_patch16_224", (96, 128))
    retrofit.load(other, tmp_path / "a.safetensors")
    for one in (model, other):
        retrofit.resize(one, (64, 96))
    assert torch.equal(other.pos_embed, model.pos_embed)


def test_a_loaded_file_replaces_what_the_model_remembered(tmp_path: Path) -> None:
    """A record of the old table does not survive a file without one."""
    model = vit((96, 128))
    retrofit.save(model, tmp_path / "a.safetensors")
    other = vit()
    retrofit.resize(other, (96, 128))
    retrofit.load(other, tmp_path / "a.safetensors")
    lineage = retrofit.lineage(other)
    assert lineage.tables["pos_embed"]["source_grid_hw"] == [6, 8]


def test_header_is_plain_json(tmp_path: Path) -> None:
    retrofit.save(built("mixed", learn=False), tmp_path / "a.safetensors", source="here")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        data = json.loads(file.metadata()["visionpos"])
    assert data["format"] == 1
    assert data["grid_hw"] == [6, 4]
    assert data["image_size_hw"] == [96, 64]
    assert data["model"] == "vit_tiny_patch16_224"
    assert data["source"] == "here"
    assert data["encodings"]["mine"]["spec"]["kind"] == "mixed_rope"
    assert data["tables"]["pos_embed"]["source_grid_hw"] == [4, 6]


def refused(model: Any, path: Path, message: str) -> None:
    """Loading raises, naming the file, and changes nothing."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strengths = {name: part.strength for name, part in retrofit.attachments(model).items()}
    record = table_record(model)
    with pytest.raises(PositionError, match=message) as caught:
        retrofit.load(model, path)
    assert path.name in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {n: p.strength for n, p in retrofit.attachments(model).items()} == strengths
    assert table_record(model) is record


def test_error_another_spec(tmp_path: Path) -> None:
    retrofit.save(built("axial"), tmp_path / "a.safetensors")
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(theta=50.0), learn_strength=True, name="mine")
    retrofit.resize(model, (96, 64))
    refused(
        model,
        tmp_path / "a.safetensors",
        r"encodings.mine.spec.theta: 100.0 in the file, 50.0 expected",
    )


def test_error_another_recipe_of_an_attached_table(tmp_path: Path) -> None:
    """Every field of a spec counts, also one that is history elsewhere."""
    models = []
    for recipe in ("timm", "dinov2"):
        model = vit()
        retrofit.attach(model, vp.LearnedSpec(grid_hw=(3, 5), recipe=recipe), name="mine")
        models.append(model)
    retrofit.save(models[0], tmp_path / "a.safetensors")
    refused(
        models[1],
        tmp_path / "a.safetensors",
        r"encodings.mine.spec.recipe: timm in the file, dinov2",
    )


def test_error_another_name_or_none(tmp_path: Path) -> None:
    retrofit.save(built("axial"), tmp_path / "a.safetensors")
    plain = vit((96, 64))
    refused(
        plain,
        tmp_path / "a.safetensors",
        r"encodings.mine: .*'kind': 'axial_rope'.* in the file, None expected",
    )
    other = vit((96, 64))
    retrofit.attach(other, SPECS["axial"], learn_strength=True, name="yours")
    refused(other, tmp_path / "a.safetensors", r"encodings.mine.*encodings.yours")


def test_error_another_grid_prefix_or_model(tmp_path: Path) -> None:
    retrofit.save(vit((64, 144)), tmp_path / "a.safetensors")
    refused(
        vit((96, 96)),
        tmp_path / "a.safetensors",
        r"grid_hw: \[4, 9\] in the file, \[6, 6\] expected",
    )
    refused(
        vit((64, 144), reg_tokens=1),
        tmp_path / "a.safetensors",
        r"prefix: 1 in the file, 2 expected",
    )
    other = create("vit_small_patch16_224", (64, 144))
    refused(
        other,
        tmp_path / "a.safetensors",
        r"model: vit_tiny_patch16_224 in the file, vit_small_patch16_224 expected",
    )


def test_error_learned_or_constant(tmp_path: Path) -> None:
    retrofit.save(built("axial", learn=False), tmp_path / "a.safetensors")
    refused(
        built("axial"),
        tmp_path / "a.safetensors",
        r"encodings.mine.learned: False in the file, True expected",
    )


def test_error_another_extent_of_the_models_own_rope(tmp_path: Path) -> None:
    models = [Case("vit_small_patch16_dinov3").build() for _ in range(2)]
    for model, extent in zip(models, ("index", "trained"), strict=True):
        retrofit.resize(model, (96, 64), extent=extent)
    retrofit.save(models[0], tmp_path / "a.safetensors")
    refused(
        models[1],
        tmp_path / "a.safetensors",
        r"rope.coords.extent: index in the file, None expected",
    )


def tampered(source: Path, target: Path, change: Any, **header: Any) -> Path:
    """Write a copy of a file with other tensors or another header."""
    tensors: dict[str, Tensor] = load_file(source)
    change(tensors)
    with safe_open(source, framework="pt") as file:
        data = json.loads(file.metadata()["visionpos"])
    for key, value in header.items():
        place = data
        *path, last = key.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    save_file(tensors, target, metadata={"visionpos": json.dumps(data)})
    return target


def test_error_missing_unknown_and_misshapen_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    retrofit.save(built("mixed"), path)
    name = "visionpos.mine.encoding.frequencies"
    model = built("mixed", seed=5)
    bad = tmp_path / "bad.safetensors"
    refused(model, tampered(path, bad, lambda t: t.pop(name)), rf"{name} is missing")
    refused(
        model,
        tampered(path, bad, lambda t: t.update(extra=torch.ones(1))),
        r"extra is unknown to the model",
    )
    refused(
        model,
        tampered(path, bad, lambda t: t.update({name: torch.ones(2, 2, 2, 8)})),
        rf"{name} has shape \(2, 2, 2, 8\), the model \(2, 2, 2, 16\)",
    )
    refused(
        model,
        tampered(path, bad, lambda t: [t.pop(k) for k in list(t)[:3]]),
        r"missing.*missing.*missing",
    )


@pytest.mark.parametrize("value", ["strong", None, float("nan"), float("inf"), [1.0]], ids=str)
def test_error_strength_in_the_header(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.safetensors"
    retrofit.save(built("axial", learn=False), path)
    bad = tampered(
        path, tmp_path / "bad.safetensors", lambda _: None, encodings__mine__strength=value
    )
    refused(built("axial", learn=False, seed=5), bad, r"strength")


@pytest.mark.parametrize("value", [[7, 7], [4], None, "x", [0, 24], [4.5, 6]], ids=str)
def test_error_source_grid_in_the_header(tmp_path: Path, value: Any) -> None:
    """The table that travels along must belong to the grid that the header names."""
    path = tmp_path / "a.safetensors"
    retrofit.save(built("axial"), path)
    bad = tampered(
        path, tmp_path / "bad.safetensors", lambda _: None, tables__pos_embed__source_grid_hw=value
    )
    refused(built("axial", seed=5), bad, r"source_grid_hw")


def test_error_truncated_foreign_and_pickle(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", built("axial")
    retrofit.save(model, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refused(model, path, r"is no whole safetensors file")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    refused(model, path, r"carries no position lineage")
    torch.save(model.state_dict(), path)
    refused(model, path, r"is no whole safetensors file")


def test_lineage_of_a_model_for_every_size(tmp_path: Path) -> None:
    """A model without a fixed image size, as one compiled graph for all sizes wants it, is stored too."""
    models = [vit(dynamic_img_size=True) for _ in range(2)]
    for model in models:
        model.patch_embed.img_size = None
        retrofit.attach(model, SPECS["mixed"], strength=1.0)
    assert retrofit.lineage(models[0]).image_size_hw == (64, 96), "the size that its table serves"
    assert retrofit.lineage(models[0]).grid_hw == (4, 6)
    retrofit.save(models[0], tmp_path / "a.safetensors")
    retrofit.load(models[1], tmp_path / "a.safetensors")
    with torch.no_grad():
        x = image((96, 32))
        assert torch.equal(models[0](x), models[1](x))


def test_lineage_of_a_model_without_a_name() -> None:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=(64, 96), depth=1, embed_dim=64, num_heads=2)
    lineage = retrofit.lineage(model)
    assert lineage.model == "VisionTransformer"
    assert lineage.tables["pos_embed"]["recipe"] == "timm"
    assert lineage.rope is None


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"]
)
def test_restore_from_the_file_alone(tmp_path: Path, name: str) -> None:
    """The lineage names the model, its size, its own rotation's extent and what is attached: enough to build it."""
    pairing = "half" if "dinov3" in name else "adjacent"
    model = retrofit.create(name, size_hw=(64, 96), num_classes=3)
    retrofit.attach(model, vp.MixedRopeSpec(pairing=pairing), strength=0.5, name="one")
    retrofit.attach(
        model, vp.AxialRopeSpec(pairing=pairing), strength=0.5, learn_strength=True, name="two"
    )
    retrofit.resize(model, (96, 64), extent="index")
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.restore(tmp_path / "a.safetensors")
    x = image((96, 64), batch=1)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert retrofit.lineage(again) == retrofit.lineage(model)


def test_create_is_seeded_and_leaves_the_generator() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    one, other = (retrofit.create("vit_tiny_patch16_224", size_hw=(64, 96)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(one, other)
    assert not one.training
    with pytest.raises(PositionError, match=r"'vit_tiny_patch' is not known to timm; did you mean"):
        retrofit.create("vit_tiny_patch")
    with pytest.raises(PositionError, match=r"size_hw \(60, 96\) is not divisible"):
        retrofit.create("vit_tiny_patch16_224", size_hw=(60, 96))


def test_the_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = built("axial"), tmp_path / "a.safetensors"
    retrofit.save(model, path)
    old = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(PositionError, match=r"cannot be written: No space left"):
        retrofit.save(model, path)
    assert path.read_bytes() == old
