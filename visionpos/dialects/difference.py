"""A ruler for two encodings, or two resampling recipes: what each does to the same input, and where they part."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from visionpos.config import encoding_spec, load_encoding, shipped
from visionpos.dialects.registry import dialect_rows
from visionpos.encodings import (
    Additive,
    Biasing,
    ConvRelative,
    Extending,
    Gpsa,
    PairBiasing,
    PromptEncoder,
    QueryBiasing,
    Rotary,
    Turning,
    build,
)
from visionpos.errors import PositionError, did_you_mean
from visionpos.geometry import RECIPES, resample

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.encodings import Dims, EncodingSpec
    from visionpos.geometry import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two encodings are apart on one grid.

    Args:
        quantity: what was compared: "vectors", "resampled table", "turned vectors" (one random head), "logit bias",
            "attention", "attention output", "tokens" (random ones), or "prompt tokens" (a click, a box, and both).
        largest: largest absolute difference.
        relative: norm of the difference over the norm of the first; infinite if only the first is zero.
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


def named_pair(first: str, second: str) -> tuple[EncodingSpec | str, EncodingSpec | str]:
    """Return what two names mean to `compare`: recipes if both name one, and encodings if they can.

    An encoding is a shipped name, a reading of `dialect_rows`, or a YAML file. "mae" and others name a recipe too.

    Raises:
        PositionError: if a name means nothing.

    Example:
        >>> named_pair("timm", "dinov2")
        ('timm', 'dinov2')
        >>> named_pair("timm", "timm_reversed")[0].kind
        'sincos'
    """
    if first in RECIPES and second in RECIPES:
        return first, second
    readings = {
        name: reading.spec
        for row in dialect_rows()
        for reading in row.readings
        for name in reading.names
        if reading.spec and "kind" in reading.spec
    }
    return _named(first, readings), _named(second, readings)


def _named(name: str, readings: dict[str, Any]) -> EncodingSpec | str:
    files = shipped("encodings")
    if name in files or Path(name).suffix in {".yaml", ".yml"}:
        return load_encoding(name)
    if name in readings:
        return encoding_spec(readings[name], source=name)
    if name in RECIPES:
        return name
    known = (*files, *readings, *RECIPES)
    raise PositionError(
        f"{name!r} is no shipped encoding, no dialect, no recipe and no YAML file; one of these is required. See "
        f"`visionpos encodings` and docs/dialects.md.{did_you_mean(name, known)}"
    )


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
            f"the first gives {quantity} {tuple(a.shape)} and the second {other} {tuple(b.shape)}; only two of one "
            "kind can be compared. Choose encodings that enter by the same door."
        )
    gap = (a - b).abs()
    worst = gap.flatten(0, -3).amax(0) if gap.ndim > 2 else gap  # [n, channels]
    token, channel = divmod(int(worst.argmax()), worst.shape[-1])
    size = float(a.norm())
    return Difference(
        quantity=quantity,
        largest=float(gap.max()),
        relative=float(gap.norm()) / size if size else (inf if gap.any() else 0.0),
        token_yx=(token % (to.height * to.width) // to.width, token % to.width),
        channel=channel,
        differing=float((worst.amax(-1) > 1e-5).float().mean()),
    )


def _rendered(what: EncodingSpec | str, dims: Dims, grid: Grid, to: Grid) -> tuple[str, Tensor]:
    """Return what an encoding does on a grid, with one random draw for all that learn something."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if isinstance(what, str):
            table = torch.randn(grid.size, dims.embed_dim)
            return "resampled table", resample(table, source=grid, target=to, recipe=what)
        encoding = build(what, dims).eval()
        for weight in encoding.parameters():
            weight.copy_(torch.randn_like(weight))
        quantity, values = _applied(encoding, dims, to)
        return quantity, values.detach()


def _applied(encoding: Any, dims: Dims, to: Grid) -> tuple[str, Tensor]:
    """Return the name and the values of what an encoding gives, or does to a random head and random tokens."""
    draw = torch.Generator().manual_seed(1)  # the same, however many weights were drawn before
    head = torch.randn(1, dims.num_heads, to.size, dims.channels, generator=draw)
    tokens = torch.randn(1, to.size, dims.embed_dim, generator=draw)
    if isinstance(encoding, Additive):
        return "vectors", encoding(to)
    if isinstance(encoding, Biasing):
        return "logit bias", encoding(to)
    if isinstance(encoding, (Rotary, Turning)):
        # What a head becomes, not its angles: pairings that join other channels differ too.
        return "turned vectors", encoding(to).apply(head)[0]
    if isinstance(encoding, PromptEncoder):
        return "prompt tokens", _prompted(encoding)
    return _content(encoding, head, tokens, to)


def _content(encoding: Any, head: Tensor, tokens: Tensor, to: Grid) -> tuple[str, Tensor]:
    """Return the same for an encoding that needs queries, attention or tokens."""
    if isinstance(encoding, QueryBiasing):
        return "logit bias", encoding(head, to)[0]
    if isinstance(encoding, PairBiasing):
        return "logit bias", encoding(head, head.flip(-1), to)[0]
    if isinstance(encoding, Extending):
        q, k = encoding(torch.zeros_like(head), torch.zeros_like(head), tokens, to)
        return "logit bias", encoding.scale * (q @ k.mT)[0]
    if isinstance(encoding, ConvRelative):
        return "attention output", encoding(head, head, to)[0]
    if isinstance(encoding, Gpsa):
        return "attention", encoding((head @ head.mT).softmax(-1), to)[0]
    return "tokens", encoding(tokens, to)[0]


def _prompted(encoder: PromptEncoder) -> Tensor:
    """Return the tokens of a click, of a box, and of both in a wide photo; a token that a dialect lacks is zero."""
    frame = encoder.frame((600, 960))
    click = {"points": torch.tensor([[480.0, 150.0]]), "labels": torch.tensor([1])}
    box = {"boxes": torch.tensor([90.0, 60.0, 700.0, 500.0])}
    padded = torch.zeros(3, 4, encoder.dims.embed_dim)
    for row, prompts in zip(padded, (click, box, click | box), strict=True):
        sparse, _ = encoder(frame, **prompts)
        row[: len(sparse)] = sparse
    return padded.flatten(0, 1)
