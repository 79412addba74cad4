"""transformers' SAM and SAM 2 against the shipped prompt encoders: tokens, keys, and the known differences."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.tolerances import error_ratio
from visionpos import Dims
from visionpos.config import load_encoding
from visionpos.encodings import PromptEncoder

pytest.importorskip("transformers")

from transformers.models.sam.configuration_sam import SamConfig, SamVisionConfig
from transformers.models.sam.modeling_sam import SamModel, SamPositionalEmbedding
from transformers.models.sam2.configuration_sam2 import Sam2PromptEncoderConfig
from transformers.models.sam2.modeling_sam2 import Sam2PositionalEmbedding, Sam2PromptEncoder

WIDTH, SIDE = 16, 128  # 8x8 cells
DIMS = Dims(embed_dim=WIDTH, num_heads=1, depth=1)
SAM, SAM2 = (
    replace(load_encoding(name), input_hw=(SIDE, SIDE)) for name in ("sam_prompt", "hf_sam2_prompt")
)
KINDS = {"box": (False, True), "points": (True, False), "both": (True, True)}


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module.eval()


@pytest.fixture(scope="module")
def sam() -> SamModel:
    """A whole SAM, small: its frequencies are stored twice."""
    vision = {
        "hidden_size": 8,
        "output_channels": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": SIDE,
        "global_attn_indexes": [0],
        "num_pos_feats": WIDTH // 2,
        "window_size": 2,
    }
    decoder = {
        "hidden_size": WIDTH,
        "mlp_dim": 8,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 8,
    }
    config = SamConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": WIDTH, "image_size": SIDE},
        mask_decoder_config=decoder,
    )
    model = SamModel(config)
    randomised(model.prompt_encoder)
    with torch.no_grad():
        own = model.prompt_encoder.shared_embedding.positional_embedding
        model.shared_image_embedding.positional_embedding.copy_(own)
    return model.eval()


@pytest.fixture(scope="module")
def sam2() -> Sam2PromptEncoder:
    config = Sam2PromptEncoderConfig(hidden_size=WIDTH, image_size=SIDE)
    return randomised(Sam2PromptEncoder(config))


def prompts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two images of three prompts: points `(2, 3, 5, 2)`, labels with padding, boxes `(2, 3, 4)`."""
    points, labels = torch.rand(2, 3, 5, 2) * SIDE, torch.randint(0, 2, (2, 3, 5))
    labels[0, 1, 3:], labels[1, 2, 4] = -10, -1
    corners = torch.rand(2, 2, 3, 2) * SIDE / 2
    return points, labels, torch.cat([corners[0], corners[1] + SIDE / 2], dim=-1)


def call_both(theirs, ours, kind: str, masks=None):
    """(sparse, dense) of both, prompts in input pixels."""
    points, labels, boxes = prompts()
    with_points, with_box = KINDS[kind]
    points, labels = (points, labels) if with_points else (None, None)
    boxes = boxes if with_box else None
    got = ours(ours.frame((SIDE, SIDE)), points=points, labels=labels, boxes=boxes, masks=masks)
    return theirs(points, labels, boxes, None if masks is None else masks[:, None]), got


@pytest.mark.parametrize("kind", KINDS)
def test_reference_sam(sam, kind):
    """Tokens to float noise (they multiply by 2 pi last), counts 2, N+1, N+2 of users.md G01."""
    ours = PromptEncoder.from_source(sam.state_dict(), SAM, DIMS)
    (sparse, dense), (tokens, cells) = call_both(sam.prompt_encoder, ours, kind)
    assert tokens.shape == sparse.shape
    assert tokens.shape[2] == {"box": 2, "points": 6, "both": 7}[kind]
    torch.testing.assert_close(tokens, sparse, rtol=0, atol=2e-5)
    assert torch.equal(cells[:, 0], dense.flatten(2).mT)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_sam2(sam2, kind):
    """transformers appends corners and padding: counts 3, N+1, N+3."""
    ours = PromptEncoder.from_source(sam2.state_dict(), SAM2, DIMS)
    (sparse, dense), (tokens, cells) = call_both(sam2, ours, kind)
    assert tokens.shape == sparse.shape
    assert tokens.shape[2] == {"box": 3, "points": 6, "both": 8}[kind]
    torch.testing.assert_close(tokens, sparse, rtol=0, atol=2e-5)
    assert torch.equal(cells[:, 0], dense.flatten(2).mT)


