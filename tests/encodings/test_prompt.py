"""SAM's prompt encoder: clicks, boxes and masks through one Fourier map."""

import copy
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import swa_utils as swa

import visionpos as vp
from tests.compiled import graphs_of
from tests.reference import prompt as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import PromptEncoder, PromptSpec, build
from visionpos.geometry import ImageFrame

DIMS = Dims(embed_dim=8, num_heads=1, depth=1)
SMALL = {"input_hw": (48, 80), "patch": 16, "mask_channels": 8}  # 3x5 cells
SAM = PromptSpec(**SMALL)
SAM2 = PromptSpec(
    **SMALL, resize="stretch", not_a_point="always", corners="before", corner_labels=True
)
SPECS = {"sam": SAM, "sam2": SAM2, "hf_sam2": replace(SAM2, corners="after")}


def encoder(spec: PromptSpec = SAM, seed: int = 0) -> PromptEncoder:
    """Random weights everywhere, float64 but for the frequencies."""
    module = PromptEncoder(spec, DIMS, generator=torch.Generator().manual_seed(seed)).double()
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(generator=draw)
    return module


def prompts(count: int, lead: tuple[int, ...] = (), seed: int = 0):
    """(points, labels, boxes) inside 48x80 pixels, float64."""
    draw = torch.Generator().manual_seed(seed)
    sides = torch.tensor([80.0, 48.0], dtype=torch.float64)
    points = torch.rand(*lead, count, 2, generator=draw, dtype=torch.float64) * sides
    labels = torch.randint(0, 2, (*lead, count), generator=draw)
    corners = torch.rand(*lead, 2, 2, generator=draw, dtype=torch.float64) * sides * 0.4
    return points, labels, torch.cat([corners[..., 0, :], corners[..., 1, :] + sides / 2], dim=-1)


def turns_xy(module: PromptEncoder) -> np.ndarray:
    """SAM's B, row 0 for x, in float64."""
    return module.freqs.flip(0).double().numpy() / (2 * math.pi)


@pytest.mark.parametrize(
    ("name", "counts"), [("sam", (2, 6, 7)), ("sam2", (3, 6, 8)), ("hf_sam2", (3, 6, 8))]
)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shape_of_tokens(name, counts, lead):
    """users.md G01, facts 5.19: a box, N = 5 points, both: 2, N+1, N+2 in SAM; 3, N+1, N+3 in SAM 2."""
    module = encoder(SPECS[name])
    points, labels, boxes = prompts(5, lead)
    calls = ({"boxes": boxes}, {"points": points, "labels": labels})
    calls = (*calls, {**calls[0], **calls[1]})
    for call, count in zip(calls, counts, strict=True):
        sparse, dense = module(module.frame((48, 80)), **call)
        assert sparse.shape == (*lead, count, 8)
        assert dense.shape == (*lead, 15, 8)


def test_shape_without_prompts():
    """No prompt: no token, not even padding; SAM 2's video head passes one point labelled -1 instead."""
    module = encoder(SAM2)
    sparse, dense = module(module.frame((48, 80)))
    assert sparse.shape == (0, 8)
    assert dense.shape == (15, 8)
    pad, _ = module(module.frame((48, 80)), points=torch.zeros(1, 2), labels=torch.tensor([-1]))
    assert torch.equal(pad, module.not_a_point.expand(2, -1))


@pytest.mark.parametrize("name", ["sam_prompt", "sam2_prompt", "hf_sam2_prompt"])
def test_shape_of_shipped(name):
    """256 channels, 64x64 cells, masks of 256x256; keys as in the sources but for the frequencies."""
    module = build(load_encoding(name), Dims(embed_dim=256, num_heads=8, depth=2))
    assert module.freqs.shape == (2, 128)
    assert module.grid_code().shape == (4096, 256)
    assert module.dense(torch.zeros(256, 256)).shape == (4096, 256)
    assert module.mask[0].weight.shape == (4, 1, 2, 2)
    assert module.mask[3].weight.shape == (16, 4, 2, 2)
    assert module.mask[6].weight.shape == (256, 16, 1, 1)


