"""Detectors on families, layouts, pairs (stream, layout) and packed rows."""

from dataclasses import replace

import pytest
import torch

from visionpos.audit.detectors import applies, detect, did_fail
from visionpos.vlm import Image, Text, family, pack
from visionpos.vlm.language import LanguageSpec


def alarms(target):
    found = detect(target)
    assert not [one for one in found if did_fail(one)]
    return {one.detector for one in found if one.alarm}


def test_a_healthy_family() -> None:
    assert alarms(family("qwen3_vl")) == set()
    assert sum(map(applies, detect(family("qwen3_vl")))) == 6


def test_contiguous_sections_hide_the_columns() -> None:
    """The w axis of Qwen2-VL turns 0.0055 rad over 32 columns: on record."""
    fam = family("qwen2_vl")
    assert alarms(fam) == {"axis_visibility"}
    (found,) = detect(fam.spec.language, "axis_visibility")
    assert found.value == pytest.approx(0.0055, rel=0.02)


def test_a_pair_and_a_layout() -> None:
    fam = family("qwen3_vl")
    stream = fam.stream([Text(tokens=3), Image(size_hw=(96, 160))])
    for target in ((stream, fam), (stream, fam.spec.language), fam.spec.language):
        assert alarms(target) == set()


def test_a_packed_row_that_runs_on_is_caught() -> None:
    fam = family("qwen2_vl")
    row = pack([fam.stream([Text(tokens=n)]) for n in (3, 5)], family=fam)
    assert alarms(row) == set()
    running = torch.arange(row.ids.shape[-1]).expand_as(row.ids)
    assert alarms(replace(row, ids=running)) == {"missing_reset"}
    assert alarms(replace(row, ids=row.ids.to(torch.bfloat16))) == {"missing_reset"}


def test_ids_that_restart_in_every_tile_are_caught(monkeypatch) -> None:
    fam = family("qwen3_vl")
    stream = fam.stream([Image(size_hw=(128, 128))])
    language = fam.spec.language
    monkeypatch.setattr(
        "visionpos.audit.detectors.of_streams.stream_ids",
        lambda *_: type("Ids", (), {"ids": torch.arange(stream.length).remainder(4).expand(3, -1)}),
    )
    assert "tile_restart" in alarms((stream, language))


def test_a_layout_of_one_axis() -> None:
    spec = LanguageSpec(
        head_dim=64, theta=1e4, sections=(32,), order="contiguous", pairing="adjacent"
    )
    assert alarms(spec) == set()
