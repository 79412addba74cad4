"""Rotary layouts: the axis tables of facts/mrope.md 4, what is refused, scaling, and what an axis can tell apart."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from visionpos import config
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import rotate
from visionpos.vlm import family, family_names
from visionpos.vlm.language import LanguageSpec, axis_table
from visionpos.vlm.rotary import axis_visibility, language_freqs, language_rotation

T, H, W = range(3)


def spec(sections: Any, order: str, **more: Any) -> LanguageSpec:
    dim = more.pop("head_dim", 2 * sum(sections))
    data = {"head_dim": dim, "theta": 1e4, "sections": sections, "order": order, "pairing": "half"}
    return config.parse(LanguageSpec, {**data, **more})


def at(table: list[int], axis: int) -> list[int]:
    return [pair for pair, owner in enumerate(table) if owner == axis]


# facts/mrope.md 4: sections in axis order, order -> pairs of each axis
TABLES: dict[str, tuple[Any, str, dict[int, list[int]]]] = {
    "contiguous 16 24 24": ([16, 24, 24], "contiguous",
                            {T: list(range(16)), H: list(range(16, 40)), W: list(range(40, 64))}),
    "interleaved 24 20 20": ([24, 20, 20], "interleaved", {
        T: [*range(0, 58, 3), 60, 61, 62, 63], H: list(range(1, 59, 3)), W: list(range(2, 60, 3))}),
    "interleaved 11 11 10": ([11, 11, 10], "interleaved",
                             {T: list(range(0, 31, 3)), H: list(range(1, 32, 3)), W: list(range(2, 30, 3))}),
    "interleaved 12 10 10": ([12, 10, 10], "interleaved",
                             {T: [*range(0, 28, 3), 30, 31], H: list(range(1, 29, 3)), W: list(range(2, 30, 3))}),
    "contiguous 8 12 12": ([8, 12, 12], "contiguous",
                           {T: list(range(8)), H: list(range(8, 20)), W: list(range(20, 32))}),
    "ernie 22 22 20": ([20, 22, 22], "alternating",
                       {H: list(range(0, 43, 2)), W: list(range(1, 44, 2)), T: list(range(44, 64))}),
    "videorope 16 24 24": ([16, 24, 24], "alternating",
                           {H: list(range(0, 48, 2)), W: list(range(1, 48, 2)), T: list(range(48, 64))}),
    "xd-rope": ([16] * 4, "contiguous", {axis: list(range(16 * axis, 16 * axis + 16)) for axis in range(4)}),
    "neomme": ([16, 16], "interleaved", {0: list(range(0, 32, 2)), 1: list(range(1, 32, 2))}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_golden_axis_tables(name: str) -> None:
    sections, order, expected = TABLES[name]
    table = axis_table(spec(sections, order)).tolist()
    assert {axis: at(table, axis) for axis in expected} == expected


def test_golden_pattern_of_mm_rope() -> None:
    """Lumos: T T H W H W H W, repeated over the pairs (facts/vision_pe.md 4)."""
    table = axis_table(spec([0, 0, 1, 2, 1, 2, 1, 2], "pattern", head_dim=128)).tolist()
    assert table == [T, T, H, W, H, W, H, W] * 8


def test_golden_greedy_layout_of_pangu() -> None:
    """(6, 5, 5): no axis twice running, the last pair the first axis's; written out from the rule by hand.

    Shares 5, 5, 5 and one more of the first axis: ties go by number, so they take turns.
    """
    assert axis_table(spec([6, 5, 5], "greedy")).tolist() == [T, H, W] * 5 + [T]


def test_golden_heads_of_mhrope() -> None:
    """2, 3, 3 of 8 heads; of 10 heads the last two do not turn."""
    table = axis_table(spec([2, 3, 3], "heads", head_dim=128, kv_heads=8))
    assert table.tolist() == [T, T, H, H, H, W, W, W]
    wide = spec([2, 3, 3], "heads", head_dim=16, kv_heads=10)
    assert axis_table(wide).tolist()[8:] == [-1, -1]
    rotation = language_rotation(wide, torch.arange(15).reshape(3, 5))
    assert rotation.cos.shape == (10, 5, 8)
    assert torch.equal(rotation.cos[8:], torch.ones(2, 5, 8))
    plain = torch.outer(torch.arange(5, 10).float(), language_freqs(wide, torch.float32)[2, H])
    torch.testing.assert_close(rotation.cos[2], plain.cos())
    assert language_rotation(wide, torch.zeros(3, 2, 5)).cos.shape == (2, 10, 5, 8)


@pytest.mark.parametrize(("data", "message"), [
    # facts/mrope.md 0.8: what interleaving really gives
    (([16, 24, 24], "interleaved", {}), r"\(16, 24, 24\).*would get \(22, 21, 21\)"),
    (([11, 11, 10], "interleaved", {"head_dim": 256}), r"sum to 32 and rotary_dim / 2 is 128.*\(107, 11, 10\).*to 64"),
    (([16, 24, 23], "contiguous", {"head_dim": 128}), r"sum to 63 and rotary_dim / 2 is 64.*raises"),
    (([2, 10, 20], "alternating", {}), r"\(2, 10, 20\).*would get \(6, 10, 16\)"),
    (([2, 3, 4], "heads", {"head_dim": 64, "kv_heads": 8}), r"sum to 9 and kv_heads is 8"),
    (([2, 3, 3], "heads", {"head_dim": 64}), r"kv_heads is None with order 'heads'"),
    (([2, 2], "contiguous", {"rotary_dim": 16}), r"rotary_dim is 16 and head_dim 8"),
    (([2, 2], "contiguous", {"still": [2]}), r"still is \(2,\).*2 axes"),
    (([2, 2], "contiguous", {"scaling": {"kind": "yarn", "factor": 0.5, "original_positions": 8}}), r"factor is 0.5"),
    (([2, 2], "contiguous", {"scaling": {"kind": "ntk_alpha", "alpha": 0}}), r"alpha is 0"),
    (([2, 2], "sideways", {}), r"order = 'sideways'"),
])  # fmt: skip
def test_error_says_what_the_checkpoint_would_get(data: Any, message: str) -> None:
    sections, order, more = data
    with pytest.raises(ConfigError, match=message):
        spec(sections, order, **more)


LAID_OUT = [
    ("contiguous", [16, 24, 24]), ("interleaved", [24, 20, 20]), ("alternating", [20, 22, 22]),
    ("greedy", [24, 20, 20]), ("contiguous", [16] * 4),
]  # fmt: skip


@given(seeds(), st.integers(0, 5000), st.sampled_from(LAID_OUT))
def test_invariant_shift_of_every_axis(
    seed: int, shift: int, layout: tuple[str, list[int]]
) -> None:
    """A rotation keeps norms, and q . k of a vision token (unequal axes) does not change under a common shift.

    This is what the XD-RoPE module of transformers breaks: it pairs channels of different axes (facts/mrope.md 0.2).
    """
    order, sections = layout
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (len(sections), 2), generator=made)
    q, k = torch.randn(2, 1, 1, 2, 128, generator=made, dtype=torch.float64)
    language = spec(sections, order)

    def product(at: torch.Tensor) -> torch.Tensor:
        turned, other = rotate(q, k, language_rotation(language, at, "exact"))
        torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=1e-5)
        return (turned[..., 0, :] * other[..., 1, :]).sum()

    torch.testing.assert_close(product(ids), product(ids + shift), rtol=1e-4, atol=2e-4)


def test_golden_yarn_of_qwen3_vl() -> None:
    """facts/mrope.md 11: theta 5e6, 64 pairs, 262144 positions, factor 3; the attention factor enters once."""
    yarn = {"kind": "yarn", "factor": 3.0, "original_positions": 262144}
    plain = spec([24, 20, 20], "interleaved", theta=5e6)
    scaled = spec([24, 20, 20], "interleaved", theta=5e6, scaling=yarn)
    ratio = language_freqs(scaled, torch.float64).sum(0) / language_freqs(plain, torch.float64).sum(
        0
    )
    assert torch.equal(ratio[:30], torch.ones(30, dtype=torch.float64))
    torch.testing.assert_close(ratio[45:], torch.full((19,), 1 / 3, dtype=torch.float64))
    ramp = [0.958, 0.917]
    assert ratio[30:32].tolist() == pytest.approx(ramp, abs=5e-4)
    assert ratio[44].item() == pytest.approx(0.375, abs=5e-4)
    zero = language_rotation(scaled, torch.zeros(3, 1, dtype=torch.int64))
    assert zero.cos[0, 0].item() == pytest.approx(1.1099, abs=5e-5)
    fixed = spec([24, 20, 20], "interleaved", theta=5e6, scaling={**yarn, "attention_factor": 2.0})
    assert language_rotation(fixed, torch.zeros(3, 1)).cos[0, 0].item() == 2.0


def test_golden_alpha_of_hunyuan() -> None:
    """theta * alpha ** (d / (d - 2))."""
    scaled = spec([16] * 4, "contiguous", scaling={"kind": "ntk_alpha", "alpha": 1000.0})
    larger = spec([16] * 4, "contiguous", theta=1e4 * 1000 ** (128 / 126))
    assert torch.equal(language_freqs(scaled, torch.float64), language_freqs(larger, torch.float64))


def test_still_axes_do_not_turn() -> None:
    """HoPE: the pairs of time are there and rotate by nothing."""
    hope = spec([16, 24, 24], "alternating", still=[0])
    freqs = language_freqs(hope, torch.float64)
    assert not freqs[T].any()
    assert torch.equal(
        freqs[1:], language_freqs(spec([16, 24, 24], "alternating"), torch.float64)[1:]
    )


def test_axis_visibility_warns_of_an_axis_that_hardly_turns() -> None:
    """ERNIE's time has theta 5e5 to the power of -44/64 and less: 8 frames turn it by 0.0008 rad."""
    language = family("ernie4_5_vl").spec.language
    assert language is not None
    time, row, col = axis_visibility(language, (8, 20, 20))
    assert (time.pairs, row.pairs, col.pairs) == (20, 22, 22)
    assert time.fastest == pytest.approx(7 * 5e5 ** (-44 / 64), rel=1e-12)
    assert row.fastest == pytest.approx(19.0, rel=1e-12)
    assert col.slowest == pytest.approx(19 * 5e5 ** (-43 / 64), rel=1e-12)
    assert "under 0.1 rad" in time.warning
    assert not row.warning
    assert not axis_visibility(language, (1, 20, 20))[0].warning  # a still image needs no time
    with pytest.raises(PositionError, match=r"\(8, 20\).*3 axes"):
        axis_visibility(language, (8, 20))


def test_every_family_s_layout_has_an_axis_a_row_of_ids() -> None:
    for name in family_names():
        fam = family(name)
        if fam.spec.language is not None:
            assert fam.spec.rule is not None
            assert fam.spec.language.axes == len(fam.spec.rule.axes), name


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, r"language.scaling is .* no kind"),
        ({"kind": "dynamic", "factor": 2.0, "original_positions": 64}, "scaling"),
    ],
)
def test_scaling_says_its_kind_and_is_the_same_at_every_length(
    scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family("qwen2_5_vl", overlay={"language": {"scaling": scaling}})


def test_llama3_stretches_a_family() -> None:
    data = {"kind": "llama3", "factor": 8.0, "original_positions": 8192}
    fam = family("qwen2_5_vl", overlay={"language": {"scaling": data}})
    plain = family("qwen2_5_vl").frequencies.sum(0)
    share = fam.frequencies.sum(0) / plain
    assert float(share[0]) == 1.0
    assert float(share[-1]) == pytest.approx(1 / 8)
