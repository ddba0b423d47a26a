"""The engine contract: what differs between training plainly and through a compiler.

`accbench/engines/<name>.py` defines `class Engine(engines.Engine)`. The training
loop knows this contract and nothing below it.
"""

import abc
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from accbench.config import TaskConfig, amp_level
from accbench.distributed.process_group import Topology, all_gather_values, broadcast_tensor
from accbench.engines.common import (
    activation_checkpointing,
    complex_parameters,
    model_state,
    tied_parameters,
)
from accbench.engines.common import (
    training_state as state,
)
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.errors import ReductionError
from accbench.models.tasks import trainable

Batch = Any
"""Tensors in nests of any kind; see `accbench.data.nest_kinds`."""


@dataclasses.dataclass(frozen=True)
class CompileStats:
    """Counts since the process started."""

    num_compiles: int = 0
    compile_s: float = 0.0
    num_executions: int = 0
    """Compiled graphs run."""
    num_fallbacks: int = 0
    """Operations that left the compiler."""

    def __sub__(self, other: "CompileStats") -> "CompileStats":
        return CompileStats(*(a - b for a, b in self._pairs(other)))

    def __add__(self, other: "CompileStats") -> "CompileStats":
        return CompileStats(*(a + b for a, b in self._pairs(other)))

    def _pairs(self, other: "CompileStats") -> Iterator[tuple[Any, Any]]:
        return zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)


