"""Ramps: strengths set step by step, in a plain loop, by Hugging Face's Trainer or by Lightning.

Neither trainer is imported: both call their callbacks by the names of methods. A step is an optimizer step taken, so a
resumed run, an evaluation between steps and a checkpoint all have the strength of their own step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_kind
from visionpos.retrofit.attach import CONTAINER
from visionpos.retrofit.attachment import Attachment
from visionpos.retrofit.kinds import check_kinds, check_model
from visionpos.retrofit.schedule import Schedule, whole

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Ramp:
    """Schedules for the attachments of a model, by name.

    Args:
        schedules: name of an attachment -> its Schedule. Attachments without one are left alone.

    Example:
        >>> import timm, visionpos as vp
        >>> from visionpos import retrofit
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> att = retrofit.attach(model, vp.AxialRopeSpec(), name="rope")
        >>> ramp = Ramp({"rope": retrofit.Schedule(steps=100)})
        >>> ramp.set(25, model), att.strength
        ({'rope': 0.25}, 0.25)

    Raises:
        PositionError: if schedules is no dict from names to Schedules.
    """

    schedules: Mapping[str, Schedule]

    def __post_init__(self) -> None:
        if not isinstance(self.schedules, Mapping):
            raise PositionError(
                f"schedules is {self.schedules!r:.60}; a dict from names of attachments to Schedules is required. "
                "Write {'rope': Schedule(steps=1000)}, for one."
            )
        for name, schedule in self.schedules.items():
            check_kinds("name of an attachment", name, str)
            check_kind(f"schedules[{name!r}]", schedule, Schedule)

    def at(self, step: int) -> dict[str, float]:
        """Return name -> strength after `step` optimizer steps."""
        return {name: schedule.at(step) for name, schedule in self.schedules.items()}

    def set(self, step: int, *models: nn.Module) -> dict[str, float]:
        """Set the strengths of models to those after `step` optimizer steps, and return them.

        Strengths that are plain numbers are in no state dict: an EMA copy of the model is given them here too.

        Args:
            step: optimizer steps taken so far; in a loop, the number of the step that comes.
            models: what holds the attachments, wrapped, compiled or inside another module as it may be.

        Raises:
            PositionError: if a model has no attachment of a name, or its strength is being learned.
        """
        strengths = self.at(step)
        found = [_named(model) for model in models]
        for parts in found:
            for name in strengths:
                _check(name, parts)
        for parts in found:
            for name, value in strengths.items():
                for part in parts[name]:
                    part.set_strength(value)
        return strengths


class TrainerRamp:
    """A callback for transformers.Trainer that keeps a ramp: `Trainer(callbacks=[TrainerRamp(ramp)])`.

    Strengths follow `state.global_step`, also after `resume_from_checkpoint`; with `load_best_model_at_end` they end at
    those of the best step.

    Args:
        ramp: what to set.
        models: others to set beside the trainer's: an EMA copy.

    Reference:
        huggingface/transformers trainer_callback.py, CallbackHandler.call_event: every event is called as
        `getattr(callback, event)(args, state, control, model=..., **kwargs)`.
    """

    def __init__(self, ramp: Ramp, *models: nn.Module) -> None:
        check_kind("ramp", ramp, Ramp)
        for model in models:
            check_model(model)
        self.ramp, self.models = ramp, models

    def on_step_begin(
        self,
        args: Any,  # noqa: ARG002 (the trainer's signature)
        state: Any,
        control: Any,  # noqa: ARG002
        *,
        model: nn.Module,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Set the strengths of the steps taken so far."""
        self.ramp.set(state.global_step, model, *self.models)

    on_train_begin = on_step_begin
    on_step_end = on_step_begin  # what is evaluated or saved now belongs to the step just taken

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002 (the trainer's signature)
        *,
        model: nn.Module,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Set the strengths that the weights now in the model were trained with."""
        best = getattr(state, "best_global_step", None) if args.load_best_model_at_end else None
        self.ramp.set(state.global_step if best is None else best, model, *self.models)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _other_event(self, name)


class LightningRamp:
    """A callback for a Lightning Trainer that keeps a ramp: `Trainer(callbacks=[LightningRamp(ramp)])`.

    Strengths follow `trainer.global_step`, the optimizer steps taken (of all optimizers together). The last step goes
    into Lightning's checkpoints, so that `validate`, `test` and `predict` from one have its strengths.

    Args:
        ramp: what to set.
        models: others to set beside the LightningModule: an EMA copy that it does not hold.

    Reference:
        Lightning-AI/pytorch-lightning trainer/call.py: hooks are called as `getattr(callback, hook)(trainer, pl_module,
        *args)`, `on_train_batch_start(trainer, pl_module, batch, batch_idx)` among them; `state_key`, `state_dict` and
        `load_state_dict` carry a callback's state.
    """

    state_key = _legacy_state_key = "visionpos.retrofit.LightningRamp"

    def __init__(self, ramp: Ramp, *models: nn.Module) -> None:
        check_kind("ramp", ramp, Ramp)
        for model in models:
            check_model(model)
        self.ramp, self.models = ramp, models
        self.step: int | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module, *batch: Any) -> None:  # noqa: ARG002 (its signature)
        """Set the strengths of the steps taken so far."""
        self.step = int(trainer.global_step)
        self.ramp.set(self.step, pl_module, *self.models)

    on_train_batch_start = on_train_batch_end = on_train_start

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002 (its signature)
        """Set the strengths of the last step taken, or of the one in the checkpoint; without either, leave them."""
        if self.step is not None:
            self.ramp.set(self.step, pl_module, *self.models)

    on_test_start = on_predict_start = on_validation_start

    def state_dict(self) -> dict[str, int]:
        """Return the last step, for a checkpoint."""
        return {} if self.step is None else {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        """Take the step of a checkpoint; one that was written before training has none.

        Raises:
            PositionError: if there is no whole number under "step".
        """
        if not isinstance(state, Mapping) or (state and whole(state.get("step")) < 0):
            raise PositionError(
                f"state is {state!r:.60}; a dict with the step of a LightningRamp is required. Pass what state_dict() "
                "gave."
            )
        self.step = whole(state["step"]) if state else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do nothing; Lightning calls it before a stage."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do nothing; Lightning calls it after a stage."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _other_event(self, name)


def _named(model: nn.Module) -> dict[str, list[Attachment]]:
    """Return name -> attachments of that name anywhere in a model."""
    check_model(model)
    found: dict[str, list[Attachment]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(module, Attachment) and CONTAINER in parts:
            found.setdefault(parts[parts.index(CONTAINER) + 1], []).append(module)
    return found


def _check(name: str, parts: dict[str, list[Attachment]]) -> None:
    """Refuse a schedule without an attachment, or against an optimizer."""
    if name not in parts:
        raise PositionError(
            f"schedules names {name!r}, which is not attached; attached are {', '.join(parts) or 'none'}. Attach it "
            "before training, under this name."
        )
    for part in parts[name]:
        if part.learned_strength is not None and part.learned_strength.requires_grad:
            raise PositionError(
                f"strength of {name!r} is learned; a schedule would undo what the optimizer does. Attach with "
                "learn_strength=False, or set learned_strength.requires_grad = False."
            )


def _other_event(callback: object, name: str) -> Callable[..., None]:
    """Return what answers the events that a ramp does not need; each version of a trainer has others."""
    if not name.startswith("on_"):
        raise AttributeError(f"{type(callback).__name__} has no attribute {name!r}")
    return _ignore


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Leave everything as it is."""
