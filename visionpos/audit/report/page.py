"""Pages: a template and plain data become one HTML text that needs no network."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@lru_cache(maxsize=1)  # compiled templates; they never change while a process runs
def _environment() -> Environment:
    # Everything that is filled in is escaped; only the package's own style and scripts are not.
    found = Environment(
        loader=PackageLoader("visionpos.audit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    found.globals["asset"] = lambda name: Markup(found.loader.get_source(found, name)[0])  # type: ignore[union-attr] # noqa: S704 (a file of this package)
    return found


def render(template: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: file name in `templates/`.
        **values: what it names; texts are escaped, so that a hostile name stays a name.
    """
    return _environment().get_template(template).render(version=_version(), **values)


def _version() -> str:
    try:
        return version("visionpos")
    except PackageNotFoundError:  # a folder on the path, not installed
        return "(not installed)"


def number(value: float | None) -> str:
    """Return a number as a page shows it; a dash where there is none.

    Example:
        >>> number(1.23456e-7), number(0.0), number(None), number(float("nan"))
        ('1.23e-07', '0', '–', 'NaN')
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    return f"{value:.3g}"
