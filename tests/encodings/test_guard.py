"""Guard: what every encoding refuses at its two entrances, the call and the state dict."""

import copy
import pickle
from inspect import signature

import numpy as np
import pytest
import torch
from torch import nn

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding, shipped
from visionpos.encodings import spec_types
from visionpos.encodings.guard import Guarded

_SIZES = {
    "lookhere": Dims(embed_dim=768, num_heads=12, depth=12),
    "conv_relative": Dims(embed_dim=192, num_heads=8, depth=2),
    "circle_rope": Dims(embed_dim=256, num_heads=2, depth=2),
    "comrope": Dims(embed_dim=96, num_heads=2, depth=2),
}
_PLAIN = Dims(embed_dim=96, num_heads=4, depth=2)


def _one_a_kind() -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for name in shipped("encodings"):
        spec = load_encoding(name)
        if spec.kind not in modules:
            modules[spec.kind] = vp.build(spec, _SIZES.get(spec.kind, _PLAIN)).eval()
    return modules


MODULES = _one_a_kind()
WITH_GRID = [kind for kind in MODULES if kind != "prompt"]
LEARNING = [kind for kind, module in MODULES.items() if module.state_dict()]
TO_GRID = [
    kind for kind in WITH_GRID if "grid" in list(signature(MODULES[kind].forward).parameters)[:1]
]


def test_every_kind_is_guarded():
    assert set(MODULES) == set(spec_types())
    assert all(isinstance(module, Guarded) for module in MODULES.values())
    assert {"learned", "mixed_rope", "swin_table", "peg", "prompt", "gpsa", "pape"} <= set(LEARNING)


@pytest.mark.parametrize("grid", [(3, 5), 15, [3, 5], torch.tensor([3, 5]), "3x5"], ids=str)
@pytest.mark.parametrize("kind", WITH_GRID)
def test_error_grid(kind, grid):
    """A pair of sides, a token count, a text: named, with the remedy, by position and by name alike."""
    module = MODULES[kind]
    names = list(signature(module.forward).parameters)
    others = [torch.zeros(1)] * names.index("grid")  # refused before they are looked at
    with pytest.raises(PositionError, match=r"^grid is .*; a Grid of tokens .*Grid\(h, w\)"):
        module(*others, grid)
    with pytest.raises(PositionError, match=r"^grid is .*Grid\(h, w\)"):
        module(*others, grid=grid)


def test_error_other_grids():
    with pytest.raises(PositionError, match=r"^keys is \(3, 5\); a Grid of tokens"):
        MODULES["decomposed_bias"](torch.zeros(1), Grid(3, 5), keys=(3, 5))
    for points in (MODULES["axial_rope"].points, MODULES["liere"].points, vp.coordinates):
        with pytest.raises(PositionError, match=r"^grid is \(3, 5\); a Grid of tokens"):
            points((3, 5))


def _first(out: object) -> torch.Tensor:
    """One tensor of what an encoding gives: a code, a bias, or the numbers of a turn."""
    for name in ("rotation", "cos", "matrices"):
        out = out if isinstance(out, torch.Tensor) else getattr(out, name, out)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("kind", TO_GRID)
def test_device_by_name(kind):
    """torch takes "cpu" wherever it takes torch.device("cpu"), and so does every encoding."""
    module = MODULES[kind]
    grid = Grid(8, 16)  # whole windows of Hiera
    if kind == "spatiotemporal":
        grid = Grid(4, 6, frames=module.spec.grid_thw[0])
    assert torch.equal(_first(module(grid, device="cpu")), _first(module(grid)))


@pytest.mark.parametrize("kind", ["learned", "swin_table", "fire", "factorized", "abswin"])
def test_error_device_by_name(kind):
    """A device that the parameters are not on is refused, as torch.device and as a name."""
    for device in ("cuda:0", torch.device("cuda", 0)):
        with pytest.raises(PositionError, match=r"^device is cuda:0 and the .* on cpu; move"):
            MODULES[kind](Grid(8, 16), device=device)


