"""freeze: a copy of a model for one image size, in which everything that positions depend on is a buffer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from visionpos.encodings import Additive, Biasing
from visionpos.errors import PositionError
from visionpos.geometry import BasisTurn, BlockTurn, Grid, Rotation
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.attachment import TURNS, Attachment, Call
from visionpos.retrofit.fade import adds_plainly
from visionpos.retrofit.passes import graph_task
from visionpos.retrofit.sizes import FROZEN, target_grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from visionpos.retrofit.attachment import Turn


_FROZEN = (Additive, Biasing, *TURNS)


@torch.no_grad()
def freeze(model: nn.Module, size_hw: tuple[int, int]) -> nn.Module:
    """Return a copy in eval mode that serves one image size, for export; outputs are bit-identical to the model's.

    The learned table, the model's own rotary table, and the vectors, biases, cosines and sines of attached encodings
    become buffers: a graph made from it holds no frequency, no resampling and no complex number. What reads the tokens
    themselves (door `conditional`) stays as it is. Rotary buffers keep their dtype through `.half()` and the like. The
    copy is not for training, and its `save` is no checkpoint.

    `torch.onnx.export(freeze(model, size_hw), (image,), dynamo=True)` gives a graph that agrees with torch to float
    noise. For one graph of many sizes export the model itself with dynamic shapes. timm's table is then an ONNX Resize,
    right with exactly its attributes antialias=1, exclude_outside=1 and cubic_coeff_a=-0.5; after `lift_table` it is
    plain products, which no runtime reads its own way.

    Args:
        model: a timm VisionTransformer or Eva, or a subclass that adds its table in their way; not changed.
        size_hw: image (height, width) in pixels: the model's own, or any multiple of the patch if its size is dynamic.

    Raises:
        PositionError: if the model does not serve the size, or adds its table in its own way. The copy raises it at
            images of any other size.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True)
        >>> freeze(model, (64, 96))(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 192])
    """
    if not adds_plainly(model):
        raise PositionError(
            f"model is a {type(model).__name__}, whose positions are no table that VisionTransformer or Eva would add; "
            "only theirs are frozen. Export it at its own size as it is."
        )
    frozen: Any = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    grid = _served(frozen, size_hw)
    own = (grid.height, grid.width)
    if frozen.pos_embed is not None:
        table = _table_at(frozen, own)
        del frozen.pos_embed
        frozen.register_buffer("pos_embed", table)
    if getattr(frozen, "rope", None) is not None:
        frozen.rope = FrozenRope(_rope_at(frozen, own), own)
    like = torch.zeros(1, 1, device=next(frozen.parameters()).device)
    for part in attachments(frozen).values():
        if not part.idle and not part.others and isinstance(part.encoding, _FROZEN):
            FrozenAttachment.take(part, grid, like)
    _fix_size(frozen, (int(size_hw[0]), int(size_hw[1])), grid)
    return frozen  # type: ignore[no-any-return]


class Kept(nn.Module):
    """Buffers that keep their dtype when the model is cast, as frequencies do."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Kept:  # noqa: FBT001, FBT002 (torch's signature)
        held = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        for name, tensor in held.items():
            setattr(self, name, tensor.to(self.get_buffer(name).device))
        return self


class FrozenRope(Kept):
    """The model's own rotary table for one grid, behind timm's interface."""

    table: Tensor

    def __init__(self, table: Tensor, feat_shape: tuple[int, int]) -> None:
        super().__init__(table=table)
        self.feat_shape = feat_shape

    def get_embed(self, shape: tuple[int, int] | None = None) -> Tensor:
        """Return the table of the frozen grid."""
        if shape not in (None, self.feat_shape):
            raise PositionError(
                f"shape is {shape}; the model is frozen for a grid of {self.feat_shape}. Freeze the original again."
            )
        return self.table


