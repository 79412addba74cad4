"""torch.compile and torch.export: the compiled model is the eager one, in one graph for all sizes.

Graphs run as they were captured (backend "eager", counted), so that a difference is a fault of the capture.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import visionpos as vp
from tests.retrofit.zoo import NAMED, Case, apart, image, vit
from visionpos import retrofit

# torch's own remark wherever a compiled region is entered with a tensor that has a history.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SIZE = (64, 96)
CROPS = ((32, 192), (96, 64))
SIZES = ((64, 96), (96, 32), (32, 224), (80, 112), (176, 48))

SPECS = {
    "axial": vp.AxialRopeSpec(),
    "half": vp.AxialRopeSpec(pairing="half"),
    "dinov3": vp.AxialRopeSpec(coords=vp.CoordSpec(unit="centred"), unit="turns"),
    "mixed": vp.MixedRopeSpec(),
    "learned": vp.LearnedSpec(grid_hw=(3, 5), std=0.5),
    "sincos": vp.SinCosSpec(),
}


def some(*fast: str) -> list[Any]:
    """Return the kinds of SPECS as parameters, all but a few of them slow."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in SPECS]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    """No graph of another test is reused or counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attached(kind: str, *, learn: bool = False, strength: float = 0.7, **changes: Any) -> Any:
    torch.manual_seed(11)
    model = vit(**changes)
    retrofit.attach(model, SPECS[kind], strength=strength, learn_strength=learn, name="mine")
    return model


def any_size(kind: str, **changes: Any) -> Any:
    """Return a model that takes every size, without the message in timm's PatchEmbed that fixes one a graph."""
    model = attached(kind, dynamic_img_size=True, **changes)
    model.patch_embed.img_size = None
    return model


def counted(model: Any, **options: Any) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def alike(graph: Tensor, eager: Tensor, kind: str) -> bool:
    """Return whether a graph gives the bits of the eager model, or for halves the same but for the second rounding."""
    return apart(graph, eager) < 1e-6 if kind == "half" else torch.equal(graph, eager)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", some("half", "mixed", "learned"))
def test_compile_fullgraph_equals_eager(kind: str, learn: bool) -> None:
    """Graphs have the plain form of halves, which rounds twice where the eager one rounds once."""
    model, x = attached(kind, learn=learn), image(SIZE)
    compiled, counter = counted(model)
    with torch.no_grad():
        expected = model(x)
        first = compiled(x)
        assert alike(first, expected, kind)
        assert torch.equal(compiled(x), first)
        assert torch.equal(model(x), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", some("mixed"))
def test_compile_training_equals_eager(kind: str) -> None:
    """Through aot_eager: forward and backward graphs, gradients of every new parameter."""
    model, x = attached(kind, learn=True).train(), image(SIZE)

    def gradients(function: Any) -> dict[str, Tensor]:
        model.zero_grad()
        function(x).square().sum().backward()
        return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}

    expected = gradients(model)
    got = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert apart(value, expected[name]) < 1e-5, name


