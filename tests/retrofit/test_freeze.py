"""freeze: a copy for one size, bit-identical, with nothing left to compute about positions."""

import copy
import pickle
from typing import Any

import pytest
import torch

import visionpos as vp
from tests.retrofit.zoo import NAMED, Case, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.freeze import FrozenAttachment, FrozenRope

SIZE = (64, 96)
PLAIN = [case for case in NAMED if "distilled" not in case.name]
CASES = [
    pytest.param(case, marks=pytest.mark.slow) if "r26" in case.name else case for case in PLAIN
]
SPECS = {
    "axial": vp.AxialRopeSpec(),
    "half": vp.AxialRopeSpec(pairing="half"),
    "mixed": vp.MixedRopeSpec(),
    "jitter": vp.AxialRopeSpec(coords=vp.CoordSpec(jitter=1.5, scope="block")),
    "sincos": vp.SinCosSpec(),
    "learned": vp.LearnedSpec(grid_hw=(3, 5), std=0.5),
    "alibi": vp.AlibiSpec(),
    "liere": vp.LiereSpec(block=8),
    "comrope": vp.ComropeSpec(),
    "string": vp.StringRopeSpec(learn_frequencies=True),
}
# What forms positions: frequencies, lattices, exponents of a bias.
FORMING = {"cos", "sin", "arange", "meshgrid", "linspace", "exp", "log", "matmul"}


def attached(kind: str, **changes: Any) -> Any:
    torch.manual_seed(11)
    model = vit(**changes)
    retrofit.attach(model, SPECS[kind], strength=0.7, name="mine")
    return model


