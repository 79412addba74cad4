"""Batches for trainers: padding, packing, labels, pixels; the Trainer of transformers; examples as TRL has them."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.vlm import tiny_models
from tests.vlm.tiny_prompts import PATCH_CHANNELS, batched, prompt
from visionpos.errors import PositionError
from visionpos.vlm import family
from visionpos.vlm.hf import Collator, family_of

QWEN = family("qwen2_vl")


def example(words: int, *images: tuple[int, int], seed: int = 0) -> dict[str, Any]:
    return prompt([words, *(("image", (1, *hw)) for hw in images)], seed)


def test_golden_padded_batch() -> None:
    """G11 of facts/mrope.md: t2 and an image of 2x2 between its markers and t2, next to three words, right padded."""
    one, two = prompt([2, ("image", (1, 4, 4)), 2]), prompt([3])
    batch = Collator(family=family("qwen2_vl", dialect="transformers"), pad_token_id=9)([one, two])
    assert batch["position_ids"].shape == (3, 2, 10)
    assert batch["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 7], [0, 1, 2, 3, 3, 4, 4, 5, 6, 7], [0, 1, 2, 3, 4, 3, 4, 5, 6, 7],
    ]  # fmt: skip
    assert batch["position_ids"][:, 1].tolist() == [[0, 1, 2] + [0] * 7] * 3
    assert batch["attention_mask"].tolist() == [[1] * 10, [1] * 3 + [0] * 7]
    assert batch["input_ids"][1, 3:].tolist() == [9] * 7
    assert batch["labels"][1].tolist() == [*two["input_ids"].tolist(), *[-100] * 7]
    media = one["mm_token_type_ids"] > 0
    assert batch["labels"][0, media].tolist() == [-100] * 4
    assert torch.equal(batch["labels"][0, ~media], one["input_ids"][~media])


def test_golden_packed_batch() -> None:
    """G2 and three words end to end: four rows, each restarting; the first token of a prompt is asked of nobody."""
    one, two = prompt([2, ("image", (1, 4, 4)), 2]), prompt([3])
    batch = Collator(family=QWEN, packing=True, pad_to_multiple_of=8, varlen=True)([one, two])
    text, time = batch["position_ids"][0, 0].tolist(), batch["position_ids"][1, 0].tolist()
    assert text[:13] == [*range(10), 0, 1, 2]
    assert time[:13] == [0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 0, 1, 2]
    assert batch["labels"].shape == (1, 16)
    assert batch["labels"][0, [0, 10, 13, 14, 15]].tolist() == [-100] * 5
    assert batch["labels"][0, 11:13].tolist() == two["input_ids"][1:].tolist()
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert batch["cu_seq_lens_q"].tolist() == [0, 10, 13, 16]
    assert (batch["max_length_q"], batch["cu_seq_lens_k"].dtype) == (10, torch.int32)


@pytest.mark.parametrize("packing", [False, True])
def test_shape_pixels_of_all_examples_in_order(packing: bool) -> None:
    """E07 of facts/users.md: uneven numbers of images; rows of pixels follow the grids, whatever the example."""
    examples = [example(2, (2, 6), (4, 2), seed=1), example(5), example(1, (8, 2), seed=2)]
    batch = Collator(family=QWEN, packing=packing)(examples)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 6], [1, 4, 2], [1, 8, 2]]
    expected = torch.cat([examples[0]["pixel_values"], examples[2]["pixel_values"]])
    assert torch.equal(batch["pixel_values"], expected)
    assert int(batch["image_grid_thw"].prod(1).sum()) == len(expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_rows_do_not_see_each_other(side: Any) -> None:
    """A row has the ids it has alone."""
    examples = [example(2, (2, 6)), example(7), example(1, (4, 6), (2, 2))]
    batch = Collator(family=QWEN, side=side)(examples)
    for number, one in enumerate(examples):
        alone = Collator(family=QWEN)([one])
        real = batch["attention_mask"][number].bool()
        assert torch.equal(batch["position_ids"][:, number, real], alone["position_ids"][:, 0])
        assert torch.equal(batch["input_ids"][number, real], one["input_ids"])


def test_examples_as_datasets_and_processors_hand_them_over() -> None:
    """Lists of numbers (datasets), a leading batch axis in a UserDict (BatchFeature), padding, columns of None."""
    plain = example(3, (2, 6))
    expected = Collator(family=QWEN)([plain])
    lists = {key: value.tolist() for key, value in plain.items()}
    wrapped = UserDict(
        {**batched(plain), "attention_mask": torch.ones(1, len(plain["input_ids"])), "labels": None}
    )
    pad = torch.zeros(4, dtype=torch.long)
    padded = {
        **plain,
        "input_ids": torch.cat([pad, plain["input_ids"]]),
        "mm_token_type_ids": torch.cat([pad, plain["mm_token_type_ids"]]),
        "attention_mask": torch.cat([pad, torch.ones_like(plain["input_ids"])]),
        "position_ids": torch.zeros(1),
    }
    for form in (lists, wrapped, padded):
        batch = Collator(family=QWEN)([form])
        assert set(batch) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(batch[key], value, msg=key)


def test_an_empty_column_is_no_column() -> None:
    """Tables hand a prompt without images an empty list of grids, pixels and seconds."""
    words = {"input_ids": [5, 6, 7]}
    empty = {**words, "image_grid_thw": [], "pixel_values": [], "second_per_grid_ts": []}
    empty["mm_token_type_ids"] = [0, 0, 0]
    for packing in (False, True):
        collate = Collator(family=QWEN, packing=packing)
        got, expected = (collate([one, example(2, (2, 6))]) for one in (empty, words))
        assert set(got) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, msg=key)


def test_seconds_are_read_under_every_name() -> None:
    """facts/mrope.md 13.37: 0.75 s a grid step are not 1.0 because a key is called otherwise."""
    one = prompt([1, ("video", (4, 2, 2)), 2])
    for key in ("second_per_grid_ts", "second_per_grids", "video_second_per_grid"):
        batch = Collator(family=family("qwen2_5_vl"))([{**one, key: [0.75]}])
        assert batch["position_ids"][0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]  # G5
    with pytest.raises(PositionError, match=r"example 0: seconds_per_grid is None for 1 videos"):
        Collator(family=family("qwen2_5_vl"))([one])


@pytest.mark.parametrize(("change", "message"), [
    ({"input_ids": None}, r"example 1 is a dict without input_ids.*remove_unused_columns"),
    ({"mm_token_type_ids": None}, r"example 1 has grids and no mm_token_type_ids"),
    ({"labels": torch.zeros(3)}, r"example 1: labels has shape \(3,\) and input_ids \(8,\)"),
    ({"input_ids": torch.zeros(2, 8)}, r"example 1: input_ids have shape \(2, 8\); one prompt"),
    ({"image_grid_thw": torch.tensor([[1, 2, 8]])}, r"example 1: row 0: image 0 has 3 tokens.*4 cells"),
    ({"text": "a cat"}, r"example 1: text is a str.*Drop columns"),
    ({"input_ids": torch.full((8,), 0.5)}, r"example 1: input_ids holds fractions"),
    ({"pixel_values": torch.zeros(12, 3)}, r"pixel_values has shapes .*one processor"),
    ({"attention_mask": torch.tensor([1, 1, 2, 2] + [3] * (len(example(3, (2, 6))["input_ids"]) - 4))},
     r"example 1: attention_mask holds \[1, 2, 3\]; 0 or 1"),
    ({"input_ids": example(3, (2, 6))["input_ids"] * 1j}, r"example 1: input_ids is a Tensor; a tensor of real"),
    ({"pixel_values": torch.zeros(2, device="meta")}, r"example 1: pixel_values is a Tensor; a tensor of real"),
])  # fmt: skip
def test_error_names_the_example(change: dict[str, Any], message: str) -> None:
    examples = [example(2, (2, 2)), {**example(3, (2, 6)), **change}]
    with pytest.raises(PositionError, match=message):
        Collator(family=QWEN)(examples)


@pytest.mark.parametrize(("options", "message"), [
    ({"family": "qwen2_vl"}, r"family is 'qwen2_vl'.*family_of"),
    ({"side": "top"}, r"side is 'top'"),
    ({"pad_to_multiple_of": 0}, r"pad_to_multiple_of 0"),
    ({"varlen": True}, r"varlen is True without packing"),
    ({"pad_token_id": None}, r"pad_token_id is None.*eos_token_id"),
    ({"pad_token_id": "0"}, r"pad_token_id is '0'"),
    ({"pad_token_id": -1}, r"pad_token_id is -1"),
    ({"packing": "no"}, r"packing is 'no'"),
])  # fmt: skip
def test_error_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PositionError, match=message):
        Collator(**{"family": QWEN, **options})
    with pytest.raises(PositionError, match=r"features is \[\]"):
        Collator(family=QWEN)([])
    for features in (3, None, (one for one in ())):
        with pytest.raises(PositionError, match=r"features is .*a list of at least one example"):
            Collator(family=QWEN)(features)  # type: ignore[arg-type]


class Prompts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Six prompts with and without images and clips."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number % 3 == 2:
            return prompt([2, ("video", (3, 4, 2)), 3], number)
        return example(3 + number, *[(2, 6)] * (number % 2 + 1), seed=number)


@pytest.mark.parametrize("packing", [False, True], ids=["padding", "packing"])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_real_trainer(packing: bool, tmp_path: Path) -> None:
    """Two steps of the Trainer of transformers: the loss is that of the same batch by hand, and weights move."""
    from transformers import Trainer, TrainingArguments

    model = tiny_models.model("qwen2_vl")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    collate = Collator(family=family_of(model.config), packing=packing)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3, logging_steps=1,
        report_to=[], save_strategy="no", remove_unused_columns=False, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Prompts(), data_collator=collate)
    with torch.no_grad():
        first = float(model.train()(**collate([Prompts()[number] for number in range(3)])).loss)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(first, abs=2e-4)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_loss_of_a_packed_row_is_that_of_its_prompts() -> None:
    """Summed over the targets, one row costs what its prompts cost alone: nothing is asked across a boundary."""
    model = tiny_models.model("qwen2_vl")
    examples = [Prompts()[number] for number in range(4)]

    def cost(batch: dict[str, Any]) -> float:
        targets = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            return float(model(**batch).loss) * targets

    whole = cost(Collator(family=QWEN, packing=True)(examples))
    apart = sum(cost(Collator(family=QWEN)([one])) for one in examples)
    assert whole == pytest.approx(apart, rel=1e-5)
    assert cost(Collator(family=QWEN)(examples)) == pytest.approx(apart, rel=1e-5)


def test_model_takes_every_key() -> None:
    """A batch goes into forward as it is, with boundaries for FlashAttention too."""
    model = tiny_models.model("qwen2_vl")
    assert model.config.vision_config.in_channels * 2 * 4 * 4 == PATCH_CHANNELS
    batch = Collator(family=QWEN, packing=True, varlen=True)([Prompts()[0], Prompts()[2]])
    assert torch.isfinite(model(**batch).loss)
