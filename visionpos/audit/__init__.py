"""The audit: prove by intervention what a position scheme does, and see it.

`run` looks at what its target is; an auditor's file is imported when it is first needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from visionpos.audit.interventions import INTERVENTIONS, Intervention
from visionpos.audit.outcome import OUTCOMES, VERDICTS, Band, agrees, band, verdict_of
from visionpos.audit.result import AuditResult, Found, Measured
from visionpos.audit.run import run

if TYPE_CHECKING:
    from visionpos.audit.card import curve
    from visionpos.audit.position_log import PositionLog

_LATER: dict[str, tuple[str, str]] = {  # name -> file, name in it
    "curve": ("card", "curve"),
    "PositionLog": ("position_log", "PositionLog"),
}

if not TYPE_CHECKING:  # a type checker would take any name as given

    def __getattr__(name: str) -> Any:
        """Return a public name, importing the file that holds it (PEP 562)."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        file, own = _LATER[name]
        value = getattr(import_module(f"{__name__}.{file}"), own)
        globals()[name] = value
        return value


__all__ = [
    "INTERVENTIONS",
    "OUTCOMES",
    "VERDICTS",
    "AuditResult",
    "Band",
    "Found",
    "Intervention",
    "Measured",
    "PositionLog",
    "agrees",
    "band",
    "curve",
    "run",
    "verdict_of",
]
