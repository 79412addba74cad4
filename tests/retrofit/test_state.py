"""State belongs to the call and to the module: copies, pickles, checkpoints, dropped tokens, casts, threads, training.

Every pitfall of facts/timm.md 2.3 and facts/timm_seams.md 4 that touches VisionTransformer and Eva is a test here.
"""

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from timm.models import checkpoint_seq
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import visionpos as vp
from tests.retrofit.zoo import CASES, NAMED, Case, apart, axial, hand_rotation, image, vit
from tests.tolerances import error_ratio
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.hooks import EnterHook

SIZE = (64, 96)
# Two crops of one token count and different shape: a stale grid fits both, and is wrong for one.
CROPS = ((32, 192), (96, 64))
JITTER = {"shift": 2.0, "jitter": 1.5, "rescale": 1.5}
EVA02 = Case("eva02_tiny_patch14_224", 14, "adjacent")

ROTARY = {
    "axial": vp.AxialRopeSpec(),
    "half": vp.AxialRopeSpec(pairing="half"),
    "mixed": vp.MixedRopeSpec(),
    "jitter": vp.AxialRopeSpec(coords=vp.CoordSpec(**JITTER)),
    "jitter block": vp.MixedRopeSpec(coords=vp.CoordSpec(**JITTER, scope="block")),
    "jitter sample": vp.AxialRopeSpec(coords=vp.CoordSpec(**JITTER, scope="sample")),
}
KINDS = {**ROTARY, "learned": vp.LearnedSpec(grid_hw=(3, 5), std=0.5), "sincos": vp.SinCosSpec()}


def attached(kind: str, *, strength: float = 1.0, learn: bool = False, **changes: Any) -> Any:
    """Return a small model with one attachment, of one seed."""
    torch.manual_seed(11)
    model = vit(**changes)
    retrofit.attach(model, KINDS[kind], strength=strength, learn_strength=learn, name="mine")
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# Copies.


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_independent(kind: str, learn: bool) -> None:
    """An EMA copy or a teacher turns by its own frequencies, at sizes of its own."""
    model, x = attached(kind, learn=learn, dynamic_img_size=True), image(SIZE)
    with torch.no_grad():
        before = model.forward_features(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin.forward_features(x), before)
        assert retrofit.attachments(twin)["mine"] is not retrofit.attachments(model)["mine"]
        twin.forward_features(image((96, 32)))
        assert torch.equal(model.forward_features(x), before)
        for name, weight in twin.named_parameters():
            if name.startswith("visionpos."):
                weight.mul_(3.0)
        retrofit.attachments(twin)["mine"].set_strength(0.5)
        changed = twin.forward_features(x)
        assert apart(changed, before) > 1e-3
        assert torch.equal(model.forward_features(x), before)


