"""Training compiled by XLA through JAX: one jitted function is the whole step.

torch's own tools capture forward and backward pass as a graph, a table turns each of its
operations into JAX, and what a step does besides (averaging over workers, the loss scale,
clipping, the optimizer) is in the same function. Parameters and all else that a step changes
live in JAX's arrays; the torch module has them whenever it is read.
"""

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accbench import engines
from accbench.config import TaskConfig, plugins
from accbench.config.field import flag
from accbench.data import nested, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed.process_group import Topology
from accbench.engines import optimizers
from accbench.engines.common import (
    cuda_autocast,
    extra_inputs,
    optimizer_state,
    python_state,
)
from accbench.engines.common.index_ranges import IndexRanges
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.ddp.engine import peak_resident_bytes
from accbench.engines.jax import recapture, runtime
from accbench.engines.precision import Precision
from accbench.errors import RequestError
from accbench.pjrt import devices, xla_flags
from accbench.recording import provenance, terminal
from accbench.system import extras

_PLUGINS = {"cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
# One compiled step a signature of batches; more are forgotten, the oldest first.
_MOST_STEPS = 64


class Engine(engines.Engine):
    """JAX: forward, backward, reduction and update in one jitted function."""

    compiler = "xla"
    step_tracer = "accbench.preflight.tracing.jax"

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the engine jax."""

        compile_cache: Literal["on", "off"] = flag("on", "Keep compiled steps on disk.")
        cache_dir: str | None = flag(
            None,
            "The cache's folder. Unset: accbench/jax in the user's cache folder.",
            is_path=True,
        )
        torch_kernels: Literal["on", "off"] = flag(
            "on",
            "On a CPU, let XLA's program call torch's kernels (oneDNN, MKL) for convolutions, "
            "large matrix products, attention and max-pooling, as on a GPU it calls cuDNN and "
            "cuBLAS.",
        )
        channels_last: Literal["auto", "on", "off"] = flag(
            "auto",
            "Carry images as NHWC from one convolution to the next. auto: on a CPU; elsewhere XLA "
            "chooses layouts itself.",
        )
        products_for_1x1: Literal["auto", "on", "off"] = flag(
            "auto",
            "Compute 1 x 1 convolutions as matrix products, channels last. auto: on a CPU.",
        )
        products_for_patches: Literal["auto", "on", "off"] = flag(
            "auto",
            "Compute convolutions whose windows do not overlap as matrix products, for example the "
            "patches of a vision transformer. auto: on a CPU.",
        )
        products_for_small_images: Literal["auto", "on", "off"] = flag(
            "auto",
            "Compute convolutions with at most nine output pixels as matrix products. auto: on a "
            "CPU.",
        )
        weights_by_image: Literal["auto", "on", "off"] = flag(
            "auto",
            "Compute the weight gradients of convolutions with 128 or more output pixels as one "
            "matrix product per image, channels last. auto: on a CPU.",
        )
        pools_by_place: Literal["on", "off"] = flag(
            "on",
            "Compute the gradients of max-pooling as a sum over the positions in a window.",
        )
        lean: Literal["auto", "on", "off"] = flag(
            "auto",
            "In 16 bits, compute BatchNorm with its ReLU, and attention, by accbench's own "
            "functions that move fewer bytes, with CUDA's casts. auto: on CUDA.",
        )
        evaluation: Literal["auto", "compiled", "eager"] = flag(
            "auto",
            "Evaluate by compiled functions on the device, or by torch on the host. auto: "
            "compiled, except on a CPU, where torch's operations are as fast and need no "
            "compilation.",
        )
        flags: str = flag(
            "",
            "More XLA flags, `name=value` separated by blanks; those in XLA_FLAGS win.",
        )
        shard: bool = flag(
            False,
            "Shard parameters and their optimizer state over the workers: less memory on each, but "
            "every step reduces gradients and gathers parameters.",
        )
        find_unused_parameters: bool = flag(
            False,
            "In your own loops, with several workers: the same as --ddp.find_unused_parameters.",
        )

    @classmethod
    def find_device(cls, requested: str) -> str:
        return devices.find(requested)

    @classmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        if importlib.util.find_spec("jax") is None:
            return f"--engine jax needs {extras.not_installed('jax', 'jax')}"
        if task.script is not None and task.device != "cpu":
            return _ON_CPU_ALONE
        try:
            xla_flags.parse(task.options.get("jax", cls.Options()).flags)
        except RequestError as error:
            return f"--jax.flags: {error}"
        wanted = _PLUGINS.get(task.device, ())
        if wanted and not any(importlib.util.find_spec(name) for name in wanted):
            return (
                f"--engine jax on {task.device} needs JAX's plug-in for it, one of "
                f"{', '.join(wanted)}, which is not installed; use --device cpu or install it"
            )
        return None

    @classmethod
    def for_loops(cls) -> type[engines.Engine]:
        from accbench.engines.jax import loops

        return loops.Engine

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        env = {"JAX_PLATFORMS": runtime.PLATFORMS[task.device]}
        if task.device == "cpu" and task.threads:
            # XLA sizes its thread pool by this name or by the machine's cores.
            env["NPROC"] = str(task.threads)
        return env

    def __init__(self, task: TaskConfig, options: Options, topology: Topology) -> None:
        super().__init__(task, options, topology)
        runtime.configure(task.device, options.flags)
        import jax

        from accbench.engines.jax import arrays, data_parallel

        self._cache = self._start_cache()
        self.jax, self._workers = jax, self._meet()
        self.device = torch.device("cpu")  # where torch's tensors are
        self.strategy = data_parallel.MeshDataParallel(
            topology, self._workers, options.shard, self._greetings_to_log
        )
        self.precision = JaxPrecision(task, lambda: self._mirror)
        if self.precision.needs_loss_scale:
            self.precision.scaler = torch.amp.GradScaler("cpu")
            self.precision.scaler._lazy_init_scale_growth_tracker(self.device)
        self._mirror: Any = None
        self._net: nn.Module | None = None
        self._steps: dict[Any, _Step] = {}
        self._by_name: dict[Any, _Step] = {}
        self._python: python_state.PythonStateWatch | None = None
        self._changes = recapture.RecaptureLimit()
        self._sent = arrays.DeviceArrays()
        self._seed, self._num_run = 0, 0
        self._stats = engines.CompileStats()
        self._evaluation: Any = None

    def _meet(self) -> Any:
        from accbench.engines.jax import data_mesh

        data_mesh.init_distributed(self.topology, self.task.device, self.task.timeout_s)
        found = data_mesh.DataMesh(
            self.topology, self.options.shard, by_gloo=self.task.device == "cpu"
        )
        got = found.device.platform
        wanted = {"cuda": "gpu"}.get(self.task.device, self.task.device)
        if got != wanted:
            raise RequestError(
                f"--device {self.task.device}, but JAX came up on {got}; is JAX_PLATFORMS set to "
                "something else?"
            )
        return found

    def _start_cache(self) -> str:
        return runtime.enable_compile_cache(self.task.device, self.options)

    @property
    def compile_cache(self) -> str:
        return self._cache

    @property
    def device_name(self) -> str:
        if self.task.device == "cpu":
            return provenance.cpu_name()
        return str(self._workers.device.device_kind)

    def prepare(self, model: nn.Module) -> nn.Module:
        self._net = model
        model.register_state_dict_pre_hook(lambda *_: self._bring_back())
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        from accbench.engines.jax import state_sync

        entry = optimizers.of_task(self.task)
        optimizer = entry.torch_class(
            optimizer_state.groups(self.task, model), **entry.arguments(self.task)
        )
        optimizer_state.make_state(self.task, optimizer, torch.zeros_like, torch.clone)
        self._mirror = state_sync.StateSync(
            model, optimizer, self.precision.scaler, state_sync.state_keys(self.task), self._workers
        )
        return optimizer

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        from accbench.engines.jax import arrays

        # A tensor of a batch that has none of the known kinds would be a constant of the step.
        tensors = nested.tensors_of(nested.mapped(batch, _itself, doing="an input of a graph"))
        if self.task.device != "cpu":  # there it is the same memory
            for tensor in tensors:
                self._sent.add(tensor, arrays.from_torch(tensor, self._workers.device))
        return batch

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE, to_device=self.to_device
        )

    def _hosts_autocast(self) -> AbstractContextManager[Any]:
        if self.precision.autocast_dtype is None:
            return nullcontext()
        # The graph's backward pass is traced apart, and must not find casts of the forward's.
        return torch.autocast("cpu", self.precision.autocast_dtype, cache_enabled=False)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Enter autocast of the device that is to compute, in a capture."""
        if self.precision.autocast_dtype is None:
            return nullcontext()
        lean = self.options.lean == "on" or (
            self.options.lean == "auto" and self.task.device == "cuda"
        )
        if self.task.device == "cuda" or lean:  # torch's rules there are not those for a CPU
            from accbench.engines.jax import fused_ops

            return cuda_autocast.autocast(
                self.precision.autocast_dtype, fused_ops.FUSED_OPS if lean else None
            )
        return self._hosts_autocast()

    def run_step(
        self, step: Callable[..., torch.Tensor], model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: engines.Batch,
    ) -> torch.Tensor:  # fmt: skip
        """Run the step that `step` takes as one jitted function; `step` is not called."""
        from accbench.engines.jax import arrays, capture

        self._mirror.sync_from_torch()
        arguments = self._arguments(optimizer, batch)
        key = self._key(model, spec, optimizer, batch)
        found = self._steps.get(key)
        self._changes.check(self._python, is_captured=found is not None)
        if found is None:
            try:
                found = self._compiled(model, spec, optimizer, batch, arguments)
            except capture.ReshapedBufferError:
                self._settle(model, spec, batch)
                arguments = self._arguments(optimizer, batch)
                key = self._key(model, spec, optimizer, batch)
                found = self._compiled(model, spec, optimizer, batch, arguments)
            if len(self._steps) == _MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = found
        for part in nested.chunks(batch, self.task.accumulate) if found.ranges.checks else ():
            names, tensors = zip(*nested.named_tensors(part), strict=True)
            found.ranges.refuse(tensors, names)
        with torch.profiler.record_function("jax.step"):  # as optimizers do with theirs
            state, own, loss = found.run(*arguments)
        self._num_run += 1
        self._stats += engines.CompileStats(num_executions=1)
        self._mirror.set_arrays(state, own)
        for source, number in zip(extra_inputs.sources, found.reads, strict=True):
            source.position[0] += number
        return arrays.PendingTensor.of(self._workers.local_data(loss, is_per_rank=True))

    def _key(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> Any:
        """Return a key of all that a captured step holds for, Python's state too."""
        if self._python is None or self._python.model is not model:
            self._python = python_state.PythonStateWatch(model, [spec.loss])
        return _signature(model, optimizer, batch), self._python.state_id()

    def _settle(self, model: nn.Module, spec: Any, batch: engines.Batch) -> None:
        """Run the model once, so that it makes its buffers for batches of this size."""
        from accbench.engines.jax import capture

        self._bring_back()
        part = nested.chunks(batch, self.task.accumulate)[0]
        capture.build_lazy_buffers(model, spec.loss, part, self._hosts_autocast)
        self._mirror.reset_buffers(model)
        self._mirror.sync_from_torch()

    def _arguments(self, optimizer: torch.optim.Optimizer, batch: engines.Batch) -> tuple[Any, ...]:
        import numpy as np

        from accbench.engines.jax import state_sync

        inputs = self._inputs(batch)
        random = np.array([self._seed % 2**32, self._num_run % 2**32], np.uint32)
        rates = self._workers.global_arrays(state_sync.learning_rates(optimizer))
        given = self._workers.per_rank_arrays(
            {"inputs": inputs, "random": self.jax.numpy.asarray(random)}
        )
        return self._mirror.state, self._mirror.local_state, rates, given

    def _inputs(self, batch: engines.Batch) -> list[Any]:
        from accbench.engines.jax import arrays

        inputs = []
        for tensor in (*nested.tensors_of(batch), *extra_inputs.tensors()):
            sent = self._sent.get(tensor)
            inputs.append(arrays.from_torch(tensor, self._workers.device) if sent is None else sent)
        return inputs

    def run_score(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        how = self.options.evaluation
        if how == "eager" or (how == "auto" and self.task.device == "cpu") or self._mirror is None:
            return self._score_on_host(model, spec, batch)
        if self._evaluation is None:
            from accbench.engines.jax import evaluation

            rules = runtime.lowering_rules(self.task.device, self.options)
            self._evaluation = evaluation.CompiledEvaluation(self._autocast, rules)
        self._mirror.sync_from_torch()
        is_averaged = isinstance(model, optimizer_state.AveragedModel)
        key = optimizer_state.AVERAGE if is_averaged else "parameters"
        weights = (
            self._mirror.gather(key),
            [
                self._workers.local_data(array, is_per_rank=True)
                for array in self._mirror.local_state["buffers"]
            ],
        )
        net = model.net if is_averaged else model
        assert isinstance(net, nn.Module)
        score: torch.Tensor | None = self._evaluation.score(
            net, spec, batch, weights, self._inputs(batch)
        )
        return self._score_on_host(model, spec, batch) if score is None else score

    def _score_on_host(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        self._bring_back()
        with self._hosts_autocast():
            score: torch.Tensor = spec.score(model, batch)
        return score

    def _compiled(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer,
        batch: engines.Batch, arguments: tuple[Any, ...],
    ) -> "_Step":  # fmt: skip
        from accbench.engines.jax import capture

        begun = time.perf_counter()
        saved = python_state.PythonSnapshot(model)
        part = nested.chunks(batch, self.task.accumulate)[0]
        capture.refuse_changing_extra_state(model, spec.loss, part, self._hosts_autocast)
        saved.restore()
        key = self._name_of(saved, model, spec, optimizer, batch, arguments)
        step = None if key is None else self._by_name.get(key)
        if step is not None:  # what has changed of Python's is nothing to the step
            self._changes.note_unneeded()
            return step

        def build() -> tuple[Any, list[int]]:
            saved.restore()  # a step moves the model's own numbers once
            return self._function(model, spec, optimizer, batch)

        function, reads = build() if key is None else self._kept_function(key, arguments, build)
        with python_state.restored(model):  # what cannot be captured was refused above
            ranges = capture.trace_index_ranges(model, spec.loss, part, self._autocast)
        saved.keep_plain()
        run = function.lower(*arguments).compile()
        self._stats += engines.CompileStats(1, time.perf_counter() - begun)
        reads = [number * self.task.accumulate for number in reads]
        step = _Step(run, reads, ranges)
        if key is not None:
            self._by_name = {**dict([*self._by_name.items()][1 - _MOST_STEPS :]), key: step}
        return step

    def _name_of(
        self, saved: python_state.PythonSnapshot, model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: engines.Batch, arguments: tuple[Any, ...],
    ) -> tuple[str, tuple[int, ...]] | None:  # fmt: skip
        """Return the step's key in the cache and its extra inputs, or None without a key."""
        from accbench.engines.jax import fingerprint, step_cache

        part = nested.chunks(batch, self.task.accumulate)[0]
        # What capture refuses it refuses in its own words.
        with contextlib.suppress(Exception):
            digest, reads = fingerprint.step_digest(model, spec.loss, part, self._autocast)
            plan = self._plan(model, optimizer, batch)
            workers = self.topology.world_size, self.task.device
            key = step_cache.step_key(digest, plan, workers, arguments=arguments)
            # The key has the text of accbench's own optimizers alone.
            is_ours = self.task.optimizer in plugins.modules("optimizers")
            if key is not None and is_ours and not saved.draws_random_numbers():
                return key, tuple(reads)
        return None

    def _kept_function(
        self, name: tuple[str, tuple[int, ...]], arguments: tuple[Any, ...],
        build: Callable[[], tuple[Any, list[int]]],
    ) -> tuple[Any, list[int]]:  # fmt: skip
        """Load the step from the cache's folder, or build it."""
        from accbench.engines.jax import step_cache

        if self._cache.startswith("off"):
            return build()
        key, reads = name
        steps = step_cache.StepCache(Path(self._cache) / "steps")
        return steps.get(key, arguments, lambda: build()[0]), [*reads]

    def _function(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> tuple[Any, list[int]]:
        """Build the jitted step, and count what a forward pass reads of each extra input."""
        from accbench.engines.jax import capture, lowering, step

        # A part of the batch is what the model sees.
        part = nested.chunks(batch, self.task.accumulate)[0]
        plan = self._plan(model, optimizer, batch)
        captured = capture.capture(
            model, spec.loss, part, self._autocast, lowering.decompositions(),
            fused_attention=runtime.keeps_attention(plan.rules, self.precision.autocast_dtype),
        )  # fmt: skip
        built = step.build_step(captured, plan, self._workers)
        return self._workers.jit(built, self._mirror.state), captured.reads

    def _plan(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> Any:
        from accbench.engines.jax import step

        return step.StepPlan(
            optimizer=self.task.optimizer,
            groups=[_settings(group) for group in optimizer.param_groups],
            group_of=_groups_of(model, optimizer),
            num_microbatches=self.task.accumulate,
            num_batch_tensors=len(nested.tensors_of(batch)),
            num_extra_tensors=[len(source.tensors) for source in extra_inputs.sources],
            clip_norm=self.task.clip_norm,
            ema_decay=self.task.ema_decay or None,
            skip_nonfinite=self.task.on_nan == "skip",
            loss_scaling=_scaling(self.precision.scaler),
            # Where there is a loss scale, updates wait for the search for overflows.
            barrier_before_update=self.topology.world_size > 1
            and self.task.device != "cpu"
            and not self.precision.scaler,
            shard_axes=[
                self._workers.shard_axis(parameter.shape) for parameter in model.parameters()
            ],
            rules=runtime.lowering_rules(self.task.device, self.options),
        )

    def wait(self) -> None:
        if self._mirror is not None:
            self._mirror.wait()

    def _bring_back(self) -> None:
        if self._mirror is not None:
            self._mirror.sync_to_torch()

    def gather_state(self) -> None:
        self._bring_back()

    def training_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        self._bring_back()
        return super().training_state(net, optimizer)

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        self._bring_back()  # what is not in it stays as it is
        super().load_training_state(net, optimizer, saved)

    def share_buffers(self, net: nn.Module) -> None:
        self._bring_back()
        super().share_buffers(net)

    def applied_steps(self, optimizer: torch.optim.Optimizer) -> int:  # type: ignore[override]
        self._bring_back()
        return engines.Engine.applied_steps(optimizer)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._seed, self._num_run = seed, 0

    def rng_state(self) -> Tensors:
        numbers = [*self._seed.to_bytes(8, "little"), *self._num_run.to_bytes(8, "little")]
        return {**super().rng_state(), "jax": torch.tensor(numbers, dtype=torch.uint8)}

    def load_rng_state(self, states: Tensors) -> None:
        super().load_rng_state(states)
        if "jax" in states:
            numbers = bytes(states["jax"].tolist())
            self._seed = int.from_bytes(numbers[:8], "little")
            self._num_run = int.from_bytes(numbers[8:], "little")

    def start_profile(self, folder: Path, expected_s: float) -> Callable[[], None]:
        """See the base class; what it is made of is in `folder/xla-rankN`, which XProf shows."""
        del expected_s
        self.jax.profiler.start_trace(str(folder / f"xla-rank{self.topology.rank}"))
        return self._stop_trace

    def _stop_trace(self) -> None:
        self.jax.profiler.stop_trace()

    def peak_memory_bytes(self) -> int:
        if self.task.device == "cpu":
            return peak_resident_bytes()
        return int(self._workers.device.memory_stats()["peak_bytes_in_use"])

    def _greetings_to_log(self) -> AbstractContextManager[object]:
        # gloo's, at the first collective, as those of torch's process group.
        if self.task.output_dir is None or self.topology.world_size == 1:
            return nullcontext()
        path = terminal.log_file(self.task.run_dir, self.topology.rank)
        return terminal.redirect_descriptors(path) if path.parent.exists() else nullcontext()

    def compile_stats(self) -> engines.CompileStats:
        return self._stats if self._evaluation is None else self._stats + self._evaluation.stats

    def close(self) -> None:
        from accbench.engines.jax import data_mesh

        self.wait()
        data_mesh.shutdown_distributed()


class JaxPrecision(Precision):
    """The types of a step of JAX's, which has the loss scale among its state."""

    def __init__(self, task: TaskConfig, state: Callable[[], Any]) -> None:
        super().__init__(task)
        self._state = state

    def loss_scale(self) -> float | None:
        if self.scaler is None or self._state() is None:
            return None
        scale: float = self._state().loss_scale()
        return scale


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclasses.dataclass(frozen=True)
class _Step:
    """A compiled step."""

    run: Callable[..., Any]
    reads: list[int]
    """How far it moves each position of `beside`."""
    ranges: IndexRanges
    """Of the indices in a part of the batch."""


_ON_CPU_ALONE = (
    "engine jax runs scripts and accbench.accelerate on a CPU alone, and elsewhere whole steps of "
    "accbench's own loop; use --engine inductor or xla, or --device cpu"
)


def _signature(model: nn.Module, optimizer: torch.optim.Optimizer, batch: engines.Batch) -> Any:
    """Return a key of shapes, modes and settings that a captured step holds for."""
    return (
        nested.signature(batch),
        tuple((tuple(tensor.shape), tensor.dtype) for tensor in extra_inputs.tensors()),
        tuple(module.training for module in model.modules()),
        tuple(parameter.requires_grad for parameter in model.parameters()),
        tuple(tuple(buffer.shape) for buffer in model.buffers()),
        tuple(repr(_settings(group)) for group in optimizer.param_groups),
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group that no schedule changes."""
    return {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}


def _groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    found = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return [found[parameter] for parameter in model.parameters()]


def _scaling(scaler: Any) -> dict[str, Any] | None:
    if scaler is None:
        return None
    return {
        "growth": scaler.get_growth_factor(),
        "backoff": scaler.get_backoff_factor(),
        "interval": scaler.get_growth_interval(),
    }
