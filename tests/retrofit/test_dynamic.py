"""make_dynamic: any size at any call gives what resize gives, and nothing is written into the model on the way."""

import copy
import math
import pickle
import threading
from typing import Any

import pytest
import torch

import visionpos as vp
from tests.retrofit.families import FAMILIES, Family, features
from tests.retrofit.zoo import apart, vit
from visionpos import retrofit
from visionpos.errors import PositionError

# Those that evaluate their tables here are exact; timm's own resampling of SAM and Hiera abswin agrees to float noise.
NAMES = {
    "beit_base_patch16_224": 0.0,
    "vit_relpos_small_patch16_224": 0.0,
    "vit_srelpos_small_patch16_224": 0.0,
    "vit_relpos_medium_patch16_cls_224": 0.0,
    "coatnet_nano_rw_224": 0.0,
    "levit_128s": 0.0,
    "levit_conv_128s": 0.0,
    "hiera_tiny_224": 0.0,
    "hiera_small_abswin_256": 1e-5,
    "samvit_base_patch16": 1e-5,
    "sam2_hiera_tiny": 0.0,
}


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_what_resize_gives(name: str) -> None:
    one = family(name)
    model = one.build()
    free = copy.deepcopy(model)
    retrofit.make_dynamic(free)
    retrofit.make_dynamic(free)  # twice is once
    before = {key: value.clone() for key, value in free.state_dict().items()}
    assert list(before) == list(model.state_dict())
    assert torch.equal(features(free, one.image(one.start)), features(model, one.image(one.start)))
    retrofit.resize(model, one.target)
    wanted = features(model, one.image())
    for other in (free, copy.deepcopy(free), pickle.loads(pickle.dumps(free))):
        found = features(other, one.image())
        assert (
            torch.equal(found, wanted) if NAMES[name] == 0.0 else apart(found, wanted) < NAMES[name]
        )
    assert torch.equal(features(free, one.image(one.start)), features(free, one.image(one.start)))
    assert all(torch.equal(value, before[key]) for key, value in free.state_dict().items())


@pytest.mark.parametrize(
    "name",
    ["beit_base_patch16_224", "levit_128s", "hiera_tiny_224", "vit_relpos_small_patch16_224"],
)
def test_gradients_reach_the_table(name: str) -> None:
    one = family(name)
    model = one.build().train()
    retrofit.make_dynamic(model)
    loss: Any = model.forward_features(one.image((96, 128)))
    loss.square().mean().backward()
    path = next(part.path for part in retrofit.describe(model) if part.kind != "ports")
    weights = [weight for key, weight in model.named_parameters() if key.startswith(path)]
    assert weights
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights)


def test_resize_after_make_dynamic() -> None:
    """The home size moves, and other sizes are still evaluated for the call."""
    one = family("levit_128s")
    model = one.build()
    retrofit.make_dynamic(model)
    features(model, one.image((128, 64)))
    retrofit.resize(model, (96, 160))
    fresh = one.build()
    retrofit.resize(fresh, (96, 160))
    assert torch.equal(features(model, one.image()), features(fresh, one.image()))


DOORS: dict[str, Any] = {
    "rotate": vp.AxialRopeSpec(),
    "bias": vp.AlibiSpec(),
    "add": vp.SinCosSpec(),
    "conditional": vp.PegSpec(before=None, after=(0,)),
}


def prepared(one: Family, door: str, *steps: str) -> Any:
    """Return a model after steps in this order, what it is given with weights that matter."""
    model: Any = one.build()
    doing: dict[str, Any] = {
        "free": lambda: retrofit.make_dynamic(model),
        "resize": lambda: retrofit.resize(model, one.target),
        "attach": lambda: retrofit.attach(model, DOORS[door], strength=0.6, partial=True),
    }
    for step in steps:
        doing[step]()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.visionpos.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_attached_follows(name: str, door: str) -> None:
    """Attached before or after, at any size: as in a model that was moved there."""
    one = family(name)
    if retrofit.attachable(one.build())[door][0] == 0:  # type: ignore[index]
        return
    before = prepared(one, door, "attach", "free")
    after = prepared(one, door, "free", "attach")
    wanted = prepared(one, door, "resize", "attach")
    for _ in range(2):
        for model in (before, after):
            assert apart(features(model, one.image()), features(wanted, one.image())) <= NAMES[name]
        for model in (before, after, wanted):
            if retrofit.attachments(model):
                retrofit.detach(model)
    assert [type(m) for m in before.modules()] == [type(m) for m in after.modules()]


