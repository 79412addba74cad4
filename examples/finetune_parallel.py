"""One process, DDP or FSDP2 behind the same five calls; `torchrun` sets the environment that they read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from visionpos import retrofit
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("none", "ddp", "fsdp2")


@dataclass(frozen=True)
class Team:
    """The processes of a run.

    Args:
        mode: "none", "ddp" or "fsdp2".
        rank: of this process.
        world: number of processes.
        device: of this process.
    """

    mode: str
    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, mode: str, device: str = "auto") -> Team:
        """Return this process's place in the team, after all have come together.

        Raises:
            PositionError: if the mode is unknown, or does not go with how the script was started.
        """
        if mode not in MODES:
            raise PositionError(f"parallel is {mode!r}; it must be one of {', '.join(MODES)}.")
        world, local = (
            int(os.environ.get("WORLD_SIZE", "1")),
            int(os.environ.get("LOCAL_RANK", "0")),
        )
        if (mode == "none" and world > 1) or (mode != "none" and "LOCAL_RANK" not in os.environ):
            raise PositionError(
                f"parallel is {mode!r} in {world} process(es); ddp and fsdp2 run under torchrun, none without it. "
                "Start with torchrun --nproc-per-node N examples/finetune.py --parallel ddp."
            )
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        place = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(place)
        if mode == "none":
            return cls(mode, 0, 1, place)
        dist.init_process_group("nccl" if cuda else "gloo")
        return cls(mode, dist.get_rank(), dist.get_world_size(), place)

    def leave(self) -> None:
        """Part from the others."""
        if self.mode != "none":
            dist.destroy_process_group()

    def shard(self, model: nn.Module) -> None:
        """Divide a model's parameters among the processes, block by block; FSDP2 alone does."""
        if self.mode != "fsdp2":
            return
        whole: Any = model
        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in whole.blocks:
            fully_shard(block, mesh=mesh)
        # The root too gives its parameters back after a forward pass: the average never runs backward.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def runner(self, model: nn.Module) -> nn.Module:
        """Return what runs forward in training."""
        return nn.parallel.DistributedDataParallel(model) if self.mode == "ddp" else model

    def gathered(self, model: nn.Module, shell: nn.Module) -> nn.Module:
        """Return the model with whole weights: itself, or under FSDP2 the shell, filled. All processes must call it."""
        if self.mode != "fsdp2":
            return model
        shell.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        for name, part in retrofit.attachments(model).items():
            if part.learned_strength is None:
                retrofit.attachments(shell)[name].set_strength(part.constant)
        return shell

    @torch.no_grad()
    def fill(self, model: nn.Module, shell: nn.Module) -> None:
        """Give a sharded model the weights of the shell."""
        if model is not shell:
            weights = shell.state_dict()
            for name, value in model.state_dict().items():
                local(value).copy_(local(placed(weights[name], value)))

    def mean(self, value: Tensor) -> float:
        """Return the mean over processes."""
        value = value.detach().double().clone()
        if self.mode != "none":
            dist.all_reduce(value)
        return value.item() / self.world

    def least(self, number: int) -> int:
        """Return the smallest of all processes' numbers, once all have come here."""
        value = torch.tensor(number, device=self.device)
        if self.mode != "none":
            dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)


def whole(value: Tensor) -> Tensor:
    """Return a tensor that is divided among processes in one piece; all processes must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """Return this process's piece of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor where and as `like` lies."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
