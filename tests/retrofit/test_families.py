"""Every row of the seam table: describe is right, and resize gives the model that timm creates at the size."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import timm
import torch

from tests.retrofit.families import FAMILIES, Family, apart_from_twin, features
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.describe import unclaimed
from visionpos.retrofit.records import records_of
from visionpos.retrofit.seams import blocks_of, class_row, model_rows
from visionpos.retrofit.tables import module_rows, tables_of

ALL = [
    pytest.param(family, marks=pytest.mark.slow if family.heavy else (), id=family.name)
    for family in FAMILIES
]
# What timm's own bookkeeping of "the windows a grid was made for" may differ in: resized, a model remembers more.
REFERENCE = ("._ref_grid_size", "._ref_window_sizes", "target_shift_size")


def swapped(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", ALL)
def test_a_model_of_every_row(family: Family) -> None:
    """Described, moved to a rectangle, compared with its twin, and brought back, exactly, with the same Parameters."""
    model = family.build()
    kinds = Counter(part.kind for part in retrofit.describe(model))
    kinds.pop("ports", None)
    assert dict(kinds) == family.parts
    assert unclaimed(model) == []
    before, parameters = swapped(model), list(model.parameters())
    at_home = features(model, family.image(family.start))

    retrofit.resize(model, family.target)
    moved = features(model, family.image())
    assert moved.isfinite().all()
    assert retrofit.lineage(model).image_size_hw == family.target
    if family.twin is not None:
        extra = {} if family.sizeless else {"img_size": family.target}
        twin = timm.create_model(
            family.name, num_classes=0, **{**family.options, **extra, **family.twin}
        )
        twin.load_state_dict(model.state_dict())
        lines = [
            line
            for line in apart_from_twin(model, twin)
            if not any(word in line for word in REFERENCE)
        ]
        assert lines == []
        assert torch.equal(moved, features(twin.eval(), family.image()))

    retrofit.resize(model, family.start)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(features(model, family.image(family.start)), at_home)


@pytest.mark.slow
def test_every_row_has_a_family() -> None:
    """No row goes untested; those left out share the code of a sibling."""
    with torch.device("meta"):
        seen = set()
        for family in FAMILIES:
            extra = {} if family.sizeless else {"img_size": family.start}
            model = timm.create_model(family.name, **{**family.options, **extra})
            found = class_row(model)
            assert found is not None
            assert blocks_of(model), family.name
            seen.add(found[0])
    assert set(model_rows()) - seen == {
        "levit.Levit",
        "qwen3_vit.Qwen3VitEncoder",
        "deepseek_vit.DeepseekVitClassifier",
        "gemma4_vit.Gemma4VitEncoder",
    }


def test_rows_name_classes_that_exist() -> None:
    """A class that timm renames is found out here, not by a user."""
    import importlib

    for prefix, rows in (("timm.models.", model_rows()), ("timm.", module_rows())):
        for name in rows:
            module, _, cls = f"{prefix}{name}".rpartition(".")
            assert hasattr(importlib.import_module(module), cls), name


REFUSED = {
    "nest_tiny_jx": (
        (64, 96),
        r"size \(64, 96\) is not square; Nest rebuilds its map from a square number",
    ),
    "hiera_tiny_224": (
        (80, 96),
        r"size \(80, 96\) is not a multiple of 32; Hiera .*Use \(64, 96\) or \(96, 96\)",
    ),
    "halonet26t": ((256, 384), r"size \(256, 384\) is not a multiple of 256; ByobNet"),
    "botnet26t_256": ((80, 96), r"not a multiple of 32"),
    "efficientformerv2_s0": ((80, 96), r"not a multiple of 32"),
    "maxvit_tiny_tf_224": ((80, 96), r"not a multiple of 32"),
    "beit_base_patch16_224": ((72, 96), r"not divisible into patches of \(16, 16\)"),
    "swin_tiny_patch4_window7_224": ((226, 224), r"not divisible into patches of \(4, 4\)"),
    "levit_128s": ((72, 96), r"not a multiple of 16"),
    "twins_svt_small": (("64", 96), r"size_hw \('64', 96\) is no image size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_refusal_leaves_the_model_untouched(name: str) -> None:
    family = next(one for one in FAMILIES if one.name == name)
    size, message = REFUSED[name]
    model = family.build()
    other = copy.deepcopy(model)
    with pytest.raises(PositionError, match=message):
        retrofit.resize(model, size)  # type: ignore[arg-type]
    assert apart_from_twin(model, other) == []
    assert records_of(model) == {}


def test_error_inside_timm_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails midway, the model is as it was: the same objects under the same names."""
    family = next(one for one in FAMILIES if one.name == "beit_base_patch16_224")
    model = family.build()
    state, parameters = swapped(model), list(model.parameters())
    books = (model.patch_embed.img_size, model.blocks[0].attn.window_size)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(type(model.blocks[1].attn), "_init_buffers", fail, raising=False)
    monkeypatch.setattr(model.blocks[1].attn, "set_window_size", fail)
    with pytest.raises(PositionError, match=r"out of luck"):
        retrofit.resize(model, (96, 160))
    monkeypatch.undo()
    assert (model.patch_embed.img_size, model.blocks[0].attn.window_size) == books
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "levit_128s", "hiera_tiny_224", "samvit_base_patch16"]
)
def test_copies_and_pickles_remember_the_source(name: str) -> None:
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build()
    before = swapped(model)
    retrofit.resize(model, family.target)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        retrofit.resize(other, family.start)
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    assert len(records_of(model)) == sum(
        table.moves and table.path in records_of(model) for table in tables_of(model)
    )


def test_unknown_classes_are_described_and_refused() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet18")
        wrapped = timm.create_model("swin_tiny_patch4_window7_224", features_only=True)
    part = retrofit.describe(model)[0]
    assert (part.kind, part.detail) == (
        "unknown",
        "ResNet is no class that visionpos knows; attach and resize refuse",
    )
    with pytest.raises(PositionError, match=r"no class that visionpos knows"):
        retrofit.resize(model, (64, 64))
    kinds = Counter(part.kind for part in retrofit.describe(wrapped))
    assert kinds["rel_table"] == 12, "position modules are known in any model"
    with pytest.raises(PositionError, match=r"features_only"):
        retrofit.resize(wrapped, (64, 64))


class Own(torch.nn.Module):
    """A user's model with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = torch.nn.Parameter(torch.zeros(1, 16, 8))
        self.head = torch.nn.Linear(8, 2)


def test_unknown_tables_are_listed() -> None:
    parts = retrofit.describe(Own())
    assert [(part.kind, part.path, part.shape) for part in parts] == [
        ("unknown", "pos_embed", (1, 16, 8))
    ]
    assert (
        parts[0].detail
        == "looks positional; Own is no class that visionpos knows; attach and resize refuse"
    )
