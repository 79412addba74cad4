"""Ids of views that share a canvas (MiniCPM-V 4.7) and of images to generate (GLM-Image), as transformers has them."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.parity.test_rope_index_transformers import owner, stub
from visionpos.vlm import Image, Text, Video, family
from visionpos.vlm.batches import merge_rows
from visionpos.vlm.decoding import pending_ids
from visionpos.vlm.segments import Segment

pytest.importorskip("transformers")

FEW, MANY = range(150), range(150, 2000)
NAMES = {"<image>": 2, "</image>": 3, "<slice>": 4, "</slice>": 5, "\n": 6, "<|image_pad|>": 7}


def drawn(rng: random.Random) -> list[Segment]:
    """Text, line ends and images, which may touch."""
    out: list[Segment] = []
    for kind in rng.choices(("text", "line", "image", "image"), k=rng.randint(1, 5)):
        if kind == "text":
            out.append(Text(tokens=rng.randint(1, 5)))
        elif kind == "line":
            out.append(Text("\n", tokens=1))
        else:
            out.append(Image((rng.randint(20, 1800), rng.randint(20, 1800))))
    return out


def check_canvas(seed: int, variant: str | None) -> None:
    rng = random.Random(seed)
    fam = family("minicpm_v4_7", variant=variant)
    merge = fam.spec.grid.merge
    prompts = [drawn(rng) for _ in range(rng.randint(1, 3))]
    streams = [fam.stream(prompt) for prompt in prompts]
    rule = fam.spec.rule
    assert rule is not None
    side = rng.choice(("left", "right"))
    got = merge_rows([fam.position_ids(stream) for stream in streams], rule, side=side)
    assert got.mask is not None
    ids, types = torch.zeros(2, *got.mask.shape, dtype=torch.int64)
    for row, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        ends = {at for at, one in enumerate(prompt) if isinstance(one, Text) and one.text == "\n"}
        tokens = []
        for run in stream.runs:
            known = "\n" if run.segment in ends else None
            tokens += [NAMES.get(known or name, 1) for name in run.names]
        ids[row, got.mask[row]] = torch.tensor(tokens)
        types[row, got.mask[row]] = stream.modality
    sizes = [
        (view.tokens.height * merge, view.tokens.width * merge)
        for prompt in prompts
        for one in prompt
        if isinstance(one, Image)
        for view in fam.plan(one).views
    ]
    model = owner("minicpmv4_7")
    self = stub(model)
    self.config = SimpleNamespace(
        downsample_mode="4x" if variant else "16x", image_start_id=2, image_end_id=3,
        slice_start_id=4, slice_end_id=5, newline_id=6,
    )  # fmt: skip
    theirs, deltas = model.get_rope_index(
        self, ids, types, torch.tensor(sizes).reshape(-1, 2), attention_mask=got.mask.long()
    )
    assert torch.equal(got.ids, theirs), f"seed {seed}"
    assert torch.equal(got.delta, deltas[:, 0]), f"seed {seed}: {got.delta} {deltas}"


@pytest.mark.parametrize("variant", [None, "4x"])
def test_reference_canvas(variant: str | None) -> None:
    for seed in FEW:
        check_canvas(seed, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [None, "4x"])
def test_reference_canvas_many(variant: str | None) -> None:
    for seed in MANY:
        check_canvas(seed, variant)


def check_pending(seed: int) -> None:
    """Sources before, images to generate behind; every prompt ends on a start token."""
    rng = random.Random(seed)
    start, end = 8, 9
    row: list[int] = []
    grids: list[list[int]] = []
    for _ in range(rng.randint(0, 3)):
        height, width = rng.randint(1, 6), rng.randint(1, 6)
        grids.append([1, height, width])
        row += [1] * rng.randint(0, 4) + [start] + [7] * (height * width) + [end]
    sources = len(grids)
    row += [1] * rng.randint(1, 4) + [start]
    grids += [[1, rng.randint(1, 6), rng.randint(1, 6)] for _ in range(rng.randint(1, 3))]
    ids = torch.tensor([row])
    model = owner("glm_image")
    self = stub(model)
    self.config = SimpleNamespace(image_start_token_id=start, image_end_token_id=end)
    theirs, deltas = model.get_rope_index(
        self, ids, torch.tensor(grids), torch.tensor([len(grids)])
    )
    fam = family("glm_image")
    pos = fam.position_ids_from_tokens(ids[0], (ids[0] == 7).long(), grids[:sources])
    assert torch.equal(pos.ids, theirs[:, 0]), f"seed {seed}"
    assert int(pos.delta) == int(deltas[0, 0]) == 0
    rule = fam.spec.rule
    assert rule is not None
    following = pending_ids(
        pos, [(h, w) for _, h, w in grids[: sources - 1 if sources else None : -1]], rule
    )
    assert torch.equal(following, self._cached_decode_position_ids[0]), f"seed {seed}"


def test_reference_images_to_generate() -> None:
    for seed in FEW:
        check_pending(seed)


def test_canvas_takes_no_clip() -> None:
    with pytest.raises(ValueError, match="takes no video"):
        family("minicpm_v4_7").stream([Video((64, 64), frames=2)])
