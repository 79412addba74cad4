"""DAPE: both versions against loops, any base, what v2 hides from a query."""

import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import Alibi, AlibiSpec, Dape, DapeSpec, Fire, Kerple

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)


def dape(**fields) -> Dape:
    return Dape(
        DapeSpec(hidden=5, **fields), DIMS, generator=torch.Generator().manual_seed(0)
    ).double()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (2, 7), (1, 1)])
def test_reference(n, m, kernel):
    module = dape(base="alibi", kernel=kernel)
    q, k = drawn(2, 3, n, 4), drawn(2, 3, m, 4, seed=2)
    logits = (q @ k.mT) / 2.0
    bias = module.base.along(n, m)
    layers = [
        (layer.weight.detach().numpy()[:, :, 0], layer.bias.detach().numpy())
        for layer in (module.hidden, module.out)
    ]
    expected = oracle.dape(logits.numpy(), bias.numpy(), layers, causal=kernel > 1)
    torch.testing.assert_close(module(q, k, Grid(1, m)), torch.from_numpy(expected))


def test_shape_of_bases():
    assert isinstance(dape().base, Kerple)
    assert isinstance(dape(base="fire").base, Fire)
    assert dape(base="fire").base.spec.reach == "query"
    none = dape(base="none")
    assert none.base is None
    assert none.hidden.in_channels == 3
    own = Alibi(AlibiSpec(slopes=(1.0, 2.0, 3.0)), DIMS)
    assert Dape(DapeSpec(), DIMS, base=own).base is own


def test_invariant_v2_hides_later_keys():
    """A neighbour after the query is 0 to the network: changing it moves nothing before."""
    module, q, k = dape(kernel=3), drawn(1, 3, 6, 4), drawn(1, 3, 6, 4, seed=2)
    other = k.clone()
    other[:, :, 4:] = 9.0
    one, two = module(q, k, Grid(1, 6)), module(q, other, Grid(1, 6))
    assert torch.equal(one[:, :, :4, :4], two[:, :, :4, :4])


def test_gradient():
    module, k = dape(kernel=3), drawn(1, 3, 4, 4, seed=2)
    names = [name for name, _ in module.named_parameters()]
    parts = [p.detach().requires_grad_() for p in module.parameters()]

    def run(q, *weights):
        return torch.func.functional_call(
            module, dict(zip(names, weights, strict=True)), (q, k, Grid(1, 4))
        )

    assert torch.autograd.gradcheck(run, (drawn(1, 3, 4, 4).requires_grad_(), *parts))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kernel": 2}, "kernel is 2; an odd number"),
        ({"kernel": 0}, "kernel is 0"),
        ({"hidden": 0}, "hidden is 0"),
        ({"base": "swin_table"}, "base is 'swin_table'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        DapeSpec(**fields)


@pytest.mark.parametrize("base", ["none", "alibi", "kerple", "fire"])
def test_generator_draws_everything(base):
    """The base too starts from the passed generator, and the global one is left alone."""
    before = torch.get_rng_state()
    one, other = (
        Dape(DapeSpec(base=base), DIMS, generator=torch.Generator().manual_seed(3)).state_dict()
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_error_base():
    for base, what in (
        ("alibi", "base is str"),
        (Alibi(AlibiSpec(), Dims(embed_dim=8, num_heads=4, depth=1)), "Alibi of 4 heads"),
    ):
        with pytest.raises(PositionError, match=f"{what}.*with {DIMS.num_heads} heads"):
            Dape(DapeSpec(), DIMS, base=base)


def test_error_bias_of_other_logits():
    dape, logits = Dape(DapeSpec(), DIMS), torch.zeros(1, DIMS.num_heads, 3, 5)
    for bias, found in ((None, "None"), (torch.zeros(DIMS.num_heads, 3, 3), "3, 3")):
        with pytest.raises(PositionError, match=f"bias has shape .*{found}.*3, 5"):
            dape.of_logits(logits, bias)
    with pytest.raises(PositionError, match="logits have shape"):
        dape.of_logits(logits[0], None)
