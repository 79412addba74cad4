"""Log bias: three forms, the pretrained window on record, a window of 1, prefix tokens with a value of their own."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import LogBias, LogBiasSpec, build, log_bias
from visionpos.geometry.relative import distinct_offsets, relative_index

DIMS = Dims(embed_dim=12, num_heads=3, depth=1, prefix=1)
FORMS = {
    "microsoft": LogBiasSpec(pretrained_window_hw=(8, 5), hidden=16),
    "torchvision": LogBiasSpec(form="torchvision", hidden=16),
    "cr": LogBiasSpec(form="cr", hidden=16, out_bias=True),
}


def bias(spec: LogBiasSpec, seed: int = 0) -> LogBias:
    module = LogBias(spec, DIMS).eval()
    for weight in module.parameters():
        weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize(
    ("name", "form", "window", "hidden"),
    [
        ("swinv2_8", "microsoft", (8, 8), 512),
        ("swinv2_12", "microsoft", (12, 12), 512),
        ("swinv2_torchvision", "torchvision", None, 512),
        ("swinv2_cr", "cr", None, 384),
        ("relpos_mlp_cr", "cr", None, 512),
    ],
)
def test_shape_of_shipped(name, form, window, hidden):
    spec = load_encoding(name)
    assert (spec.form, spec.pretrained_window_hw, spec.hidden) == (form, window, hidden)
    module = build(spec, DIMS)
    assert module.hidden.weight.shape == (hidden, 2)
    assert module.out.weight.shape == (3, hidden)
    assert (module.out.bias is not None) == (form == "cr")


@pytest.mark.parametrize("form", FORMS)
def test_shape_at_any_leading_sizes(form):
    module = bias(FORMS[form])
    for shape in ((2,), (5, 2), (3, 4, 2)):
        out = module.values(torch.zeros(shape), window_hw=(4, 4))
        assert out.shape == (3, *shape[:-1])


@given(grids(max_side=8), st.integers(2, 24), seeds())
def test_invariant_chained_fine_tunes(hw, trained, seed):
    """Facts 5.28: 12, then 16 and 24 in units of 12: the record stays 12, and a difference keeps its bias."""
    spec = LogBiasSpec(pretrained_window_hw=(trained, trained), hidden=8)
    module = bias(spec, seed)
    offsets = distinct_offsets(Grid(*hw))
    once = module.values(offsets)
    for window in ((12, 12), (16, 20), (24, 24)):
        assert torch.equal(module.values(offsets, window_hw=window), once)
    assert module.spec.pretrained_window_hw == (trained, trained)


def test_invariant_torchvision_renormalises():
    """Facts 1D: the far end is 1.0566 at window 8 and at window 16; Microsoft's extrapolates to 1.3938."""
    ours, theirs = (
        bias(spec)
        for spec in (LogBiasSpec(pretrained_window_hw=(8, 8), hidden=8), FORMS["torchvision"])
    )
    for side in (8, 16):
        end = torch.tensor([[0.0, side - 1.0]])
        assert theirs.coords(end, window_hw=(side, side))[0, 1].item() == pytest.approx(
            1.056642, abs=1e-6
        )
    assert ours.coords(torch.tensor([[0.0, 15.0]]))[0, 1].item() == pytest.approx(
        1.393777, abs=1e-6
    )
    assert ours.coords(torch.tensor([[-7.0, 0.0]]))[0, 0].item() == pytest.approx(
        -1.056642, abs=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hw", [(1, 1), (1, 6), (6, 1)])
def test_invariant_window_of_one(form, hw):
    """Facts 1D: a side of 1 has coordinate 0, not 0 / 0; its bias is that of a larger window's zero difference."""
    module = bias(FORMS[form])
    table = module.distinct(Grid(*hw))
    assert table.isfinite().all()
    coords = module.coords(distinct_offsets(Grid(*hw)), window_hw=hw)
    assert (coords[:, [side == 1 for side in hw]] == 0).all()
    middle = module.distinct(Grid(3, 3))[:, 12]
    torch.testing.assert_close(table[:, table.shape[1] // 2], middle)


def test_invariant_pretrained_side_of_one():
    """A pretrained side of 1 has seen no difference: finite all the same."""
    module = bias(LogBiasSpec(pretrained_window_hw=(1, 4), hidden=8))
    assert module(Grid(3, 5)).isfinite().all()


@pytest.mark.parametrize("form", ["microsoft", "torchvision"])
def test_invariant_range(form):
    """16 sigmoid lies strictly between 0 and 16; the raw forms are unbounded."""
    out = bias(FORMS[form], seed=3).distinct(Grid(9, 9))
    assert out.min() >= 0
    assert out.max() <= 16
    assert bias(FORMS["cr"], seed=3).distinct(Grid(9, 9)).abs().max() > 16


def test_reference_start_values():
    """Facts 2, Swin V2: after the model's own start, of standard deviation .02, a near constant 8 (7.95 to 8.09)."""
    out = LogBias(
        LogBiasSpec(pretrained_window_hw=(8, 8)), DIMS, generator=torch.Generator().manual_seed(0)
    ).distinct(Grid(8, 8))
    assert out.min() > 7.9
    assert out.max() < 8.1
    assert out.std() > 0


def test_invariant_prefix_sees_and_is_seen():
    """Facts 1.5 of timm: with zeros a patch gives the class token 1e-6 of its attention instead of 5e-3."""
    share = {}
    for prefix in ("zero", "learned"):
        spec = LogBiasSpec(pretrained_window_hw=(14, 14), prefix=prefix)
        module = LogBias(spec, DIMS, generator=torch.Generator().manual_seed(0))
        logits = module(Grid(14, 14), prefix=1)
        share[prefix] = logits.softmax(-1)[:, 1:, 0].mean().item()
    assert share["zero"] < 3e-6
    assert share["learned"] == pytest.approx(1 / 197, rel=0.02)
    assert LogBias(FORMS["cr"], DIMS).prefix_values() is None


def test_invariant_network_runs_on_distinct_differences():
    """(2h - 1)(2w - 1) evaluations, not n x n."""
    module, seen = bias(FORMS["microsoft"]), []
    plain = module._network
    module._network = lambda *shares: seen.append(plain(*shares)) or seen[-1]
    module(Grid(7, 9), prefix=1)
    assert [found.shape[-1] for found in seen] == [13 * 17]


@pytest.mark.parametrize("first", ["inference mode", "fake tensors", "plain"])
def test_invariant_kept_inputs(first):
    """The network's inputs are made once a window: whatever mode the first call was in, later calls learn.

    The values are those of `values`, which makes its inputs at every call, in float64.
    """
    log_bias._kept_ticks.cache_clear()
    for hw in ((3, 5), (5, 3), (1, 7)):
        modules = [bias(spec).train() for spec in FORMS.values()]
        for module in modules:
            if first == "inference mode":
                with torch.inference_mode():
                    module.distinct(Grid(*hw))
            elif first == "fake tensors":
                with FakeTensorMode(allow_non_fake_inputs=True):
                    module.distinct(Grid(*hw))
        for module in 2 * modules:
            found = module.distinct(Grid(*hw))
            found.sum().backward()
            assert module.hidden.weight.grad.isfinite().all()
            wide = copy.deepcopy(module).double()
            wanted = wide.values(distinct_offsets(Grid(*hw)).double(), window_hw=hw)
            assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
            assert (wide.distinct(Grid(*hw)) - wanted).abs().max() < 1e-13 * wanted.abs().max()


def state_of(module: LogBias, names: tuple[str, str]) -> dict[str, torch.Tensor]:
    """A state dict as a source writes it, with the buffers of another window."""
    parts = {f"attn.{names[0]}.{k}": v.detach() for k, v in module.hidden.named_parameters()}
    parts |= {f"attn.{names[1]}.{k}": v.detach() for k, v in module.out.named_parameters()}
    parts["attn.relative_coords_table"] = torch.zeros(1, 15, 15, 2)
    parts["attn.logit_scale"] = torch.zeros(3, 1, 1)
    return parts


@pytest.mark.parametrize(
    "names",
    [
        ("cpb_mlp.0", "cpb_mlp.2"),
        ("continuous_position_bias_mlp.0", "continuous_position_bias_mlp.2"),
        ("meta_mlp.fc1", "meta_mlp.fc2"),
        ("rel_pos.mlp.fc1", "rel_pos.mlp.fc2"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_invariant_source_keys(form, names):
    """Facts 5.29: a stored coordinate table belongs to another window and blocks nothing."""
    module = bias(FORMS[form])
    ours = LogBias.from_source(state_of(module, names), module.spec, DIMS)
    assert torch.equal(ours(Grid(3, 5)), module(Grid(3, 5)))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, r"pretrained_window_hw is None with form 'microsoft'; .*Give the window"),
        ({"pretrained_window_hw": (0, 0)}, r"pretrained_window_hw is \(0, 0\); 2 whole numbers"),
        ({"form": "torchvision", "pretrained_window_hw": (8, 8)}, r"with form 'torchvision'"),
        ({"form": "cr", "pretrained_window_hw": (8, 8)}, r"with form 'cr'; .*the others have none"),
        ({"form": "swin"}, r"form is 'swin'; it must be one of 'microsoft', 'torchvision', 'cr'"),
        ({"form": "cr", "hidden": 0}, r"hidden is 0; a width of at least 1"),
        (
            {"form": "cr", "prefix": "centre"},
            r"prefix is 'centre'; it must be one of 'zero', 'learned'",
        ),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        LogBiasSpec(**fields)


def test_error_torchvision_needs_the_window():
    with pytest.raises(
        PositionError,
        match=r"window_hw is None; form 'torchvision' measures .*Pass window_hw= to values\(\)",
    ):
        bias(FORMS["torchvision"]).values(torch.zeros(1, 2))


def test_error_source():
    """A missing layer, another width, and a bias that would be lost are refused by name."""
    module = bias(FORMS["cr"])
    state = state_of(module, ("cpb_mlp.0", "cpb_mlp.2"))
    with pytest.raises(PositionError, match=r"state has no entry cpb_mlp\.0\.weight or continuous"):
        LogBias.from_source({"qkv.weight": torch.zeros(1)}, module.spec, DIMS)
    wide = LogBiasSpec(form="cr", hidden=32, out_bias=True)
    with pytest.raises(PositionError, match=r"weight of shape \(16, 2\); hidden 32 .*\(32, 2\)"):
        LogBias.from_source(state, wide, DIMS)
    with pytest.raises(PositionError, match=r"out_bias is False and state holds a bias"):
        LogBias.from_source(state, LogBiasSpec(form="cr", hidden=16), DIMS)
    index = {**state, "attn.relative_position_index": relative_index(Grid(5, 3))}
    with pytest.raises(PositionError, match=r"not the row-major .*window \(3, 5\)"):
        LogBias.from_source(index, module.spec, DIMS, window_hw=(3, 5))
    LogBias.from_source(index, module.spec, DIMS, window_hw=(5, 3))


def test_gradient_of_values():
    """Every layer and the prefix learn (float64 gradcheck); offsets are data."""
    spec = LogBiasSpec(pretrained_window_hw=(3, 4), hidden=4, prefix="learned")
    module = bias(spec).double()
    names = [key for key, _ in module.named_parameters()]
    offsets = torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64)

    class Both(torch.nn.Module):
        def forward(self):
            return module.values(offsets), module.prefix_values()

    holder = Both()
    holder.module = module

    def run(*weights):
        given_ = {f"module.{key}": value for key, value in zip(names, weights, strict=True)}
        return torch.func.functional_call(holder, given_, ())

    assert torch.autograd.gradcheck(run, tuple(module.parameters()))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_coordinates_at_difference_0(form):
    """Tokens of one row have the difference 0 along y, where sign(x) log(1 + |x|) has a slope: autograd gave 0."""
    module = bias(FORMS[form]).double()
    where = {"window_hw": (5, 6)} if form == "torchvision" else {}
    at = torch.tensor([[0.0, 3.0], [-2.0, 0.0], [0.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    at.requires_grad_()
    (found,) = torch.autograd.grad(module.coords(at, **where).sum(), at)
    step = 1e-6
    with torch.no_grad():
        far = [module.coords(at + sign * step, **where) for sign in (1, -1)]
    torch.testing.assert_close(found, (far[0] - far[1]) / (2 * step), rtol=1e-5, atol=1e-6)
    assert (found > 0).all()


def test_error_a_clip():
    for form in FORMS.values():
        with pytest.raises(PositionError, match=r"grid \(2, 3, 5\) .* has 2 frames"):
            bias(form)(Grid(3, 5, frames=2))