FAST = ("vit_huge_patch14_xp_224", "vit_dwee_patch16_reg1_gap_256")
CASES = [
    case if case.name in FAST else pytest.param(case, marks=pytest.mark.slow) for case in NAMED
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compile_fullgraph_named(case: Case) -> None:
    model, x = case.build(), case.image()
    retrofit.attach(model, vp.MixedRopeSpec(pairing=case.pairing or "adjacent"), strength=0.7)
    compiled, _ = counted(model)
    with torch.no_grad():
        assert alike(compiled(x), model(x), case.pairing or "adjacent")


@pytest.mark.parametrize("kind", some("mixed"))
def test_compile_one_graph_for_all_sizes(kind: str) -> None:
    """After the first size every size shares a graph; equal token counts of different shape too."""
    model = any_size(kind)
    compiled, counter = counted(model, dynamic=True)
    with torch.no_grad():
        counts = []
        for size in SIZES:
            x = image(size)
            assert alike(compiled(x), model(x), kind)
            counts.append(counter.frame_count)
    assert counts[-1] == counts[1]
    assert counts[-1] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_compile_one_graph_for_all_sizes_of_eva(kind: str) -> None:
    case = Case("vit_small_patch16_dinov3", 16, "half")
    model = case.build()
    retrofit.attach(
        model,
        {"axial": vp.AxialRopeSpec, "mixed": vp.MixedRopeSpec}[kind](pairing="half"),
        strength=0.7,
    )
    model.patch_embed.img_size = None
    compiled, counter = counted(model, dynamic=True)
    with torch.no_grad():
        for size in SIZES:
            x = image(size)
            assert apart(compiled(x), model(x)) < 1e-6
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_compile_sizes_of_a_grid_rope() -> None:
    """The module that keeps an extent after a resize captures as timm's does."""
    model = Case("vit_small_patch16_dinov3", 16, "half").build()
    retrofit.resize(model, (96, 96), extent="index")
    model.patch_embed.img_size = None
    compiled, counter = counted(model, dynamic=True)
    with torch.no_grad():
        for size in SIZES:
            x = image(size)
            assert apart(compiled(x), model(x)) < 1e-6
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_compile_padded_sizes_share_a_graph() -> None:
    model = attached("axial", dynamic_img_size=True, dynamic_img_pad=True)
    compiled, counter = counted(model, dynamic=True)
    with torch.no_grad():
        for size in ((50, 75), (64, 96), (97, 41)):
            x = image(size)
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 3


@pytest.mark.slow
def test_compile_a_ramp_of_strength_needs_a_bounded_number_of_graphs() -> None:
    """0 and 1 have graphs of their own; all between share one."""
    model, x = attached("axial", strength=0.0), image(SIZE)
    attachment = retrofit.attachments(model)["mine"]
    compiled, counter = counted(model)
    with torch.no_grad():
        for strength in (0.0, 0.1, 0.2, 0.3, 0.4, 1.0, 0.15, 0.0):
            attachment.set_strength(strength)
            assert torch.equal(compiled(x), model(x)), strength
    assert counter.frame_count <= 4


def test_compile_a_learned_strength_needs_one_graph() -> None:
    model, x = attached("axial", strength=0.0, learn=True), image(SIZE)
    attachment = retrofit.attachments(model)["mine"]
    compiled, counter = counted(model)
    with torch.no_grad():
        for strength in (0.0, 0.1, 0.5, 1.0):
            attachment.set_strength(strength)
            assert torch.equal(compiled(x), model(x)), strength
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compile_train_and_eval_with_jitter() -> None:
    """Draws happen inside the graph, from torch's generator; evaluation stands still."""
    coords = vp.CoordSpec(jitter=1.5, shift=1.0, rescale=1.5)
    model, x = vit(), image(SIZE)
    retrofit.attach(model, vp.AxialRopeSpec(coords=coords), strength=1.0)
    compiled, _ = counted(model)
    with torch.no_grad():
        still = model(x)
        assert torch.equal(compiled(x), still)
        model.train()
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        assert torch.equal(compiled(x), expected)
        assert not torch.equal(compiled(x), expected)
        model.eval()
        assert torch.equal(compiled(x), still)


def test_compile_detach_reaches_a_compiled_model() -> None:
    model, x = attached("axial"), image(SIZE)
    compiled, _ = counted(model)
    with torch.no_grad():
        turned = compiled(x)
        retrofit.detach(model)
        plain = model(x)
        assert torch.equal(compiled(x), plain)
        assert not torch.equal(turned, plain)


@pytest.mark.slow
def test_compile_resize_reaches_a_compiled_model() -> None:
    model = attached("mixed")
    compiled, _ = counted(model)
    with torch.no_grad():
        compiled(image(SIZE))
        retrofit.resize(model, (96, 128), extent="trained")
        x = image((96, 128))
        assert torch.equal(compiled(x), model(x))


def crops(model: Any) -> dict[str, Tensor]:
    """Return gradients of a loss over two crops of equal token count, one backward pass for both."""
    model.zero_grad()
    sum(model(image(size, seed=i)).square().sum() for i, size in enumerate(CROPS)).backward()
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_compile_blocks_alone_with_two_crops(kind: str, checkpointing: bool) -> None:
    """Regional compilation under checkpoints: a recomputed block finds the grid of its own crop."""
    model = attached(kind, dynamic_img_size=True, depth=3).train()
    model.set_grad_checkpointing(checkpointing)
    expected = crops(model)
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    got = crops(model)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert apart(value, expected[name]) < 1e-5, name
    again = crops(model)
    assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_compile_blocks_alone_share_graphs_between_layers(kind: str) -> None:
    """Twelve compiled blocks need no twelve graphs: torch gives up after eight of one code."""
    model = attached(kind, dynamic_img_size=True, depth=12)
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True, dynamic=True)
    eager = copy.deepcopy(attached(kind, dynamic_img_size=True, depth=12))
    with torch.no_grad():
        for size in (SIZE, *CROPS):
            x = image(size)
            assert torch.equal(model(x), eager(x))
    assert counter.frame_count <= 6


