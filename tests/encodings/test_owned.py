"""What an encoding returns is the caller's: an edit in place never reaches a parameter."""

import pytest
import torch

from tests.encodings import test_additive, test_biasing
from visionpos import Dims, Grid
from visionpos.encodings import PromptEncoder, PromptSpec, build

# The trained grids of the learned specs among them, where nothing needs to be computed.
GRIDS = [(4, 9), (3, 8), (5, 6), (4, 6), (19, 19), (3, 5)]


def unchanged(module, results) -> None:
    """Overwrite the first row of every result, and compare the parameters with what they were."""
    before = {key: weight.detach().clone() for key, weight in module.named_parameters()}
    for result in results():
        with torch.no_grad():
            result[:1] = 7.0
    for key, weight in module.named_parameters():
        assert torch.equal(weight, before[key]), key


@pytest.mark.parametrize("name", test_additive.SPECS)
def test_invariant_added_codes(name):
    module = test_additive.built(name)
    unchanged(module, lambda: (module(Grid(*hw)) for hw in GRIDS))
    if hasattr(module, "prefix"):
        unchanged(module, lambda: [module.prefix()])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", test_biasing.SPECS)
def test_invariant_biases(name, heads):
    """One head too, whose table is contiguous either way round."""
    if name == "lookhere" and heads == 1:
        pytest.skip("a view has four heads")
    module = test_biasing.biasing(name, dims=Dims(embed_dim=32, num_heads=heads, depth=1))
    for hw in GRIDS:
        if name != "swin_crop" or max(hw) <= 19:
            unchanged(module, lambda hw=hw: [module.distinct(Grid(*hw)), module(Grid(*hw))])
    if module.prefix_values() is not None:
        unchanged(module, lambda: [module.prefix_values()])


def test_invariant_prompts():
    """The vector of no mask, seen from every cell."""
    module = PromptEncoder(PromptSpec(input_hw=(48, 80)), Dims(embed_dim=8, num_heads=1, depth=1))
    unchanged(module, lambda: [module.dense(None), module.grid_code()])


@pytest.mark.parametrize("name", ["learned", "joint", "separable"])
def test_gradient_still_reaches_the_table(name):
    """A copy is no cut: the trained grid learns."""
    module = build(test_additive.SPECS[name], test_additive.DIMS)
    module(Grid(4, 9)).sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in module.parameters())
