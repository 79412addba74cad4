"""Ramps in a plain loop, in the real transformers Trainer, and under Lightning's calling protocol."""

import copy
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import visionpos as vp
from tests.retrofit.zoo import image, vit
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit import LightningRamp, Ramp, Schedule, TrainerRamp

SIZE = (64, 96)
SCHEDULE = Schedule(steps=4, begin=1, shape="cosine")
RAMP = Ramp({"mine": SCHEDULE})


def attached(**options: Any) -> Any:
    torch.manual_seed(7)
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(), name="mine", **options)
    return model


def strength(model: Any) -> float:
    return float(retrofit.attachments(model)["mine"].strength)


class Loss(nn.Module):
    """A backbone that knows its loss, and remembers the strength at which it was computed."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.seen: list[float] = []

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append(strength(self.backbone))
        out = self.backbone(pixel_values)
        return {"loss": (out[:, 0] - labels).square().mean(), "logits": out}


def test_ramp_sets_every_model_by_step() -> None:
    """Also a copy, a wrapper, and a compiled one; one spec serves all, in any order of steps."""
    model = attached()
    average, wrapped = copy.deepcopy(model), nn.ModuleDict({"student": copy.deepcopy(model)})
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    for step in (3, 0, 5, 2):
        assert RAMP.set(step, model, average, wrapped, compiled) == {"mine": SCHEDULE.at(step)}
        for one in (model, average, wrapped["student"], compiled):
            assert strength(one) == SCHEDULE.at(step)


def test_ramp_leaves_others_alone() -> None:
    model = attached()
    other = retrofit.attach(model, vp.SinCosSpec(), name="other", strength=0.3)
    RAMP.set(9, model)
    assert (strength(model), other.strength) == (1.0, 0.3)


def test_ramp_error_of_a_name_changes_nothing() -> None:
    model = attached(strength=0.25)
    with pytest.raises(
        PositionError, match="names 'yours', which is not attached; attached are mine"
    ):
        Ramp({"mine": SCHEDULE, "yours": SCHEDULE}).set(9, model)
    with pytest.raises(PositionError, match="attached are none"):
        RAMP.set(9, model, vit())
    assert strength(model) == 0.25


def test_ramp_error_of_a_learned_strength() -> None:
    model = attached(learn_strength=True)
    with pytest.raises(PositionError, match="strength of 'mine' is learned"):
        RAMP.set(2, model)
    retrofit.attachments(model)["mine"].learned_strength.requires_grad_(False)
    RAMP.set(3, model)
    assert strength(model) == pytest.approx(SCHEDULE.at(3))


@pytest.mark.parametrize("region", [pytest.param("model", marks=pytest.mark.slow), "blocks"])
def test_ramp_reaches_a_compiled_model_in_few_graphs(region: str) -> None:
    """A number is guarded: 0, 1 and what lies between have a graph each, whatever the number of steps."""
    model, x = attached(), image(SIZE)
    eager, counter = copy.deepcopy(model), CompileCounter()
    if region == "model":
        model.compile(backend=counter, fullgraph=True)
    else:
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
    ramp, outputs = Ramp({"mine": Schedule(steps=12)}), []
    with torch.no_grad():
        for step in range(14):
            ramp.set(step, model, eager)
            outputs.append(model(x))
            assert torch.equal(outputs[-1], eager(x)), step
    distinct = {float(out.double().sum()) for out in outputs}
    assert len(distinct) == 13  # every step differs, until the end is reached
    assert counter.frame_count <= 4 * (1 if region == "model" else len(model.blocks))


def loop(model: Loss, first: int, last: int, average: Any = None) -> list[float]:
    """Train by SGD, which has no state of its own, from a step to another; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(first, last):
        RAMP.set(step, model, *([] if average is None else [average]))
        loss = model(image(SIZE, seed=step), torch.ones(2))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_plain_loop_resumes_from_the_step(tmp_path: Path) -> None:
    whole = Loss(attached())
    expected = loop(whole, 0, 6)
    assert whole.seen == [SCHEDULE.at(step) for step in range(6)]
    first = Loss(attached())
    losses = loop(first, 0, 3)
    retrofit.save(first.backbone, tmp_path / "half.safetensors")
    second = Loss(attached())
    retrofit.load(second.backbone, tmp_path / "half.safetensors")
    assert strength(second.backbone) == SCHEDULE.at(2)  # of the last step, until the next is set
    assert losses + loop(second, 3, 6) == expected
    for name, weight in whole.backbone.named_parameters():
        assert torch.equal(weight, second.backbone.get_parameter(name)), name


def trainer(folder: Path, steps: int, **options: Any) -> Any:
    """Return transformers' own Trainer over ten fixed images, two a step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = Loss(attached())
    data = [
        {"pixel_values": image(SIZE, 1, seed=i)[0], "labels": torch.tensor(float(i % 2))}
        for i in range(20)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "steps", "save_steps": 3, **options},
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=[TrainerRamp(RAMP)],
    )


pytest_trainer = pytest.mark.filterwarnings("ignore")  # the Trainer's own remarks are not ours


@pytest_trainer
def test_trainer_follows_the_schedule_and_resumes(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 6)
    whole.train()
    assert whole.model.seen == [SCHEDULE.at(step) for step in range(6)]
    assert strength(whole.model.backbone) == SCHEDULE.at(6) == 1.0
    resumed = trainer(tmp_path / "whole", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.model.seen == [SCHEDULE.at(step) for step in (3, 4, 5)]
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, resumed.model.get_parameter(name)), name


@pytest_trainer
def test_trainer_counts_optimizer_steps_and_evaluates_at_them(tmp_path: Path) -> None:
    """Accumulated batches share a strength; an evaluation after a step has that step's."""
    run = trainer(tmp_path, 3, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1)
    run.train()
    at = [SCHEDULE.at(step) for step in range(4)]
    expected = [at[0], at[0], at[1], at[1], at[1], at[2], at[2], at[2], at[3]]
    assert run.model.seen == expected


