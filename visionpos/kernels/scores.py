"""Attention with a bias of coordinate differences: FlexAttention from the small table, or SDPA with the dense bias."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from visionpos.encodings.biasing import Biasing, QueryBiasing, check_prefix
from visionpos.encodings.doors import PairBiasing
from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid
from visionpos.geometry.points import check_floats, known
from visionpos.geometry.relative import linear_index
from visionpos.kernels.lookup import lookup_score

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid
    from visionpos.kernels.lookup import ScoreMod

How = Literal["auto", "flex", "dense"]


def score_mod(
    encoding: Biasing,
    grid: Grid,
    *,
    prefix: int = 0,
    layer: int = 0,
    device: torch.device | None = None,
) -> ScoreMod:
    """Return the score function of a bias for `torch.nn.attention.flex_attention`.

    It reads the bias of a pair at one place of the table of distinct differences: `table[head, row[q] - column[k]]`,
    with one whole number a token on either side, so no division of token numbers and no n x n tensor. Memory:
    `heads` times about 4 n numbers of the table for a square grid (8 n for a clip, 2 n for a line), and 2 n indices. A
    line of n tokens is `Grid(1, n)`; FIRE against the query's own place evaluates its network's straight piece.

    Compile FlexAttention for use: run eagerly it builds all scores. On the CPU torch has no gradients for it, and
    graphs with dynamic sizes may fail in its C++ compiler: use `dynamic=False`. On CUDA the gradient of the table is a
    sum of atomic additions, in another order at every call. `attend` knows all three.

    Args:
        encoding: any bias that is a function of differences.
        grid: the lattice of the patches, of queries and keys alike.
        prefix: leading tokens without position; their bias comes from the encoding's `prefix_values`.
        layer: for encodings whose layers differ.
        device: where to build; with the parameters when None.

    Returns:
        A function of score, batch, head, query and key. The bias enters in the dtype of the score.

    Raises:
        PositionError: if the encoding is no such bias, or grid, prefix, layer or device do not fit.

    Example:
        >>> from visionpos import AlibiSpec, Dims, Grid, build
        >>> bias = build(AlibiSpec(metric="l1"), Dims(embed_dim=8, num_heads=1, depth=1))
        >>> add = score_mod(bias, Grid(2, 3))
        >>> add(torch.tensor(1.0), *torch.tensor([0, 0, 0, 5])) * 256  # cells (0, 0) and (1, 2)
        tensor(253.)

    Reference:
        FlexAttention (arXiv 2412.05496).
    """
    _check_encoding(encoding)
    check_grid(grid)
    check_prefix(prefix)
    whole = encoding.score(grid, device=device)
    if whole is not None:
        return _behind(whole, prefix)
    table = encoding.of_layer(grid, layer, device=device)
    rows, columns = linear_index(grid, device=table.device)
    if prefix == 0:
        columns = (
            columns.clone()
        )  # a view would tie a compiled graph to the sides of what it is a view of

        def score(score: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 (flex's)
            return score + table[head, rows[q] - columns[k]].to(score.dtype)

        return score
    own = encoding.prefix_values()
    own = table.new_zeros(table.shape[0], 3) if own is None else own.to(table.dtype)
    return _framed(
        torch.cat([own, table], dim=-1),
        pad(rows + 3, (prefix, 0)),
        pad(columns, (prefix, 0)),
        prefix,
    )


def pair_score_mod(
    encoding: QueryBiasing | PairBiasing, q: Tensor, k: Tensor | None, grid: Grid
) -> ScoreMod:
    """Return the score function of a bias that queries and keys make with their places.

    It reads the product of a token with a table of differences at one place: memory is a row of the table a token and
    head, `[b, heads, n, rows]`, and no n x n tensor. FlexAttention must scale q.k by the encoding's `scale`.

    Args:
        encoding: Shaw, or DeBERTa: bias by products with a table.
        q: `[b, heads, n, head_dim]`, unscaled: the last n tokens of the grid.
        k: `[b, heads, m, head_dim]`; None where the encoding reads queries alone.
        grid: the lattice of the m keys; a line is `Grid(1, m)`.

    Returns:
        A function of score, batch, head, query and key, for these very q and k.

    Raises:
        PositionError: if the encoding is no such bias, or q and k do not fit it.

    Example:
        >>> from visionpos import Dims, Grid, ShawSpec, build
        >>> shaw = build(ShawSpec(reach=(2,)), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> add = pair_score_mod(shaw, torch.ones(1, 2, 5, 4), None, Grid(1, 5))
        >>> add(torch.tensor(1.0), *torch.tensor([0, 1, 4, 0])).shape
        torch.Size([])
    """
    given: Any = encoding
    lookups: Any = getattr(given, "lookups", None)
    if not isinstance(given, (QueryBiasing, PairBiasing)) or lookups is None:
        raise PositionError(
            f"encoding is {type(encoding).__name__}; a bias by products of tokens with a table of differences is "
            "required, as Shaw and DeBERTa are. A function of differences alone goes to score_mod."
        )
    check_grid(grid)
    if isinstance(given, PairBiasing) and k is None:
        raise PositionError(
            f"k is None; {type(encoding).__name__} also reads keys. Pass the keys of all tokens of the grid."
        )
    parts = lookups(q, grid) if isinstance(given, QueryBiasing) else lookups(q, k, grid)
    return lookup_score(parts, grid, q.shape[-2])


def _behind(inner: ScoreMod, prefix: int) -> ScoreMod:
    """Return a score function for tokens behind a prefix that has no bias."""
    if not prefix:
        return inner

    def score(score: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = inner(score, b, head, (q - prefix).clamp(min=0), (k - prefix).clamp(min=0))
        return torch.where((q < prefix) | (k < prefix), score, own)

    return score


def _framed(table: Tensor, rows: Tensor, columns: Tensor, prefix: int) -> ScoreMod:
    """Return the score function with three numbers in front of the table for pairs with a prefix token."""

    def score(score: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 (flex's)
        place = torch.where(k < prefix, 1, rows[q] - columns[k])
        place = torch.where(q < prefix, torch.where(k < prefix, 2, 0), place)
        return score + table[head, place].to(score.dtype)

    return score


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Biasing,
    grid: Grid,
    *,
    prefix: int = 0,
    scale: float | None = None,
    layer: int = 0,
    how: How = "auto",
) -> Tensor:
    """Return attention with a bias added to its logits, `[b, heads, m, head_dim]`, m = prefix + n.

    "flex" never holds an m x m tensor: its memory is the table of distinct differences (about 4 n numbers a head) and
    the output. "dense" holds the bias, `heads` m x m numbers for the whole batch, in float32 or the dtype of q, and
    gives it to SDPA, which on the CPU holds one block of scores more. Where the bias learns, SDPA falls back to plain
    arithmetic there: at its peak some 2.5 times `b * heads * m * m` numbers beside the bias. The gradient of the table
    is summed over diagonals in a fixed order, see `visionpos.kernels.bias`.

    Args:
        q: `[b, heads, m, head_dim]`, any strides.
        k: `[b, kv_heads, m, head_dim]`; grouped-query heads may be fewer, and then serve neighbouring queries.
        v: `[b, kv_heads, m, head_dim or another width]`.
        encoding: any bias that is a function of differences, on the device of q.
        grid: the lattice of the patches.
        prefix: leading tokens without position.
        scale: factor on q.k; 1 / sqrt(head_dim) when None.
        layer: for encodings whose layers differ.
        how: "auto" is "flex" on CUDA where the bias does not learn, else "dense". "flex" on the CPU compiles for every
            new shape (some seconds), cannot be part of another graph, has no gradients, and is slower than "dense"
            where the bias fits into memory. "flex" on CUDA gives a learned table its gradient by atomic additions, in
            no fixed order.

    Returns:
        The dtype of q. Under "flex" and on the CPU the bias is added in float32 or better; "dense" on CUDA rounds it
        to the dtype of q first.

    Raises:
        PositionError: if heads, tokens, dtypes or devices do not fit, or "flex" is asked for what it cannot do.

    Example:
        >>> from visionpos import AlibiSpec, Dims, Grid, build
        >>> bias = build(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> q, k, v = torch.ones(3, 1, 2, 16, 4).unbind()
        >>> attend(q, k, v, bias, Grid(3, 5), prefix=1).shape
        torch.Size([1, 2, 16, 4])
    """
    _check_encoding(encoding)
    check_grid(grid)
    check_prefix(prefix)
    if how not in ("auto", "flex", "dense"):
        raise PositionError(f"how is {how!r}; it must be 'auto', 'flex' or 'dense'.")
    _check_fit(q, k, v, encoding.dims.num_heads, prefix + grid.size)
    grouped = q.shape[1] != k.shape[1]
    if _is_flexible(q, k, v, encoding, how):
        score = score_mod(encoding, grid, prefix=prefix, layer=layer, device=q.device)
        return _flex(q, k, v, score_mod=score, scale=scale, enable_gqa=grouped)
    if encoding.score(grid, device=q.device) is None:
        table = encoding.of_layer(grid, layer, device=q.device)
        bias = encoding.dense(table.to(_bias_dtype(q, table)), grid, prefix=prefix)
    else:
        whole = encoding(grid, prefix=prefix, device=q.device)
        bias = whole.to(_bias_dtype(q, whole))
    return scaled_dot_product_attention(
        q, k, v, attn_mask=bias.unsqueeze(0), scale=scale, enable_gqa=grouped
    )


@cache
def _compiled(device: str) -> Any:
    """Return FlexAttention compiled; code, which depends on nothing but the kind of device.

    On the CPU every size has a graph of its own: with symbols for sizes torch 2.14 writes C++ that does not compile,
    since it puts its block sizes in by replacing text, "ks1" in "ks12" too.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None, fullgraph=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Return what FlexAttention gives; a graph that is being compiled takes it in as it is."""
    if torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        inside: Tensor = flex_attention(q, k, v, **how)
        return inside
    # Beyond torch's limit of 8 graphs it would run eagerly, and build all scores.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):  # noqa: SLF001
        out: Tensor = _compiled(q.device.type)(q, k, v, **how)
    return out


def _is_flexible(q: Tensor, k: Tensor, v: Tensor, encoding: Biasing, how: str) -> bool:
    """Return whether FlexAttention is to be taken.

    Raises:
        PositionError: if it is asked for, and cannot be had.
    """
    grad = torch.is_grad_enabled()
    learns = grad and any(weight.requires_grad for weight in encoding.parameters())
    if how == "dense" or not q.numel() or not v.numel():
        return False
    if how == "auto":
        fits = q.shape[-1] >= 16 and q.dtype != torch.float64 and known(q)
        return q.is_cuda and fits and not learns
    moves = learns or (grad and any(x.requires_grad for x in (q, k, v)))
    if q.device.type not in ("cpu", "cuda") or (moves and not q.is_cuda):
        raise PositionError(
            f"how is 'flex' on {q.device.type}{' with gradients' if moves else ''}; FlexAttention needs CUDA, or the "
            "CPU without gradients. Use how='dense', or torch.no_grad()."
        )
    if torch.compiler.is_compiling() and not q.is_cuda:
        raise PositionError(
            "how is 'flex' in a graph for the CPU; torch has no kernel there whose table is made in the graph. Call "
            "attend outside the compiled function, or use how='dense'."
        )
    return True


def _bias_dtype(q: Tensor, table: Tensor) -> torch.dtype:
    """Return the dtype of a dense bias: SDPA takes that of q, and float32 beside halves on the CPU."""
    keeps = q.device.type == "cpu" and q.dtype.itemsize < 4 and table.dtype.itemsize >= 4
    return torch.float32 if keeps else q.dtype


def _check_encoding(encoding: object) -> None:
    """Refuse what is no bias of differences."""
    if not isinstance(encoding, Biasing):
        raise PositionError(
            f"encoding is {type(encoding).__name__}; a bias that is a function of coordinate differences is required. "
            "Build one of the door Biasing: a table, log bias, ALiBi, T5, KERPLE, FIRE or LookHere."
        )


def _check_fit(q: Tensor, k: Tensor, v: Tensor, heads: int, tokens: int) -> None:
    """Refuse queries, keys and values that do not fit the bias or each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floats(x, name)
        if x.ndim != 4 or x.shape[2] != tokens:
            raise PositionError(
                f"{name} has shape {tuple(x.shape)}; [b, heads, {tokens}, head_dim] is required: prefix and every cell "
                "of the grid. Pass the grid of these tokens, and the prefix."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise PositionError(
                f"{name} is {x.dtype} on {x.device} and q {q.dtype} on {q.device}; they must agree. Cast or move it."
            )
    if q.shape[1] != heads:
        raise PositionError(
            f"q has {q.shape[1]} heads and the bias {heads}; they must agree. Build the bias with the model's Dims."
        )
    batches = {x.shape[0] for x in (q, k, v)}
    if (
        len(batches) > 1
        or not k.shape[1]
        or k.shape[1] != v.shape[1]
        or heads % k.shape[1]
        or q.shape[-1] != k.shape[-1]
    ):
        raise PositionError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; one batch, one head_dim "
            "of q and k, and kv heads that divide the heads of q are required."
        )