def test_tripling_the_copys_frequencies_changes_the_copy_alone() -> None:
    model, x = attached("mixed"), image(SIZE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model.forward_features(x)
        twin.visionpos.mine.encoding.frequencies.mul_(3.0)
        assert apart(twin.forward_features(x), before) > 1e-2
        assert torch.equal(model.forward_features(x), before)
        model.visionpos.mine.encoding.frequencies.mul_(3.0)
        assert torch.equal(model.forward_features(x), twin.forward_features(x))


def test_an_average_follows_training() -> None:
    """timm's EMA: a deep copy whose state dict is blended with the model's."""
    model, x = attached("mixed", learn=True).train(), image(SIZE)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward_features(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(
            average.state_dict().values(), model.state_dict().values(), strict=True
        ):
            mine.lerp_(theirs, 1.0)
        assert torch.equal(average.forward_features(x), model.forward_features(x))


@pytest.mark.parametrize("way", ["pickle", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_pickle(kind: str, way: str) -> None:
    """A whole model goes through pickle and torch.save, patch dropout and resize record included."""
    model, x = attached(kind, learn=True, patch_drop_rate=0.5), image((96, 64))
    retrofit.resize(model, (96, 64))
    with torch.no_grad():
        before = model.forward_features(x)
        if way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert torch.equal(twin.forward_features(x), before)
        retrofit.resize(twin, SIZE)
        retrofit.resize(model, SIZE)
        assert torch.equal(twin.pos_embed, model.pos_embed)
        retrofit.detach(twin)
        retrofit.detach(model)
        assert torch.equal(twin.forward_features(image(SIZE)), model.forward_features(image(SIZE)))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copy_in_the_middle_of_a_call_takes_nothing_along(
    duplicate: Callable[[Any], Any],
) -> None:
    model = attached("axial")
    model.patch_embed(image(SIZE))
    twin = duplicate(model)
    with pytest.raises(PositionError, match=r"a block ran before patch_embed"):
        twin.blocks(torch.randn(1, 25, 64))


def test_a_generator_stays_behind() -> None:
    """Copies use torch's default generator: two models never share a stream of draws."""
    torch.manual_seed(0)
    model = vit().train()
    generator = torch.Generator().manual_seed(1)
    retrofit.attach(model, ROTARY["jitter"], strength=1.0, name="mine", generator=generator)
    state = generator.get_state()
    x = image(SIZE)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.forward_features(x)
    assert torch.equal(generator.get_state(), state)
    model.forward_features(x)
    assert not torch.equal(generator.get_state(), state)


# Sizes one after the other.


@pytest.mark.parametrize("kind", ["axial", "mixed", "half", "learned", "sincos"])
def test_sizes_in_turn_leave_nothing_behind(kind: str) -> None:
    """A, B, A with equal token counts: no cache can be stale."""
    model = attached(kind, dynamic_img_size=True)
    images = [image(size) for size in CROPS]
    with torch.no_grad():
        alone = [copy.deepcopy(model).forward_features(x) for x in images]
        for which in (0, 1, 0, 0, 1, 1):
            assert torch.equal(model.forward_features(images[which]), alone[which])
    assert apart(alone[0], alone[1]) > 1e-3


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_two_images_embedded_before_either_meets_a_block(kind: str) -> None:
    """Tokens carry their call along: the order in which a caller runs the halves of a model does not matter."""
    model = attached(kind, dynamic_img_size=True)

    def embedded(x: Tensor) -> Tensor:
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))

    with torch.no_grad():
        images = [image(size) for size in CROPS]
        expected = [model.forward_features(x) for x in images]
        tokens = [embedded(x) for x in images]
        for which in (0, 1):
            assert torch.equal(model.norm(model.blocks(tokens[which])), expected[which])


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_reference_any_size_at_run_time(kind: str) -> None:
    model = attached("axial", dynamic_img_size=True, pos_embed="none")
    for size in (*CROPS, (16, 16), (16, 112), (80, 48)):
        by_hand = vit(dynamic_img_size=True, pos_embed="none")
        hand_rotation(by_hand, axial(size[0] // 16, size[1] // 16), prefix=1)
        with torch.no_grad():
            x = image(size)
            assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_reference_padded_images_count_the_padded_patches() -> None:
    model = attached("axial", dynamic_img_size=True, dynamic_img_pad=True, pos_embed="none")
    by_hand = vit(dynamic_img_size=True, dynamic_img_pad=True, pos_embed="none")
    hand_rotation(by_hand, axial(4, 5), prefix=1)
    x = image((50, 75))
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


@pytest.mark.parametrize("kind", ["axial", "mixed", "learned", "sincos"])
def test_set_input_size_after_attach(kind: str) -> None:
    """timm's own set_input_size needs no help from an attachment."""
    model, late = attached(kind), attached(kind)
    retrofit.detach(late)
    for one in (model, late):
        one.set_input_size((96, 128))
    torch.manual_seed(11)
    vit()
    retrofit.attach(late, KINDS[kind], strength=1.0, name="mine")
    late.visionpos.load_state_dict(model.visionpos.state_dict())
    x = image((96, 128))
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), late.forward_features(x))


def test_set_input_size_with_other_patches() -> None:
    model = attached("axial", pos_embed="none")
    model.set_input_size(img_size=(64, 96), patch_size=8)
    by_hand = vit(pos_embed="none")
    by_hand.set_input_size(img_size=(64, 96), patch_size=8)
    hand_rotation(by_hand, axial(8, 12), prefix=1)
    x = image(SIZE)
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


# Gradient checkpointing.

WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sequence": lambda model, x: checkpoint_seq(model.blocks, x),
    "every 2": lambda model, x: checkpoint_seq(model.blocks, x, every=2),
    "skip last": lambda model, x: checkpoint_seq(model.blocks, x, every=2, skip_last=True),
    "whole": lambda model, x: checkpoint(model.blocks, x, use_reentrant=False),
    "blocks": lambda model, x: checkpoint(
        model.blocks[1], checkpoint(model.blocks[0], x, use_reentrant=False), use_reentrant=False
    ),
    "lambda": lambda model, x: checkpoint(
        lambda t: model.blocks[1](model.blocks[0](t)), x, use_reentrant=False
    ),
}


def features(model: Any, x: Tensor, way: str | None = None) -> Tensor:
    """Return what forward_features does, with the blocks run in a way of our own."""
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    return model.norm(model.blocks(x) if way is None else WAYS[way](model, x))


def two_crops(model: Any, forward: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a loss over two crops, one backward pass for both."""
    torch.manual_seed(21)
    total = torch.zeros(())
    for seed, size in enumerate(CROPS):
        total = total + forward(model, image(size, seed=seed)).square().sum()
    return gradients(model, total)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_two_crops_gives_the_same_gradients(kind: str, learn: bool) -> None:
    """Recomputation finds the grid of its own crop: bit for bit the gradients of a run without checkpoints."""
    model = attached(kind, learn=learn, dynamic_img_size=True).train()
    expected = two_crops(model, lambda m, x: m.forward_features(x))
    model.set_grad_checkpointing(True)
    assert_same(two_crops(model, lambda m, x: m.forward_features(x)), expected)
    new = {name for name, _ in model.named_parameters() if name.startswith("visionpos.")}
    assert new <= expected.keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["axial", "mixed", "jitter block"])
def test_checkpointing_in_other_ways(kind: str, way: str) -> None:
    model = attached(kind, dynamic_img_size=True, depth=3).train()
    model.blocks = model.blocks[:2]
    expected = two_crops(model, features)
    assert_same(two_crops(model, lambda m, x: features(m, x, way)), expected)


def test_checkpointing_notices_a_wrong_grid() -> None:
    """The test above can fail: turned by the last crop's grid, the gradients are far off."""
    model = attached("axial", dynamic_img_size=True).train()
    expected = two_crops(model, features)
    latest = retrofit.attachments(model)["mine"].relay  # what a shared grid would be

    def stale(m: Any, x: Tensor) -> Tensor:
        return features(m, x, "sequence")

    for block in model.blocks:
        for hook in block._forward_pre_hooks.values():
            if isinstance(hook, EnterHook):
                hook.block._call_of = lambda _: seen[-1]  # type: ignore[method-assign]
    seen, put = [], latest.put
    # The relay forgets a call that is over; a shared grid would not.
    latest.put = lambda call: (seen.append(call) if call is not None else None, put(call))
    got = two_crops(model, stale)
    assert max(apart(got[name], expected[name]) for name in got) > 1e-2


@pytest.mark.parametrize(
    "name",
    ["eva02_tiny_patch14_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3"],
)
def test_checkpointing_eva(name: str) -> None:
    case = next(case for case in NAMED if case.name == name)
    model = case.build(dynamic_img_size=True).train()
    retrofit.attach(model, vp.MixedRopeSpec(pairing=case.pairing), strength=0.7)
    p = case.patch

    def run() -> dict[str, Tensor]:
        crops = [image((2 * p, 12 * p), seed=0), image((6 * p, 4 * p), seed=1)]
        return gradients(model, sum(model.forward_features(x).square().sum() for x in crops))

    expected = run()
    model.set_grad_checkpointing(True)
    assert_same(run(), expected)


@pytest.mark.parametrize("kind", ["axial", "mixed", "jitter sample"])
def test_checkpointing_with_patch_dropout(kind: str) -> None:
    model = attached(kind, dynamic_img_size=True, patch_drop_rate=0.5).train()
    expected = two_crops(model, lambda m, x: m.forward_features(x))
    model.set_grad_checkpointing(True)
    assert_same(two_crops(model, lambda m, x: m.forward_features(x)), expected)


def test_checkpointing_forward_intermediates() -> None:
    model = attached("mixed", dynamic_img_size=True).train()

    def forward(m: Any, x: Tensor) -> Tensor:
        last, inner = m.forward_intermediates(x, output_fmt="NLC")
        return last.square().sum() + sum(tokens.square().sum() for tokens in inner)

    expected = two_crops(model, forward)
    model.set_grad_checkpointing(True)
    assert_same(two_crops(model, forward), expected)


def test_checkpointing_the_whole_model() -> None:
    """The recomputed pass opens its own call, and leaves none behind for blocks that run alone."""
    model = attached("mixed", dynamic_img_size=True).train()
    expected = two_crops(model, lambda m, x: m(x))
    got = two_crops(model, lambda m, x: checkpoint(m, x, use_reentrant=False))
    assert_same(got, expected)
    model(image(SIZE))


def test_checkpointing_while_the_strength_moves_on() -> None:
    """A schedule that steps before the backward pass must not reach into the forward pass that is recomputed."""
    for kind in ("axial", "mixed"):
        model, x = attached(kind, strength=0.5).train(), image(SIZE)
        expected = gradients(model, model.forward_features(x).square().sum())
        model.set_grad_checkpointing(True)
        loss = model.forward_features(x).square().sum()
        model.visionpos.mine.set_strength(1.0)
        assert_same(gradients(model, loss), expected)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["axial", "mixed", "jitter block"])
def test_checkpointing_reentrant(kind: str, every: int) -> None:
    """Re-entrant recomputation runs on an alias of its input: the memory still says which call it belongs to."""
    model = attached(kind, dynamic_img_size=True).train()
    expected = two_crops(model, features)

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x))))
        return m.norm(checkpoint_seq(m.blocks, tokens, every=every, use_reentrant=True))

    assert_same(two_crops(model, forward), expected)


