"""Windows of attention at new sizes: two policies with names, clamping, and the window weights were trained with."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from tests.retrofit.families import FAMILIES, apart_from_twin, features
from tests.retrofit.zoo import apart, image, opened
from visionpos import retrofit
from visionpos.errors import PositionError

SMALL = {"depths": (2, 2, 1, 1), "embed_dim": 24, "num_classes": 0}
V1, V2, CR = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224"
HOME = {V1: (224, 224), V2: (256, 256), CR: (224, 224)}
AWAY = {V1: (192, 256), V2: (192, 320), CR: (192, 256)}


def swin(name: str, size: tuple[int, int] | None = None, **changes: Any) -> Any:
    return opened(
        timm.create_model(name, img_size=size or HOME[name], **{**SMALL, **changes})
    ).eval()


def blocks(model: Any) -> list[Any]:
    stages = model.stages if hasattr(model, "stages") else model.layers
    return [block for stage in stages for block in stage.blocks]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of timm's own resampling
@pytest.mark.parametrize("name", HOME)
def test_parity_keep_is_set_input_size_with_the_trained_window(name: str) -> None:
    """All of timm's bookkeeping, masks and shifts; Swin-V2 besides remembers the window it was trained with."""
    model, other = swin(name), swin(name)
    window = blocks(model)[0].window_size
    retrofit.resize(model, AWAY[name], windows="keep", recipe="beit" if name == V1 else None)
    other.set_input_size(img_size=AWAY[name], window_size=window)
    lines = [line for line in apart_from_twin(model, other) if "pretrained_window" not in line]
    clamped = [line for line in lines if "coords_table" not in line]
    assert clamped == []
    if name != V2:
        assert lines == []
        x = image(AWAY[name], batch=1)
        assert apart(features(model, x), features(other, x)) < 1e-5


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of timm's own resampling
@pytest.mark.parametrize("name", HOME)
def test_parity_scale_is_set_input_size(name: str) -> None:
    model, other = swin(name), swin(name)
    retrofit.resize(model, AWAY[name], windows="scale", recipe="beit" if name == V1 else None)
    other.set_input_size(img_size=AWAY[name])
    lines = [line for line in apart_from_twin(model, other) if "pretrained_window" not in line]
    assert [line for line in lines if "coords_table" not in line] == []
    x = image(AWAY[name], batch=1)
    distance = apart(features(model, x), features(other, x))
    # timm measures coordinates in the present window, so scaled Swin-V2 windows change the bias it has learned.
    assert (distance < 1e-5) == (name != V2)


@pytest.mark.parametrize("name", HOME)
def test_the_policies_are_different_models(name: str) -> None:
    """What a silent choice would cost: keep and scale disagree by 10 % and more."""
    keep, scale = swin(name), swin(name)
    retrofit.resize(keep, AWAY[name], windows="keep")
    retrofit.resize(scale, AWAY[name], windows="scale")
    x = image(AWAY[name], batch=1)
    assert apart(features(keep, x), features(scale, x)) > 0.1
    default = swin(name)
    retrofit.resize(default, AWAY[name])
    wanted = scale if name == CR else keep
    assert torch.equal(features(default, x), features(wanted, x))
    assert retrofit.lineage(default).windows["policy"] == ("scale" if name == CR else "keep")


def test_clamped_windows_of_swin() -> None:
    """A map no larger than the window is one window on that axis, without shift there; the mask follows."""
    model = swin(V1)
    retrofit.resize(model, (192, 256))
    last = model.layers[3].blocks[0]  # a 6x8 map
    assert last.window_size == (6, 7)
    assert last.window_area == 42
    shifted = model.layers[1].blocks[1]  # a 24x32 map
    assert (shifted.window_size, shifted.shift_size) == ((7, 7), (3, 3))
    assert shifted.attn_mask.shape == (4 * 5, 49, 49)
    deep = swin(V1, depths=(1, 1, 1, 2))
    retrofit.resize(deep, (192, 256))
    block = deep.layers[3].blocks[1]
    assert (block.window_size, block.shift_size, block.target_shift_size) == (
        (6, 7),
        (0, 3),
        (3, 3),
    )
    assert block.attn_mask is not None
    assert block.attn.relative_position_bias_table.shape == (11 * 13, 24)
    retrofit.resize(deep, (224, 224))
    assert (block.window_size, block.shift_size) == ((7, 7), (0, 0))
    retrofit.resize(deep, (64, 512), windows="scale")
    assert block.window_size == (2, 16)


