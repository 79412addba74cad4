"""Detectors on built encodings: no healthy scheme of the package raises an alarm, and planted faults do."""

import copy
from dataclasses import replace

import pytest
import torch

import visionpos as vp
from visionpos import config
from visionpos.audit.detectors import DETECTORS, applies, detect, did_fail
from visionpos.encodings import Conditional, Rotary

DIMS = vp.Dims(embed_dim=192, num_heads=3, depth=2, prefix=1)
OWN_DIMS = {  # fillings that belong to models of another shape
    "coat": replace(DIMS, embed_dim=256, num_heads=8),
    "lookhere_90": replace(DIMS, embed_dim=384, num_heads=12),
    "cpvt_peg_0_4": replace(DIMS, depth=12),
}
ENCODINGS = sorted(config.shipped("encodings"))
UNHEALTHY = {"omdet_turbo_sincos": {"axis_order"}}  # its source numbers tokens down the columns
FEW = ["mae", "vit_learned_14", "rope_mixed", "dinov3", "croma_alibi", "layoutlmv2_2d", "cpvt_peg"]


def built(name: str, seed: int = 0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return vp.build(config.load_encoding(name), OWN_DIMS.get(name, DIMS))


def alarms(target, names=None, seed: int = 0):
    return {one.detector for one in detect(target, names, seed=seed) if one.alarm or did_fail(one)}


@pytest.mark.parametrize("name", FEW)
def test_a_healthy_scheme_raises_no_alarm(name) -> None:
    found = detect(built(name))
    assert [one.detector for one in found] == list(DETECTORS)
    assert not [one for one in found if one.alarm or did_fail(one)]
    assert sum(map(applies, found)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_no_shipped_scheme_raises_an_alarm_over_twenty_seeds(name) -> None:
    for seed in range(20):
        assert alarms(built(name, seed), seed=seed) == UNHEALTHY.get(name, set()), seed


def test_an_encoding_is_as_it_was() -> None:
    module = built("rope_mixed").train()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    detect(module)
    assert module.training
    assert all(torch.equal(module.state_dict()[key], before[key]) for key in before)
    assert all(weight.grad is None for weight in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_is_told() -> None:
    told = []
    detect(built("mae"), ["dead_scheme", "precision"], progress=lambda *one: told.append(one))
    assert told == [("precision", 0, 2), ("dead_scheme", 1, 2), ("done", 2, 2)]


def test_a_detector_that_fails_says_so_and_the_others_go_on(monkeypatch) -> None:
    module = built("mae")
    monkeypatch.setattr(type(module), "forward", lambda *_, **__: 1 / 0)
    found = detect(module)
    assert len(found) == len(DETECTORS)
    broken = [one for one in found if did_fail(one)]
    assert broken
    assert all("ZeroDivisionError" in one.says and not one.alarm for one in broken)


class Wrong(Rotary):
    """A rotation that says another pairing than it turns."""

    def __init__(self, inner, **faults) -> None:
        super().__init__()
        self.spec, self.dims, self.inner, self.faults = inner.spec, inner.dims, inner, faults

    def freqs(self, layer=0, *, device=None):
        return self.inner.freqs(layer, device=device) * self.faults.get("speed", 1.0)

    def rotation(self, turns):
        return vp.Rotation.of(turns, self.faults.get("turns", self.pairing), axes=2)

    def angles(self, coords, layer=0):
        return super().angles(coords.to(self.faults.get("dtype", coords.dtype)).float(), layer)

    def points(self, grid, **how):
        coords = super().points(grid, **how)
        return coords.flip(-1) if self.faults.get("swapped") else coords


def wrong(**faults) -> Wrong:
    return Wrong(built("eva02"), **faults)


def test_planted_rotary_faults_are_caught() -> None:
    names = ["pairing_mismatch", "precision", "axis_visibility", "stale_cache"]
    assert alarms(wrong(), names) == set()
    assert "pairing_mismatch" in alarms(wrong(turns="half"), names)
    assert "precision" in alarms(wrong(dtype=torch.bfloat16), names)
    assert "axis_visibility" in alarms(wrong(speed=1e-4), names)


def test_a_grid_that_is_remembered_is_caught() -> None:
    module = built("mae")
    kept = {}
    whole = type("Keeping", (type(module),), {})
    whole.forward = lambda self, grid, **_: kept.setdefault(
        grid.size, type(module).forward(self, grid)
    )
    module.__class__ = whole
    assert alarms(module, ["stale_cache"]) == {"stale_cache"}


def test_a_line_may_look_alike_on_every_grid_and_a_fixed_table_may_not() -> None:
    """Schemes of text see 4 x 6 and 3 x 8 tokens as one line; a table that is made once is no line."""
    spec = vp.encodings.T5BiasSpec(buckets=(32,), max_distance=(128,))
    assert alarms(vp.build(spec, DIMS), ["stale_cache"]) == set()
    module = built("mae")
    once = torch.randn(24, 192)
    whole = type("Once", (type(module),), {"forward": lambda *_, **__: once})
    module.__class__ = whole
    assert alarms(module, ["stale_cache"]) == {"stale_cache"}


def test_weights_that_are_not_looked_at_again_are_caught() -> None:
    module = built("vit_learned_14")
    kept = {}
    own = type(module)
    keeping = type("Keeping", (own,), {})
    keeping.forward = lambda self, grid, **_: kept.setdefault(
        (id(self), grid), own.forward(self, grid)
    )
    module.__class__ = keeping
    assert "stale_cache" in alarms(module, ["stale_cache"])


def test_a_leak_is_caught() -> None:
    class Leaking(Conditional):
        def __init__(self) -> None:
            super().__init__()
            self.spec, self.dims = None, DIMS
            self.conv = torch.nn.Conv2d(192, 192, 3, padding=1, groups=192)

        def forward(self, tokens, grid):
            rows = tokens[:, 1:].unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)
            mixed = self.conv(rows).flatten(2).mT
            return torch.cat([tokens[:, :1], tokens[:, 1:] + mixed], 1)

    assert alarms(Leaking(), ["masked_leak"]) == {"masked_leak"}


def test_a_dead_scheme_is_caught_and_untaught_weights_are_not_judged() -> None:
    module = built("vit_learned_14")
    with torch.no_grad():
        module.table.mul_(1e-5)
    assert alarms(module, ["dead_scheme", "tile_restart"]) == {"dead_scheme", "tile_restart"}
    with torch.no_grad():
        module.table.zero_()
    (found,) = detect(module, "dead_scheme")
    assert not applies(found)
    assert "zero" in found.says


def test_clamped_sections_are_caught_where_they_are_not_declared() -> None:
    spec = config.load_encoding("genlip")
    module = vp.build(spec, replace(DIMS, head_dim=64))
    assert not applies(detect(module, "section_shares")[0])  # declared
    module.spec = replace(spec, clamp=False)
    module.freqs = vp.build(spec, replace(DIMS, head_dim=64)).freqs
    assert alarms(module, ["section_shares"]) == {"section_shares"}


def test_the_faults_of_a_source_are_found() -> None:
    """OmDet-Turbo numbers tokens down the columns, which its YAML records as a fault on rectangles."""
    assert alarms(built("omdet_turbo_sincos")) == {"axis_order"}
