"""The audit of an encoding: every intervention on one attention layer of random weights around it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from visionpos.audit.bench import Bench, Trial
from visionpos.audit.changes import generator_of
from visionpos.audit.doors import door_of
from visionpos.audit.expected import Expected, always_of, expected_of
from visionpos.audit.interventions import INTERVENTIONS, Progress, chosen
from visionpos.audit.layer import Door, Layer, Placed, cells_of
from visionpos.audit.outcome import Verdict, band, verdict_of
from visionpos.audit.result import AuditResult, Measured
from visionpos.audit.trials import IDS, trials_of
from visionpos.config import plain
from visionpos.encodings import Dims, build
from visionpos.encodings.guard import Guarded
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_kind
from visionpos.geometry.grid import Grid

_DIMS = Dims(embed_dim=128, num_heads=4, depth=1)
_GRID = Grid(8, 8)
_CLIP = Grid(4, 4, frames=2)
_SEEDS = (0, 1, 2, 3, 4)
_FAINT = 0.05
_LEAST, _MOST = 3, 2048  # tokens: G1 holds attention of all pairs of four times as many


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What is audited.

    Args:
        spec: of the scheme; None for no position, or for a class of a user's own without one.
        dims: of the layer.
        built: a module with weights of its own; None where a Spec is to be built anew for each seed.
    """

    spec: Any
    dims: Dims
    built: Guarded | None = None

    @property
    def nothing(self) -> bool:
        """Return whether this is the control."""
        return self.spec is None and self.built is None

    @property
    def scheme(self) -> str:
        """Return the scheme's kind, or the name of a user's own class."""
        if self.nothing:
            return "none"
        return str(getattr(self.spec, "kind", type(self.built).__name__))


def audit(
    target: Any,
    *,
    interventions: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    grid: Grid | None = None,
    layer: int = 0,
) -> AuditResult:
    """Return what interventions show about an encoding.

    A built module is audited as it is, on a copy, in eval mode. A Spec is built anew for each seed; weights that start
    near zero are drawn as large as trained ones, since nothing could be seen of them.

    Args:
        target: a built encoding; a Spec, served with 128 channels and 4 heads; (Spec, Dims); None or "none".
        interventions: ids; all when None.
        seeds: of contents, attention weights and a Spec's own weights; 0 to 4 when None.
        dtype: of the layer. Encodings compute in float64 for float64, else in float32.
        progress: see `run`.
        grid: where the tokens stand; when None 8x8, or two frames of 4x4 for a scheme of clips alone.
        layer: of the model, where layers differ.

    On a grid of one row or column no outcome is stated for what moves coordinates: the table speaks of planes.

    Raises:
        PositionError: if the target is no encoding, or the sizes do not fit it.
    """
    own = _target_of(target)
    if grid is not None:
        check_kind("grid", grid, Grid)
        if not _LEAST <= grid.size <= _MOST:
            raise PositionError(
                f"grid {grid.shape} (t, y, x) has {grid.size} tokens; {_LEAST} to {_MOST} can be audited: fewer cannot "
                "change their distances by changing places, and of more all pairs are held. Pass another grid."
            )
    drawn = tuple(seeds) if seeds is not None else _SEEDS
    expected = (
        expected_of(own.spec) if own.spec is not None or own.nothing else expected_of(own.built)
    )
    place = _served(own, grid, layer)
    if min(place.height, place.width) == 1:
        expected = replace(expected, cells=always_of(expected))
    ids = chosen(interventions, among=IDS)
    rows: list[Measured] = []
    done, steps = 0, len(drawn) * len(ids)
    for seed in drawn:
        bench = _bench(own, place, layer, seed, dtype)
        for name in ids:
            if progress is not None:
                progress(f"{name}, seed {seed}", done, steps)
            # A generator for each: what one trial draws must not change another's numbers.
            fresh = replace(bench, generator=generator_of(seed))
            rows += _rows_of(name, fresh, seed, dtype, expected)
            done += 1
    if progress is not None:
        progress("done", steps, steps)
    return AuditResult(
        target=_named(own),
        scheme=own.scheme,
        grid=place.shape,
        rows=tuple(rows),
        complete=all(row.verdict != "failed" for row in rows),
        facts={
            "expected from": expected.row.source,
            "scheme in words": expected.row.scheme,
            "spec": plain(own.spec) if own.spec is not None else None,
            "differs": {key: cell.differs for key, cell in expected.cells.items() if cell.differs},
        },
    )


def built_of(target: Any) -> Guarded | None:
    """Return the encoding of a target as an audit sees it, with weights of size; None for the control."""
    return _encoding(_target_of(target), 0, torch.float32)


def _target_of(target: Any) -> _Target:
    if target is None or (isinstance(target, str) and target == "none"):
        return _Target(spec=None, dims=_DIMS)
    if isinstance(target, Guarded):
        dims = getattr(target, "dims", None)
        check_kind("dims of the encoding", dims, Dims)
        assert isinstance(dims, Dims)  # noqa: S101 (checked above)
        return _Target(spec=getattr(target, "spec", None), dims=dims, built=target)
    spec, dims = target if isinstance(target, tuple) and len(target) == 2 else (target, _DIMS)
    check_kind("dims", dims, Dims)
    if spec is not None:
        _built(spec, dims, 0)  # refuses what is no Spec, and sizes that do not fit
    return _Target(spec=spec, dims=dims)