def test_two_threads_two_sizes() -> None:
    """The grid belongs to the call: threads do not read each other's."""
    one = family("vit_relpos_small_patch16_224")
    model = one.build()
    retrofit.make_dynamic(model)
    sizes = [(64, 96), (96, 64), (128, 32), (160, 160)]
    wanted = [features(model, one.image(size)) for size in sizes]
    wrong: list[tuple[int, int]] = []

    def work(size: tuple[int, int], expected: torch.Tensor) -> None:
        found = [features(model, one.image(size)) for _ in range(5)]
        wrong.extend(size for value in found if not torch.equal(value, expected))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(sizes, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_errors() -> None:
    with pytest.raises(PositionError, match=r"make_dynamic serves Beit, .*dynamic_img_size=True"):
        retrofit.make_dynamic(vit())
    with pytest.raises(PositionError, match=r"lift_table lets the checkpoint's recipe do it"):
        retrofit.make_dynamic(vit())
    one = family("beit_base_patch16_224")
    for option in ({"use_abs_pos_emb": True}, {"use_shared_rel_pos_bias": True}):
        model = one.build(**option)
        with pytest.raises(
            PositionError, match=r"which make_dynamic cannot evaluate for another size"
        ):
            retrofit.make_dynamic(model)
        assert features(model, one.image(one.start)) is not None
    model = one.build()
    model.blocks[1].attn.__class__ = type("MyAttention", (type(model.blocks[1].attn),), {})
    with pytest.raises(PositionError, match=r"belongs to a MyAttention, which make_dynamic cannot"):
        retrofit.make_dynamic(model)
    one = family("levit_128s")
    model = one.build()
    retrofit.make_dynamic(model)
    with pytest.raises(PositionError, match=r"ran before the module that takes the image"):
        model.stages(torch.zeros(1, 16, 128))


# A size that is no multiple of what a class cuts by, and the multiple that the message names; None where it serves it.
STEPS: dict[str, int | None] = {
    "beit_base_patch16_224": 16,
    "vit_relpos_small_patch16_224": 16,
    "vit_srelpos_small_patch16_224": 16,
    "coatnet_nano_rw_224": 32,
    "maxvit_tiny_tf_224": 64,  # partitions of 2 x 2 cells on a map of 1/32
    "hiera_tiny_224": 32,
    "hiera_small_abswin_256": 32,
    "samvit_base_patch16": 16,
    "sam2_hiera_tiny": 32,
    "levit_128s": None,
    "levit_conv_128s": None,
}


@pytest.mark.parametrize("size", [(100, 100), (97, 131), (8, 8), (96, 200)])
@pytest.mark.parametrize("name", STEPS)
def test_error_sizes_between(name: str, size: tuple[int, int]) -> None:
    """No bare error of a broken map, no pixel dropped without a word."""
    one = family(name)
    model = one.build()
    retrofit.make_dynamic(model)
    step = STEPS[name]
    if step is not None:
        with pytest.raises(
            PositionError, match=rf"size \({size[0]}, {size[1]}\) is not a multiple of {step};"
        ):
            features(model, one.image(size))
        assert features(model, one.image((2 * step, step))).isfinite().all()
        return
    # LeViT's stem rounds up at each of four steps of 2, and so does every stage.
    cells = [math.ceil(side / 64) for side in size]
    found = features(model, one.image(size))
    assert math.prod(found.shape) == math.prod(cells) * 384


def test_reference_levit_between_steps() -> None:
    """At 100 pixels LeViT has the positions of 112, where it has as many cells: its tables see cells alone."""
    one = family("levit_128s")
    model, other = one.build(), one.build()
    retrofit.make_dynamic(model)
    features(model, one.image((100, 100)))
    between = model.stages[0].blocks[0].attn.get_attention_biases(torch.device("cpu"))
    retrofit.resize(other, (112, 112))
    assert torch.equal(
        between, other.stages[0].blocks[0].attn.get_attention_biases(torch.device("cpu"))
    )


def test_parts_added_later_follow_too() -> None:
    """A second call serves what was put in since, from the same image."""
    one = family("vit_relpos_small_patch16_224")
    model, fresh = one.build(), one.build()
    retrofit.make_dynamic(model)
    model.blocks[1] = fresh.blocks[1]
    retrofit.make_dynamic(model)
    retrofit.resize(one_more := one.build(), one.target)
    assert torch.equal(features(model, one.image()), features(one_more, one.image()))


SIZES = ((96, 160), (128, 192), (192, 96), (160, 128), (224, 256))
# Graphs for these five sizes on a CPU, where no guard is of this package. What is above one is torch's, which guards
# whether a convolution has more than 20480 values, and timm's, whose padding of windows has a guard of its own.
GRAPHS = {
    "vit_relpos_small_patch16_224": 1,
    "levit_128s": 2,
    "levit_conv_128s": 3,
    "beit_base_patch16_224": 1,
    "coatnet_nano_rw_224": 3,
    "hiera_tiny_224": 1,
    "hiera_small_abswin_256": 1,
    "samvit_base_patch16": 3,
    "sam2_hiera_tiny": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_compile_one_graph_for_all_sizes(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    one = family(name)
    model = one.build()
    retrofit.make_dynamic(model)
    torch.compiler.reset()
    counter = CompileCounter()
    graph = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in SIZES:
            x = one.image(size)
            found, wanted = graph(x), model(x)  # type: ignore[no-untyped-call]
            assert (
                torch.equal(found, wanted)
                if NAMES[name] == 0.0
                else apart(found, wanted) < NAMES[name]
            )
    assert counter.frame_count <= GRAPHS[name]
