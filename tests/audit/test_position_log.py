"""PositionLog: its histograms are those of a plain count, its lines are whole, and its support fits the schema."""

from __future__ import annotations

import builtins
import json
import math
from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.strategies import volumes
from visionpos import PositionError
from visionpos.audit.histograms import support_outside
from visionpos.audit.log_lines import last_support
from visionpos.audit.position_log import PositionLog
from visionpos.encodings import T5Bias, T5BiasSpec
from visionpos.retrofit.lineage_schema import lineage_schema, record_faults


def counts(entry) -> dict[int, float]:
    """The filled bins of an entry whose bins are single steps, by their middle."""
    edges = entry["bins"]
    assert all(high - low == 1 for low, high in pairwise(edges))
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    return {
        int(at): count for at, count in zip(middles, entry["hist"], strict=True) if count
    }  # fmt: skip


def by_axis(log, quantity):
    return {entry["axis"]: entry for entry in log.support()[quantity]}


@given(volumes(max_side=7, max_frames=3), st.integers(1, 3))
def test_grids_are_counted_cell_by_cell_and_pair_by_pair(sides, images):
    log = PositionLog()
    log.grid(sides, images=images)
    cells = list(product(*map(range, sides)))
    for number, axis in enumerate("thw"):
        if axis == "t" and sides[0] == 1:
            assert axis not in by_axis(log, "position")
            continue
        line = Counter(cell[number] for cell in cells)
        assert counts(by_axis(log, "position")[axis]) == {
            at: images * count for at, count in line.items()
        }
        pairs = Counter(one[number] - other[number] for one, other in product(cells, cells))
        assert counts(by_axis(log, "offset")[axis]) == {
            at: images * count for at, count in pairs.items()
        }


@given(st.lists(st.integers(0, 200), min_size=1, max_size=32), st.booleans())
def test_short_sequences_are_counted_whole(ids, causal):
    log = PositionLog()
    log.coordinates(torch.tensor([ids]), axes=("seq",), causal=causal)
    assert counts(by_axis(log, "position")["seq"]) == Counter(ids)
    pairs = Counter(
        ids[i] - ids[j]
        for i, j in product(range(len(ids)), repeat=2)
        if j <= i or not causal
    )  # fmt: skip
    assert counts(by_axis(log, "offset")["seq"]) == pytest.approx(dict(pairs))


def test_ids_of_a_prompt_reach_as_far_as_they_do():
    fam = vp_family()
    ids = fam.position_ids(fam.stream(prompt())).ids
    log = PositionLog()
    log.coordinates(ids)
    for axis, line in zip("thw", ids, strict=True):
        entry = by_axis(log, "position")[axis]
        assert (entry["min"], entry["max"]) == (line.min(), line.max())
        assert sum(entry["hist"]) == line.numel()


def vp_family():
    from visionpos.vlm import family

    return family("qwen2_vl")


def prompt():
    from visionpos.vlm import Image, Text

    return [Text(tokens=5), Image(size_hw=(112, 168)), Text(tokens=7)]


def test_attention_distances_are_those_of_a_plain_softmax():
    grid, prefix = (3, 5), 2
    q, k = torch.randn(2, 1, 2, 17, 8, dtype=torch.float64)
    coords = vp.coordinates(vp.Grid(*grid)).T
    log = PositionLog()
    log.attention(q, k, coords, prefix=prefix)
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)[0].mean(0)[prefix:, prefix:]
    for axis, line in zip("hw", coords, strict=True):
        wanted: Counter[int] = Counter()
        for i, j in product(range(15), repeat=2):
            wanted[abs(int(line[i] - line[j]))] += float(weights[i, j])
        assert counts(by_axis(log, "attn_distance")[axis]) == pytest.approx(dict(wanted), rel=1e-5)


def test_causal_attention_never_looks_ahead():
    q = k = torch.randn(1, 1, 6, 4)
    log = PositionLog()
    log.attention(q, k, torch.arange(6)[None], axes=("seq",), causal=True)
    first = PositionLog()
    first.attention(
        q[:, :, :1], k[:, :, :1], torch.zeros(1, 1, dtype=torch.int64), axes=("seq",), causal=True
    )
    assert sum(by_axis(log, "attn_distance")["seq"]["hist"]) == pytest.approx(6)
    assert counts(by_axis(first, "attn_distance")["seq"]) == pytest.approx({0: 1.0})


def test_nothing_but_grids_is_looked_at_between_due_steps():
    log = PositionLog(every=3)
    for _ in range(3):
        log.coordinates(torch.arange(4)[None], axes=("seq",))
        log.grid((2, 3))
        log.step()
    assert sum(by_axis(log, "position")["seq"]["hist"]) == 4
    assert log.data()["grids"] == {"1x2x3": 3}


