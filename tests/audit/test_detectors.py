"""Every detector catches its planted fault and passes the healthy case, on plain functions, tables and tensors."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import visionpos as vp
from visionpos import Grid, PositionError, audit
from visionpos.audit import detectors as d
from visionpos.audit.detectors.finding import UnfitError
from visionpos.audit.detectors.turning import position_dtype

HEAD = 16
THETAS = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def neighbours(x):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-second, first], -1).flatten(-2)


def rotary(partner, widen, *, sign: float = 1.0, positions=torch.float32, table=torch.float32):
    """A rotation as users write it; what it is made of can be mixed up."""

    def turn(x, places):
        turns = places.to(positions).to(torch.float32) * sign * THETAS.float()
        cos, sin = widen(turns.cos()).to(table).float(), widen(turns.sin()).to(table).float()
        return (x.float() * cos + partner(x.float()) * sin).to(x.dtype)

    return turn


def tiled(table):
    return torch.cat([table, table], -1)


def repeated(table):
    return table.repeat_interleave(2, -1)


HALF, ADJACENT = rotary(halves, tiled), rotary(neighbours, repeated)
WANTED = d.Wanted(pairing="half", freqs=THETAS[None])


@pytest.mark.parametrize(("turn", "pairing"), [(HALF, "half"), (ADJACENT, "adjacent")])
def test_pairing_passes_a_consistent_rotation(turn, pairing) -> None:
    for freqs in (THETAS[None], None):
        found = d.pairing_mismatch(turn, HEAD, wanted=d.Wanted(pairing=pairing, freqs=freqs))
        assert not found.alarm, found


@pytest.mark.parametrize("freqs", [THETAS[None], None])
def test_pairing_catches_the_other_pairing(freqs) -> None:
    """Norms and scores are right: only the vector itself, or the partner of channel 0, shows it."""
    found = d.pairing_mismatch(ADJACENT, HEAD, wanted=d.Wanted(pairing="half", freqs=freqs))
    assert found.alarm, found
    assert found.remedy
    assert not d.pairing_mismatch(ADJACENT, HEAD).alarm


@pytest.mark.parametrize(
    "turn", [rotary(halves, repeated), rotary(neighbours, tiled)], ids=["half", "adjacent"]
)
def test_pairing_catches_a_mixed_table(turn) -> None:
    found = d.pairing_mismatch(turn, HEAD)
    assert found.alarm, found
    assert "drift" in found.says or "shift" in found.says


@pytest.mark.parametrize(
    "keys", [ADJACENT, rotary(halves, tiled, sign=-1.0)], ids=["pairing", "sign"]
)
def test_pairing_catches_keys_that_turn_otherwise(keys) -> None:
    found = d.pairing_mismatch(HALF, HEAD, turn_keys=keys)
    assert found.alarm, found
    assert found.value > 0.5  # 1.22 and 1.15 are on record for other sizes


def test_precision_passes_float32_and_a_bfloat16_table() -> None:
    for turn in (HALF, rotary(halves, tiled, table=torch.bfloat16)):
        found = d.precision(turn, HEAD, WANTED)
        assert not found.alarm, found


@pytest.mark.parametrize(
    ("positions", "place"), [(torch.bfloat16, 257), (torch.float16, 2049)], ids=["bf16", "fp16"]
)
def test_precision_catches_half_positions(positions, place) -> None:
    turn = rotary(halves, tiled, positions=positions)
    assert not d.precision(turn, HEAD, WANTED, places=(place - 1,)).alarm
    found = d.precision(turn, HEAD, WANTED, places=(place,))
    assert found.alarm, found
    assert found.value == pytest.approx(2 * math.sin(0.5), abs=0.01)  # one radian off: 0.96


def test_precision_catches_rounded_frequencies() -> None:
    rounded = d.Wanted(pairing="half", freqs=THETAS[None].to(torch.bfloat16).double())
    assert d.precision(HALF, HEAD, rounded, dtypes=(torch.float32,)).alarm


def test_precision_looks_at_the_dtype_of_positions() -> None:
    assert position_dtype(torch.zeros(2, dtype=torch.bfloat16)).alarm
    assert position_dtype(torch.zeros(2, dtype=torch.float16)).alarm
    assert not position_dtype(torch.zeros(2, dtype=torch.int32)).alarm
    assert not position_dtype(torch.zeros(2)).alarm
    ids = torch.arange(4, dtype=torch.bfloat16)
    assert d.precision(HALF, HEAD, WANTED, positions=ids, places=(3,)).alarm
    with pytest.raises(PositionError, match="freqs"):
        d.precision(HALF, HEAD, d.Wanted(pairing="half"))


def test_missing_reset() -> None:
    right, wrong = torch.tensor([0, 1, 2, 0, 1]), torch.arange(5)
    assert not d.missing_reset(right, [0, 3, 5]).alarm
    found = d.missing_reset(wrong, [0, 3, 5])
    assert found.alarm
    assert found.value == 3
    own = [torch.tensor([[0, 1, 2]]), torch.tensor([[4, 5]])]  # a document that begins at 4 alone
    assert not d.missing_reset(torch.tensor([[0, 1, 2, 4, 5]]), [0, 3], own=own).alarm
    assert d.missing_reset(right[None], [0, 3], own=own).alarm
    with pytest.raises(PositionError, match="starts"):
        d.missing_reset(right, [7])


def test_packed_outputs() -> None:
    one, other = torch.randn(2, 5, 4, generator=draw())
    assert not d.packed_outputs([one, other], [one, other * (1 + 1e-7)]).alarm
    assert d.packed_outputs([one, other + 1e-3], [one, other]).alarm


def test_tile_restart_counts_equal_ids() -> None:
    """2 x 2 tiles and a thumbnail of 24 x 24 cells, numbered each from the origin: 2880 tokens, 576 places."""
    y, x = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    tile = torch.stack([y.flatten(), x.flatten()], -1)
    found = d.tile_restart(tile.repeat(5, 1))
    assert found.alarm
    assert "2880" in found.says
    assert "576" in found.says
    assert not d.tile_restart(tile).alarm


@pytest.mark.parametrize(("own", "alarm"), [(True, True), (False, False)])
def test_tile_swap(own, alarm) -> None:
    """Attention over tiles whose codes begin anew is blind to where a tile lies."""
    codes = torch.randn(6, 8, generator=draw(1), dtype=torch.float64)
    table = codes[:3].repeat(2, 1) if own else codes

    def encode(tokens):
        x = tokens + table
        return torch.softmax(x @ x.mT, -1) @ x

    tokens = torch.randn(6, 8, generator=draw(2), dtype=torch.float64)
    order = torch.tensor([3, 4, 5, 0, 1, 2])
    assert d.tile_swap(encode, tokens, order).alarm is alarm


def smooth(grid: Grid, dim: int, noise: float, seed: int):
    """A table of waves over both axes and noise, as trained ones look."""
    gen = draw(seed)
    y, x = torch.meshgrid(
        torch.arange(grid.height) / grid.height,
        torch.arange(grid.width) / grid.width,
        indexing="ij",
    )
    freqs = 2 * math.pi * torch.rand(2, dim, generator=gen)
    waves = (
        y[..., None] * freqs[0] + x[..., None] * freqs[1] + 6 * torch.rand(dim, generator=gen)
    ).sin()
    waves = waves.flatten(0, 1)
    return waves + noise * waves.std() * torch.randn(waves.shape, generator=gen)


@pytest.mark.parametrize("grid", [Grid(14, 14), Grid(9, 13), Grid(16, 7)], ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_class_token_offset(grid, noise) -> None:
    for seed in range(5):
        cells = smooth(grid, 192, noise, seed)
        token = torch.randn(1, 192, generator=draw(seed))
        table = torch.cat([token, cells])
        assert not d.class_token_offset(table, grid, prefix=1).alarm
        assert d.class_token_offset(
            torch.cat([token, cells[:-1]]), grid
        ).alarm  # rows taken from 0 on
        assert d.class_token_offset(torch.cat([token, cells]), grid).alarm  # a row too many


def test_class_token_offset_of_noise_proves_nothing() -> None:
    for seed in range(20):
        table = torch.randn(15 * 11, 64, generator=draw(seed))
        assert not d.class_token_offset(table, Grid(15, 11)).alarm
    with pytest.raises(UnfitError, match="phase"):
        d.class_token_offset(table[:20], Grid(2, 10))


def sincos(height: int, width: int, *, x_first: bool = False):
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    freqs = 100.0 ** -(torch.arange(8) / 8)
    turns = [axis.flatten()[:, None] * freqs for axis in ((x, y) if x_first else (y, x))]
    return torch.cat([f(turn) for turn in turns for f in (torch.sin, torch.cos)], -1)


@pytest.mark.parametrize("hw", [(3, 5), (5, 3), (7, 2), (2, 11)])
def test_axis_order(hw) -> None:
    grid, rows = Grid(*hw), torch.arange(16)
    assert not d.axis_order(sincos(*hw), grid).alarm
    assert not d.axis_order(sincos(*hw), grid, row_channels=rows).alarm
    assert d.axis_order(sincos(*hw, x_first=True), grid, row_channels=rows).value > 0.5
    assert d.axis_order(sincos(*hw[::-1]), grid).alarm  # sides swapped
    for code, place in ((sincos(4, 4), Grid(4, 4)), (torch.randn(15, 8), Grid(3, 5))):
        with pytest.raises(UnfitError):
            d.axis_order(code, place)


@pytest.mark.parametrize(
    ("antialias", "size"), [(True, 0.004), (False, 0.47)], ids=["antialias", "without"]
)
def test_missing_antialias(antialias, size) -> None:
    """The numbers on record for torch's bicubic, with and without antialias."""

    def resize(table, sides, wanted):
        grid = table.mT.unflatten(-1, sides)[None]
        small = torch.nn.functional.interpolate(grid, wanted, mode="bicubic", antialias=antialias)
        return small.flatten(-2)[0].mT

    found = d.missing_antialias(resize)
    assert found.alarm is not antialias
    assert found.value == pytest.approx(size, rel=0.2)
    assert d.missing_antialias(resize, declared=False).alarm is antialias


