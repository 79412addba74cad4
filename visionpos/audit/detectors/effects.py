"""Detectors of what position does to outputs: nothing at all, or what masked and reordered tokens should not do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import Check, judged
from visionpos.audit.metrics import output_change
from visionpos.audit.result import Found

DEAD = 1e-4
LEAK = 5e-6
ORDER = 5e-6


def dead_scheme(outputs: Tensor, without: Tensor) -> Found:
    """Return whether position is used at all.

    Args:
        outputs: `[..., n, d]` of a forward pass in float32 or float64.
        without: the same without position: tables zeroed, rotation left out, strength 0.
    """
    seen = output_change(outputs, without)
    check = Check(
        value=seen,
        threshold=DEAD,
        wrong=f"outputs change by {seen:.2g} when position is taken out: it is not used",
        remedy="See that the encoding is called, that its strength is not 0, and that its weights were loaded.",
        least=True,
    )
    return judged(
        "dead_scheme", [check], f"outputs change by {seen:.2g} when position is taken out"
    )


def masked_leak(
    mix: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, masked: Tensor, *, seed: int = 0
) -> Found:
    """Return whether the content of masked tokens reaches those that are seen, as through a convolution.

    Args:
        mix: from tokens `[b, n, d]` and flags `[b, n]`, True where hidden, to tokens.
        tokens: contents.
        masked: which are hidden.
        seed: of the contents that hidden tokens get instead.
    """
    draw = torch.Generator().manual_seed(seed)
    other = 3 * torch.randn(tokens.shape, generator=draw, dtype=tokens.dtype)
    hidden = masked.unsqueeze(-1)
    before, after = mix(tokens, masked), mix(torch.where(hidden, other, tokens), masked)
    change = output_change(before[~masked], after[~masked])
    check = Check(
        value=change,
        threshold=LEAK,
        wrong=f"tokens that are seen change by {change:.2g} with the content of masked ones",
        remedy="Zero masked tokens before the convolution: Peg takes masked=.",
    )
    return judged("masked_leak", [check], "masked tokens do not reach the others")


def order_dependence(run: Callable[[Tensor], Tensor], count: int, *, seed: int = 0) -> Found:
    """Return whether outputs depend on the order in which tokens with coordinates of their own are listed.

    Args:
        run: from an order `[n]` of tokens, coordinates and flags alike, to outputs that no order should change.
        count: tokens.
        seed: of the order.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    change = output_change(run(torch.arange(count)), run(order))
    check = Check(
        value=change,
        threshold=ORDER,
        wrong=f"outputs change by {change:.2g} when patches and their coordinates are listed in another order",
        remedy="Evaluate positions at the coordinates of each patch (LearnedTable.at, angles), not by the place in the "
        "list.",
    )
    return judged("order_dependence", [check], "any order of patches gives the same outputs")
