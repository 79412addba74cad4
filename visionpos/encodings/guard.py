"""Guard: what every encoding refuses at its two entrances, the call and the state dict, before anything is touched."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid
from visionpos.geometry.points import check_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[[Any, str], None]

_MISSING = object()


class Guarded(nn.Module):
    """A module that names what is wrong with the arguments of a call, and with the shapes of a state dict.

    Arguments are known by their names, which mean the same in every encoding. Missing and unexpected keys of a state
    dict stay torch's own business, and so does `strict`.

    Example:
        >>> class Table(Guarded):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = nn.Parameter(torch.zeros(2, 4))
        >>> Table().load_state_dict({"rows": torch.zeros(3, 4)})
        Traceback (most recent call last):
            ...
        visionpos.errors.PositionError: rows has shape (3, 4) in the state dict; Table needs (2, 4). Build it with the \
spec and the Dims of the model that wrote the state dict, or resize the weights first.
    """

    # Place, name, whether None stands for nothing, and the check of those arguments of a call that have one.
    _checked: ClassVar[tuple[tuple[int, str, bool, Check], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note once where the arguments stand, so that no call pays for it."""
        super().__init_subclass__(**kwargs)
        arguments = list(signature(cls.forward).parameters.values())[1:]
        cls._checked = tuple(
            (
                place if one.kind is Parameter.POSITIONAL_OR_KEYWORD else len(arguments),
                one.name,
                one.default is None,
                _CHECKS[one.name],
            )
            for place, one in enumerate(arguments)
            if one.name in _CHECKS
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` returns.

        Raises:
            PositionError: if a grid is none, tokens are no float tensor, or a device or generator is none.
        """
        for place, name, optional, check in self._checked:
            value = args[place] if place < len(args) else kwargs.get(name, _MISSING)
            # An argument that is missing has Python's own error.
            if value is not _MISSING and not (optional and value is None):
                check(value, name)
        return super().__call__(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse entries of another shape, those of inner layers too, before the first one is copied."""
        for name, own in self.state_dict(keep_vars=True).items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != own.shape:
                raise PositionError(
                    f"{prefix}{name} has shape {tuple(given.shape)} in the state dict; {type(self).__name__} needs "
                    f"{tuple(own.shape)}. Build it with the spec and the Dims of the model that wrote the state dict, "
                    "or resize the weights first."
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_dtype(values: Tensor, layer: nn.Module, name: str) -> None:
    """Refuse values that a layer cannot take as they are; under autocast it takes any float.

    Raises:
        PositionError: naming both dtypes.
    """
    weight = next(layer.parameters())
    # The meta device knows no autocast.
    autocast = not values.is_meta and torch.is_autocast_enabled(values.device.type)
    if values.dtype != weight.dtype and not autocast:
        raise PositionError(
            f"{name} is {values.dtype} and the weights are {weight.dtype}; one dtype is required. Cast one of the two, "
            "or run under autocast."
        )


def _check_tensor(values: object, name: str) -> None:
    if not isinstance(values, Tensor) or values.is_complex():
        raise PositionError(
            f"{name} is {values!r}; a tensor of numbers is required. Make it with torch.tensor."
        )


def named_device(device: Any, name: str = "device") -> torch.device:
    """Return a device given as torch takes it: an object, a name, or the number of an accelerator.

    Raises:
        PositionError: if it is none.
    """
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise PositionError(
            f"{name} is {device!r}; a device as torch knows it is required, 'cpu' or 'cuda:0'."
        ) from None


def check_home(weight: Tensor, device: torch.device | None, what: str) -> None:
    """Refuse a device other than that of a learned part: nothing is moved behind the caller's back.

    Args:
        weight: the learned part.
        device: where to build; None is where the weight is, and "cuda" without an index any CUDA device.
        what: the learned part in words, with its verb.

    Raises:
        PositionError: naming both devices.
    """
    if device is None:
        return
    here, device = weight.device, named_device(device)
    if device.type != here.type or device.index not in (None, here.index):
        raise PositionError(
            f"device is {device} and {what} on {here}; move the module with .to({device})."
        )


def _check_device(device: Any, name: str) -> None:
    named_device(device, name)


def _check_generator(generator: object, name: str) -> None:
    if not isinstance(generator, torch.Generator):
        raise PositionError(
            f"{name} is {generator!r}; a torch.Generator is required, or None for torch's own. Make it with "
            "torch.Generator().manual_seed(seed)."
        )


_CHECKS: dict[str, Check] = {
    "grid": check_grid,
    "keys": check_grid,
    "device": _check_device,
    "generator": _check_generator,
    **dict.fromkeys(("points", "labels", "boxes", "masks"), _check_tensor),
    **dict.fromkeys(("q", "k", "v", "tokens", "attention"), check_floats),
}