def _named(own: _Target) -> str:
    if own.nothing:
        return "no position"
    return type(own.built).__name__ if own.built is not None else type(own.spec).__name__


def _served(own: _Target, grid: Grid | None, layer: int) -> Grid:
    """Return the grid to audit on: the one asked for, else 8x8, else one of two frames; one that the scheme serves."""
    asked = [_GRID, _CLIP] if grid is None else [grid]
    for number, place in enumerate(asked, 1):
        bench = _bench(own, place, layer, 0, torch.float32)
        try:
            with torch.no_grad():
                bench.run()
            return place
        except PositionError as error:
            if number == len(asked):
                raise PositionError(
                    f"grid {place.shape} (t, y, x) is none that {own.scheme} can serve: {error} Pass grid=, one that "
                    "it serves."
                ) from None
    return _GRID


def _built(spec: Any, dims: Dims, seed: int) -> Any:
    """Return the module of a Spec; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(spec, dims)


def _encoding(own: _Target, seed: int, dtype: torch.dtype) -> Guarded | None:
    """Return the encoding for one seed, in eval mode and in the precision that it computes in."""
    if own.nothing:
        return None
    if own.built is not None:
        encoding = copy.deepcopy(own.built)
    else:
        encoding = _built(own.spec, own.dims, seed)
        _strengthen(encoding, generator_of(seed + 1))
    encoding.eval()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    ready: Guarded = encoding.to(exact)
    return ready


@torch.no_grad()
def _strengthen(encoding: nn.Module, generator: torch.Generator) -> None:
    """Draw weights that start near zero as large as trained ones: tables at 1, linear maps at 1 / sqrt(inputs)."""
    for module in encoding.modules():
        for name, weight in module.named_parameters(recurse=False):
            size = float(weight.square().mean().sqrt())
            if weight.numel() < 2 or size >= _FAINT:
                continue
            mapping = isinstance(module, (nn.Linear, nn.Conv2d))
            if mapping and name == "bias":
                continue
            inputs = weight[0].numel() if mapping else 1
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / inputs**0.5)


def _bench(own: _Target, grid: Grid, layer: int, seed: int, dtype: torch.dtype) -> Bench:
    generator = generator_of(seed)
    dims = own.dims
    attention = Layer(
        embed_dim=dims.embed_dim,
        num_heads=dims.num_heads,
        head_dim=dims.channels,
        generator=generator,
        dtype=dtype,
    )
    tokens = torch.randn(grid.size, dims.embed_dim, generator=generator, dtype=torch.float64)
    encoding = _encoding(own, seed, dtype)
    door: Door = door_of(encoding, layer=layer)
    return Bench(door, attention, tokens.to(dtype), Placed(cells_of(grid), grid), generator)


def _rows_of(
    name: str, bench: Bench, seed: int, dtype: torch.dtype, expected: Expected
) -> Iterator[Measured]:
    """Yield the rows of one intervention; what fails is a row, and the others go on."""
    try:
        with torch.no_grad():
            for trial in trials_of(name, bench):
                yield from _measured(name, trial, seed, dtype, expected)
    except Exception as error:
        yield _row(name, INTERVENTIONS[name].metrics[0], None, "failed", seed, dtype, _said(error))


def _measured(
    name: str, trial: Trial, seed: int, dtype: torch.dtype, expected: Expected
) -> Iterator[Measured]:
    note, numbers = trial.note, {}
    try:
        numbers = dict(trial.measure())
    except PositionError as error:
        note = str(error)
    limits = trial.band or band(dtype, INTERVENTIONS[name].symmetry, largest_angle=trial.angle)
    for metric in trial.metrics:
        value = numbers.get(metric)
        yield Measured(
            intervention=name,
            variant=trial.variant,
            metric=metric,
            tokens=trial.tokens,
            value=value,
            verdict=verdict_of(value, limits),
            expected=_outcome(expected, name, trial.variant, metric),
            dtype=_word(dtype),
            seed=seed,
            note=note,
        )


def _outcome(expected: Expected, name: str, variant: str, metric: str) -> Any:
    """Return the outcome expected of a number; that of a bias far out follows from whether a stretch is bounded."""
    if name == "D1b" and variant == "far":
        stretch = expected.outcome("D1b")
        return "zero" if stretch == "bounded" else stretch
    if metric in ("entropy", "bias", "phase"):
        return None
    return expected.outcome(name, variant, metric)


def _row(
    name: str,
    metric: Any,
    value: float | None,
    verdict: Verdict,
    seed: int,
    dtype: torch.dtype,
    note: str,
) -> Measured:
    return Measured(
        intervention=name,
        metric=metric,
        value=value,
        verdict=verdict,
        seed=seed,
        dtype=_word(dtype),
        note=note,
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
