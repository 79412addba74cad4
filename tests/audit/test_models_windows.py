"""Audits of windowed models: order, masks and equal keys inside windows, a shift by one window, larger maps."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visionpos as vp
from tests.retrofit.zoo import apart, create, opened
from visionpos import retrofit
from visionpos.audit.model_subject import Subject
from visionpos.audit.of_model import audit

SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
NAME = "swin_tiny_patch4_window7_224"
WINDOWS = (16 * 4, 16 * 6)  # maps of 16x24 and 8x12 cells, 4x6 and 2x3 windows


def swin(size: tuple[int, int] = WINDOWS, **changes: Any) -> Any:
    return opened(
        timm.create_model(NAME, img_size=size, num_classes=0, **{**SWIN, **changes})
    ).eval()


def end(result: Any, intervention: str, metric: str = "O", **fields: Any) -> float:
    rows = result.of(intervention, metric=metric, where="end", **fields)
    assert len(rows) == 1, rows
    assert rows[0].value is not None, rows[0].note
    return float(rows[0].value)


def verdicts(result: Any, intervention: str, **fields: Any) -> set[str]:
    return {row.verdict for row in result.of(intervention, **fields)}


# One window further.


def test_windows_are_alike() -> None:
    """Content and coordinates one window further, shifted windows too: every block of Swin answers alike."""
    result = audit(swin(), interventions=["S1"], checks=False)
    rows = result.of("S1", variant="one window")
    # The second stage's shifted blocks have three windows side by side, its rows two: along x alone.
    assert {row.where for row in rows} == {"layer 0", "layer 1", "layer 2", "layer 3", "end"}
    assert {row.verdict for row in rows} == {"zero"}
    assert {row.expected for row in rows} == {"zero"}
    assert not result.surprises


class Ramp(nn.Module):
    """Adds the number of the row, as an absolute table inside a block would."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed map, with the number of its rows on the first channel."""
        out: Tensor = self.norm(x)
        rows = torch.arange(x.shape[1]).view(-1, 1)
        return torch.cat([out[..., :1] + rows.unsqueeze(-1), out[..., 1:]], -1)


def test_a_block_that_knows_where_its_windows_are_is_found() -> None:
    """A planted table inside one block: that layer is no longer alike, as by hand, the others are."""
    model = swin()
    block = model.layers[0].blocks[0]
    block.norm1 = Ramp(block.norm1)
    result = audit(model, interventions=["S1"], checks=False)
    values = {row.where: row.value for row in result.of("S1", variant="one window")}
    maps: list[Tensor] = []
    block.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    with torch.no_grad():
        model.forward_features(Subject(model).image)
        one = maps[0]
        apart_by = [
            apart(
                block(one.roll(4, axis)).narrow(axis, 4, one.shape[axis] - 4),
                block(one).roll(4, axis).narrow(axis, 4, one.shape[axis] - 4),
            )
            for axis in (1, 2)
        ]
    assert apart_by[1] < 1e-6 < 1e-2 < apart_by[0]
    assert values["layer 0"] == pytest.approx(apart_by[0], rel=1e-3)
    assert values["layer 1"] < 1e-5
    assert {row.where for row in result.surprises} == {"layer 0", "end"}


def test_a_single_window_has_no_neighbour() -> None:
    """One window, global attention, and attention over a stride have no window beside them."""
    one = audit(swin((16, 16), depths=(1,), num_heads=(2,)), interventions=["S1"], checks=False)
    assert verdicts(one, "S1", variant="one window") == {"undefined"}
    assert "size_hw" in one.of("S1", variant="one window")[0].note


# Inside windows.


def test_evidence_inside_windows() -> None:
    """A masked token of a window is not heard, equal keys are told apart by the table, a causal mask has an order."""
    result = audit(swin((32, 48)), interventions=["N1", "N3", "C1"], checks=False)
    assert result.complete
    assert verdicts(result, "N3") == {"zero"}
    assert verdicts(result, "N1") == {"nonzero"}
    assert verdicts(result, "C1", where="end") == {"nonzero"}
    assert not result.surprises


def test_a_leak_inside_windows_is_found() -> None:
    """What reaches other tokens behind the softmax is heard under N3."""
    model = swin((32, 48))
    attn = model.layers[0].blocks[0].attn
    attn.qkv.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    result = audit(model, interventions=["N3"], checks=False)
    assert verdicts(result, "N3", metric="O", where="end") == {"nonzero"}
    assert result.surprises


def test_equal_keys_by_hand() -> None:
    """N1 of the first attention: the two columns of its softmax, window by window."""
    model = swin((32, 48))
    value = end(audit(model, interventions=["N1"], checks=False), "N1", "weights")
    attn = model.layers[0].blocks[0].attn
    seen: list[Tensor] = []
    attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model.forward_features(Subject(model).image)
        x = seen[0].clone()
        x[:, -1] = x[:, 0]
        q, k, _ = attn.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        table = attn.relative_position_bias_table[attn.relative_position_index.flatten()]
        bias = table.view(16, 16, -1).permute(2, 0, 1)
        weights = (q @ k.mT * 8**-0.5 + bias).softmax(-1)
    wanted = float((weights[..., 0] - weights[..., -1]).abs().mean())
    assert value == pytest.approx(wanted, rel=1e-4)


