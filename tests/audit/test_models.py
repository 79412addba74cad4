"""The audit of timm models: numbers against hand-made passes, what must be zero, and a model that stays untouched."""

import copy
import threading
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visionpos as vp
from tests.retrofit.zoo import apart, create, opened, vit
from visionpos import retrofit
from visionpos.audit.model_biases import log_form
from visionpos.audit.model_subject import Subject, features
from visionpos.audit.of_model import audit
from visionpos.errors import PositionError

SIZE = (48, 80)  # 3 x 5 patches
SWIN = {"img_size": (56, 112), "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 2)}


def end(result: Any, intervention: str, metric: str, **fields: Any) -> float:
    rows = result.of(intervention, metric=metric, where="end", **fields)
    assert len(rows) == 1, rows
    assert rows[0].value is not None, rows[0].note
    return float(rows[0].value)


def rope(**changes: Any) -> Any:
    return opened(create("vit_small_patch16_rope_224", SIZE, **changes))


def small(name: str, **options: Any) -> Any:
    return opened(timm.create_model(name, num_classes=0, **options)).eval()


def rows_of(model: Any, image: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.forward_features(image)
    return found


# Numbers against passes made by hand.


def test_flip_of_a_table_is_the_table_flipped() -> None:
    """R1 on a learned table equals a model whose table was flipped by hand."""
    model = vit(SIZE)
    result = audit(model, interventions=["R1"], checks=False)
    image = Subject(model).image
    by_hand = copy.deepcopy(model)
    cells = by_hand.pos_embed.data[:, 1:].reshape(1, 3, 5, -1).flip(2).flatten(1, 2)
    by_hand.pos_embed.data[:, 1:] = cells
    wanted = apart(rows_of(by_hand, image)[:, 1:], rows_of(model, image)[:, 1:])
    assert end(result, "R1", "O", tokens="patches") == pytest.approx(wanted, rel=1e-5)
    assert wanted > 1e-2


def test_content_permutation_is_that_of_pixels_under_a_stem_without_overlap() -> None:
    """P1 on tokens equals patches of pixels put elsewhere, the outputs put back."""
    model = vit(SIZE)
    result = audit(model, interventions=["P1"], seeds=[3], checks=False)
    subject = Subject(model, seed=3)
    from visionpos.audit.changes import generator_of
    from visionpos.audit.model_bench import grid_order

    drawn = int(torch.randint(2**31, (), generator=generator_of(3)))
    order = grid_order(drawn)(subject.grid)
    patches = subject.image.unflatten(2, (3, 16)).unflatten(4, (5, 16)).permute(0, 2, 4, 1, 3, 5)
    moved = patches.flatten(1, 2)[:, order].unflatten(1, (3, 5)).permute(0, 3, 1, 4, 2, 5)
    other = rows_of(model, moved.reshape(subject.image.shape))[:, 1:][:, torch.argsort(order)]
    wanted = apart(other, rows_of(model, subject.image)[:, 1:])
    assert end(result, "P1", "Eq", tokens="patches") == pytest.approx(wanted, rel=1e-4)
    assert wanted > 1e-2


def test_shift_of_a_rotation_is_that_of_timms_own_table() -> None:
    """S1 by one cell equals the rows that timm gives one cell further on a larger grid."""
    model = rope()
    result = audit(model, interventions=["S1"], checks=False)
    image = Subject(model).image
    by_hand = copy.deepcopy(model)
    by_hand.rope.update_feat_shape((4, 6))
    table = by_hand.rope.get_embed().reshape(4, 6, -1)[1:, 1:].flatten(0, 1)
    by_hand.rope.get_embed = lambda *_, **__: table
    wanted = apart(rows_of(by_hand, image)[:, 1:], rows_of(model, image)[:, 1:])
    assert end(result, "S1", "O", tokens="patches", variant="1 cell") == pytest.approx(
        wanted, rel=1e-3
    )


def test_attention_is_the_models_own() -> None:
    """Watched passes give the features of the model, and rows of attention sum to 1."""
    for model in (vit(SIZE), rope(), small("swin_tiny_patch4_window7_224", **SWIN)):
        subject = Subject(model)
        passed = subject.passed(subject.fresh())
        assert apart(passed.end, rows_of(model, subject.image)) < 1e-6
        for weights in passed.weights.values():
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)


# What must be zero, and what must not.


def test_joint_permutation_is_zero_for_every_scheme() -> None:
    """Tokens and places in another order give the same, whatever brings position in."""
    models = [
        vit(SIZE),
        rope(),
        opened(create("vit_small_patch16_rope_mixed_ape_224", SIZE)),
        opened(create("vit_small_patch16_dinov3", SIZE)),
        opened(create("beit_base_patch16_224", SIZE)),
        opened(create("vit_relpos_small_patch16_224", SIZE)),
        small("swin_tiny_patch4_window7_224", **SWIN),
        small("swinv2_tiny_window8_256", **SWIN, window_size=7),
        small("naflexvit_base_patch16_gap", depth=2, embed_dim=64, num_heads=2),
    ]
    for model in models:
        result = audit(model, interventions=["P1", "P2"], checks=False)
        assert result.complete
        assert {row.verdict for row in result.of("P2")} == {"zero"}, type(model)
        assert {row.verdict for row in result.of("P1", where="end")} == {"nonzero"}, type(model)
        assert not result.surprises


def test_no_position_is_the_control() -> None:
    """Without a scheme nothing is seen, but for a causal mask."""
    model = opened(
        create("vit_tiny_patch16_224", SIZE, pos_embed="none", class_token=False, global_pool="avg")
    )
    result = audit(model, checks=False)
    assert result.scheme == "none"
    assert not result.surprises
    for name in ("P1", "P2", "S1", "D1b", "D2", "R1", "R2", "N2", "N3"):
        assert {row.verdict for row in result.of(name)} == {"zero"}, name
    assert {row.verdict for row in result.of("C1", where="end")} == {"nonzero"}


def test_a_rotation_sees_no_shift_but_by_prefix_tokens_that_do_not_turn() -> None:
    """The leak of an unrotated class token, and its three remedies."""
    bare = audit(rope(class_token=False, global_pool="avg"), interventions=["S1"], checks=False)
    assert {row.verdict for row in bare} == {"zero"}
    result = audit(rope(), interventions=["prefix"], checks=False)
    for variant in ("removed", "rotated at origin", "rotated at centre"):
        rows = result.of("prefix", variant=variant)
        assert {row.verdict for row in rows} == {"zero"}, variant
    leaks = result.of("prefix", variant="unrotated", where="end")
    assert {row.tokens for row in leaks} == {"patches", "prefix"}
    assert {row.verdict for row in leaks} == {"nonzero"}
    assert not result.surprises


def test_windows() -> None:
    """A table of differences hears a flip and no shift; one of absolute differences neither."""
    result = audit(small("swin_tiny_patch4_window7_224", **SWIN), checks=False)
    assert {row.verdict for row in result.of("S1")} == {"zero"}
    assert {row.verdict for row in result.of("R1", where="end")} == {"nonzero"}
    assert {row.verdict for row in result.of("D1b")} == {"undefined"}
    assert not result.surprises
    blind = audit(small("levit_128s", img_size=112), interventions=["R1", "N2"], checks=False)
    assert {row.verdict for row in blind.of("R1")} == {"zero"}
    assert {row.verdict for row in blind.of("N2", metric="A", where="end")} == {"nonzero"}


@pytest.mark.parametrize("name", ["swinv2_tiny_window8_256", "swinv2_cr_tiny_224"])
def test_a_network_of_log_coordinates_hears_a_stretch(name: str) -> None:
    """D1b on a single window equals the network asked by hand at twice the differences."""
    model = small(name, **SWIN, window_size=7)
    result = audit(model, interventions=["D1b"], checks=False)
    by_hand = copy.deepcopy(model)
    for module in by_hand.modules():
        for key in ("relative_coords_table", "relative_coordinates_log"):
            if key not in dict(module.named_buffers(recurse=False)):
                continue
            values = getattr(module, key)
            if key == "relative_coords_table":  # sign * log2(1 + |8 d / 6|) / 3
                far = (8 ** values.abs() - 1) * 2
                moved = torch.log2(1 + far) / 3
            else:  # sign * ln(1 + |d|)
                moved = torch.log1p(2 * values.abs().expm1())
            setattr(module, key, values.sign() * moved)
    image = Subject(model).image
    wanted = apart(rows_of(by_hand, image), rows_of(model, image))
    assert end(result, "D1b", "O", tokens="all") == pytest.approx(wanted, rel=1e-3)
    assert wanted > 1e-3


def test_log_coordinates_of_another_form_are_refused() -> None:
    """Entries that are no logarithm of differences show no form."""
    with pytest.raises(PositionError, match="no known form"):
        log_form(torch.tensor([0.0, 1.0, 4.0, 9.0], dtype=torch.float64))
    with pytest.raises(PositionError, match="one difference"):
        log_form(torch.tensor([0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("spec", "shift", "flip"),
    [
        (vp.AxialRopeSpec(), "zero", "nonzero"),
        (vp.AlibiSpec(), "zero", "zero"),
        (vp.SinCosSpec(), "nonzero", "nonzero"),
    ],
    ids=["rotate", "bias", "add"],
)
def test_attached_encodings_are_moved(spec: Any, shift: str, flip: str) -> None:
    """What is attached answers for other places, by each door."""
    model = opened(
        create("vit_tiny_patch16_224", SIZE, pos_embed="none", class_token=False, global_pool="avg")
    )
    retrofit.attach(model, spec, strength=1.0)
    result = audit(model, interventions=["P2", "S1", "R1", "N2"], checks=False)
    assert {row.verdict for row in result.of("P2")} == {"zero"}
    assert {row.verdict for row in result.of("S1", variant="1 cell", where="end")} == {shift}
    assert {row.verdict for row in result.of("R1", where="end")} == {flip}
    assert {row.verdict for row in result.of("N2", where="end")} == {"nonzero"}
    assert result.scheme == spec.kind
    assert not result.surprises


def test_a_convolution_leaks_masked_tokens() -> None:
    """A masked patch is still heard by its neighbours through a conditional encoding; attention alone hides it."""
    clean = audit(vit(SIZE), interventions=["N3"], checks=False)
    assert {row.verdict for row in clean} == {"zero"}
    model = vit(SIZE)
    retrofit.attach(model, vp.PegSpec(after=(0,)), strength=1.0)
    opened(model)
    leaky = audit(model, interventions=["N3"], checks=False)
    assert end(leaky, "N3", "O", tokens="patches") > 1e-3


def test_larger_grids() -> None:
    """A finer grid keeps the view, a wider one the scale; a table has no wider view."""
    result = audit(rope(), interventions=["G1", "zoom", "extend"], checks=False)
    assert end(result, "G1", "outside", variant="new sides told", tokens="patches") == 0.0
    assert end(result, "G1", "outside", variant="trained sides told", tokens="patches") > 0.1
    # Twice 3 and twice 5 cells: phases grow from 2 and 4 cells to 5 and 9.
    phase = end(result, "G1", "phase", variant="trained sides told", tokens="patches")
    assert phase == pytest.approx(5 / 2 - 1, rel=1e-5)
    assert end(result, "zoom", "A") < end(result, "extend", "A")
    table = audit(vit(SIZE), interventions=["extend", "zoom"], checks=False)
    assert {row.verdict for row in table.of("extend")} == {"undefined"}
    assert "resampled to the view" in table.of("extend")[0].note
    assert {row.verdict for row in table.of("zoom", where="end")} == {"nonzero"}


def test_precision() -> None:
    """Float64 is exact to its own rounding; bfloat16 certifies no zero."""
    bare = rope(class_token=False, global_pool="avg")
    exact = audit(bare, interventions=["P2", "S1"], dtype=torch.float64, checks=False)
    assert {row.verdict for row in exact} == {"zero"}
    assert max(row.value or 0.0 for row in exact.of("P2")) < 1e-13
    coarse = audit(rope(), interventions=["P2"], dtype=torch.bfloat16, checks=False)
    assert coarse.complete
    assert "zero" not in {row.verdict for row in coarse}


# The user's model.


def state_of(model: nn.Module) -> dict[str, Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    keys = [sorted(vars(m)) for m in model.modules()]
    kept = [dict(getattr(m, "attention_bias_cache", {})) for m in model.modules()]
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "ids": [id(p) for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "dtypes": [p.dtype for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks,
        "keys": keys,
        "caches": [sorted(map(str, one)) for one in kept],
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("name", ["vit", "levit", "coat", "attached"])
def test_the_model_is_never_written_to(name: str) -> None:
    """Weights, their objects and versions, flags, hooks, caches and torch's generator stay as they were."""
    model: Any = {
        "vit": lambda: vit(SIZE),
        "levit": lambda: small("levit_128s", img_size=64),
        "coat": lambda: small("coat_tiny", img_size=64),
        "attached": _attached,
    }[name]()
    model.train()
    model.get_submodule(next(iter(dict(model.named_children())))).eval()  # flags need not agree
    before = state_of(model)
    audit(model, interventions=["P1", "P2", "R1", "N2", "zoom"])
    audit(model, interventions=["P1"], dtype=torch.float64)
    assert same(state_of(model), before)


def _attached() -> Any:
    model = vit(SIZE)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    return model


class Failing:
    """Raises from its n-th call on."""

    def __init__(self, after: int) -> None:
        self.left = [after]

    def __deepcopy__(self, memo: Any) -> "Failing":
        return self  # all copies count together

    def __call__(self, *_: Any) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise ZeroDivisionError("planted")


def test_what_fails_is_a_row_and_the_model_stays() -> None:
    """An intervention that raises is marked, those before stand, and nothing is left behind."""
    model = vit(SIZE)
    model.blocks[1].register_forward_hook(Failing(6))
    before = state_of(model)
    # Tokens, the same call twice, the base: then P1 and P2 stand, and all others fail, seed 1 as a whole.
    names = ["P1", "P2", "R1", "R2", "N2"]
    result = audit(model, interventions=names, seeds=[0, 1], checks=False)
    assert not result.complete
    assert {row.intervention for row in result if row.seed == 0 and row.value is not None} == {
        "P1",
        "P2",
    }
    assert {row.intervention for row in result if row.seed == 1} == set(names)
    failed = [row for row in result if row.verdict == "failed"]
    assert failed
    assert all("ZeroDivisionError: planted" in row.note for row in failed)
    assert result.of("P1", seed=0, where="end", verdict="nonzero")
    assert same(state_of(model), before)


def test_progress_is_told() -> None:
    """Every step is told, counted from 0 to all."""
    told: list[tuple[str, int, int]] = []
    audit(vit(SIZE), interventions=["P1", "R1"], progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1][0] == "done"
    assert told[-1][1] == told[-1][2] == told[0][2]


# Bad input.


def test_a_model_without_a_seam_is_refused() -> None:
    """A class without a row is named, with the classes that have one."""
    with pytest.raises(PositionError, match="Sequential, which is no class that visionpos knows"):
        audit(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PositionError, match="ResNet"):
        audit(timm.create_model("resnet18", num_classes=0))


def test_an_image_that_the_model_cannot_take_is_refused() -> None:
    """The size and the class are named."""
    with pytest.raises(
        PositionError, match=r"VisionTransformer fails on an image \(1, 3, 50, 80\)"
    ):
        audit(vit(SIZE), size_hw=(50, 80))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    """A lock on a module is named as what stands in the way."""
    model = vit(SIZE)
    model.lock = threading.Lock()
    with pytest.raises(PositionError, match="model cannot be copied"):
        audit(model)


def test_features_of_a_broken_model_say_what_broke() -> None:
    """A bare error of torch becomes one that names the model and the image."""
    model = vit(SIZE)
    model.norm = nn.LayerNorm(7)
    with pytest.raises(PositionError, match="VisionTransformer fails on an image"):
        features(model, torch.zeros(1, 3, *SIZE))


@pytest.mark.slow
def test_vit_small_takes_under_a_minute() -> None:
    """A whole audit of ViT-S at 224 px: time, and memory in forward passes of the model, weights included."""
    from benchmarks.audit import rows

    memory, seconds = (row["to peer"] for row in rows())
    assert float(str(seconds)) < 1.0
    assert float(str(memory)) < 3.0
