"""Interventions: what an audit holds constant, what it changes, and what it measures; `changes` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from visionpos.audit.outcome import Symmetry
from visionpos.audit.result import Metric
from visionpos.errors import PositionError, did_you_mean

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """One change that an audit makes.

    Args:
        id: its short name, the `intervention` of a row.
        title: its name in words.
        holds: what stays as it was.
        changes: what is changed.
        metrics: what is measured.
        symmetry: "shift" where coordinates move: half precision rounds rotated channels, so its band is wider.
        stream: whether it is made on token streams alone.
    """

    id: str
    title: str
    holds: str
    changes: str
    metrics: tuple[Metric, ...]
    symmetry: Symmetry = "shift"
    stream: bool = False


def _listed() -> tuple[Intervention, ...]:
    pairs = "contents and all differences"
    return (
        Intervention(
            id="P1",
            title="content permutation",
            holds="coordinates a slot, mask",
            changes="contents change places",
            metrics=("Eq", "A"),
            symmetry="permutation",
        ),
        Intervention(
            id="P2",
            title="joint permutation",
            holds="which content has which coordinate",
            changes="the order of both in the array",
            metrics=("Eq", "A"),
            symmetry="permutation",
        ),
        Intervention(
            id="S1",
            title="shift by whole cells",
            holds=pairs,
            changes="every coordinate grows by 1, 17, 1000 cells",
            metrics=("A", "O"),
        ),
        Intervention(
            id="S-half",
            title="shift by half a cell",
            holds=pairs,
            changes="every coordinate grows by half a cell",
            metrics=("A", "O"),
        ),
        Intervention(
            id="D1a",
            title="stretch with the grid's size",
            holds="contents, order of coordinates, coordinates relative to the grid's sides",
            changes="coordinates and the sides told to the scheme double",
            metrics=("A", "O"),
        ),
        Intervention(
            id="D1b",
            title="stretch alone",
            holds="contents, order of coordinates, the sides told to the scheme",
            changes="coordinates double",
            metrics=("A", "O"),
        ),
        Intervention(
            id="D2",
            title="gap between two groups of keys",
            holds="contents, differences within each group",
            changes="coordinates of one half of the tokens move away from the other's",
            metrics=("A", "O"),
        ),
        Intervention(
            id="R1",
            title="flip of an axis",
            holds="contents, sizes of all differences",
            changes="the sign of differences along x",
            metrics=("A", "O"),
        ),
        Intervention(
            id="R2",
            title="transposition",
            holds="contents, the set of differences with axes swapped",
            changes="y and x change roles",
            metrics=("A", "O"),
        ),
        Intervention(
            id="G1",
            title="out of range",
            holds="weights, statistics of contents",
            changes="the grid has twice the sides",
            metrics=("A", "entropy", "outside", "bias", "phase"),
        ),
        Intervention(
            id="N1",
            title="duplicate keys",
            holds="content of two keys, which is equal",
            changes="only their coordinates differ",
            metrics=("weights",),
            symmetry="permutation",
        ),
        Intervention(
            id="N2",
            title="ablation",
            holds="contents, weights",
            changes="the scheme is taken out",
            metrics=("A", "O"),
            symmetry="permutation",
        ),
        Intervention(
            id="N3",
            title="missing evidence",
            holds="all tokens that are not masked",
            changes="content and coordinate of a masked token are scrambled",
            metrics=("A", "O"),
            symmetry="permutation",
        ),
        Intervention(
            id="C1",
            title="causal control",
            holds="contents, no position scheme",
            changes="the mask becomes causal, then tokens change places",
            metrics=("Eq",),
            symmetry="permutation",
        ),
        Intervention(
            id="zoom",
            title="same view, more tokens",
            holds="the view: coordinates keep the trained extent",
            changes="the grid has twice the sides",
            metrics=("A", "O"),
        ),
        Intervention(
            id="extend",
            title="wider view, same scale",
            holds="the spacing of cells",
            changes="the grid has twice the sides",
            metrics=("A", "O"),
        ),
        Intervention(
            id="prefix",
            title="prefix tokens under a shift",
            holds=pairs + " of patches",
            changes="every patch coordinate grows; prefix tokens removed, rotated at origin or centre, or unrotated",
            metrics=("A", "O"),
        ),
        Intervention(
            id="T1",
            title="stretch of time",
            holds="contents, y and x",
            changes="differences in t double",
            metrics=("A", "O"),
            stream=True,
        ),
        Intervention(
            id="F1",
            title="change of frame rate",
            holds="seconds between frames, contents",
            changes="how many frames a second are sampled",
            metrics=("A", "O"),
            stream=True,
        ),
        Intervention(
            id="S-axis",
            title="shift of one axis",
            holds=pairs,
            changes="one axis grows on every token",
            metrics=("A", "O"),
            stream=True,
        ),
        Intervention(
            id="M1",
            title="media as raster",
            holds="contents, order of tokens",
            changes="a picture's ids become a line of 1-D ids",
            metrics=("A", "O"),
            stream=True,
        ),
        Intervention(
            id="V1",
            title="finer increments",
            holds="contents, order of tokens",
            changes="ids of a picture's tokens grow by a quarter each",
            metrics=("A", "O"),
            stream=True,
        ),
    )


INTERVENTIONS: dict[str, Intervention] = {one.id: one for one in _listed()}


def chosen(
    names: str | Iterable[str] | None, *, among: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Return ids of interventions in the registry's order, each once; all when None.

    Args:
        names: ids that a user asks for.
        among: those that the target can take; the whole registry when None.

    Raises:
        PositionError: if there is no such intervention, none is left, or it is not for this kind of target.

    Example:
        >>> chosen(["S1", "P1"])
        ('P1', 'S1')
    """
    known = tuple(INTERVENTIONS) if among is None else tuple(among)
    if names is None:
        return tuple(one for one in INTERVENTIONS if one in known)
    try:
        wanted = [names] if isinstance(names, str) else list(names)
    except TypeError:
        raise PositionError(
            f"interventions is {names!r}; a list of ids is required. Write ['P1', 'S1'], or leave it out for all."
        ) from None
    for name in wanted:
        if name not in known:
            raise PositionError(
                f"interventions holds {name!r}; one of {', '.join(known)} is required for this target."
                f"{did_you_mean(name, known)}"
            )
    if not wanted:
        raise PositionError(
            "interventions is empty; at least one id is required. Leave it out for all."
        )
    return tuple(one for one in INTERVENTIONS if one in wanted)
