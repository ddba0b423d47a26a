"""The baseline: eager PyTorch under DistributedDataParallel, as a careful user sets it up."""

import contextlib
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench import engines, models
from accbench.config import TaskConfig, devices_per_worker
from accbench.data import moving, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed import complex_parameters, mesh
from accbench.distributed.collectives import RankGroup
from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology, all_gather_values
from accbench.distributed.strategies.sharded_optimizer import ShardedOptimizer
from accbench.distributed.strategies.torch_strategy import ShardingStrategy, TorchStrategy
from accbench.engines import optimizers
from accbench.engines.common import (
    model_state,
    optimizer_state,
    sharded_state,
    staged_state,
    tied_parameters,
)
from accbench.engines.common.training_state import TrainingState
from accbench.engines.ddp import layouts, strategies
from accbench.engines.ddp.options import DdpOptions, TorchOptions, data_parallel_problem
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError
from accbench.recording import provenance
from accbench.recording.terminal import log


def peak_resident_bytes() -> int:
    """Return the process's peak resident size in bytes; getrusage counts KiB, on macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def allow_tf32(allowed: bool) -> None:
    """Let torch round float32 factors of products to TF32 on CUDA, or not.

    torch by itself does so for convolutions and not for matrix products.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    # Where torch.testing._internal was imported, attributes of the backends cannot be set.
    torch.backends.cudnn.set_flags(_allow_tf32=allowed)


# Data ranks and later steps have other seeds than these (`accbench.training.resume`).
_SEED_STRIDE = 15_485_863