class CopiedInput(torch.autograd.Function):
    """Re-entrant checkpointing that keeps a copy of its input, as offloading to another device does."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.kept = block, x.detach().clone()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with torch.enable_grad():
            x = ctx.kept.requires_grad_()
            ctx.block(x).backward(grad)
        return None, x.grad


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_checkpointing_on_a_copy_is_refused(kind: str) -> None:
    """Where the grid is lost there is an error, never the grid of another crop."""
    model = attached(kind, dynamic_img_size=True).train()

    def forward(x: Tensor) -> Tensor:
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        return CopiedInput.apply(model.blocks[1], CopiedInput.apply(model.blocks[0], tokens))

    loss = sum(forward(image(size)).square().sum() for size in CROPS)
    with pytest.raises(
        PositionError, match=r"recomputed in a backward pass on a copy.*use_reentrant=False"
    ):
        loss.backward()


def test_checkpointing_a_bare_forward_is_refused() -> None:
    """checkpoint(block.forward, x) steps around the block's hooks."""
    model = attached("mixed", dynamic_img_size=True).train()
    tokens = model._pos_embed(model.patch_embed(image(SIZE)))
    with pytest.raises(
        PositionError, match=r"ran without its block.*checkpoint\(block, x, use_reentrant=False\)"
    ):
        checkpoint(model.blocks[0].forward, tokens, use_reentrant=False)
    with pytest.raises(PositionError, match=r"ran without its block"):
        checkpoint(model.blocks[0].forward, tokens, use_reentrant=True)