def test_keys_whose_position_is_in_their_content_are_not_told_apart() -> None:
    """Where position comes before attention, equal content has equal places: N1 has no meaning inside."""
    bare = opened(
        timm.create_model("sam2_hiera_tiny", num_classes=0, embed_dim=16, stages=(1, 1, 1, 1))
    ).eval()
    result = audit(bare, interventions=["N1"], checks=False, size_hw=(64, 96))
    assert verdicts(result, "N1") == {"undefined"}
    assert "before they enter" in result.of("N1")[0].note


# Larger maps.


def test_finer_and_wider_maps() -> None:
    """Means over the cells of one token, against a model that retrofit.resize moved."""
    model = swin((32, 48))
    result = audit(model, interventions=["zoom", "extend"], checks=False)
    subject = Subject(model)
    moved = copy.deepcopy(model)
    retrofit.resize(moved, (64, 96))
    tokens = subject.rows[0].unflatten(1, (8, 12))
    with torch.no_grad():
        base = model.forward_features(subject.image)
    for name, many, pool in (
        ("zoom", tokens.repeat_interleave(2, 1).repeat_interleave(2, 2), _fine),
        ("extend", tokens.repeat(1, 2, 2, 1), _wide),
    ):
        with torch.no_grad():
            handle = moved.patch_embed.register_forward_hook(lambda *_, many=many: many)
            after = moved.forward_features(torch.zeros(1, 3, 64, 96))
            handle.remove()
        assert end(result, name, tokens="all") == pytest.approx(apart(pool(after), base), rel=1e-3)


def _fine(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).mean((2, 4))


def _wide(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).unflatten(3, (2, -1)).mean((1, 3))


def test_larger_grids_are_expected_of_the_parts_as_they_are_there() -> None:
    """Index coordinates run on or keep the view: differences outside are expected of the one, none of the other."""
    model = opened(
        create(
            "vit_tiny_patch16_224", (48, 80), pos_embed="none", class_token=False, global_pool="avg"
        )
    )
    bare = audit(model, interventions=["zoom", "extend", "G1"], checks=False)
    assert verdicts(bare, "zoom") | verdicts(bare, "extend") == {"zero"}
    assert {row.expected for row in bare.of("zoom")} == {"zero"}
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    result = audit(model, interventions=["G1"], checks=False)
    rows = {row.variant: row for row in result.of("G1", metric="outside")}
    assert rows["new sides told"].expected == rows["new sides told"].verdict == "zero"
    assert rows["trained sides told"].expected == rows["trained sides told"].verdict == "nonzero"
    assert not result.surprises


def test_a_bias_grows_with_the_grid() -> None:
    """ALiBi's largest bias, a slope times the diagonal of the grid, on twice the sides of 3x5 cells."""
    model = opened(
        create(
            "vit_tiny_patch16_224", (48, 80), pos_embed="none", class_token=False, global_pool="avg"
        )
    )
    retrofit.attach(model, vp.AlibiSpec(), strength=1.0)
    result = audit(model, interventions=["G1"], checks=False)
    wanted = (5**2 + 9**2) ** 0.5 / (2**2 + 4**2) ** 0.5 - 1
    grown = result.of("G1", metric="bias", variant="trained sides told")
    assert grown[0].value == pytest.approx(wanted, rel=1e-4)


def test_attention_between_channels_is_no_attention_between_tokens() -> None:
    """DaViT's channel attention, as wide as a head: order inside windows is zero, and N3 is that of windows alone."""
    model = opened(
        timm.create_model(
            "davit_tiny", num_classes=0, depths=(1, 1), embed_dims=(16, 32), num_heads=(1, 2)
        )
    ).eval()
    result = audit(model, interventions=["P2", "N3"], checks=False, size_hw=(64, 96))
    assert {row.where for row in result.of("P2", metric="A")} == {"layer 0", "layer 2", "end"}
    assert verdicts(result, "P2") | verdicts(result, "N3") == {"zero"}
    assert not result.surprises


def test_pooled_queries_and_windows_cut_inside_are_left_alone() -> None:
    """SAM 2's pooled attention is not joined; Twins cuts its windows inside attention, where no order reaches."""
    sam2 = opened(
        timm.create_model("sam2_hiera_tiny", num_classes=0, embed_dim=16, stages=(1, 1, 1, 1))
    ).eval()
    result = audit(sam2, interventions=["P2", "N3", "S1"], checks=False, size_hw=(64, 96))
    assert verdicts(result, "P2") | verdicts(result, "N3") == {"zero"}
    assert verdicts(result, "S1", variant="one window") == {"zero"}
    twins = opened(
        timm.create_model("twins_svt_small", num_classes=0, img_size=(64, 96), depths=(1, 1, 1, 1))
    ).eval()
    cut = audit(twins, interventions=["P2", "N3", "C1"], checks=False)
    assert {row.verdict for row in cut} == {"undefined"}
