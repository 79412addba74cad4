"""Score functions of lines: every pair against the dense bias, and FlexAttention against attention by a loop."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from visionpos import Dims, Grid, PositionError
from visionpos.attention import attend, pair_score_mod, score_mod
from visionpos.encodings import (
    AlibiSpec,
    Biasing,
    CopeSpec,
    DapeSpec,
    DebertaSpec,
    FireSpec,
    KerpleSpec,
    SandwichSpec,
    ShawSpec,
    T5BiasSpec,
    TransformerXlSpec,
    build,
)
from visionpos.kernels.pieces import Pieces

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
DIMS = Dims(embed_dim=24, num_heads=3, depth=1)
LINES = {
    "t5": T5BiasSpec(buckets=(32,), max_distance=(128,)),
    "t5_causal": T5BiasSpec(buckets=(8,), max_distance=(9,), direction="causal"),
    "alibi": AlibiSpec(metric="l1"),
    "kerple": KerpleSpec(),
    "kerple_power": KerpleSpec(form="power"),
    "sandwich": SandwichSpec(),
    "fire_query": FireSpec(reach="query", threshold=4.0),
    "fire_extent": FireSpec(threshold=4.0),
    "fire_threshold": FireSpec(reach="threshold", threshold=4.0),
}
PAIRS = {
    "shaw": ShawSpec(reach=(2,), std=0.5),
    "shaw_2d": ShawSpec(reach=(2, 1), std=0.5),
    "deberta": DebertaSpec(span=4, std=0.5),
    "deberta_v2": DebertaSpec(span=4, max_distance=12, norm=True, key_bias=True, std=0.5),
    "deberta_c2p": DebertaSpec(span=4, terms=("c2p",), std=0.5),
}


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def every(score, b: int, n: int, m: int) -> torch.Tensor:
    """Return what a score function adds to 0 for every sample, head, query and key."""
    places = torch.meshgrid(*map(torch.arange, (b, 3, n, m)), indexing="ij")
    return score(torch.zeros(b, 3, n, m, dtype=torch.float64), *places)


@pytest.mark.parametrize("grid", [Grid(1, 11), Grid(1, 1), Grid(3, 5), Grid(7, 1)])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("name", LINES)
def test_reference_every_pair(name, prefix, grid):
    torch.manual_seed(0)
    module = build(LINES[name], DIMS).double()
    m = prefix + grid.size
    out = every(score_mod(module, grid, prefix=prefix), 1, m, m)[0]
    torch.testing.assert_close(out, module(grid, prefix=prefix).double())
    q, k, v = drawn(3, 1, 3, m, 16).unbind()
    expected = (q @ k.mT / 4 + module(grid, prefix=prefix)).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, module, grid, prefix=prefix, how="dense"), expected)


@pytest.mark.parametrize("n", [11, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_reference_every_pair_of_content(name, n):
    torch.manual_seed(0)
    module = build(PAIRS[name], DIMS).double()
    grid = Grid(1, 11) if name != "shaw_2d" else Grid(11, 1)
    q, k = drawn(2, 3, n, 8), drawn(2, 3, 11, 8, seed=2)
    reads = name.startswith("deberta")
    dense = module(q, k, grid) if reads else module(q, grid)
    out = every(pair_score_mod(module, q, k if reads else None, grid), 2, n, 11)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("name", ["t5_causal", "fire_query", "sandwich"])
def test_reference_flex(name):
    torch.manual_seed(0)
    module, grid = build(LINES[name], DIMS), Grid(1, 20)
    q, k, v = drawn(3, 2, 3, 20, 16).float().unbind()
    with torch.no_grad():
        out = flex_attention(q, k, v, score_mod=score_mod(module, grid))
        expected = (q @ k.mT / 4 + module(grid)).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["shaw", "deberta_v2"])
def test_reference_flex_of_content(name):
    """With the encoding's own scale of q.k."""
    torch.manual_seed(0)
    module, grid = build(PAIRS[name], DIMS), Grid(1, 20)
    q, k, v = drawn(3, 2, 3, 20, 8).float().unbind()
    scale = getattr(module, "scale", 8**-0.5)
    with torch.no_grad():
        bias = module(q, k, grid) if name != "shaw" else module(q, grid)
        score = pair_score_mod(module, q, k, grid)
        out = flex_attention(q, k, v, score_mod=score, scale=scale)
    torch.testing.assert_close(out, (q @ k.mT * scale + bias).softmax(-1) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5_causal", "fire_query", "alibi"])
def test_compile_flex(name):
    """Compiled FlexAttention never builds the scores; its numbers are those of the dense bias."""
    torch.manual_seed(0)
    module, grid = build(LINES[name], DIMS), Grid(1, 200)
    q, k, v = drawn(3, 1, 3, 200, 16).float().unbind()
    with torch.no_grad():
        out = attend(q, k, v, module, grid, how="flex")
        expected = attend(q, k, v, module, grid, how="dense")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("units", [1, 2, 3, 7, 8, 32])
def test_reference_pieces(units):
    """Straight pieces against the network, between and on the knots, read whole and one by one."""
    weight, shift, out = drawn(units), drawn(units, seed=2), drawn(3, units, seed=3)
    floor = drawn(3, seed=4)
    x = torch.cat([torch.linspace(-5, 5, 101, dtype=torch.float64), -shift / weight])
    expected = out @ (weight.unsqueeze(1) * x + shift.unsqueeze(1)).relu() + floor.unsqueeze(1)
    pieces = Pieces.of(weight, shift, out, floor)
    torch.testing.assert_close(pieces.at(x), expected)
    heads = torch.arange(3).unsqueeze(1).expand(3, len(x))
    torch.testing.assert_close(pieces.reader()(heads, x.expand(3, -1)), expected)


@pytest.mark.parametrize("spec", [CopeSpec(), DapeSpec(), TransformerXlSpec()])
def test_error_what_no_score_function_holds(spec):
    x = drawn(1, 3, 5, 8)
    with pytest.raises(PositionError, match="no score function holds it"):
        pair_score_mod(build(spec, DIMS), x, x, Grid(1, 5))


def test_error_pair_score_mod():
    x = drawn(1, 3, 5, 8)
    with pytest.raises(PositionError, match="encoding is Alibi; a bias by products"):
        pair_score_mod(build(AlibiSpec(), DIMS), x, x, Grid(1, 5))
    with pytest.raises(PositionError, match="k is None; Deberta also reads keys"):
        pair_score_mod(build(DebertaSpec(), DIMS), x, None, Grid(1, 5))
    with pytest.raises(PositionError, match=r"encoding is Shaw; a bias that is a function"):
        score_mod(build(ShawSpec(), DIMS), Grid(1, 5))
    assert issubclass(type(build(SandwichSpec(), DIMS)), Biasing)
