"""What everyday mistakes get instead of a bare error or a silent number: a PositionError that names them."""

import math
from dataclasses import replace

import pytest
import torch

import visionpos as vp
from tests.encodings import test_additive, test_biasing
from tests.encodings.test_biasing import biasing
from tests.reference import bias as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import (
    AbsWin,
    AbsWinSpec,
    Alibi,
    AlibiSpec,
    DecomposedBiasSpec,
    Factorized,
    FactorizedSpec,
    Fire,
    FireSpec,
    Fourier,
    FourierSpec,
    GpsaSpec,
    Kerple,
    KerpleSpec,
    LearnableFourier,
    LearnableFourierSpec,
    LearnedSpec,
    LearnedTable,
    LogBias,
    LogBiasSpec,
    LookHereSpec,
    OffsetTable,
    OffsetTableSpec,
    Pape,
    PapeSpec,
    Sine,
    SineSpec,
    SpatioTemporal,
    SpatioTemporalSpec,
    SwinTable,
    SwinTableSpec,
    T5Bias,
    T5BiasSpec,
    build,
)

DIMS = Dims(embed_dim=12, num_heads=3, depth=1, prefix=1)
# What `values` needs beside differences, in the encodings whose bias depends on the window.
WHERE = {"log_torchvision": {"window_hw": (3, 5)}, "fire_extent": {"extent": (3, 5)}}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_error_differences_that_are_no_numbers(name, bad):
    """NaN passed through, or became a row of the table: cell 0, the last bucket."""
    module, more = biasing(name), WHERE.get(name, {})
    offsets = torch.tensor([[0.0, 1.0], [bad, 0.0]], dtype=torch.float64)
    with pytest.raises(PositionError, match=r"offsets holds NaN or infinity"):
        module.values(offsets, **more)
    good = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(PositionError, match=r"queries holds NaN or infinity"):
        module.between(offsets, good, **more)
    with pytest.raises(PositionError, match=r"keys holds NaN or infinity"):
        module.between(good, offsets, **more)


@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_error_shapes_of_coordinates(name):
    module, more = biasing(name), WHERE.get(name, {})
    with pytest.raises(PositionError, match=r"offsets has 0 axes, shape \(\)"):
        module.values(torch.tensor(0.0), **more)
    with pytest.raises(PositionError, match=r"offsets is 3; a tensor"):
        module.values(3, **more)
    with pytest.raises(PositionError, match=r"keys has 3 axes"):
        module.between(torch.zeros(4, 2), torch.zeros(4, 3), **more)
    with pytest.raises(PositionError, match=r"keys \(2,\); .*unsqueeze"):
        module.between(torch.zeros(4, 2), torch.zeros(2), **more)


