"""Arguments of another kind than declared: every public name of the planner refuses them by name, never bare."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from visionpos import Grid, vlm
from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked, shown

FAM = vlm.family("qwen2_5_vl")
STREAM = FAM.stream([vlm.Text("a b"), vlm.Image((56, 84))])
POS = FAM.position_ids(STREAM)
PLAN = FAM.plan(vlm.Image((56, 84)))
GRIDS = [Grid(2, 3), Grid(1, 2)]
GENERATOR = torch.Generator().manual_seed(0)
TOWER = vlm.TowerSpec(merge=1, axes=("row", "col"))
TOKENS = {
    "input_ids": torch.zeros(8, dtype=torch.int64),
    "modality": torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]),
    "image_grids": torch.tensor([[1, 4, 6]]),
}
WOVEN = vlm.Rule(
    axes=("time", "row", "col"), audio="text", audio_in_video=vlm.AudioInVideo(interleave="time")
)

# A call that works, of every public name that is called with arguments.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Audio": (vlm.Audio, {"seconds": 2.0}),
    "AudioInVideo": (vlm.AudioInVideo, {"interleave": "chunks", "chunk_seconds": Fraction(2), "share_edges": False}),
    "Circle": (vlm.Circle, {"radius": 10.0, "alpha": 0.5}),
    "Delta": (vlm.Delta, {"from_": "next", "minus": "padded"}),
    "Image": (vlm.Image, {"size_hw": (3, 5)}),
    "PerSecond": (vlm.PerSecond, {"per_second": Fraction(2), "rounding": "floor", "arithmetic": "exact"}),
    "Rule": (
        vlm.Rule,
        {
            "axes": ("index",), "origin": "start", "centre": False, "frame_step": 1, "row_step": Fraction(1),
            "cell_step": Fraction(1, 4), "cell_span": None, "place": "unit", "circle": None, "temporal_merge": 1,
            "edge_cells": 0, "audio": "none", "audio_in_video": None, "delta": vlm.Delta(), "pad_id": 0,
        },
    ),
    "Special": (vlm.Special, {"name": "<s>"}),
    "Text": (vlm.Text, {"text": "a", "tokens": 1, "token_ids": None}),
    "TowerSpec": (vlm.TowerSpec, {"merge": 1, "axes": ("row",), "attention": "frame", "window": None}),
    "Video": (vlm.Video, {"size_hw": (3, 5), "seconds": None, "frames": 2, "sampled_fps": 2.0}),
    "axis_visibility": (vlm.axis_visibility, {"language": FAM.spec.language, "extents": [9, 9, 9]}),
    "bin_lengths": (
        vlm.bin_lengths, {"lengths": [3, 4], "budget": 9, "method": "best_fit", "largest_first": True, "most": None},
    ),
    "context_shards": (
        vlm.context_shards, {"length": 8, "ranks": 2, "order": "zigzag", "cu_seqlens": None},
    ),
    "ids_after": (vlm.ids_after, {"pos": POS, "cached": 9, "tokens": 2, "counted": "unmasked"}),
    "pack": (vlm.pack, {"streams": [STREAM, STREAM], "family": FAM}),
    "truncate_stream": (vlm.truncate_stream, {"stream": STREAM, "length": 9, "side": "right", "cut": "drop"}),
    "truncate_tokens": (
        vlm.truncate_tokens,
        {"modality": TOKENS["modality"], "length": 8, "family": FAM, "image_grids": TOKENS["image_grids"]},
    ),
    "chunk": (vlm.chunk, {"pos": POS, "start": 0, "stop": 3}),
    "continued": (vlm.continued, {"pos": POS, "tokens": 2}),
    "drawn_steps": (vlm.drawn_steps, {"count": 2, "generator": GENERATOR, "choices": [Fraction(1)]}),
    "drop_rates": (vlm.drop_rates, {"images": 2, "mean": 0.5, "std": 0.1, "most": 1.0, "generator": GENERATOR}),
    "family": (vlm.family, {"name": "qwen2_vl", "dialect": None, "variant": None, "overlay": None}),
    "ids_by_delta": (vlm.ids_by_delta, {"delta": torch.tensor([-3]), "counted": 4, "tokens": 2, "axes": 3}),
    "ids_from_tokens": (vlm.ids_from_tokens, {**TOKENS, "rule": FAM.spec.rule, "merge": (2, 2)}),
    "keep_tokens": (vlm.keep_tokens, {"grids": GRIDS, "rates": 0.5, "generator": GENERATOR}),
    "merge_rows": (vlm.merge_rows, {"rows": [POS, POS], "rule": FAM.spec.rule}),
    "naflex_batch": (vlm.naflex_batch, {"patches": torch.ones(8, 4), "grids": GRIDS, "length": 9, "keep": None}),
    "next_ids": (vlm.next_ids, {"pos": POS, "tokens": 1, "skip": 0}),
    "pack_images": (
        vlm.pack_images,
        {
            "grids": GRIDS, "budget": 9, "method": "first_fit", "largest_first": False, "max_images": 2, "rows": 2,
            "prefix": 0, "keep": None,
        },
    ),
    "pack_rows": (vlm.pack_rows, {"rows": [POS, POS]}),
    "pending_ids": (vlm.pending_ids, {"pos": POS, "grids_hw": [(2, 3)], "rule": FAM.spec.rule}),
    "resampled": (vlm.resampled, {"sizes_hw": [(60, 80)], "sides_px": 64.0, "patch": 16}),
    "rolled_back": (vlm.rolled_back, {"pos": vlm.continued(POS, 2), "tokens": 1}),
    "sample_sides": (
        vlm.sample_sides,
        {
            "images": 3, "low_px": 64.0, "high_px": 256.0, "law": "normal", "mean": 0.0, "std": 1.0,
            "generator": GENERATOR,
        },
    ),
    "smart_resize": (
        vlm.smart_resize, {"size_hw": (60, 80), "factor": 28, "min_px": 784, "max_px": 10000, "ratio_over": 200},
    ),
    "split_rows": (vlm.split_rows, {"batch": vlm.merge_rows([POS, POS], FAM.spec.rule), "rule": FAM.spec.rule}),
    "stack_rows": (
        vlm.stack_rows,
        {
            "rows": [vlm.pack([STREAM], family=FAM)], "side": "left", "pad_id": 0, "pad_token": 0, "pad_to_multiple": 2,
            "length": 12,
        },
    ),
    "stream_ids": (vlm.stream_ids, {"stream": STREAM, "rule": FAM.spec.rule}),
    "tokens_at": (vlm.tokens_at, {"plan": PLAN, "point_yx": (3.0, 4.0)}),
    "tower_ids": (vlm.tower_ids, {"tower": TOWER, "grids": GRIDS}),
    "tower_segments": (vlm.tower_segments, {"tower": TOWER, "grids": GRIDS}),
    "tower_windows": (vlm.tower_windows, {"tower": vlm.TowerSpec(merge=2, window=4), "grids": [Grid(4, 6)]}),
    "weave": (vlm.weave, {"rule": WOVEN, "cell_times": np.zeros(3, dtype=np.int64), "audio_tokens": 2}),
    # The line of a family.
    "plan": (FAM.plan, {"media": vlm.Image((56, 84)), "images": 1}),
    "stream": (FAM.stream, {"segments": [vlm.Image((56, 84))], "tokenizer": None}),
    "position_ids": (FAM.position_ids, {"stream": STREAM}),
    "position_ids_from_tokens": (FAM.position_ids_from_tokens, TOKENS),
    "rotation": (FAM.rotation, {"ids": POS.ids, "accuracy": None}),
    "frame_count": (FAM.frame_count, {"total_frames": 30, "source_fps": 30.0}),
    "token_ids": (
        STREAM.token_ids, {"tokenizer": None},
    ),
}  # fmt: skip
# Records that the library makes, and a name that takes nothing.
MADE = {
    "Cells", "Family", "Marker", "NaflexBatch", "Packed", "PackedIds", "Plan", "PositionIds", "Raster", "Span",
    "Shards", "StackedIds", "TokenStream", "Truncation", "View", "Words", "family_names",
}  # fmt: skip
ODD: list[Any] = [
    None, "a", "3", 3, -1, 2.5, [1], ["a"], {"a": 1}, float("nan"), True, object(), (), torch.ones(2, 2),
]  # fmt: skip


def test_every_public_name_is_probed() -> None:
    public = {name for name in vlm.__all__ if callable(getattr(vlm, name))}
    assert public - MADE <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_error_kinds(name: str) -> None:
    """One argument wrong, the others right: a refusal that names it, or an answer; no error from the depths."""
    call, right = CALLS[name]
    with pytest.raises(PositionError) if name == "token_ids" else _passes():
        call(**right)
    refused = []
    for argument in right:
        for wrong in ODD:
            try:
                call(**{**right, argument: wrong})
            except PositionError as refusal:
                refused.append(str(refusal))
            except Exception as bare:
                pytest.fail(
                    f"{name}({argument}={shown(wrong)}) raises {type(bare).__name__}: {bare}"
                )
    assert len(refused) > len(right)
    assert max(map(len, refused)) < 700, max(refused, key=len)


def _passes() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: FAM.position_ids("a"), r"stream is 'a'; it must be a TokenStream"),
    (lambda: vlm.tokens_at(PLAN, ("1", "2")), r"point_yx is \('1', '2'\); \(y, x\) in pixels"),
    (lambda: vlm.resampled([(60, 80)], "64", 16), r"sides_px is '64'; one number, or one an image"),
    (lambda: vlm.sample_sides(3, "64", 256, generator=GENERATOR), r"low_px is '64'"),
    (lambda: vlm.drop_rates(2, mean="0.5", std=0.1, generator=GENERATOR), r"mean is '0.5'; it must be a finite number"),
    (lambda: vlm.split_rows(POS, FAM.spec.rule), r"batch has ids of shape \(3, 10\).*merge_rows"),
    (lambda: vlm.drawn_steps(-1, GENERATOR), r"count is -1"),
    (lambda: vlm.chunk(None, 0), r"pos is None; it must be a PositionIds"),
    (lambda: vlm.PerSecond(per_second="2"), r"per_second is '2'; it must be a whole number or a Fraction"),
    (lambda: vlm.Rule(axes="index"), r"axes is 'index'; it must be a tuple"),
    (lambda: FAM.rotation(POS.ids.tolist()), r"ids is \[\[.*it must be a Tensor"),
])  # fmt: skip
def test_error_names_the_argument(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PositionError, match=message):
        make()


# The mechanism


@checked
def sample(
    count: int, scale: float = 1.0, *, sides: tuple[float, float] = (1.0, 1.0), rows: list[int] | None = None
) -> Any:  # fmt: skip
    """Return the arguments."""
    return count, scale, sides, rows


def test_good_kinds_pass() -> None:
    assert sample(3, 2) == (3, 2, (1.0, 1.0), None)
    assert sample(np.int64(3), np.float32(2), sides=[1, 2]) == (3, 2.0, [1, 2], None)
    assert sample(torch.tensor(3), Fraction(1, 2), rows=[1]) == (3, Fraction(1, 2), (1.0, 1.0), [1])
    assert sample(3, float("inf"))[1] == float("inf")


@pytest.mark.parametrize("wrong", [
    {"sides": (1.0,)}, {"count": 3.0}, {"count": True}, {"count": 10**400}, {"count": "3"}, {"scale": "1"},
    {"scale": None}, {"sides": "ab"}, {"sides": (1.0, "b")}, {"rows": "a"}, {"rows": [1.5]}, {"rows": {1: 2}},
])  # fmt: skip
def test_bad_kinds_do_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(PositionError, match=rf"^{next(iter(wrong))} is .*; it must be "):
        sample(**{"count": 3, **wrong})


def test_too_many_and_unknown_arguments_are_python_s() -> None:
    with pytest.raises(TypeError, match=r"sample\(\) takes"):
        sample(1, 2.0, 3)
    with pytest.raises(TypeError, match=r"unexpected keyword"):
        sample(1, colour=3)


def test_a_checked_function_is_documented_as_itself() -> None:
    assert inspect.signature(sample).parameters["count"].annotation is int
    assert (sample.__name__, sample.__doc__) == ("sample", "Return the arguments.")
    assert inspect.isfunction(sample)
    assert sample.__globals__ is globals()


def test_compile_leaves_the_check_out() -> None:
    fam = vlm.family("qwen2_vl")

    def turned(ids: torch.Tensor) -> torch.Tensor:
        return fam.rotation(ids, accuracy="reference").cos

    ids = torch.arange(15).view(3, 5)
    made = torch.compile(turned, fullgraph=True, backend="eager")
    assert torch.equal(made(ids), turned(ids))