@pytest.mark.parametrize("kind", LEARNING)
def test_error_state_dict_of_another_shape(kind):
    """Every key, inner layers' too: named with both shapes and the remedy, and nothing is copied."""
    module = copy.deepcopy(MODULES[kind])
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for key, value in before.items():
        state = {name: torch.zeros_like(other) for name, other in before.items()}
        state[key] = torch.zeros(*value.shape, 2)
        found, needed = tuple(state[key].shape), tuple(value.shape)
        for strict in (True, False):
            with pytest.raises(PositionError) as caught:
                module.load_state_dict(state, strict=strict)
            message = str(caught.value)
            assert message.startswith(f"{key} has shape {found} in the state dict; ")
            assert f"{type(module).__name__} needs {needed}. Build it with the spec" in message
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("kind", LEARNING)
def test_state_dict_keeps_torch_s_own_rules(kind):
    """Missing and unexpected keys are torch's business: an error when strict, a list when not."""
    module, state = copy.deepcopy(MODULES[kind]), MODULES[kind].state_dict()
    assert module.load_state_dict(state).missing_keys == []
    first = next(iter(state))
    short = {key: value for key, value in state.items() if key != first}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        module.load_state_dict(short)
    assert module.load_state_dict(short, strict=False).missing_keys == [first]
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\)"):
        module.load_state_dict({**state, "other": torch.zeros(1)})
    loose = module.load_state_dict({**state, "other": torch.zeros(1)}, strict=False)
    assert loose.unexpected_keys == ["other"]


@pytest.mark.parametrize("kind", LEARNING)
def test_guard_survives_copies_and_sits_inside_models(kind):
    """deepcopy (EMA) and pickle keep it, and inside a model the message says where."""
    for module in (copy.deepcopy(MODULES[kind]), pickle.loads(pickle.dumps(MODULES[kind]))):
        model = nn.ModuleDict({"inner": nn.Sequential(module)})
        state = model.state_dict()
        key = next(iter(state))
        state[key] = torch.zeros(*state[key].shape, 2)
        with pytest.raises(PositionError, match=rf"^{key.replace('.', '[.]')} has shape"):
            model.load_state_dict(state)


def test_load_assigns_and_skips_what_is_no_tensor():
    module = copy.deepcopy(MODULES["learned"])
    table = torch.zeros_like(module.table)
    module.load_state_dict({"table": table}, assign=True)
    assert module.table.data_ptr() == table.data_ptr()
    with pytest.raises(PositionError, match=r"^table has shape \(2, 2\)"):
        module.load_state_dict({"table": torch.zeros(2, 2)}, assign=True)
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
        module.load_state_dict({"table": 3})


@pytest.mark.parametrize("kind", ["axial_rope", "mixed_rope", "learned", "t5_bias", "alibi"])
def test_compile_one_graph_over_six_sizes(kind):
    """The guard of a call costs no graph: the module itself is compiled, not a function around it."""
    module = MODULES[kind]

    def run(height: int, width: int) -> torch.Tensor:
        out = module(Grid(height, width))
        return out.cos if isinstance(out, vp.Rotation) else out

    def direct(height: int, width: int) -> torch.Tensor:  # what graphs take: see Rotary.over
        if kind != "mixed_rope":
            return run(height, width)
        return module.rotation(module.angles(module.points(Grid(height, width)))).cos

    assert graphs_of(run, SIZES, direct) == 1


def test_compile_a_module():
    """torch.compile of the module object, as users write it."""
    torch._dynamo.reset()
    module = MODULES["peg"]
    tokens = torch.randn(1, 15, 96)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(tokens, Grid(3, 5)), module(tokens, Grid(3, 5)))
    torch._dynamo.reset()


TENSORS = [
    (kind, name)
    for kind in MODULES
    for name in signature(MODULES[kind].forward).parameters
    if name in ("q", "k", "v", "tokens", "attention")
]


@pytest.mark.parametrize(("kind", "name"), TENSORS)
def test_error_tokens_that_are_no_floats(kind, name):
    """Whole numbers were cut on the way back, or a bare error; so were lists and numpy's arrays."""
    module = MODULES[kind]
    names = [one for one in signature(module.forward).parameters if one not in ("prefix", "keys")]
    given = {
        one: Grid(3, 5) if one == "grid" else torch.zeros(1, 1, 16, 1)
        for one in names
        if signature(module.forward).parameters[one].default is not None
    }
    given.pop("slot", None)
    for bad in (torch.zeros(1, 4, 16, 4, dtype=torch.int64), torch.zeros(1) > 0):
        with pytest.raises(PositionError, match=rf"^{name} is {bad.dtype}; a tensor of floats"):
            module(**{**given, name: bad})
    for bad in (None, [1.0], "x", torch.zeros(2).numpy()):
        with pytest.raises(
            PositionError, match=rf"^{name} is {type(bad).__name__}; a tensor of fl"
        ):
            module(**{**given, name: bad})


