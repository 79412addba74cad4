"""Log bias: a small network turns the logarithm of a coordinate difference into a bias a head. Swin V2, RelPosMlp."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear, check_flat
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.repeated import is_plain, repeated
from visionpos.encodings.sources import check_index, required_entry, sides, source_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.places import check_points
from visionpos.geometry.points import known
from visionpos.geometry.precision import full_precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Form = Literal["microsoft", "torchvision", "cr"]

# What the sources call the two layers.
_HIDDEN = ("cpb_mlp.0", "continuous_position_bias_mlp.0", "meta_mlp.fc1", "mlp.fc1")
_OUT = ("cpb_mlp.2", "continuous_position_bias_mlp.2", "meta_mlp.fc2", "mlp.fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBiasSpec:
    """Settings of a bias by a network on log coordinates.

    Args:
        form: how a difference becomes an input, and what is done with the output. "microsoft": in units of the
            pretrained window, base-2 logarithm, 16 * sigmoid. "torchvision": the same in units of the current window,
            so a larger window gives the same difference another bias (also timm and transformers when their pretrained
            window is 0). "cr": natural logarithm of cells, raw output (Swin V2 CR, timm's RelPosMlp).
        pretrained_window_hw: the window in whose units the weights last saw their data. A chain of fine-tunes keeps it:
            after 12, then 24 in units of 12, it is 12. Required by "microsoft", refused by the others.
        hidden: width of the network: 512 in Swin V2, 384 in CR, 128 or 512 in RelPosMlp.
        out_bias: whether the second layer has a bias: False in Swin V2, True in CR and in RelPosMlp 'cr'.
        prefix: the bias of prefix tokens. "zero" as timm pads, although patches then stand near 8 in the sigmoid forms
            and hardly see the class token; "learned" gives them values of their own, from the network's middle on.

    Raises:
        PositionError: if a field is out of range, or the form and the pretrained window do not fit.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["log_bias"] = "log_bias"
    form: Form = "microsoft"
    pretrained_window_hw: tuple[int, int] | None = None
    hidden: int = 512
    out_bias: bool = False
    prefix: Literal["zero", "learned"] = "zero"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden < 1:
            raise PositionError(f"hidden is {self.hidden}; a width of at least 1 is required.")
        if (self.pretrained_window_hw is not None) != (self.form == "microsoft"):
            raise PositionError(
                f"pretrained_window_hw is {self.pretrained_window_hw} with form {self.form!r}; 'microsoft' needs it, "
                "the others have none. Give the window the weights were trained on (never 0), or choose 'torchvision', "
                "which measures in units of the current window."
            )
        if self.pretrained_window_hw is not None:
            sides("pretrained_window_hw", self.pretrained_window_hw)


class LogBias(Biasing):
    """Continuous log bias, for one layer or for all that share it; any window, no table to resize.

    The network runs on the `(2h - 1)(2w - 1)` distinct differences only. It depends on differences only
    (shift-relative) and has no mirror symmetry. In form "microsoft" and "cr" one difference has one bias at every
    window; in "torchvision" only at one window. A window side of 1 has coordinate 0. The arithmetic runs in float32 or
    better, whatever the weights' dtype and autocast. In eval without gradients, on the CPU, it runs again only when a
    weight or the window has changed. Memory of `forward` is `num_heads` n x n numbers.

    Swin V2's cosine attention and `logit_scale` are no position and belong to the attention module.

    Example:
        >>> spec = LogBiasSpec(pretrained_window_hw=(8, 8))
        >>> bias = LogBias(spec, Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(3, 5)).shape
        torch.Size([2, 15, 15])
        >>> bias.coords(torch.tensor([[0.0, 7.0]])).round(decimals=4)
        tensor([[0.0000, 1.0566]])

    Reference:
        Swin V2 (arXiv 2111.09883), microsoft/Swin-Transformer swin_transformer_v2.py, torchvision, timm
        swin_transformer_v2, swin_transformer_v2_cr and layers RelPosMlp. Deliberate differences: a side of 1 is no
        division by zero (NaN in Microsoft, torchvision and RelPosMlp); timm's dropout of 0.125 on the hidden layer of
        CR and RelPosMlp is no position and left to the model.
    """

    spec: LogBiasSpec
    prefix_bias: nn.Parameter | None

    def __init__(
        self, spec: LogBiasSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.hidden = blank_linear(2, spec.hidden)
        self.out = blank_linear(spec.hidden, dims.num_heads, bias=spec.out_bias)
        for name, part in (*self.hidden.named_parameters(), *self.out.named_parameters()):
            start(part, 0.02 if name == "weight" else 0.0, generator)
        middle = torch.full((dims.num_heads, 3), 0.0 if spec.form == "cr" else 8.0)
        self.prefix_bias = nn.Parameter(middle) if spec.prefix == "learned" else None

    def coords(self, offsets: Tensor, *, window_hw: tuple[int, int] | None = None) -> Tensor:
        """Return `[..., 2]`, the network's input for differences `[..., 2]` (y, x) in cells.

        Args:
            offsets: query minus key.
            window_hw: the current window, which "torchvision" measures in; the others pay no heed to it.

        Raises:
            PositionError: if offsets have not two axes, or "torchvision" is given no window.
        """
        check_points(offsets, None, "offsets")
        if offsets.shape[-1] != 2:
            raise PositionError(f"offsets have {offsets.shape[-1]} axes; a log bias needs (y, x).")
        wide = offsets.to(torch.promote_types(torch.float32, offsets.dtype))
        parts = zip(wide.unbind(-1), self._units(window_hw), strict=True)
        scaled = torch.stack([_scaled(steps, unit) for steps, unit in parts], dim=-1)
        return _logged(scaled, self.spec.form)

    def _units(self, window_hw: tuple[int, int] | None) -> tuple[int, int] | tuple[None, None]:
        """Return the sides of the window in whose units differences are read; None for plain cells."""
        if self.spec.form == "cr":
            return None, None
        unit = self.spec.pretrained_window_hw or window_hw
        if unit is None:
            raise PositionError(
                "window_hw is None; form 'torchvision' measures differences in units of the current window. Pass "
                "window_hw= to values() or between()."
            )
        if not torch.compiler.is_compiling():  # where sides are symbols, they are a grid's
            sides("window_hw", unit)
        return unit

    def values(self, offsets: Tensor, *, window_hw: tuple[int, int] | None = None) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., 2]` (y, x), query minus key, in cells."""
        check_points(offsets, None, "offsets")
        dtype = torch.promote_types(torch.float32, self.hidden.weight.dtype)
        y, x = self.coords(offsets.to(dtype), window_hw=window_hw).unbind(-1)
        bias = self._network(y.reshape(-1), x.reshape(-1))
        return bias.unflatten(-1, offsets.shape[:-1]) if offsets.ndim > 1 else bias[:, 0]

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, (2h - 1)(2w - 1)]` on the window that the grid is.

        Raises:
            PositionError: if the grid has frames.
        """
        check_flat(grid)
        home, window = self.home(device), (grid.height, grid.width)
        return repeated(self, (self.spec, window), lambda: self._distinct(window, home))

    def _distinct(self, window: tuple[int, int], home: torch.device | None) -> Tensor:
        """Return the bias at every difference of a window."""
        dtype = torch.promote_types(torch.float32, self.hidden.weight.dtype)
        y, x = self._ticks(window, dtype, home)
        return self._network(y.unsqueeze(1), x)

    def _ticks(
        self, window: tuple[int, int], dtype: torch.dtype, home: torch.device | None
    ) -> list[Tensor]:
        """Return the network's inputs along the sides of a window, `[2 * side - 1]` each."""
        asked = window, self._units(window), self.spec.form, dtype
        kept = _kept_ticks(*asked) if is_plain(self.hidden.weight) else None
        return _ticks(*asked, home) if kept is None or not known(kept[0]) else kept

    def _network(self, y: Tensor, x: Tensor) -> Tensor:
        """Return `[num_heads, n]` at inputs of the two axes, which broadcast to n differences.

        The first layer is linear, so every input of an axis gives its share of it once.
        """
        first, second, dtype = self.hidden, self.out, y.dtype
        weight = first.weight
        down, right = weight.to(dtype).mT.contiguous().unbind()  # torch is slow over steps of 2
        rows = torch.addcmul(first.bias.to(dtype), y.unsqueeze(-1), down)
        reached = (rows + x.unsqueeze(-1) * right).relu_().flatten(0, -2)
        with full_precision(reached.device):
            raw = second.weight.to(dtype) @ reached.mT
        shift: Tensor | None = second.bias
        if shift is not None:
            raw = raw + shift.to(dtype).unsqueeze(-1)
        return (raw if self.spec.form == "cr" else 16 * raw.sigmoid()).to(weight.dtype)

    def prefix_values(self) -> Tensor | None:
        """Return `[num_heads, 3]` where prefix tokens learn their own; None for zeros."""
        return None if self.prefix_bias is None else self.prefix_bias.clone()

    @classmethod
    def from_source(
        cls,
        state: Mapping[str, Tensor],
        spec: LogBiasSpec,
        dims: Dims,
        *,
        window_hw: tuple[int, int] | None = None,
    ) -> Self:
        """Return a module with a source's network.

        Args:
            state: state dict of one attention module: `cpb_mlp` (Microsoft, timm, torchvision),
                `continuous_position_bias_mlp` (transformers), `meta_mlp` (CR) or `mlp` (RelPosMlp). Stored coordinate
                tables belong to one window and are left behind.
            spec: form and width of the source. For a model whose own pretrained window is 0, give the window it was
                trained on: equal there, and unlike the source's constant at other windows.
            dims: sizes of the model.
            window_hw: the window of a stored index, which is then compared.

        Raises:
            PositionError: if an entry is missing or of another shape, or the index numbers pairs in another order.
        """
        if window_hw is not None:
            window = Grid(*sides("window_hw", window_hw))
            check_index(source_entry(state, "relative_position_index"), window)
        module = cls(spec, dims)
        for layer, names in ((module.hidden, _HIDDEN), (module.out, _OUT)):
            for part, own in list(layer.named_parameters()):
                found = required_entry(state, *(f"{name}.{part}" for name in names))
                if found.shape != own.shape:
                    raise PositionError(
                        f"state holds {names[0]}.{part} of shape {tuple(found.shape)}; hidden {spec.hidden} and "
                        f"{dims.num_heads} heads need {tuple(own.shape)}. Describe the source in the spec."
                    )
                setattr(layer, part, nn.Parameter(found.detach().clone()))
        if (
            not spec.out_bias
            and source_entry(state, *(f"{name}.bias" for name in _OUT)) is not None
        ):
            raise PositionError(
                "out_bias is False and state holds a bias of the second layer; it would be lost. Set out_bias=True."
            )
        return module


def _scaled(steps: Tensor, unit: int | None) -> Tensor:
    """Return differences along one axis in units of a window's side, from -8 to 8 over it; in cells without one."""
    # A side of 1 holds the difference 0 alone: any divisor will do.
    return steps if unit is None else steps / max(unit - 1, 1) * 8


def _logged(scaled: Tensor, form: Form) -> Tensor:
    """Return the signed logarithm of scaled differences."""
    # 0 counts as positive: by this factor, and not by abs(), the slope there is that of the logarithm.
    sign = 1.0 - 2.0 * (scaled < 0).to(scaled.dtype)
    grown = 1.0 + sign * scaled
    return sign * grown.log() if form == "cr" else sign * grown.log2() / math.log2(8)


def _ticks(
    window: tuple[int, int],
    units: tuple[int | None, int | None],
    form: Form,
    dtype: torch.dtype,
    home: torch.device | None = None,
) -> list[Tensor]:
    """Return `[2 * side - 1]` for each side of a window: what its differences are to the network."""
    steps = [
        _scaled(torch.arange(1 - side, side, device=home, dtype=dtype), unit)
        for side, unit in zip(window, units, strict=True)
    ]
    return list(_logged(torch.cat(steps), form).split([2 * side - 1 for side in window]))


@lru_cache(maxsize=64)  # a pure function of its arguments; nothing writes to what it returns
def _kept_ticks(
    window: tuple[int, int],
    units: tuple[int | None, int | None],
    form: Form,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return inputs on the CPU that were made once: plain tensors, whatever mode the first call was in."""
    with torch.inference_mode(mode=False):
        return _ticks(window, units, form, dtype, torch.device("cpu"))