def test_fractions_have_bins_of_their_own():
    log = PositionLog(unit=1 / 16)
    log.coordinates(torch.arange(5)[None] / 16, axes=("seq",))
    entry = by_axis(log, "position")["seq"]
    assert entry["hist"] == [1.0] * 5
    assert (entry["min"], entry["max"]) == (0.0, 0.25)


def test_far_positions_share_bins_and_lose_none():
    log = PositionLog()
    ids = torch.tensor([[0, 255, 256, 300, 100_000, 1_000_000]])
    log.coordinates(ids, axes=("seq",))
    entry = by_axis(log, "position")["seq"]
    assert sum(entry["hist"]) == 6
    assert entry["max"] == 1_000_000
    assert entry["bins"][0] < 0 < entry["bins"][1]
    assert entry["bins"][-2] < 1_000_000 < entry["bins"][-1]


def test_bucket_use_has_the_known_dead_row():
    """T5 with 32 buckets and 128: bucket 16 is never asked for; 14 rows of 28 cells reach a known share."""
    bias = T5Bias(T5BiasSpec(), vp.Dims(embed_dim=8, num_heads=2, depth=1))
    log = PositionLog()
    log.watch(torch.nn.ModuleDict({"bias": bias}))
    log.grid((14, 28))
    rows, columns = log.data()["buckets"]["bias"]
    assert rows[16] == columns[16] == 0
    assert rows[0] == 14 * 28 * 28  # equal rows
    # Facts: |rel| 16 to 22 is bucket 10 on the one side, and 26 on the other; 14 rows never reach it.
    assert rows[10] == rows[26] == 0
    assert columns[10] == sum(14 * 14 * (28 - step) for step in range(16, 23)) == columns[26]


def test_drift_of_learned_frequencies():
    rope = vp.build(vp.MixedRopeSpec(), vp.Dims(embed_dim=16, num_heads=2, depth=2))
    log = PositionLog()
    log.watch(torch.nn.ModuleDict({"rope": rope}))
    assert log.data()["drift"] == {"rope.frequencies": 0.0}
    with torch.no_grad():
        rope.frequencies.mul_(1.25)
    assert log.data()["drift"]["rope.frequencies"] == pytest.approx(0.25)


def test_lines_are_whole_and_the_last_one_is_the_support(tmp_path):
    path = tmp_path / "log.jsonl"
    log = PositionLog(path, every=2)
    for width in (3, 4, 5):
        log.grid((2, width))
        log.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert last_support(path) == log.support()
    with path.open("a") as file:
        file.write('{"step": 4, "position": [')  # a run that was killed
    assert last_support(path) == log.support()


@pytest.mark.parametrize("unit", [1.0, 1 / 16])
def test_a_run_that_was_stopped_goes_on(tmp_path, unit):
    path = tmp_path / "log.jsonl"
    whole, first = (PositionLog(where, every=1, unit=unit) for where in (None, path))
    batches = [((14, 14), 0.0), ((3, 1, 5), 300.0), ((14, 14), 70_000.0)]

    def fed(log, batch):
        grid, start = batch
        log.grid(grid, images=2)
        log.coordinates(start + unit * torch.arange(5)[None], axes=("seq",))
        log.step()

    for batch in batches:
        fed(whole, batch)
    for batch in batches[:2]:
        fed(first, batch)
    with path.open("a") as file:
        file.write('{"step": 2, "position"')  # killed while it wrote
    again = PositionLog(path, every=1, unit=unit)
    fed(again, batches[2])
    assert again.steps == 3
    assert again.support() == whole.support()
    assert again.data()["grids"] == {"1x14x14": 4, "3x1x5": 2}
    assert last_support(path) == whole.support()
    with pytest.raises(PositionError, match=r"unit 0\.75"):
        PositionLog(path, unit=0.75)


def test_a_pass_that_overflowed_counts_for_nothing():
    log, clean = PositionLog(), PositionLog()
    q, k = torch.randn(2, 1, 2, 6, 4)
    coords = torch.arange(6)[None]
    for one in (log, clean):
        one.attention(q, k, coords, axes=("seq",))
    log.attention(q * torch.nan, k, coords, axes=("seq",))
    assert log.support() == clean.support()
    only = PositionLog()
    only.attention(q * torch.inf, k, coords, axes=("seq",))
    assert only.support()["attn_distance"] == []


def test_support_fits_the_schema():
    log = PositionLog()
    log.grid((2, 3, 5))
    log.coordinates(torch.arange(4)[None], axes=("seq",))
    record = {
        "schema_version": "1.0",
        "run": {"phase": "finetune"},
        "scheme": [],
        "coordinates": {
            "axes": ["h"], "order": "row_major_hw", "origin": "corner0", "units": "cell", "normalize": "none",
        },
        "train_support": log.support(),
        "precision": dict.fromkeys(lineage_schema()["$defs"]["precision"]["properties"]),
        "masking": {"kind": "none", "packed": False, "reset_per_document": None},
    }  # fmt: skip
    assert record_faults(record) == []
    assert [entry["axis"] for entry in log.support()["position"]] == ["t", "h", "w", "seq"]