def test_checkpointing_the_attention_inside_a_block() -> None:
    """A checkpoint inside the block recomputes the attention without the block: refused, not guessed."""
    model = attached("mixed", dynamic_img_size=True).train()
    for block in model.blocks:
        inner = block.attn
        block.attn = nn.Module()
        block.attn.inner = inner
        block.attn.forward = lambda x, inner=inner, **_: checkpoint(inner, x, use_reentrant=False)
    loss = model.forward_features(image(SIZE)).square().sum()
    with pytest.raises(PositionError, match=r"attention of block \d ran without its block"):
        loss.backward()


# Dropped patches.


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_siglip_224",
    ],
)
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_reference_patch_dropout_keeps_angles_with_tokens(name: str, kind: str) -> None:
    """Kept tokens keep the angles of their own places: a hand-made rotation of the indices that were drawn says so."""
    case = next(case for case in NAMED if case.name == name)
    model, by_hand = (
        case.build(patch_drop_rate=0.5).train(),
        case.build(patch_drop_rate=0.5).train(),
    )
    x, prefix = case.image(), int(model.num_prefix_tokens)
    attachment = retrofit.attach(model, ROTARY[kind], strength=1.0)
    torch.manual_seed(9)
    features = model.forward_features(x)
    torch.manual_seed(9)
    kept = torch.argsort(torch.randn(2, 24), dim=-1)[:, :12]
    if kind == "axial":
        table = np.stack([axial(4, 6)[row][None] for row in kept.numpy()])  # [b, 1, kept, pairs]
        angles = np.stack([table, table])
    else:
        rope = attachment.encoding
        full = [rope.angles(vp.coordinates(vp.Grid(4, 6)), layer) for layer in range(2)]
        angles = np.stack(
            [
                np.stack([turn.detach().double().numpy()[:, row] for row in kept.numpy()])
                for turn in full
            ]
        )
    hand_rotation(by_hand, angles, prefix=prefix)
    torch.manual_seed(9)
    assert apart(features, by_hand.forward_features(x)) < 1e-6
    assert features.shape[1] == prefix + 12


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "eva02_tiny_patch14_224",
        "vit_small_patch16_rope_mixed_224",
        "vit_small_patch16_dinov3",
    ],
)
def test_patch_dropout_draws_what_it_drew(name: str) -> None:
    """The same tokens are kept with and without an attachment, and at strength 0 the features are the same bits."""
    case = next(case for case in NAMED if case.name == name)
    model, x = case.build(patch_drop_rate=0.5).train(), case.image()
    torch.manual_seed(9)
    expected = model.forward_features(x)
    attachment = retrofit.attach(model, vp.AxialRopeSpec(pairing=case.pairing or "adjacent"))
    torch.manual_seed(9)
    assert torch.equal(model.forward_features(x), expected)
    attachment.set_strength(1.0)
    torch.manual_seed(9)
    assert apart(model.forward_features(x), expected) > 1e-3
    model.eval()
    assert model.forward_features(x).shape[1] == model.num_prefix_tokens + 24


