"""DeBERTa: the buckets of v2, both terms against loops, more keys than queries, sources."""

import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import Deberta, DebertaSpec

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)
V2 = DebertaSpec(span=256, max_distance=512, norm=True, key_bias=True)


def deberta(**fields) -> Deberta:
    spec = DebertaSpec(std=0.5, **fields)
    return Deberta(spec, DIMS, generator=torch.Generator().manual_seed(0)).double()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_golden_buckets():
    """Facts 1.2: 132 falls back to the bucket of 131, 512 reaches the last, 600 passes it and is clamped."""
    golden = {127: 127, 128: 128, 129: 129, 130: 130, 131: 131, 132: 131, 140: 137, 200: 169}
    golden |= {256: 192, 300: 207, 400: 233, 511: 255, 512: 256, 600: 270}
    module = Deberta(V2, DIMS)
    steps = torch.tensor(list(golden))
    assert module.buckets(steps).tolist() == list(golden.values())
    assert module.buckets(-steps).tolist() == [-row for row in golden.values()]
    assert module.rows(torch.tensor([600, -600])).tolist() == [511, 0]
    assert len(set(module.buckets(torch.arange(-511, 512)).tolist())) == 511


@pytest.mark.parametrize(("span", "reach"), [(256, 512), (8, 20), (32, 128)])
def test_reference_buckets(span, reach):
    module = Deberta(DebertaSpec(span=span, max_distance=reach), DIMS)
    steps = torch.arange(-2 * reach, 2 * reach + 1)
    expected = [oracle.deberta_bucket(int(step), span, reach) for step in steps]
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert module.buckets(steps.to(dtype)).tolist() == expected


@pytest.mark.parametrize("reach", [None, 12])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 9), (1, 7), (1, 1)])
def test_reference(n, m, reach):
    module = deberta(span=4, max_distance=reach)
    q, k = drawn(2, 3, n, 4), drawn(2, 3, m, 4, seed=2)

    def place(distance: int) -> int:
        own = distance if reach is None else oracle.deberta_bucket(distance, 4, reach)
        return min(max(own + 4, 0), 7)

    rows = [
        layer(module.table).unflatten(-1, (3, 4)).movedim(1, 0).detach().numpy()
        for layer in (module.key_proj, module.query_proj)
    ]
    expected = oracle.deberta(q.numpy(), k.numpy(), *rows, place) / 12**0.5
    torch.testing.assert_close(module(q, k, Grid(1, m)), torch.from_numpy(expected))


@pytest.mark.parametrize(("terms", "parts"), [(("c2p",), 2), (("p2c",), 2), (("c2p", "p2c"), 3)])
def test_invariant_scale_counts_terms(terms, parts):
    """Content and each term have 1 / sqrt(parts * head_dim)."""
    module = deberta(span=4, terms=terms)
    assert module.scale == (4 * parts) ** -0.5
    assert len(module.lookups(drawn(1, 3, 5, 4), drawn(1, 3, 5, 4), Grid(1, 5))) == len(terms)


def test_invariant_shared_projection():
    """v2 and v3 make places of content's own layers: one object, one gradient."""
    module, content = Deberta(V2, DIMS), torch.nn.Linear(12, 12)
    module.key_proj = content
    module(torch.randn(1, 3, 5, 4), torch.randn(1, 3, 5, 4), Grid(1, 5)).sum().backward()
    assert content.weight.grad is not None
    assert content.weight.grad.abs().sum() > 0


def test_gradient():
    module, k = deberta(span=3, norm=True), drawn(1, 3, 4, 4, seed=2)
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
        ({"span": 1}, "span is 1 and max_distance None"),
        ({"span": 256, "max_distance": 129}, "max_distance 129"),
        ({"terms": ()}, r"terms are \(\)"),
        ({"terms": ("c2p", "c2p")}, "terms are"),
        ({"terms": ("p2p",)}, "terms is"),
        ({"std": -0.5}, r"std is -0\.5"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        DebertaSpec(**fields)


def test_error_calls():
    with pytest.raises(PositionError, match=r"q has shape .*1 to 5"):
        deberta(span=4)(drawn(1, 3, 6, 4), drawn(1, 3, 5, 4), Grid(1, 5))
    with pytest.raises(PositionError, match=r"no entry rel_embeddings\.weight"):
        Deberta.from_source({}, DebertaSpec(), DIMS)
