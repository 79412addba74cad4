"""What `visionpos encodings` knows: the shipped encodings that fit a filter, and how far two of them are apart."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

from visionpos import config
from visionpos.cli.inputs import grid_of
from visionpos.encodings import spec_type
from visionpos.errors import PositionError, did_you_mean


def shipped_rows(kind: str | None, match: str | None) -> list[dict[str, Any]]:
    """Return name, kind and source of the shipped encodings that fit.

    Raises:
        PositionError: if there is no such kind, or nothing fits.
    """
    if kind is not None:
        spec_type(kind)
    rows = []
    for name, file in config.shipped("encodings").items():
        data = config.read_yaml(file.read_text(encoding="utf-8"), source=f"{name}.yaml")
        source = data.get("about", {}).get("source", "")
        row = {"name": name, "kind": config.load_encoding(name).kind, "source": source}
        if kind in {None, row["kind"]} and (match or "").lower() in " ".join(row.values()).lower():
            rows.append(row)
    if not rows:
        raise PositionError(
            f"match is {match!r}; no shipped encoding {'' if kind is None else f'of kind {kind} '}has it in its name, "
            f"kind or source. `visionpos encodings` lists all.{did_you_mean(match, config.shipped('encodings'))}"
        )
    return rows


def difference(pair: tuple[str, str], grid: str, to: str | None) -> dict[str, Any]:
    """Return how far two encodings or recipes are apart, in the first model and on the first grid that fits both."""
    from visionpos import Dims
    from visionpos.dialects import compare, named_pair

    first, second = named_pair(*pair)
    refusals = []
    for there, heads in product([to] if to else [grid, "8x8", "8x14x14"], (6, 8, 12)):
        dims = Dims(embed_dim=64 * heads, num_heads=heads, depth=12)
        try:
            found = compare(first, second, dims=dims, grid=grid_of(grid), to=grid_of(there))
        except PositionError as refusal:
            refusals.append(refusal)
        else:
            return {"to": there, "heads": heads, **asdict(found)}
    raise refusals[0]


def check_company(what: str, others: dict[str, Any]) -> None:
    """Refuse options that would be ignored beside another.

    Raises:
        PositionError: naming those that were given.
    """
    given = [name for name, value in others.items() if value]
    if given:
        raise PositionError(
            f"{' and '.join(given)} mean nothing to {what}; one question a call is required. Leave them out."
        )