@pytest.mark.slow
def test_compile_the_whole_with_checkpoints_and_two_crops() -> None:
    model = attached("mixed", dynamic_img_size=True).train()
    expected = crops(model)
    model.set_grad_checkpointing(True)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return model(a).square().sum() + model(b).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(*(image(size, seed=i) for i, size in enumerate(CROPS))).backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert apart(weight.grad, expected[name]) < 1e-5, name


@pytest.mark.slow
def test_compile_calls_mixed_with_eager_ones() -> None:
    """Compiled and eager calls of one model take turns; neither hears the other's grid."""
    model = attached("mixed", dynamic_img_size=True)
    compiled = torch.compile(model, backend="eager")
    images = [image(size) for size in CROPS]
    eager = copy.deepcopy(model)
    with torch.no_grad():
        for which in (0, 1, 1, 0):
            expected = eager(images[which])
            assert torch.equal(model(images[which]), expected)
            assert torch.equal(compiled(images[which]), expected)
            assert torch.equal(model(images[1 - which]), eager(images[1 - which]))


def test_compile_patches_alone_then_eager_blocks() -> None:
    """A compiled patch embedding hands its call to eager blocks."""
    model = attached("mixed", dynamic_img_size=True)
    eager = copy.deepcopy(model)
    model.patch_embed.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        for size in (*CROPS, *CROPS):
            assert torch.equal(model(image(size)), eager(image(size)))


@pytest.mark.slow
def test_compile_graph_break_between_patches_and_blocks() -> None:
    model = attached("mixed", dynamic_img_size=True)
    eager = copy.deepcopy(model)
    model.norm_pre.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for size in (*CROPS, *CROPS):
            assert torch.equal(compiled(image(size)), eager(image(size)))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", some("mixed"))
def test_export_with_dynamic_sizes(kind: str, strict: bool) -> None:
    """One exported program serves every multiple of 16 exactly."""
    model = any_size(kind)
    height, width = 16 * Dim("rows", min=3, max=32), 16 * Dim("columns", min=5, max=32)
    with torch.no_grad():
        program = torch.export.export(
            model, (image((64, 96)),), dynamic_shapes=({2: height, 3: width},), strict=strict
        )
        for size in ((64, 96), (112, 80), (80, 176)):
            x = image(size)
            assert alike(program.module()(x), model(x), kind)
        assert torch.equal(model(image((64, 96))), copy.deepcopy(model)(image((64, 96))))


def test_export_leaves_nothing_in_the_model() -> None:
    """After an export the model still copies, pickles, runs and detaches."""
    model, x = attached("mixed"), image(SIZE)
    plain = vit()
    with torch.no_grad():
        before = model(x)
        torch.export.export(model, (x,))
        assert torch.equal(model(x), before)
        assert torch.equal(copy.deepcopy(model)(x), before)
        retrofit.detach(model)
        assert torch.equal(model(x), plain(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["axial", "half", "mixed", "learned"])
def test_compile_inductor(kind: str) -> None:
    """The default backend, forward and backward."""
    model, x = attached(kind, learn=True).train(), image(SIZE)
    model(x).square().sum().backward()
    expected = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    out = compiled(x)
    assert apart(out, model(x)) < 1e-5
    out.square().sum().backward()
    for name, value in expected.items():
        assert apart(dict(model.named_parameters())[name].grad, value) < 1e-4, name


@pytest.mark.slow
def test_checkpoint_inside_a_compiled_block_is_the_callers_choice() -> None:
    """checkpoint(block) inside a compiled function recomputes in the graph."""
    model = attached("axial", dynamic_img_size=True).train()

    def run(m: nn.Module, x: Tensor) -> Tensor:
        tokens = m._pos_embed(m.patch_embed(x))
        for block in m.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return tokens

    x = image(SIZE)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert apart(compiled(model, x), run(model, x)) < 1e-6
