"""Points: whether the values of coordinates can be looked at, and whether they are numbers.

A tensor enters; nothing leaves, or a refusal. No device is waited for and no graph broken.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from visionpos.errors import PositionError


def readable(values: Tensor) -> bool:
    """Return whether values can be looked at for free: on the CPU, in eager mode, outside transforms."""
    return values.device.type == "cpu" and known(values)


def known(values: Tensor) -> bool:
    """Return whether there are values at all to be looked at, if need be by waiting for a device."""
    if is_compiling() or values.is_meta or _transformed():
        return False
    if isinstance(values, (FakeTensor, FunctionalTensor)) or is_functorch_wrapped_tensor(values):
        return False
    # What a plain tensor is compared with would be fake while a mode makes every new tensor so.
    modes = torch._C  # noqa: SLF001 (no public name)
    return modes._get_dispatch_mode(modes._TorchDispatchModeKey.FAKE) is None  # noqa: SLF001 (as above)


def _transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work.

    Their tensors carry more than values, those that are made meanwhile too: none must be kept, or written to by out=.
    """
    active: bool = torch._C._are_functorch_transforms_active()  # noqa: SLF001 (no public name)
    return active or forward_ad._current_level >= 0  # noqa: SLF001 (no public name)


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


def check_floats(values: object, name: str) -> None:
    """Refuse what is no tensor of floats: a result cast back to whole numbers would be cut.

    Raises:
        PositionError: naming the argument and what it is.
    """
    if isinstance(values, Tensor) and values.dtype.is_floating_point:
        return
    what = values.dtype if isinstance(values, Tensor) else type(values).__name__
    raise PositionError(
        f"{name} is {what}; a tensor of floats is required. Make it with torch.as_tensor, or cast it."
    )