def test_reference_sam2_predictor(sam2):
    """facebookresearch/sam2 hands boxes in as points labelled 2 and 3, ahead of the clicks, and pads last."""
    ours = PromptEncoder.from_source(sam2.state_dict(), replace(SAM2, corners="before"), DIMS)
    points, labels, boxes = prompts()
    joined = torch.cat([boxes.unflatten(-1, (2, 2)), points], dim=2)
    kinds = torch.cat([torch.tensor([2, 3]).expand(2, 3, 2), labels], dim=2)
    sparse, _ = sam2(joined, kinds, None, None)
    tokens, _ = ours(ours.frame((SIDE, SIDE)), points=points, labels=labels, boxes=boxes)
    assert tokens.shape == sparse.shape == (2, 3, 8, WIDTH)
    torch.testing.assert_close(tokens, sparse, rtol=0, atol=2e-5)


def test_reference_sam2_corner_labels(sam2):
    """Labels 2 and 3 through the points path are box corners, as the predictors of SAM 2 call it."""
    ours = PromptEncoder.from_source(sam2.state_dict(), SAM2, DIMS)
    points, labels = torch.rand(1, 1, 4, 2) * SIDE, torch.tensor([[[2, 3, 1, 0]]])
    tokens, _ = ours(ours.frame((SIDE, SIDE)), points=points, labels=labels)
    sparse, _ = sam2(points, labels, None, None)
    torch.testing.assert_close(tokens, sparse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["sam", "sam2"])
def test_reference_masks(name, request):
    """Two stride-2 convolutions, norms over channels, a 1x1: the mask path of both."""
    theirs = request.getfixturevalue(name)
    state = theirs.state_dict()
    ours = PromptEncoder.from_source(state, SAM if name == "sam" else SAM2, DIMS)
    masks = torch.randn(2, SIDE // 4, SIDE // 4)
    prompt_encoder = theirs.prompt_encoder if name == "sam" else theirs
    (_, dense), (_, cells) = call_both(prompt_encoder, ours, "box", masks)
    torch.testing.assert_close(cells, dense.flatten(2).mT, rtol=1e-4, atol=1e-4)


def test_reference_image_wide_code(sam):
    """get_image_wide_positional_embeddings: cell centres, channels first there."""
    ours = PromptEncoder.from_source(sam.state_dict(), SAM, DIMS)
    theirs = sam.get_image_wide_positional_embeddings()[0]
    torch.testing.assert_close(ours.grid_code(), theirs.flatten(1).T, rtol=0, atol=2e-5)


def test_reference_keys(sam, sam2):
    """Every prompt entry of both state dicts is used; the copy of the frequencies is one of them."""
    for state, spec in ((sam.state_dict(), SAM), (sam2.state_dict(), SAM2)):
        keys = [key for key in state if "vision_encoder" not in key and "mask_decoder" not in key]
        for key in keys:
            less = {k: v for k, v in state.items() if k != key}
            if "positional_embedding" in key and spec is SAM:
                PromptEncoder.from_source(less, spec, DIMS)  # the other copy is enough
                continue
            with pytest.raises(ValueError, match=r"lacks|shape"):
                PromptEncoder.from_source(less, spec, DIMS)


def test_reference_sigma_of_a_fresh_sam():
    """users.md 0.3: SamVisionConfig draws with half the hidden width, 384, instead of 1; pinned as theirs."""
    assert SamVisionConfig().scale == 384
    assert SamPositionalEmbedding(SamVisionConfig()).positional_embedding.std().item() > 300
    assert Sam2PromptEncoderConfig().scale == 1
    fresh = PromptEncoder(load_encoding("sam_prompt"), Dims(embed_dim=256, num_heads=8, depth=2))
    assert (fresh.freqs / (2 * torch.pi)).std().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    ("embedding", "config"),
    [
        (SamPositionalEmbedding, SamVisionConfig(hidden_size=2)),  # sigma 1
        (Sam2PositionalEmbedding, Sam2PromptEncoderConfig()),
    ],
    ids=["sam", "sam2"],
)
def test_reference_half_precision(embedding, config):
    """Facts 1E: a bf16 transformers model casts coordinates: 642 places are left of 1024 columns, codes are off by .1.

    Ours keeps the places and rounds once; the frequencies are not cast at all.
    """
    theirs = embedding(config).eval()
    x = (torch.arange(1024.0) + 0.5) / 1024
    places = torch.stack([x, torch.full_like(x, 0.5)], dim=-1)[None, None]
    wide = theirs(places)
    half = theirs.bfloat16()(places)
    assert len((2 * x - 1).bfloat16().unique()) == 642
    assert len(half[0, 0].unique(dim=0)) <= 642
    assert 0.05 < (half.float() - wide).abs().max() < 0.2
    spec = load_encoding("sam_prompt")
    ours = PromptEncoder(spec, Dims(embed_dim=256, num_heads=8, depth=2)).bfloat16()
    codes = ours.code((2 * places - 1).flip(-1))
    assert len(codes[0, 0].unique(dim=0)) == 1024
    assert error_ratio(codes.bfloat16(), codes) < 4e-3