def test_error_patch_dropout_that_drops_a_prefix_token() -> None:
    """timm's distilled DeiT spares one prefix token of two, so its indices are not those of patches."""
    case = next(case for case in NAMED if "distilled" in case.name)
    model = case.build(patch_drop_rate=0.5).train()
    with pytest.raises(
        PositionError, match=r"spares 1 prefix tokens and the model has 2.*num_prefix_tokens = 2"
    ):
        retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    model.patch_drop.num_prefix_tokens = 2
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    assert model.forward_features(case.image()).shape[1] == 2 + 12


def test_reference_patch_dropout_beside_the_models_own_rotation() -> None:
    """EVA-02 gathers its own table by the kept indices; the attached angles come on top, at the same places."""
    model, by_hand = (
        EVA02.build(patch_drop_rate=0.5).train(),
        EVA02.build(patch_drop_rate=0.5).train(),
    )
    x = EVA02.image()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    torch.manual_seed(9)
    features = model.forward_features(x)
    torch.manual_seed(9)
    kept = torch.argsort(torch.randn(2, 24), dim=-1)[:, :12].numpy()
    table = np.stack([axial(4, 6)[row][None] for row in kept])
    hand_rotation(by_hand, np.stack([table, table]), prefix=1)
    torch.manual_seed(9)
    assert apart(features, by_hand.forward_features(x)) < 1e-6


@pytest.mark.parametrize("kind", list(ROTARY))
def test_patch_dropout_with_every_scope_and_two_attachments(kind: str) -> None:
    model = attached(kind, patch_drop_rate=0.5).train()
    retrofit.attach(
        model,
        vp.AxialRopeSpec(theta=7.0, pairing=ROTARY[kind].pairing),
        strength=0.5,
        name="second",
    )
    features = model.forward_features(image(SIZE))
    assert features.shape == (2, 13, 64)
    assert features.isfinite().all()


def test_added_vectors_come_before_the_dropout() -> None:
    model, x = attached("sincos", patch_drop_rate=0.5).train(), image(SIZE)
    by_hand = vit(patch_drop_rate=0.5).train()
    rows = retrofit.attachments(model)["mine"].encoding(vp.Grid(4, 6))
    with torch.no_grad():
        by_hand.pos_embed[:, 1:] += rows
    torch.manual_seed(9)
    features = model.forward_features(x)
    torch.manual_seed(9)
    assert apart(features, by_hand.forward_features(x)) < 1e-6


