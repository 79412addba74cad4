"""NaFlex batches inside the installed NaFlexVit and Siglip2: each image as if alone, true grids, no silent cut."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import visionpos as vp
from tests.strategies import grids as sides
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.encodings import Factorized, LearnedTable
from visionpos.errors import PositionError
from visionpos.vlm import keep_tokens, naflex_batch

PATCH = 4
WIDTH = 3 * PATCH * PATCH
GRIDS = [Grid(4, 4), Grid(3, 7), Grid(1, 5), Grid(6, 2), Grid(1, 1)]


def patches_of(grids: list[Grid], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(grid.size, WIDTH, dtype=dtype) for grid in grids]


@given(st.lists(sides(max_side=5), min_size=1, max_size=6), st.integers(0, 4))
def test_parity_collator(drawn: list[tuple[int, int]], spare: int) -> None:
    """Field for field what timm's collator makes of the same patches; here nothing is ever cut off."""
    collator = pytest.importorskip("timm.data.naflex_dataset").NaFlexCollator
    grids = [Grid(*hw) for hw in drawn]
    patches = patches_of(grids)
    length = max(grid.size for grid in grids) + spare
    items = [
        {
            "patches": one,
            "patch_coord": vp.coordinates(grid).long(),
            "patch_valid": torch.ones(grid.size, dtype=torch.bool),
        }
        for one, grid in zip(patches, grids, strict=True)
    ]
    theirs, _ = collator(length)([(item, 0) for item in items])
    batch = naflex_batch(patches, grids, length=length)
    ours = batch.for_timm()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert batch.spatial_shapes.tolist() == [list(hw) for hw in drawn]
    assert not batch.patches[~batch.patch_valid].any()
    flat = naflex_batch(torch.cat(patches), grids)
    assert torch.equal(flat.patches, batch.patches[:, : length - spare])


def naflexvit(**changes: object) -> nn.Module:
    """A tiny NaFlexVit whose position tables are large enough to be seen."""
    timm = pytest.importorskip("timm.models.naflexvit")
    settings = {"patch_size": PATCH, "embed_dim": 32, "depth": 2, "num_heads": 2} | changes
    config = timm.NaFlexVitCfg(pos_embed_grid_size=(5, 5), **settings)
    model = timm.NaFlexVit(config, num_classes=0).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "pos_embed" in name else 0.2)
    return model.double()


KINDS = [
    {"pos_embed": "learned", "global_pool": "map"},
    {"pos_embed": "factorized", "global_pool": "avg", "reg_tokens": 2},
    {"pos_embed": "learned", "global_pool": "token", "class_token": True},
    {"pos_embed": "none", "rope_type": "axial", "attn_type": "rope", "global_pool": "avg"},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_parity_naflexvit_batch_is_each_alone(kind: dict) -> None:
    model = naflexvit(**kind)
    patches = patches_of(GRIDS, torch.float64)
    with torch.no_grad():
        together = model(naflex_batch(patches, GRIDS, length=25).for_timm())
        for number, (one, grid) in enumerate(zip(patches, GRIDS, strict=True)):
            alone = model(naflex_batch([one], [grid]).for_timm())
            assert_close_to(together[number], alone[0])
    assert (together[0] - together[1]).abs().max() > 0.1


@pytest.mark.parametrize("pos_embed", ["learned", "factorized"])
def test_difference_grid_read_off_the_largest_coordinate(pos_embed: str) -> None:
    """timm after dropping: another grid, other codes. The batch keeps the true grid, and its codes those of the whole.

    A 4x4 image cut to its first 10 patches is embedded as one of 3x4 (timm 1.0.31, calculate_naflex_grid_sizes).
    """
    naflex = pytest.importorskip("timm.models.naflexvit")
    model = naflexvit(pos_embed=pos_embed, global_pool="avg")
    embeds = model.embeds
    grid, patches = Grid(4, 4), torch.randn(16, WIDTH, dtype=torch.float64)
    whole_batch = naflex_batch([patches], [grid])
    keep = torch.arange(16) < 10
    cut = naflex_batch([patches], [grid], keep=keep)
    assert naflex.calculate_naflex_grid_sizes(cut.patch_coord) == [(3, 4)]
    assert cut.spatial_shapes.tolist() == [[4, 4]]
    with torch.no_grad():
        whole = embeds(whole_batch.patches, whole_batch.patch_coord, whole_batch.patch_valid)[0]
        theirs = embeds(cut.patches, cut.patch_coord, cut.patch_valid)[0]
        assert (theirs - whole[:, keep]).abs().max() > 0.1
        if pos_embed == "learned":
            encoding = LearnedTable.from_source(
                {"pos_embed": embeds.pos_embed.flatten(1, 2)},
                vp.LearnedSpec(grid_hw=(5, 5), recipe="timm"),
                Dims(embed_dim=32, num_heads=2, depth=2),
            )
        else:
            encoding = Factorized.from_source(
                {"pos_embed_y": embeds.pos_embed_y, "pos_embed_x": embeds.pos_embed_x},
                vp.FactorizedSpec(table_hw=(5, 5), coords="fractional", recipe="sam"),
                Dims(embed_dim=32, num_heads=2, depth=2),
            )
        plain = copy.deepcopy(embeds)
        plain.pos_embed_type = "none"
        ours = plain(cut.patches, cut.patch_coord, cut.patch_valid)[0] + cut.codes(encoding)
    # Two ways to one interpolation; timm resamples in float32.
    torch.testing.assert_close(ours, whole[:, keep], rtol=1e-4, atol=1e-5)


def test_parity_siglip2_batch_is_each_alone() -> None:
    module = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    config = module.Siglip2VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_patches=25,
        patch_size=PATCH,
    )
    model = module.Siglip2VisionModel(config).eval()
    nn.init.normal_(model.embeddings.position_embedding.weight)
    patches = patches_of(GRIDS)
    inputs = naflex_batch(patches, GRIDS, length=30).for_transformers()
    assert inputs["pixel_attention_mask"].dtype == torch.int32
    with torch.no_grad():
        together = model(**inputs)
        for number, (one, grid) in enumerate(zip(patches, GRIDS, strict=True)):
            alone = model(**naflex_batch([one], [grid]).for_transformers())
            own = together.last_hidden_state[number, : grid.size]
            assert_close_to(own, alone.last_hidden_state[0])
            assert_close_to(together.pooler_output[number], alone.pooler_output[0])
    assert (together.pooler_output[0] - together.pooler_output[1]).abs().max() > 1e-3


