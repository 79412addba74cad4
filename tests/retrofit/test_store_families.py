"""save, load and restore of every class: weights, sizes, windows, sources and lineage come back, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import visionpos as vp
from tests.retrofit.families import FAMILIES, Family, features
from tests.retrofit.zoo import opened
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.records import records_of

# Small ones that cover every kind of table; the others go the same way, in the slow run.
QUICK = {
    "beit_base_patch16_224",
    "hiera_tiny_224",
    "levit_128s",
    "samvit_base_patch16",
    "swinv2_tiny_window8_256",
    "pit_ti_224",
}
ALL = [
    pytest.param(family, marks=() if family.name in QUICK else pytest.mark.slow, id=family.name)
    for family in FAMILIES
]


@pytest.mark.parametrize("family", ALL)
def test_round_trip_of_every_row(tmp_path: Path, family: Family) -> None:
    """A resized model saved and loaded into another one: same outputs, same source, and the way home is exact."""
    model, other = family.build(), family.build(seed=9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = tmp_path / "a.safetensors"
    retrofit.resize(model, family.target)
    retrofit.save(model, path, source="a test")
    if records_of(model):
        with pytest.raises(PositionError, match=r"does not fit this model"):
            retrofit.load(other, path)
    retrofit.resize(other, family.target)
    assert retrofit.load(other, path).source == "a test"
    assert torch.equal(features(other, family.image()), features(model, family.image()))
    assert retrofit.lineage(other) == retrofit.lineage(model)
    retrofit.resize(other, family.start)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        pytest.param(
            "swin_tiny_patch4_window7_224", (96, 128), {"windows": "keep"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "swin_tiny_patch4_window7_224", (96, 128), {"windows": "scale"}, marks=pytest.mark.slow
        ),
        ("swinv2_tiny_window8_256", (96, 160), {"windows": (12, 10)}),
        ("vit_tiny_patch16_224", (96, 120), {"patch": (8, 24)}),
        ("levit_128s", (96, 160), {}),
        pytest.param("efficientformer_l1", (192, 256), {}, marks=pytest.mark.slow),
    ],
)
def test_restore_from_the_file_alone(tmp_path: Path, name: str, size: Any, options: Any) -> None:
    """Sizes, windows and their unit, patches: enough is written down to build the model again."""
    model = opened(timm.create_model(name, num_classes=3)).eval()
    retrofit.resize(model, size, **options)
    path = tmp_path / "a.safetensors"
    retrofit.save(model, path)
    again = retrofit.restore(path)
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert retrofit.lineage(again).data() == retrofit.lineage(model).data()


def test_restore_with_other_channels(tmp_path: Path) -> None:
    model = opened(timm.create_model("vit_tiny_patch16_224", num_classes=0)).eval()
    retrofit.adapt_channels(model, 1)
    retrofit.resize(model, (128, 512))
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.restore(tmp_path / "a.safetensors")
    x = torch.randn(1, 1, 128, 512)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


PARTIAL = ("csatv2", "volo_d1_224", "davit_tiny", "hiera_tiny_224", "sam2_hiera_tiny")


@pytest.mark.parametrize(
    "name",
    [name if name == "csatv2" else pytest.param(name, marks=pytest.mark.slow) for name in PARTIAL],
)
def test_restore_of_what_is_rotated_in_part(tmp_path: Path, name: str) -> None:
    """That attentions were left out is written down, and the file alone is enough."""
    torch.manual_seed(0)
    model = opened(timm.create_model(name, num_classes=0)).eval()
    with pytest.raises(PositionError, match=r"would be skipped\. Pass partial=True"):
        retrofit.attach(model, vp.MixedRopeSpec())
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.7, partial=True)
    retrofit.attach(model, vp.SinCosSpec(), strength=0.2)
    retrofit.resize(model, (128, 192))
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.restore(tmp_path / "a.safetensors")
    x = torch.randn(1, 3, 128, 192)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    entries = retrofit.lineage(again).encodings
    assert {name: entry.get("partial") for name, entry in entries.items()} == {
        "mixed_rope": True,
        "sincos": None,
    }
    assert entries == retrofit.lineage(model).encodings


@pytest.mark.parametrize("name", ["levit_128s", "vit_relpos_small_patch16_224"])
def test_restore_of_dynamic_sizes(tmp_path: Path, name: str) -> None:
    model = opened(timm.create_model(name, num_classes=0)).eval()
    retrofit.make_dynamic(model)
    retrofit.attach(model, vp.AlibiSpec(), strength=0.5)
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.restore(tmp_path / "a.safetensors")
    for size in ((96, 160), (128, 64)):
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            assert torch.equal(again(x), model(x))
    still = opened(timm.create_model(name, num_classes=0)).eval()
    retrofit.attach(still, vp.AlibiSpec(), strength=0.5)
    with pytest.raises(
        PositionError, match=r"build\.made_dynamic: True in the file, None expected"
    ):
        retrofit.load(still, tmp_path / "a.safetensors")


def test_error_windows_of_another_model(tmp_path: Path) -> None:
    """Same sizes, other windows: refused by name before a tensor is looked at."""
    family = next(one for one in FAMILIES if one.name == "swinv2_tiny_window8_256")
    model, other = family.build(), family.build()
    retrofit.resize(model, (512, 512), windows="scale")
    retrofit.resize(other, (512, 512), windows="keep")
    retrofit.save(model, tmp_path / "a.safetensors")
    with pytest.raises(PositionError, match=r"windows\.windows_hw.*windows|windows\.trained_hw"):
        retrofit.load(other, tmp_path / "a.safetensors")


def test_create_at_sizes_that_timm_gets_wrong() -> None:
    """CrossViT's patch count, MViTv2's square, EfficientFormer's size, TinyViT without one: made, then moved."""
    for name, size in (
        ("crossvit_tiny_240", (240, 360)),
        ("mvitv2_tiny", (64, 96)),
        ("efficientformer_l1", (64, 96)),
        ("tiny_vit_5m_224", (64, 96)),
    ):
        model = retrofit.create(name, size_hw=size)
        with torch.no_grad():
            assert model.forward_features(torch.zeros(1, 3, *size)) is not None
        assert retrofit.lineage(model).image_size_hw == size