@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_invariant_between_a_grid_is_its_bias(name):
    """What `values` needs is passed on by `between`: the cells of a grid have forward's bias."""
    module = biasing(name)
    hw = test_biasing.WINDOW
    more = {"log_torchvision": {"window_hw": hw}, "fire_extent": {"extent": hw}}.get(name, {})
    cells = vp.coordinates(Grid(*hw)).double()
    found, expected = module.between(cells, cells, **more), module(Grid(*hw))
    torch.testing.assert_close(found.to(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_invariant_between_in_other_dtypes(dtype):
    """Differences in float32: in bfloat16 200 - (-101) is 302 by itself."""
    queries, keys = torch.tensor([[200, 0]]), torch.tensor([[-101, 0]])
    module = Alibi(AlibiSpec(), DIMS)
    found = module.between(queries.to(dtype), keys.to(dtype)).flatten()
    expected = torch.tensor([-slope * 301.0 for slope in module.slopes()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("module", "more"),
    [
        (LogBias(LogBiasSpec(form="torchvision", hidden=4), DIMS), {"window_hw": 7}),
        (SwinTable(SwinTableSpec(window_hw=(3, 5)), DIMS), {"window_hw": 7}),
        (OffsetTable(OffsetTableSpec(window_hw=(3, 5)), DIMS), {"window_hw": 7}),
        (Fire(FireSpec(), DIMS), {"extent": 7}),
        (Fire(FireSpec(), DIMS), {"extent": (0, 5)}),
        (Fire(FireSpec(), DIMS), {"extent": (3, math.nan)}),
    ],
)
def test_error_windows(module, more):
    (name,) = more
    with pytest.raises(PositionError, match=rf"{name} is .* required"):
        module.values(torch.zeros(1, 2), **more)


def test_error_remedies_are_true():
    """The remedy in a message is one that its caller can follow."""
    cells = vp.coordinates(Grid(3, 5))
    swin = LogBias(LogBiasSpec(form="torchvision", hidden=4), DIMS)
    with pytest.raises(PositionError, match=r"Pass window_hw= to values\(\) or between\(\)"):
        swin.between(cells, cells)
    torch.testing.assert_close(swin.between(cells, cells, window_hw=(3, 5)), swin(Grid(3, 5)))
    fire = Fire(FireSpec(threshold=2.0), DIMS)
    with pytest.raises(PositionError, match=r"Pass extent=, its sides, to values\(\) or between"):
        fire.between(cells, cells)
    torch.testing.assert_close(fire.between(cells, cells, extent=(3, 5)), fire(Grid(3, 5)))


def distance_biases():
    for metric in ("l1", "l2", "linf"):
        yield AlibiSpec(metric=metric)
        yield FireSpec(metric=metric, reach="threshold")
        for form in ("log", "power"):
            yield KerpleSpec(metric=metric, form=form)
    for distance in ("linear", "sqrt", "square"):
        yield LookHereSpec(views=(("none", 4),), distance=distance, rounding="none")


@pytest.mark.parametrize("spec", list(distance_biases()), ids=str)
def test_gradient_at_distance_0(spec):
    """A token looks at itself: the gradient of coordinates there is 0 and was NaN; elsewhere it is what it was."""
    module = build(spec, test_biasing.DIMS).double()
    cells = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    bias = module.between(cells, cells)
    (alone,) = torch.autograd.grad(
        bias[:, 0, 0].sum() + bias[:, 1, 1].sum(), cells, retain_graph=True
    )
    assert torch.equal(alone, torch.zeros_like(alone))
    (all_,) = torch.autograd.grad(bias.sum(), cells)
    assert all_.isfinite().all()
    assert all_.abs().max() > 0


def test_reference_gradient_of_alibi():
    """Minus the slope, along the unit vector: (3, 4) / 5."""
    module = Alibi(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1)).double()
    query = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    module.between(query, torch.zeros(1, 2, dtype=torch.float64)).sum().backward()
    slope = sum(oracle.alibi_slopes(2))
    expected = torch.tensor([[-0.6 * slope, -0.8 * slope]], dtype=torch.float64)
    torch.testing.assert_close(query.grad, expected)


def test_error_negative_prefix():
    """Cropped tokens without a word, or a bare error."""
    q, tokens = torch.zeros(1, 3, 14, 4), torch.zeros(1, 14, 12)
    with pytest.raises(PositionError, match=r"prefix is -1; a token count"):
        build(PapeSpec(parabolas=2), DIMS)(q, q, tokens, Grid(3, 5), prefix=-1)
    with pytest.raises(PositionError, match=r"prefix is -1; a token count"):
        build(DecomposedBiasSpec(extent=(3, 5)), DIMS)(q, Grid(3, 5), prefix=-1)


def test_error_a_sample_without_a_batch():
    q, tokens = torch.zeros(3, 16, 4), torch.zeros(16, 12)
    with pytest.raises(PositionError, match=r"q has shape \(3, 16, 4\); \[b, num_heads.*unsqueeze"):
        build(DecomposedBiasSpec(extent=(3, 5)), DIMS)(q, Grid(3, 5), prefix=1)
    with pytest.raises(PositionError, match=r"shapes \(3, 16, 4\), .*unsqueeze"):
        build(PapeSpec(parabolas=2), DIMS)(q, q, tokens, Grid(3, 5), prefix=1)
    with pytest.raises(PositionError, match=r"offsets holds NaN"):
        build(PapeSpec(parabolas=2), DIMS).values(tokens[None], torch.full((16, 16, 2), math.nan))
    with pytest.raises(PositionError, match=r"offsets holds NaN"):
        build(GpsaSpec(), DIMS).values(torch.full((4, 2), math.nan))


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ((15, 48), (15, 48)),
        ((2, 15, 48), (48,)),
        ((2, 15, 48), (3, 15, 48)),
        ((1, 15, 48), (3, 15, 48)),
    ],
)
def test_error_added(tokens, code):
    """2-D tokens were a bare index error; a code of three samples made three of one."""
    module = test_additive.built("detr")
    with pytest.raises(
        PositionError, match=r"code has shape .*\[b, prefix \+ n, embed_dim\] is required"
    ):
        module.added(torch.zeros(tokens), torch.zeros(code))


