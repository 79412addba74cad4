"""What is done to a model after attach: ways around a port are right or refused, never silent."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models import reparameterize_model
from torch import nn

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, features
from tests.retrofit.zoo import apart, image, opened, vit
from visionpos import PositionError, retrofit

BY_NAME = {variant.name: variant for variant in VARIANTS}


class OneSided(timm.layers.Attention):
    """A user's own forward that calls q_norm and not k_norm."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


class LowRank(nn.Module):
    """What adapter libraries put in the place of a Linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.delta(x)


def adapted(model: nn.Module) -> None:
    torch.manual_seed(0)
    for part in list(model.modules()):
        if isinstance(getattr(part, "qkv", None), nn.Linear):
            part.qkv = LowRank(part.qkv)


def test_error_a_forward_that_turns_one_side() -> None:
    model = vit()
    model.blocks[0].attn.__class__ = OneSided
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    with pytest.raises(PositionError, match="ran without k_norm"):
        features(model, image((64, 96)))


def test_error_half_of_an_attention_fused_after_attach() -> None:
    """LeViT's downsampling q is Sequential(down, ln): fusing keeps the hook on q and loses the one on kv."""
    variant = BY_NAME["levit_128s"]
    model, x = variant.build(), variant.image(1)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    reparameterize_model(model.stages[1].downsample, inplace=True)
    with pytest.raises(PositionError, match=r"kv .*since the encoding was attached|ran without kv"):
        features(model, x)


@pytest.mark.parametrize("how", ["compile", "export"])
def test_error_fused_after_attach_then_traced(how: str) -> None:
    """The usual way to deploy: a graph notes nothing, so the parts themselves are looked at while it is made."""
    variant = BY_NAME["levit_128s"]
    model, x = variant.build(), variant.image(1)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    with torch.no_grad():
        model(x)
        fused = reparameterize_model(model)

        def trace() -> Any:
            if how == "export":
                return torch.export.export(fused, (x,))
            return torch.compile(fused, backend="eager", fullgraph=True)(x)

        with pytest.raises(Exception, match="since the encoding was attached"):  # torch wraps it
            trace()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "cait_xxs24_224", "vit_tiny_patch16_224"]
)
def test_adapters_before_attach_turn_and_after_are_refused(name: str) -> None:
    """An adapter put on later would add a share of q and k that does not turn: 13 % off for Swin, without a word."""
    variant = BY_NAME.get(name)
    model = vit() if variant is None else variant.build()
    x = image((64, 96)) if variant is None else variant.image(1)
    adapted(model)
    bare = features(model, x)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    assert apart(features(model, x), bare) > 1e-4
    late = vit() if variant is None else variant.build()
    retrofit.attach(late, vp.AxialRopeSpec(), strength=1.0)
    features(late, x)
    adapted(late)
    if name.startswith("vit"):  # its port is q_norm and k_norm, behind the adapter
        assert apart(features(late, x), features(model, x)) < 1e-6
        return
    with pytest.raises(PositionError, match="is a LowRank since the encoding was attached"):
        features(late, x)


def test_wrappers_that_change_nothing_keep_working() -> None:
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model, x = variant.build(), variant.image(1)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    wanted = features(model, x)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for part in list(model.modules()):
        if isinstance(getattr(part, "qkv", None), nn.Linear):
            part.qkv = checkpoint_wrapper(part.qkv)
    assert torch.equal(features(model, x), wanted)


def sam(size: tuple[int, int]) -> Any:
    return timm.create_model(
        "samvit_base_patch16", img_size=size, depth=2, embed_dim=64, num_heads=2, window_size=4,
        global_attn_indexes=(1,), use_rope=True, use_rel_pos=False, num_classes=0,
    )  # fmt: skip


def test_error_sam_with_a_rope_of_its_own() -> None:
    """timm builds it for one size: moved to another of equal token count it would be wrong without an error."""
    model = opened(sam((64, 64))).eval()
    for move in (lambda: retrofit.resize(model, (32, 128)), lambda: retrofit.make_dynamic(model)):
        with pytest.raises(PositionError, match="rope_global is a rotary encoding that the model"):
            move()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conditional_encodings_work_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = vit().to(dtype)
    part = retrofit.attach(model, vp.PegSpec(after=(0,)), strength=1.0)
    assert {weight.dtype for weight in part.encoding.parameters()} == {dtype}
    assert features(model, image((64, 96)).to(dtype)).dtype == dtype


def test_error_of_a_grid_that_meta_does_not_hold() -> None:
    with torch.device("meta"):
        model = timm.create_model("efficientformer_l1")
    with pytest.raises(PositionError, match="is on the meta device"):
        retrofit.resize(model, (192, 256))


COMPILED = {
    "attention.compile()": lambda block, _: block.attn.compile(backend="eager"),
    "torch.compile(attention)": lambda block, _: setattr(
        block, "attn", torch.compile(block.attn, backend="eager")
    ),
    "compiled forward": lambda block, _: setattr(
        block.attn, "forward", torch.compile(block.attn.forward, backend="eager")
    ),
    "part.compile()": lambda block, part: getattr(block.attn, part).compile(backend="eager"),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
def test_attentions_compiled_one_by_one(name: str, how: str) -> None:
    """Regional compilation: a graph inside an eager block notes nothing, and turns all the same."""
    variant = BY_NAME.get(name)
    model = vit() if variant is None else variant.build()
    x = image((64, 96)) if variant is None else variant.image(1)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    wanted = features(model, x)
    for block in [part for part in model.modules() if hasattr(part, "attn")]:
        COMPILED[how](block, "q_norm" if variant is None else "qkv")
    for _ in range(2):
        assert apart(features(model, x), wanted) < 1e-6
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_after_attach_turns() -> None:
    """torch.ao swaps each Linear and hands its hooks on: what is off is the rounding to 8 bits alone."""
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model, x = variant.build(), variant.image(1)
    bare = features(model, x)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    turned = features(model, x)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantised.layers[0].blocks[0].attn.qkv) is not nn.Linear
    assert apart(features(quantised, x), turned) < 0.25 * apart(bare, turned)


@pytest.mark.parametrize("spec", [vp.AxialRopeSpec(), vp.AlibiSpec(), vp.PegSpec(after=(0,))])
def test_error_blocks_shared_with_a_model_that_has_an_attachment(spec: Any) -> None:
    """Both would act in them, in the name of either: q and k turned twice, without a word."""
    first, second = vit(), vit()
    second.blocks = first.blocks
    retrofit.attach(first, spec, strength=1.0)
    wanted = features(first, image((64, 96)))
    with pytest.raises(PositionError, match=r"blocks\.0.* is shared with another model"):
        retrofit.attach(second, spec, strength=1.0)
    assert torch.equal(features(first, image((64, 96))), wanted)
    retrofit.detach(first)
    retrofit.attach(second, spec, strength=1.0)


@pytest.mark.slow
def test_a_graph_knows_the_sides_of_an_index_that_was_moved() -> None:
    """EfficientFormer's grid is told by numbers in a buffer, which no graph can read: noted when attached and moved."""
    variant = BY_NAME["efficientformer_l1"]
    model = variant.build()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    for size in ((64, 256), (256, 64)):
        retrofit.resize(model, size)
        torch._dynamo.reset()
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            graph = torch.compile(model.forward_features, backend="aot_eager", fullgraph=True)(x)
            assert apart(graph, model.forward_features(x)) < 1e-5
    torch._dynamo.reset()