@settings(max_examples=20)
@given(st.lists(sides(max_side=6), min_size=1, max_size=5), st.floats(0, 0.9))
def test_invariant_dropped_tokens_keep_their_cells(
    drawn: list[tuple[int, int]], rate: float
) -> None:
    grids = [Grid(*hw) for hw in drawn]
    patches = patches_of(grids)
    keep = keep_tokens(grids, rate, generator=torch.Generator().manual_seed(0))
    batch = naflex_batch(patches, grids, keep=keep)
    parts = keep.split([grid.size for grid in grids])
    assert batch.patches.shape[1] == max(int(part.sum()) for part in parts)
    for number, (grid, kept) in enumerate(zip(grids, parts, strict=True)):
        valid = batch.patch_valid[number]
        assert torch.equal(batch.patches[number, valid], patches[number][kept])
        assert torch.equal(batch.patch_coord[number, valid], vp.coordinates(grid)[kept].long())


def test_shape_edges() -> None:
    empty = naflex_batch(torch.zeros(0, WIDTH), [])
    assert empty.patches.shape == (0, 1, WIDTH)
    assert empty.spatial_shapes.shape == (0, 2)
    unflat = naflex_batch([torch.ones(6, PATCH, PATCH, 3)], [Grid(2, 3)], length=8)
    assert unflat.patches.shape == (1, 8, PATCH, PATCH, 3)
    assert unflat.for_transformers()["pixel_values"].shape == (1, 8, WIDTH)
    real = naflex_batch([torch.ones(1008, 2)], [Grid(36, 28)], length=1024)  # transformers 37907
    assert int(real.for_transformers()["pixel_attention_mask"].sum()) == 1008


class Written(TorchDispatchMode):
    """Counts operations that write memory: views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_cost_does_not_grow_with_the_number_of_images() -> None:
    """As many operations for 60 images of 60 grids as for 4: no lattice an image, and every byte written once.

    On one thread a batch of 64 takes 0.8 of the time of timm's collator, which is given the coordinates
    (benchmarks/packing.py).
    """
    counts = []
    for number in (4, 60):
        grids = [Grid(1 + at % 7, 1 + at % 11) for at in range(number)]
        patches = patches_of(grids)
        with Written() as written:
            naflex_batch(patches, grids, length=80)
        counts.append(written.count)
    assert counts[0] == counts[1]
    assert counts[0] < 40


def test_gradient() -> None:
    patches = [one.requires_grad_() for one in patches_of(GRIDS)]
    naflex_batch(patches, GRIDS).patches.square().sum().backward()
    assert all(torch.equal(one.grad, 2 * one) for one in patches)


def test_error_values() -> None:
    patches = patches_of(GRIDS)
    dropped = naflex_batch(patches, GRIDS, keep=torch.arange(55) != 3 + 16)
    cases = [
        (lambda: naflex_batch(patches, GRIDS, length=20), "length is 20 and image 1 has 21.*keep="),
        (lambda: naflex_batch(patches, GRIDS, length=0), "length is 0"),
        (lambda: naflex_batch(patches[1:], GRIDS), "of 4 images and grids of 5"),
        (lambda: naflex_batch(patches[::-1], GRIDS), r"tokens\[0\].*16 cells"),
        (lambda: naflex_batch(patches, [Grid(4, 2, frames=2), *GRIDS[1:]]), "has 2 frames"),
        (lambda: naflex_batch([patches[0][:, :1], *patches[1:]], GRIDS), r"tokens\[1\].*one width"),
        (lambda: naflex_batch([one.numpy() for one in patches], GRIDS), "from_numpy"),
        (lambda: naflex_batch(None, GRIDS), "tokens are a NoneType"),
        (dropped.for_timm, r"image 1 holds 20 patches of grid \(1, 3, 7\).*NaFlexVit"),
        (dropped.for_transformers, "Siglip2"),
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
