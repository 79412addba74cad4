"""Triton where it is installed. Without it the kernel files still import, and a launch says what is missing."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from visionpos.errors import PositionError

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language

    AVAILABLE = True
    tl: Any = triton.language
    jit: Any = triton.jit
else:  # CPU and macOS builds of torch come without it
    AVAILABLE = False
    tl = None

    def jit(function: Any = None, **_: Any) -> Any:
        """Return the function as it is: nothing can launch it."""
        return function if function is not None else lambda late: late


def interpreted() -> bool:
    """Return whether Triton runs kernels in Python, on CPU tensors (`TRITON_INTERPRET=1` before its import)."""
    return AVAILABLE and os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


def check_launchable(device_type: str) -> None:
    """Refuse a launch that Triton cannot run.

    Raises:
        ImportError: without Triton.
        PositionError: for tensors that are not on a CUDA device.
    """
    if not AVAILABLE:
        raise ImportError(
            "triton is not installed, and these kernels are written in it. Install the CUDA build of torch, or use "
            "visionpos.rotate, which runs anywhere."
        )
    if device_type != "cuda" and not interpreted():
        raise PositionError(
            f"q is on {device_type!r}; a CUDA tensor is required. Use visionpos.rotate, which runs anywhere."
        )
