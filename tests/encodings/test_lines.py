"""What every scheme of a line owes, whatever it is: one graph for all lengths, one device, dtypes, cached keys."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import graphs_of
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import (
    AlibiSpec,
    Biasing,
    CopeSpec,
    DapeSpec,
    DebertaSpec,
    FireSpec,
    KerpleSpec,
    PairBiasing,
    QueryBiasing,
    SandwichSpec,
    ShawSpec,
    T5BiasSpec,
    TransformerXlSpec,
    TupeSpec,
    build,
    spec_types,
)

DIMS = Dims(embed_dim=24, num_heads=3, depth=2)
SPECS = {
    "t5": T5BiasSpec(buckets=(32,), max_distance=(128,)),
    "t5_causal": T5BiasSpec(buckets=(8,), max_distance=(9,), direction="causal"),
    "alibi": AlibiSpec(),
    "kerple": KerpleSpec(form="power"),
    "sandwich": SandwichSpec(width=8),
    "fire": FireSpec(reach="query", threshold=4.0),
    "fire_extent": FireSpec(threshold=4.0),
    "shaw": ShawSpec(reach=(2,)),
    "xl": TransformerXlSpec(),
    "xl_both": TransformerXlSpec(direction="both", clamp=3),
    "tupe_a": TupeSpec(extent=(40,)),
    "tupe_r": TupeSpec(extent=(40,), buckets=8),
    "deberta": DebertaSpec(span=4),
    "deberta_v2": DebertaSpec(span=4, max_distance=12, norm=True, key_bias=True),
    "cope": CopeSpec(positions=4, std=0.5),
    "dape": DapeSpec(),
    "dape_v2": DapeSpec(base="fire", kernel=3),
}
PAIRS = [
    name for name in SPECS if isinstance(build(SPECS[name], DIMS), (PairBiasing, QueryBiasing))
]
BIASES = [name for name in SPECS if name not in PAIRS]
# Under "extent" a longer line is another scale.
CACHED = [name for name in SPECS if name != "fire_extent"]
LENGTHS = ((5,), (7,), (14,), (11,), (29,))


def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build(SPECS[name], DIMS).eval()


def bias(module: nn.Module, x: torch.Tensor, n: int | None = None) -> torch.Tensor:
    """Return the bias of the last n of the tokens of a line, `[b or 1, heads, n, m]`."""
    m = x.shape[-2]
    n = m if n is None else n
    if isinstance(module, Biasing):
        return module.along(n, m).unsqueeze(0)
    grid = Grid(1, m)
    if isinstance(module, QueryBiasing):
        return module(x[:, :, m - n :], grid)
    return module(x[:, :, m - n :], x, grid)


def tokens(m: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, m, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_every_scheme_of_a_line_is_here():
    own = {"t5_bias", "alibi", "kerple", "sandwich", "fire", "shaw", "transformer_xl", "tupe"}
    own |= {"deberta", "cope", "dape"}
    assert {spec.kind for spec in SPECS.values()} == own <= set(spec_types())


@pytest.mark.parametrize("m", [1, 2, 13])
@pytest.mark.parametrize("name", SPECS)
def test_shape(name, m):
    out = bias(module_of(name), tokens(m))
    assert out.shape[1:] == (3, m, m)
    assert out.isfinite().all()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", CACHED)
def test_invariant_cached_keys(name, n):
    """The last queries of a line get the rows that they have in the whole of it: decoding step by step is right."""
    module, x = module_of(name), tokens(11)
    whole, last = bias(module, x), bias(module, x, n)
    torch.testing.assert_close(last, whole[:, :, 11 - n :], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in BIASES if name in CACHED])
def test_invariant_a_document_begins_anywhere(name):
    """Ids that begin anew give the second document of a row what it has alone."""
    module = module_of(name)
    ids = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(-1)
    packed = module.between(ids, ids)[:, 5:, 5:]
    torch.testing.assert_close(packed, module.along(7), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(packed, module.between(ids, ids)[:, :7, :7])


@pytest.mark.parametrize("name", SPECS)
def test_invariant_copies(name):
    module, x = module_of(name), tokens(6)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(bias(other, x), bias(module, x))
    assert build(pickle.loads(pickle.dumps(SPECS[name])), DIMS).spec == SPECS[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_dtype_of_halves(name, dtype):
    """Tokens in halves beside float32 weights: the bias has their dtype, and is near float32's."""
    module, x = module_of(name), tokens(9, dtype)
    out = bias(module, x)
    assert out.dtype == (torch.float32 if name.startswith("tupe") else dtype)
    torch.testing.assert_close(out.float(), bias(module, x.float()), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", PAIRS)
def test_dtype_under_autocast(name):
    module, x = module_of(name), tokens(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = bias(module, x)
    torch.testing.assert_close(out.float(), bias(module, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", SPECS)
def test_compile_one_graph_for_all_lengths(name):
    module = module_of(name)
    calls = [(tokens(m),) for (m,) in LENGTHS]
    assert graphs_of(lambda x: bias(module, x), calls) == 1


@pytest.mark.parametrize("name", SPECS)
def test_device_fake_cuda(name):
    """Fake CUDA tensors raise at any operation that mixes devices, without a GPU."""
    module, cuda = module_of(name), torch.device("cuda", 0)
    with FakeTensorMode():
        for part in module.modules():
            for key, weight in list(part.named_parameters(recurse=False)):
                setattr(part, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        x = torch.empty(2, 3, 9, 8, device=cuda)
        if isinstance(module, Biasing):
            assert module.along(4, 9, device=cuda).device == cuda
            assert module(Grid(1, 9), device=cuda).device == cuda
        else:
            assert bias(module, x, 4).device == cuda


@pytest.mark.parametrize("name", PAIRS)
def test_error_tokens(name):
    module, x = module_of(name), tokens(9)
    with pytest.raises(PositionError, match=r"\[b, 3, .*, 8\]"):
        bias(module, x[:, :2])
    with pytest.raises(PositionError, match=r"q is torch\.int64; a tensor of floats"):
        bias(module, x.long())


@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("shaw")])
def test_error_queries_and_keys_that_disagree(name):
    module, x, grid = module_of(name), tokens(9), Grid(1, 9)
    for other in (x[:1], x.double(), x.bfloat16(), x.to("meta")):
        with pytest.raises(PositionError, match="they must agree"):
            module(x, other, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x, x.bfloat16(), grid).isfinite().all()


@pytest.mark.parametrize("name", PAIRS)
def test_invariant_nan_stays_in_its_sample(name):
    """A broken sample is no error, and no other sample hears of it."""
    module, x = module_of(name), tokens(9)
    broken = x.clone()
    broken[0, 0, 3] = torch.nan
    out = bias(module, broken)
    if not name.startswith("tupe"):  # its bias is one for all samples, and reads no tokens
        assert out[0].isnan().any()
        torch.testing.assert_close(out[1], bias(module, x)[1])


@pytest.mark.parametrize("name", BIASES)
def test_error_ids_of_two_batches(name):
    module = module_of(name)
    where = {"extent": (9,)} if name == "fire_extent" else {}
    with pytest.raises(PositionError, match=r"\(2, 4, 1\) and keys \(3, 4, 1\).*must agree"):
        module.between(torch.zeros(2, 4, 1), torch.zeros(3, 4, 1), **where)
    assert module.between(torch.zeros(2, 4, 1), torch.zeros(1, 5, 1), **where).shape == (3, 2, 4, 5)


@pytest.mark.parametrize("name", BIASES)
def test_shape_of_a_lone_difference(name):
    where = {"extent": (9,)} if name == "fire_extent" else {}
    where |= {"places": torch.tensor(3.0)} if name == "fire" else {}
    assert module_of(name).values(torch.tensor([1.0]), **where).shape == (3,)
