"""Interleaved sections (users F22, facts/mrope.md 13.14, 13.22, 13.23): which axis turns which pair.

Tokens of text stand alike on all axes and turn alike in any layout, so every case here has T, H and W apart.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import config
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.sections import clamped_axes, section_axes, section_freqs
from visionpos.vlm import Image, Text, Video, family, family_names
from visionpos.vlm.hf import family_of
from visionpos.vlm.hf.reading import served_rows
from visionpos.vlm.language import LanguageSpec, axis_table
from visionpos.vlm.rotary import language_freqs

T, H, W = range(3)
INTERLEAVED = [
    (name, variant)
    for name in family_names()
    for variant in (None, *family(name).variants)
    if (language := family(name, variant=variant).spec.language) is not None
    and language.order == "interleaved"
]
# Types whose family has a rotary layout of its own.
LAID_OUT = [
    kind
    for kind, served in served_rows().items()
    if family(served.family, variant=served.variant).spec.language is not None
]


def layout(name: str, variant: str | None = None) -> LanguageSpec:
    language = family(name, variant=variant).spec.language
    assert language is not None
    return language


def slow_owners(sections: tuple[int, ...], pairs: int) -> list[int]:
    """Walk the ladder: rows and columns take turns after time until they have their pairs, time takes what is left."""
    left, owners = list(sections), []
    for pair in range(pairs):
        turn = pair % len(sections)
        if turn and left[turn]:
            left[turn] -= 1
            owners.append(turn)
        else:
            owners.append(0)
    return owners


def pairs_of(owners: Any, axis: int) -> list[int]:
    return [pair for pair, owner in enumerate(owners) if owner == axis]


def test_f22_golden_24_20_20() -> None:
    """H at 1, 4 .. 58, W at 2, 5 .. 59, T elsewhere, 60 to 63 too; every way to the table has it."""
    wanted = {
        T: sorted({*range(0, 60, 3), 60, 61, 62, 63}),
        H: list(range(1, 59, 3)),
        W: list(range(2, 60, 3)),
    }
    language = layout("qwen3_vl")
    freqs = section_freqs(128, (24, 20, 20), theta=5e6, order="interleaved")
    for owners in (
        axis_table(language).tolist(),
        section_axes((24, 20, 20), order="interleaved").tolist(),
        clamped_axes((24, 20, 20), 64).tolist(),
        freqs.argmax(0).tolist(),
        family("qwen3_vl").frequencies.argmax(0).tolist(),
        slow_owners((24, 20, 20), 64),
    ):
        assert {axis: pairs_of(owners, axis) for axis in wanted} == wanted
        assert [owners.count(axis) for axis in wanted] == [24, 20, 20]
    assert torch.equal((freqs > 0).sum(0), torch.ones(64).long())


def test_f22_a_stride_without_a_bound_is_another_layout() -> None:
    """22/21/21, and another axis at exactly 61 and 62: one token of an image tells."""
    unbounded = torch.arange(64) % 3
    assert unbounded.bincount().tolist() == [22, 21, 21]
    language = layout("qwen3_vl")
    owners = axis_table(language)
    assert (unbounded != owners).nonzero().flatten().tolist() == [61, 62]
    ids = torch.tensor([[7], [3], [5]])
    angles = vp.angles(ids.T.double(), language_freqs(language, torch.float64))[0]
    ladder = 5e6 ** (-torch.arange(64).double() / 64)
    wrong = ids[unbounded, 0] * ladder
    assert ((angles - wrong).abs() > 1e-9).nonzero().flatten().tolist() == [61, 62]


@pytest.mark.parametrize(("name", "variant"), INTERLEAVED, ids=str)
def test_reference_every_interleaved_family(name: str, variant: str | None) -> None:
    """Angles in float64, pair by pair, at ids whose axes differ; sections are what the model gets, to the pair."""
    language = layout(name, variant)
    owners = slow_owners(language.sections, language.pairs)
    assert [owners.count(axis) for axis in range(language.axes)] == list(language.sections)
    draws = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 500, (language.axes, 13), generator=draws)
    turns = torch.tensor(
        [
            [
                int(ids[owner, token]) * language.theta ** (-pair / language.pairs)
                for pair, owner in enumerate(owners)
            ]
            for token in range(13)
        ],
        dtype=torch.float64,
    )
    found = family(name, variant=variant).rotation(ids, "exact")
    assert_close_to(found.cos, turns.cos(), kind="table")
    assert_close_to(found.sin, turns.sin(), kind="table")


def theirs(sections: list[int], pairs: int) -> Tensor:
    """Which axis each pair is read from in the installed transformers: frequencies that are the axis' own number."""
    module = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    planes = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 1, pairs).clone()
    mixed = module.Qwen3VLTextRotaryEmbedding.recomposition_frequencies
    found: Tensor = mixed(SimpleNamespace(mrope_section=sections), planes)[0, 0, :pairs].long()
    return found


