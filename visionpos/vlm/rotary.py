"""Rotary layouts: from position ids to the rotation of a language model's queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Rotation, angles, section_freqs
from visionpos.vlm.grammar import LanguageSpec

Accuracy = Literal["reference", "exact"]
EXACT_BEYOND = 2**17  # float32 angles lose more than 0.01 rad from here on


def language_freqs(language: LanguageSpec, dtype: torch.dtype) -> Tensor:
    """Return `[axes, pairs]` radians per position, zero where an axis does not drive a pair."""
    return section_freqs(
        language.rotary_dim or language.head_dim,
        language.sections,
        theta=language.theta,
        order=language.order,
        dtype=dtype,
    )


def language_rotation(
    language: LanguageSpec, ids: Tensor, accuracy: Accuracy | None = None
) -> Rotation:
    """Return the rotation of queries and keys at position ids.

    Args:
        language: the rotary layout.
        ids: `[axes, n]` or `[axes, b, n]`.
        accuracy: "reference" computes angles in float32, "exact" in float64; None chooses by the largest id.

    Raises:
        PositionError: if the ids have another number of axes, or the accuracy is unknown.
    """
    if accuracy is None:
        look = ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0
        accuracy = "exact" if look and int(ids.abs().max()) > EXACT_BEYOND else "reference"
    if accuracy not in ("reference", "exact"):
        raise PositionError(f"accuracy is {accuracy!r}; it must be 'reference' or 'exact'.")
    dtype = torch.float64 if accuracy == "exact" else torch.float32
    freqs = language_freqs(language, dtype).to(ids.device)
    if ids.ndim not in (2, 3) or ids.shape[0] != len(freqs):
        raise PositionError(
            f"ids have shape {tuple(ids.shape)}; [{len(freqs)}, n] or [{len(freqs)}, b, n] is required. "
            "Pass the ids of this family's position_ids."
        )
    coords = ids.movedim(0, -1).to(dtype)  # [n, axes]
    turns = angles(coords if ids.ndim == 2 else coords.unsqueeze(1), freqs)
    rotation = Rotation.of(turns, language.pairing)
    return Rotation(rotation.cos.float(), rotation.sin.float(), rotation.pairing)
