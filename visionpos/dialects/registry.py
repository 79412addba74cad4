"""The rows of `configs/dialects/*.yaml`: a smallest input, and the readings that sources give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from visionpos.config import encoding_spec, parse, read_yaml, shipped
from visionpos.encodings import Biasing, Dims, Rotary, build
from visionpos.errors import PositionError
from visionpos.geometry import Grid, resample

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_STRICT: dict[str, str] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one group of sources makes of an input.

    Args:
        names: the dialects, or the sources, that read it so.
        value: what comes out: numbers that the probe computes, or words under the probe "stated".
        spec: what the probe computes with; None under "stated".
        used_by: models and libraries.
        known_fault: true if the value is pinned so that it is seen, not because it is right.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    names: tuple[str, ...]
    value: tuple[float, ...] | str
    spec: dict[str, Any] | None = None
    used_by: str = ""
    known_fault: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One place where sources differ.

    Args:
        topic: heading in docs/dialects.md.
        what: the difference in one sentence.
        input: the smallest input that shows it, in words.
        probe: which computation the readings share: "resample", "add", "angle", "turn" or "bias"; "stated" where the
            values are no few numbers, and a test pins them.
        at: what the probe needs: sizes, grid, token, the unit channel or the table's column, first and count of the
            numbers shown; under "stated" the test, as path::function.
        readings: at least two.
        source: where it is discussed.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    topic: str
    what: str
    input: str
    probe: str
    at: dict[str, Any]
    readings: tuple[Reading, ...]
    source: str = ""


def dialect_rows() -> list[Row]:
    """Return every shipped row, in the order of the files.

    Raises:
        ConfigError: if a file has an unknown key or a probe that is not known.
    """
    rows: list[Row] = []
    for name, file in shipped("dialects").items():
        data = read_yaml(file.read_text(encoding="utf-8"), source=f"{name}.yaml")
        rows += parse(list[Row], data["rows"], source=f"{name}.yaml")
    return rows


def reading_value(row: Row, reading: Reading) -> Tensor:
    """Return what this package computes for a reading, `[k]` float64.

    Raises:
        PositionError: if the row's probe is unknown.
    """
    if row.probe not in _PROBES:
        raise PositionError(f"probe is {row.probe!r}; it must be one of {', '.join(_PROBES)}.")
    values = _PROBES[row.probe](row.at, reading.spec or {}).detach().double().flatten()
    first = int(row.at.get("first", 0))
    return values[first : first + int(row.at.get("count", len(values)))]


def _resample_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    """Return the first column of a table whose rows hold 0, 1, 2, ..., or `at`'s column, on another grid."""
    source, target = Grid(*at["source"]), Grid(*at["target"])
    column = torch.tensor(at.get("column", range(source.height)), dtype=torch.float64)
    table = column.repeat_interleave(source.width).unsqueeze(-1)
    moved = resample(table, source=source, target=target, recipe=spec["recipe"])
    return moved.view(target.height, target.width)[:, 0]


def _encoding(at: dict[str, Any], spec: dict[str, Any]) -> Any:
    sizes = {"num_heads": 1, "depth": 1, **at["dims"]}
    return build(encoding_spec(spec, source="dialects"), Dims(**sizes))


def _token(at: dict[str, Any]) -> tuple[Grid, int]:
    """Return the grid and the row-major number of the probed token, (y, x) or (t, y, x)."""
    grid = Grid(*at["grid"])
    *frame, y, x = at["token"]
    return grid, (sum(frame) * grid.height + y) * grid.width + x


def _add_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    grid, token = _token(at)
    vectors: Tensor = _encoding(at, spec)(grid)
    return vectors[token]


def _angle_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    grid, token = _token(at)
    rope: Rotary = _encoding(at, spec)
    turns: Tensor = rope.angles(rope.points(grid))
    return turns[..., token, :]


def _turn_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    """Return what becomes of a head whose one channel is 1 and whose others are 0."""
    grid, token = _token(at)
    rope: Rotary = _encoding(at, spec)
    unit = torch.eye(rope.dims.channels)[at.get("unit", 0)].expand(1, 1, grid.size, -1)
    turned: Tensor = rope(grid).apply(unit)
    return turned[0, 0, token]


def _bias_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    bias: Biasing = _encoding(at, spec)
    return bias.values(torch.tensor(at["offset"], dtype=torch.float32))


_PROBES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Tensor]] = {
    "resample": _resample_probe,
    "add": _add_probe,
    "angle": _angle_probe,
    "turn": _turn_probe,
    "bias": _bias_probe,
}
