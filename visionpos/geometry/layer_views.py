"""Layer views: what a layer of a plan makes of position ids: a rotation, gains of queries, and who sees whom."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.layers import LayerPlan
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.sequence import check_documents, check_ids, restart

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def layer_turn(plan: LayerPlan, layer: int) -> RopeTurn | None:
    """Return what turns queries and keys of a layer, ids -> Rotation; None where nothing turns.

    Raises:
        PositionError: if there is no such layer.
    """
    rope = plan.kind(layer).rope
    if rope is None:
        return None
    return RopeTurn(rope=rope, head_dim=plan.head_dim_of(layer), pairing=plan.pairing)


@checked
def layer_rotation(
    plan: LayerPlan, layer: int, ids: Tensor, documents: Tensor | None = None
) -> Rotation | None:
    """Return the rotation of queries and keys of a layer; None where nothing turns.

    Args:
        plan: the layers.
        layer: counted from 0.
        ids: `[n]` or `[b, n]` whole numbers, restarting with every document.
        documents: like ids; one document a row when None. See `RopeTurn`.

    Example:
        >>> from visionpos.geometry.layers import LayerKind
        >>> kinds = (LayerKind(name="local", theta=1e4), LayerKind(name="full"))
        >>> plan = LayerPlan(layers=2, head_dim=8, kinds=kinds, pattern=("local", "full"))
        >>> layer_rotation(plan, 1, torch.arange(3)) is None
        True
    """
    turn = layer_turn(plan, layer)
    return None if turn is None else turn(ids, documents)


@checked
def layer_gains(plan: LayerPlan, layer: int, ids: Tensor) -> Tensor | None:
    """Return what queries of a layer are multiplied by after their turn and norm, `[..., n]`; None for nothing.

    Args:
        plan: the layers.
        layer: counted from 0.
        ids: `[n]` or `[b, n]` whole numbers, restarting with every document.
    """
    check_ids(ids, "ids")
    temperature = plan.kind(layer).temperature
    return None if temperature is None else temperature.gains(ids)


@checked
def layer_mask_rule(plan: LayerPlan, layer: int, documents: Tensor) -> MaskRule:
    """Return the mask of a layer as a function for FlexAttention's `create_block_mask`: causal, by document.

    A window counts tokens of the document, the query among them; chunks are counted from its beginning.

    Args:
        plan: the layers.
        layer: counted from 0.
        documents: `[n]` whole numbers, the document of every token, -1 for padding, which sees padding of its run.

    Returns:
        A function of batch, head, query and key.

    Raises:
        PositionError: if documents are no `[n]` whole numbers.

    Reference:
        transformers masking_utils. Deliberate difference: there chunks are counted from the beginning of the row.
    """
    check_documents(documents)
    if documents.ndim != 1:
        raise PositionError(
            f"documents has shape {tuple(documents.shape)}; [n], one row, is required. Make a mask a row."
        )
    kind, places = plan.kind(layer), restart(documents)
    runs = (places == 0).cumsum(0)  # a document, or a run of padding
    window, chunk = kind.window, kind.chunk

    def sees(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 (flex's)
        seen = (k <= q) & (runs[q] == runs[k])
        if window is not None:
            seen = seen & (q - k < window)
        if chunk is not None:
            seen = seen & (places[q] // chunk == places[k] // chunk)
        return seen

    return sees


@checked
def layer_mask(plan: LayerPlan, layer: int, documents: Tensor) -> Tensor:
    """Return the mask of a layer for SDPA, `[n, n]` bool, True where a query sees a key; grows as n x n.

    Args:
        plan: the layers.
        layer: counted from 0.
        documents: see `layer_mask_rule`.

    Example:
        >>> from visionpos.geometry.layers import LayerKind
        >>> local = LayerKind(name="local", theta=1e4, window=2)
        >>> plan = LayerPlan(layers=1, head_dim=8, kinds=(local,), pattern=("local",))
        >>> layer_mask(plan, 0, torch.tensor([0, 0, 0, 1])).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    sees = layer_mask_rule(plan, layer, documents)
    places = torch.arange(len(documents), device=documents.device)
    none = places.new_zeros(())
    return sees(none, none, places.unsqueeze(1), places)
