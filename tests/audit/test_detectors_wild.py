"""Defects on record in installed libraries are found by detectors that are handed their functions."""

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from visionpos.audit import detectors as d

DIM = 64
THETAS = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)[None]


def of_sequence(x, places):
    """rotary-embedding-torch turns a whole sequence: its tokens are picked at the places asked for."""
    rotary = RotaryEmbedding(dim=DIM)
    rows = int(places.max()) + 1
    found = [
        rotary.rotate_queries_or_keys(one.expand(1, 1, rows, DIM))[0, 0, int(place)]
        for one, place in zip(x, places.flatten(), strict=True)
    ]
    return torch.stack(found)


def test_rotary_embedding_torch_takes_positions_in_the_dtype_of_q() -> None:
    wanted = d.Wanted(pairing="adjacent", freqs=THETAS)
    assert not d.precision(of_sequence, DIM, wanted, dtypes=(torch.float32,)).alarm
    found = d.precision(of_sequence, DIM, wanted, dtypes=(torch.bfloat16,))
    assert found.alarm
    assert "bfloat16" in found.says
    assert not d.precision(of_sequence, DIM, wanted, places=(256,)).alarm
    assert not d.pairing_mismatch(of_sequence, DIM, wanted=wanted).alarm


def test_rotary_embedding_torch_keeps_a_damaged_table() -> None:
    x = torch.randn(1, 1, 600, DIM, generator=torch.Generator().manual_seed(0))

    def make():
        rotary = RotaryEmbedding(dim=DIM)
        return lambda dtype: rotary.rotate_queries_or_keys(x.to(dtype))

    assert not d.stale_cache(make, (torch.float32, torch.float32)).alarm
    assert d.stale_cache(make, (torch.bfloat16, torch.float32)).alarm


def test_rotary_embedding_torch_keys_axial_tables_by_length() -> None:
    def make():
        rotary = RotaryEmbedding(dim=8)
        return lambda offsets: rotary.get_axial_freqs(4, 4, offsets=offsets)

    found = d.stale_cache(make, ((0, 0), (10, 10)))
    assert found.alarm
    assert "(10, 10)" in found.says


@pytest.mark.parametrize(
    ("rope", "alarm"),
    [
        (lambda: RotaryEmbeddingCat(DIM, in_pixels=False, feat_shape=[14, 14]), True),
        (lambda: RotaryEmbeddingCat(DIM, in_pixels=False), False),
        (lambda: RotaryEmbeddingDinoV3(DIM, feat_shape=[14, 14]), False),
    ],
    ids=["cat, fixed", "cat", "dinov3, fixed"],
)
def test_timm_tables_with_a_fixed_shape(rope, alarm) -> None:
    def make():
        return rope().get_embed

    assert d.stale_cache(make, distinct=True).alarm is alarm


def llama(x, places, widen=lambda turns: torch.cat([turns, turns], -1)):
    turns = widen(places.float() * THETAS.float())
    cos, sin = (table[None].to(x.dtype) for table in (turns.cos(), turns.sin()))
    return apply_rotary_pos_emb(x[None, None], x[None, None], cos, sin)[0][0, 0]


def test_transformers_llama_pairs_halves() -> None:
    assert not d.pairing_mismatch(llama, DIM, wanted=d.Wanted(pairing="half", freqs=THETAS)).alarm
    wrong = d.Wanted(pairing="adjacent", freqs=THETAS)
    assert d.pairing_mismatch(llama, DIM, wanted=wrong).alarm
    mixed = d.pairing_mismatch(
        lambda x, at: llama(x, at, lambda t: t.repeat_interleave(2, -1)), DIM
    )
    assert mixed.alarm
    assert not d.precision(llama, DIM, d.Wanted(pairing="half", freqs=THETAS)).alarm