@given(st.sampled_from(sorted(SPECS)), st.integers(0, 3), st.booleans(), seeds())
def test_reference_tokens(name, count, with_box, seed):
    """Every token of every source, in its order."""
    spec, module = SPECS[name], encoder(SPECS[name], seed % 7)
    points, labels, boxes = prompts(count, seed=seed)
    turns, vectors = turns_xy(module), module.label_vectors.detach().numpy()
    pad = module.not_a_point.detach().numpy()[0]
    clicks = [
        oracle.token(tuple(p), label, (48, 80), turns, vectors, pad)
        for p, label in zip(points.tolist(), labels.tolist(), strict=True)
    ]
    corners = [
        oracle.token(tuple(p), label, (48, 80), turns, vectors, pad)
        for p, label in zip(boxes.reshape(2, 2).tolist(), (2, 3), strict=True)
    ]
    rows = clicks
    if with_box:
        rows = corners + clicks if spec.corners == "before" else clicks + corners
    if not with_box or spec.not_a_point == "always":
        rows = [*rows, pad]
    call = {"points": points, "labels": labels, "boxes": boxes if with_box else None}
    sparse, _ = module(module.frame((48, 80)), **call)
    assert_close_to(sparse.detach(), torch.from_numpy(np.stack(rows)), kind="applied")


def test_reference_special_labels():
    """-1 replaces the code by the not-a-point vector, -10 by zeros; 2 and 3 are corners where they are known."""
    module = encoder(SAM2)
    points = torch.tensor([[3.0, 4.0]] * 6)
    labels = torch.tensor([-10, -1, 0, 1, 2, 3])
    sparse, _ = module(module.frame((48, 80)), points=points, labels=labels)
    assert (sparse[0] == 0).all()
    assert torch.equal(sparse[1], module.not_a_point[0])
    code = sparse[2:6] - module.label_vectors
    torch.testing.assert_close(code, code[:1].expand(4, -1))
    box, _ = module(module.frame((48, 80)), boxes=torch.tensor([3.0, 4.0, 30.0, 40.0]))
    torch.testing.assert_close(box[0], sparse[4])


@given(grids(max_side=9), seeds())
def test_reference_grid_code(hw, seed):
    """The code of cell centres on any grid over the input frame."""
    module = encoder(seed=seed % 11)
    expected = torch.from_numpy(oracle.grid_code(hw, turns_xy(module)))
    torch.testing.assert_close(module.grid_code(Grid(*hw)), expected, rtol=0, atol=1e-5)


def test_reference_mask_path():
    module = encoder()
    mask = torch.randn(2, 12, 20, dtype=torch.float64)
    parts = [p.detach().numpy() for p in module.mask.parameters()]
    expected = np.stack([oracle.mask_path(one.numpy(), parts) for one in mask])
    out = module.dense(mask).detach()
    assert_close_to(out, torch.from_numpy(expected).flatten(1, 2), kind="applied")


def test_reference_no_mask():
    """Without a mask every cell gets one vector, as a view: no memory a batch."""
    module = encoder()
    _, dense = module(module.frame((48, 80)), boxes=torch.tensor([[1.0, 2, 30, 40]] * 3))
    assert torch.equal(dense[2, 14], module.no_mask[0])
    assert dense.stride()[:2] == (0, 0)


@pytest.mark.parametrize("name", ["sam_prompt", "sam2_prompt"])
def test_invariant_click_on_a_cell_centre_has_its_code(name):
    """Facts 2, SAM: exactly, bit for bit, in the 64x64 cells of 1024x1024."""
    module = build(load_encoding(name), Dims(embed_dim=64, num_heads=8, depth=2))
    cells = torch.cartesian_prod(torch.arange(64.0), torch.arange(64.0))
    clicks = ((cells + 0.5) * 16 - 0.5).flip(-1)  # (x, y) pixels
    sparse = module.sparse(clicks, torch.ones(len(cells), dtype=torch.int64), None)[:-1]
    vector = module.label_vectors[1].detach()
    assert torch.equal(sparse.detach(), module.grid_code() + vector)


@given(grids(max_side=7, min_side=2), seeds())
def test_invariant_click_on_a_cell_centre_of_any_grid(hw, seed):
    patch = 14
    spec = PromptSpec(input_hw=(hw[0] * patch, hw[1] * patch), patch=patch, mask_channels=4)
    module = encoder(spec, seed % 5)
    cells = torch.cartesian_prod(torch.arange(hw[0]), torch.arange(hw[1])).double()
    sparse = module.sparse(((cells + 0.5) * patch - 0.5).flip(-1), torch.zeros(len(cells)), None)
    code = sparse[:-1] - module.label_vectors[0]
    torch.testing.assert_close(code, module.grid_code(), rtol=0, atol=2e-5)