@pytest_trainer
def test_trainer_ends_at_the_strength_of_the_best_model(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        4,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    metrics = iter([3.0, 1.0, 2.0, 2.5])
    evaluate = run.evaluate

    def scripted(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**evaluate(*args, **kwargs), "eval_loss": next(metrics)}

    run.evaluate = scripted
    run.train()
    assert run.state.best_global_step == 2
    assert strength(run.model.backbone) == SCHEDULE.at(2)


class FakeLightning:
    """Calls callbacks as Lightning 2.6 does (pytorch-lightning trainer/call.py, callbacks/callback.py).

    `_call_callback_hooks` runs `getattr(callback, hook)(trainer, pl_module, *args)` for every hook there is and reads
    `state_key` for the profiler; checkpoints hold `state_dict()` under it, `load_state_dict` gets it back before
    training. Signatures: `setup(trainer, pl_module, stage)`, `on_train_batch_start(trainer, pl_module, batch,
    batch_idx)`, `on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)`, `on_save_checkpoint(trainer,
    pl_module, checkpoint)`.
    """

    def __init__(self, callback: Any, accumulate: int = 1) -> None:
        self.callback, self.accumulate, self.global_step = callback, accumulate, 0

    def call(self, hook: str, module: nn.Module, *args: Any) -> None:
        function = getattr(self.callback, hook)
        if callable(function):
            assert isinstance(self.callback.state_key, str)
            assert function(self, module, *args) is None

    def fit(self, module: Loss, batches: int, checkpoint: Any = None) -> dict[str, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        self.call("setup", module, "fit")
        if checkpoint is not None:
            module.load_state_dict(checkpoint["state_dict"])
            self.call("on_load_checkpoint", module, checkpoint)
            states, key = checkpoint["callbacks"], self.callback.state_key
            self.callback.load_state_dict(
                states.get(key, states.get(self.callback._legacy_state_key))
            )
        for hook in ("on_fit_start", "on_sanity_check_start", "on_validation_start"):
            self.call(hook, module)
        self.global_step = 0 if checkpoint is None else checkpoint["global_step"]
        self.call("on_train_start", module)
        self.call("on_train_epoch_start", module)
        for index in range(self.global_step * self.accumulate, batches):
            batch = image(SIZE, seed=index)
            self.call("on_train_batch_start", module, batch, index)
            loss = module(batch, torch.ones(2))["loss"]
            self.call("on_before_backward", module, loss)
            loss.backward()
            if (index + 1) % self.accumulate == 0:
                self.call("on_before_optimizer_step", module, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                self.global_step += 1
            self.call("on_train_batch_end", module, {"loss": loss}, batch, index)
        self.call("on_train_end", module)
        state = {"global_step": self.global_step, "state_dict": copy.deepcopy(module.state_dict())}
        state["callbacks"] = {self.callback.state_key: self.callback.state_dict()}
        self.call("on_save_checkpoint", module, state)
        self.call("teardown", module, "fit")
        return state


def test_lightning_follows_the_schedule_and_resumes() -> None:
    whole = Loss(attached())
    FakeLightning(LightningRamp(RAMP)).fit(whole, 6)
    assert whole.seen == [SCHEDULE.at(step) for step in range(6)]
    assert strength(whole.backbone) == 1.0
    state = FakeLightning(LightningRamp(RAMP)).fit(Loss(attached()), 3)
    state = pickle.loads(pickle.dumps(state))
    resumed = Loss(attached())
    FakeLightning(LightningRamp(RAMP)).fit(resumed, 6, state)
    assert resumed.seen == whole.seen[3:]
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_lightning_counts_optimizer_steps() -> None:
    module = Loss(attached())
    FakeLightning(LightningRamp(RAMP), accumulate=2).fit(module, 6)
    assert module.seen == [SCHEDULE.at(batch // 2) for batch in range(6)]


def test_lightning_tests_a_checkpoint_at_its_strength() -> None:
    """Without training: `trainer.test(ckpt_path=...)` gives the callback its state, and no global_step."""
    state = FakeLightning(LightningRamp(RAMP)).fit(Loss(attached()), 3)
    callback, module = LightningRamp(RAMP), Loss(attached())
    callback.on_test_start(SimpleNamespace(), module)
    assert strength(module.backbone) == 0.0
    callback.load_state_dict(state["callbacks"][callback.state_key])
    callback.on_test_start(SimpleNamespace(), module)
    assert strength(module.backbone) == SCHEDULE.at(3)


@pytest.mark.parametrize("kind", [TrainerRamp, LightningRamp])
def test_callbacks_copy_pickle_and_know_no_other_names(kind: Any) -> None:
    callback = kind(RAMP)
    assert copy.deepcopy(callback).ramp == pickle.loads(pickle.dumps(callback)).ramp == RAMP
    assert callback.on_some_event_of_the_future(1, two=2) is None
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = callback.anything


def test_callbacks_set_further_models() -> None:
    module = Loss(attached())
    average = copy.deepcopy(module)
    FakeLightning(LightningRamp(RAMP, average)).fit(module, 2)
    assert strength(average.backbone) == strength(module.backbone) == SCHEDULE.at(2) > 0