# Other ways through a model.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_intermediates(case: Case) -> None:
    """timm's second loop over the blocks sees the same rotation."""
    model, x = case.build(), case.image()
    retrofit.attach(model, vp.MixedRopeSpec(pairing=case.pairing or "adjacent"), strength=1.0)
    with torch.no_grad():
        last, inner = model.forward_intermediates(x, norm=True, output_fmt="NLC")
        assert torch.equal(last, model.forward_features(x))
        assert torch.equal(inner[-1], last[:, model.num_prefix_tokens :])
        early = model.forward_intermediates(
            x, indices=[0], stop_early=True, intermediates_only=True, output_fmt="NLC"
        )
        plain = model.forward_intermediates(
            x, indices=[0], intermediates_only=True, output_fmt="NLC"
        )
        assert torch.equal(early[0], plain[0])
        assert torch.equal(model.forward_features(x), last)


def test_pruned_layers() -> None:
    model, x = attached("mixed", depth=3), image(SIZE)
    with torch.no_grad():
        inner = model.forward_intermediates(
            x, indices=[1], intermediates_only=True, output_fmt="NLC"
        )
        model.prune_intermediate_layers([1])
        again = model.forward_intermediates(
            x, indices=[1], intermediates_only=True, output_fmt="NLC"
        )
        assert torch.equal(inner[0], again[0])
    retrofit.detach(model)


def test_a_failed_call_leaves_no_trace() -> None:
    model, x = attached("mixed", dynamic_img_size=True), image(SIZE)
    with torch.no_grad():
        expected = model.forward_features(x)
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward_features(image(CROPS[0]))
        handle.remove()
        assert torch.equal(model.forward_features(x), expected)


def test_threads_do_not_hear_each_other() -> None:
    """Two threads share a model, one a size each; the token counts agree, so only the results tell."""
    model = attached("mixed", dynamic_img_size=True)
    images = [image(size, batch=4) for size in CROPS]
    wrong: list[object] = []
    with torch.no_grad():
        expected = [model.forward_features(x) for x in images]

    def work(which: int) -> None:
        with torch.no_grad():
            for _ in range(100):
                try:
                    if not torch.equal(model.forward_features(images[which]), expected[which]):
                        wrong.append(which)
                except Exception as error:
                    wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


# Precision.


