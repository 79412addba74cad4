"""Moves of parts that have no rows of their own: numbers against passes made by hand, one a kind of seam."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.retrofit.zoo import apart, opened
from visionpos.audit.model_subject import Subject
from visionpos.audit.of_model import audit

SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2}
XCIT = {"depth": 2, "img_size": (48, 80)}


def small(name: str, **options: Any) -> Any:
    return opened(timm.create_model(name, num_classes=0, **options)).eval()


def naflex(**options: Any) -> Any:
    return small("naflexvit_base_patch16_gap", **SMALL, **options)


def rows_of(model: Any, image: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.forward_features(image)
    return found


def end(result: Any, intervention: str, metric: str = "O", **fields: Any) -> float:
    rows = result.of(intervention, metric=metric, where="end", **fields)
    assert len(rows) == 1, rows
    assert rows[0].value is not None, rows[0].note
    return float(rows[0].value)


def verdicts(result: Any, intervention: str, **fields: Any) -> set[str]:
    return {row.verdict for row in result.of(intervention, **fields)}


# Added to tokens, at every call anew.


def explicit(model: Any, code: Tensor) -> Any:
    """Return a NaFlexVit that adds rows `[y, x, d]` just as they are, in place of its own."""
    made = copy.deepcopy(model)
    embeds = made.embeds
    embeds.pos_embed_type = "learned"
    embeds.pos_embed = nn.Parameter(code[None])
    embeds.pos_embed_y = embeds.pos_embed_x = None
    return made


SIZE = (96, 160)  # 6 x 10 patches


def test_a_resampled_table_is_moved_on_the_grid_of_the_tokens() -> None:
    """R1, P2 and a shift by half a cell of a table of 4x4 cells on 6x10 tokens: torch's own resampling by hand."""
    model = naflex(pos_embed_grid_size=(4, 4))
    result = audit(model, interventions=["P2", "R1", "S-half", "S1"], checks=False, size_hw=SIZE)
    assert result.complete
    assert verdicts(result, "P2") == {"zero"}
    assert verdicts(result, "S1") == {"undefined"}
    assert not result.surprises
    subject = Subject(model, size_hw=SIZE)
    table = model.embeds.pos_embed.detach().permute(0, 3, 1, 2)
    code = functional.interpolate(table, (6, 10), mode="bicubic", antialias=True)[0]
    base = rows_of(model, subject.image)
    own = rows_of(explicit(model, code.permute(1, 2, 0)), subject.image)
    assert apart(own, base) < 1e-6
    flipped = rows_of(explicit(model, code.flip(2).permute(1, 2, 0)), subject.image)
    front = base.shape[1] - 60
    wanted = apart(flipped[:, front:], base[:, front:])
    assert end(result, "R1", tokens="patches") == pytest.approx(wanted, rel=1e-3)
    assert verdicts(result, "S-half", where="end", tokens="patches") == {"nonzero"}


def test_tables_of_two_axes_are_moved() -> None:
    """R1 turns the table of columns around; a transposition swaps what rows and columns add."""
    model = naflex(pos_embed="factorized", pos_embed_grid_size=(4, 4))
    result = audit(model, interventions=["P2", "R1", "R2", "D1a"], checks=False, size_hw=(96, 96))
    assert result.complete
    assert verdicts(result, "P2") == {"zero"}
    assert not result.surprises
    subject = Subject(model, size_hw=(96, 96))
    base = rows_of(model, subject.image)
    front = base.shape[1] - 36
    by_hand = copy.deepcopy(model)
    by_hand.embeds.pos_embed_x = nn.Parameter(model.embeds.pos_embed_x.detach().flip(1))
    wanted = apart(rows_of(by_hand, subject.image)[:, front:], base[:, front:])
    assert end(result, "R1", tokens="patches") == pytest.approx(wanted, rel=1e-3)
    swapped = copy.deepcopy(model)
    x, y = model.embeds.pos_embed_x, model.embeds.pos_embed_y
    swapped.embeds.pos_embed_x, swapped.embeds.pos_embed_y = y, x
    wanted = apart(rows_of(swapped, subject.image)[:, front:], base[:, front:])
    assert end(result, "R2", tokens="patches") == pytest.approx(wanted, rel=1e-3)