def dealt(sections, pairs):
    """Strides as a model deals them out, which takes any sections (Qwen3-VL)."""
    owner = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        owner[axis : 3 * sections[axis] : 3] = axis
    return owner


@pytest.mark.parametrize(
    ("sections", "real"),
    [
        ((24, 20, 20), (24, 20, 20)),
        ((24, 20, 16), (28, 20, 16)),
        ((24, 24, 24), (22, 21, 21)),
        ((16, 24, 24), (22, 21, 21)),
        ((10, 27, 27), (22, 21, 21)),
    ],
)
def test_section_shares(sections, real) -> None:
    """The shares on record for what transformers' Qwen3-VL makes of these sections."""
    owner = dealt(sections, 64)
    freqs = 5e6 ** -(torch.arange(64) / 64)

    def cosines(places):
        turns = places.float()[:, owner] * freqs
        return torch.cat([turns, turns], -1).cos()

    found = d.section_shares(sections, 64, cosines)
    assert found.alarm is (sections != real)
    if found.alarm and sum(sections) == 64:
        assert str(real) in found.says


def cached_by_count():
    kept = {}

    def table(hw):
        y, x = torch.meshgrid(torch.arange(hw[0]), torch.arange(hw[1]), indexing="ij")
        return kept.setdefault(hw[0] * hw[1], torch.stack([y, x], -1).flatten(0, 1).float())

    return table


