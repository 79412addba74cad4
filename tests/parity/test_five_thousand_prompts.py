"""Prompts beyond the 2,000 batches of tests/parity, until every family has met transformers on five thousand."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from tests.parity import test_mrope_transformers as mrope
from tests.parity import test_omni_transformers as omni
from tests.parity import test_rope_index_transformers as rope_index
from tests.parity import test_views_transformers as views
from tests.vlm.prompts import draw
from visionpos.vlm import family

MANY = 2000  # seeds that the parity tests draw


def cases() -> Iterator[tuple[str, Callable[[int], None], range]]:
    """Yield name, check and further seeds; batches have 2.5 rows on average, those of omni and views two."""
    of_rows = range(MANY, MANY + 20)
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        yield name, partial(mrope.check, name), of_rows
    for name in rope_index.PEERS:
        alone = name in rope_index.ONE_ROW
        yield name, partial(rope_index.check, name), range(MANY, 5000) if alone else of_rows
    for name in omni.PEERS:
        for woven in (False, True):
            what = "woven" if woven else "apart"
            check = partial(omni.check, name, woven=woven)
            yield f"{name}-{what}", check, range(MANY, MANY + 600)
    for variant in (None, "4x"):
        check_canvas = partial(views.check_canvas, variant=variant)
        yield f"minicpm_v4_7-{variant}", check_canvas, range(MANY, MANY + 600)
    yield "glm_image", views.check_pending, range(len(views.FEW), 5000)


CASES = list(cases())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "seeds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_reference_five_thousand_prompts(check: Callable[[int], None], seeds: range) -> None:
    for seed in seeds:
        check(seed)


def test_batches_hold_so_many_rows() -> None:
    """2,020 batches of one to four rows are more than 5,000 prompts."""
    assert sum(len(draw(seed).types) for seed in range(MANY + 20)) >= 5000


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_reference_tokens_of_32_bits(name: str) -> None:
    """Tokens, types and mask of 32 bits stand where transformers puts those of 64; its own method mixes the two."""
    fam = family(name, dialect="transformers")
    for seed in range(60):
        batch = draw(seed, per_frame=name == "qwen3_vl")
        seconds = torch.tensor([float(one) for one in batch.seconds]) if batch.seconds else None
        extra = {"second_per_grid_ts": seconds} if name == "qwen2_5_vl" else {}
        ids, deltas = mrope.theirs(name, batch, **extra)
        got = fam.position_ids_from_tokens(
            batch.input_ids.int(),
            batch.types.int(),
            batch.grids("images"),
            batch.grids("videos"),
            batch.mask.int(),
            seconds,
        )
        assert torch.equal(got.ids, ids), f"seed {seed}"
        assert torch.equal(got.delta, deltas[:, 0]), f"seed {seed}"
