"""Points: whether the values of coordinates can be looked at, and whether they are numbers.

A tensor enters; nothing leaves, or a refusal. No device is waited for and no graph broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor


def readable(values: Tensor) -> bool:
    """Return whether values can be looked at for free: on the CPU, in eager mode, outside vmap."""
    if values.device.type != "cpu" or is_compiling():
        return False
    return not isinstance(values, FakeTensor) and not is_functorch_wrapped_tensor(values)


def check_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity, where that costs no wait for a device.

    Raises:
        PositionError: naming the argument.
    """
    if values.is_floating_point() and readable(values) and not bool(values.isfinite().all()):
        raise PositionError(
            f"{name} holds NaN or infinity; finite coordinates are required. Give padding any finite place, and mask "
            "it out."
        )
