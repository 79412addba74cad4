"""Stretched ladders: published numbers, and the installed transformers over random parameters."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.scaling import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    NtkAlpha,
    Proportional,
)
from visionpos.geometry.scaling_params import read_rope_parameters, write_rope_parameters
from visionpos.geometry.yarn import Yarn

F32 = torch.float32


def close(rule: Any, expected: list[float], *, theta: float = 1e4, rel: float = 2e-6) -> None:
    found = rule.frequencies(len(expected), theta, F32).tolist()
    assert found == pytest.approx(expected, rel=rel, abs=0)


# facts/sequence_and_audit.md 1.3, computed by transformers modeling_rope_utils; printed digits set the tolerance.


def test_golden_linear() -> None:
    close(Linear(factor=4.0), [0.25, 0.025, 0.0025, 0.00025])


def test_golden_ntk_keeps_the_fastest_and_divides_the_slowest() -> None:
    close(Ntk(factor=4.0), [1.0, 0.062996, 0.0039685, 0.00025], rel=1e-5)


def test_golden_dynamic_ntk_counts_thirteen() -> None:
    rule = DynamicNtk(factor=4.0, original_positions=2048)
    close(rule.at_length(8192), [1.0, 0.04252904, 0.00180872, 7.692e-5], rel=5e-5)
    close(rule, [1.0, 0.1, 0.01, 0.001])
    close(rule.at_length(2048), [1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("length", [2048, 4096])
def test_golden_yarn(length: int) -> None:
    close(Yarn(factor=4.0, original_positions=length), [1.0, 0.1, 0.00625, 0.00025])


@pytest.mark.parametrize(("length", "third"), [(2048, 0.00505697), (4096, 0.00655697)])
def test_golden_yarn_untruncated(length: int, third: float) -> None:
    rule = Yarn(factor=4.0, original_positions=length, truncate=False)
    assert float(rule.frequencies(4, 1e4, F32)[2]) == pytest.approx(third, rel=2e-6)


def test_golden_yarn_of_eight_pairs() -> None:
    expected = [1, 0.316228, 0.1, 0.0256935, 0.00625, 0.0013835, 0.00025, 7.9057e-5]
    close(Yarn(factor=4.0, original_positions=2048), expected, rel=2e-5)


def test_golden_yarn_keeps_21_pairs_and_divides_18() -> None:
    kept = Yarn(factor=4.0, original_positions=4096).frequencies(64, 1e4, F32)
    share = kept / Linear(factor=1.0).frequencies(64, 1e4, F32)
    assert int((share == 1).sum()) == 21
    assert int(((share - 0.25).abs() < 1e-6).sum()) == 18


def test_golden_yarn_forms_differ_by_42_percent_at_plane_34() -> None:
    code, paper = (
        Yarn(factor=4.0, original_positions=4096, ramp=ramp).frequencies(64, 1e4, torch.float64)
        for ramp in ("pairs", "turns")
    )
    gap = (code - paper).abs() / torch.maximum(code, paper)
    assert int(gap.argmax()) == 34
    assert float(gap.max()) == pytest.approx(0.42, abs=0.005)


@pytest.mark.parametrize(
    ("factor", "gain"),
    [(4, 1.138629), (8, 1.207944), (16, 1.277259), (32, 1.346574), (40, 1.368888)],
)
def test_golden_yarn_temperature(factor: float, gain: float) -> None:
    assert Yarn(factor=factor, original_positions=4096).gain == pytest.approx(gain, abs=5e-7)


def test_golden_deepseek_mscale() -> None:
    rule = Yarn(factor=40, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert rule.gain == 1.0
    assert rule.softmax_gain == pytest.approx(1.873854, abs=5e-7)


def test_golden_llama3() -> None:
    close(Llama3(), [1, 0.03760603, 5.2484602e-4, 6.6478697e-6], theta=5e5)
    expected = [1, 0.193923, 0.037606, 0.0072927, 5.24846e-4, 3.42810e-5, 6.64787e-6, 1.28917e-6]
    close(Llama3(), expected, theta=5e5, rel=2e-5)


def test_golden_llama3_of_64_pairs() -> None:
    plain = Linear(factor=1.0).frequencies(64, 5e5, F32)
    divided = plain / Llama3().frequencies(64, 5e5, F32)
    assert divided[:29].tolist() == [1.0] * 29
    blended = [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573]
    assert divided[29:35].tolist() == pytest.approx(blended, abs=5e-5)
    assert divided[35:].tolist() == pytest.approx([8.0] * 29, rel=1e-6)


def test_llama3_with_equal_bounds_steps_as_transformers_does() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    data = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0}
    data |= {"high_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    theirs, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](config(dict(data), head_dim=128))
    rope = read_rope_parameters(data)
    assert isinstance(rope, RopeParams)
    torch.testing.assert_close(rope.frequencies(128)[0], theirs, rtol=1e-6, atol=0)


def test_golden_longrope() -> None:
    rule = LongRope(
        short_factor=(1, 1, 1, 1), long_factor=(1, 2, 4, 8), original_positions=4096, factor=32
    )
    assert rule.gain == pytest.approx(1.190238, abs=5e-7)
    assert rule.at_length(5000).gain == rule.gain
    close(rule.at_length(4096), [1, 0.1, 0.01, 0.001])
    close(rule.at_length(4097), [1, 0.05, 0.0025, 0.000125])


@pytest.mark.parametrize(("share", "expected"), [(0.25, [1, 0, 0, 0]), (0.5, [1, 0.031623, 0, 0])])
def test_golden_proportional_keeps_the_ladder_of_the_whole_head(
    share: float, expected: list[float]
) -> None:
    close(Proportional(share=share), expected, theta=1e6, rel=2e-5)


def test_golden_partial_rotary_makes_a_ladder_of_its_own() -> None:
    found = RopeParams(theta=1e4, share=0.25).frequencies(64)
    assert found.shape == (1, 8)
    assert found[0, :3].tolist() == pytest.approx([1, 0.316228, 0.1], abs=5e-7)


def test_alpha_is_ntk_with_any_number() -> None:
    wide = NtkAlpha(alpha=4.0).frequencies(4, 1e4, F32)
    assert torch.equal(wide, Ntk(factor=4.0).frequencies(4, 1e4, F32))


# The installed transformers, over random parameters.


def config(parameters: dict[str, Any], **own: Any) -> Any:
    """The functions of modeling_rope_utils need a few numbers of a config and no model."""
    data = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 4096, **own}
    return SimpleNamespace(**data, rope_parameters=parameters, standardize_rope_params=lambda: None)


numbers = st.floats(1.0, 64.0)
lengths = st.integers(64, 1 << 17)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Rope parameters of any type, and channels of a head."""
    pairs = draw(st.integers(2, 64))
    kind = draw(
        st.sampled_from(("linear", "dynamic", "yarn", "llama3", "longrope", "proportional"))
    )
    data: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(100.0, 1e7))}
    data["factor"] = draw(numbers)
    if kind in ("yarn", "llama3", "longrope"):
        data["original_max_position_embeddings"] = draw(lengths)
    if kind == "yarn":
        data |= {"beta_fast": draw(st.floats(8, 64)), "beta_slow": draw(st.floats(0.25, 4))}
        data |= draw(
            st.sampled_from(({}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": 1.0}))
        )
    if kind == "llama3":
        data |= {
            "low_freq_factor": draw(st.floats(0.5, 2)),
            "high_freq_factor": draw(st.floats(3, 8)),
        }
    if kind == "longrope":
        lists = st.lists(numbers, min_size=pairs, max_size=pairs)
        data |= {"short_factor": draw(lists), "long_factor": draw(lists)}
    if kind == "proportional":
        data["partial_rotary_factor"] = draw(st.sampled_from((0.25, 0.5, 1.0)))
    return data, 2 * pairs


@settings(max_examples=300, deadline=None)
@given(parameters(), st.integers(1, 1 << 18))
def test_parity_every_rope_type(given_: tuple[dict[str, Any], int], length: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    data, head_dim = given_
    theirs, gain = utils.ROPE_INIT_FUNCTIONS[data["rope_type"]](
        config(dict(data), head_dim=head_dim), seq_len=length
    )
    rope = read_rope_parameters(data, positions=4096)
    assert isinstance(rope, RopeParams)
    ours = rope.frequencies(head_dim, length=length)[0]
    assert rope.gain == pytest.approx(gain, rel=1e-12)
    if data["rope_type"] in ("llama3", "proportional"):
        # They blend in another order, and raise theta to powers in a shorter vector, whose tail torch rounds otherwise.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    else:
        assert torch.equal(ours, theirs)


@settings(max_examples=100, deadline=None)
@given(parameters())
def test_written_parameters_read_back_the_same(given_: tuple[dict[str, Any], int]) -> None:
    rope = read_rope_parameters(given_[0], positions=4096)
    assert isinstance(rope, RopeParams)
    assert read_rope_parameters(write_rope_parameters(rope), positions=4096) == rope


def test_known_difference_truncate_of_nested_parameters_is_ignored_there() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    flat = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "truncate": False,
        "original_max_position_embeddings": 2048,
    }
    nested = {"full_attention": flat, "sliding_attention": {**flat, "truncate": True}}
    own = config(nested, head_dim=8)
    own.per_layer_config = {"full_attention": own}
    theirs, _ = utils.ROPE_INIT_FUNCTIONS["yarn"](own, layer_type="full_attention")
    ours = read_rope_parameters(nested)
    assert isinstance(ours, dict)
    assert float(theirs[2]) == pytest.approx(0.00625)
    assert float(ours["full_attention"].frequencies(8)[0, 2]) == pytest.approx(0.00505697, rel=2e-6)


def test_known_difference_dynamic_is_sticky_there() -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=8,
            num_attention_heads=1,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        )
    )
    x = torch.zeros(1, 1, 8)

    def freqs_after(length: int) -> torch.Tensor:
        module(x, torch.arange(length).unsqueeze(0))
        found: torch.Tensor = module.inv_freq.clone()
        return found

    rule = DynamicNtk(factor=4.0, original_positions=2048)
    assert torch.equal(freqs_after(8192), rule.at_length(8192).frequencies(4, 1e4, F32))
    assert not torch.equal(freqs_after(4000), rule.at_length(4000).frequencies(4, 1e4, F32))
    assert not torch.equal(freqs_after(2048), rule.at_length(2048).frequencies(4, 1e4, F32))
    assert torch.equal(freqs_after(2047), rule.at_length(2047).frequencies(4, 1e4, F32))


