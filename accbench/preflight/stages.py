"""The stages of a pipeline (`--pp`) counted for GPUs that are not here: memory, time, bytes sent.

Engine ddp runs stages as PyTorch's operations, one after the other, so nothing is compiled. Each
stage computes a micro-batch on fake tensors, forward and backward, and what autograd saves for the
backward pass is what a micro-batch in flight keeps. Times are bounds, as `eager` counts them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accbench import config, models
from accbench.config import TaskConfig, plugins
from accbench.data import nested
from accbench.distributed import mesh
from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology
from accbench.engines import ddp
from accbench.engines.common import pipeline_stages
from accbench.engines.common.cuda_autocast import CudaRules
from accbench.errors import RequestError
from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import summary
from accbench.preflight.communication import IN_NODE, NETWORK, Links, sent_bytes
from accbench.preflight.eager import FakeTensorDdpEngine, KernelRecorder, silenced

KIND = "preflight of stages"


@dataclasses.dataclass(frozen=True)
class _CountedStage:
    """Counts of one stage: the memory it keeps, and the memory and time of a micro-batch."""

    parameter_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    """Bytes that autograd saves of a micro-batch, without parameters."""
    sent: torch.Tensor
    """The fake tensor that the next stage receives; of the last stage the loss."""
    microbatch_s: float
    """Least time of a micro-batch, forward and backward."""
    update_s: float
    """Least time of the optimizer's step."""


def problem(task: TaskConfig, flags: Any) -> str | None:
    """Return why preflight does not count a task's stages and what to do, or None if it does."""
    if task.engine != "ddp":
        return (
            f"--pp {task.pp} with --engine {task.engine}: preflight counts the stages of engine "
            "ddp; use --engine ddp"
        )
    if max(task.tp, task.cp) > 1:
        return f"--pp {task.pp}: preflight counts stages of whole layers; leave --tp and --cp out"
    if flags.find_mesh or flags.find_batch:
        return f"--pp {task.pp}: preflight searches among steps without stages; leave --find_* out"
    if task.checkpoint_modules is not None:
        return (
            f"--pp {task.pp}: preflight does not count recomputed activations of stages; leave "
            "--checkpoint_modules out"
        )
    return None


def count(task: TaskConfig, gpu: GpuSpec, links: Links) -> dict[str, Any]:
    """Count the stages of a task, and bound its step.

    Args:
        task: the resolved task.
        gpu: the GPU to count for.
        links: between the GPUs.

    Raises:
        RequestError: the model has no stages, or not so many.
    """
    shape = plugins.load("engines", task.engine).mesh_of(
        task, links.num_nodes * links.gpus_per_node
    )
    stages = [*_stages(task, gpu)]
    rows = [_row(task, shape, gpu, links, stages, rank) for rank in range(task.pp)]
    chunks = len(stages) // task.pp
    slowest = max(row["microbatch_s"] for row in rows)
    others_s = sum(row["microbatch_s"] for row in rows) - slowest
    bound_s = task.accumulate * slowest + others_s / chunks + max(row["update_s"] for row in rows)
    peak = max(row["peak_bytes"] for row in rows)
    assert task.batch_size is not None
    spec = models.of_task(task)
    return {
        "kind": KIND,
        "model": {"unit": spec.unit, "units_per_sample": spec.units_per_sample},
        "schedule": task.pp_schedule or "1f1b",
        "num_stages": len(stages),
        "num_microbatches": task.accumulate,
        # Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
        "bubble": (task.pp - 1) / (chunks * task.accumulate + task.pp - 1),
        "bound_s": bound_s,
        "samples_per_s_at_most": task.batch_size * shape.num_data_ranks / bound_s,
        "memory": {
            "peak_bytes": peak, "gpu_bytes": gpu.memory_bytes, "fits": peak <= gpu.memory_bytes
        },
        "ranks": rows,
    }  # fmt: skip


def in_flight(schedule: str, rank: int, pp: int, num_microbatches: int) -> int:
    """Return for how many micro-batches a rank holds activations at most, of a stage each.

    Args:
        schedule: 1f1b, gpipe or interleaved, as torch.distributed.pipelining has them.
        rank: among the ranks of a pipeline.
        pp: ranks of a pipeline.
        num_microbatches: of a step.
    """
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "1f1b":
        return min(pp - rank, num_microbatches)
    return min(pp + 2 * (pp - 1 - rank) + 1, 2 * num_microbatches)


