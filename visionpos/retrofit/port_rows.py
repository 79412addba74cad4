"""The seam table, level two: for an attention class, where q and k pass, on which grid, and where a bias enters.

The rows are data, configs/retrofit/attentions.yaml; here are their words and how they are found. `seams` has level one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from visionpos.config import read_yaml, shipped
from visionpos.geometry.rotation import Pairing

if TYPE_CHECKING:
    from torch import nn

Row = TypeVar("Row")

# What a norm hands out, or the order of heads, slots and channels on the last axis of a projection.
Order = Literal["bhnd", "bnhd", "slots", "heads"]
LatticeKind = Literal[
    "call",
    "attribute",
    "nhwc",
    "nchw",
    "argument",
    "square",
    "index",
    "unrolled",
    "container",
    "called",
    "patches",
]
BiasKind = Literal["argument", "method", "offsets", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """One tensor that carries q, k, or both.

    Args:
        at: the submodule whose output it is, `*` for one a head; "@1" is argument 1 of the attention itself.
        holds: what lies on it, in order, one letter a slot: q and k turn, all else passes.
        order: "bhnd", "bnhd" (norms), "slots" (all heads of a slot together) or "heads" (all slots of a head together).
        maps: where it has four sizes, they are `[b, channels, y, x]`.
    """

    at: str
    holds: str
    order: Order
    maps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """Where an attention's tokens lie.

    Args:
        kind: "call" (the grid of the forward pass), "attribute" (two sides, or one, on the attention or the model),
            "nhwc", "nchw" (shape of its input), "argument" (sides in its arguments), "square" (a square block by
            construction), "index" (read off a table of offsets), "unrolled" (the model's own permutation), "container"
            (the map that an enclosing module sees), "called" (sides in the arguments of a neighbour), "patches" (sides
            of a patch module).
        name: attribute or argument.
        index: position of the argument, where it is not given by name.
        of: "self" or "model": whose attribute.
        anchor: path of the other module, from the model.
        queries: stride of the queries on the grid: a number, or an attribute.
        keys: side of the squares that keys are averaged over: an attribute.
    """

    kind: LatticeKind = "call"
    name: str = ""
    index: int = 0
    of: Literal["self", "model"] = "self"
    anchor: str = ""
    queries: int | str = 1
    keys: int | str = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasSeams:
    """Where a bias enters the logits.

    Args:
        kind: "argument" (added to an argument of the attention), "method" (to what a method returns), "offsets" (to
            a network's output at all differences), "pairs" (to a network's output at all pairs).
        name: argument or method.
        index: position of the argument, where it is not given by name.
        at: submodule, "" for the attention itself.
    """

    kind: BiasKind
    name: str = ""
    index: int = 0
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSeams:
    """One case of an attention class.

    Args:
        when: attribute -> value the case is for; `true` and `false` stand for any true or false value, `path` for the
            last segment of the module's path.
        refuse: why q and k cannot be turned, with {name} for the class; None where they can.
        taps: where q and k pass.
        grid: where the tokens lie.
        prefix: tokens in front of the grid: a number or an attribute of the model; None: as the grid says.
        heads: attribute that counts query heads.
        heads_factor: heads at the port for one of them; differential attention splits every head in two.
        late: biases added to q, k and v after the port, by name.
        flag: attribute that must be true while the port acts.
        pairing: of the attention's own rotary encoding, where the model keeps none.
        bias: where a bias enters; the first that is present.
    """

    when: dict[str, Any] | None = None
    refuse: str | None = None
    taps: tuple[Tap, ...] = ()
    grid: Lattice = Lattice()
    prefix: int | str | None = None
    heads: str = "num_heads"
    heads_factor: int = 1
    late: tuple[str, ...] = ()
    flag: str | None = None
    pairing: Pairing | None = None
    bias: tuple[BiasSeams, ...] = ()

    @property
    def q(self) -> str:
        """Return where q passes."""
        return next(tap.at for tap in self.taps if "q" in tap.holds)

    @property
    def k(self) -> str:
        """Return where k passes."""
        return next(tap.at for tap in self.taps if "k" in tap.holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Attentions of one model class that find their grid at another module; see `Lattice` and `PortSeams.prefix`."""

    path: str
    grid: Lattice
    prefix: int | str = 0


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, tuple[PortSeams, ...]], dict[str, tuple[Place, ...]]]:
    """Return class -> cases, and model class -> places."""
    text = shipped("retrofit")["attentions"].read_text(encoding="utf-8")
    data = read_yaml(text, source="attentions.yaml")
    rows = {key: tuple(_case(entry) for entry in cases) for key, cases in data["rows"].items()}
    places = {
        key: tuple(Place(**{**entry, "grid": Lattice(**entry["grid"])}) for entry in entries)
        for key, entries in data["places"].items()
    }
    return rows, places


def _case(entry: dict[str, Any]) -> PortSeams:
    made = dict(entry)
    made["taps"] = tuple(Tap(**tap) for tap in entry.get("taps", ()))
    made["grid"] = Lattice(**entry.get("grid", {}))
    made["late"] = tuple(entry.get("late", ()))
    made["bias"] = tuple(BiasSeams(**bias) for bias in entry.get("bias", ()))
    return PortSeams(**made)


def known_attentions() -> list[str]:
    """Return the names of the attention classes that have a row."""
    return sorted({key.rpartition(".")[2] for key in _tables()[0]})


def case_of(module: nn.Module, path: str) -> PortSeams | None:
    """Return the case of a module that is an attention with a row, None for any other module."""
    for case in nearest(module, _tables()[0]) or ():
        if all(_holds(module, path, *test) for test in (case.when or {}).items()):
            return case
    return None


def placed(model: nn.Module, path: str, case: PortSeams) -> PortSeams:
    """Return a case with the grid that the model's class has for this path, if it has one."""
    for place in nearest(model, _tables()[1]) or ():
        fit = re.fullmatch(place.path, path)
        if fit is not None:
            grid = replace(place.grid, anchor=fit.expand(place.grid.anchor))
            return replace(case, grid=grid, prefix=place.prefix)
    return case


def nearest(module: nn.Module, rows: dict[str, Row]) -> Row | None:
    """Return the row of the nearest base class that has one."""
    for base in type(module).__mro__:
        row = rows.get(f"{base.__module__}.{base.__qualname__}".removeprefix("timm."))
        if row is not None and base.__module__.startswith("timm."):
            return row
    return None


def _holds(module: nn.Module, path: str, name: str, wanted: Any) -> bool:
    if name == "path":
        return bool(path.rpartition(".")[2] == wanted)
    value = getattr(module, name, None)
    if isinstance(wanted, bool):
        return wanted == (value is not None and value is not False)
    return bool(value == wanted)
