"""LookHere: who sees what on rectangles, slopes of views and layers, the source's bfloat16."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compiled import SIZES, graphs_of
from tests.reference import bias as oracle
from tests.strategies import grids
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import LookHere, LookHereSpec, build

HIDDEN = torch.finfo(torch.bfloat16).min
DIRECTED = sorted(set(oracle.VIEWS) - {"none"})


def lookhere(*views: tuple[str, int], depth: int = 3, **fields) -> LookHere:
    heads = sum(count for _, count in views)
    dims = Dims(embed_dim=heads * 4, num_heads=heads, depth=depth)
    return LookHere(LookHereSpec(views=views, **fields), dims)


@pytest.mark.parametrize("hw", [(4, 6), (5, 3), (1, 7), (7, 1)])
def test_shape_of_shipped(hw):
    """LH-90 for 12 heads, as the source's ViT-B."""
    spec = load_encoding("lookhere_90")
    module = build(spec, Dims(embed_dim=768, num_heads=12, depth=12))
    n = hw[0] * hw[1]
    assert module(Grid(*hw), prefix=1, layer=11).shape == (12, n + 1, n + 1)
    assert module.slopes(0)[:4] == [1.5] * 4
    assert module.slopes(11)[-4:] == [0.25, 0.0625, 0.015625, 0.00390625]


@given(st.sampled_from(DIRECTED), grids(max_side=6))
def test_reference_masks(view, hw):
    """Facts 8: corner, half and triangle masks on non-square grids, by their definitions."""
    out = lookhere((view, 4), rounding="none")(Grid(*hw))
    seen = oracle.pairs(hw, oracle.lookhere([(view, 4)], 1.0, float("nan")))
    assert torch.equal(out == HIDDEN, torch.from_numpy(seen).isnan())


@pytest.mark.parametrize("layer", [0, 1, 2])
@given(hw=grids(max_side=5))
def test_reference_layers(layer, hw):
    """global 2 times a layer slope from 1.5 to .5, times the head's, times the distance."""
    views = (("corners", 8), ("none", 8))
    module = lookhere(*views, rounding="none")
    scale = 2.0 * (1.5, 1.0, 0.5)[layer]
    expected = oracle.pairs(hw, oracle.lookhere(list(views), scale, HIDDEN))
    out = module(Grid(*hw), layer=layer)
    torch.testing.assert_close(out.double(), torch.from_numpy(expected), rtol=1e-6, atol=0)
    assert module.slopes(layer)[8:] == [
        scale * s for s in (1 / 4, 1 / 4, 1 / 16, 1 / 16) + (1 / 64,) * 2 + (1 / 256,) * 2
    ]


def test_reference_rounding():
    """The source stores bfloat16: 2 * 1.5 * .5 * sqrt(2) = 2.1213 becomes 2.125."""
    for rounding, expected in (("bfloat16", -2.125), ("none", -2.1213203)):
        module = lookhere(("halves", 4), rounding=rounding)
        assert module.values(torch.tensor([1.0, -1.0]))[0].item() == pytest.approx(
            expected, abs=1e-6
        )
        assert module(Grid(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(("distance", "power"), [("linear", 1.0), ("sqrt", 0.5), ("square", 2.0)])
def test_reference_distance(distance, power):
    module = lookhere(("none", 2), distance=distance, rounding="none")
    out = module.values(torch.tensor([[3.0, 4.0]]))[0, 0].item()
    assert out == pytest.approx(-3.0 * 0.25 * 5.0**power, rel=1e-6)


@pytest.mark.parametrize("view", DIRECTED)
def test_invariant_views_cover_the_plane(view):
    """Two eighths aside, the four heads of a view see every key, and each head the query itself."""
    seen = lookhere((view, 4))(Grid(7, 5)) > HIDDEN
    assert seen.diagonal(dim1=1, dim2=2).all()
    if view.startswith("eighths"):
        other = "eighths1" if view.endswith("2") else "eighths2"
        seen = torch.cat([seen, lookhere((other, 4))(Grid(7, 5)) > HIDDEN])
    assert seen.any(0).all()
    assert not seen.all(0).all()


@pytest.mark.parametrize("view", ["halves", "corners", "triangles"])
def test_invariant_mirrors_exchange_heads(view):
    """Turning the image upside down exchanges up and down; a quarter turn moves every head to its neighbour."""
    table = lookhere((view, 4)).distinct(Grid(5, 5)).unflatten(1, (9, 9))
    swap = {"halves": [1, 0, 2, 3], "corners": [2, 3, 0, 1], "triangles": [1, 0, 2, 3]}[view]
    torch.testing.assert_close(table.flip(1), table[swap], rtol=0, atol=0)
    assert not torch.equal(table.flip(1), table)


def test_invariant_prefix_sees_and_is_seen():
    out = lookhere(("halves", 4))(Grid(3, 5), prefix=2)
    assert (out[:, :2] == 0).all()
    assert (out[:, :, :2] == 0).all()


def test_invariant_zero_view():
    """A head without a slope sees everything alike."""
    assert (lookhere(("zero", 2), ("none", 2))(Grid(3, 5))[:2] == 0).all()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"views": (("center", 4),)}, r"views is 'center'; it must be one of 'halves', 'corners'"),
        ({"views": (("halves", 2),)}, r"views give 2 heads to 'halves'; a multiple of 4"),
        ({"views": (("none", 3),)}, r"views give 3 heads to 'none'"),
        ({"views": (("none", 0),)}, r"views give 0 heads"),
        (
            {"global_slope": 0.0},
            r"global_slope is 0\.0 and layer_slopes \(1\.5, 0\.5\); three finite",
        ),
        ({"layer_slopes": (1.0, -0.5)}, r"layer_slopes \(1\.0, -0\.5\)"),
        (
            {"layer_slopes": (1.0,)},
            r"layer_slopes is \(1\.0,\); it must be \(a finite number, a finite number\)",
        ),
        ({"distance": "cube"}, r"distance is 'cube'"),
        ({"rounding": "float16"}, r"rounding is 'float16'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        LookHereSpec(**fields)


def test_error_heads_and_layers():
    with pytest.raises(
        PositionError, match=r"views name 12 heads and the model has 6; .*every head"
    ):
        LookHere(LookHereSpec(), Dims(embed_dim=24, num_heads=6, depth=2))
    for layer in (3, -4):
        with pytest.raises(PositionError, match=rf"layer is {layer}; the encoding has 3 layers"):
            lookhere(("halves", 4))(Grid(3, 5), layer=layer)
    module = lookhere(("halves", 4))
    assert torch.equal(module(Grid(3, 5), layer=-1), module(Grid(3, 5), layer=2))
    assert lookhere(("halves", 4), depth=1).slopes(0) == [1.5] * 4


def test_compile_a_layer():
    module = lookhere(("triangles", 4), ("none", 2))
    assert graphs_of(lambda h, w: module(Grid(h, w), prefix=1, layer=2), SIZES) == 1
