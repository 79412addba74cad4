"""What each scheme should do under each intervention, read from configs/audit/outcomes.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from visionpos.audit.outcome import Outcome
from visionpos.config import load_data, parse

_FORBID: dict[str, str] = {"extra": "forbid"}
_ANY = "*"
_UNKNOWN = "anything"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One outcome.

    Args:
        outcome: zero, bounded, nonzero or undefined; None takes back what the law says: it depends on settings.
        A: least and largest change of attention that the source measured, over settings.
        differs: why the outcome is another than the source's table says; empty where it is the same.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID

    outcome: Outcome | None
    A: tuple[float, float] | None = None
    differs: str = ""


Cells = dict[str, Cell]
When = dict[str, tuple[str | bool | int | float | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Outcomes that follow from how coordinates are numbered.

    Args:
        laws: the laws it changes.
        when: as in `Row`.
        cells: what it lays on the law's.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID

    laws: tuple[str, ...]
    when: When
    cells: Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcomes of one scheme.

    Args:
        scheme: its name in words.
        kind: the kind of its Spec.
        source: where the outcomes come from.
        when: dotted field of the Spec -> values it may have, "*" for any but None; all must hold.
        law: whose cells it starts from; none when empty.
        silent: metrics that stay zero whatever the scheme does, since it acts elsewhere.
        cells: "S1", or "S1 17 cells" for one variant alone.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID

    scheme: str
    kind: str
    source: str
    when: When = field(default_factory=dict)
    law: str = ""
    silent: tuple[str, ...] = ()
    cells: Cells = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID

    laws: dict[str, Cells]
    views: tuple[View, ...]
    rows: tuple[Row, ...]


@lru_cache(maxsize=1)
def _table() -> _Table:
    return parse(_Table, load_data("outcomes", "audit"), source="outcomes.yaml")


def rows() -> tuple[Row, ...]:
    """Return all rows in order, each with the cells that it states itself."""
    return _table().rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is expected of one scheme.

    Args:
        row: its row.
        cells: those of its law, its own laid on them, and those that its numbering of coordinates says last.
    """

    row: Row
    cells: Mapping[str, Cell]

    def cell(self, intervention: str, variant: str = "") -> Cell | None:
        """Return the cell of a variant, or that of its intervention; None where nothing is known."""
        own = self.cells.get(f"{intervention} {variant}") if variant else None
        return own or self.cells.get(intervention)

    def outcome(self, intervention: str, variant: str = "", metric: str = "") -> Outcome | None:
        """Return what a number of a variant should prove; None where nothing is known."""
        cell = self.cell(intervention, variant)
        if cell is None:
            return None
        moves = cell.outcome in ("nonzero", "bounded")
        return "zero" if moves and metric in self.row.silent else cell.outcome


def expected_of(spec: Any) -> Expected:
    """Return what is expected of a scheme: of what the table does not know, only what holds for every scheme.

    Args:
        spec: its Spec; None for no position.

    Example:
        >>> expected_of(None).outcome("S1", "17 cells")
        'zero'
    """
    table = _table()
    kind = "none" if spec is None else getattr(spec, "kind", "")
    for row in table.rows:
        if row.kind == kind and _fits(spec, row.when):
            cells = {**table.laws.get(row.law, {}), **row.cells}
            for view in table.views:
                if row.law in view.laws and _fits(spec, view.when):
                    cells.update(view.cells)
            return Expected(row=row, cells=cells)
    unknown = Row(scheme=str(kind or "unknown"), kind=str(kind), source="", law=_UNKNOWN)
    return Expected(row=unknown, cells=table.laws[_UNKNOWN])


def always_of(expected: Expected) -> Cells:
    """Return those cells of a scheme that do not ask where tokens stand: they hold on a single line of tokens too."""
    return {key: cell for key, cell in expected.cells.items() if key in _table().laws[_UNKNOWN]}


def _fits(spec: Any, when: When) -> bool:
    """Return whether fields of a Spec have the values asked for."""
    for path, values in when.items():
        found = spec
        for name in path.split("."):
            found = getattr(found, name, None)
        known = any(
            value == found and isinstance(value, bool) == isinstance(found, bool)
            for value in values
        )
        if not known and not (_ANY in values and found is not None):
            return False
    return True
