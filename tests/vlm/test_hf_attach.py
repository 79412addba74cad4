"""Ours in place of a model's get_rope_index: agreement, dialects, calls by position, copies, and what is refused."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.vlm import tiny_models
from visionpos.errors import PositionError
from visionpos.vlm import family
from visionpos.vlm.hf import attach, diff, served_types
from visionpos.vlm.hf.reading import served_rows

PLACED = [name for name in served_types() if served_rows()[name].by_tokens]
# Families whose clips are one block: only there do the two rules part (facts/mrope.md 0.1).
PARTING = {"qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe"}


def config(name: str) -> Any:
    """The class's own config, with what checkpoints add and classes leave out."""
    from transformers import AutoConfig

    made = AutoConfig.for_model(name)
    made = getattr(made, "thinker_config", made)
    if name == "hunyuan_vl":
        made.text_config.rope_parameters["mrope_section"] = [16, 16, 16, 16]
    if "omni" in name and name.startswith("qwen"):
        tokens = (
            "vision_start",
            "vision_end",
            "audio_start",
            "audio_end",
            "image",
            "video",
            "audio",
        )
        for number, token in enumerate(tokens, 100):
            setattr(made, f"{token}_token_id", number)
    return made


@pytest.mark.parametrize("name", PLACED)
def test_agrees_with_the_installed_method(name: str) -> None:
    """attach asks the model itself first; undone, the class's own method is back."""
    owner = tiny_models.owner(name, config(name))
    own = type(owner).get_rope_index
    with attach(owner, "transformers") as attachment:
        assert attachment.family.name == served_rows()[name].family
        assert owner.get_rope_index is not own
    assert owner.get_rope_index.__func__ is own


@pytest.mark.parametrize("name", PLACED)
def test_diff_says_where_the_rules_part(name: str) -> None:
    """facts/mrope.md 0.1: text behind a clip longer than wide, in families of blocks; 0.3: HunYuan's counter."""
    found = diff(tiny_models.owner(name, config(name)))
    apart = {row.prompt for row in found.rows if not row.agrees}
    expected = set()
    if name in PARTING:
        expected = {"clip 7x2x3, longer than wide", "image 2x2, clip 6x1x2"}
    if name == "hunyuan_vl":
        expected = {"two rows, padded"}
    assert apart == expected, str(found)
    assert found.agrees is not bool(expected)


def test_golden_diff_of_qwen2_vl() -> None:
    """7 steps of 2x3 from 4 on: the vendor's text goes on at 11, transformers' at 4 + max(2, 3) = 7."""
    found = diff(tiny_models.owner("qwen2_vl", config("qwen2_vl")))
    row = next(row for row in found.rows if row.prompt.startswith("clip 7x2x3"))
    assert (row.model, row.vendor, row.apart) == ((7, 7, 7), (11, 11, 11), 4)
    assert (row.model_next, row.vendor_next) == ((11,), (15,))
    assert "[7, 7, 7] and [11, 11, 11]" in str(found)


def test_called_by_position_and_by_name() -> None:
    """qwen2_5_vl has seconds before the mask; golden G5 of facts/mrope.md, 0.75 s."""
    owner = tiny_models.owner("qwen2_5_vl", tiny_models.config("qwen2_5_vl"))
    types = torch.tensor([[0, 0, 2, 2, 2, 2, 0, 0, 0]])
    grids, mask = torch.tensor([[4, 2, 2]]), torch.ones_like(types)
    attach(owner)
    ids, delta = owner.get_rope_index(types, types, None, grids, [0.75], mask)
    assert ids[0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert delta.tolist() == [[1]]
    named, _ = owner.get_rope_index(
        input_ids=types, mm_token_type_ids=types, video_grid_thw=grids, second_per_grid_ts=[0.75]
    )
    assert torch.equal(named, ids)
    with pytest.raises(PositionError, match=r"seconds_per_grid is None.*silently takes 1\.0"):
        owner.get_rope_index(types, types, None, grids)
    with pytest.raises(PositionError, match=r"mm_token_type_ids is None.*processor"):
        owner.get_rope_index(types, None, None, grids)
    with pytest.raises(PositionError, match=r"input_ids is None.*inputs_embeds"):
        owner.get_rope_index(None, types)


def test_deltas_follow_the_model_s_convention() -> None:
    """Left padding does not count: next position 8 less 10 tokens for the first row, 3 less 3 for the second (G11)."""
    owner = tiny_models.owner("qwen2_vl", tiny_models.config("qwen2_vl"))
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0], [0] * 10])
    mask = torch.tensor([[1] * 10, [0] * 7 + [1] * 3])
    own = owner.get_rope_index(types, types, torch.tensor([[1, 4, 4]]), None, mask)[1]
    with attach(owner):
        ours = owner.get_rope_index(types, types, torch.tensor([[1, 4, 4]]), None, mask)[1]
    assert own.tolist() == ours.tolist() == [[-2], [0]]