def test_a_window_table_is_moved_with_the_global_one() -> None:
    """R1 on Hiera's two tables equals both turned around by hand; half a cell lies between windows' cells."""
    model = small("hiera_small_abswin_256", img_size=(64, 96), embed_dim=16, stages=(1, 1, 1, 1))
    result = audit(model, interventions=["R1", "S-half"], checks=False)
    subject = Subject(model)
    by_hand = copy.deepcopy(model)
    for name in ("pos_embed", "pos_embed_win"):
        value = getattr(model, name).detach()
        setattr(by_hand, name, nn.Parameter(value.flip(3)))
    wanted = apart(rows_of(by_hand, subject.image), rows_of(model, subject.image))
    assert end(result, "R1", tokens="all") == pytest.approx(wanted, rel=1e-3)
    assert verdicts(result, "S-half") == {"undefined"}
    assert "whole numbers" in result.of("S-half")[0].note


def test_waves_are_moved() -> None:
    """S1 of XCiT's waves by one cell equals its own formula counted from 2; a module of other waves is refused."""
    model = small("xcit_nano_12_p16_224", **XCIT)
    result = audit(model, interventions=["S1", "R1"], checks=False)
    assert result.scheme == "sine"
    assert not result.surprises
    image = Subject(model).image
    base = rows_of(model, image)

    def waves(places: list[Tensor]) -> Tensor:
        """Return [1, d, 3, 5]: sine and cosine of each frequency side by side, rows, then columns."""
        halves = []
        for place, side in zip(places, (3, 5), strict=True):
            turn = place[:, None] / (side + 1e-6) * 2 * torch.pi
            speeds = 10000.0 ** (-(torch.arange(32) // 2 * 2) / 32)
            both = torch.stack([(turn * speeds)[:, 0::2].sin(), (turn * speeds)[:, 1::2].cos()], -1)
            halves.append(both.flatten(1))
        code = torch.cat(
            [halves[0][:, None].expand(3, 5, -1), halves[1][None].expand(3, 5, -1)], -1
        )
        with torch.no_grad():
            made: Tensor = model.pos_embed.token_projection(code.permute(2, 0, 1)[None])
        return made

    y, x = torch.arange(1.0, 4.0), torch.arange(1.0, 6.0)
    assert apart(waves([y, x]), model.pos_embed(1, 3, 5)) < 1e-5
    for name, places in {
        "S1": [y + 1, x + 1],
        "R1": [y, x.flip(0)],
    }.items():
        by_hand = copy.deepcopy(model)
        code = waves(places)
        by_hand.pos_embed.register_forward_hook(lambda *_, code=code: code)
        wanted = apart(rows_of(by_hand, image), base)
        variant = {"variant": "1 cell"} if name == "S1" else {}
        assert end(result, name, **variant) == pytest.approx(wanted, rel=1e-3), name
        assert wanted > 1e-2
    other = copy.deepcopy(model)
    other.pos_embed.scale = 3.0
    refused = audit(other, interventions=["R1"], checks=False)
    assert verdicts(refused, "R1") == {"undefined"}
    assert "no Spec says" in refused.of("R1")[0].note


def test_coordinates_that_come_with_patches_are_moved() -> None:
    """S1 and R1 of Gemma's tables and rotation equal patches that come with such coordinates."""
    model = small("gemma4_vit_167m_enc", **SMALL, position_embedding_size=64, global_pool="none")
    result = audit(model, interventions=["P2", "S1", "R1", "D2"], checks=False, size_hw=(48, 80))
    assert result.complete
    assert verdicts(result, "P2") == {"zero"}
    subject = Subject(model, size_hw=(48, 80))
    y, x = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
    places = torch.stack([y.flatten(), x.flatten()], -1)[None]

    def told(coords: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.forward_features(subject.image, patch_coord=coords)
        return found

    assert apart(told(places), rows_of(model, subject.image)) < 1e-6
    flip = torch.stack([places[..., 0], 4 - places[..., 1]], -1)
    for name, coords in {"S1": places + 17, "R1": flip}.items():
        variant = {"variant": "17 cells"} if name == "S1" else {}
        wanted = apart(told(coords), told(places))
        assert end(result, name, tokens="patches", **variant) == pytest.approx(wanted, rel=1e-4)
        assert wanted > 1e-3
    far = result.of("S1", variant="1000 cells")
    assert {row.verdict for row in far} == {"undefined"}
    assert "from 0 to 63" in far[0].note


# Differences.


def sam(size: tuple[int, int] = (64, 64)) -> Any:
    return small("samvit_base_patch16_224", img_size=size, window_size=0, **SMALL)


def test_tables_of_one_axis_are_moved() -> None:
    """R1 turns SAM's table of columns around, R2 swaps the two; a shift keeps all, an order of its own is refused."""
    model = sam()
    result = audit(
        model, interventions=["P1", "P2", "S1", "S-half", "R1", "R2", "D1b"], checks=False
    )
    assert result.complete
    assert not result.surprises
    image = Subject(model).image
    base = rows_of(model, image)
    flipped, swapped = copy.deepcopy(model), copy.deepcopy(model)
    for one, other in zip(flipped.blocks, swapped.blocks, strict=True):
        one.attn.rel_pos_w.data = one.attn.rel_pos_w.data.flip(0)
        h, w = other.attn.rel_pos_h, other.attn.rel_pos_w
        other.attn.rel_pos_h, other.attn.rel_pos_w = w, h
    for name, by_hand in {"R1": flipped, "R2": swapped}.items():
        wanted = apart(rows_of(by_hand, image), base)
        assert end(result, name) == pytest.approx(wanted, rel=1e-3)
        assert wanted > 1e-3
    assert verdicts(result, "S1", metric="A") | verdicts(result, "S-half") == {"zero"}
    assert verdicts(result, "P1", where="end") == {"nonzero"}
    assert verdicts(result, "P2") | verdicts(result, "D1b") == {"undefined"}
    assert "array's own differences" in result.of("P2")[0].note


def test_tables_between_other_grids_are_refused() -> None:
    """MViT's keys are pooled: a mirrored difference between queries and keys has no entry."""
    model = small("mvitv2_tiny", img_size=64)
    result = audit(model, interventions=["R1"], checks=False)
    assert verdicts(result, "R1") == {"undefined"}
    assert "different grids" in result.of("R1")[0].note


def test_a_table_inside_a_lambda_layer_is_moved() -> None:
    """R1 on a lambda layer equals its table turned around along x."""
    from timm.layers.lambda_layer import LambdaLayer

    from visionpos.audit.changes import flipped
    from visionpos.audit.model_axes import LambdaMove
    from visionpos.audit.model_trials import in_plane
    from visionpos.geometry import Grid
    from visionpos.retrofit.tables import Table, module_row

    layer: Any = opened(LambdaLayer(32, feat_size=(3, 5), r=None, stride=1)).eval()
    row = module_row(layer)
    assert row is not None
    seams = next(one for one in row.tables if one.path == "pos_emb")
    table = Table("pos_emb", layer, "pos_emb", seams, layer, layer, row)
    by_hand = copy.deepcopy(layer)
    by_hand.pos_emb.data = by_hand.pos_emb.data.flip(1)
    image = torch.randn(2, 32, 3, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, wanted = layer(image), by_hand(image)
        LambdaMove(table, None)(in_plane(flipped, mirrors=True))
        moved = layer(image)
    assert Grid(*table.sides).size == 15  # type: ignore[misc]
    assert apart(moved, wanted) < 1e-6
    assert apart(moved, before) > 1e-3


def test_a_model_of_rows_that_ends_in_a_map() -> None:
    """Qwen3's tower gives a map of tokens: order, and a size that it does not serve by itself, are followed."""
    model = small("qwen3_vit_88m_enc", **SMALL)
    result = audit(model, interventions=["P1", "P2", "N3", "G1"], checks=False, size_hw=(64, 96))
    assert result.complete
    assert verdicts(result, "P2") | verdicts(result, "N3") == {"zero"}
    assert verdicts(result, "P1", where="end") == {"nonzero"}
    assert end(result, "G1", "outside", variant="new sides told") == 0.0
    assert not result.surprises
