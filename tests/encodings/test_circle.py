"""Circle-RoPE: cells equally far from text, in the layers that use the circle."""

import pytest
import torch
from hypothesis import given

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import coords as where
from tests.reference import directions as circles
from tests.reference import rotary as oracle
from tests.strategies import grids
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import CircleRope, CircleRopeSpec
from visionpos.geometry import circle_coords

DIMS = Dims(embed_dim=48, num_heads=2, depth=5)  # heads of 24 channels


def spec(**fields: object) -> CircleRopeSpec:
    return CircleRopeSpec(**{"sections": (4, 4, 4), "theta": 1e4, **fields})


def rope(settings: CircleRopeSpec | None = None) -> CircleRope:
    return vp.build(settings or spec(), DIMS).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (1, 1)])
def test_shape(hw):
    out = rope()(Grid(*hw))
    assert out.cos.shape == (hw[0] * hw[1], 12)
    assert out.cos.isfinite().all()


@given(grids(max_side=7))
def test_reference_angles(hw):
    """Even layers: sections of (t, y, x) on the circle; odd layers: of (0, y, x), as M-RoPE."""
    module = rope(spec(order="interleaved"))
    for layer, ids in (
        (2, circles.circle(*hw, 10.0, 0.5)),
        (3, [(0.0, y, x) for y, x in where.index(*hw)]),
    ):
        expected = oracle.section_angles(
            torch.tensor(ids).double().numpy(), 24, (4, 4, 4), 1e4, interleaved=True
        )
        turns = module.angles(module.points(Grid(*hw)), layer)
        torch.testing.assert_close(turns.double(), torch.from_numpy(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [True] * 5),
        ("even", [True, False, True, False, True]),
        ("first_half", [True, True, True, False, False]),
        ("second_half", [False, False, False, True, True]),
    ],
)
def test_invariant_layers(layers, expected):
    """The source's strategies 4, 2 and 3; 36 layers split 18 and 18 there."""
    module = rope(spec(layers=layers))
    assert [module.uses_circle(layer) for layer in range(5)] == expected
    assert module.layerwise == (layers != "all")
    assert module.uses_circle(-1) == expected[-1]


@given(grids(max_side=6))
def test_invariant_text_sees_all_cells_alike(hw):
    """With one ladder value on all three axes the score of a text token with equal cells is one number."""
    module = rope(spec(layers="all", radius=3.0))
    ids = torch.from_numpy(circles.circle(*hw, 3.0, 0.5))
    freqs = torch.full((3, 1), 0.3).double()
    text = vp.angles(torch.full((1, 3), 9.0).double(), freqs)
    gap = vp.angles(ids, freqs) - text
    torch.testing.assert_close(gap, gap[:1].expand_as(gap), rtol=0, atol=1e-9)
    assert module.coords == CoordSpec()


def test_invariant_it_is_not_relative():
    """A circle depends on its image: the same two neighbours score otherwise in a wider one (claimed so)."""
    module = rope(spec(layers="all"))
    q, k = torch.randn(2, 1, 1, 1, 24)

    def score(grid):
        turns = module.angles(module.points(grid))
        return (module.rotation(turns[:1]).apply(q) * module.rotation(turns[1:2]).apply(k)).sum()

    assert (score(Grid(3, 5)) - score(Grid(3, 9))).abs() > 1e-3


def test_invariant_shift_and_rescale_do_nothing_on_the_circle():
    """Cells are centred first and the radius is fixed: these augmentations are not felt."""
    moved = spec(layers="all", coords=CoordSpec(shift=3.0, rescale=2.0))
    still = rope(spec(layers="all"))(Grid(3, 5))
    torch.testing.assert_close(rope(moved).train()(Grid(3, 5)).cos, still.cos, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sections": (4, 4)}, r"sections are \(4, 4\)"),
        ({"coords": CoordSpec(axes=3)}, r"coords have 3 axes"),
        ({"layers": "odd"}, r"layers is 'odd'; it must be one of 'all', 'even'"),
        ({"alpha": 2.0}, r"alpha 2\.0; .*alpha in \[0, 1\]"),
        ({"radius": -1.0}, r"radius is -1\.0, .*above 0"),
        ({"order": "dealt"}, r"order is 'dealt'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        spec(**fields)


def test_error_at_build_and_use():
    with pytest.raises(PositionError, match=r"turn 128 channels and a head has 24"):
        vp.build(CircleRopeSpec(sections=(16, 24, 24)), DIMS)
    with pytest.raises(PositionError, match=r"grid has 2 frames; Circle-RoPE is made for images"):
        rope()(Grid(3, 5, frames=2))
    with pytest.raises(PositionError, match=r"layer is 5; the encoding has 5 layers"):
        rope()(Grid(3, 5), layer=5)


@pytest.mark.parametrize("layer", [0, 1])
def test_compile_one_graph_over_six_sizes(layer):
    module = rope()
    calls = [(torch.randn(2, 3, h * w, 24), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, h, w: module(Grid(h, w), layer=layer).apply(q), calls) == 1


def test_device(device):
    there = rope()(Grid(3, 5), device=device)
    assert there.cos.device.type == device.type
    torch.testing.assert_close(there.cos.cpu(), rope()(Grid(3, 5)).cos, rtol=1e-4, atol=1e-4)


def test_reference_yaml():
    """config.json of the source, on heads of 64 channels."""
    settings = load_encoding("circle_rope")
    assert (settings.radius, settings.alpha, settings.layers) == (10.0, 0.5, "even")
    assert settings.theta == 1e6
    assert_close_to(
        vp.build(settings, Dims(embed_dim=64, num_heads=1, depth=1)).freqs(),
        vp.section_freqs(64, (8, 12, 12), theta=1e6, order="contiguous"),
        kind="exact",
    )


def test_error_places():
    """No cell at all, a cell that is nowhere, one axis too many."""
    with pytest.raises(PositionError, match=r"coords has shape \(0, 2\); .*n of at least 1"):
        circle_coords(torch.zeros(0, 2))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(PositionError, match=r"coords holds NaN or infinity"):
            circle_coords(torch.tensor([[0.0, 1.0], [bad, 1.0]]))


def test_invariant_half_precision_coordinates():
    """Raster numbers beyond 256 have no bfloat16: the circle is formed in float32."""
    coords = vp.coordinates(Grid(17, 20))  # whole numbers up to 19 are exact in bfloat16
    around = circle_coords(coords.bfloat16())
    assert around.dtype == torch.float32
    assert torch.equal(around, circle_coords(coords))
