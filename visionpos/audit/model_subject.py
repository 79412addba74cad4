"""The subject of a model's audit: its tokens, its grid, and forward passes of copies with tokens or places changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.layer import cells_of
from visionpos.audit.model_inputs import as_rows, channels_of, folded, layout_of, unfolded
from visionpos.audit.model_moves import AttachedMove, Change
from visionpos.audit.model_parts import cheap_copy, moves_of
from visionpos.audit.model_rope import RopeMove
from visionpos.audit.model_watch import Key, Passed, Seen, Turn, Watch, tensor_of
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.hooks import grid_seen
from visionpos.retrofit.lattice import stated_sides
from visionpos.retrofit.paths import sides_of
from visionpos.retrofit.places import Place, embeds_of
from visionpos.retrofit.ports import attentions_of, prefix_row_is_flat
from visionpos.retrofit.seams import blocks_of, row_of
from visionpos.retrofit.sizes import image_of, multiple_of
from visionpos.retrofit.tables import tables_of

Rows = list[Tensor]
"""Patch tokens `[b, n, d]` before any position, one a patch embedding."""
Visit = Callable[[Key, Tensor], None]


class Subject:
    """A model under audit; it is read, and never written to.

    Args:
        model: a timm model whose class has a row in the seam table.
        dtype: of forward passes.
        size_hw: image in pixels; that which the model serves when None.
        seed: of the image.

    Raises:
        PositionError: if the class has no row, the model cannot be copied, or cannot take the image.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        size_hw: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.row = row_of(model)
        self.model, self.dtype, self.seed = model, dtype, seed
        size = _size_of(model) if size_hw is None else size_hw
        if size is None:
            raise PositionError(
                "size_hw is None and nothing tells which images the model serves; pass size_hw=(height, width)."
            )
        self.size: tuple[int, int] = (int(size[0]), int(size[1]))
        weight = next(model.parameters())
        self.device = weight.device
        self.image = self._drawn(seed)
        self.flat = prefix_row_is_flat(model)
        self.folds = (
            self.row.grid == "coords"
        )  # positions come in beside the patches: change those instead
        self.prefix = 0
        self.grid, self.rows = self._tokens()

    def _drawn(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, channels_of(self.model), *self.size, generator=generator)
        return noise.to(self.device, self.dtype)

    def fresh(self) -> Any:
        """Return a copy that may be written to."""
        return cheap_copy(self.model, self.dtype)

    def still(self) -> Any:
        """Return a copy whose rotations are as exact as those of moved places; it serves its own grid alone."""
        model = self.fresh()
        if self.dtype == torch.float64:  # timm's tables, and coordinates of encodings, are float32
            for part in moves_of(model, self.grid, self.size):
                if isinstance(part, (RopeMove, AttachedMove)) and part.inside:
                    part(Change(cells_of))
        return model

    def _tokens(self) -> tuple[Grid, Rows]:
        """Return the grid of patch tokens, and the tokens before any position.

        Raises:
            PositionError: if the model fails on its own image.
        """
        copied = self.fresh()
        if self.folds:
            step = multiple_of(self.model, self.row)
            grid = Grid(self.size[0] // step[0], self.size[1] // step[1])
            self.prefix = self._front(features(copied, self.image), grid.size)
            return grid, [unfolded(self.image, step)]
        grids: list[Grid] = []
        rows: Rows = []

        def keep(place: Place) -> Callable[..., None]:
            def hook(module: Any, args: Any, named: Any, output: Any) -> None:
                maps = output[0] if isinstance(output, tuple) else output
                layout = layout_of(place, maps)
                sides = maps.shape[-2:] if layout == "nchw" else maps.shape[1:3]
                if layout != "nlc":
                    grids.append(Grid(int(sides[0]), int(sides[1])))
                elif place.sides[0] is not None:
                    owner, name = place.sides
                    stated: Any = stated_sides(owner, name) if name else sides_of(owner)
                    grids.append(Grid(*stated))
                else:
                    grids.append(grid_seen(module, args, named, output))
                rows.append(as_rows(maps, layout).detach().clone())

            return hook

        with ExitStack() as stack:
            for place in embeds_of(copied):
                hook = keep(place)
                handle = place.module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            end = features(copied, self.image)
        if not rows:
            raise PositionError(
                f"{type(self.model).__name__} made no patch tokens where its row says so."
            )
        self.prefix = self._front(end, grids[0].size)
        return grids[0], rows

    def _front(self, end: Tensor, count: int) -> int:
        """Return the tokens in front of the patches in features; 0 where they are a map."""
        return end.shape[1] - count if self.flat and end.ndim == 3 else 0

    @property
    def count(self) -> int:
        """Return the number of patch tokens, of the first patch embedding."""
        return self.grid.size

    def passed(
        self,
        model: Any,
        rows: Rows | None = None,
        *,
        image: Tensor | None = None,
        seen: Seen | None = None,
        turn: Turn | None = None,
        visit: Visit | None = None,
    ) -> Passed:
        """Return what a copy gives for tokens.

        Args:
            model: from `fresh`.
            rows: tokens that take the place of its own; its own for the image when None.
            image: of another size, for a copy that serves it.
            seen: see `Watch`; prefix tokens come first.
            turn: see `Watch`.
            visit: sees attention in place of `Passed.weights`.

        Raises:
            PositionError: if the model fails.
        """
        result = Passed()
        keep = result.weights.__setitem__ if visit is None else visit
        ports = attentions_of(model)
        watch = Watch(ports, keep, seen=seen, turn=turn)
        entering = self.image if image is None else image
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if rows is not None and self.folds:
                entering = folded(rows[0], entering.shape[-2:], multiple_of(self.model, self.row))
            elif rows is not None:
                stack.enter_context(_fed(model, rows))
            for _, block in blocks_of(model):
                handle = block.register_forward_hook(
                    lambda _, __, output: result.blocks.append(
                        self._rows(tensor_of(output).detach())
                    )
                )
                stack.callback(handle.remove)
            stack.enter_context(watch.hooked())
            result.end = self._rows(features(model, entering))
        if turn is not None and not watch.turned:
            raise PositionError(
                "no attention hands q and k to a fused kernel; they cannot be turned."
            )
        return result

    def _rows(self, tokens: Tensor) -> Tensor:
        """Return tokens as rows, where a model of rows gives them as a map `[b, y, x, d]`."""
        return tokens.flatten(1, 2) if self.flat and tokens.ndim == 4 else tokens

    def split(self, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return (prefix tokens or None, patch tokens) of `[b, t, d]`; a map is all patches."""
        front = tokens.shape[1] - self.count if self.flat and tokens.ndim == 3 else 0
        if front <= 0:
            return None, tokens
        return tokens[:, :front], tokens[:, front:]


def _size_of(model: nn.Module) -> tuple[int, int] | None:
    """Return the image that a model serves; of one that takes any, that whose cells are those of its table."""
    row = row_of(model)
    table = next((one for one in tables_of(model) if one.module is None), None)
    if row.grid == "coords" and table is not None and table.seams.layout == "nhwc" and table.sides:
        step = multiple_of(model, row)
        return table.sides[0] * step[0], table.sides[1] * step[1]
    return image_of(model)


def features(model: Any, image: Tensor) -> Tensor:
    """Return a model's features as one tensor.

    Raises:
        PositionError: if the model cannot take the image.
    """
    try:
        with torch.no_grad():
            return tensor_of(model.forward_features(image)).detach()
    except PositionError:
        raise
    except (
        RuntimeError,
        AssertionError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
    ) as error:
        raise PositionError(
            f"model {type(model).__name__} fails on an image {tuple(image.shape)}: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}. Pass size_hw= that it serves."
        ) from error


@contextmanager
def _fed(model: Any, rows: Rows) -> Iterator[None]:
    """Let tokens take the place of those that the patch embeddings give, before anything is added to them."""

    def feed(place: Place, tokens: Tensor) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            maps = output[0] if isinstance(output, tuple) else output
            layout = layout_of(place, maps)
            given = tokens.to(maps)
            if layout == "nchw":
                given = given.mT.reshape(maps.shape)
            elif layout == "nhwc":
                given = given.reshape(maps.shape)
            elif given.shape != maps.shape:
                raise PositionError(
                    f"{place.path} gives {tuple(maps.shape)} tokens; {tuple(given.shape)} cannot take their place."
                )
            return (given, *output[1:]) if isinstance(output, tuple) else given

        return hook

    with ExitStack() as stack:
        for place, tokens in zip(embeds_of(model), rows, strict=True):
            handle = place.module.register_forward_hook(feed(place, tokens), prepend=True)
            stack.callback(handle.remove)
        yield
