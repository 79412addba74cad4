"""Dialects: where two sources that go by one name differ, as data that can be computed, and a ruler for any two.

The rows are `configs/dialects/*.yaml`: a smallest input, and the readings that sources give it. `docs/dialects.md` is
printed from them, and a test computes every reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from visionpos.config import encoding_spec, parse, read_yaml, shipped
from visionpos.encodings import Additive, Biasing, Dims, Rotary, build
from visionpos.errors import PositionError
from visionpos.geometry import RECIPES, Grid, resample

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from visionpos.encodings import EncodingSpec

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
        probe: which computation the readings share: "resample", "add", "angle" or "bias"; "stated" where the values are
            no few numbers, and a test pins them.
        at: what the probe needs: sizes, grid, token, first and count of the channels shown; the test under "stated".
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
    """Return the first column of a table whose rows hold 0, 1, 2, ... on another grid."""
    source, target = Grid(*at["source"]), Grid(*at["target"])
    ramp = (
        torch.arange(source.height, dtype=torch.float64)
        .repeat_interleave(source.width)
        .unsqueeze(-1)
    )
    moved = resample(ramp, source=source, target=target, recipe=spec["recipe"])
    return moved.view(target.height, target.width)[:, 0]


def _encoding(at: dict[str, Any], spec: dict[str, Any]) -> Any:
    sizes = {"num_heads": 1, "depth": 1, **at["dims"]}
    return build(encoding_spec(spec, source="dialects"), Dims(**sizes))


def _token(at: dict[str, Any]) -> tuple[Grid, int]:
    """Return the grid and the row-major number of the probed token."""
    grid = Grid(*at["grid"])
    y, x = at["token"]
    return grid, y * grid.width + x


def _add_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    grid, token = _token(at)
    vectors: Tensor = _encoding(at, spec)(grid)
    return vectors[token]


def _angle_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    grid, token = _token(at)
    rope: Rotary = _encoding(at, spec)
    turns: Tensor = rope.angles(rope.points(grid))
    return turns[..., token, :]


def _bias_probe(at: dict[str, Any], spec: dict[str, Any]) -> Tensor:
    bias: Biasing = _encoding(at, spec)
    return bias.values(torch.tensor(at["offset"], dtype=torch.float32))


_PROBES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Tensor]] = {
    "resample": _resample_probe,
    "add": _add_probe,
    "angle": _angle_probe,
    "bias": _bias_probe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two encodings are apart on one grid.

    Args:
        quantity: what was compared: "vectors", "resampled table", "turned vectors" (one random head) or "logit bias".
        largest: largest absolute difference.
        relative: norm of the difference over the norm of the first.
        token_yx: token, or query token, of the largest difference.
        channel: its channel, pair or key token.
        differing: share of tokens that differ by more than float noise (1e-5).
    """

    quantity: str
    largest: float
    relative: float
    token_yx: tuple[int, int]
    channel: int
    differing: float


def compare(
    first: EncodingSpec | str, second: EncodingSpec | str, *, dims: Dims, grid: Grid, to: Grid
) -> Difference:
    """Return where and by how much two encodings, or two resampling recipes, part.

    Args:
        first: a spec, or the name of a recipe.
        second: the same kind of thing; encodings must enter by the same door.
        dims: sizes of the model.
        grid: grid that learned tables are trained on.
        to: grid they are compared on.

    Raises:
        PositionError: if the two cannot be compared.

    Example:
        >>> dims = Dims(embed_dim=8, num_heads=1, depth=1)
        >>> far = compare("timm", "dinov2", dims=dims, grid=Grid(14, 14), to=Grid(20, 30))
        >>> far.quantity, far.differing
        ('resampled table', 1.0)
    """
    (quantity, a), (other, b) = (_rendered(each, dims, grid, to) for each in (first, second))
    if quantity != other or a.shape != b.shape:
        raise PositionError(
            f"the first gives {quantity} {tuple(a.shape)} and the second {other} {tuple(b.shape)}; only two of "
            "one kind "
            "can be compared. Choose encodings that enter by the same door."
        )
    gap = (a - b).abs()
    worst = gap.flatten(0, -3).amax(0) if gap.ndim > 2 else gap  # [n, channels]
    token, channel = divmod(int(worst.argmax()), worst.shape[-1])
    return Difference(
        quantity=quantity,
        largest=float(gap.max()),
        relative=float((a - b).norm() / a.norm()),
        token_yx=(token % (to.height * to.width) // to.width, token % to.width),
        channel=channel,
        differing=float((worst.amax(-1) > 1e-5).float().mean()),
    )


def _rendered(what: EncodingSpec | str, dims: Dims, grid: Grid, to: Grid) -> tuple[str, Tensor]:
    """Return what an encoding gives on a grid, with one random table for all that learn one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if isinstance(what, str):
            if what not in RECIPES:
                raise PositionError(
                    f"{what!r} is no recipe; it must be one of {', '.join(sorted(RECIPES))}."
                )
            table = torch.randn(grid.size, dims.embed_dim)
            return "resampled table", resample(table, source=grid, target=to, recipe=what)
        encoding = build(what, dims)
        for weight in encoding.parameters():
            weight.copy_(torch.randn_like(weight))
        encoding.eval()
        if isinstance(encoding, Rotary):
            # What a head becomes, not its angles: pairings that join other channels differ too.
            head = torch.randn(dims.channels).expand(1, dims.num_heads, to.size, dims.channels)
            return "turned vectors", encoding(to).apply(head)[0]
        if isinstance(encoding, Additive):
            return "vectors", encoding(to)
        if isinstance(encoding, Biasing):
            return "logit bias", encoding(to)
        raise PositionError(
            f"{type(encoding).__name__} depends on tokens or queries; there is nothing fixed to compare."
        )


def markdown() -> str:
    """Return docs/dialects.md."""
    lines = [
        "# Dialects",
        "",
        (
            "Places where two sources that go by one name differ: a small input that shows it, what each makes "
            "of it, and "
            "who uses which. Printed from `configs/dialects/` by `make docs`; a test computes every "
            "number; words are pinned by the test that is named."
        ),
    ]
    topic = ""
    for row in dialect_rows():
        if row.topic != topic:
            topic = row.topic
            lines += ["", f"## {topic}"]
        lines += [
            "",
            f"**{row.what}** Input: {row.input}.",
            "",
            "| dialect | value | used by |",
            "|---|---|---|",
        ]
        for reading in row.readings:
            words = isinstance(reading.value, str)
            value = (
                reading.value if words else " ".join(f"{number:.6g}" for number in reading.value)
            )
            fault = " (a fault, pinned so that it is seen)" if reading.known_fault else ""
            lines.append(f"| {', '.join(reading.names)} | {value} | {reading.used_by}{fault} |")
        pinned = f"Pinned by `{row.at['test']}`." if row.probe == "stated" else ""
        source = f"Source: {row.source}." if row.source else ""
        if pinned or source:
            lines += ["", " ".join(part for part in (source, pinned) if part)]
    return "\n".join(lines) + "\n"