@given(st.lists(st.integers(1, 24), min_size=3, max_size=3))
def test_parity_sections_are_what_transformers_makes_of_them_or_refused(
    sections: list[int],
) -> None:
    """transformers takes any three numbers and gives others; here such are refused, and the error has its numbers."""
    pairs = sum(sections)
    real = theirs(sections, pairs)
    counts = real.bincount(minlength=3).tolist()
    assert torch.equal(clamped_axes(sections, pairs), real)
    data = {
        "head_dim": 2 * pairs,
        "theta": 1e4,
        "sections": sections,
        "order": "interleaved",
        "pairing": "half",
    }
    if counts == sections:
        language = config.parse(LanguageSpec, data)
        assert torch.equal(axis_table(language), real)
        assert real.tolist() == slow_owners(tuple(sections), pairs)
        return
    words = rf"would get \({counts[0]}, {counts[1]}, {counts[2]}\)"
    with pytest.raises(ConfigError, match=words):
        config.parse(LanguageSpec, data)
    with pytest.raises(PositionError, match=words):
        section_freqs(2 * pairs, sections, theta=1e4, order="interleaved")


@pytest.mark.parametrize(("name", "variant"), INTERLEAVED, ids=str)
def test_contiguous_in_its_place_is_finite_and_wrong_where_axes_differ(
    name: str, variant: str | None
) -> None:
    """13.22: text turns the same to the bit, an image and a clip do not."""
    fam = family(name, variant=variant)
    other = family(name, variant=variant, overlay={"language": {"order": "contiguous"}})
    text = fam.position_ids(fam.stream([Text(tokens=40)])).ids
    assert torch.equal(fam.rotation(text).cos, other.rotation(text).cos)
    media: list[Any] = [Image((160, 352))]
    if fam.spec.video is not None:
        media.append(Video((160, 352), seconds=[float(at) for at in range(6)]))
    for one in media:
        stream = fam.stream([Text(tokens=3), one])
        ids = fam.position_ids(stream).ids
        right, wrong = fam.rotation(ids), other.rotation(ids)
        assert torch.isfinite(wrong.cos).all()
        cells = stream.modality > 0
        assert (right.cos - wrong.cos)[cells].abs().max() > 0.5
        assert torch.equal(right.cos[:3], wrong.cos[:3])


@pytest.mark.parametrize(("name", "variant"), INTERLEAVED, ids=str)
def test_interleaving_axes_says_nothing_of_pairing(name: str, variant: str | None) -> None:
    """13.23: a pair is channels i and i + pairs, whichever axis turns it."""
    fam, language = family(name, variant=variant), layout(name, variant)
    ids = torch.tensor([[11], [5], [2]])
    rotation = fam.rotation(ids)
    for channel in range(language.pairs):
        q = torch.zeros(1, 1, 1, language.head_dim)
        q[..., channel] = 1
        turned, _ = vp.rotate(q, q, rotation)
        assert set(turned.flatten().nonzero().flatten().tolist()) <= {
            channel,
            channel + language.pairs,
        }


@pytest.mark.parametrize("kind", LAID_OUT)
def test_a_config_that_says_another_order_is_refused(kind: str) -> None:
    """transformers passes over `mrope_interleaved`, others go by it: so where the two part, nobody can tell."""
    served = served_rows()[kind]
    plain = family(served.family, variant=served.variant).spec.language
    assert plain is not None
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": written(kind)}
    text = {"head_dim": plain.head_dim, "partial_rotary_factor": 2 * plain.pairs / plain.head_dim}
    right = plain.order == "interleaved"
    for key in ("mrope_interleaved", "interleaved"):
        agreed = {"model_type": kind, **text, "rope_scaling": {**rope, key: right}}
        found = family_of(agreed).spec.language
        assert found is not None
        assert (found.order, found.sections) == (plain.order, plain.sections)
        other = {"model_type": kind, **text, "rope_parameters": {**rope, key: not right}}
        with pytest.raises(ConfigError, match=f"{key} is {not right} and .*{plain.order}"):
            family_of(other)


@pytest.mark.parametrize("kind", LAID_OUT)
@pytest.mark.parametrize("change", [-1, 1])
def test_sections_of_another_number_of_axes_are_refused(kind: str, change: int) -> None:
    """The error has the number that is wanted, also where the sum would be right."""
    sections = written(kind)
    wanted = len(sections)
    if change > 0:
        sections = [*sections[:-1], sections[-1] - 1, 1]
    else:
        sections = [*sections[:-2], sum(sections[-2:])]
    got = {"model_type": kind, "rope_scaling": {"mrope_section": sections}}
    with pytest.raises(ConfigError, match=rf"for {wanted + change} axes.*{wanted} numbers"):
        family_of(got)


def written(kind: str) -> list[int]:
    """The sections of a family as a config of this type writes them."""
    served = served_rows()[kind]
    sections = list(layout(served.family, served.variant).sections)
    return [*sections[1:], sections[0]] if served.time_last else sections


def test_an_overlay_of_another_number_of_axes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"are for 4 axes of ids .* has 3 \(time, row, col\)"):
        family("qwen2_vl", overlay={"language": {"sections": [16] * 4}})
    with pytest.raises(ConfigError, match=r"are for 3 axes of ids and the rule has 1 \(index\)"):
        family("internvl", overlay={"language": {"head_dim": 12, "theta": 1e4, "sections": [2, 2, 2],
                                                 "order": "contiguous", "pairing": "half"}})  # fmt: skip