class Writer:
    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


def test_tensorboard_gets_reach_and_drift():
    writer = Writer()
    log = PositionLog(tensorboard=writer)
    log.grid((3, 5))
    log.step()
    assert writer.seen["positions/offset/w/max", 0] == 4
    # Mean |difference| of two of five places, every pair: 40 / 25.
    assert writer.seen["positions/offset/w/mean", 0] == pytest.approx(1.6)


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *rest, **more):
        if "tensorboard" in name:
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        PositionLog(tensorboard=tmp_path)


def support_of(*grids):
    log = PositionLog()
    for grid in grids:
        log.grid(grid)
    return log.support()


def test_share_outside_is_that_of_a_plain_count():
    trained, deployed = support_of((14, 14)), support_of((14, 28))
    pairs = Counter(i - j for i, j in product(range(28), repeat=2))
    far = sum(count for step, count in pairs.items() if abs(step) > 13)
    assert support_outside(deployed, trained) == pytest.approx({"h": 0.0, "w": far / 28**2})
    assert support_outside(trained, deployed) == {"h": 0.0, "w": 0.0}
    assert support_outside(deployed, trained, "position") == pytest.approx({"h": 0, "w": 0.5})


def test_a_new_axis_is_wholly_outside():
    assert support_outside(support_of((4, 3, 5)), support_of((3, 5)))["t"] == 1.0


def test_a_hole_in_the_training_is_outside():
    trained, deployed = PositionLog(), PositionLog()
    trained.coordinates(torch.tensor([[0, 10]]), axes=("seq",))
    deployed.coordinates(torch.tensor([[0, 5, 10]]), axes=("seq",))
    # Differences 0 (three times), 10, -10 were seen; 5 and -5, twice each, were not.
    assert support_outside(deployed.support(), trained.support()) == pytest.approx({"seq": 4 / 9})


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: PositionLog(every=0), "every is 0"),
        (lambda: PositionLog(unit=-1), "unit is -1"),
        (lambda: PositionLog().grid((3,)), r"grid is \(3,\)"),
        (lambda: PositionLog().grid((0, 3)), r"grid is \(0, 3\)"),
        (lambda: PositionLog().coordinates(torch.zeros(2, 5)), r"coords have shape \(2, 5\)"),
        (lambda: PositionLog().coordinates(torch.zeros(1, 5), axes="z"), "one of t, h, w and seq"),
        (
            lambda: PositionLog().attention(*torch.zeros(2, 1, 1, 5, 4), torch.zeros(2, 5), prefix=1),
            "prefix 1",
        ),
        (lambda: PositionLog(unit="1"), "unit is '1'"),
        (lambda: PositionLog(unit=math.inf), "unit is inf"),
        (lambda: PositionLog("nowhere/log.jsonl"), "nowhere/log.jsonl cannot be written"),
        (lambda: PositionLog(tensorboard=3), "tensorboard is 3"),
        (lambda: PositionLog().watch(3), "model is 3"),
        (lambda: PositionLog().grid(5), "grid is 5"),
        (lambda: PositionLog().grid((2, 2), images=-1), "images is -1"),
        (lambda: PositionLog().grid((2, 2), images=math.nan), "images is nan"),
        (lambda: PositionLog().coordinates([[0, 1]], axes=("seq",)), "a tensor of real numbers"),
        (lambda: PositionLog().coordinates(torch.tensor([[0, math.nan]]), axes=("seq",)), "coords hold nan"),
        (lambda: PositionLog().coordinates(torch.zeros(3, 0, 4)), r"coords have shape \(3, 0, 4\)"),
        (
            lambda: PositionLog().attention(*torch.zeros(2, 1, 1, 4, 4), torch.zeros(2, 5), prefix=-1),
            "prefix -1",
        ),
        (
            lambda: PositionLog().attention(
                torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 2), torch.zeros(2, 5)
            ),
            r"k \[1, 1, 5, 2\]",
        ),
        (lambda: support_outside({}, support_of((2, 2))), "deployed holds no offset"),
        (
            lambda: support_outside(
                {"offset": [{"axis": "w", "min": 0, "max": 1, "bins": [0.5], "hist": []}]},
                support_of((2, 2)),
            ),
            "1 bins and 0 counts",
        ),
        (lambda: support_outside(support_of((2, 2)), {"offset": []}), "trained holds no offset"),
        (lambda: support_outside({}, {}, "distance"), "quantity is 'distance'"),
        (lambda: last_support("nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    ],
)  # fmt: skip
def test_refusals(act, says):
    with pytest.raises(PositionError, match=says):
        act()
