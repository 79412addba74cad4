"""parameter_groups: every parameter once, no position parameter decayed, new parts at the full rate."""

from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import visionpos as vp
from tests.retrofit.families import FAMILIES
from tests.retrofit.zoo import CASES, NAMED, Case, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError

POSITION = ("pos_embed", "cls_token", "reg_token", "dist_token", "rope.freqs")


def attached(case: Case, **changes: Any) -> Any:
    model = case.build(**changes)
    pairing = case.pairing or "adjacent"
    retrofit.attach(
        model, vp.MixedRopeSpec(pairing=pairing), strength=0.5, learn_strength=True, name="turn"
    )
    retrofit.attach(
        model, vp.LearnedSpec(grid_hw=(3, 5)), strength=0.5, learn_strength=True, name="add"
    )
    return model


def settings(model: Any, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return name -> (weight decay, rate), and insist that every trained parameter stands in one group."""
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    found: dict[str, tuple[float, float]] = {}
    for group in groups:
        assert group["params"], "an empty group"
        for weight in group["params"]:
            name = names[id(weight)]
            assert name not in found, f"{name} stands twice"
            found[name] = (group["weight_decay"], group.get("lr_scale", 1.0))
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("layer_decay", [None, 0.75, 1.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_once_and_no_position_decays(case: Case, layer_decay: float | None) -> None:
    model = attached(case)
    groups = retrofit.parameter_groups(model, weight_decay=0.1, layer_decay=layer_decay)
    found = settings(model, groups)
    for name, (decay, rate) in found.items():
        matrix = dict(model.named_parameters())[name].ndim > 1
        position = name.startswith("visionpos.") or name in POSITION
        assert decay == (0.1 if matrix and not position and not name.endswith(".bias") else 0.0), (
            name
        )
        if name.startswith("visionpos."):
            assert rate == 1.0
    new = [name for name in found if name.startswith("visionpos.")]
    assert sorted(name.rpartition(".")[2] for name in new) == [
        "frequencies",
        "learned_strength",
        "learned_strength",
        "table",
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity_layer_decay_of_the_old_parameters_is_timms(case: Case) -> None:
    model, plain = attached(case), case.build()
    found = settings(model, retrofit.parameter_groups(model, weight_decay=0.1, layer_decay=0.75))
    theirs = settings(
        plain,
        param_groups_layer_decay(
            plain, 0.1, no_weight_decay_list=plain.no_weight_decay(), layer_decay=0.75
        ),
    )
    assert {name: found[name] for name in theirs} == theirs
    assert len({rate for _, rate in theirs.values()}) > 2


def test_parity_without_an_attachment_and_without_layer_decay() -> None:
    model = vit()
    found = settings(model, retrofit.parameter_groups(model, weight_decay=0.1))
    theirs = settings(
        model, param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    )
    assert found == theirs
    assert found["pos_embed"] == (0.0, 1.0)
    assert found["blocks.0.attn.qkv.weight"] == (0.1, 1.0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vit_relpos_small_patch16_224", "rel_pos.mlp"),
        ("swinv2_tiny_window8_256", "cpb_mlp"),
        ("levit_128s", "attention_biases"),
        ("samvit_base_patch16", "rel_pos_h"),
        ("hiera_tiny_224", "pos_embed"),
    ],
)
@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_no_position_decays_in_other_classes(
    name: str, part: str, layer_decay: float | None
) -> None:
    model = next(one for one in FAMILIES if one.name == name).build()
    retrofit.attach(model, vp.SinCosSpec(), strength=0.5, learn_strength=True)
    found = settings(model, retrofit.parameter_groups(model, layer_decay=layer_decay))
    positions = [key for key in found if part in key or key.startswith("visionpos.")]
    assert len(positions) > 1
    assert all(found[key][0] == 0.0 for key in positions)
    assert any(decay > 0.0 for decay, _ in found.values())


def test_timm_alone_would_decay_what_is_new() -> None:
    """Why this function is there: timm's no_weight_decay does not know the new parameters."""
    model = attached(NAMED[0])
    theirs = settings(
        model, param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    )
    assert theirs["visionpos.turn.encoding.frequencies"][0] == 0.1


def test_frozen_parameters_stay_out() -> None:
    model = attached(NAMED[0])
    model.pos_embed.requires_grad_(False)
    model.visionpos.turn.encoding.frequencies.requires_grad_(False)
    for layer_decay in (None, 0.75):
        found = settings(model, retrofit.parameter_groups(model, layer_decay=layer_decay))
        assert "pos_embed" not in found
        assert "visionpos.turn.encoding.frequencies" not in found


def test_after_a_resize_the_frequencies_stay_undecayed() -> None:
    """The module that keeps an extent hands out the same undecayed parameter."""
    model = Case("vit_small_patch16_rope_mixed_ape_224").build()
    retrofit.resize(model, (96, 64), extent="trained")
    assert isinstance(model.rope, retrofit.GridRope)
    for layer_decay in (None, 0.75):
        found = settings(
            model, retrofit.parameter_groups(model, weight_decay=0.1, layer_decay=layer_decay)
        )
        assert found["rope.freqs"][0] == 0.0
        assert found["pos_embed"][0] == 0.0


def test_training_moves_and_decay_does_not() -> None:
    """With zero gradients a step of AdamW shrinks matrices and leaves every position parameter as it was."""
    model = attached(NAMED[0])
    optimizer = torch.optim.AdamW(retrofit.parameter_groups(model, weight_decay=0.5), lr=0.1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        still = torch.equal(weight, before[name])
        position = name.startswith("visionpos.") or name in POSITION
        assert still is (position or weight.ndim <= 1), name
    model.train()
    optimizer.zero_grad()
    model(image((64, 96))).square().sum().backward()
    optimizer.step()
    assert all(
        not torch.equal(w, before[n])
        for n, w in model.named_parameters()
        if n.startswith("visionpos.")
    )


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_no_decay_at_all(decay: float) -> None:
    model = attached(NAMED[0])
    found = settings(model, retrofit.parameter_groups(model, weight_decay=decay))
    assert {rate for _, rate in found.values()} == {1.0}
    assert max(value for value, _ in found.values()) == decay


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": -0.1},
        {"layer_decay": 0.0},
        {"layer_decay": 1.5},
        {"layer_decay": -1.0},
        {"weight_decay": float("nan")},
    ],
    ids=str,
)
def test_error_rates(options: dict[str, float]) -> None:
    with pytest.raises(
        PositionError, match=r"weight_decay is .* and layer_decay .*; at least 0, and in \(0, 1\]"
    ):
        retrofit.parameter_groups(vit(), **options)


def test_error_class_without_a_row() -> None:
    with pytest.raises(PositionError, match=r"no class that visionpos knows"):
        retrofit.parameter_groups(torch.nn.Linear(2, 2))