def test_invariant_orders_of_sam2_hold_the_same_tokens():
    """SAM 2's predictor puts corners first, transformers last: one set of tokens."""
    points, labels, boxes = prompts(4)
    first, last = (
        encoder(SPECS[name])(
            encoder(SPECS[name]).frame((48, 80)), points=points, labels=labels, boxes=boxes
        )[0]
        for name in ("sam2", "hf_sam2")
    )
    assert torch.equal(first[[2, 3, 4, 5, 0, 1, 6]], last)
    assert not torch.equal(first, last)


def test_invariant_boxes_are_labelled_corners():
    """SAM 2: a box is two points labelled 2 and 3."""
    module, boxes = encoder(SAM2), torch.tensor([[3.0, 4.0, 30.0, 40.0]])
    frame = module.frame((48, 80))
    as_points = module(frame, points=boxes.reshape(1, 2, 2), labels=torch.tensor([[2, 3]]))[0]
    assert torch.equal(module(frame, boxes=boxes)[0], as_points)


def test_invariant_batch_is_one_by_one():
    module = encoder(SAM2)
    points, labels, boxes = prompts(3, (4,))
    sparse, _ = module(module.frame((48, 80)), points=points, labels=labels, boxes=boxes)
    for i in range(4):
        one, _ = module(module.frame((48, 80)), points=points[i], labels=labels[i], boxes=boxes[i])
        torch.testing.assert_close(sparse[i], one, rtol=1e-12, atol=1e-12)


def test_invariant_frequencies_survive_every_cast():
    """users.md D06, facts 1E: bf16, half, double, autocast and a round trip change no bit of a frequency."""
    module = PromptEncoder(SAM, DIMS)
    before = module.freqs.clone()
    for cast in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        assert torch.equal(module.to(cast).freqs, before)
    other = PromptEncoder(SAM, DIMS, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(other.freqs, before)
    other.load_state_dict(module.bfloat16().state_dict())
    assert torch.equal(other.freqs, before)
    assert "frequency_bits" not in dict(other.named_parameters())


def test_invariant_half_precision_tokens_round_once():
    """A bf16 encoder: positions in float32, one rounding at the end; all 1024 columns keep a place of their own."""
    spec = PromptSpec(mask_channels=4)
    module = PromptEncoder(spec, DIMS)
    clicks = torch.stack([torch.arange(1024.0), torch.full((1024,), 511.5)], dim=-1)
    labels = torch.ones(1024, dtype=torch.int64)
    wide = module.sparse(clicks, labels, None)
    half = copy.deepcopy(module).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = half.sparse(clicks, labels, None)
    assert out.dtype == torch.bfloat16
    vectors = half.label_vectors[1].float()
    rounded = (wide[:-1] - module.label_vectors[1] + vectors).bfloat16().float()
    assert (
        out[:-1].float() - rounded
    ).abs().max() < 0.04  # one step of bf16 below 4, where sums of noise tie
    assert len(module.code(clicks / 512 - 1).unique(dim=0)) == 1024


def test_invariant_no_cache_between_equal_counts():
    module = encoder()
    outs = [module.grid_code(Grid(*hw)) for hw in ((4, 9), (6, 6), (9, 4), (4, 9))]
    assert torch.equal(outs[0], outs[3])
    assert min((outs[0] - outs[1]).abs().max(), (outs[0] - outs[2]).abs().max()) > 0.1


def test_invariant_copies_and_pickles():
    module, (points, labels, boxes) = encoder(), prompts(3)
    frame = module.frame((48, 80))
    before = module(frame, points=points, labels=labels, boxes=boxes)[0]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(frame, points=points, labels=labels, boxes=boxes)[0], before)
        with torch.no_grad():
            other.label_vectors.mul_(2)
        assert torch.equal(module(frame, points=points, labels=labels, boxes=boxes)[0], before)


def test_invariant_frame_follows_the_spec():
    """frame() records the model's rule: input, resize, centre and quantise, never a caller's guess."""
    spec = replace(SAM2, centre="geometric", quantise=True)
    frame = encoder(spec).frame((100, 200), unit="normalised", order="rc", box_form="cxcywh")
    assert frame == ImageFrame(
        source_hw=(100, 200),
        input_hw=(48, 80),
        resize="stretch",
        unit="normalised",
        order="rc",
        box_form="cxcywh",
        centre="geometric",
        quantise=True,
    )


