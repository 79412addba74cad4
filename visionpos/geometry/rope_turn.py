"""RopeTurn: position ids of one axis in, the Rotation of one ladder out; every document by its own length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles
from visionpos.geometry.points import check_finite, readable
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.rotation import Pairing, Rotation
from visionpos.geometry.sequence import check_alike, check_ids, document_lengths
from visionpos.geometry.stretch import Stretch

WHOLE_TO = 2**24  # the last id that float32 tells from its neighbours
EXACT_BEYOND = 2**17  # float32 angles lose more than 0.01 rad from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTurn:
    """The turn of queries and keys by one ladder.

    Args:
        rope: ladder base, share of channels that turn, and stretching.
        head_dim: channels of a head.
        pairing: which two channels turn together.
        accuracy: "reference" forms angles in float32 as published code does, "exact" in float64; None is "exact" beyond
            2**17, and where ids cannot be looked at: on other devices than the CPU, and in graphs.

    Raises:
        PositionError: for a field of another kind.

    Example:
        >>> RopeTurn(rope=RopeParams(theta=1e4), head_dim=8)(torch.arange(5)).cos.shape
        torch.Size([5, 4])
    """

    rope: RopeParams
    head_dim: int
    pairing: Pairing = "half"
    accuracy: Literal["reference", "exact"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, ids: Tensor, documents: Tensor | None = None) -> Rotation:
        """Return the rotation at position ids.

        Args:
            ids: `[n]` or `[b, n]`, restarting with every document: whole numbers, or float32 and float64 between them
                where the ladder does not go by length.
            documents: like ids, the document of every token; one a row when None. They matter where the stretching goes
                by length (dynamic NTK, LongRoPE): each document is then turned as it is alone.

        Returns:
            cos and sin `[n, pairs]`, or `[b, 1, n, pairs]`, float32.

        Raises:
            PositionError: if ids are halves, float32 beyond 2**24 or hold no numbers, documents differ in shape, or the
                ladder does not fit head_dim.
        """
        given: Any = ids
        if getattr(given, "dtype", None) not in (torch.float32, torch.float64) or not given.ndim:
            check_ids(ids, "ids")
        check_finite(ids, "ids")
        if ids.dtype == torch.float32 and readable(ids) and bool((ids.abs() > WHOLE_TO).any()):
            raise PositionError(
                f"ids are float32 up to {float(ids.abs().max()):.0f}; whole numbers are required beyond 2**24, from "
                "which on float32 has no odd ones. Make them with dtype=torch.int64."
            )
        if documents is not None:
            check_alike(documents, ids)
        dtype = torch.float64 if self._is_exact(ids) else torch.float32
        freqs = self._freqs(ids, documents, dtype)
        turns = angles(ids.to(dtype)[..., None, None], freqs).squeeze(-2)  # [..., n, pairs]
        turns = turns.unsqueeze(-3) if ids.ndim > 1 else turns
        rotation = Rotation.of(turns, self.pairing, scale=self.rope.gain)
        return Rotation(rotation.cos.float(), rotation.sin.float(), self.pairing)

    def _is_exact(self, ids: Tensor) -> bool:
        """Return whether angles are formed in float64."""
        if self.accuracy is not None:
            return self.accuracy == "exact"
        near = readable(ids) and (not ids.numel() or int(ids.abs().max()) <= EXACT_BEYOND)
        return not near

    def _freqs(self, ids: Tensor, documents: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return `[1, pairs]`, or where length matters `[..., n, 1, pairs]`: the ladder of every token."""
        if not _goes_by_length(self.rope) or not ids.numel():
            return self.rope.frequencies(self.head_dim, dtype=dtype).to(ids.device)
        lengths, owner = document_lengths(ids, documents).unique(return_inverse=True)
        ladders = [
            self.rope.frequencies(self.head_dim, length=length, dtype=dtype)
            for length in lengths.tolist()
        ]
        return torch.stack(ladders).to(ids.device)[owner]


def _goes_by_length(rope: RopeParams) -> bool:
    """Return whether the ladder depends on the length of a document."""
    return rope.scaling is not None and type(rope.scaling).at_length is not Stretch.at_length
