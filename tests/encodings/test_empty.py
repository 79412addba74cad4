"""Empty batches: a result of the right shape and no token, wherever a batch may be empty."""

import pytest
import torch

from visionpos import Dims, Grid, PositionError
from visionpos.encodings import (
    ConvRelativeSpec,
    DecomposedBiasSpec,
    GpsaSpec,
    PapeSpec,
    PegSpec,
    PromptEncoder,
    PromptSpec,
    Sine,
    SineSpec,
    build,
)

DIMS = Dims(embed_dim=16, num_heads=4, depth=2, prefix=1)
GROUPS = {"kernels": (3, 5), "heads": (1, 3)}


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(3, 5, frames=2)])
def test_shape_of_conditional_encodings(grid):
    n = 1 + grid.size
    q = torch.zeros(0, 4, n, 4)
    for spec in (
        PegSpec(),
        PegSpec(padding="circular"),
        PegSpec(activation="gelu", residual=False),
    ):
        assert build(spec, DIMS)(torch.zeros(0, n, 16), grid).shape == (0, n, 16)
    assert build(ConvRelativeSpec(**GROUPS), DIMS)(q, q, grid).shape == q.shape
    if grid.frames == 1:
        assert build(GpsaSpec(), DIMS)(torch.zeros(0, 4, n, n), grid).shape == (0, 4, n, n)


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_shape_of_biases_with_the_query(channels):
    q = torch.zeros(0, 4, 16, 4)
    decomposed = build(DecomposedBiasSpec(extent=(3, 5)), DIMS)
    assert decomposed(q, Grid(3, 5), prefix=1).shape == (0, 4, 16, 16)
    pape = build(PapeSpec(parabolas=3, channels=channels), DIMS)
    longer, _ = pape(q, q, torch.zeros(0, 16, 16), Grid(3, 5), prefix=1)
    assert longer.shape[:3] == (0, 4, 16)


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)])
def test_shape_of_prompts(lead):
    module = PromptEncoder(PromptSpec(input_hw=(48, 80)), Dims(embed_dim=8, num_heads=1, depth=1))
    masks = torch.zeros(*lead, 12, 20)
    assert module.dense(masks).shape == (*lead, 15, 8)
    points, labels = torch.zeros(*lead, 4, 2), torch.zeros(*lead, 4, dtype=torch.long)
    boxes = torch.zeros(*lead, 4)
    sparse, dense = module(
        module.frame((48, 80)), points=points, labels=labels, boxes=boxes, masks=masks
    )
    assert (sparse.shape, dense.shape) == ((*lead, 6, 8), (*lead, 15, 8))


def test_shape_of_masked_sines():
    """No image is an empty batch; an image without rows or columns is no grid of tokens."""
    module = Sine(SineSpec(), Dims(embed_dim=16, num_heads=1, depth=1))
    assert module.masked(valid=torch.ones(0, 3, 5, dtype=torch.bool)).shape == (0, 15, 16)
    for shape in ((2, 0, 5), (2, 3, 0)):
        with pytest.raises(PositionError, match=r"the mask has shape .* sides of at least 1"):
            module.masked(valid=torch.ones(shape, dtype=torch.bool))
