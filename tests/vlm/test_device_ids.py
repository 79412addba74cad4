"""Ids spread on a device as lines: the numpy form's numbers, for every rule, without a wait for the device."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.test_ids import Watch
from tests.strategies import seeds
from tests.vlm.prompts import draw
from visionpos.vlm import Image, Text, Video, family, placing
from visionpos.vlm.clocks import PerSecond
from visionpos.vlm.ids import PositionIds, ids_from_tokens, stream_ids
from visionpos.vlm.rules import Circle, Delta, Rule

THREE = ("time", "row", "col")
RULES = {
    "sequential": Rule(axes=("index",)),
    "mrope": Rule(axes=THREE),
    "frames": Rule(axes=THREE, video="frames", next="extent"),
    "seconds": Rule(axes=THREE, frame_step=PerSecond(per_second=Fraction(2))),
    "diagonal": Rule(axes=(*THREE, "index"), origin="time", centre=True, frame_step=2),
    "reset": Rule(axes=("index", *THREE), origin="zero", delta=Delta(from_="max")),
    "columns": Rule(axes=THREE, row_ends="column", next="time"),
    "extent": Rule(axes=("row", "col", "time"), frame_step="extent", delta=Delta(minus="padded")),
    "ordinal": Rule(axes=("index", "ordinal", "row", "col"), origin="zero"),
    "rows of eight": Rule(axes=THREE, row_step=Fraction(8), col_step=Fraction(8)),
    "whole cells": Rule(axes=("index", "col"), cell_step=Fraction(3)),
    "fractions": Rule(axes=("index",), cell_step=Fraction(1, 16), next="ceil_max"),
    "spans": Rule(axes=("index", *THREE), cell_span=Fraction(7, 3), delta=Delta(from_="max")),
    "broken columns": Rule(axes=THREE, col_step=Fraction(2, 3), row_step=Fraction(3, 7)),
    "slow frames": Rule(axes=THREE, frame_step=Fraction(1, 3), delta=Delta(from_="max")),
    "circle": Rule(axes=THREE, circle=Circle()),
}
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "hunyuan_vl", "hy_v4_vl", "internvl_v2pe", "pixtral",
            "ernie4_5_vl", "glm4v"]  # fmt: skip


def assert_equal(one: PositionIds, other: PositionIds) -> None:
    for name in ("ids", "next_position", "delta", "mask"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=25, deadline=None)
@given(seed=seeds(), masked=st.booleans())
def test_reference_tokens(name: str, seed: int, masked: bool) -> None:
    """Batches of unequal rows, padded at either end or taken for text, in every rule's own dtype."""
    rule = RULES[name]
    frames = rule.video == "frames"
    batch = draw(seed, per_frame=frames, column=int(rule.row_ends == "column"))
    mask = batch.mask if masked else None
    given = (batch.input_ids, batch.types, batch.grids("images"), batch.grids("videos"), mask)
    seconds = batch.seconds or None

    def run() -> PositionIds:
        return ids_from_tokens(*given, seconds, rule=rule, merge=2)

    expected = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "_is_host", lambda _: False)
        assert_equal(run(), expected)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(20, 900), st.integers(20, 900)), max_size=4),
    frames=st.integers(2, 7),
)
def test_reference_streams(name: str, sizes: list[tuple[int, int]], frames: int) -> None:
    """Streams of text, images and a clip, of families with every kind of line."""
    fam = family(name)
    prompt: list[Any] = [Text(tokens=3)]
    for size in sizes:
        prompt += [Image(size), Text(tokens=1)]
    if fam.spec.video is not None:
        prompt.append(Video((64, 96), seconds=[one / 2 for one in range(frames)]))
    stream = fam.stream(prompt)
    expected = fam.position_ids(stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "_is_host", lambda _: False)
        assert_equal(fam.position_ids(stream), expected)


@pytest.mark.parametrize("name", ["mrope", "spans", "broken columns"])
def test_device_nothing_waits(name: str) -> None:
    """On a device without values: ids arrive there, by copies that nobody waits for."""
    fam = family("qwen2_vl")
    stream = fam.stream([Text(tokens=3), Image((56, 84)), Text(tokens=2)])
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        pos = stream_ids(stream, RULES[name], device=torch.device("cuda"))
    assert {part.device.type for part in (pos.ids, pos.next_position, pos.delta)} == {"cuda"}
    assert pos.ids.shape[1] == stream.length
    assert watch.copies == [("cuda", True)] * 3


def test_device_values_where_there_is_one(device: torch.device) -> None:
    fam = family("qwen2_5_vl")
    stream = fam.stream([Text(tokens=3), Image((56, 84)), Video((64, 96), seconds=[0.0, 0.5, 1.0])])
    got = fam.position_ids(stream, device=device)
    assert got.ids.device.type == device.type
    assert torch.equal(got.ids.cpu(), fam.position_ids(stream).ids)
