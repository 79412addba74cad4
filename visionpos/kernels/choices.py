"""Names that the kernels and what calls them share; nothing is imported for them."""

from __future__ import annotations

from typing import Literal

Accuracy = Literal["reference", "exact"]
Norm = Literal["rms", "layer", "l2"]
Rounding = Literal["once", "twice", "none"]
