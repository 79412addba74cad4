"""Guard: what every encoding refuses at its two entrances, the call and the state dict, before anything is touched."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid

if TYPE_CHECKING:
    from collections.abc import Mapping


class Guarded(nn.Module):
    """A module that names what is wrong with the grids of a call, and with the shapes of a state dict.

    Missing and unexpected keys stay torch's own business, and so does `strict`.

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

    _grids: ClassVar[
        tuple[tuple[int, str], ...]
    ] = ()  # place and name of the grids among a call's arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note once where the grids stand, so that no call pays for it."""
        super().__init_subclass__(**kwargs)
        names = list(signature(cls.forward).parameters)[1:]
        cls._grids = tuple(pair for pair in enumerate(names) if pair[1] in ("grid", "keys"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` returns.

        Raises:
            PositionError: if a grid is none.
        """
        for place, name in self._grids:
            value = args[place] if place < len(args) else kwargs.get(name)
            # `keys` may be None, and a grid that is missing has Python's own error.
            if value is not None:
                check_grid(value, name)
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