def features(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.forward_features(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_freeze_is_bit_identical(case: Case) -> None:
    model, x = case.build(), case.image()
    retrofit.attach(model, vp.MixedRopeSpec(pairing=case.pairing or "adjacent"), strength=0.7)
    frozen = retrofit.freeze(model, case.size_hw)
    assert torch.equal(features(frozen, x), features(model, x))


@pytest.mark.parametrize("kind", SPECS)
def test_freeze_attachment_is_bit_identical(kind: str) -> None:
    model, x = attached(kind), image(SIZE)
    frozen: Any = retrofit.freeze(model, SIZE)
    assert torch.equal(features(frozen, x), features(model, x))
    part = retrofit.attachments(frozen)["mine"]
    assert type(part) is FrozenAttachment
    assert not any(weight.requires_grad for weight in frozen.parameters())


def test_freeze_of_a_bias_that_differs_from_layer_to_layer() -> None:
    """LookHere has another slope in every layer; the first layer's would do for none of the others."""
    model, x = vit(num_heads=8), image(SIZE)
    spec = vp.LookHereSpec(views=(("halves", 4), ("none", 4)))
    retrofit.attach(model, spec, strength=0.7, name="mine")
    frozen: Any = retrofit.freeze(model, SIZE)
    assert len(retrofit.attachments(frozen)["mine"].layers) == len(model.blocks)  # type: ignore[arg-type]
    assert torch.equal(features(frozen, x), features(model, x))


@pytest.mark.parametrize("size", [SIZE, (32, 224), (80, 48)])
@pytest.mark.parametrize("kind", ["mixed", "learned"])
def test_freeze_of_dynamic_sizes(kind: str, size: tuple[int, int]) -> None:
    """The table is what timm would resample at run time, and stays so."""
    model, x = attached(kind, dynamic_img_size=True), image(size)
    frozen: Any = retrofit.freeze(model, size)
    assert torch.equal(features(frozen, x), features(model, x))
    assert "pos_embed" in dict(frozen.named_buffers())
    assert frozen.pos_embed.shape[1] == size[0] * size[1] // 256 + 1


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_ape_224", "eva02_tiny_patch14_224"],
)
def test_freeze_of_dynamic_eva(name: str) -> None:
    patch = 14 if "14" in name else 16
    model: Any = Case(name, patch).build(dynamic_img_size=True)
    for grid in ((4, 6), (7, 3)):
        size = (grid[0] * patch, grid[1] * patch)
        frozen: Any = retrofit.freeze(model, size)
        assert isinstance(frozen.rope, FrozenRope)
        assert torch.equal(features(frozen, image(size)), features(model, image(size)))


def test_freeze_of_padded_sizes() -> None:
    model = attached("axial", dynamic_img_size=True, dynamic_img_pad=True)
    frozen = retrofit.freeze(model, (50, 75))
    assert torch.equal(features(frozen, image((50, 75))), features(model, image((50, 75))))
    with pytest.raises(PositionError, match="image is 64x80"):
        frozen(image((64, 80)))  # the same grid after padding


def test_freeze_of_several_and_learned_strengths() -> None:
    model, x = vit(), image(SIZE)
    for number, (kind, spec) in enumerate(SPECS.items()):
        if kind not in ("half", "liere", "comrope", "string"):
            retrofit.attach(
                model, spec, strength=0.2 * number, learn_strength=number % 2 == 0, name=kind
            )
    frozen = retrofit.freeze(model, SIZE)
    assert torch.equal(features(frozen, x), features(model, x))
    assert retrofit.attachments(frozen)["mixed"].rotation is not None


def test_freeze_after_a_fade() -> None:
    model, x = vit(), image(SIZE)
    ramp = retrofit.fade_table(model, vp.AxialRopeSpec(), retrofit.Schedule(steps=4), name="new")
    for step in (0, 3, 4):
        ramp.set(step, model)
        assert torch.equal(features(retrofit.freeze(model, SIZE), x), features(model, x))


@pytest.mark.parametrize(
    "kind",
    [
        k if k in ("mixed", "learned", "alibi") else pytest.param(k, marks=pytest.mark.slow)
        for k in SPECS
    ],
)
def test_freeze_leaves_nothing_to_compute(kind: str) -> None:
    """In the exported graph no operation forms a position, and no number is complex; before, some do."""
    model, x = attached(kind, depth=1), image(SIZE)
    formed = []
    for one in (model, retrofit.freeze(model, SIZE)):
        with torch.no_grad():
            graph = torch.export.export(one, (x,)).graph
        graph.eliminate_dead_code()  # the export records what nobody uses; ONNX and AOTInductor drop it too
        values = [node.meta["val"] for node in graph.nodes if "val" in node.meta]
        assert not any(torch.is_tensor(value) and value.is_complex() for value in values)
        names = {part for node in graph.nodes for part in str(node.target).split(".")}
        formed.append(names & FORMING)
    assert formed[0]
    assert formed[1] == set()


def test_freeze_leaves_the_model_alone() -> None:
    model, x = attached("mixed", dynamic_img_size=True), image(SIZE)
    state, expected = copy.deepcopy(model.state_dict()), features(model, x)
    frozen = retrofit.freeze(model, (32, 32))
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(features(model, x), expected)
    assert all(weight.requires_grad for weight in model.parameters())
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert shared.isdisjoint(buffer.data_ptr() for buffer in frozen.buffers())


def test_freeze_rotations_keep_their_precision_when_cast() -> None:
    """As in a model that is cast before: bfloat16 turns by float32 angles."""
    model = attached("half")
    early = retrofit.freeze(copy.deepcopy(model).bfloat16(), SIZE)
    late = retrofit.freeze(model, SIZE).bfloat16()
    turns: Any = retrofit.attachments(late)["mine"].layers[0]
    assert turns.cos.dtype == torch.float32
    x = image(SIZE).bfloat16()
    assert torch.equal(features(late, x), features(early, x))
    assert turns.to("meta").cos.device.type == "meta"


def test_freeze_copies_pickles_and_loads() -> None:
    model, x = attached("mixed"), image(SIZE)
    frozen = retrofit.freeze(model, SIZE)
    expected = features(frozen, x)
    assert torch.equal(features(copy.deepcopy(frozen), x), expected)
    assert torch.equal(features(pickle.loads(pickle.dumps(frozen)), x), expected)
    torch.manual_seed(99)
    other = vit()
    retrofit.attach(other, SPECS["mixed"], strength=0.7, name="mine")
    target = retrofit.freeze(other, SIZE)
    assert not torch.equal(features(target, x), expected)
    target.load_state_dict(frozen.state_dict())
    assert torch.equal(features(target, x), expected)
    with pytest.raises(PositionError, match=r"image is 96x64"):
        copy.deepcopy(frozen)(image((96, 64)))


@pytest.mark.parametrize("size", [(96, 64), (64, 112), (65, 96), (32, 192)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_freeze_refuses_other_images(dynamic: bool, size: tuple[int, int]) -> None:
    """Also those of as many tokens: 96x64 and 32x192."""
    frozen: Any = retrofit.freeze(attached("axial", dynamic_img_size=dynamic), SIZE)
    match = f"image is {size[0]}x{size[1]}; this model is frozen for 64x96 alone. Resize the image"
    for run in (frozen, frozen.forward_features, frozen.forward_intermediates):
        with pytest.raises(PositionError, match=match):
            run(image(size))


def test_freeze_error() -> None:
    with pytest.raises(
        PositionError, match=r"size_hw is \(96, 64\) and the model serves a grid of \(4, 6\)"
    ):
        retrofit.freeze(vit(), (96, 64))
    with pytest.raises(PositionError, match=r"size_hw \(60, 96\) is not divisible"):
        retrofit.freeze(vit(dynamic_img_size=True), (60, 96))
    distilled = Case("deit_tiny_distilled_patch16_224").build()
    with pytest.raises(PositionError, match="VisionTransformerDistilled"):
        retrofit.freeze(distilled, SIZE)


def test_freeze_refuses_dropped_tokens() -> None:
    """A frozen model that is told to train drops patches, which its cosines and sines do not follow."""
    model = attached("axial", patch_drop_rate=0.5)
    frozen = retrofit.freeze(model, SIZE).train()
    with pytest.raises(PositionError, match="with tokens dropped; the model is frozen for all of"):
        frozen(image(SIZE))
    assert torch.equal(features(frozen.eval(), image(SIZE)), features(model, image(SIZE)))
