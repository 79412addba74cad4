"""The audit of encodings: planted faults, half precision, every shipped encoding, and what a user may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visionpos import audit
from visionpos.audit.doors import door_of
from visionpos.audit.expected import rows as expected_rows
from visionpos.audit.layer import Placed, cells_of
from visionpos.audit.result import AuditResult
from visionpos.config import load_encoding, shipped
from visionpos.encodings import (
    Additive,
    AxialRopeSpec,
    Conditional,
    Dims,
    GpsaSpec,
    KerpleSpec,
    LearnedSpec,
    PapeSpec,
    Rotary,
    SinCosSpec,
    build,
    spec_types,
)
from visionpos.errors import PositionError
from visionpos.geometry import CoordSpec, Grid

DIMS = Dims(embed_dim=32, num_heads=2, depth=1)
RECTANGLES = [Grid(3, 5), Grid(7, 2), Grid(1, 6), Grid(5, 1)]


class ArrayOrder(Additive):
    """A fault: gives the first code to the first token, wherever it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.dims = DIMS
        self.table = nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(3)))

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        return self.table[: grid.size]

    def at(self, coords_yx: Tensor) -> Tensor:
        return self.table[: coords_yx.shape[0]]


class Blind(ArrayOrder):
    """A fault: gives every token the same code."""

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        return self.table[:1].expand(grid.size, -1)

    def at(self, coords_yx: Tensor) -> Tensor:
        return self.table[:1].expand(coords_yx.shape[0], -1)


class Still(Rotary):
    """A fault: frequencies of zero; nothing turns."""

    def __init__(self) -> None:
        super().__init__()
        self.spec, self.dims = AxialRopeSpec(), DIMS

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        return torch.zeros(2, 8, device=device)


class Leaking(Conditional):
    """A fault: every token takes in the mean of all, masked ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.dims = DIMS
        self.share = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002
        return tokens + self.share * tokens.mean(1, keepdim=True)


class Raising(Additive):
    """A scheme that fails in a way of its own as soon as places leave the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.dims = DIMS

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        return self.at(cells_of(grid)[:, 1:])

    def at(self, coords_yx: Tensor) -> Tensor:
        if float(coords_yx.max()) > 100:
            raise RuntimeError("lookup table is exhausted")
        return coords_yx.sum(-1, keepdim=True).expand(-1, 32).float() / 10


