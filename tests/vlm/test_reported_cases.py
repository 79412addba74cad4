"""What users report about packing, decoding and streams (facts/users.md f, facts/mrope.md 13), each as its kind."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

import visionpos as vp
from tests.tolerances import assert_close_to
from tests.vlm.conversations import NAMES, fam_of, stream_of
from tests.vlm.rows import clip, image, numbers, place, tensors
from visionpos.errors import PositionError
from visionpos.vlm import Image, Text, Video, family, pack, pack_rows

SHORT = (("text", 7), ("image", 0), ("text", 1))
RELATIVE = [name for name in NAMES if name != "hunyuan_vl"]


def scores(name: str, ids: Tensor) -> Tensor:
    """q.k of every pair of tokens, in float64, of queries and keys that depend on the token alone."""
    fam = fam_of(name)
    language = fam.spec.language
    assert language is not None
    turns = vp.angles(ids.T.double(), fam.frequencies.double())
    draws = torch.Generator().manual_seed(3)
    wide = (2, 1, 1, ids.shape[-1], language.head_dim)
    q, k = torch.randn(wide, dtype=torch.float64, generator=draws)
    q, k = vp.rotate(q, k, vp.Rotation.of(turns, language.pairing))
    return (q @ k.mT)[0, 0]


@pytest.mark.parametrize("start", [15, 0, 3])
def test_f02_time_is_scaled_before_the_start_is_added(start: int) -> None:
    """A clip behind 15 tokens starts at 15, not at 60."""
    pos = place("qwen2_5_vl", "vendor", [start, clip(3, 2, 2), 1], 2.0)
    assert pos.ids[0, start:].tolist() == [start, start + 4, start + 8, start + 9]


@pytest.mark.parametrize("name", RELATIVE)
def test_f11_one_constant_on_all_axes_is_harmless(name: str) -> None:
    """Ids that run on through a row differ from restarted ones by one constant, and no score does."""
    fam = fam_of(name)
    whole = fam.position_ids(stream_of(name, SHORT + SHORT)).ids
    row = pack([stream_of(name, SHORT)] * 2, family=fam)
    second = row.unpacked()[1]
    moved = whole[:, -second.shape[-1] :] - second
    assert len(moved.unique()) == 1
    assert moved[0, 0] > 0
    assert_close_to(scores(name, second + moved), scores(name, second))


def test_f11_some_families_do_not_run_on_by_a_constant() -> None:
    """HunyuanVL counts rows from zero and images from the start of the prompt: only restarting is right."""
    fam = fam_of("hunyuan_vl")
    whole = fam.position_ids(stream_of("hunyuan_vl", SHORT + SHORT)).ids
    row = pack([stream_of("hunyuan_vl", SHORT)] * 2, family=fam)
    second = row.unpacked()[1]
    moved = whole[:, -second.shape[-1] :] - second
    assert len(moved.unique()) > 1
    assert not torch.allclose(scores("hunyuan_vl", second + moved), scores("hunyuan_vl", second))


@pytest.mark.parametrize("name", NAMES)
def test_f11_a_shift_of_every_axis_is_harmless(name: str) -> None:
    ids = fam_of(name).position_ids(stream_of(name, SHORT)).ids
    shift = torch.tensor([9.0, -4.0, 31.0, 2.0])[: len(ids), None]
    assert_close_to(scores(name, ids + shift), scores(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_f11_a_shift_of_the_image_alone_is_harmful(name: str) -> None:
    stream = stream_of(name, SHORT)
    ids = fam_of(name).position_ids(stream).ids
    moved = torch.where(stream.modality > 0, ids + 9, ids)
    assert (scores(name, moved) - scores(name, ids)).abs().max() > 1


@pytest.mark.parametrize("name", NAMES)
def test_text_alone_is_one_dimensional_rope(name: str) -> None:
    """Bit for bit the rotation of a language model that never saw an image."""
    fam = fam_of(name)
    language = fam.spec.language
    assert language is not None
    channels = language.rotary_dim or language.head_dim
    rope = {"rope_type": "default", "rope_theta": float(language.theta)}
    peer = LlamaRotaryEmbedding(LlamaConfig(head_dim=channels, rope_parameters=rope))
    cos, sin = peer(torch.zeros(1), torch.arange(300)[None])
    rotation = fam.rotation(fam.position_ids(fam.stream([Text(tokens=300)])).ids)
    assert_close_to(rotation.cos, cos[0, :, : channels // 2], kind="exact")
    assert_close_to(rotation.sin, sin[0, :, : channels // 2], kind="exact")


def test_f24_seconds_are_those_of_the_source() -> None:
    """Source frame 300 at 30 fps is at 10.0 s, whatever was sampled: not at 150 s."""
    seconds = [index / 30 for index in (0, 60, 120, 180, 240, 300, 300, 300)]
    stream = family("qwen3_vl").stream([Video((64, 96), seconds=seconds)])
    stamps = [name for name in stream.names if "seconds" in name or "." in name]
    assert any("10.0" in stamp for stamp in stamps)
    assert not any("150" in stamp for stamp in stamps)
    fam = family("qwen2_5_vl")
    timed = fam.position_ids(fam.stream([Video((56, 56), seconds=seconds)]))
    cells = fam.stream([Video((56, 56), seconds=seconds)]).modality > 0
    assert (timed.ids[0, cells].unique() - 1).tolist() == [0, 8, 16, 20]  # 0, 4, 8, 10 s


@pytest.mark.parametrize(
    ("frames", "group", "steps"), [(17, 4, 5), (5, 3, 2), (7, 4, 2), (1, 2, 1), (16, 4, 4)]
)
def test_f27_frames_are_padded_up_to_whole_groups(frames: int, group: int, steps: int) -> None:
    fam = family("qwen2_vl", overlay={"video": {"group": group}})
    stream = fam.stream([Video((56, 84), frames=frames)])
    clips = [span.grid for span in stream.spans if span.grid is not None]
    assert [grid.frames for grid in clips] == [steps]
    assert len(fam.position_ids(stream).ids[0, stream.modality > 0].unique()) == steps


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_f29_no_silent_fall_back_to_one_axis(name: str) -> None:
    """Placeholders without grids, grids without placeholders, and one row of ids for three axes are refused."""
    fam, row = family(name), tensors([3, image(4, 4), 3])
    types, nothing = row["modality"], torch.zeros_like(row["modality"])
    with pytest.raises(PositionError, match="no grid"):
        fam.position_ids_from_tokens(types, types)
    with pytest.raises(PositionError, match="modality has tokens for 0"):
        fam.position_ids_from_tokens(types, nothing, row["image_grids"])
    with pytest.raises(PositionError, match=r"ids have shape \(1, 10\); \[3, n\]"):
        fam.rotation(torch.arange(10)[None])


def test_f29_one_axis_where_an_image_is_gives_other_scores() -> None:
    """Liger PR 276: boxes wrong, loss fine: text alone does not show it."""
    pos = place("qwen2_vl", "vendor", [3, image(4, 6), 3])
    flat = torch.arange(pos.ids.shape[-1]).expand(3, -1)
    assert (scores("qwen2_vl", flat) - scores("qwen2_vl", pos.ids)).abs().max() > 1
    text = place("qwen2_vl", "vendor", [12]).ids
    assert torch.equal(text, torch.arange(12).expand(3, -1))


def test_f31_a_row_is_packed_because_it_was_packed() -> None:
    """Never guessed from ids: three rows in which ids repeat and fall are one prompt, four rows are no axes of ids."""
    fam = family("qwen2_vl")
    pos = place("qwen2_vl", "vendor", [image(4, 4), 1, image(6, 4), image(2, 2)])
    assert (pos.ids[2].diff() < 0).any()
    assert int((pos.ids[2] == 0).sum()) > 1
    row = pack_rows([pos])
    assert row.cu_seqlens.tolist() == row.padded_seqlens()[0].tolist() == [0, pos.ids.shape[-1]]
    assert row.max_seqlen == pos.ids.shape[-1]
    plain = fam.rotation(row.three_rows)
    assert_close_to(plain.cos[0, 0], fam.rotation(pos.ids).cos, kind="exact")
    with pytest.raises(
        PositionError, match=r"ids have shape \(4, 1, 12\); \[3, n\] or \[3, b, n\]"
    ):
        fam.rotation(row.four_rows)


def test_f07_document_numbers_are_no_mask() -> None:
    """1 1 2 2 2 0 is refused; the right ids are those of the two prompts packed."""
    types = torch.zeros(6, dtype=torch.int64)
    mask = torch.tensor([1, 1, 2, 2, 2, 0])
    with pytest.raises(PositionError, match=r"attention_mask is 2 .* Split packed documents"):
        family("qwen2_vl").position_ids_from_tokens(types, types, attention_mask=mask)
    row = pack_rows([place("qwen2_vl", "vendor", [length]) for length in (2, 3)], length=6)
    assert row.ids[0, row.valid].tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "hy_v4_vl"])
def test_f32_ids_are_a_function_of_types_and_grids(name: str) -> None:
    """No processor and no model: runs of a stream, or types and grids, give the same ids; nothing is written to."""
    fam = family(name)
    stream = fam.stream([Text(tokens=5), Image((112, 168)), Text(tokens=2), Image((84, 56))])
    merge = fam.spec.grid.merge
    grids = torch.tensor(
        [
            [1, span.grid.height * merge, span.grid.width * merge]
            for span in stream.spans
            if span.grid
        ]
    )
    types = stream.modality.clone()
    if name == "hy_v4_vl":  # the token that ends a row is a placeholder too
        types[stream.is_embedding] = 1
    before = types.clone(), grids.clone()
    first, again = (fam.position_ids_from_tokens(types, types, grids) for _ in range(2))
    assert torch.equal(first.ids, fam.position_ids(stream).ids)
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(types, before[0])
    assert torch.equal(grids, before[1])


def test_f32_no_model_library_is_imported() -> None:
    program = (
        "import sys, torch\n"
        "from visionpos.vlm import family, pack\n"
        "types = torch.tensor([0, 1, 1, 1, 1, 0])\n"
        "pos = family('qwen2_vl').position_ids_from_tokens(types, types, [[1, 4, 4]])\n"
        "assert not {'transformers', 'torchvision', 'timm'} & set(sys.modules)\n"
        "print(pos.ids[1].tolist())"
    )
    got = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert got.stdout.decode().strip() == "[0, 1, 1, 2, 2, 3]"


def test_13_44_positions_beyond_any_table() -> None:
    """vllm#9965: time ids pass the number of tokens, and are turned all the same."""
    fam = family("qwen2_5_vl")
    pos = place("qwen2_5_vl", "vendor", [2, clip(300, 2, 2), 2], 40.0)
    assert int(pos.ids.max()) > 20_000 > pos.ids.shape[-1]
    exact = fam.rotation(pos.ids, accuracy="exact")
    axis = torch.tensor([0] * 16 + [1] * 24 + [2] * 24)
    turns = pos.ids[axis].T * 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
    assert_close_to(exact.cos, turns.cos(), kind="table")
    assert_close_to(exact.sin, turns.sin(), kind="table")


def test_13_49_axes_are_packed_with_the_tokens_of_each_document() -> None:
    """ROLL#231, Automodel#2172: the axis of the ids is neither dropped nor flattened into the row."""
    rows = [place("qwen2_vl", "vendor", parts) for parts in ([2, image(4, 6)], [image(6, 4), 1])]
    row = pack_rows(rows)
    assert row.ids.tolist() == [
        numbers("0 1 2 2 2 2 2 2 0 0 0 0 0 0 3"),
        numbers("0 1 2 2 2 3 3 3 0 0 1 1 2 2 3"),
        numbers("0 1 2 3 4 2 3 4 0 1 0 1 0 1 3"),
    ]
