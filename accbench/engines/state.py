"""What training changes: how an engine reads, loads and shares it."""

import abc
from collections.abc import Callable

import torch
from torch import nn

from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology, broadcast_tensor
from accbench.distributed.whole_tensors import own_shard
from accbench.engines.common import model_state, optimizer_state, training_state
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.precision import Precision


class StatefulEngine(abc.ABC):
    """The state of a training: weights, buffers, the optimizer's state, random numbers.

    Written for an engine whose ranks have it whole, in torch's own tensors.
    """

    topology: Topology
    """The ranks."""
    mesh: MeshShape
    """How they are laid out."""
    precision: Precision
    """The types of a step, and its loss scale."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """Hand what was computed to the device; never waits."""

    def seed(self, seed: int) -> None:
        """Seed the model's own random numbers, such as dropout's; each rank has another seed."""
        torch.manual_seed(seed)

    def rng_state(self) -> Tensors:
        """Return the state of the model's own random numbers: name -> (n,) uint8 on the host."""
        return {"torch": torch.get_rng_state()}

    def load_rng_state(self, states: Tensors) -> None:
        """Load what `rng_state` returned; a generator without a state in it stays as it is."""
        if "torch" in states:
            torch.set_rng_state(states["torch"])

    @property
    def evaluates_together(self) -> bool:
        """Whether a forward pass waits for the other ranks, so that all evaluate equally often."""
        return self.mesh.cp > 1

    def averaged_model(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return a model that evaluates with `--ema_decay`'s averages in place of parameters."""
        return optimizer_state.AveragedModel(net, optimizer)

    @property
    def reads_together(self) -> bool:
        """Whether all ranks call `training_state` together, as each has a part of the state."""
        return False

    def gather_state(self) -> None:  # noqa: B027
        """Prepare all ranks for one of them to read the training state; every rank calls it."""

    def training_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return all that training changes, on the host; `net` is what `prepare` was given."""
        return training_state.read(net, optimizer, self.precision.scaler)

    def saved_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Return the state for a checkpoint; of sharded tensors each rank has its rows.

        Where `reads_together`, all ranks call it, and these are `ShardedTensor`s, which all ranks
        gather one after the other, before the next step.
        """
        return self.training_state(net, optimizer)

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        """Load a state that this or another engine has read.

        Raises:
            NotLoadableError: it does not fit.
        """
        training_state.load(net, optimizer, self.precision.scaler, saved)
        self.end_step()  # or the next step would have the copies in it

    def deferred_build(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Return the model without its weights, which `prepare` then draws shard by shard.

        None: this engine, or this model, needs it built at once. All ranks call this.

        Args:
            build: builds the model, by torch's global generator as it is now.
        """
        return None

    def share_buffers(self, net: nn.Module) -> None:
        """Give all ranks rank 0's buffers and extra state.

        All then evaluate one model, the one that is saved. While training, BatchNorm's statistics
        are those of each rank's shard.
        """
        if self.topology.world_size == 1:
            return
        with torch.no_grad():
            for buffer in model_state.saved_buffers(net):
                buffer.copy_(broadcast_tensor(buffer.cpu()))
        model_state.broadcast_extra(net)
        self.end_step()

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the bytes of parameters and optimizer state that this rank keeps between steps.

        None: the engine does not tell.
        """
        kept = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for state in optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in map(own_shard, kept))

    def offloaded_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Return those of `state_bytes` that `--offload` keeps in host memory."""
        return 0

    @staticmethod
    def applied_steps(optimizer: torch.optim.Optimizer) -> int:
        """Steps that changed the parameters, by the optimizer's own count; waits for it."""
        # Of a parameter that never had a gradient it stays 0.
        steps = [s["step"] for p, s in optimizer.state.items() if p.requires_grad and "step" in s]
        return max((int(torch.as_tensor(step).cpu().item()) for step in steps), default=0)
