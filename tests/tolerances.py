"""The one table of tolerances, and the two ways to compare with it."""

import torch
from torch import Tensor

# (rtol, atol). A table comes straight from a formula; applied went through a product or attention.
TOLERANCES: dict[torch.dtype, dict[str, tuple[float, float]]] = {
    torch.float64: {"table": (1e-12, 1e-12), "applied": (1e-12, 1e-12)},
    torch.float32: {"table": (1e-6, 1e-6), "applied": (1e-5, 1e-5)},
}

# rms(difference) / rms(expected), against the float32 result: near zero, halves have no useful
# relative error of their own.
ERROR_RATIOS: dict[torch.dtype, float] = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return rms(actual - expected) / rms(expected), in float64; 0 if both are zero everywhere."""
    reference = expected.detach().cpu().double()
    difference = (actual.detach().cpu().double() - reference).square().mean().sqrt().item()
    size = reference.square().mean().sqrt().item()
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def assert_close_to(actual: Tensor, expected: Tensor, *, kind: str = "applied") -> None:
    """Fail unless `actual` is `expected` within the table.

    Args:
        actual: the result under test; its dtype picks the row.
        expected: the oracle's value, of the same shape, in a dtype at least as wide.
        kind: "table", "applied", or "exact": bit equality, for ids and wherever the order of
            operations is the same.
    """
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if kind == "exact":
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)
        return
    assert actual.isfinite().all(), "actual holds NaN or infinity"
    if actual.dtype in ERROR_RATIOS:
        ratio, bound = error_ratio(actual, expected), ERROR_RATIOS[actual.dtype]
        assert ratio <= bound, (
            f"error ratio {ratio:.2e} in {actual.dtype}, at most {bound:.0e} allowed"
        )
        return
    rtol, atol = TOLERANCES[actual.dtype][kind]
    wide = actual.detach().cpu().double()
    torch.testing.assert_close(wide, expected.detach().cpu().double(), rtol=rtol, atol=atol)