def test_reading_takes_the_lengths_of_the_config() -> None:
    lists = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    phi3 = read_rope_parameters({"type": "su", **lists}, theta=1e4, positions=131072, original=4096)
    assert isinstance(phi3, RopeParams)
    assert isinstance(phi3.scaling, LongRope)
    assert phi3.scaling.original_positions == 4096
    assert phi3.gain == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_nested_parameters_give_one_a_layer_type() -> None:
    gemma = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    assert read_rope_parameters(gemma) == {
        "sliding_attention": RopeParams(theta=1e4),
        "full_attention": RopeParams(theta=1e6, scaling=Linear(factor=8.0)),
    }


@pytest.mark.parametrize("factor", [50.31553950111841, 3.3, 1.1, 1.0])
def test_dynamic_at_the_trained_length_is_as_trained(factor: float) -> None:
    """factor * 1 - (factor - 1) is a little less than 1 for some factors; the rule of such a length is still one."""
    for length in (1, 2047, 2048):
        rule = DynamicNtk(factor=factor, original_positions=2048).at_length(length)
        assert rule.frequencies(4, 1e4, F32).tolist() == pytest.approx([1, 0.1, 0.01, 0.001])


def test_entries_beside_nested_parameters_are_those_of_every_type() -> None:
    """transformers reads truncate there; a base there is the only one there is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    read = read_rope_parameters(
        {"full": yarn, "sliding": None, "truncate": False, "rope_theta": 1e6}
    )
    wanted = Yarn(factor=4.0, original_positions=64, truncate=False)
    assert read == {"full": RopeParams(theta=1e6, scaling=wanted)}


def test_nested_parameters_are_written_as_they_were_read() -> None:
    gemma = {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    }
    read = read_rope_parameters(gemma)
    assert isinstance(read, dict)
    assert write_rope_parameters(read) == gemma


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ntk(factor=1e300).frequencies(2, 1e4, F32), "factor is 1e\\+300"),
        (lambda: Linear(factor=2.0).at_length(10**400), "below 2\\*\\*63"),
        (
            lambda: Yarn(factor=2.0, original_positions=64, mscale=1.0, mscale_all_dim=-1.0),
            "mscale_all_dim -1.0",
        ),
        (
            lambda: RopeParams(theta=1e4, share=0.5, scaling=Proportional(share=0.25)),
            "share is 0.5 with proportional scaling",
        ),
        (lambda: RopeParams(theta=1e4).frequencies(8, length=0), "length is 0"),
        (
            lambda: RopeParams(theta=1e4).frequencies(8, dtype=torch.bfloat16),
            "dtype is torch.bfloat16",
        ),
        (lambda: read_rope_parameters({"rope_type": ["x"]}, theta=1e4), r"rope_type is \['x'\]"),
        (
            lambda: read_rope_parameters(
                {"rope_type": "yarn", "original_max_position_embeddings": 0},
                theta=1e4,
                positions=64,
            ),
            "original_max_position_embeddings is 0",
        ),
        (
            lambda: read_rope_parameters(
                {"rope_type": "longrope", "short_factor": 5, "long_factor": [1.0]},
                theta=1e4,
                positions=64,
            ),
            "short_factor is 5",
        ),
        (
            lambda: read_rope_parameters(
                {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "factor": 0.5,
                },
                theta=1e4,
                positions=64,
            ),
            "factor is 0.5",
        ),
        (
            lambda: read_rope_parameters({"full": {"rope_type": "default"}, "x": 3}, theta=1e4),
            "hold x beside full",
        ),
        (lambda: write_rope_parameters(None), "params is None"),  # type: ignore[arg-type]
        (lambda: Linear(factor=0.5), "factor is 0.5"),
        (lambda: Linear(factor=math.nan), "factor is nan"),
        (lambda: Ntk(factor=2.0).frequencies(1, 1e4, F32), "at least 2 channel pairs"),
        (lambda: DynamicNtk(factor=2.0, original_positions=1), "original_positions is 1"),
        (lambda: DynamicNtk(factor=2.0, original_positions=64).at_length(0), "length is 0"),
        (lambda: Linear(factor=2.0).at_length(-1), "length is -1"),
        (lambda: Yarn(factor=2.0, original_positions=64, beta_fast=1.0), "0 < slow < fast"),
        (lambda: Llama3(low_freq_factor=5.0), "0 < low <= high"),
        (
            lambda: Yarn(factor=2.0, original_positions=64).frequencies(4, 1.0, F32),
            "a base above 1",
        ),
        (
            lambda: LongRope(short_factor=(1.0,), long_factor=(1.0, 2.0), original_positions=64),
            "short_factor holds 1 divisors and long_factor 2",
        ),
        (
            lambda: LongRope(
                short_factor=(1.0,), long_factor=(2.0,), original_positions=64
            ).frequencies(4, 1e4, F32),
            "hold 1 divisors for 4 channel pairs",
        ),
        (
            lambda: LongRope(short_factor=(0.0,), long_factor=(1.0,), original_positions=64),
            "divisor above 0",
        ),
        (lambda: Proportional(share=0.0), "share is 0.0"),
        (lambda: RopeParams(theta=1e4, share=0.4).frequencies(8), "3 channels turn"),
        (lambda: read_rope_parameters({"rope_type": "spiral"}, theta=1e4), "rope_type is 'spiral'"),
        (lambda: read_rope_parameters({"rope_type": "linear"}, theta=1e4), "no factor"),
        (lambda: read_rope_parameters({"factor": 2.0}), "no rope_theta"),
        (
            lambda: read_rope_parameters({"rope_type": "dynamic", "factor": 2.0}, theta=1e4),
            "no max_position_embeddings",
        ),
        (
            lambda: read_rope_parameters({"rope_type": "yarn", "factor": 2.0}, theta=1e4),
            "no original_max_position_embeddings",
        ),
        (lambda: read_rope_parameters([1]), "a mapping is required"),  # type: ignore[arg-type]
        (
            lambda: write_rope_parameters(RopeParams(theta=1e4, scaling=Ntk(factor=2.0))),
            "no rope_type for it",
        ),
    ],
)
def test_error_names_value_and_remedy(make: Any, words: str) -> None:
    with pytest.raises((ConfigError, PositionError), match=words):
        make()
