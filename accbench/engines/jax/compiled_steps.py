"""The compiled steps of engine jax: found again where nothing changed, else built.

A step holds for one kind of batch and one state of the model's Python attributes. It is captured
and compiled when it is first needed. Where the step cache is on, it is loaded from there instead.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig, plugins
from accbench.data import nested
from accbench.distributed.process_group import Topology
from accbench.engines import Batch, CompileStats
from accbench.engines.common import extra_inputs, python_snapshot, python_state
from accbench.engines.common.index_ranges import IndexRanges
from accbench.engines.jax import (
    capture,
    fingerprint,
    functional,
    lowering,
    recapture,
    runtime,
    step_cache,
)
from accbench.engines.jax.data_mesh import Axis, DataMesh
from accbench.engines.jax.options import JaxOptions
from accbench.engines.jax.precision import JaxPrecision
from accbench.engines.jax.step import StepPlan, build_step
from accbench.recording.terminal import log

# One compiled step a signature of batches; more are forgotten, the oldest first.
_MAX_STEPS = 64

CacheKey = tuple[str, tuple[int, ...]]
"""A step's name in the step cache, and how many tensors it reads of each extra input."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step."""

    run: Callable[..., Any]
    """Takes and returns what `step.build_step` describes."""
    reads: list[int]
    """How many tensors a step reads of each source of extra inputs."""
    ranges: IndexRanges
    """The ranges of the indices in a microbatch."""