def fresh_each_time():
    def table(hw):
        return cached_by_count()(hw)

    return table


def test_stale_cache() -> None:
    assert d.stale_cache(cached_by_count).alarm
    assert not d.stale_cache(fresh_each_time, distinct=True).alarm
    fixed = torch.randn(196, 4)
    assert d.stale_cache(lambda: lambda _: fixed, distinct=True).alarm
    assert not d.stale_cache(lambda: lambda _: fixed).alarm

    def written():  # one buffer for all: the first result changes under the caller's hands
        room = torch.zeros(4)
        return lambda value: room.fill_(room[0] * 0.5 + value)

    assert d.stale_cache(written, (1.0, 2.0)).alarm


@pytest.mark.parametrize("keys", [2048, 8192, 32768])
def test_bias_collapse(keys) -> None:
    """ALiBi as slope times place in bfloat16 (Bloom): 9, 3 and 1 different biases of 64 are on record."""
    slopes = 2.0 ** -torch.arange(1, 9)[:, None]
    by_key = (slopes.bfloat16() * torch.arange(keys)[None].bfloat16()).bfloat16()
    found = d.bias_collapse(by_key)
    assert found.alarm
    assert found.value == {2048: 9, 8192: 3, 32768: 1}[keys]
    by_distance = (-slopes * (keys - 1 - torch.arange(keys))).bfloat16()
    assert not d.bias_collapse(by_distance).alarm
    assert not d.bias_collapse(slopes * torch.arange(keys)).alarm  # float32


def test_dead_scheme() -> None:
    x = torch.randn(5, 8, generator=draw())
    assert d.dead_scheme(x, x + 1e-6).alarm
    assert not d.dead_scheme(x, x + 1e-2).alarm
    assert d.dead_scheme(x * math.nan, x).alarm


def test_axis_visibility() -> None:
    """Qwen2-VL's sections at 32 cells: 0.98 rad of h and 0.0055 of w are on record."""
    ladder = 1e6 ** -(torch.arange(64, dtype=torch.float64) / 64)
    freqs = torch.zeros(3, 64, dtype=torch.float64)
    for axis, (start, stop) in enumerate([(0, 16), (16, 40), (40, 64)]):
        freqs[axis, start:stop] = ladder[start:stop]
    found = d.axis_visibility(freqs, (31, 31, 31))
    assert found.alarm
    assert found.value == pytest.approx(0.0055, rel=0.02)
    assert not d.axis_visibility(freqs, (31, 31, 0)).alarm
    with pytest.raises(UnfitError):
        d.axis_visibility(freqs, (0, 0, 0))


