"""The engine contract: compile a training step, run it, wait for it and count.

`accbench/engines/<name>.py` defines `class Engine(engines.Engine)`, or, where a step can be taken
in parts as a loop of a user's own takes it, `class Engine(loops.LoopEngine)`. The training loop
knows these contracts and nothing below them. What a launcher asks before there is an engine is in
`requirements`, and what training changes, how it is read, loaded and shared, in `state`. How work
is spread over ranks is the engine's `strategy` (`accbench.distributed.strategies`), its types are
its `precision`.
"""

import abc
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig, makes_batches_between_steps
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies import Strategy
from accbench.engines.common import activation_checkpointing, tied_parameters
from accbench.engines.precision import Precision
from accbench.engines.requirements import EngineRequirements
from accbench.engines.state import StatefulEngine
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


class Engine(EngineRequirements, StatefulEngine):
    """What runs whole training steps. Made in the worker, after the process group."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Knobs of this engine alone; each becomes the flag `--<engine>.<knob>`.

        Declare each with `accbench.config.flag`, which has its default, help and range.
        """

    strategy: Strategy
    """How the ranks share a step."""
    device: torch.device
    """Where torch has the model and its batches."""
    compiler: str | None = None
    """Which compiler this engine is meant to train through; None if it is eager."""
    pins_batches: bool = False
    """Whether torch copies batches to CUDA, which is faster from pinned memory; pinning for another
    library would start torch's CUDA beside it."""
    traces_device: bool = False
    """Whether `start_profile` traces the device; of CUDA's tracing (CUPTI) there is one user."""
    step_tracer: str | None = None
    """A module that traces a step without running it, for `accbench preflight`."""
    recompute_barrier: activation_checkpointing.RecomputeBarrier | None = None
    """For `--checkpoint_modules`, see there."""

    def __init__(self, task: TaskConfig, options: Any, topology: Topology) -> None:
        self.task = task
        self.options = options
        self.topology = topology
        self.mesh = self.mesh_of(task, topology.world_size)
        self.precision = Precision(task)
        self._resident: list[Batch] = []

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
        """Return the peak since `reset_peak_memory`.

        It is the device's allocator's; on a CPU, that of the process's resident size.
        """

    def reset_peak_memory(self) -> None:
        """Forget the peak so far, which held what choosing kernels took, if the device can."""
        return

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
        known = {name for names in before for name in names}
        model = self.prepare(net)
        after = tied_parameters.names_by_tensor(net)
        if self.mesh.pp > 1:  # this rank has a part of the model
            left = {name for names in after for name in names}
            before = {(*(n for n in names if n in left),) for names in before if left & {*names}}
        changed_ties = before ^ {names for names in after if known & {*names}}
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
            between_steps = makes_batches_between_steps(self.task.device, self.task.workers)
            yield from map(self.to_device, loader) if between_steps else self.stream(loader)
            return
        if not self._resident:
            self._resident = [self.to_device(batch) for batch in loader]
        begin = loader.num_done
        yield from islice(cycle(self._resident), begin, begin + len(loader))