class Engine(LoopEngine):
    """DDP over NCCL (CUDA) or gloo (CPU), autocast, a fused optimizer."""

    pins_batches = True

    Options = DdpOptions

    @classmethod
    def find_device(cls, requested: str) -> str:
        if requested != "auto":
            return requested
        return "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        if task.device == "tpu":
            return "engine ddp has no TPU support; use --engine xla or --device cpu"
        if task.device == "cuda":
            num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if num_devices == 0:
                return "PyTorch sees no CUDA device here; use --device cpu"
            if task.nproc_per_node > num_devices:
                return (
                    f"--nproc_per_node {task.nproc_per_node} is more than the "
                    f"{num_devices} CUDA devices here"
                )
        return data_parallel_problem(task)

    @classmethod
    def mesh_problem(cls, task: TaskConfig, shape: MeshShape) -> str | None:
        problem = mesh.offload_problem(task)
        if task.script is not None:
            problem = mesh.script_problem(task)
        if problem is not None:
            return problem
        options = task.options.get(task.engine)
        is_sharded = shape.shard > 1 or shape.pp > 1
        if is_sharded and options is not None and options.find_unused_parameters:
            return (
                f"--{task.engine}.find_unused_parameters is not for "
                f"{'--pp' if shape.pp > 1 else '--dp_shard'}, which needs every parameter's "
                "gradient on each worker; freeze those that are unused (requires_grad = False)"
            )
        return mesh.pipeline_problem(task, shape)

    @classmethod
    def class_shards_problem(cls, task: TaskConfig) -> str | None:
        if task.dp_shard is None and task.tp == task.cp == task.pp == 1:
            return None
        return (
            "--arcface.sample_rate shards the classes over all workers, and nothing else; leave "
            "--dp_shard, --tp, --cp and --pp out"
        )

    def __init__(self, task: TaskConfig, options: TorchOptions, topology: Topology) -> None:
        super().__init__(task, options, topology)
        self.device = torch.device("cpu")
        self._optimizer: torch.optim.Optimizer | None = None
        self._deferred: Any = None
        self._pipeline: Any = None
        self._owners: dict[str, int] = {}
        if task.device == "cuda":
            self.device = torch.device("cuda", topology.local_rank)
            torch.cuda.set_device(self.device)
            if task.script is None:  # whose own settings stay
                torch.backends.cudnn.set_flags(_benchmark=True)  # shapes do not change
                allow_tf32(task.tf32 == "on")
        self.precision.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.precision.needs_loss_scale
        )
        self._shards_classes = topology.world_size > 1 and models.shards_classes(task)
        self.strategy: TorchStrategy = strategies.build(
            task, self.mesh.of_gradients, topology, self.device, self._shards_classes,
            options.find_unused_parameters,
        )  # fmt: skip
        # Scripts have the numbers of the plain script, to the bit.
        may_be_last = task.script is None and not self.strategy.is_contiguous
        is_last = options.channels_last and may_be_last
        self.memory_format = torch.channels_last if is_last else torch.contiguous_format

    @property
    def _other_devices(self) -> list[torch.device]:
        """Devices of this worker besides its first (`--ddp.data_parallel`)."""
        numbers = range(1, devices_per_worker(self.task))
        return [torch.device("cuda", number) for number in numbers]

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return provenance.cpu_name()

    def deferred_build(self, build: Callable[[], nn.Module]) -> nn.Module | None:
        if not self.strategy.builds_in_parts:
            return None
        from accbench.engines.common import deferred_build

        deferred = deferred_build.record(build)
        is_possible = deferred is not None and not model_state.customises_state(deferred.model)
        if not all(possible for (possible,) in all_gather_values([float(is_possible)])):
            log.info(
                "each worker builds the whole model before it is sharded, as building this one "
                "looks at values"
            )
            return None
        self._deferred = deferred
        return None if deferred is None else deferred.model

    def prepare(self, model: nn.Module) -> nn.Module:
        if self._deferred is not None:
            return self._prepare_deferred(model, self._deferred)
        self._apply_tensor_parallelism(model)
        self._keep_own_stages(model)
        return self._use_channels_last(self._wrap(self._move_to_device(model)))

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in the form in which the ranks share it."""
        return self.strategy.wrap(model)

    def _apply_tensor_parallelism(self, model: nn.Module) -> None:
        """Cut the model's layers by its plan.

        Raises:
            RequestError: it has none, or does not fit it.
        """
        strategy = self.strategy
        if self._shards_classes and isinstance(strategy, ShardedOptimizer):
            self._shard_classes(model, strategy)
        if not isinstance(strategy, ShardingStrategy) or strategy.tp_group is None:
            return
        from accbench.engines.common import tensor_parallel

        group = RankGroup.of(strategy.tp_group)
        strategy.tensor_slices = tensor_parallel.parallelize_by_own_plan(
            model, group, self.task.model
        )
        if self.task.sequence_parallel:
            from accbench.engines.common import sequence_parallel

            strategy.of_sequence_parts = sequence_parallel.parallelize_by_own_plan(
                model, group, self.task.model, strategy.tensor_slices
            )

    def _shard_classes(self, model: nn.Module, strategy: ShardedOptimizer) -> None:
        """Have each rank keep a part of the classes of the model's head (PartialFC)."""
        assert dist.group.WORLD is not None
        for path, module in [*model.named_modules()]:
            if hasattr(module, "shard_classes"):
                key, part = module.shard_classes(RankGroup.of(dist.group.WORLD))
                name = f"{path}.{key}" if path else key
                strategy.class_slices = {**strategy.class_slices, name: part}

    def _keep_own_stages(self, model: nn.Module) -> None:
        """Leave this rank its stages of the model.

        Raises:
            RequestError: the model has no plan for that, or does not fit it.
        """
        if self.mesh.pp == 1:
            return
        from accbench.engines.common import pipeline_stages
        from accbench.engines.common.pipeline import Pipeline

        strategy: Any = self.strategy
        holder = model_state.first_with_extra_state(model)
        if holder is not None:
            raise RequestError(
                f"--pp: the model's {holder or 'root'} has state of its own (get_extra_state), "
                "which stages do not share; leave --pp out"
            )
        staged = pipeline_stages.cut(
            model, self.task.model, strategy.num_stages, strategy.own_stages, self.device
        )
        strategy.take_stages(staged.blocks, staged.shared)
        own = {name for name, _ in model.named_parameters()}
        strategy.tensor_slices = {n: s for n, s in strategy.tensor_slices.items() if n in own}
        self._owners = {name: stage % self.mesh.pp for name, stage in staged.owners.items()}
        self._pipeline = Pipeline(
            model, staged, strategy.own_stages, strategy.pp_group, self.device,
            self.task.pp_schedule or "1f1b", self.task.accumulate,
        )  # fmt: skip

    def _prepare_deferred(self, model: nn.Module, deferred: Any) -> nn.Module:
        """Shard a model without weights, and fill it; no rank has more than one tensor whole."""
        from accbench.engines.common import deferred_build

        strategy: Any = self.strategy
        tensors = deferred_build.replace(model, deferred_build.without_content)
        self._apply_tensor_parallelism(model)
        self._keep_own_stages(model)
        wrapped = self._wrap(model)
        fakes = {name: fake for name, (fake, _) in tensors.items()}
        rank = self.topology.rank
        for name, whole in deferred_build.broadcast_values(deferred, fakes, rank):
            if isinstance(tensors[name][1], nn.Parameter):
                strategy.set_whole(model, name, whole)
            else:
                tensors[name][1].copy_(whole)
        if self._pipeline is not None:
            self._move_to_device(model)  # buffers; other strategies have moved them
        strategy.find_shards(model)
        self._deferred = None
        return wrapped

    def _use_channels_last(self, net: nn.Module) -> nn.Module:
        """Keep a network in channels_last, or contiguous if its first call needs that."""

        def fall_back_to_contiguous() -> None:
            self.memory_format = torch.contiguous_format
            layouts.make_contiguous(net, self._optimizer)
            self._reset_compiled_code()
            self.strategy.rebuild(net)  # which has gradients laid out as they were
            if self.topology.rank == 0:
                log.info(
                    "the model views what is not contiguous in channels_last, so that all stays "
                    f"NCHW, as with --{self.task.engine}.no-channels_last; x.flatten(1) in place "
                    "of x.view(len(x), -1) would not mind"
                )

        if self.memory_format is torch.channels_last:
            layouts.watch_first_call(net, fall_back_to_contiguous)
        return net

    def _move_to_device(self, model: nn.Module) -> nn.Module:
        ties = tied_parameters.find_ties(model)
        model = model.to(self.device)
        tied_parameters.restore_ties(ties)  # a move makes one buffer for each slot
        for tensor in (*model.parameters(), *model.buffers()):
            # Module.to takes tensors of five dimensions for images too, and fails.
            is_image = tensor.dim() == 4 and not tensor.is_complex()
            if is_image and self.task.script is None:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)
        return model

    def _reset_compiled_code(self) -> None:
        """Forget code that was compiled for parameters in channels_last."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        entry = optimizers.of_task(self.task)
        fused = {"fused": True} if entry.has_fused else {}
        optimizer = complex_parameters.build_optimizer(
            entry.torch_class,
            self.strategy.stepped_groups(optimizer_state.groups(self.task, model)),
            **entry.arguments(self.task), **fused,
        )  # fmt: skip
        optimizer_state.make_state(self.task, optimizer, torch.zeros_like, torch.clone)
        if not entry.counts_steps:
            optimizer_state.count_steps(optimizer)
        self._optimizer = optimizer
        return optimizer

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """See the base class."""
        self._optimizer = optimizer

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        def send(tensor: torch.Tensor) -> torch.Tensor:
            # In a loop of their own people view what they have made.
            if tensor.dim() == 4 and self.task.script is None:
                return tensor.to(self.device, non_blocking=True, memory_format=self.memory_format)
            return tensor.to(self.device, non_blocking=True)

        return moving.moved(batch, self.device, lambda tensors: [*map(send, tensors)])

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE,
            device=self.device, to_device=self.to_device,
        )  # fmt: skip

    def calling(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See the base class."""
        self.strategy.before_call(model)
        evaluates = self.strategy.shards_parameters and not torch.is_grad_enabled()
        return self._evaluating(model) if evaluates else self.autocast()

    @contextlib.contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        """Autocast, and release behind the call what no backward pass will release."""
        with self.autocast():
            yield
        self.strategy.after_evaluation(model)

    def reduce_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See the base class."""
        self.strategy.reduce_after_loop(model, optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self.precision.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def compute_gradients(
        self, model: nn.Module, spec: Any, parts: list[engines.Batch]
    ) -> torch.Tensor:
        if self._pipeline is None:
            return super().compute_gradients(model, spec, parts)
        loss: torch.Tensor = self._pipeline.step(
            lambda part: self._loss_of_part(model, spec, part, len(parts)), parts
        )
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        # DDP averages the gradients in here.
        self.precision.scaled(loss).backward(retain_graph=retain_graph)

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See the base class."""
        return self.strategy.without_reduction(model)

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.strategy.reduce_after_step(optimizer)
        with complex_parameters.as_real(optimizer):
            self._apply_gradients(optimizer)
        self.strategy.after_update()

    def _apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        precision = self.precision
        if precision.skips_nonfinite:
            precision.find_nonfinite(optimizer)
            self.strategy.share_overflow([precision.found_inf])
            if not precision.has_loss_scale:  # or it tells the optimizer, in these two
                optimizer.grad_scale, optimizer.found_inf = None, precision.found_inf  # type: ignore[attr-defined]
        if self.task.clip_norm is not None or self.strategy.shards:
            self.strategy.share_overflow(precision.unscale_and_look(optimizer))
        self.clip(optimizer)
        # A fused optimizer unscales and skips on overflow by a tensor, so nothing waits.
        if not (self._waits_to_skip() and precision.found_inf):
            precision.scaler.step(optimizer)
        precision.scaler.update()

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """See the base class."""
        if self.task.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.strategy.clip(parameters, self.task.clip_norm)

    def _waits_to_skip(self) -> bool:
        """Return whether the host skips a step, because the optimizer does not by a tensor."""
        skips = self.precision.skips_nonfinite and not self.precision.has_loss_scale
        return skips and not optimizers.of_task(self.task).has_fused

    def output_for_loop(self, nest: Any) -> Any:
        """See the base class."""
        return layouts.contiguous(nest) if self.memory_format is torch.channels_last else nest

    def run_score(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        if self._pipeline is not None:
            score: torch.Tensor = self._pipeline.forward(
                lambda part: super(Engine, self).run_score(model, spec, part), batch, (4,)
            )
            return score
        score = super().run_score(model, spec, batch)
        self.strategy.after_evaluation(model)
        return score

    @property
    def evaluates_together(self) -> bool:
        # `ShardedAverages` gathers what other ranks have averaged.
        gathers_averages = bool(self.task.ema_decay) and self.mesh.shard > 1
        waits = self.strategy.shards_parameters or self._shards_classes or gathers_averages
        return super().evaluates_together or waits

    def averaged_model(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        if not self.strategy.shards:
            return super().averaged_model(net, optimizer)
        return sharded_state.ShardedAverages(net, optimizer, self.strategy)

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        num_bytes = super().state_bytes(optimizer) or 0
        has_wholes = isinstance(self.strategy, ShardedOptimizer)  # beside what it steps with
        for shard in self.strategy.shards.values():
            in_parameter = shard.parameter if has_wholes else shard.in_parameter
            is_copy = shard.resident is not None
            num_bytes += in_parameter.nbytes - (0 if is_copy else shard.local.nbytes)
        return num_bytes

    def offloaded_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return 0 if self.task.offload == "none" else super().state_bytes(optimizer) or 0

    @property
    def reads_together(self) -> bool:
        return bool(self.strategy.shards)

    def training_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        strategy = self.strategy
        if not isinstance(strategy, ShardingStrategy):
            return super().training_state(net, optimizer)
        read = sharded_state.read_gathered(net, optimizer, self.precision.scaler, strategy.shards)
        return read if self._pipeline is None else staged_state.shared(self._of_all_stages(read))

    def saved_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        strategy = self.strategy
        if not isinstance(strategy, ShardingStrategy):
            return super().saved_state(net, optimizer)
        read = sharded_state.read_to_gather(net, optimizer, self.precision.scaler, strategy.shards)
        return read if self._pipeline is None else self._of_all_stages(read)

    def _of_all_stages(self, read: TrainingState) -> TrainingState:
        strategy: Any = self.strategy
        return staged_state.merged(read, self._owners, strategy.pp_group, self.device)

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        if not self.strategy.shards:
            super().load_training_state(net, optimizer, saved)
            return
        if self._pipeline is not None:
            saved = staged_state.own_part(saved, net, self._owners)
        sharded_state.load(net, optimizer, self.precision.scaler, self.strategy.shards, saved)

    def seed(self, seed: int) -> None:
        stage = self.mesh.coordinates(self.topology.rank)["pp"]
        super().seed(seed + _SEED_STRIDE * stage)  # or all stages' blocks would have the same masks
        for index, device in enumerate(self._other_devices, start=1):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed + index)  # torch has given it the seed of the first

    def share_buffers(self, net: nn.Module) -> None:
        if self._pipeline is None:
            super().share_buffers(net)
            return
        for buffer in model_state.saved_buffers(net):
            self.strategy.broadcast_in_stage(buffer)  # type: ignore[attr-defined]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            for device in (self.device, *self._other_devices):
                torch.cuda.reset_peak_memory_stats(device)

    def peak_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            devices = (self.device, *self._other_devices)
            return max(map(torch.cuda.max_memory_allocated, devices))
        return peak_resident_bytes()
