"""Research rules: VideoRoPE, HoPE, spatial reset, MM-RoPE, Circle-RoPE, V2PE and ID-Align against loops and by hand.

The rules of these families were compared once with JJJYmmm/Multimodal-RoPEs (266 random batches each): 0 differences,
2e-5 for circles and spans, which are float32 there.
"""

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.research_ids import placed, v2pe
from tests.strategies import seeds
from visionpos.errors import PositionError
from visionpos.vlm import Image, Rule, Text, family, ids_from_tokens, stream_ids
from visionpos.vlm.increments import V2PE_STEPS, drawn_steps

Part = int | tuple[int, int, int]
ORACLES = {
    "videorope": "videorope", "hope": "hope", "mrope_interleave": "reset", "mhrope": "reset",
    "omnirope": "reset", "mm_rope": "scaled", "circle_rope": "circle",
}  # fmt: skip


def rule_of(name: str) -> Rule:
    rule = family(name).spec.rule
    assert rule is not None
    rule = replace(rule, video="block")
    return replace(rule, frame_step=Fraction(3, 2)) if name == "hope" else rule


def drawn(seed: int) -> list[Part]:
    rng = random.Random(seed)
    parts: list[Part] = [rng.randint(0, 4)]
    for _ in range(rng.randint(0, 4)):
        parts += [
            (rng.choice((1, 1, 2, 5)), rng.randint(1, 6), rng.randint(1, 6)),
            rng.randint(1, 5),
        ]
    return parts


def place(parts: list[Part], rule: Rule) -> Any:
    types: list[int] = []
    grids = []
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
        else:
            types += [2] * (part[0] * part[1] * part[2])
            grids.append(part)
    row = torch.tensor(types, dtype=torch.int64)
    return ids_from_tokens(row, row, None, grids, rule=rule)


@pytest.mark.parametrize("name", ORACLES)
def test_reference_by_loops(name: str) -> None:
    for seed in range(150):
        parts = drawn(seed)
        ids, following = placed(parts, ORACLES[name])
        got = place(parts, rule_of(name))
        # Turns of a half circle and coordinates near 0: 1e-12 of a radius of 10.
        torch.testing.assert_close(
            got.ids.double(),
            torch.tensor(ids, dtype=torch.float64).reshape(3, -1),
            rtol=0,
            atol=1e-9,
        )
        assert float(got.next_position) == pytest.approx(following, abs=1e-9)


def test_golden_spatial_reset() -> None:
    """Two text, a 2x3 image, its end: rows and columns from 0, time at 2, the end at 2 + 3."""
    got = place([2, (1, 2, 3), 2], rule_of("mrope_interleave"))
    assert got.ids.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 0, 0, 0, 1, 1, 1, 5, 6], [0, 1, 0, 1, 2, 0, 1, 2, 5, 6],
    ]  # fmt: skip


def test_golden_half_steps_of_hope() -> None:
    """Three frames 1.5 apart: text goes on at 1 + 3 + 1."""
    got = place([1, (3, 1, 1), 1], rule_of("hope"))
    assert got.ids[0].tolist() == [0, 1, 2.5, 4, 5]


def test_golden_every_cell_of_a_circle_is_as_far_from_text() -> None:
    """The distance to a text token at position 7 depends on the image's start alone."""
    got = place([1, (1, 4, 6), 3], rule_of("circle_rope"))
    cells = got.ids[:, 1:25]
    far = (cells - 7.0).norm(dim=0)
    torch.testing.assert_close(far, far[:1].expand(24), rtol=0, atol=1e-9)
    assert got.ids[:, 25].unique().numel() == 1


@pytest.mark.parametrize("following", ["ceil_max", "max"])
@given(seeds())
def test_reference_v2pe_one_increment_an_image(following: Any, seed: int) -> None:
    rng = random.Random(seed)
    parts: list[Any] = []
    for _ in range(rng.randint(1, 4)):
        parts += [rng.randint(1, 5), (rng.randint(1, 40), rng.choice(V2PE_STEPS))]
    steps = tuple(part[1] for part in parts if isinstance(part, tuple))
    rule = Rule(axes=("index",), cell_step=steps, next=following)
    types = [
        kind
        for part in parts
        for kind in ([1] * part[0] if isinstance(part, tuple) else [0] * part)
    ]
    row = torch.tensor(types)
    grids = [(1, 1, part[0]) for part in parts if isinstance(part, tuple)]
    got = ids_from_tokens(row, row, grids, rule=rule)
    assert got.ids[0].tolist() == [float(one) for one in v2pe(parts, whole=following == "ceil_max")]


