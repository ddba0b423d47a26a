"""Training compiled by XLA through JAX: one jitted function is the whole step.

torch's own tools capture forward and backward pass as a graph, a table turns each of its
operations into JAX, and what a step does besides (averaging over workers, the loss scale,
clipping, the optimizer) is in the same function. Parameters and all else that a step changes
live in JAX's arrays; the torch module has them whenever it is read.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import engines
from accbench.config import TaskConfig
from accbench.data import nested, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed import mesh
from accbench.distributed.mesh import MeshShape
from accbench.distributed.parameter_shards import ParameterShard, ShardGroups
from accbench.distributed.process_group import Topology
from accbench.distributed.tensor_slices import TensorSlice
from accbench.engines import optimizers
from accbench.engines.common import extra_inputs, optimizer_state, sharded_state
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.ddp.engine import peak_resident_bytes
from accbench.engines.jax import runtime
from accbench.engines.jax.options import JaxOptions
from accbench.engines.jax.precision import JaxPrecision
from accbench.errors import RequestError
from accbench.pjrt import devices, xla_flags
from accbench.recording import provenance, terminal
from accbench.system import extras


class Engine(engines.Engine):
    """JAX: forward, backward, reduction and update in one jitted function."""

    Options = JaxOptions
    compiler = "xla"
    traces_device = True
    step_tracer = "accbench.preflight.tracing.jax"

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
        return runtime.device_problem(task)

    @classmethod
    def with_current_flags(cls, task: TaskConfig) -> TaskConfig:
        options = task.options.get("jax")
        if options is None or not options.shard or task.dp_shard is not None:
            return task
        groups = {**task.options, "jax": dataclasses.replace(options, shard=False)}
        return dataclasses.replace(task, dp_shard="auto", options=groups)

    @classmethod
    def mesh_problem(cls, task: TaskConfig, shape: MeshShape) -> str | None:
        if task.script is not None:
            return mesh.script_problem(task) or (
                f"--dp_shard {task.dp_shard}: engine jax shards in accbench's own loop alone; use "
                "--engine ddp or inductor, or train with --model"
            )
        if task.offload != "none":
            return cls.no_offloading(task)
        if shape.pp > 1:
            return (
                f"--pp {shape.pp}: engine jax compiles whole steps, which have no stages; use "
                "--dp_shard auto, --tp, or --engine ddp"
            )
        if mesh.zero_stage(task) != 3:
            return (
                f"--zero {task.zero}: engine jax shards parameters and optimizer state alike; "
                "use --zero 3, or --engine ddp"
            )
        if shape.shard > 1 and shape.replicate > 1:
            return (
                f"--dp_shard {task.dp_shard}: engine jax shards over all {shape.world_size} "
                "workers; use --dp_shard auto, or --engine ddp"
            )
        return None

    @classmethod
    def for_loops(cls) -> type[engines.Engine]:
        from accbench.engines.jax import loops

        return loops.Engine

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        env = {"JAX_PLATFORMS": runtime.PLATFORMS[task.device]}
        toolkit = runtime.cuda_toolkit(task.device)
        if toolkit is not None:
            env["CUDA_ROOT"] = str(toolkit)
        if task.device == "cpu" and task.threads:
            # XLA sizes its thread pool by this name or by the machine's cores.
            env["NPROC"] = str(task.threads)
        return env

    def __init__(self, task: TaskConfig, options: JaxOptions, topology: Topology) -> None:
        super().__init__(task, options, topology)
        runtime.configure(task.device, options.flags, tells=topology.rank == 0)
        import jax

        from accbench.engines.jax import arrays, compiled_steps, data_parallel

        self._cache = self._start_cache()
        self.jax, self._mesh = jax, self._init_mesh()
        self.device = torch.device("cpu")  # where torch's tensors are
        self.strategy = data_parallel.MeshDataParallel(
            topology, self._mesh, self.mesh.shard > 1, self._greetings_to_log
        )
        self._rules = runtime.lowering_rules(
            task.device, options, task.tf32 == "on", self._compute_capability()
        )
        self.precision: JaxPrecision = JaxPrecision(
            task, options.lean, self._read_loss_scale, self._rules.attention_by is not None
        )
        cache_dir = None if self._cache.startswith("off") else Path(self._cache) / "steps"
        self._steps = compiled_steps.CompiledSteps(
            task, topology, self._mesh, self.precision, self._rules, cache_dir
        )
        self._state_sync: Any = None  # until there is an optimizer
        self._device_arrays = arrays.DeviceArrays()
        self._seed, self._num_steps = 0, 0
        self._evaluation: Any = None
        self._is_warm = False
        self._tensor_slices: dict[str, TensorSlice] = {}

    def _init_mesh(self) -> Any:
        from accbench.engines.jax import data_mesh

        data_mesh.init_distributed(self.topology, self.task.device, self.task.timeout_s)
        data_mesh.check_device(self.task.device)
        return data_mesh.DataMesh(
            self.topology,
            self.mesh.shard > 1,
            by_gloo=self.task.device == "cpu",
            tp=self.mesh.tp,
            cp=self.mesh.cp,
        )

    def _compute_capability(self) -> str | None:
        """Return that of the GPU, such as "9.0"; None for other devices."""
        return getattr(self._mesh.device, "compute_capability", None)

    def _start_cache(self) -> str:
        return runtime.enable_compile_cache(self.task.device, self.options)

    def _read_loss_scale(self) -> float | None:
        return None if self._state_sync is None else float(self._state_sync.loss_scale())

    @property
    def compile_cache(self) -> str:
        return self._cache

    @property
    def device_name(self) -> str:
        if self.task.device == "cpu":
            return provenance.cpu_name()
        return str(self._mesh.device.device_kind)

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.mesh.tp > 1:
            from accbench.engines.common import tensor_parallel

            group = self._tensor_group()
            self._tensor_slices = tensor_parallel.parallelize_by_own_plan(
                model, group, self.task.model
            )
            if self.task.sequence_parallel:
                from accbench.engines.common import sequence_parallel

                self._steps.of_sequence_parts = sequence_parallel.parallelize_by_own_plan(
                    model, group, self.task.model, self._tensor_slices
                )
            parts = {name: part.axis for name, part in self._tensor_slices.items()}
            self._steps.tp_axes = [parts.get(name) for name, _ in model.named_parameters()]
        model.register_state_dict_pre_hook(lambda *_: self._sync_to_torch())
        return model

    def _tensor_group(self) -> Any:
        """Return the ranks that share a batch; in evaluation on the host they talk by torch."""
        from accbench.distributed.collectives import RankGroup

        shape = MeshShape(replicate=self.mesh.num_token_ranks, tp=self.mesh.tp)
        torch_mesh = shape.device_mesh("cpu")
        self._shard_groups = ShardGroups(
            torch_mesh.get_group("shard"), torch_mesh.get_group("tp"),
            shape.coordinates(self.topology.rank)["replicate"] == 0,
        )  # fmt: skip
        return RankGroup.of(torch_mesh.get_group("tp"))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        from accbench.engines.jax import state_sync

        entry = optimizers.of_task(self.task)
        optimizer = entry.torch_class(
            optimizer_state.groups(self.task, model), **entry.arguments(self.task)
        )
        optimizer_state.make_state(self.task, optimizer, torch.zeros_like, torch.clone)
        self._state_sync = state_sync.StateSync(
            model, optimizer, self.precision.scaler, state_sync.state_keys(self.task), self._mesh,
            self._steps.tp_axes or [None for _ in model.parameters()],
        )  # fmt: skip
        return optimizer

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        from accbench.engines.jax import arrays

        # A tensor of a batch that has none of the known kinds would be a constant of the step.
        tensors = nested.tensors_of(nested.mapped(batch, _identity, doing="an input of a graph"))
        if self.task.device != "cpu":  # there it is the same memory
            for tensor in tensors:
                self._device_arrays.add(tensor, arrays.from_torch(tensor, self._mesh.device))
        return batch

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE, to_device=self.to_device
        )

    def device_batches(self, loader: Any) -> Generator[engines.Batch, None, None]:
        if self._state_sync is not None:
            self._state_sync.sync_from_torch()  # loading processes are still starting, at first
        yield from super().device_batches(loader)

    def run_step(
        self, step: Callable[..., torch.Tensor], model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: engines.Batch,
    ) -> torch.Tensor:  # fmt: skip
        """Run the step that `step` takes as one jitted function; `step` is not called."""
        from accbench.engines.jax import arrays

        self._state_sync.sync_from_torch()
        compiled, arguments = self._compiled_step(model, spec, optimizer, batch)
        for part in nested.chunks(batch, self.task.accumulate) if compiled.ranges.checks else ():
            names, tensors = zip(*nested.named_tensors(part), strict=True)
            compiled.ranges.refuse(tensors, names)
        with torch.profiler.record_function("jax.step"):  # as optimizers do with theirs
            state, local_state, loss = compiled.run(*arguments)
        self._num_steps += 1
        self._steps.stats += engines.CompileStats(num_executions=1)
        self._state_sync.set_arrays(state, local_state)
        for source, num_read in zip(extra_inputs.sources, compiled.reads, strict=True):
            source.position[0] += num_read
        return arrays.PendingTensor.from_array(self._mesh.local_data(loss, is_per_rank=True))

    def _compiled_step(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the compiled step for a batch and its arguments; compile it where it is new."""
        from accbench.engines.jax import functional

        arguments = self.step_arguments(optimizer, batch)
        compiled = self._steps.find(model, spec, optimizer, batch)
        if compiled is not None:
            return compiled, arguments
        try:
            return self._steps.compile(model, spec, optimizer, batch, arguments), arguments
        except functional.ReshapedBufferError:
            self._build_lazy_buffers(model, spec, batch)
            arguments = self.step_arguments(optimizer, batch)
            return self._steps.compile(model, spec, optimizer, batch, arguments), arguments

    def _build_lazy_buffers(self, model: nn.Module, spec: Any, batch: engines.Batch) -> None:
        """Run the model once, so that it makes its buffers for batches of this size."""
        from accbench.engines.jax import functional

        self._sync_to_torch()
        microbatch = nested.chunks(batch, self.task.accumulate)[0]
        functional.build_lazy_buffers(model, spec.loss, microbatch, self.precision.host_autocast)
        self._state_sync.sync_from_torch()

    def step_arguments(
        self, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> tuple[Any, ...]:
        """Return a step's arguments, which `step.build_step` describes."""
        import numpy as np

        from accbench.engines.jax import state_sync

        inputs = self._inputs(batch)
        random = np.array([self._seed % 2**32, self._num_steps % 2**32], np.uint32)
        rates = self._mesh.global_arrays(state_sync.learning_rates(optimizer))
        local_inputs = self._mesh.per_rank_arrays(
            {"inputs": inputs, "random": self.jax.numpy.asarray(random)}
        )
        return self._state_sync.state, self._state_sync.local_state, rates, local_inputs

    def _inputs(self, batch: engines.Batch) -> list[Any]:
        from accbench.engines.jax import arrays

        inputs = []
        for tensor in (*nested.tensors_of(batch), *extra_inputs.tensors()):
            array = self._device_arrays.get(tensor)
            inputs.append(arrays.from_torch(tensor, self._mesh.device) if array is None else array)
        return inputs

    def run_score(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        if self._is_scored_on_host() or self._state_sync is None:
            return self._score_on_host(model, spec, batch)
        if self._evaluation is None:
            from accbench.engines.jax import evaluation

            self._evaluation = evaluation.CompiledEvaluation(
                self.precision.capture_autocast, self._rules
            )
        self._state_sync.sync_from_torch()
        is_averaged = isinstance(model, optimizer_state.AveragedModel)
        key = optimizer_state.AVERAGE if is_averaged else "parameters"
        weights = (
            self._state_sync.gather(key),
            [
                self._mesh.local_data(array, is_per_rank=True)
                for array in self._state_sync.local_state["buffers"]
            ],
        )
        net = model.net if is_averaged else model
        assert isinstance(net, nn.Module)
        score: torch.Tensor | None = self._evaluation.score(
            net, spec, batch, weights, self._inputs(batch)
        )
        return self._score_on_host(model, spec, batch) if score is None else score

    def _is_scored_on_host(self) -> bool:
        mode = self.options.evaluation
        is_shared = self.mesh.tp > 1 or self.mesh.cp > 1  # by collectives of the model's own
        return is_shared or mode == "eager" or (mode == "auto" and self.task.device == "cpu")

    def _score_on_host(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        self._sync_to_torch()
        with self.precision.host_autocast():
            score: torch.Tensor = spec.score(model, batch)
        return score

    def wait(self) -> None:
        if self._state_sync is not None:
            self._state_sync.wait()

    def _sync_to_torch(self) -> None:
        if self._state_sync is not None:
            self._state_sync.sync_to_torch()

    def gather_state(self) -> None:
        self._sync_to_torch()

    def training_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        self._sync_to_torch()
        if self._tensor_slices:
            return sharded_state.read_gathered(
                net, optimizer, self.precision.scaler, self._shards(net)
            )
        return super().training_state(net, optimizer)

    @property
    def reads_together(self) -> bool:
        return bool(self._tensor_slices)

    def saved_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        if not self._tensor_slices:
            return super().saved_state(net, optimizer)
        self._sync_to_torch()
        return sharded_state.read_to_gather(
            net, optimizer, self.precision.scaler, self._shards(net)
        )

    def _shards(self, net: nn.Module) -> dict[str, ParameterShard]:
        """Return this rank's parts of the parameters, which torch's tensors hold."""
        return {
            name: ParameterShard(
                parameter, parameter, slice(None), self._shard_groups, self._tensor_slices.get(name)
            )
            for name, parameter in net.named_parameters()
        }

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        self._sync_to_torch()  # what is not in it stays as it is
        if self._tensor_slices:
            scaler = self.precision.scaler
            sharded_state.load(net, optimizer, scaler, self._shards(net), saved)
            return
        super().load_training_state(net, optimizer, saved)

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        arrays = self.jax.tree.leaves((self._state_sync.state, self._state_sync.local_state))
        return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)

    def share_buffers(self, net: nn.Module) -> None:
        # From here on every rank has all in torch's tensors, and `run_score`, which ranks without a
        # batch do not call, gathers nothing from others.
        self._sync_to_torch()
        super().share_buffers(net)

    def applied_steps(self, optimizer: torch.optim.Optimizer) -> int:  # type: ignore[override]
        self._sync_to_torch()
        return engines.Engine.applied_steps(optimizer)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._seed, self._num_steps = seed, 0

    def rng_state(self) -> Tensors:
        numbers = [*self._seed.to_bytes(8, "little"), *self._num_steps.to_bytes(8, "little")]
        return {**super().rng_state(), "jax": torch.tensor(numbers, dtype=torch.uint8)}

    def load_rng_state(self, states: Tensors) -> None:
        super().load_rng_state(states)
        if "jax" in states:
            numbers = bytes(states["jax"].tolist())
            self._seed = int.from_bytes(numbers[:8], "little")
            self._num_steps = int.from_bytes(numbers[8:], "little")

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
        stats = self._mesh.device.memory_stats()
        if self._is_warm:  # no call of JAX's resets the peak
            return int(stats["bytes_in_use"]) + self._steps.scratch_bytes
        return int(stats["peak_bytes_in_use"])

    def reset_peak_memory(self) -> None:
        self._is_warm = True

    def _greetings_to_log(self) -> AbstractContextManager[object]:
        # gloo's, at the first collective, as those of torch's process group.
        if self.task.output_dir is None or self.topology.world_size == 1:
            return nullcontext()
        path = terminal.log_file(self.task.run_dir, self.topology.rank)
        return terminal.redirect_descriptors(path) if path.parent.exists() else nullcontext()

    def compile_stats(self) -> engines.CompileStats:
        stats = self._steps.stats
        return stats if self._evaluation is None else stats + self._evaluation.stats

    def close(self) -> None:
        from accbench.engines.jax import data_mesh

        self.wait()
        data_mesh.shutdown_distributed()


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_ON_CPU_ALONE = (
    "engine jax runs scripts and accbench.accelerate on a CPU alone, and elsewhere whole steps of "
    "accbench's own loop; use --engine inductor or xla, or --device cpu"
)
