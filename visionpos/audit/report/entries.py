"""The page of the atlas: entries with filters by family, scheme, model and keyword."""

from __future__ import annotations

from collections.abc import Sequence

from visionpos.audit.atlas import Entry, atlas
from visionpos.audit.report.page import render

SORTS = {
    "scheme": "Schemes of the field",
    "encoding": "Shipped encodings",
    "stream": "Families of streams",
}


def atlas_page(entries: Sequence[Entry] | None = None) -> str:
    """Return one HTML page of the atlas, which needs no network: each entry with its YAML, dialects and commands.

    Args:
        entries: from `atlas.atlas()` or `atlas.select`; all when None.
    """
    shown = atlas() if entries is None else tuple(entries)
    here = {entry.id for entry in shown}
    return render(
        "atlas.html",
        entries=shown,
        sorts=[
            (sort, words) for sort, words in SORTS.items() if any(e.sort == sort for e in shown)
        ],
        here=here,
        families=_choices(shown, "families"),
        schemes=_choices(shown, "schemes"),
        models=_choices(shown, "models"),
    )


def _choices(entries: Sequence[Entry], what: str) -> list[str]:
    """Return the words of a filter, in the order of the alphabet."""
    found = dict.fromkeys(word for entry in entries for word in getattr(entry, what))
    return sorted(found, key=str.casefold)