@pytest.mark.parametrize("name", HOME)
@pytest.mark.parametrize("windows", ["keep", "scale"])
def test_a_chain_of_sizes_comes_home(name: str, windows: Any) -> None:
    model = swin(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = image(HOME[name], batch=1)
    at_home = features(model, x)
    for size in ((128, 320), (64, 64), AWAY[name], HOME[name]):
        retrofit.resize(model, size, windows=windows)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(features(model, x), at_home)


def bias_at(attention: Any, dy: int, dx: int) -> Tensor:
    """Return the learned bias of one displacement, before any gain."""
    height, width = attention.window_size
    table = attention.cpb_mlp(attention.relative_coords_table)[0]
    return table[height - 1 + dy, width - 1 + dx].detach()


def test_swin_v2_keeps_the_window_it_was_trained_with() -> None:
    """The bias of one displacement is the same number at every window, through two fine-tunes in a row."""
    model = swin(V2)
    attention = model.layers[0].blocks[0].attn
    assert attention.pretrained_window_size == (0, 0)
    trained = bias_at(attention, 3, -2)
    retrofit.resize(model, (512, 512), windows="scale")
    assert (attention.window_size, attention.pretrained_window_size) == ((16, 16), (8, 8))
    assert torch.allclose(bias_at(attention, 3, -2), trained, atol=1e-6)
    retrofit.resize(model, (512, 768), windows=(12, 24))
    assert (attention.window_size, attention.pretrained_window_size) == ((12, 24), (8, 8))
    assert torch.allclose(bias_at(attention, 3, -2), trained, atol=1e-6)
    units = retrofit.lineage(model).windows["trained_hw"]
    assert units["layers.0.blocks.0.attn"] == [8, 8]
    by_timm = swin(V2)
    by_timm.set_input_size(img_size=(512, 512))
    assert not torch.allclose(bias_at(by_timm.layers[0].blocks[0].attn, 3, -2), trained, atol=1e-2)


def test_swin_v2_of_a_published_fine_tune_keeps_its_record() -> None:
    """swinv2_*_window12to16_* record (12, 12, 12, 6): a further window starts from those, not from 16."""
    model = swin(V2, pretrained_window_sizes=(6, 6, 6, 3))
    retrofit.resize(model, (512, 512), windows="scale")
    assert [block.attn.pretrained_window_size for block in blocks(model)] == [(6, 6)] * 5 + [(3, 3)]


def test_relative_networks_in_swin_mode_keep_their_unit() -> None:
    from timm.layers import RelPosMlp

    model = timm.create_model(
        "vit_relpos_small_patch16_224", img_size=64, depth=1, embed_dim=64, num_heads=2
    )
    block = model.blocks[0].attn
    block.rel_pos = RelPosMlp(window_size=(4, 4), num_heads=2, mode="swin")
    opened(model).eval()
    at_home = block.rel_pos.get_bias()[0, :, 0, 1].detach()
    retrofit.resize(model, (96, 16))  # six rows of one: timm alone divides by 0 here
    assert block.rel_pos.pretrained_window_size == (4, 4)
    assert block.rel_pos.get_bias().isfinite().all()
    retrofit.resize(model, (96, 160))
    assert torch.allclose(block.rel_pos.get_bias()[0, :, 0, 1], at_home, atol=1e-6)
    plain = timm.create_model(
        "vit_relpos_small_patch16_224", img_size=64, depth=1, embed_dim=64, num_heads=2
    )
    retrofit.resize(plain, (96, 160))
    assert plain.blocks[0].attn.rel_pos.pretrained_window_size == (0, 0), (
        "unnormalised: nothing to keep"
    )


def test_partitions_of_maxvit_kept_or_scaled() -> None:
    family = next(one for one in FAMILIES if one.name == "maxvit_tiny_tf_224")
    model = family.build((224, 224))
    retrofit.resize(model, (448, 448), windows="keep")
    assert model.stages[0].blocks[0].attn_block.partition_size == (7, 7)
    with pytest.raises(
        PositionError,
        match=r"12x16 map in stage 3.*|96x128 map in stage 0, which window_size \(7, 7\)",
    ):
        retrofit.resize(model, (384, 512), windows="keep")
    assert model.img_size == (448, 448)
    retrofit.resize(model, (224, 224), windows="scale")
    assert model.stages[0].blocks[0].attn_block.partition_size == (7, 7)


@pytest.mark.parametrize(
    ("name", "windows", "message"),
    [
        ("vit_tiny_patch16_224", "keep", r"a VisionTransformer has no choice of windows"),
        ("swin_tiny_patch4_window7_224", "grow", r"takes 'keep' or 'scale', or \(rows, columns\)"),
        ("swin_tiny_patch4_window7_224", (0, 7), r"takes 'keep' or 'scale'"),
        ("gcvit_xxtiny", "keep", r"a GlobalContextVit takes 'scale'"),
        ("maxvit_tiny_tf_224", (7, 7), r"a MaxxVit takes 'keep' or 'scale'"),
    ],
)
def test_error_policies(name: str, windows: Any, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(PositionError, match=message):
        retrofit.resize(model, (448, 448), windows=windows)


def test_windows_follow_an_optimizer() -> None:
    """Fine-tune, enlarge the window, go on: moments of every table move with it."""
    model = swin(V1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(size: tuple[int, int]) -> None:
        optimizer.zero_grad()
        model.forward_features(image(size, batch=1)).square().mean().backward()
        optimizer.step()

    step((224, 224))
    twin = copy.deepcopy(model)
    retrofit.resize(model, (192, 256), windows="scale", optimizer=optimizer)
    table = model.layers[0].blocks[0].attn.relative_position_bias_table
    assert table.shape == (11 * 15, 3)
    assert optimizer.state[table]["exp_avg"].shape == table.shape
    assert (optimizer.state[table]["exp_avg_sq"] >= 0).all()
    step((192, 256))
    assert twin.layers[0].blocks[0].attn.relative_position_bias_table.shape == (169, 3)