@pytest.mark.parametrize("power", range(9))
@pytest.mark.parametrize("far", [65535, 131071, 10**6, 2**24 + 1])
def test_golden_v2pe_is_exact_far_out(power: int, far: int) -> None:
    """facts/tiling.md 7: float32 breaks at 65535 for 1/256; here every id is the exact fraction."""
    step = Fraction(1, 2**power)
    row = torch.tensor([0] * 3 + [1] * 300 + [0])
    rule = Rule(axes=("index",), cell_step=step, next="ceil_max")
    ids = ids_from_tokens(row, row, [[1, 15, 20]], rule=rule).ids[0] + far
    expected = [far + one for one in v2pe([3, (300, step), 1], whole=True)]
    assert [Fraction(one) for one in ids.tolist()] == expected


def test_golden_v2pe_where_the_two_continuations_part() -> None:
    """facts/tiling.md 7: span 0.5 for 256 tokens, three times from 2: last 3.5, end 5 by the code, 4.5 by the paper."""
    for following, end in (("ceil_max", 5.0), ("max", 4.5)):
        rule = Rule(axes=("index",), cell_step=Fraction(1, 512), next=following)  # type: ignore[arg-type]
        row = torch.tensor([0] * 3 + [1] * 768 + [0])
        ids = ids_from_tokens(row, row, [[1, 24, 32]], rule=rule).ids[0]
        assert (ids[-2].item(), ids[-1].item()) == (3.5, end)


def test_golden_v2pe_span_of_a_whole_image() -> None:
    """Span 16 over 4 tokens from 0: 4, 8, 12, 16, then 17."""
    rule = Rule(axes=("index",), cell_span=Fraction(16), next="ceil_max")
    row = torch.tensor([0, 1, 1, 1, 1, 0])
    assert ids_from_tokens(row, row, [[1, 2, 2]], rule=rule).ids.tolist() == [[0, 4, 8, 12, 16, 17]]


def test_drawn_steps_are_a_stream_s_images_in_order() -> None:
    """Every tile of an image has the image's step; as many as images, or refused."""
    fam = family("internvl_v2pe")
    stream = fam.stream([Text(tokens=1), Image((448, 448)), Text(tokens=1), Image((448, 896))])
    rule = fam.spec.rule
    assert rule is not None
    steps = (Fraction(1, 4), Fraction(1, 256))
    ids = stream_ids(stream, replace(rule, cell_step=steps)).ids[0]
    apart = ids.diff()[[span.start for span in stream.spans if span.kind == "image"]]
    assert apart.tolist() == [0.25, 1 / 256, 1 / 256, 1 / 256]
    with pytest.raises(PositionError, match=r"cell_step holds 1 steps for 2 images.*drawn_steps"):
        stream_ids(stream, replace(rule, cell_step=steps[:1]))
    made = torch.Generator().manual_seed(3)
    many = drawn_steps(4000, made)
    assert set(many) == set(V2PE_STEPS)
    assert max(abs(many.count(step) - 4000 / 9) for step in V2PE_STEPS) < 5 * (4000 / 9) ** 0.5


def test_aligned_tiles_take_the_thumbnail_s_positions() -> None:
    """LLaVA-NeXT, 672x672: thumbnail 24x24, tiles 48x48; each cell at its thumbnail cell, newlines with their row."""
    fam = family("id_align")
    stream = fam.stream([Text(tokens=2), Image((672, 672)), Text(tokens=2)])
    ids = fam.position_ids(stream).ids[0]
    whole, tiles = [span for span in stream.spans if span.kind == "image"]
    assert ids[whole.start : whole.stop].tolist() == list(range(2, 2 + 576))
    seen = ids[tiles.start : tiles.stop][stream.is_feature[tiles.start : tiles.stop]].reshape(
        48, 48
    )
    rows, cols = torch.meshgrid(torch.arange(48) // 2, torch.arange(48) // 2, indexing="ij")
    assert torch.equal(seen, 2 + 24 * rows + cols)
    assert ids[-2:].tolist() == [578, 579]
    assert int(ids.max()) < stream.length


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_invariant_reset_images_differ_in_time_alone(height: int, width: int, seed: int) -> None:
    """The second of two equal images has the same rows and columns as the first."""
    text = 1 + seed % 5
    ids = place([1, (1, height, width), text, (1, height, width)], rule_of("omnirope")).ids
    cells = height * width
    assert torch.equal(ids[1:, 1 : 1 + cells], ids[1:, -cells:])
    assert (ids[0, -cells:] - ids[0, 1 : 1 + cells] == max(height, width) + text).all()