def test_unused_buckets() -> None:
    hit = torch.tensor([row for row in range(32) if row != 16])
    assert not d.unused_buckets(hit, 32, known=(16,)).alarm
    assert d.unused_buckets(hit, 32).alarm
    assert d.unused_buckets(hit, 40, known=(16,)).value == pytest.approx(8 / 40)


@pytest.mark.parametrize("zeroed", [True, False])
def test_masked_leak(zeroed) -> None:
    conv = torch.nn.Conv1d(4, 4, 3, padding=1)

    def mix(tokens, masked):
        seen = tokens.masked_fill(masked[..., None], 0.0) if zeroed else tokens
        return tokens + conv(seen.mT).mT

    tokens, masked = torch.randn(1, 7, 4, generator=draw()), torch.zeros(1, 7, dtype=torch.bool)
    masked[0, 3] = True
    with torch.no_grad():
        assert d.masked_leak(mix, tokens, masked).alarm is not zeroed


class Positions(torch.nn.Module):
    """A layer that adds learned positions by a hook; where the hook finds them is the fault."""

    def __init__(self, closure: bool) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 4, generator=draw(3)))
        self.inner = torch.nn.Identity()
        self.inner.register_forward_hook(lambda _m, _i, out: out + self.table if closure else None)
        self.closure = closure

    def forward(self, x):
        return self.inner(x) if self.closure else self.inner(x) + self.table


@pytest.mark.parametrize("closure", [True, False])
def test_frozen_copy(closure) -> None:
    """A hook's closure is copied by reference: the copy goes on with the original's positions."""
    module, x = Positions(closure), torch.randn(5, 4, generator=draw(4))
    before = module.table.detach().clone()
    found = d.frozen_copy(module, lambda one: one(x), ["table"])
    assert found.alarm is closure
    assert torch.equal(module.table, before)
    with pytest.raises(UnfitError):
        d.frozen_copy(module, lambda one: one(x), [])
    with pytest.raises(PositionError, match="no_such"):
        d.frozen_copy(module, lambda one: one(x), ["no_such"])


@pytest.mark.parametrize("sizes", [(6, 6), (6, 4)], ids=["silent", "loud"])
@pytest.mark.parametrize("shared", [True, False])
def test_shared_state(shared, sizes) -> None:
    """The block reads the grid from a place that the next crop overwrites, and is recomputed after it."""
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=draw(5)))
    now = {}

    def block(x, code):
        return (x + (now["code"] if shared else code)) @ weight

    def forward(crop, *, checkpointed):
        x, now["code"] = crop
        if not checkpointed:
            return block(x, now["code"])
        return checkpoint(block, x, now["code"], use_reentrant=False)

    crops = [(torch.randn(n, 4), torch.randn(n, 4)) for n in sizes]
    found = d.shared_state(forward, crops, [weight])
    assert found.alarm is shared, found
    assert weight.grad is None


def test_order_dependence() -> None:
    codes, tokens = torch.randn(2, 9, 4, generator=draw(6))
    assert d.order_dependence(lambda order: (tokens[order] * codes).sum(0), 9).alarm
    assert not d.order_dependence(lambda order: (tokens * codes)[order].double().sum(0), 9).alarm


def test_registry_names_thresholds_and_sources() -> None:
    assert all(one.source and one.title for one in d.DETECTORS.values())
    assert [name for name, one in d.DETECTORS.items() if one.name != name] == []


def test_detect_refuses_other_things() -> None:
    with pytest.raises(PositionError, match="target is 'eva02'"):
        d.detect("eva02")
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(PositionError, match="stale_cache"):
        d.detect(layer, ["stale_cach"])
    with pytest.raises(PositionError, match="names is empty"):
        d.detect(layer, [])


def test_run_lets_detectors_look_where_all_interventions_are_carried_out() -> None:
    spec = vp.AxialRopeSpec(theta=100.0)
    found = {one.detector for one in audit.run(spec, seeds=1).found}
    assert {"pairing_mismatch", "precision", "stale_cache", "dead_scheme"} <= found
    assert not audit.run(spec, ["S1"], seeds=1).found
    named = audit.run(spec, ["S1"], seeds=1, detectors=["precision"])
    assert [one.detector for one in named.found] == ["precision"]
    assert not audit.run(None, ["P1"], seeds=1, detectors=True).found
