"""The two exceptions of the package, and what an error says to a name that is nearly right."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PositionError(ValueError):
    """Raised when a value, shape, grid or file cannot give a right position.

    The message names the argument, its value, the constraint and the remedy.
    """


class ConfigError(PositionError):
    """Raised when a YAML file, a spec or an override is not valid."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?", to end an error message with, or "" if no known name is near.

    Example:
        >>> did_you_mean("dinvo3", ["dinov2", "dinov3", "mae"])
        ' Did you mean dinov3 or dinov2?'
    """
    from difflib import get_close_matches

    names, wanted = list(dict.fromkeys(known)), str(name).lower()
    begins = [one for one in names if len(wanted) > 2 and one.startswith(wanted)]
    near = list(dict.fromkeys([*begins, *get_close_matches(wanted, names, n=3)]))[:3]
    return f" Did you mean {' or '.join(near)}?" if near else ""


LISTED = 12  # names that a message lists; more of them would bury it


def one_of(name: object, known: Iterable[str]) -> str:
    """Return what an unknown name could have been, to end an error message with: the nearest first, then the first few.

    Example:
        >>> one_of("dinvo3", ["dinov2", "dinov3", "mae"])
        'Did you mean dinov3 or dinov2? It must be one of dinov2, dinov3, mae.'
    """
    names = list(dict.fromkeys(known))
    near = did_you_mean(name, names).lstrip()
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    listed = ", ".join(names[:LISTED])
    return f"{near} It must be one of {listed}{more}.".lstrip()
