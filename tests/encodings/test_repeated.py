"""Tables that are kept while weights stay: never an old one, whichever way a weight was written."""

import copy
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import prune

from visionpos import Dims, Grid
from visionpos.encodings import Fire, FireSpec, LogBias, LogBiasSpec

DIMS = Dims(embed_dim=8, num_heads=2, depth=1)
GRID = Grid(3, 5)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "fire":
        return Fire(FireSpec(hidden=8), DIMS).eval()
    return LogBias(LogBiasSpec(pretrained_window_hw=(8, 8), hidden=16), DIMS).eval()


def fresh(module: nn.Module, grid: Grid = GRID) -> Tensor:
    """Return the table of a copy that has never been evaluated: the oracle of staleness."""
    clean = made("fire" if isinstance(module, Fire) else "log")
    clean.load_state_dict(module.state_dict())
    clean.train()
    with torch.no_grad():
        return clean.distinct(grid)


def scaled_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.out.weight.mul_(3.0)


def written_through_data(module: nn.Module) -> None:
    module.out.weight.data.mul_(3.0)  # no version counter moves


def data_replaced(module: nn.Module) -> None:
    module.hidden.weight.data = module.hidden.weight.data * 3.0


def parameter_replaced(module: nn.Module) -> None:
    module.out.weight = nn.Parameter(module.out.weight.detach() * 3.0)


def loaded(module: nn.Module) -> None:
    module.load_state_dict({key: value * 3.0 for key, value in module.state_dict().items()})


def assigned(module: nn.Module) -> None:
    other = {key: value * 3.0 for key, value in module.state_dict().items()}
    module.load_state_dict(other, assign=True)


def written_by_numpy(module: nn.Module) -> None:
    module.out.weight.detach().numpy()[...] *= 3.0


WAYS = [
    scaled_in_place,
    written_through_data,
    data_replaced,
    parameter_replaced,
    loaded,
    assigned,
    written_by_numpy,
]


@pytest.mark.parametrize("kind", ["log", "fire"])
@pytest.mark.parametrize("write", WAYS)
def test_stale_never(kind: str, write: Callable[[nn.Module], None]) -> None:
    module = made(kind)
    with torch.no_grad():
        before = module.distinct(GRID)
        write(module)
        after = module.distinct(GRID)
    assert torch.equal(after, fresh(module))
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("kind", ["log", "fire"])
def test_kept_table_is_the_callers_own_and_other_grids_are_other_tables(kind: str) -> None:
    module = made(kind)
    with torch.no_grad():
        first = module.distinct(GRID).clone()
        module.distinct(GRID).zero_()
        assert torch.equal(module.distinct(GRID), first)
        assert torch.equal(module.distinct(Grid(5, 3)), fresh(module, Grid(5, 3)))
        assert torch.equal(module.distinct(GRID), first)


def test_evaluated_once_and_only_where_nothing_is_learned() -> None:
    module = made("log")
    with patch.object(LogBias, "_distinct", autospec=True, side_effect=LogBias._distinct) as calls:
        with torch.no_grad():
            module(GRID), module(GRID)
        assert calls.call_count == 1
        module(GRID), module.train()(GRID)
        assert calls.call_count == 3
    module(GRID).square().sum().backward()
    assert module.out.weight.grad is not None


def test_copies_pickles_and_state_dicts() -> None:
    module = made("log")
    keys = list(module.state_dict())
    with torch.inference_mode():
        table = module(GRID)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for other in copies:
        scaled_in_place(other)
        with torch.no_grad():
            assert torch.equal(other.distinct(GRID), fresh(other))
    assert list(module.state_dict()) == keys
    with torch.no_grad():
        assert torch.equal(module(GRID), table)
    with torch.no_grad():
        wide = module.double()(GRID)
    assert wide.dtype == torch.float64


def test_nan_is_never_the_same() -> None:
    module = made("log")
    with torch.no_grad():
        module.out.weight[0, 0] = float("nan")
        assert module(GRID).isnan().any()
        module.out.weight[0, 0] = 0.0
        assert not module(GRID).isnan().any()


def test_functional_call_and_vmap() -> None:
    module = made("log")
    weights = {name: value.detach() for name, value in module.named_parameters()}
    other = {name: 3.0 * value for name, value in weights.items()}
    with torch.no_grad():
        module(GRID)
        found = torch.func.functional_call(module, other, (GRID,))
        stacked = {name: torch.stack([weights[name], other[name]]) for name in weights}
        both = torch.vmap(lambda w: torch.func.functional_call(module, w, (GRID,)))(stacked)
        loaded(module)
        assert torch.equal(found, module(GRID))
    assert torch.allclose(both[1], found, atol=1e-6)


@pytest.mark.parametrize("kind", ["log", "fire"])
def test_mask_of_pruning_is_seen(kind: str) -> None:
    """The weights stay when a mask is drawn anew: it is a buffer."""
    module = made(kind)
    with torch.no_grad():
        prune.l1_unstructured(module.out, "weight", 0.5)
        before = module.distinct(GRID)
        prune.random_unstructured(module.out, "weight", 0.5)
        after = module.distinct(GRID)
        wanted = module.train().distinct(GRID)
    assert torch.equal(after, wanted)
    assert not torch.allclose(after, before)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:FutureWarning"
)  # torch's own forward mode
@pytest.mark.parametrize("kind", ["log", "fire"])
def test_nothing_of_a_transform_is_kept(kind: str) -> None:
    module = made(kind)

    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad():
            table = module.distinct(GRID)
        return (table * x).sum()

    torch.func.grad(scaled)(torch.tensor(1.0))
    pickle.dumps(module)
    with torch.no_grad():
        assert torch.equal(module.distinct(GRID), fresh(module))
        bias = {"out.bias": module.state_dict()["out.bias"]} if kind == "fire" else {}
        for name, value in bias.items():  # added to every entry, so the tangent is 1
            _, tangent = torch.func.jvp(
                lambda v, name=name: torch.func.functional_call(module, {name: v}, (GRID,)),
                (value,),
                (torch.ones_like(value),),
            )
            assert torch.equal(tangent, torch.ones_like(tangent))


@pytest.mark.parametrize("kind", ["log", "fire"])
def test_nothing_fake_is_kept(kind: str) -> None:
    """A model planned under a mode that makes new tensors fake gives real tables afterwards, and the other way."""
    module = made(kind)
    with torch.no_grad():
        for grid in (GRID, Grid(5, 2)):
            if grid != GRID:
                module.distinct(grid)
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert isinstance(module.distinct(grid), FakeTensor)
            assert torch.equal(module.distinct(grid), fresh(module, grid))
