"""General checks of models: defects of the installed timm found untold, planted ones, and healthy models."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

import visionpos as vp
from tests.retrofit.zoo import create, opened, vit
from visionpos import retrofit
from visionpos.audit.model_checks import lent
from visionpos.audit.of_model import audit

SIZE = (48, 80)
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 0}


def found(model: nn.Module) -> dict[str, Any]:
    result = audit(model, interventions=["P2"])
    return {one.detector: one for one in result.found}


def alarms(model: nn.Module) -> set[str]:
    return {name for name, one in found(model).items() if one.alarm}


def small(name: str, **options: Any) -> Any:
    return opened(timm.create_model(name, num_classes=0, **options)).eval()


def naflex(**options: Any) -> Any:
    return opened(timm.create_model("naflexvit_base_patch16_gap", **SMALL, **options)).eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"pos_embed": "factorized"}, {"pos_embed": "none", "rope_type": "axial"}],
    ids=["learned", "factorised", "rotary"],
)
def test_timm_naflex_ignores_coordinates(options: dict[str, Any]) -> None:
    """NaFlexVit adds rows in raster order, whatever coordinates come with the patches."""
    order = found(naflex(**options))["order"]
    assert order.alarm
    assert "coordinates" in order.says or "absent" in order.says
    assert order.remedy


def test_timm_naflex_with_grid_sample_reads_coordinates() -> None:
    """The variant that samples its table at coordinates is healthy in its order of patches."""
    model = naflex(pos_embed_use_grid_sample=True)
    assert "order" not in alarms(model)


def test_timm_fixed_rotary_gives_the_table_it_was_made_for() -> None:
    """A rotary module of a fixed grid ignores the shape that it is asked for."""
    one = found(opened(create("vit_small_patch16_rope_224", (64, 64))))["A-B-A"]
    assert one.alarm
    assert (
        one.says
        == "rope, made for (4, 4), gives another table than that of (2, 8) when asked for it."
    )


def test_timm_sam_with_rotation_is_found_by_its_module() -> None:
    """SAM's global rotation asks for no shape at all."""
    model = VisionTransformerSAM(
        img_size=64, patch_size=16, embed_dim=64, depth=2, num_heads=2, window_size=2,
        use_abs_pos=False, use_rel_pos=False, use_rope=True, num_classes=0,
        global_attn_indexes=(0, 1),
    )  # fmt: skip
    assert "A-B-A" in alarms(opened(model).eval())


def test_timm_levit_keeps_its_bias_in_eval_mode() -> None:
    """LeViT's eval cache outlives a change of its table."""
    one = found(small("levit_128s", img_size=64))["A-B-A weights"]
    assert one.alarm
    assert one.value > 1e-4


@pytest.mark.parametrize("name", ["vit", "dinov3", "swin", "hiera", "attached", "coat"])
def test_healthy_models_raise_no_alarm(name: str) -> None:
    """Models that answer alike to alike questions."""
    model: Any = {
        "vit": lambda: vit(SIZE),
        "dinov3": lambda: opened(create("vit_small_patch16_dinov3", None)),
        "swin": lambda: small(
            "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2,), num_heads=(2,)
        ),
        "hiera": lambda: small("hiera_tiny_224", img_size=(64, 96)),
        "attached": attached,
        "coat": lambda: small("coat_tiny", img_size=64),
    }[name]()
    assert alarms(model) == set()


def attached() -> Any:
    model = vit(SIZE)
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
    return opened(model)


# Planted faults.


def by_closure(model: Any) -> Any:
    """A rotation whose learned speeds hang in a closure, as a quick retrofit has them."""
    model.speeds = nn.Parameter(torch.rand(16))

    def turn(_: Any, __: Any, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * model.speeds
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    for block in model.blocks:
        block.attn.q_norm.register_forward_hook(turn)
        block.attn.k_norm.register_forward_hook(turn)
    return model


def test_a_closure_that_points_at_the_original_is_found() -> None:
    """An EMA copy would ignore its own speeds."""
    one = found(by_closure(vit(SIZE)))["copy"]
    assert one.alarm
    assert "with other weights" in one.says


class Kept(nn.Module):
    """A table kept by the number of tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        if height * width not in self.kept:
            lines = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            self.kept[height * width] = (lines[0] - 2.0 * lines[1]).unsqueeze(-1)
        ramp = torch.linspace(-1, 1, x.shape[-1])  # a norm would take away what all channels share
        return x + self.kept[height * width].reshape(height, width, 1) * ramp


def test_a_cache_keyed_by_the_number_of_tokens_is_found() -> None:
    """4 x 4 tokens and then 2 x 8."""
    model = opened(create("vit_small_patch16_dinov3", (64, 64)))
    model.patch_embed.norm = Kept()
    one = found(model)["A-B-A"]
    assert one.alarm
    assert "answers otherwise" in one.says
    healthy = opened(create("vit_small_patch16_dinov3", (64, 64)))
    assert not found(healthy)["A-B-A"].alarm


class Mean(nn.Module):
    """Mixes images of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) * torch.arange(1.0, len(x) + 1).view(-1, 1, 1)


def test_an_image_that_hears_its_neighbours_is_found() -> None:
    """An answer that depends on the place in the batch."""
    model = vit(SIZE)
    model.norm_pre = Mean()
    assert "order" in alarms(model)


def test_a_model_that_draws_in_eval_mode_is_found_first() -> None:
    """Nothing else is measured then: every intervention is a failed row that says why."""
    model = vit(SIZE)
    model.pos_drop = Noise()
    result = audit(model)
    assert result.found[0].detector == "repeat"
    assert result.found[0].alarm
    assert not result.complete
    assert {row.verdict for row in result} == {"failed"}
    assert "differ" in result.rows[0].note


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * torch.randn_like(x)


def test_lent_weights_come_back() -> None:
    """A model computes with its copy's weights for a while, modules in two places too; a failure gives them back."""
    model = small("coat_tiny", img_size=64)
    other = copy.deepcopy(model)
    own = [id(weight) for weight in model.parameters()]
    wanted = [id(weight) for weight in other.parameters()]
    lending = lent(model, other)
    with lending:
        assert [id(weight) for weight in model.parameters()] == wanted
    assert [id(weight) for weight in model.parameters()] == own
    lending = lent(model, other)
    lending.__enter__()
    with pytest.raises(ZeroDivisionError):
        lending.gen.throw(ZeroDivisionError)  # type: ignore[attr-defined]
    assert [id(weight) for weight in model.parameters()] == own