@pytest.mark.parametrize(("centre", "hits"), [("geometric", True), ("reference", False)])
def test_invariant_geometric_centre_finds_the_cell(centre, hits):
    """Source 24x40 at scale 2: the middle of cell (2, 2), (40, 40) in the input, is pixel (19.5, 19.5) there."""
    module = encoder(replace(SAM2, centre=centre))
    click = module.frame((24, 40)).points(torch.tensor([[19.5, 19.5]], dtype=torch.float64))
    code = module.sparse(click, torch.tensor([1]), None)[0] - module.label_vectors[1]
    miss = (code - module.grid_code()[2 * 5 + 2]).abs().max().item()
    assert miss < 1e-5 if hits else miss > 1e-2


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"input_hw": (1000, 1024)},
            r"size_hw \(1000, 1024\) is not divisible by patch \(16, 16\)",
        ),
        ({"patch": 0}, r"patch is \(0, 0\)"),
        ({"mask_channels": 6}, r"mask_channels is 6; 4, 8, \.\.\."),
        ({"resize": "crop"}, r"resize is 'crop'; it must be one of 'pad', 'stretch'"),
        ({"centre": "half"}, r"centre is 'half'"),
        (
            {"not_a_point": "never"},
            r"not_a_point is 'never'; it must be one of 'without_boxes', 'always'",
        ),
        ({"corners": "last"}, r"corners is 'last'; it must be one of 'after', 'before'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        PromptSpec(**fields)


def test_error_build():
    with pytest.raises(PositionError, match=r"sigma is -1\.0; a finite number above 0"):
        PromptSpec(sigma=-1.0)
    with pytest.raises(PositionError, match=r"embed_dim is 7; an even number"):
        PromptEncoder(SAM, Dims(embed_dim=7, num_heads=1, depth=1))


def test_error_frame_of_another_model():
    """users.md G02: the padded frame of SAM with the stretched input of SAM 2 shifts every mask."""
    points, labels, _ = prompts(2)
    with pytest.raises(
        PositionError,
        match=r"another model's: resize is 'pad' in the frame and 'stretch' in the spec",
    ):
        encoder(SAM2)(encoder(SAM).frame((48, 80)), points=points, labels=labels)


@pytest.mark.parametrize(
    ("field", "value"),
    [("input_hw", (48, 96)), ("resize", "stretch"), ("centre", "geometric"), ("quantise", True)],
)
def test_error_frame_of_other_settings(field, value):
    """Every setting that a frame has from its encoder: the scale of a centre, or floored clicks, shift all codes."""
    points, labels, _ = prompts(2)
    foreign = replace(encoder().frame((48, 80)), **{field: value})
    own = getattr(SAM, field)
    match = re.escape(f"{field} is {value!r} in the frame and {own!r} in the spec")
    with pytest.raises(PositionError, match=match):
        encoder()(foreign, points=points, labels=labels)


def test_error_leading_sizes():
    """Sets of prompts belong together; a bare error of torch.cat before, or tokens of another set."""
    module, (points, labels, boxes) = encoder(), prompts(3, (2,))
    frame, masks = module.frame((48, 80)), torch.zeros(5, 12, 20).double()
    both = {"points": points, "labels": labels}
    match = r"the leading sizes are .*; one box for each set of points"
    for more in (
        {"boxes": boxes[:1]},
        {"boxes": boxes[0]},
        {"masks": masks},
        {"boxes": boxes, "masks": masks},
    ):
        with pytest.raises(PositionError, match=match):
            module(frame, **both, **more)
    with pytest.raises(PositionError, match=match):
        module(frame, boxes=boxes, masks=masks)
    # A mask for several sets: its leading sizes are the first of theirs.
    points, labels, _ = prompts(3, (5, 2))
    sparse, dense = module(frame, points=points, labels=labels, masks=masks)
    assert (sparse.shape, dense.shape) == ((5, 2, 4, 8), (5, 15, 8))


def test_error_labels_without_numbers():
    points, labels, _ = prompts(3)
    with pytest.raises(PositionError, match=r"labels are torch\.bool; .*labels\.long\(\)"):
        encoder()(encoder().frame((48, 80)), points=points, labels=labels.bool())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_invariant_default_dtype(dtype):
    """Frequencies are drawn, kept and multiplied in float32 whatever torch's default is; whole pixels too."""
    draws = torch.Generator()
    before = PromptEncoder(SAM, DIMS, generator=draws.manual_seed(3))
    pixels = torch.tensor([[17, 41], [79, 3]])
    codes = before.code(vp.coordinates(Grid(3, 5), vp.CoordSpec(unit="centred")))
    torch.set_default_dtype(dtype)
    try:
        after = PromptEncoder(SAM, DIMS, generator=draws.manual_seed(3))
        assert after.freqs.dtype == torch.float32
        assert torch.equal(after.freqs, before.freqs)
        here = after.code(vp.coordinates(Grid(3, 5), vp.CoordSpec(unit="centred")))
        assert torch.equal(here, codes)
        loaded = before.sparse(pixels, torch.tensor([1, 0]), None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loaded, before.sparse(pixels.float(), torch.tensor([1, 0]), None))


@pytest.mark.parametrize(("spec", "label"), [(SAM, 2), (SAM, 3), (SAM2, 4), (SAM, -2), (SAM2, 255)])
def test_error_labels(spec, label):
    """Facts 1E: SAM gives 2 and 3 no vector without a word; any other label is a plain code there."""
    points, labels, _ = prompts(3)
    labels[1] = label
    module = encoder(spec)
    with pytest.raises(PositionError, match=rf"label {label} is unknown; one of \[-10, -1, 0, 1"):
        module(module.frame((48, 80)), points=points, labels=labels)


def test_error_prompts():
    module = encoder()
    points, labels, boxes = prompts(3)
    frame = module.frame((48, 80))
    with pytest.raises(PositionError, match=r"points or labels are None"):
        module(frame, points=points)
    with pytest.raises(PositionError, match=r"points or labels are None"):
        module(frame, labels=labels, boxes=boxes)
    with pytest.raises(PositionError, match=r"points have shape \(3, 2\) and labels \(2,\)"):
        module(frame, points=points, labels=labels[:2])
    with pytest.raises(PositionError, match=r"point .* does not lie inside x 0\.\.80, y 0\.\.48"):
        module(frame, points=points + 100, labels=labels)
    with pytest.raises(PositionError, match=r"masks have size \(24, 40\); \(12, 20\).*frame.mask"):
        module(frame, masks=torch.zeros(24, 40))


def test_error_source():
    """Missing entries, other shapes and unequal copies of the frequencies are named."""
    module = encoder().float()
    state = {
        "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix": torch.randn(2, 4),
        "prompt_encoder.not_a_point_embed.weight": torch.randn(1, 8),
        "prompt_encoder.no_mask_embed.weight": torch.randn(1, 8),
        **{f"prompt_encoder.point_embeddings.{i}.weight": torch.randn(1, 8) for i in range(4)},
        **{
            key.replace("mask.", "prompt_encoder.mask_downscaling."): value
            for key, value in module.state_dict().items()
            if key.startswith("mask.")
        },
        "image_encoder.pos_embed": torch.zeros(1),
    }
    PromptEncoder.from_source(state, SAM, DIMS)
    with pytest.raises(PositionError, match=r"lacks \['no_mask'\]"):
        PromptEncoder.from_source({k: v for k, v in state.items() if "no_mask" not in k}, SAM, DIMS)
    with pytest.raises(
        PositionError, match=r"label_vectors of the checkpoint has shape \(3, 8\); \(4, 8\)"
    ):
        PromptEncoder.from_source({k: v for k, v in state.items() if "dings.2" not in k}, SAM, DIMS)
    with pytest.raises(PositionError, match=r"shape \(4, 8\); \(4, 16\)"):
        PromptEncoder.from_source(state, SAM, Dims(embed_dim=16, num_heads=1, depth=1))
    odd = {**state, "prompt_encoder.point_embeddings.2.weight": torch.randn(1, 6)}
    with pytest.raises(PositionError, match=r"label vectors have shapes .*\(1, 6\).*required"):
        PromptEncoder.from_source(odd, SAM, DIMS)
    twice = {**state, "shared_image_embedding.positional_embedding": torch.randn(2, 4)}
    with pytest.raises(
        PositionError, match=r"shared_image_embedding.* differs from the other copy"
    ):
        PromptEncoder.from_source(twice, SAM, DIMS)


def test_gradient():
    """Clicks, vectors and the mask path learn (float64 gradcheck)."""
    module = encoder(SAM2)
    points, labels, boxes = prompts(2)
    labels[1] = -1
    mask = torch.randn(12, 20, dtype=torch.float64)
    names = ["label_vectors", "not_a_point", "no_mask"]

    def run(points, boxes, *weights):
        new = dict(zip(names, weights, strict=True))
        frame = module.frame((48, 80))
        return torch.func.functional_call(
            module, new, (frame,), {"points": points, "labels": labels, "boxes": boxes}
        )

    weights = [getattr(module, name) for name in names]
    arguments = (points.requires_grad_(), boxes.requires_grad_(), *weights)
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradcheck(module.dense, (mask.requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("name", SPECS)
def test_compile_one_graph_over_six_counts(name):
    """Any number of clicks, with a box: one graph."""
    module = encoder(SPECS[name]).float()
    calls = []
    for count in (5, 7, 11, 14, 28, 35):
        points, labels, boxes = prompts(count, (2,))
        calls.append((points.float(), labels, boxes.float()))
    assert graphs_of(module.sparse, calls) == 1


def test_compile_grid_code_and_masks():
    module = encoder().float()
    grids = [(5, 7), (7, 5), (2, 14), (4, 7), (13, 11), (6, 17)]
    assert graphs_of(lambda h, w: module.grid_code(Grid(h, w)), grids) == 1
    masks = [(torch.randn(b, 12, 20),) for b in (2, 3, 7)]
    assert graphs_of(module.dense, masks) == 1


def test_device(device):
    module, (points, labels, boxes) = encoder().float(), prompts(3)
    call = {
        "points": points.float(),
        "labels": labels,
        "boxes": boxes.float(),
        "masks": torch.randn(12, 20),
    }
    here = module(module.frame((48, 80)), **call)
    moved = copy.deepcopy(module).to(device)
    there = moved(moved.frame((48, 80)), **{key: value.to(device) for key, value in call.items()})
    for one, other in zip(here, there, strict=True):
        assert other.device.type == device.type
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-4)
    assert moved.grid_code().device.type == device.type


def test_device_fake_cuda():
    module, cuda = PromptEncoder(SAM2, DIMS), torch.device("cuda", 0)
    with FakeTensorMode():
        module.frequency_bits = torch.empty(2, 4, 32, dtype=torch.uint8, device=cuda)
        for part in module.modules():
            for key, weight in list(part.named_parameters(recurse=False)):
                setattr(part, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        points, labels = (
            torch.empty(3, 2, device=cuda),
            torch.empty(3, dtype=torch.int64, device=cuda),
        )
        boxes = torch.empty(4, device=cuda)
        assert module.sparse(points, labels, boxes).device == cuda
        assert module.grid_code(Grid(3, 5)).device == cuda
        assert module.dense(torch.empty(12, 20, device=cuda)).device == cuda
        assert module.dense(None, (2,)).device == cuda


def test_device_meta():
    with torch.device("meta"):
        assert PromptEncoder(SAM, DIMS).frequency_bits.is_meta


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
def test_invariant_moving_averages_leave_the_frequencies(decay):
    """An average of buffers weighs a number with itself: 3000 steps moved the bits by .16 radians."""
    module = PromptEncoder(PromptSpec(mask_channels=4), DIMS)
    of_buffers = {"use_buffers": True}
    averages = [
        swa.AveragedModel(module, multi_avg_fn=swa.get_ema_multi_avg_fn(decay), **of_buffers),
        swa.AveragedModel(module, avg_fn=swa.get_ema_avg_fn(decay), **of_buffers),
        swa.AveragedModel(module, **of_buffers),
    ]
    for _ in range(500):
        for average in averages:
            average.update_parameters(module)
    for average in averages:
        assert torch.equal(average.module.freqs, module.freqs)


def test_error_prompts_that_are_none():
    module = encoder(SAM)
    frame, points, labels = module.frame((48, 80)), torch.zeros(1, 2), torch.zeros(1)
    for bad in (None, 3, (48, 80)):
        with pytest.raises(PositionError, match=r"frame is .*; an ImageFrame is required"):
            module(bad, points=points, labels=labels)
    for name in ("points", "labels", "boxes", "masks"):
        for bad in (3, [[1.0, 2.0]], "x", torch.zeros(1, 2, dtype=torch.complex64)):
            with pytest.raises(PositionError, match=rf"{name} is .*; a tensor of numbers"):
                module(frame, **{"points": points, "labels": labels, name: bad})
    for name in ("points", "boxes"):
        with pytest.raises(PositionError, match=rf"{name} have shape \(\)"):
            module(frame, **{"points": points, "labels": labels, name: torch.tensor(1.0)})