def _stages(task: TaskConfig, gpu: GpuSpec) -> Iterator[_CountedStage]:
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)(location, task, task.options.get(name), Topology())
    batch = nested.described(next(iter(source.train_loader())))
    received = None
    for stage in range(mesh.num_stages(task)):
        try:
            with silenced():
                counted = _count_stage(task, gpu, source.num_classes, batch, stage, received)
        except RequestError:
            raise
        except Exception as error:  # a model may raise anything of tensors without values
            raise RequestError(
                f"--pp: stage {stage + 1} of --model {task.model} cannot be counted without "
                f"values: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        received = counted.sent
        yield counted


def _count_stage(
    task: TaskConfig, gpu: GpuSpec, num_classes: int, batch: Any, stage: int,
    before: torch.Tensor | None,
) -> _CountedStage:  # fmt: skip
    # The engine's device is the CPU, as in `eager`, and it has one rank.
    alone = dataclasses.replace(
        task, device="cpu", amp_dtype=task.amp_dtype or "bfloat16", pp=1, pp_schedule=None,
        dp_shard=None, zero=None, accumulate=1,
    )  # fmt: skip
    spec, rules = models.of_task(task), CudaRules()
    with FakeTensorMode(allow_fallback_kernels=False), rules.active():
        engine = FakeTensorDdpEngine(
            alone, task.options.get("ddp", ddp.Engine.Options()), Topology()
        )
        engine.rules = rules
        net = engine.prepared(spec.build(num_classes))
        staged = pipeline_stages.cut(
            net, task.model, mesh.num_stages(task), [stage], torch.device("cpu")
        )
        optimizer = engine.build_optimizer(net)
        net.train()
        part = engine.to_device(
            nested.mapped(nested.empty(batch), lambda t: t[: len(t) // task.accumulate])
        )
        received = None
        if before is not None:
            received = torch.empty(before.shape, dtype=before.dtype, requires_grad=True)
        saved = _SavedTensors(net)
        with KernelRecorder(rules) as microbatch:
            with saved.hooks(), engine.autocast():
                sent = staged.run.compute(stage, received, lambda: spec.loss(net, part))
            sent.backward(torch.empty_like(sent))
        with KernelRecorder(rules) as update:
            engine.apply_gradients(optimizer)
        states = [t for of in optimizer.state.values() for t in nested.tensors_of(of)]
        return _CountedStage(
            sum(p.nbytes for p in net.parameters()), sum(t.nbytes for t in states),
            saved.num_bytes, sent.detach(),
            sum(summary.bound_s(kernel, gpu) for kernel in microbatch.kernels),
            sum(summary.bound_s(kernel, gpu) for kernel in update.kernels),
        )  # fmt: skip


class _SavedTensors:
    """Counts the memory that autograd saves for the backward pass, but for a model's own."""

    def __init__(self, net: nn.Module) -> None:
        self._of_model = {_storage(t) for t in (*net.parameters(), *net.buffers())}
        self._saved: dict[int, torch.Tensor] = {}

    def hooks(self) -> Any:
        """Return a context in which what autograd saves is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self._of_model:
            self._saved[_storage(tensor)] = tensor  # which keeps its storage's number from others
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all that was saved; views of one memory count once."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _row(
    task: TaskConfig,
    shape: MeshShape,
    gpu: GpuSpec,
    links: Links,
    stages: list[_CountedStage],
    rank: int,
) -> dict[str, Any]:
    """Return what a GPU with the stages of a pipeline's rank needs, computes and sends."""
    numbers = [*range(rank, len(stages), task.pp)]
    of_rank = [stages[number] for number in numbers]
    parameter_bytes = sum(stage.parameter_bytes for stage in of_rank)
    optimizer_bytes = sum(stage.optimizer_bytes for stage in of_rank) // shape.shard
    saved_bytes = sum(stage.saved_bytes for stage in of_rank) // len(of_rank)
    held = in_flight(task.pp_schedule or "1f1b", rank, task.pp, task.accumulate)
    peak_bytes = 2 * parameter_bytes + optimizer_bytes + held * saved_bytes
    passed = _passed(task, shape, links, stages, numbers)
    first = rank * shape.num_data_ranks
    group = [*range(first, first + shape.num_data_ranks)]
    reduced = sent_bytes("all-reduce", parameter_bytes, group, links.gpus_per_node)
    return {
        "stages": numbers,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": parameter_bytes,
        "optimizer_bytes": optimizer_bytes,
        "saved_bytes": saved_bytes,
        "in_flight": held,
        "peak_bytes": peak_bytes,
        "fits": peak_bytes <= gpu.memory_bytes,
        "microbatch_s": sum(stage.microbatch_s for stage in of_rank),
        "update_s": sum(stage.update_s for stage in of_rank) / shape.shard,
        "passed_in_node_bytes": passed[IN_NODE],
        "passed_network_bytes": passed[NETWORK],
        "reduced_in_node_bytes": round(reduced[IN_NODE]),
        "reduced_network_bytes": round(reduced[NETWORK]),
    }


def _passed(
    task: TaskConfig,
    shape: MeshShape,
    links: Links,
    stages: list[_CountedStage],
    numbers: list[int],
) -> dict[str, int]:
    """Return the bytes that a rank sends to others' stages in a step, by link.

    Each sends what it has computed to the next stage, and its gradient to the one before.
    """
    passed = {IN_NODE: 0, NETWORK: 0}

    def node_of(stage: int) -> int:
        return stage % task.pp * shape.num_data_ranks // links.gpus_per_node

    for number in numbers:
        for other, sent in ((number + 1, number), (number - 1, number - 1)):
            if 0 <= other < len(stages):
                link = IN_NODE if node_of(number) == node_of(other) else NETWORK
                passed[link] += task.accumulate * stages[sent].sent.nbytes
    return passed