@pytest.mark.parametrize("kind", ["axial", "half", "mixed", "learned", "sincos"])
def test_autocast(kind: str) -> None:
    """Angles are formed in float32 under autocast, so that what bfloat16 costs is what it costs the plain model."""
    model, plain, x = (
        attached(kind, dynamic_img_size=True),
        vit(dynamic_img_size=True),
        image((256, 288)),
    )
    with torch.no_grad():
        expected, base = model.forward_features(x), plain.forward_features(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low, low_base = model.forward_features(x), plain.forward_features(x)
    assert error_ratio(low, expected) < 1.5 * error_ratio(low_base, base)


@pytest.mark.parametrize("kind", ["axial", "half", "sincos"])
def test_bfloat16_changes_no_frequency(kind: str) -> None:
    """Fixed frequencies are rebuilt from the spec: a cast of the model and back cannot touch them."""
    model, x = attached(kind, dynamic_img_size=True), image((256, 288))
    attachment = retrofit.attachments(model)["mine"]
    grid = vp.Grid(16, 18)
    read = (
        (lambda: attachment.encoding(grid))
        if kind == "sincos"
        else (lambda: attachment.encoding(grid).cos)
    )
    before = read()
    with torch.no_grad():
        model.bfloat16()
        low = model.forward_features(x.bfloat16())
        assert low.dtype == torch.bfloat16
        assert torch.equal(read(), before)
        plain = vit(dynamic_img_size=True)
        base = plain.forward_features(x)
        low_base = plain.bfloat16().forward_features(x.bfloat16())
        high = attached(kind, dynamic_img_size=True).forward_features(x)
    assert error_ratio(low, high) < 1.5 * error_ratio(low_base, base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_runs_and_keeps_its_dtype(kind: str, dtype: torch.dtype) -> None:
    model = attached(kind, learn=True).to(dtype).train()
    out = model.forward_features(image(SIZE).to(dtype))
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert all(
        w.grad is not None for n, w in model.named_parameters() if n.startswith("visionpos.")
    )


def test_float64_is_computed_in_float64() -> None:
    """A model in double precision loses nothing but what float32 angles cost."""
    model = attached("mixed").double()
    by_hand = vit().double()
    rope = model.visionpos.mine.encoding
    coords = vp.coordinates(vp.Grid(4, 6)).double()
    angles = np.stack([rope.angles(coords, layer).detach().numpy() for layer in range(2)])
    hand_rotation(by_hand, angles, prefix=1)
    x = image(SIZE).double()
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_inference_mode_and_no_grad_then_training() -> None:
    """Tensors of an inference pass do not leak into a training pass."""
    model, x = attached("axial", learn=True).train(), image(SIZE)
    with torch.inference_mode():
        model.forward_features(x)
    with torch.no_grad():
        model.forward_features(x)
    assert "visionpos.mine.learned_strength" in gradients(
        model, model.forward_features(x).square().sum()
    )


# Training-time coordinates.


def drawn(
    scope: str, *, seed: int = 4, kind: Any = vp.AxialRopeSpec, x: Tensor | None = None
) -> Tensor:
    """Return features of a training pass whose coordinates are drawn from a seeded generator."""
    torch.manual_seed(11)
    model = vit(pos_embed="none").train()
    spec = kind(coords=vp.CoordSpec(**JITTER, scope=scope))
    generator = torch.Generator().manual_seed(seed)
    retrofit.attach(model, spec, strength=1.0, generator=generator)
    return model.forward_features(image(SIZE) if x is None else x)


@pytest.mark.parametrize("scope", ["forward", "block", "sample"])
@pytest.mark.parametrize("kind", [vp.AxialRopeSpec, vp.MixedRopeSpec])
def test_jitter_follows_its_generator(scope: str, kind: Any) -> None:
    first = drawn(scope, kind=kind)
    torch.manual_seed(999)
    assert torch.equal(drawn(scope, kind=kind), first)
    assert apart(drawn(scope, seed=5, kind=kind), first) > 1e-3


@pytest.mark.parametrize("kind", [vp.AxialRopeSpec, vp.MixedRopeSpec])
def test_jitter_scopes_share_draws_as_they_say(kind: Any) -> None:
    """Two equal samples stay equal under one draw a forward or a block, and part under a draw a sample."""
    x = image(SIZE, batch=1).repeat(2, 1, 1, 1)
    for scope in ("forward", "block"):
        features = drawn(scope, kind=kind, x=x)
        assert torch.equal(features[0], features[1])
    features = drawn("sample", kind=kind, x=x)
    assert apart(features[0], features[1]) > 1e-3


def test_reference_jitter_of_every_scope() -> None:
    """The draws are those of `augment` under the same seed, laid on layers or samples in order."""
    x = image(SIZE)
    still = vp.coordinates(vp.Grid(4, 6))
    speeds = vp.axial_freqs(32, theta=100.0)
    for scope, draws in (("forward", None), ("block", 2), ("sample", 2)):
        spec = vp.CoordSpec(**JITTER, scope=scope)
        moved = vp.augment(still, spec, draws=draws, generator=torch.Generator().manual_seed(4))
        turns = vp.angles(moved.double(), speeds.double()).numpy()
        if scope == "block":
            turns = turns[:, None]  # [layers, heads or 1, n, pairs]
        elif scope == "sample":
            turns = np.stack([turns[:, None], turns[:, None]])  # [layers, b, 1, n, pairs]
        by_hand = vit(pos_embed="none").train()
        hand_rotation(by_hand, turns, prefix=1)
        assert apart(drawn(scope), by_hand.forward_features(x)) < 1e-6


def test_jitter_is_for_training_alone() -> None:
    model, plain, x = attached("jitter sample"), attached("axial"), image(SIZE)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), plain.forward_features(x))
        model.train()
        assert apart(model.forward_features(x), plain.forward_features(x)) > 1e-3
        model.eval()
        assert torch.equal(model.forward_features(x), plain.forward_features(x))