class FrozenAttachment(Attachment):
    """An attachment that knows the answer for one grid. An Attachment becomes one by its class; its hooks stay."""

    grid: Grid
    rows: Tensor
    layers: Any  # of Kept: one a layer, or one for all

    @staticmethod
    def take(part: Any, grid: Grid, like: Tensor) -> None:
        """Freeze an attachment on a grid, on the device of `like`."""
        part.grid, dims = grid, part.encoding.dims
        part.open(grid, like)
        call = part.relay.get()
        if isinstance(part.encoding, Additive):
            part.register_buffer("rows", part.encoding(grid, device=like.device) * part.strength)
        else:
            give = part.bias if isinstance(part.encoding, Biasing) else part.rotation
            made = [_tensors(give(call, layer, dims.prefix)) for layer in range(dims.depth)]
            alike = all(torch.equal(layer[key], made[0][key]) for layer in made for key in layer)
            part.layers = nn.ModuleList(Kept(**layer) for layer in (made[:1] if alike else made))
        part.relay.put(None)
        part.__class__ = FrozenAttachment

    def set_strength(self, strength: float) -> None:
        """Refuse another strength: that of the original is in the buffers."""
        learned = self.learned_strength
        now = self.constant if learned is None else learned.item()
        if strength != now:
            raise PositionError(
                f"strength is {strength}; this attachment is frozen at {now:g}. Set it on the original, and freeze "
                "that again."
            )

    def open(self, grid: Grid, like: Tensor) -> None:
        """Begin a forward pass; no coordinates are needed."""
        self.relay.put(Call(grid, None, self.constant, graph_task(), like.device))

    def rotation(self, call: Call, layer: int, prefix: int, group: int = 0) -> Turn:  # noqa: ARG002 (one size)
        """Return the rotation of all tokens of one layer."""
        self._check(call.grid, call.kept)
        kept: Any = self.layers[min(layer, len(self.layers) - 1)]
        encoding: Any = self.encoding
        if hasattr(kept, "matrices"):
            return BlockTurn(kept.matrices)
        pairing: Any = "adjacent" if hasattr(kept, "basis") else encoding.pairing
        rotation = Rotation(kept.cos, kept.sin, pairing, encoding.coords.axes)
        return BasisTurn(rotation, kept.basis) if hasattr(kept, "basis") else rotation

    def bias(self, call: Call, layer: int, prefix: int, group: int = 0) -> Tensor:  # noqa: ARG002 (one size)
        """Return the bias of all pairs of tokens of one layer, `[1, heads, n, n]`."""
        self._check(call.grid, call.kept)
        rows: Tensor = self.layers[min(layer, len(self.layers) - 1)].rows
        return rows

    def added(self, grid: Grid, tokens: Tensor, group: int = 0) -> Tensor:  # noqa: ARG002 (one size)
        """Return patch tokens `[b, n, d]` with the frozen vectors added."""
        self._check(grid, None)
        return tokens + self.rows.to(tokens.dtype)

    def _check(self, grid: Grid, kept: Tensor | None) -> None:
        if grid != self.grid or kept is not None:
            raise PositionError(
                f"grid is {grid.shape}{'' if kept is None else ' with tokens dropped'}; the model is frozen for all of "
                f"{self.grid.shape}. Call eval() on it, or freeze the original again."
            )


def _tensors(made: Tensor | Turn) -> dict[str, Tensor]:
    """Return what a bias or a turn consists of."""
    if isinstance(made, Rotation):
        return {"cos": made.cos, "sin": made.sin}
    if isinstance(made, BlockTurn):
        return {"matrices": made.matrices}
    if isinstance(made, BasisTurn):
        return {**_tensors(made.rotation), "basis": made.basis}
    return {"rows": made}


class SizeHook:
    """Before patch_embed: refuses images of another size than the frozen one."""

    def __init__(self, size_hw: tuple[int, int]) -> None:
        self.size_hw = size_hw

    def __call__(self, module: Any, args: tuple[Tensor, ...]) -> None:  # noqa: ARG002 (torch's signature)
        """Compare the sides."""
        height, width = args[0].shape[-2:]
        if (height, width) != self.size_hw:
            raise PositionError(
                f"image is {height}x{width}; this model is frozen for {self.size_hw[0]}x{self.size_hw[1]} alone. "
                "Resize the image, or freeze the original for its size."
            )


def _served(model: Any, size_hw: tuple[int, int]) -> Grid:
    """Return the grid on which a model sees images of a size, refusing those that it does not take."""
    patch = model.patch_embed
    if getattr(patch, "dynamic_img_pad", False):
        return Grid(*(int(side) for side in patch.dynamic_feat_size(size_hw)))
    grid = target_grid(patch, size_hw)
    if not model.dynamic_img_size and (grid.height, grid.width) != tuple(patch.grid_size):
        raise PositionError(
            f"size_hw is {tuple(size_hw)} and the model serves a grid of {tuple(patch.grid_size)} alone; its own size "
            "is required. resize(model, size_hw) first, or create it with dynamic_img_size=True."
        )
    return grid


def _table_at(model: Any, grid_hw: tuple[int, int]) -> Tensor:
    """Return the table `[1, prefix + n, d]` as the model itself would evaluate it."""
    table: Tensor = model.pos_embed.detach()
    if not model.dynamic_img_size:
        return table.clone()
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    moved: Tensor = resample_abs_pos_embed(
        table, new_size=grid_hw, old_size=model.patch_embed.grid_size, num_prefix_tokens=prefix
    )
    return moved.clone()


def _rope_at(model: Any, grid_hw: tuple[int, int]) -> Tensor:
    """Return the model's own rotary table as it asks for it itself: a module of one size keeps it ready."""
    ready = not model.dynamic_img_size and hasattr(model.rope, "feat_shape")
    table: Tensor = model.rope.get_embed() if ready else model.rope.get_embed(shape=grid_hw)
    return table.clone()


def _fix_size(model: Any, size_hw: tuple[int, int], grid: Grid) -> None:
    """Let timm's own bookkeeping know one size."""
    patch = model.patch_embed
    if model.dynamic_img_size:
        # timm has dynamic patches as maps; a fixed model flattens them.
        model.dynamic_img_size, patch.flatten = False, True
        patch.output_fmt = type(patch.output_fmt)("NCHW")
    patch.img_size, patch.grid_size = size_hw, (grid.height, grid.width)
    patch.num_patches = grid.size
    patch.register_forward_pre_hook(SizeHook(size_hw), prepend=True)
    object.__setattr__(model, FROZEN, size_hw)
