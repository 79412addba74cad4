"""The doors: what every encoding owes to the model it serves, whatever its scheme."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from visionpos import CoordSpec, Dims, Grid, PositionError, Rotation
from visionpos.encodings import Additive, Rotary, spec_types

DIMS = Dims(embed_dim=48, num_heads=2, depth=3, prefix=1)
SPECS = {
    "axial": vp.AxialRopeSpec(),
    "dinov3": vp.AxialRopeSpec(
        unit="turns", pairing="half", coords=CoordSpec(unit="centred", rescale=2.0, shift=0.1)
    ),
    "mixed": vp.MixedRopeSpec(coords=CoordSpec(jitter=1.5)),
    "sincos": vp.SinCosSpec(),
    "big_vision": vp.SinCosSpec(dialect="big_vision"),
    "learned": vp.LearnedSpec(grid_hw=(4, 9), prefix_rows=1),
}
ROTARY = ("axial", "dinov3", "mixed")
RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (4, 9), (6, 6)]


def evaluate(module: nn.Module, grid: Grid, **how) -> torch.Tensor:
    """What a module gives on a grid, as one tensor."""
    out = module(grid, **how)
    return torch.stack([out.cos, out.sin]) if isinstance(out, Rotation) else out


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", SPECS)
def test_shape_of_every_encoding(name, hw):
    """[n, embed_dim] to add, or a Rotation of n tokens, row-major, without prefix rows."""
    module, n = vp.build(SPECS[name], DIMS).eval(), hw[0] * hw[1]
    out = module(Grid(*hw))
    if name in ROTARY:
        assert isinstance(module, Rotary)
        assert (out.n, out.pairs) == (n, DIMS.channels // 2)
        assert out.pairing == module.pairing
    else:
        assert isinstance(module, Additive)
        assert out.shape == (n, DIMS.embed_dim)


@pytest.mark.parametrize("name", SPECS)
def test_shape_of_a_clip(name):
    """With (y, x) coordinates the frames of a clip share their code."""
    module = vp.build(SPECS[name], DIMS).eval()
    clip, image = (evaluate(module, grid) for grid in (Grid(3, 5, frames=2), Grid(3, 5)))
    assert torch.equal(clip, torch.cat([image, image], dim=-2))


@pytest.mark.parametrize(
    ("dims", "channels"),
    [
        (Dims(embed_dim=384, num_heads=6, depth=12, prefix=1), 64),
        (Dims(embed_dim=384, num_heads=5, depth=1, head_dim=48), 48),  # timm's attn_head_dim
        (Dims(embed_dim=8, num_heads=1, depth=1), 8),
    ],
)
def test_shape_of_dims(dims, channels):
    assert dims.channels == channels


@pytest.mark.parametrize("name", SPECS)
def test_invariant_specs_are_values(name):
    """A spec is frozen and hashable; its kind names its class."""
    spec = SPECS[name]
    assert spec_types()[spec.kind] is type(spec)
    assert hash(spec) == hash(copy.deepcopy(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.kind = "other"


@pytest.mark.parametrize("name", SPECS)
def test_invariant_no_cache_between_equal_counts(name):
    """Facts 5.7: A, B, A with 36 cells each: B gets its own numbers, and A comes back to the bit."""
    module = vp.build(SPECS[name], DIMS).eval()
    first = evaluate(module, Grid(4, 9))
    other = evaluate(module, Grid(6, 6))
    fresh = evaluate(copy.deepcopy(module), Grid(6, 6))
    assert torch.equal(evaluate(module, Grid(4, 9)), first)
    assert torch.equal(other, fresh)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_invariant_copies_are_independent(name):
    """deepcopy (EMA, teacher) and pickle carry their own state: changing one leaves the other."""
    module = vp.build(SPECS[name], DIMS).eval()
    before = evaluate(module, Grid(3, 5))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(evaluate(other, Grid(3, 5)), before)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(3)
        changed = bool(list(other.parameters()))
        assert torch.equal(evaluate(other, Grid(3, 5)), before) != changed
        assert torch.equal(evaluate(module, Grid(3, 5)), before)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_state_dict_round_trip(name):
    """Parameters are the whole state: no buffers, so nothing fixed is stored, cast or stale in a checkpoint."""
    one, two = vp.build(SPECS[name], DIMS).eval(), vp.build(SPECS[name], DIMS).eval()
    assert not list(one.buffers())
    assert set(one.state_dict()) == {key for key, _ in one.named_parameters()}
    two.load_state_dict(one.state_dict())
    assert torch.equal(evaluate(one, Grid(3, 5)), evaluate(two, Grid(3, 5)))


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"mixed", "learned"}))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_invariant_casts_change_no_frequency(name, dtype):
    """Facts 5.37: module.to(bf16) then angle error < 1e-3: here the error is zero, there is nothing to cast."""
    module = vp.build(SPECS[name], DIMS).eval()
    before = evaluate(module, Grid(32, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(evaluate(module.to(dtype), Grid(32, 30)), before)


@pytest.mark.parametrize("name", ROTARY)
def test_invariant_training_moves_and_eval_does_not(name):
    """Jitter is drawn in training alone, from a passed generator, and eval repeats itself."""
    module = vp.build(SPECS[name], DIMS)
    still = [evaluate(module.eval(), Grid(3, 5)) for _ in range(2)]
    assert torch.equal(*still)
    module.train()
    drawn = [
        evaluate(module, Grid(3, 5), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    augments = SPECS[name].coords.augments
    assert torch.equal(drawn[0], drawn[2]) != augments
    assert torch.equal(drawn[0], still[0]) != augments


@pytest.mark.parametrize("name", ROTARY)
def test_invariant_forward_is_its_three_steps(name):
    """points -> angles -> Rotation: the steps can be called alone, with a draw that all layers share."""
    module = vp.build(SPECS[name], DIMS).train()
    points = module.points(Grid(3, 5), generator=torch.Generator().manual_seed(4))
    steps = Rotation.of(module.angles(points, 1), module.pairing)
    whole = module(Grid(3, 5), layer=1, generator=torch.Generator().manual_seed(4))
    if name == "mixed":  # one product a cell: Rotary.over
        torch.testing.assert_close(steps.cos, whole.cos, rtol=0, atol=1e-5)
        torch.testing.assert_close(steps.sin, whole.sin, rtol=0, atol=1e-5)
    else:
        assert torch.equal(steps.cos, whole.cos)
        assert torch.equal(steps.sin, whole.sin)
    assert module.points(Grid(3, 5), draws=4).shape == (4, 15, 2)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"embed_dim": 0}, r"Dims are \(0, 6, 12, 1\) with prefix 0; sizes of at least 1"),
        ({"num_heads": 0}, r"Dims are \(384, 0, 12, 1\)"),
        ({"depth": -1}, r"Dims are \(384, 6, -1, 1\)"),
        ({"prefix": -1}, r"with prefix -1;.*prefix of at least 0"),
        ({"head_dim": 0}, r"Dims are \(384, 6, 12, 0\)"),
        ({"head_dim": -4}, r"Dims are \(384, 6, 12, -4\)"),
        ({"num_heads": 5}, r"embed_dim 384 is not divisible by num_heads 5;.*Pass head_dim"),
    ],
)
def test_error_dims(sizes, match):
    with pytest.raises(PositionError, match=match):
        Dims(**{"embed_dim": 384, "num_heads": 6, "depth": 12, **sizes})


@pytest.mark.parametrize("spec", [None, CoordSpec(), vp.AxialRopeSpec])
def test_error_build(spec):
    """Only a Spec instance builds; the message lists the classes."""
    match = r"spec is .*; one of .*AxialRopeSpec, .*SinCosSpec.* is required"
    with pytest.raises(PositionError, match=match):
        vp.build(spec, DIMS)


@pytest.mark.parametrize("name", SPECS)
def test_gradient_reaches_every_parameter(name):
    """Whatever is learned is learned at every grid, also away from the trained one."""
    module = vp.build(SPECS[name], DIMS).eval()
    weights = list(module.parameters())
    if not weights:
        return
    layers = range(DIMS.depth) if name in ROTARY else [None]
    for layer in layers:
        out = evaluate(module, Grid(7, 5), **({} if layer is None else {"layer": layer}))
        (out * torch.randn_like(out)).sum().backward()
    rows = weights[0].grad[1:] if name == "learned" else weights[0].grad  # row 0 belongs to no cell
    assert (rows.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", SPECS)
def test_compile_one_graph_over_six_sizes(name):
    """A module is called with a grid inside the graph; six rectangles need one graph."""
    module = vp.build(SPECS[name], DIMS).eval()

    def direct(h, w):
        """What graphs take: frequencies a head have a faster form in eager mode (Rotary.over)."""
        if name != "mixed":
            return evaluate(module, Grid(h, w))
        turns = module.rotation(module.angles(module.points(Grid(h, w))))
        return torch.stack([turns.cos, turns.sin])

    assert graphs_of(lambda h, w: evaluate(module, Grid(h, w)), SIZES, direct) == 1


@pytest.mark.parametrize("name", SPECS)
def test_device(name, device):
    """On a device everything is built there, and equals the CPU's numbers."""
    module = vp.build(SPECS[name], DIMS).eval()
    here = evaluate(module, Grid(3, 5))
    module = module.to(device)
    there = evaluate(module, Grid(3, 5), device=torch.empty(0, device=device).device)
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_device_fake_cuda(name, training):
    """DESIGN.md 7: fake CUDA tensors raise at any operation that mixes devices, without a GPU."""
    module, cuda = vp.build(SPECS[name], DIMS).train(training), torch.device("cuda", 0)
    with FakeTensorMode():
        for key, weight in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        assert evaluate(module, Grid(3, 5), device=cuda).device == cuda
        if name == "learned":
            assert module.at(torch.empty(7, 2, device=cuda), (3, 5)).device == cuda