# Learning.


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "jitter" not in kind])
def test_gradient_reaches_a_learned_strength_at_zero(kind: str) -> None:
    model, x = attached(kind, strength=0.0, learn=True).train(), image(SIZE)
    found = gradients(model, model.forward_features(x).square().sum())
    assert float(found["visionpos.mine.learned_strength"].abs()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_reaches_every_new_parameter_above_zero(kind: str) -> None:
    model, x = attached(kind, strength=0.3, learn=True).train(), image(SIZE)
    found = gradients(model, model.forward_features(x).square().sum())
    new = {n for n, _ in model.named_parameters() if n.startswith("visionpos.")}
    assert new <= found.keys()
    for name in new:
        grad = found[name]
        assert float(grad.abs().max()) > 1e-4, name
        if name.endswith("frequencies"):
            assert all(float(grad[layer].abs().max()) > 1e-4 for layer in range(2))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_constant_zero_reaches_nothing_new(kind: str) -> None:
    model, x = attached(kind, strength=0.0).train(), image(SIZE)
    plain = vit().train()
    found = gradients(model, model.forward_features(x).square().sum())
    assert_same(found, gradients(plain, plain.forward_features(x).square().sum()))


def test_gradient_of_the_strength_by_differences() -> None:
    """The slope of a loss along the strength, by central differences; the angles are float32, so the step is wide."""
    for kind in ("axial", "mixed", "sincos"):
        model, x = attached(kind, strength=0.4, learn=True).double(), image(SIZE).double()
        strength = model.visionpos.mine.learned_strength
        found = gradients(model, model.forward_features(x).square().sum())
        slope, step = found["visionpos.mine.learned_strength"].item(), 1e-2
        with torch.no_grad():
            strength += step
            up = model.forward_features(x).square().sum().item()
            strength -= 2 * step
            down = model.forward_features(x).square().sum().item()
        assert slope == pytest.approx((up - down) / (2 * step), rel=1e-2)


def test_optimizer_steps_between_calls() -> None:
    """Frequencies, strength and weights move, and each call uses what they are now."""
    model, x = attached("mixed", strength=0.1, learn=True).train(), image(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model.forward_features(x)[:, 0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    twin = attached("mixed", strength=0.1, learn=True)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(twin.eval().forward_features(x), model.eval().forward_features(x))


def test_strength_schedule() -> None:
    model, by_hand, x = attached("axial", strength=0.0), vit(), image(SIZE)
    with torch.no_grad():
        for strength in (0.0, 0.1, 0.5, 1.0, 0.3, -0.2, 0.0):
            model.visionpos.mine.set_strength(strength)
            handles = hand_rotation(by_hand, strength * axial(4, 6), prefix=1)
            assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6
            for handle in handles:
                handle.remove()


def test_set_strength_keeps_a_learned_parameter() -> None:
    model = attached("axial", strength=0.2, learn=True)
    attachment = model.visionpos.mine
    parameter = attachment.learned_strength
    attachment.set_strength(0.7)
    assert attachment.learned_strength is parameter
    assert float(parameter.detach()) == pytest.approx(0.7)
    assert attachment.strength is parameter


def test_functional_call_swaps_the_attached_weights_too() -> None:
    model, x = attached("mixed"), image(SIZE)
    weights = {name: value * 1.5 for name, value in model.named_parameters()}
    twin = attached("mixed")
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(1.5)
        got = torch.func.functional_call(model, weights, (x,))
        assert torch.equal(got, twin(x))


# Wrappers of training.


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["axial", "mixed", "learned"])
def test_wrappers_of_training(
    kind: str, wrapper: str, checkpointing: bool, one_process: None
) -> None:
    """DDP, and FSDP2 block by block, give the gradients of the bare model: two crops, checkpoints, learned strength."""
    model = attached(kind, strength=0.7, learn=True, dynamic_img_size=True).train()
    expected = two_crops(model, lambda m, x: m(x))
    model.set_grad_checkpointing(checkpointing)
    if wrapper == "ddp":
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    model.zero_grad()
    torch.manual_seed(21)
    sum(
        wrapped(image(size, seed=seed)).square().sum() for seed, size in enumerate(CROPS)
    ).backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert apart(whole(weight.grad), expected[name]) < 1e-6, name