T = torch.zeros
FACTORIZED = FactorizedSpec(table_hw=(4, 9))
LINEAR = {
    "mlp.0.weight": T(8, 4),
    "mlp.0.bias": T(8),
    "mlp.2.weight": T(12, 8),
    "mlp.2.bias": T(12),
}
SOURCES = {
    "learned_rank": (LearnedTable.from_source, LearnedSpec(grid_hw=(4, 9)), {"pos_embed": T(12)}),
    "learned_map": (
        lambda *a: LearnedTable.from_source(*a, channels="first"),
        LearnedSpec(grid_hw=(4, 9)),
        {"pos_embed": T(36, 12)},
    ),
    "learned_width": (
        LearnedTable.from_source,
        LearnedSpec(grid_hw=(4, 9)),
        {"pos_embed": T(36, 9)},
    ),
    "factorized": (
        Factorized.from_source,
        FACTORIZED,
        {"pos_embed_y": T(12), "pos_embed_x": T(9, 12)},
    ),
    "gemma_rank": (Factorized.from_source, FACTORIZED, {"position_embedding_table": T(9, 12)}),
    "gemma_one": (Factorized.from_source, FACTORIZED, {"position_embedding_table": T(1, 9, 12)}),
    "abswin": (
        AbsWin.from_source,
        AbsWinSpec(global_hw=(4, 9), window_hw=(2, 3)),
        {"pos_embed": T(4, 9), "pos_embed_win": T(1, 12, 2, 3)},
    ),
    "spatiotemporal": (
        SpatioTemporal.from_source,
        SpatioTemporalSpec(grid_thw=(2, 4, 9)),
        {"pos_embed_spatial": T(36), "pos_embed_temporal": T(2, 12)},
    ),
    "sine": (
        Sine.from_timm,
        SineSpec(hidden_dim=4),
        {"token_projection.weight": T(12), "token_projection.bias": T(12)},
    ),
    "fourier": (
        Fourier.from_segment_anything,
        FourierSpec(dialect="sam"),
        {"positional_encoding_gaussian_matrix": T(())},
    ),
    "learnable": (
        LearnableFourier.from_source,
        LearnableFourierSpec(features=4, hidden=8),
        {"Wr": T(2), **LINEAR},
    ),
    "learnable_3d": (
        LearnableFourier.from_source,
        LearnableFourierSpec(features=4, hidden=8),
        {"Wr": T(1, 2, 2), **LINEAR},
    ),
    "swin_rank": (
        SwinTable.from_source,
        SwinTableSpec(window_hw=(3, 5)),
        {"relative_position_bias_table": T(45)},
    ),
    "swin_heads": (
        SwinTable.from_source,
        SwinTableSpec(window_hw=(3, 5)),
        {"relative_position_bias_table": T(45, 4)},
    ),
    "swin_map_heads": (
        SwinTable.from_source,
        SwinTableSpec(window_hw=(3, 5)),
        {"relative_position_bias_table": T(4, 5, 9)},
    ),
    "offset_rank": (
        OffsetTable.from_source,
        OffsetTableSpec(window_hw=(3, 5)),
        {"attention_biases": T(15)},
    ),
    "offset_scalar": (
        OffsetTable.from_source,
        OffsetTableSpec(window_hw=(3, 5)),
        {"attention_biases": T(1, 3, 15)},
    ),
    "t5_rank": (
        T5Bias.from_source,
        T5BiasSpec(),
        {"rel_pos_y_bias.weight": T(32), "rel_pos_x_bias.weight": T(3, 32)},
    ),
    "t5_heads": (
        T5Bias.from_source,
        T5BiasSpec(),
        {"rel_pos_y_bias.weight": T(4, 32), "rel_pos_x_bias.weight": T(4, 32)},
    ),
    "kerple_heads": (
        Kerple.from_source,
        KerpleSpec(),
        {"bias_p": T(4, 1, 1), "bias_a": T(4, 1, 1)},
    ),
    "pape_rank": (
        Pape.from_source,
        PapeSpec(parabolas=2),
        {"ab.weight": T(12, 12), "position.weight": T(())},
    ),
    "pape_turned": (
        Pape.from_source,
        PapeSpec(parabolas=2),
        {"ab.weight": T(12, 12), "position.weight": T(2, 6)},
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_error_states_of_another_shape(name):
    """A rank, a shape or a number of heads that is not the source's: named, with what is required."""
    load, spec, state = SOURCES[name]
    with pytest.raises(PositionError, match=r"(of|has) shape|heads") as caught:
        load(state, spec, DIMS)
    assert (
        "required" in str(caught.value)
        or "need" in str(caught.value)
        or "must" in str(caught.value)
    )


@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_error_kinds_of_numbers(name):
    """Complex differences lost their imaginary part; a mask of tokens is no list of places."""
    module, more = biasing(name), WHERE.get(name, {})
    for dtype in (torch.complex64, torch.bool):
        with pytest.raises(PositionError, match=rf"offsets are {dtype}; real numbers"):
            module.values(torch.zeros(4, 2, dtype=dtype), **more)


@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_error_prefixes_and_tables(name):
    module = biasing(name)
    grid = Grid(*test_biasing.WINDOW)
    table = module.distinct(grid)
    for bad in (1.0, "1", True, None):
        with pytest.raises(PositionError, match=rf"prefix is {bad!r}; a token count"):
            module.dense(table, grid, prefix=bad)
    for bad in (table[:, 1:], table[0], table[..., None]):
        with pytest.raises(PositionError, match=r"table has shape .*distinct\(grid\)"):
            module.dense(bad, grid)
    for call in (module.distinct, lambda what: module.dense(table, what)):
        with pytest.raises(PositionError, match=r"grid is \(3, 5\); a Grid of tokens"):
            call((3, 5))


def test_error_an_extent_of_too_few_sides():
    """One side for two axes measured against a shorter reach, without a word."""
    fire = Fire(FireSpec(), DIMS)
    with pytest.raises(PositionError, match=r"extent is \(7,\) for 2 axes; the sides"):
        fire.values(torch.zeros(1, 2), extent=(7,))
    assert fire.values(torch.zeros(1, 2), extent=(1, 3, 5)).shape == (3, 1)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (LogBiasSpec(form="cr", hidden=4), DIMS),
        (LookHereSpec(), Dims(embed_dim=24, num_heads=12, depth=1)),
        (SwinTableSpec(window_hw=(3, 5)), DIMS),
    ],
)
def test_error_clips_name_the_grid(spec, dims):
    with pytest.raises(
        PositionError, match=r"grid \(2, 3, 5\) .*Call it with Grid\(height, width\)"
    ):
        build(spec, dims)(Grid(3, 5, frames=2))


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_error_sizes_of_q_k_and_tokens(channels):
    """Another batch, fewer heads of keys or another width met a bare error inside."""
    pape = build(PapeSpec(parabolas=2, channels=channels), DIMS)
    q, tokens = torch.zeros(2, 3, 15, 4), torch.zeros(2, 15, 12)
    bad = [
        (q[:1], q, tokens),
        (q, q[:1], tokens),
        (q, q, tokens[:1]),
        (q, q[:, :1], tokens),
        (q[..., :2], q[..., :2], tokens),
        (q, q, tokens[..., :6]),
    ]
    for case in bad:
        with pytest.raises(PositionError, match=r"q, k and tokens have shapes .*required"):
            pape(*case, Grid(3, 5))
    with pytest.raises(PositionError, match=r"tokens have shape \(15, 12\); \[b, n, 12\]"):
        pape.coefficients(tokens[0])
    with pytest.raises(PositionError, match=r"offsets have shape \(3, 2\) for tokens"):
        pape.values(tokens, torch.zeros(3, 2))
    longer, key = pape(q.double(), q, tokens, Grid(3, 5))
    assert (longer.dtype, key.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("std", [0, 0.0])
@pytest.mark.parametrize(
    "spec",
    [
        LearnedSpec(grid_hw=(4, 9)),
        AbsWinSpec(),
        SpatioTemporalSpec(grid_thw=(2, 3, 5)),
        SpatioTemporalSpec(grid_thw=(2, 3, 5), separable=False),
        SwinTableSpec(window_hw=(3, 5)),
        DecomposedBiasSpec(extent=(3, 5)),
        T5BiasSpec(),
        FACTORIZED,
    ],
    ids=lambda spec: spec.kind if hasattr(spec, "kind") else str(spec),
)
def test_invariant_tables_can_start_at_zero(spec, std):
    """A std of 0 is allowed by every table, and was a division by zero in three of them."""
    module = build(replace(spec, std=std), DIMS)
    assert all(not weight.any() for weight in module.parameters())


def test_invariant_whole_numbers_make_the_same_parameters():
    """A threshold of 512 was a parameter of whole numbers, which torch refuses."""
    one, other = FireSpec(threshold=512, warp=1), FireSpec(threshold=512.0, warp=1.0)
    assert one == other
    assert build(one, DIMS).threshold.dtype == build(other, DIMS).threshold.dtype == torch.float32
    assert type(one.threshold) is float


@pytest.mark.parametrize("bad", [None, 3, Grid(3, 5), [(3, 5)], [None]])
def test_error_batches_of_grids(bad):
    module = test_additive.built("detr")
    with pytest.raises(PositionError, match=r"grids is .*required"):
        module.batch(bad)
    with pytest.raises(PositionError, match=r"length is 'a' for 1 grids"):
        module.batch([Grid(3, 5)], length="a")


def test_error_lone_points():
    lone = torch.zeros(2)
    for module, more in (
        (test_additive.built("detr").at, []),
        (build(FACTORIZED, DIMS).at, []),
        (build(LearnedSpec(grid_hw=(4, 9)), DIMS).at, [(3, 5)]),
        (build(AbsWinSpec(fit="crop"), DIMS).at, [(3, 5)]),
        (build(vp.SinCosSpec(), DIMS).at, []),
        (build(vp.LiereSpec(block=4), DIMS).turns, []),
        (build(vp.ComropeSpec(block=4), Dims(embed_dim=16, num_heads=2, depth=1)).turns, []),
    ):
        with pytest.raises(PositionError, match=r"has shape \(2,\); .*unsqueeze\(0\)"):
            module(lone, *more)
    with pytest.raises(PositionError, match=r"extent_hw is None; two sides"):
        build(AbsWinSpec(fit="crop"), DIMS).at(lone[None], None)


def test_error_slots_and_masks():
    peg = build(vp.PegSpec(), DIMS)
    tokens = torch.zeros(1, 16, 12)
    for bad in (0.0, "0", True, 1):
        with pytest.raises(PositionError, match=rf"slot is {bad!r}; the encoding has 1"):
            peg(tokens, Grid(3, 5), slot=bad)
    for bad in (3, [[True]], torch.zeros(1, 15)):
        with pytest.raises(PositionError, match=r"masked is .*; bool"):
            peg(tokens, Grid(3, 5), masked=bad)