class CompiledSteps:
    """Finds and builds compiled steps.

    Args:
        task: the run's.
        topology: the ranks.
        mesh: of their devices.
        precision: the types of the step.
        rules: how graphs are lowered.
        cache_dir: the folder of the step cache; None for no cache.
    """

    def __init__(
        self, task: TaskConfig, topology: Topology, mesh: DataMesh, precision: JaxPrecision,
        rules: lowering.Rules, cache_dir: Path | None,
    ) -> None:  # fmt: skip
        self.task, self._topology, self._mesh, self._precision = task, topology, mesh, precision
        self._rules, self._cache_dir = rules, cache_dir
        self._steps: dict[Any, CompiledStep] = {}
        self._by_cache_key: dict[CacheKey, CompiledStep] = {}
        self._watch: python_state.PythonStateWatch | None = None
        self._recapture_limit = recapture.RecaptureLimit()
        self.stats = CompileStats()
        self.tp_axes: list[Axis] = []
        """Of each parameter, the axis along which ranks have parts; [] where none has."""
        self.of_sequence_parts: frozenset[str] = frozenset()
        """Parameters that a rank uses for a part of the sequence (`--sequence_parallel`)."""
        self.scratch_bytes = 0
        """What a step takes at most beside the arrays that are there before it."""

    def find(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> CompiledStep | None:
        """Return the step that was compiled for these; None where there is none.

        Raises:
            RequestError: the model's Python state changes before every step.
        """
        key = self._key(model, spec, optimizer, batch)
        step = self._steps.get(key)
        is_new = step is None and all(signature != key[0] for signature, _ in self._steps)
        watch = self._watched(model, spec)
        self._recapture_limit.check(watch, key[1], step is not None, is_new)
        return step

    def compile(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer,
        batch: Batch, arguments: tuple[Any, ...],
    ) -> CompiledStep:  # fmt: skip
        """Build the step for these, and keep it.

        Args:
            model: on the host.
            spec: the model's.
            optimizer: with a state for every parameter.
            batch: on the host.
            arguments: that the step is called with.

        Raises:
            RequestError: the step cannot be one graph.
            functional.ReshapedBufferError: the model has yet to make its buffers for this batch.
        """
        key = self._key(model, spec, optimizer, batch)
        step = self._compiled(model, spec, optimizer, batch, arguments)
        if len(self._steps) == _MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[key] = step
        return step

    def _key(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> tuple[Any, int]:
        """Return a key of all that a captured step holds for, Python's state too."""
        return _signature(model, optimizer, batch), self._watched(model, spec).state_id()

    def _watched(self, model: nn.Module, spec: Any) -> python_state.PythonStateWatch:
        if self._watch is None or self._watch.model is not model:
            self._watch = python_state.PythonStateWatch(model, [spec.loss])
        return self._watch

    def _compiled(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer,
        batch: Batch, arguments: tuple[Any, ...],
    ) -> CompiledStep:  # fmt: skip
        begun = time.perf_counter()
        saved = python_snapshot.PythonSnapshot(model, self._watched(model, spec).generators())
        microbatch = self._microbatch(batch)
        capture.refuse_changing_extra_state(
            model, spec.loss, microbatch, self._precision.host_autocast
        )
        saved.restore()
        key = self._cache_key(saved, model, spec, optimizer, batch, arguments)
        step = None if key is None else self._by_cache_key.get(key)
        if step is not None:  # the Python state that has changed does not matter to the step
            self._recapture_limit.note_unneeded()
            return step

        def build() -> tuple[Any, list[int]]:
            saved.restore()  # a step moves the model's own numbers once
            return self.build(model, spec, optimizer, batch, arguments[0])

        function, reads = build() if key is None else self._load_or_build(key, arguments, build)
        with python_snapshot.restored(model):  # what cannot be captured was refused above
            ranges = functional.trace_index_ranges(
                model, spec.loss, microbatch, self._precision.capture_autocast
            )
        saved.keep_plain()
        run = self._compiled_by_xla(function, arguments)
        if run is None:
            return self._compiled(model, spec, optimizer, batch, arguments)
        self.scratch_bytes = max(self.scratch_bytes, runtime.scratch_bytes(run))
        self.stats += CompileStats(1, time.perf_counter() - begun)
        step = CompiledStep(run, [number * self.task.accumulate for number in reads], ranges)
        if key is not None:
            newest = [*self._by_cache_key.items()][1 - _MAX_STEPS :]
            self._by_cache_key = {**dict(newest), key: step}
        return step

    def _compiled_by_xla(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Compile a step; None if it must be built again, without cuDNN's attention."""
        lowered = None
        try:
            lowered = function.lower(*arguments)
            return lowered.compile()
        except (
            Exception
        ) as error:  # whatever JAX or XLA raise; without attention they raise it again
            has_attention = lowered is None or "cudnn$fmha" in lowered.as_text()
            if not self._precision.keeps_attention or not has_attention:
                raise
            reason = " ".join(str(error).split())[:200]
        log.warning(f"without cuDNN's attention, as the step does not compile with it: {reason}")
        self._precision.keeps_attention = False
        return None

    def _microbatch(self, batch: Batch) -> Batch:
        """Return the first microbatch: what the model sees in a step."""
        return nested.chunks(batch, self.task.accumulate)[0]

    def _cache_key(
        self, saved: python_snapshot.PythonSnapshot, model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: Batch, arguments: tuple[Any, ...],
    ) -> CacheKey | None:  # fmt: skip
        """Return the step's key in the step cache, or None where it has none."""
        # What capture refuses it refuses in its own words.
        with contextlib.suppress(Exception):
            digest, reads = fingerprint.step_digest(
                model, spec.loss, self._microbatch(batch), self._precision.capture_autocast
            )
            plan = self._plan(model, optimizer, batch)
            workers = self._topology.world_size, self.task.device
            key = step_cache.step_key(digest, plan, workers, arguments=arguments)
            # The key has the text of accbench's own optimizers alone.
            is_builtin = self.task.optimizer in plugins.modules("optimizers")
            if key is not None and is_builtin and not saved.draws_random_numbers():
                return key, tuple(reads)
        return None

    def _load_or_build(
        self, key: CacheKey, arguments: tuple[Any, ...],
        build: Callable[[], tuple[Any, list[int]]],
    ) -> tuple[Any, list[int]]:  # fmt: skip
        """Load the step from the step cache, or build it."""
        if self._cache_dir is None:
            return build()
        name, reads = key
        steps = step_cache.StepCache(self._cache_dir)
        return steps.get(name, arguments, lambda: build()[0]), [*reads]

    def build(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: Batch,
        state: Any,
    ) -> tuple[Any, list[int]]:  # fmt: skip
        """Capture the step, and wrap it in `jax.jit` without compiling it.

        Args:
            model: on the host.
            spec: the model's.
            optimizer: with a state for every parameter.
            batch: on the host.
            state: the step's first argument, which may be sharded.

        Returns:
            The jitted step, and how many tensors a forward pass reads of each extra input.
        """
        plan = self._plan(model, optimizer, batch)
        captured = capture.capture(
            model, spec.loss, self._microbatch(batch), self._precision.capture_autocast,
            lowering.decompositions(),
            fused_attention=runtime.keeps_attention(plan.rules, self._precision.autocast_dtype),
        )  # fmt: skip
        return self._mesh.jit(build_step(captured, plan, self._mesh), state), captured.reads

    def _plan(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> StepPlan:
        scaler = self._precision.scaler
        options = self.task.options.get("jax", JaxOptions())
        return StepPlan(
            optimizer=self.task.optimizer,
            groups=[_group_settings(group) for group in optimizer.param_groups],
            group_of=_group_indices(model, optimizer),
            num_microbatches=self.task.accumulate,
            num_batch_tensors=len(nested.tensors_of(batch)),
            num_extra_tensors=[len(source.tensors) for source in extra_inputs.sources],
            clip_norm=self.task.clip_norm,
            ema_decay=self.task.ema_decay or None,
            skip_nonfinite=self.task.on_nan == "skip",
            loss_scaling=_loss_scaling(scaler),
            # Where there is a loss scale, updates wait for the search for overflows.
            gathers_late=options.gathers_late(
                self.task.device, sum(parameter.nbytes for parameter in model.parameters())
            ),
            barrier_before_update=self._topology.world_size > 1
            and self.task.device != "cpu"
            and not scaler,
            tp_axes=self.tp_axes or [None for _ in model.parameters()],
            of_sequence_parts=[n in self.of_sequence_parts for n, _ in model.named_parameters()],
            shard_axes=[self._mesh.shard_axis(parameter.shape) for parameter in model.parameters()],
            rules=self._rules,
        )


def _signature(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
    """Return a key of shapes, modes and settings that a captured step holds for."""
    return (
        nested.signature(batch),
        tuple((tuple(tensor.shape), tensor.dtype) for tensor in extra_inputs.tensors()),
        tuple(module.training for module in model.modules()),
        tuple(parameter.requires_grad for parameter in model.parameters()),
        tuple(tuple(buffer.shape) for buffer in model.buffers()),
        tuple(repr(_group_settings(group)) for group in optimizer.param_groups),
    )


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group that no schedule changes."""
    return {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}


def _group_indices(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the index of each parameter's group, in the model's order."""
    indices = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return [indices[parameter] for parameter in model.parameters()]


def _loss_scaling(scaler: Any) -> dict[str, Any] | None:
    if scaler is None:
        return None
    return {
        "growth": scaler.get_growth_factor(),
        "backoff": scaler.get_backoff_factor(),
        "interval": scaler.get_growth_interval(),
    }