def test_reference_labels_of_sam(sam):
    """Facts 1E: SAM's points path takes labels 2 and 3 and adds no vector; here they are refused, as 4 is."""
    points = torch.full((1, 1, 1, 2), 7.0)
    plain = [
        sam.prompt_encoder(points, torch.full((1, 1, 1), label), None, None)[0] for label in (2, 3)
    ]
    ours = PromptEncoder.from_source(sam.state_dict(), SAM, DIMS)
    place = (torch.full((1, 2), 7.5) / SIDE) * 2 - 1
    for sparse in plain:
        torch.testing.assert_close(sparse[0, 0, :1], ours.code(place), rtol=0, atol=2e-5)
    for label in (2, 3, 4):
        with pytest.raises(ValueError, match=rf"label {label} is unknown"):
            ours(ours.frame((SIDE, SIDE)), points=points, labels=torch.full((1, 1, 1), label))


@pytest.mark.parametrize("source_hw", [(1200, 1920), (300, 451), (97, 13), (128, 128)])
def test_reference_processors(source_hw):
    """The coordinate rules of both processors: longest side with its rounding, and stretch."""
    from transformers.models.sam.image_processing_sam import SamImageProcessor
    from transformers.models.sam.processing_sam import SamProcessor
    from transformers.models.sam2.image_processing_sam2 import Sam2ImageProcessor
    from transformers.models.sam2.processing_sam2 import Sam2Processor

    points = torch.rand(7, 2) * torch.tensor([source_hw[1], source_hw[0]])
    for name, processor in (
        ("sam_prompt", SamProcessor(SamImageProcessor())),
        ("hf_sam2_prompt", Sam2Processor(Sam2ImageProcessor())),
    ):
        given = points.double().numpy() if name == "sam_prompt" else points
        theirs = torch.as_tensor(processor._normalize_coordinates(1024, given, source_hw)).float()
        encoder = PromptEncoder(load_encoding(name), DIMS)
        ours = encoder.frame(source_hw).points(points)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4)


def test_reference_where_the_frequencies_are_kept(sam, sam2):
    """Facts 1E: SAM's port trains B and stores it twice; SAM 2's is a buffer; ours is never trained."""
    copies = [key for key in sam.state_dict() if key.endswith("positional_embedding")]
    trained = [key for key, _ in sam.named_parameters() if key in copies]
    assert len(copies) == 2
    assert trained
    kept = Sam2PositionalEmbedding(Sam2PromptEncoderConfig())
    assert list(kept.state_dict()) == ["positional_embedding"]
    assert not list(kept.parameters())
    for state, spec in ((sam.state_dict(), SAM), (sam2.state_dict(), SAM2)):
        ours = PromptEncoder.from_source(state, spec, DIMS)
        stored = next(v for k, v in state.items() if k.endswith("positional_embedding"))
        torch.testing.assert_close(ours.freqs.flip(0) / (2 * torch.pi), stored)
        assert not [name for name, _ in ours.named_parameters() if "freq" in name]
