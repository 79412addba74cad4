"""Compile and device: ids, turns, masks and caches of language models in one graph for all lengths, on any device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import graphs_of
from visionpos import config
from visionpos.geometry import Grid
from visionpos.geometry.latent import Latent, turn_latent
from visionpos.geometry.layer_views import layer_gains, layer_mask, layer_rotation
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.scaling_axes import GridYarn, grid_ladder
from visionpos.geometry.self_extend import SelfExtend, self_extend_attention
from visionpos.geometry.sequence import restart
from visionpos.geometry.streaming import Sinks, turned_again
from visionpos.geometry.yarn import Yarn

LENGTHS = (5, 7, 30, 11)
LLAMA4 = config.load_language("llama4")
ROPE = RopeParams(theta=1e4, scaling=Yarn(factor=4.0, original_positions=16))


def turn_of(accuracy):
    return RopeTurn(rope=ROPE, head_dim=8, accuracy=accuracy)


def normal(n, seed=0):
    return torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("accuracy", ["reference", "exact"])
def test_compile_turn(accuracy):
    turn = turn_of(accuracy)
    assert graphs_of(lambda ids: turn(ids).cos, [(torch.arange(n),) for n in LENGTHS]) == 1


@pytest.mark.parametrize(
    "function",
    [restart, lambda ids: layer_gains(LLAMA4, 3, ids), lambda ids: layer_mask(LLAMA4, 0, ids)],
    ids=["restart", "gains", "mask"],
)
def test_compile_ids_and_masks(function):
    assert graphs_of(function, [(torch.arange(n) // 2,) for n in LENGTHS]) == 1


def test_compile_cache():
    turn = turn_of("reference")
    calls = [(normal(n), torch.arange(n) + 5, torch.arange(n)) for n in LENGTHS]
    assert graphs_of(lambda keys, old, new: turned_again(keys, old, new, turn), calls) == 1


def test_compile_self_extend():
    """One graph for all lengths whose queries are held at once."""
    turn, rule = turn_of("reference"), SelfExtend(group=3, window=4)
    calls = [(normal(n), normal(n, 1), normal(n, 2), torch.arange(n)) for n in LENGTHS]
    assert (
        graphs_of(lambda q, k, v, ids: self_extend_attention(q, k, v, rule, turn, ids), calls) == 1
    )


def test_compile_self_extend_of_packed_rows():
    turn, rule = turn_of("reference"), SelfExtend(group=3, window=4)

    def packed(x, ids, documents):
        return self_extend_attention(x, x, x, rule, turn, ids, documents=documents)

    calls = [(normal(n), torch.arange(n) % 4, torch.arange(n) // 4) for n in LENGTHS]
    assert graphs_of(packed, calls) == 1


def test_device():
    """Fake CUDA tensors raise where two devices are mixed."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        cuda = torch.device("cuda")
        ids = torch.arange(12, device=cuda)
        documents = torch.zeros(12, dtype=torch.int64, device=cuda)
        turn = turn_of(None)
        x = torch.ones(1, 2, 12, 8, device=cuda)
        results = [
            layer_rotation(LLAMA4, 0, ids).cos,
            layer_gains(LLAMA4, 3, ids),
            layer_mask(LLAMA4, 0, documents),
            turned_again(x, ids, ids, turn),
            self_extend_attention(x, x, x, SelfExtend(group=3, window=4), turn, ids),
            self_extend_attention(
                x, x, x, SelfExtend(group=3, window=4), turn, ids, documents=documents
            ),
            Sinks(window=4).kept(20, device=cuda),
            restart(documents),
        ]
        sizes = Latent(still_dim=4, rope_dim=8, value_dim=4, kv_rank=4)
        moving = torch.ones(1, 2, 12, 12, device=cuda)
        results += turn_latent(moving, moving[..., :4], x[:, :1], turn(ids), sizes=sizes)
        built = grid_ladder(GridYarn(), 8, theta=100.0, trained=Grid(3, 4), target=Grid(6, 4))
        results.append(built.rotation(torch.ones(24, 2, device=cuda)).cos)
        assert all(result.device.type == "cuda" for result in results)