class Engine(abc.ABC):
    """One worker's way to train. Made in the worker, after the process group."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Knobs of this engine alone; each becomes the flag `--<engine>.<knob>`.

        Class variables `minimum` and `maximum`, knob -> value, say what is refused.
        """

    collectives: str
    """Where gradients are reduced: in_graph, process_group or host."""
    compiler: str | None = None
    """Which compiler this engine is meant to train through; None if it is eager."""
    step_tracer: str | None = None
    """A module that traces a step without running it, for `accbench preflight`."""
    scaler: Any = None
    """The GradScaler, where there is one."""
    computed_again: activation_checkpointing.Again | None = None
    """For `--checkpoint_modules`, see there."""
    found_inf: torch.Tensor
    """1 after a step with a gradient that is not finite, else 0; only with `--on_nan skip`."""

    def __init__(self, task: TaskConfig, options: Any, topology: Topology) -> None:
        self.task = task
        self.options = options
        self.topology = topology
        self.autocast_dtype = (
            getattr(torch, task.amp_dtype) if amp_level(task) == "O1" and task.amp_dtype else None
        )
        self._resident: list[Batch] = []

    # Asked by the launcher, before any backend is imported.

    @classmethod
    @abc.abstractmethod
    def find_device(cls, requested: str) -> str:
        """`--device` as cpu, cuda or tpu; auto is the accelerator that is there."""

    @classmethod
    @abc.abstractmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        """Why this task cannot run here, and what to do; None if it can."""

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        """Environment that a worker's process starts with."""
        return {}

    # In the worker.

    @classmethod
    def for_loops(cls) -> type["Engine"]:
        """What runs loops of a user's own; it is made with this engine's options."""
        return cls

    @property
    @abc.abstractmethod
    def device_name(self) -> str:
        """The device as its maker names it."""

    @property
    def compile_cache(self) -> str:
        """The persistent compile cache's folder, or `off: ` and the reason."""
        return "off: this engine compiles nothing"

    @abc.abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Place the model (on the host, equal on all ranks) on the device; wrap or compile it.

        An engine may keep buffers in a form of its own: read them through `state_dict()`.
        """

    @abc.abstractmethod
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The task's, with its state made, so that the first step is like every other."""

    @abc.abstractmethod
    def to_device(self, batch: Batch) -> Batch:
        """One batch from the host to the device."""

    @abc.abstractmethod
    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches on the device, copied while the step before computes where that can be."""

    @abc.abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The forward pass runs in this."""

    def run_score(self, model: nn.Module, spec: Any, batch: Batch) -> torch.Tensor:
        """`spec.score`, (4,), of a batch on the device, for nobody to wait for; in evaluation."""
        with self.autocast():
            score: torch.Tensor = spec.score(model, batch)
        return score

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Gradients of the (scaled) loss; `retain_graph` as `torch.Tensor.backward` has it."""

    @abc.abstractmethod
    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks, unscale, step; nothing on overflow."""

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Backward passes in this average nothing yet: `apply_gradients` will."""
        return nullcontext()

    # For a loop of a user's own: how it calls the model, and `apply_gradients` in parts.

    def calling(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The loop's calls of what `prepare` gave run in this."""
        return self.autocast()

    def given(self, batch: Batch) -> Batch:
        """A batch on the device, as the loop may do anything with."""
        return batch

    def leave_batches(self) -> None:  # noqa: B027
        """The loop has left a pass over a loader, maybe in the middle of a step."""

    def results(self, nest: Any) -> Any:
        """What the model has returned, as the loop may do anything with."""
        return nest

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Make an optimizer that a user built one for this engine; it stays the same object.

        Args:
            optimizer: of the parameters that `model`, which is prepared, has now.

        Raises:
            RequestError: the engine cannot do what it is set to.
        """
        return

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks, where `backward` has not done so."""
        return

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the loss scale out of the gradients, at most once a step."""
        if self.scaler is not None:
            with complex_parameters.as_real(optimizer):
                self.scaler.unscale_(optimizer)

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with gradients that are averaged; unscale those that are not; skip on overflow."""
        if self.scaler is None:
            optimizer.step()
        else:
            if complex_parameters.of(optimizer) and self._is_scaled(optimizer):
                self.unscale_gradients(optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()

    def _is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self.scaler.is_enabled():
            return False
        return self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """`--clip_norm`, of gradients that are averaged and unscaled; does not wait."""
        if self.task.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.task.clip_norm)

    def keep_buffers(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """With `--on_nan skip`: buffers, and copies of them for `take_back_buffers`."""
        if self.task.on_nan != "skip":
            return []
        return [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def take_back_buffers(self, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give buffers what they had before a step that was skipped; does not wait."""
        for buffer, before in kept:
            buffer.copy_(torch.where(self.found_inf > 0, before, buffer))

    @torch.no_grad()
    def find_nonfinite(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for NaN and infinity in the averaged gradients; does not wait."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.found_inf = torch.zeros((), device=parameters[0].device)
        one = torch.ones((), device=parameters[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, one)

    def end_step(self) -> None:
        """Hand the step to the device; never waits."""
        return

    def run_step(
        self,
        step: Callable[..., torch.Tensor],
        model: nn.Module,
        spec: Any,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
    ) -> torch.Tensor:
        """The loop's `train_step` on a batch; an engine may run one that it recorded instead."""
        return step(self, model, spec, optimizer, batch)

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until the device has done all it was given. Only the timer calls this."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Peak of the device's allocator; on a CPU, of the process's resident size."""

    @abc.abstractmethod
    def averaged_probe(self, value: float) -> list[float]:
        """Average a gradient of `value` over ranks, the way training does, and return it."""

    def seed(self, seed: int) -> None:
        """Where the model's own random numbers begin, dropout's for one; another on each rank."""
        torch.manual_seed(seed)

    def rng_state(self) -> Tensors:
        """Where the model's own random numbers are: name -> (n,) uint8 on the host."""
        return {"torch": torch.get_rng_state()}

    def load_rng_state(self, states: Tensors) -> None:
        """Go on from there; a generator without a state in it stays where it is."""
        if "torch" in states:
            torch.set_rng_state(states["torch"])

    def loss_scale(self) -> float | None:
        """The GradScaler's factor; None without one. Waits for the device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return float(self.scaler.get_scale())

    def gather_state(self) -> None:  # noqa: B027
        """All ranks call it before one of them alone reads the training state."""

    def training_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        """All that training changes, on the host; `net` is what `prepare` was given."""
        return state.read(net, optimizer, self.scaler)

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        """Go on from a state that this or another engine has read.

        Raises:
            NotLoadableError: it does not fit.
        """
        state.load(net, optimizer, self.scaler, saved)
        self.end_step()  # or the next step would have the copies in it

    def compile_stats(self) -> CompileStats:
        """Counts of the compiler; zeros where there is none."""
        return CompileStats()

    def left_compiler(self) -> list[str]:
        """What the compiler did not take of the first steps, with its place in the model."""
        return []

    def start_profile(self, folder: Path, expected_s: float) -> Callable[[], None]:
        """Begin the compiler's own profile, if it has one; returns what ends it.

        Args:
            folder: where it goes, yet to be made.
            expected_s: seconds that the steps to be profiled are expected to take.
        """
        return lambda: None

    def close(self) -> None:
        """Let go of the device."""
        return

    # The same for all.

    def check_model(self, net: nn.Module) -> None:
        """Look whether this engine can train a model, on the host and as it was built.

        Raises:
            RequestError: it cannot; the message says why and what to do.
        """
        trainable.check(net, self.task.engine, compiles=self.compiler is not None)
        tied_parameters.refuse_views(net)

    def prepared(self, net: nn.Module) -> nn.Module:
        """`prepare`, after which the same parameters and buffers must be one tensor as before.

        Raises:
            RequestError: parameters share memory in a way that cannot be kept, or none trains.
            RuntimeError: they are not, so that another model would be trained.
        """
        self.check_model(net)
        if self.task.checkpoint_modules:
            names = [name.strip() for name in self.task.checkpoint_modules.split(",")]
            activation_checkpointing.apply(net, names, self.computed_again)
        before = tied_parameters.names(net)
        model = self.prepare(net)
        parted = before ^ tied_parameters.names(net)
        if parted:
            raise RuntimeError(
                f"engine {self.task.engine} keeps {', '.join(min(parted))} otherwise than the "
                "model does: tied weights have come apart, or others are tied"
            )
        return model

    def device_batches(self, loader: Any) -> Generator[Batch, None, None]:
        """The loader's batches on the device; those of a resident loader are copied once.

        Close it when leaving early: the copying behind it ends there.
        """
        if not loader.resident:
            yield from self.stream(loader)
            return
        if not self._resident:
            self._resident = [self.to_device(batch) for batch in loader]
        begin = loader.num_done
        yield from islice(cycle(self._resident), begin, begin + len(loader))

    def share_buffers(self, net: nn.Module) -> None:
        """Give all ranks rank 0's buffers and extra state, so that all evaluate one model, the one
        that is saved.

        While training, BatchNorm's statistics are those of each rank's shard.
        """
        if self.topology.world_size == 1:
            return
        with torch.no_grad():
            for buffer in model_state.saved_buffers(net):
                buffer.copy_(broadcast_tensor(buffer.cpu()))
        model_state.share(net)
        self.end_step()

    def prove_reduction(self) -> None:
        """Average known values, a different one on each rank, and look at the result.

        Raises:
            ReductionError: on every rank, if it is wrong on any.
        """
        world_size = self.topology.world_size
        if world_size == 1:
            return
        expected = (world_size + 1) / 2  # mean of 1..world_size
        averaged = self.averaged_probe(float(self.topology.rank + 1))
        wrong = [value for value in averaged if abs(value - expected) > 1e-6]
        of_ranks = [rank for rank, (bad,) in enumerate(all_gather_values([len(wrong)])) if bad]
        if of_ranks:
            raise ReductionError(
                f"gradients are not averaged over the {world_size} ranks ({self.collectives}): "
                f"rank {self.topology.rank} has {averaged[0]} where {expected} is right; "
                f"wrong on ranks {of_ranks}"
            )

    @staticmethod
    def applied_steps(optimizer: torch.optim.Optimizer) -> int:
        """Steps that changed the parameters, by the optimizer's own count; waits for it."""
        # Of a parameter that never had a gradient it stays 0.
        steps = [s["step"] for p, s in optimizer.state.items() if p.requires_grad and "step" in s]
        return max((int(torch.as_tensor(step).cpu().item()) for step in steps), default=0)