@pytest.mark.parametrize("kind", TO_GRID)
def test_error_no_grid(kind):
    """None was read as an argument that is missing."""
    with pytest.raises(PositionError, match=r"^grid is None; a Grid of tokens"):
        MODULES[kind](None)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'grid'"):
        MODULES[kind]()


@pytest.mark.parametrize("kind", TO_GRID)
def test_error_devices_and_generators(kind):
    """A seed in the place of a generator was ignored where nothing is drawn."""
    named = signature(MODULES[kind].forward).parameters
    if "device" in named:
        for bad in ("gpu", 1.5):
            with pytest.raises(
                PositionError, match=rf"^device is {bad!r}; a device as torch knows"
            ):
                MODULES[kind](Grid(3, 5), device=bad)
    if "generator" in named:
        with pytest.raises(
            PositionError, match=r"^generator is 3; a torch\.Generator .*manual_seed"
        ):
            MODULES[kind](Grid(3, 5), generator=3)


@pytest.mark.parametrize("kind", ["liere", "comrope", "string_rope"])
def test_error_turning_on_another_device(kind):
    with pytest.raises(PositionError, match=r"device is meta and the generators are on cpu; move"):
        MODULES[kind](Grid(3, 5), device="meta")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("mixed_rope", "freqs"),
        ("circle_rope", "uses_circle"),
        ("lookhere", "slopes"),
        ("liere", "turns"),
        ("comrope", "turns"),
        ("string_rope", "turns"),
    ],
)
def test_error_layers(kind, method):
    """True picked all layers at once, 1.5 and a text were bare errors, or the layers between."""
    call = getattr(MODULES[kind], method)
    coords = [torch.zeros(3, 2)] if method == "turns" else []
    for bad in (True, 1.5, "0", None, 99, -99):
        with pytest.raises(PositionError, match=rf"layer is {bad!r}; the encoding has \d+ layers"):
            call(*coords, layer=bad)
    call(*coords, layer=np.int64(1))


@pytest.mark.parametrize("kind", LEARNING)
def test_error_states_that_are_none(kind):
    load = next(
        (
            getattr(MODULES[kind], name)
            for name in ("from_source", "from_segment_anything", "from_comrope")
            if hasattr(MODULES[kind], name)
        ),
        getattr(MODULES[kind], "from_timm", None),
    )
    if load is None or kind == "mixed_rope":  # a tensor, not a state
        pytest.skip("reads no state dict")
    more = [] if kind == "comrope" else [MODULES[kind].spec, MODULES[kind].dims]
    for bad in (None, 3, [1], {1: torch.zeros(1)}):
        with pytest.raises(PositionError, match=r"state is \w+; a state dict, name to tensor"):
            load(bad, *more)
    with pytest.raises(PositionError, match=r"lacks|has no entry|many"):
        load({}, *more)


def test_error_states_with_what_is_no_tensor():
    table = MODULES["learned"]
    with pytest.raises(PositionError, match=r"state holds int at pos_embed; a tensor is required"):
        table.from_source({"pos_embed": 3}, table.spec, table.dims)
    good = {"pos_embed": torch.zeros_like(table.table), "head._extra_state": None}
    assert torch.equal(table.from_source(good, table.spec, table.dims).table, good["pos_embed"])


def test_error_build():
    with pytest.raises(
        PositionError, match=r"spec is 'dinov3', a name; .*load_encoding\('dinov3'\)"
    ):
        vp.build("dinov3", _PLAIN)
    for bad in (None, (384, 6, 12), {"embed_dim": 384}):
        with pytest.raises(PositionError, match=r"dims is .*; a Dims is required"):
            vp.build(vp.AxialRopeSpec(), bad)


@pytest.mark.parametrize("kind", ["peg", "conv_relative"])
def test_error_dtypes_of_a_convolution(kind):
    """torch's own message names the layer inside; under autocast any float is taken."""
    module, name = (MODULES[kind], "tokens" if kind == "peg" else "v")
    dims = module.dims
    shape = (2, 15, dims.embed_dim) if kind == "peg" else (2, dims.num_heads, 15, dims.channels)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    args = [x] if kind == "peg" else [x, x]
    with pytest.raises(
        PositionError, match=rf"{name} is torch.bfloat16 and the weights are torch.f"
    ):
        module(*args, Grid(3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(*args, Grid(3, 5)).shape == shape