def test_omni_reads_types_off_token_ids() -> None:
    """Golden G14: one clip (3, 4, 4) at 0.5 s and 25 ids a second: 2, 14, 27, then 28."""
    owner = tiny_models.owner("qwen2_5_omni", config("qwen2_5_omni"))
    row = torch.tensor([[7, 100, *[105] * 12, 101, 7, 7]])
    attach(owner)
    ids, delta = owner.get_rope_index(
        row, None, torch.tensor([[3, 4, 4]]), torch.ones_like(row), False, None, torch.tensor([0.5])
    )
    assert ids[0, 0].unique().tolist() == [0, 1, 2, 14, 27, 28, 29, 30]
    assert delta.tolist() == [[14]]


def test_copies_and_pickles_keep_ours() -> None:
    model = tiny_models.model("qwen2_vl")
    attachment = attach(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "get_rope_index" in vars(other.model)
        assert set(other.state_dict()) == set(model.state_dict())
    attachment.detach()
    attachment.detach()
    assert "get_rope_index" not in vars(model.model)


def test_error_refuses_what_it_does_not_know() -> None:
    owner = tiny_models.owner("qwen2_vl", tiny_models.config("qwen2_vl"))
    attach(owner)
    with pytest.raises(PositionError, match=r"another get_rope_index attached.*detach"):
        attach(owner)
    with pytest.raises(
        PositionError, match=r"'Linear' has no get_rope_index that is served; one of cohere_compass"
    ):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(PositionError, match=r"model is a str"):
        attach("qwen2_vl")  # type: ignore[arg-type]
    for name in set(served_types()) - set(PLACED):
        with pytest.raises(PositionError, match=r"places tokens by more than types and grids"):
            attach(tiny_models.owner(name, config(name)))


def test_error_when_a_release_has_another_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that counts images one further is found out; check=False attaches all the same."""
    owner = tiny_models.owner("qwen2_vl", tiny_models.config("qwen2_vl"))
    own = type(owner).get_rope_index

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, delta = own(self, *args, **kwargs)
        return ids + (ids > 6), delta

    other.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(owner), "get_rope_index", other)
    with pytest.raises(PositionError, match=r"puts token .* at \[.*check=False"):
        attach(owner)
    attach(owner, check=False).detach()


def test_error_when_the_own_method_raises() -> None:
    from transformers import AutoConfig

    broken = tiny_models.owner("hunyuan_vl", AutoConfig.for_model("hunyuan_vl"))
    with pytest.raises(PositionError, match=r"raises ValueError on 'text': HunYuanVL.*check=False"):
        attach(broken)


def test_invariant_ids_are_those_of_the_family() -> None:
    """What the model gets is what position_ids_from_tokens says."""
    owner = tiny_models.owner("qwen3_vl", tiny_models.config("qwen3_vl"))
    types = torch.tensor([[0, 2, 2, 2, 2, 2, 2, 0, 0, 2, 2, 2, 2, 2, 2, 0]])
    grids = torch.tensor([[2, 4, 6]])
    with attach(owner):
        ids, _ = owner.get_rope_index(types, types, None, grids)
    assert torch.equal(
        ids, family("qwen3_vl").position_ids_from_tokens(types, types, None, grids).ids
    )
