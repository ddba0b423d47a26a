"""The engine contract: compile a training step, run it, wait for it and count.

`accbench/engines/<name>.py` defines `class Engine(engines.Engine)`, or, where a step can be taken
in parts as a loop of a user's own takes it, `class Engine(loops.LoopEngine)`. The training loop
knows these contracts and nothing below them. How work is spread over ranks is the engine's
`strategy` (`accbench.distributed.strategies`), its types are its `precision`.
"""

import abc
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig
from accbench.distributed import mesh
from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology, broadcast_tensor
from accbench.distributed.strategies import Strategy
from accbench.engines.common import (
    activation_checkpointing,
    model_state,
    optimizer_state,
    tied_parameters,
    training_state,
)
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.precision import Precision
from accbench.errors import RequestError
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
    """What runs whole training steps. Made in the worker, after the process group."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Knobs of this engine alone; each becomes the flag `--<engine>.<knob>`.

        Declare each with `accbench.config.flag`, which has its default, help and range.
        """

    strategy: Strategy
    """How the ranks share a step."""
    compiler: str | None = None
    """Which compiler this engine is meant to train through; None if it is eager."""
    pins_batches: bool = False
    """Whether torch copies batches to CUDA, which is faster from pinned memory; pinning for another
    library would start torch's CUDA beside it."""
    traces_device: bool = False
    """Whether `start_profile` traces the device; of CUDA's tracing (CUPTI) there is one user."""
    step_tracer: str | None = None
    """A module that traces a step without running it, for `accbench preflight`."""
    precision: Precision
    """The types of a step, and its loss scale."""
    recompute_barrier: activation_checkpointing.RecomputeBarrier | None = None
    """For `--checkpoint_modules`, see there."""

    def __init__(self, task: TaskConfig, options: Any, topology: Topology) -> None:
        self.task = task
        self.options = options
        self.topology = topology
        self.mesh = self.mesh_of(task, topology.world_size)
        self.precision = Precision(task)
        self._resident: list[Batch] = []

    # Asked by the launcher, before any backend is imported.

    @classmethod
    @abc.abstractmethod
    def find_device(cls, requested: str) -> str:
        """Return `--device` as cpu, cuda or tpu; auto is the accelerator that this machine has."""

    @classmethod
    @abc.abstractmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        """Return why this task cannot run here and what to do, or None if it can."""

    @classmethod
    def with_current_flags(cls, task: TaskConfig) -> TaskConfig:
        """Return the task with this engine's older spellings of flags replaced by today's."""
        return task

    @classmethod
    def mesh_of(cls, task: TaskConfig, world_size: int) -> MeshShape:
        """Return how a number of workers are laid out.

        Raises:
            RequestError: the task's flags do not fit that number, or this engine.
        """
        shape = mesh.of_task(task, world_size)
        problem = cls.mesh_problem(task, shape) if task.dp_shard is not None else None
        if problem is not None:
            raise RequestError(problem)
        return shape

    @classmethod
    def mesh_problem(cls, task: TaskConfig, shape: MeshShape) -> str | None:
        """Return why this engine cannot shard as asked and what to do, or None if it can."""
        return (
            f"--dp_shard {task.dp_shard}: engine {task.engine} keeps the whole model on each "
            "worker; use --engine ddp or jax"
        )

    @classmethod
    def other_python(cls) -> Path | None:
        """Return the Python of another environment that has this engine's packages.

        None if this environment has them, or no other is known.
        """
        return None

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        """Return environment variables that a worker's process starts with."""
        return {}

    # In the worker.

    @classmethod
    def for_loops(cls) -> Any:
        """Return the `LoopEngine` for loops of a user's own; it takes this engine's options."""
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
        """Build the task's optimizer with its state, so that the first step is like every other."""

    @abc.abstractmethod
    def to_device(self, batch: Batch) -> Batch:
        """Copy one batch from the host to the device."""

    @abc.abstractmethod
    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches on the device, copied while the step before computes where that can be."""

    @abc.abstractmethod
    def run_step(
        self,
        step: Callable[..., torch.Tensor],
        model: nn.Module,
        spec: Any,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
    ) -> torch.Tensor:
        """Take one training step on a batch, and return its loss, for nobody to wait for.

        Args:
            step: the loop's `train_step`, for engines that take a step in its parts.
            model: from `prepared`.
            spec: the model's spec.
            optimizer: from `build_optimizer`.
            batch: on the device.
        """

    @abc.abstractmethod
    def run_score(self, model: nn.Module, spec: Any, batch: Batch) -> torch.Tensor:
        """Return `spec.score`, (4,), of a batch on the device, for nobody to wait for."""

    def end_step(self) -> None:
        """Hand the step to the device; never waits."""
        return

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until the device has done all it was given. Only the timer calls this."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Peak of the device's allocator since `reset_peak_memory`; on a CPU, of the process's
        resident size."""

    def reset_peak_memory(self) -> None:
        """Forget the peak so far, which held what choosing kernels took, if the device can."""
        return

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
        return False

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

        Where `reads_together`, all ranks call it, and these are `RowsTensor`s, which all ranks
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

    def compile_stats(self) -> CompileStats:
        """Return the compiler's counts; zeros where there is none."""
        return CompileStats()

    def left_compiler(self) -> list[str]:
        """Return what the compiler left to PyTorch in the first steps, with the model's line."""
        return []

    def start_profile(self, folder: Path, expected_s: float) -> Callable[[], None]:
        """Begin the compiler's own profile, if it has one; returns what ends it.

        Args:
            folder: where it goes, yet to be made.
            expected_s: seconds that the steps to be profiled are expected to take.
        """
        return lambda: None

    def close(self) -> None:
        """Release the device."""
        return

    # The same for all.

    def check_model(self, net: nn.Module) -> None:
        """Look whether this engine can train a model, on the host and as it was built.

        Raises:
            RequestError: it cannot; the message says why and what to do.
        """
        trainable.check(net, self.task.engine, compiles=self.compiler is not None)
        tied_parameters.refuse_shared_memory(net)

    def prepared(self, net: nn.Module) -> nn.Module:
        """Call `prepare`, and check that the same parameters and buffers are tied as before.

        Raises:
            RequestError: parameters share memory in a way that cannot be kept, or none trains.
            RuntimeError: they are not, so that another model would be trained.
        """
        self.check_model(net)
        if self.task.checkpoint_modules:
            names = [name.strip() for name in self.task.checkpoint_modules.split(",")]
            activation_checkpointing.apply(net, names, self.recompute_barrier)
        before = tied_parameters.names_by_tensor(net)
        model = self.prepare(net)
        changed_ties = before ^ tied_parameters.names_by_tensor(net)
        if changed_ties:
            raise RuntimeError(
                f"engine {self.task.engine} keeps {', '.join(min(changed_ties))} otherwise than "
                "the model does: tied weights have come apart, or others are tied"
            )
        return model

    def device_batches(self, loader: Any) -> Generator[Batch, None, None]:
        """Yield the loader's batches on the device; those of a resident loader are copied once.

        Close it when leaving early: the copying behind it ends there.
        """
        if not loader.resident:
            yield from self.stream(loader)
            return
        if not self._resident:
            self._resident = [self.to_device(batch) for batch in loader]
        begin = loader.num_done
        yield from islice(cycle(self._resident), begin, begin + len(loader))

    def deferred_build(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Return the model without its weights, which `prepare` then draws shard by shard.

        None: this engine, or this model, needs it built at once. All ranks call this.

        Args:
            build: builds the model, by torch's global generator as it is now.
        """
        return None

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
        model_state.broadcast_extra(net)
        self.end_step()

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the bytes of parameters and optimizer state that this rank keeps between steps.

        None: the engine does not tell.
        """
        kept = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for state in optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    @staticmethod
    def applied_steps(optimizer: torch.optim.Optimizer) -> int:
        """Steps that changed the parameters, by the optimizer's own count; waits for it."""
        # Of a parameter that never had a gradient it stays 0.
        steps = [s["step"] for p, s in optimizer.state.items() if p.requires_grad and "step" in s]
        return max((int(torch.as_tensor(step).cpu().item()) for step in steps), default=0)