def verdicts(result: AuditResult, name: str, **fields: Any) -> set[str]:
    return {row.verdict for row in result.of(name, **fields)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_planted_array_order_is_caught_by_joint_permutation(dtype: torch.dtype) -> None:
    result = audit.run(ArrayOrder(), seeds=2, dtype=dtype, grid=Grid(3, 5))
    assert verdicts(result, "P2") == {"nonzero"}
    assert "P2" in {row.intervention for row in result.surprises}


@pytest.mark.parametrize("fault", [Blind, Still])
def test_planted_blindness_is_caught_by_ablation(fault: type[Any]) -> None:
    result = audit.run(fault(), "N2", seeds=2, grid=Grid(3, 5))
    assert verdicts(result, "N2", variant="places shuffled") == {"zero"}
    assert result.surprises


def test_planted_leak_is_caught_by_missing_evidence() -> None:
    result = audit.run(Leaking(), "N3", seeds=2, grid=Grid(3, 5))
    assert verdicts(result, "N3") == {"nonzero"}
    assert len(result.surprises) == len(result.rows)


def test_planted_failure_keeps_the_other_rows() -> None:
    result = audit.run(Raising(), ["P1", "S1", "R1"], seeds=1, grid=Grid(3, 5))
    assert not result.complete
    assert verdicts(result, "P1") == verdicts(result, "R1") == {"nonzero"}
    failed = [row for row in result.of("S1") if row.verdict == "failed"]
    assert len(failed) == 1
    assert failed[0].note == "RuntimeError: lookup table is exhausted"
    assert len(result.of("S1", variant="17 cells")) == 2


@pytest.mark.parametrize("spec", [AxialRopeSpec(), KerpleSpec(), SinCosSpec()])
def test_invariant_half_precision_certifies_nothing_that_it_cannot_see(spec: Any) -> None:
    """No bfloat16 row says zero, and one that says nonzero is an effect in float64 too (sheet 3.3)."""
    half, exact = (
        audit.run((spec, DIMS), seeds=3, dtype=dtype, grid=Grid(6, 7))
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert len(half.rows) == len(exact.rows)
    for low, high in zip(half, exact, strict=True):
        if low.variant == "far":  # the growth of a bias, no pass of half precision
            continue
        assert low.verdict in ("nonzero", "unseen", "undefined")
        if low.verdict == "nonzero":
            assert high.verdict == "nonzero", (low, high)
    assert not half.surprises


def test_invariant_half_precision_does_not_see_a_weak_stretch() -> None:
    """Sheet 3.3: the weakest real effects, 1.7e-2 of a KERPLE stretch, are under the band of bfloat16."""
    bias = build(KerpleSpec(), DIMS)
    bias.set(p=torch.full((2,), 0.05), a=torch.full((2,), 0.2))
    half, exact = (
        audit.run(bias, "D1b", seeds=1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert verdicts(half, "D1b", variant="") == {"unseen"}
    assert verdicts(exact, "D1b", variant="") == {"nonzero"}


_SIZES = (
    (128, 4, 1),
    (96, 4, 5),
    (384, 12, 2),
    (128, 8, 1),
    (256, 2, 1),
    (256, 4, 1),
    (144, 2, 2),
)
_GRIDS = (None, Grid(14, 14), Grid(4, 4, 8), Grid(4, 4, 2), Grid(4, 4, 16))


def _filling(name: str) -> tuple[Any, Grid | None]:
    """Return a shipped encoding with sizes, and a grid that it serves."""
    spec = load_encoding(name)
    for width, heads, depth in _SIZES:
        target = spec, Dims(embed_dim=width, num_heads=heads, depth=depth)
        for grid in _GRIDS:
            try:
                audit.run(target, "P1", seeds=1, grid=grid)
            except PositionError:
                continue
            return target, grid
    raise AssertionError(f"no sizes and no grid serve {name}")


def _seeds() -> dict[str, int]:
    """Return 20 for one shipped encoding of each kind, 2 for the others."""
    first: dict[str, str] = {}
    for name in shipped("encodings"):
        first.setdefault(load_encoding(name).kind, name)
    return {name: 20 if name in first.values() else 2 for name in shipped("encodings")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), _seeds().items())
def test_invariant_no_healthy_scheme_raises_a_surprise(name: str, seeds: int) -> None:
    target, grid = _filling(name)
    result = audit.run(target, seeds=seeds, grid=grid)
    assert result.complete
    assert not result.surprises


def test_reference_every_kind_has_a_row() -> None:
    assert {row.kind for row in expected_rows()} == {"none", *spec_types()}
    assert all(row.source for row in expected_rows())


_SMALL: dict[str, tuple[Any, Grid]] = {
    name: (spec, Grid(6, 7))
    for name, spec in {
        "dinov3": load_encoding("dinov3"),
        "eva02": load_encoding("eva02"),
        "raster": AxialRopeSpec(coords=CoordSpec(axes=1)),
        "kerple": KerpleSpec(),
        "sincos": SinCosSpec(),
        "detr": load_encoding("detr_sine"),
        "deformable": load_encoding("deformable_detr_sine"),
        "tancik": load_encoding("tancik_gaussian"),
        "learned": LearnedSpec(grid_hw=(5, 3)),
        "golden": load_encoding("golden_gate"),
        "liere": load_encoding("liere_8"),
        "mixed": load_encoding("rope_mixed"),
        "fire": load_encoding("fire_2d"),
        "swinv2": load_encoding("swinv2_torchvision"),
    }.items()
}


@pytest.mark.parametrize("name", _SMALL)
def test_reference_explicit_places_give_what_the_grid_gives(name: str) -> None:
    """A door at the cells of a grid is the encoding over that grid: the reading that was found is right."""
    spec, grid = _SMALL[name]
    dims = Dims(embed_dim=64, num_heads=2, depth=1)
    encoding = build(spec, dims).eval()
    door = door_of(encoding)
    placed = Placed(cells_of(grid), grid)
    with torch.no_grad():
        if isinstance(encoding, Additive):
            tokens = torch.zeros(grid.size, 64)
            given, wanted = door.tokens(tokens, placed), encoding(grid)
        elif hasattr(encoding, "points"):
            q = torch.randn(2, grid.size, 32, generator=torch.Generator().manual_seed(0))
            given, wanted = door.turned(q, q, placed)[0], encoding(grid).apply(q.unsqueeze(0))[0]
        else:
            q = torch.zeros(2, grid.size, 32)
            bias = door.bias(q, q[0], placed)
            assert bias is not None
            given, wanted = bias, encoding(grid)
    torch.testing.assert_close(given.float(), wanted.float(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("exempt", [0, 1])
def test_reference_gates_mix_as_the_encoding_does(exempt: int) -> None:
    dims = Dims(embed_dim=64, num_heads=4, depth=1, prefix=exempt)
    encoding, grid = build(GpsaSpec(), dims), Grid(3, 5)
    count = exempt + grid.size
    content = torch.rand(4, count, count, generator=torch.Generator().manual_seed(0)).softmax(-1)
    mixed = door_of(encoding).mixed(content, Placed(cells_of(grid), grid, exempt))
    torch.testing.assert_close(mixed, encoding(content.unsqueeze(0), grid)[0])


@pytest.mark.parametrize("exempt", [0, 2])
def test_reference_longer_heads_hold_the_bias_of_the_door(exempt: int) -> None:
    dims = Dims(embed_dim=32, num_heads=2, depth=1)
    encoding, grid = build(PapeSpec(parabolas=3), dims).double(), Grid(3, 5)
    generator = torch.Generator().manual_seed(0)
    count = exempt + grid.size
    q, k = torch.randn(2, 1, 2, count, 16, generator=generator, dtype=torch.float64)
    tokens = torch.randn(1, count, 32, generator=generator, dtype=torch.float64)
    longer_q, longer_k = encoding(q, k, tokens, grid, prefix=exempt)
    wanted = (longer_q @ longer_k.mT * encoding.scale)[0]
    placed = Placed(cells_of(grid), grid, exempt)
    bias = door_of(encoding).bias(q[0], tokens[0], placed)
    assert bias is not None
    given = (q @ k.mT)[0] / 4.0 + bias
    torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grid", RECTANGLES, ids=str)
@pytest.mark.parametrize("spec", [None, AxialRopeSpec(), KerpleSpec(), SinCosSpec()])
def test_shape_rectangles(spec: Any, grid: Grid) -> None:
    result = audit.run((spec, DIMS), seeds=2, grid=grid)
    assert result.complete
    assert result.grid == grid.shape
    assert not result.surprises


def test_invariant_float32_proves_nothing_where_rounding_is_as_large_as_effects() -> None:
    """Angles of 10^4 radians a cell: shifts and real effects drown alike, and float64 tells them apart."""
    target = load_encoding("golden_gate_nd"), Dims(embed_dim=128, num_heads=4, depth=1)
    single, double = (
        audit.run(target, ["S1", "prefix"], seeds=1, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert verdicts(single, "S1", variant="1000 cells") == {"weak"}
    assert verdicts(double, "S1") == {"zero"}
    assert verdicts(double, "prefix", variant="unrotated") == {"nonzero"}
    assert not single.surprises


def test_shape_rows_and_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    result = audit.run(
        None, ["R1", "P1"], seeds=[4, 9], progress=lambda *step: seen.append(step), grid=Grid(2, 3)
    )
    assert [(row.intervention, row.metric, row.seed) for row in result] == [
        (name, metric, seed)
        for seed in (4, 9)
        for name, metrics in (("P1", ("Eq", "A")), ("R1", ("A", "O")))
        for metric in metrics
    ]
    assert [(done, steps) for _, done, steps in seen] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert {row.dtype for row in result} == {"float32"}


def test_invariant_a_row_does_not_depend_on_its_company() -> None:
    alone = audit.run((AxialRopeSpec(), DIMS), "N3", seeds=1)
    among = audit.run((AxialRopeSpec(), DIMS), seeds=1)
    assert alone.rows == among.of("N3")


def test_invariant_a_built_encoding_is_left_as_it_was() -> None:
    encoding = build(LearnedSpec(grid_hw=(4, 6)), DIMS).train()
    before = {key: value.clone() for key, value in encoding.state_dict().items()}
    state = torch.random.get_rng_state()
    audit.run(encoding, ["P1", "N2"], seeds=1, dtype=torch.float64)
    audit.run((LearnedSpec(grid_hw=(4, 6)), DIMS), ["P1"], seeds=1)
    assert encoding.training
    assert all(torch.equal(value, before[key]) for key, value in encoding.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_invariant_results_write_their_data(tmp_path: Any) -> None:
    result = audit.run((SinCosSpec(), DIMS), ["P1", "S1"], seeds=1)
    result.to_json(tmp_path / "audit.json")
    assert '"scheme": "sincos"' in (tmp_path / "audit.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"target": "dinov3"}, "config.load_encoding"),
        ({"target": 7}, "target is 7"),
        ({"target": None, "interventions": ["zom"]}, "zom.*Did you mean zoom"),
        ({"target": None, "interventions": []}, "interventions is empty"),
        ({"target": None, "interventions": 3}, "interventions is 3"),
        ({"target": None, "interventions": ["F1"]}, "F1.*for this target"),
        ({"target": None, "seeds": 0}, "seeds is 0"),
        ({"target": None, "seeds": [1, 1]}, "seeds is"),
        ({"target": None, "seeds": True}, "seeds is True"),
        ({"target": None, "dtype": torch.int32}, "int32.*float32"),
        ({"target": None, "dtype": "float32"}, "dtype is 'float32'"),
        ({"target": None, "grid": Grid(1, 1)}, "has 1 tokens; 3 to 2048"),
        ({"target": None, "grid": Grid(1, 2)}, "has 2 tokens; 3 to 2048"),
        ({"target": None, "grid": Grid(10**6, 10**6)}, "has 1000000000000 tokens; 3 to 2048"),
        (
            {"target": None, "segments": []},
            "segments is no option.*as encoding; it takes grid, layer",
        ),
        ({"target": None, "grid": (8, 8)}, "grid"),
        ({"target": (AxialRopeSpec(), 4)}, "dims"),
        ({"target": (LearnedSpec(grid_hw=(3, 3)), None)}, "dims"),
        (
            {"target": load_encoding("sam2_hiera"), "grid": Grid(3, 5)},
            "3x5.*whole windows.*Pass grid=",
        ),
    ],
)
def test_error_names_what_is_wrong(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PositionError, match=named):
        audit.run(**arguments)


@pytest.mark.parametrize("grid", [Grid(1, 3), Grid(3, 1), Grid(2, 2), Grid(1, 4)])
def test_a_mirror_image_is_no_change_of_places(grid: Grid) -> None:
    """Of the orders of a small grid, those that keep all distances show nothing of a scheme of distance."""
    result = audit.run(load_encoding("croma_alibi"), ["P1", "N2"], grid=grid, seeds=20)
    assert len(result.of("P1", metric="A")) == 20
    assert {row.verdict for row in result} == {"nonzero"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_take_the_rounding_of_far_angles_for_an_effect(
    dtype: torch.dtype,
) -> None:
    """Fast pairs turn by 1e6 radians over 1000 cells; float32 angles are off by tenths there, in any table."""
    result = audit.run(load_encoding("golden_gate_nd"), ["S1"], seeds=3, dtype=dtype)
    assert {row.verdict for row in result} == {"unseen"}


@pytest.mark.parametrize("place", ["", "nowhere/a.json", ".", "a\0b", "a" * 300])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    result = audit.run(None, ["S1"], seeds=1)
    with pytest.raises(PositionError, match="cannot be written"):
        result.to_json(tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_replaced_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    result = audit.run(None, ["S1"], seeds=1)
    file, link = tmp_path / ("a" * 250 + ".json"), tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    result.to_json(link)
    assert link.is_symlink()
    assert json.loads(file.read_text())["target"] == "no position"
    assert file.stat().st_mode & 0o777 == 0o640
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("grid", [Grid(1, 3), Grid(5, 1), Grid(3, 5)])
@pytest.mark.parametrize("name", ["cope", "dape_v2_kerple"])
def test_the_masked_token_stands_between_others(name: str, grid: Grid) -> None:
    """Schemes that count tokens leak what they mask, to those that stand behind it: any seed must show it."""
    assert audit.run(load_encoding(name), ["N3"], grid=grid, seeds=40).surprises == ()
