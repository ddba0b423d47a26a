"""Search for the meshes on which a step fits, and which of them bounds it least.

A mesh is how GPUs share a step: `--dp_shard`, `--tp`, and `--cp` with either `--cp_attention`. All
meshes take as many samples a step. Each is estimated from those that were compiled; the most
promising are compiled in turn. Estimates are arithmetic on the model's shapes:

- The state is exact: parameters and what the optimizer keeps of each, over the GPUs that share it.
- A step's temporaries are the whole float32 weights that `--tp` leaves, gathered or as gradients,
  or half of them where each layer's are gathered by themselves, and activations, as many as on the
  compiled mesh with the nearest `--tp`.
- Kernels take as long as there, and links what their bytes take, of which as much is hidden.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accbench import models
from accbench.config import TaskConfig
from accbench.distributed.collectives import RankGroup
from accbench.distributed.context_parallel import share_sequences
from accbench.distributed.mesh import sequence_problem
from accbench.distributed.tensor_slices import TensorSlice
from accbench.engines import optimizers
from accbench.engines.common import tensor_parallel
from accbench.engines.jax.options import JaxOptions
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.preflight.communication import Links, sent_bytes

_FLOAT32_BYTES, _ACTIVATION_BYTES = 4, 2
# The part of the weights that is whole at a time where each layer's are gathered by themselves:
# 0.44 of llama_1b's, 0.58 of llama_8b's, 0.53 of llama_70b's
# (docs/results/2026-11-27-preflight-meshes.md).
_LATE_SHARE = 0.5
# Products of a layer's weights with a token: forward, and for two gradients.
_FLOPS_PER_WEIGHT = 6


@dataclasses.dataclass(frozen=True)
class CandidateMesh:
    """A mesh, and what it makes of the step by arithmetic."""

    is_sharded: bool
    tp: int
    cp: int
    cp_attention: Literal["ulysses", "ring"]
    batch_size: int
    """Samples of the GPUs that share a batch."""
    state_bytes: int
    """Bytes that a GPU keeps between steps."""
    weight_bytes: int
    """Bytes of float32 weights, or their gradients, that are whole on a GPU at a time."""
    link_s: float
    """Seconds that its bytes take at the links' full rate."""

    def task(self, task: TaskConfig) -> TaskConfig:
        """Return the task on this mesh."""
        return dataclasses.replace(
            task, dp_shard="auto" if self.is_sharded else None, tp=self.tp, cp=self.cp,
            cp_attention=self.cp_attention,
            zero=task.zero if self.is_sharded else None, batch_size=self.batch_size,
            sequence_parallel=task.sequence_parallel and self.tp > 1,
        )  # fmt: skip

    def is_of(self, task: TaskConfig) -> bool:
        """Return whether it is the mesh of a task."""
        return (self.is_sharded, self.tp, self.cp, self.cp_attention) == (
            task.dp_shard is not None, task.tp, task.cp, task.cp_attention,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The flags that ask for it."""
        words = ["--dp_shard auto"] if self.is_sharded else []
        words += [f"--{k} {n}" for k, n in (("tp", self.tp), ("cp", self.cp)) if n > 1]
        words += ["--cp_attention ring"] if self.cp_attention == "ring" else []
        return " ".join(words) or "replicas"


def candidates(
    task: TaskConfig, links: Links, num_classes: int, flops: float
) -> tuple[list[CandidateMesh], list[str]]:
    """Return the meshes that the model and the batch allow, and why others do not.

    Ranks that share layers or sequences are within a node.

    Args:
        task: the resolved task, whose mesh and batch size tell the samples of a step.
        links: between its GPUs.
        num_classes: number of classes, or vocabulary size.
        flops: floating-point operations of one GPU's step.
    """
    num_gpus = links.num_nodes * links.gpus_per_node
    assert task.batch_size is not None
    num_samples = task.batch_size * num_gpus // (task.tp * task.cp)
    found: list[CandidateMesh] = []
    refusals = []
    for tp in _divisors(links.gpus_per_node):
        for cp in _divisors(links.gpus_per_node // tp):
            num_data_ranks = num_gpus // (tp * cp)
            if num_samples % (num_data_ranks * task.accumulate):
                refusals.append(
                    f"tp {tp}, cp {cp}: {num_samples:,} samples a step are no multiple of "
                    f"{num_data_ranks} GPUs with data of their own"
                )
                continue
            for attention in ("ulysses", "ring") if cp > 1 else ("ulysses",):
                asked = dataclasses.replace(task, tp=tp, cp=cp, cp_attention=attention)
                try:
                    found += _of_shape(asked, links, num_classes, flops, num_samples)
                except RequestError as error:
                    refusals.append(f"tp {tp}, cp {cp}: {error}")
    return found, refusals


def _of_shape(
    task: TaskConfig, links: Links, num_classes: int, flops: float, num_samples: int
) -> Iterator[CandidateMesh]:
    """Yield the mesh of a task's `--tp` and `--cp`, with and without shards."""
    num_gpus, tp, cp = links.num_nodes * links.gpus_per_node, task.tp, task.cp
    num_whole, net, slices = _cut_model(task, num_classes)
    weight_bytes = _FLOAT32_BYTES * sum(p.numel() for p in net.parameters())
    options = task.options.get("jax", JaxOptions())
    copies = 1 + len(optimizers.of_task(task).state_keys) + (task.ema_decay > 0)
    # Those of the GPUs that share them; attention's products count as if they were weights'.
    num_tokens = flops * num_gpus / (_FLOPS_PER_WEIGHT * num_whole) / (num_gpus // tp)
    activations_s = _activation_s(task, net, slices, links, num_tokens)
    token_ranks = [*range(0, num_gpus, tp)]
    for is_sharded in (True, False):
        if is_sharded and num_gpus == tp * cp:
            continue
        shards = len(token_ranks) if is_sharded else 1
        # Gathered once and scattered once, which together are an all-reduce.
        sent = sent_bytes("all-reduce", weight_bytes, token_ranks, links.gpus_per_node)
        weights_s = max(links.seconds(sent).values(), default=0.0)
        is_late = is_sharded and options.gathers_late("cuda", weight_bytes)
        yield CandidateMesh(
            is_sharded, tp, cp, task.cp_attention, num_samples * tp * cp // num_gpus,
            copies * weight_bytes // shards, int(weight_bytes * (_LATE_SHARE if is_late else 1)),
            weights_s + activations_s,
        )  # fmt: skip


def _cut_model(task: TaskConfig, num_classes: int) -> tuple[int, nn.Module, dict[str, TensorSlice]]:
    """Return the number of the model's weights, the model cut for a rank, and its slices."""
    spec, tp, cp = models.of_task(task), task.tp, task.cp
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = trainable.plain(spec.build(num_classes))
        num_whole = sum(p.numel() for p in net.parameters())
        if cp > 1:
            share_sequences(task, spec, net, RankGroup("", 0, cp), tp)
        if tp == 1:
            return num_whole, net, {}
        problem = sequence_problem(task, getattr(spec, "sequence_length", None))
        if problem is not None:
            raise RequestError(problem)
        group = RankGroup("", 0, tp)
        return num_whole, net, tensor_parallel.parallelize_by_own_plan(net, group, task.model)


def _activation_s(
    task: TaskConfig, net: nn.Module, slices: dict[str, TensorSlice], links: Links,
    num_tokens: float,
) -> float:  # fmt: skip
    """Return what activations take between ranks that share layers or sequences, in one step."""
    widths: dict[str, int] = {}
    for name, part in slices.items():
        if len(part.shape) == 2:
            layer = name.rpartition(".")[0]
            # Gradients of layers that are cut by outputs are summed once for all in a module.
            key = layer.rpartition(".")[0] if part.axis == 0 else layer
            widths[key] = part.shape[1 - part.axis]
    reduced = sum(widths.values()) * num_tokens * _ACTIVATION_BYTES
    sent = [sent_bytes("all-reduce", reduced, range(task.tp), links.gpus_per_node)]
    config: Any = next((m.config for m in net.modules() if hasattr(m, "config")), None)
    if task.cp > 1 and config is not None:
        group = [*range(0, task.tp * task.cp, task.tp)]
        of_layer = _attention_bytes(task, config, group, links)
        times = config.num_hidden_layers * num_tokens / task.tp
        sent.append({link: times * num_bytes for link, num_bytes in of_layer.items()})
    return sum(max(links.seconds(s).values(), default=0.0) for s in sent)


def _attention_bytes(
    task: TaskConfig, config: Any, group: Sequence[int], links: Links
) -> dict[str, float]:
    """Return what one attention sends of each token that a rank has, forward and backward."""
    if task.cp_attention == "ulysses":
        # Query, key, value and result, and their gradients.
        exchanged = 8 * config.hidden_size * _ACTIVATION_BYTES
        return sent_bytes("all-to-all", exchanged, group, links.gpus_per_node)
    num_heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    of_keys = 2 * width * getattr(config, "num_key_value_heads", num_heads)  # and of values
    # Keys and values visit the other ranks in both passes, and their gradients return as well.
    passed_on = 2 * (len(group) - 1) * _ACTIVATION_BYTES + len(group) * _FLOAT32_BYTES
    pair = group[:2]
    return sent_bytes("collective-permute", of_keys * passed_on, pair, links.gpus_per_node)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def search(
    meshes: list[CandidateMesh], compile_mesh: Callable[[CandidateMesh], dict[str, Any]],
    known: dict[CandidateMesh, dict[str, Any]], memory_bytes: int, tries: int,
) -> dict[str, Any]:  # fmt: skip
    """Compile the most promising meshes, and rank all of them.

    Args:
        meshes: from `candidates`.
        compile_mesh: returns the result of a preflight on a mesh; raises RequestError.
        known: results that are there.
        memory_bytes: of a GPU.
        tries: how many more to compile.

    Returns:
        `meshes`, those that fit first and then by their bounds, and `failed`, what could not be
        compiled and why.
    """
    rows = {mesh: _compiled_row(mesh, result) for mesh, result in known.items()}
    failed: list[str] = []
    tried = set(rows)
    for _ in range(tries):
        left = [mesh for mesh in meshes if mesh not in tried]
        estimates = {mesh: _estimated_row(mesh, rows, memory_bytes) for mesh in left}
        if not left:
            break
        mesh = min(left, key=lambda mesh: _rank(estimates[mesh]))
        best = min((_rank(row) for row in rows.values()), default=None)
        if best is not None and _rank(estimates[mesh]) > best and best[0] is False:
            break  # nothing that is estimated is better than what is compiled and fits
        tried.add(mesh)
        try:
            rows[mesh] = _compiled_row(mesh, compile_mesh(mesh))
        except RequestError as error:
            failed.append(f"{mesh.name}: {error}")
    for mesh in meshes:
        if mesh not in tried:
            rows[mesh] = _estimated_row(mesh, rows, memory_bytes)
    return {"meshes": sorted(rows.values(), key=_rank), "failed": failed}


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
    return not row["fits"], row["bound_s"] if row["fits"] else row["peak_bytes"]


def _row(mesh: CandidateMesh, how: str, **figures: Any) -> dict[str, Any]:
    return {
        "name": mesh.name, "dp_shard": "auto" if mesh.is_sharded else None, "tp": mesh.tp,
        "cp": mesh.cp, "cp_attention": mesh.cp_attention, "batch_size": mesh.batch_size,
        "how": how, **figures,
    }  # fmt: skip


def _compiled_row(mesh: CandidateMesh, result: dict[str, Any]) -> dict[str, Any]:
    memory, communication = result["memory"], result["communication"]
    return _row(
        mesh, "compiled", state_bytes=mesh.state_bytes,
        temporaries_bytes=memory["temporaries_bytes"], peak_bytes=memory["peak_bytes"],
        fits=memory["fits"], bound_s=communication["bound_s"], compute_s=result["step"]["bound_s"],
        link_s=communication["link_s"], overlapped=communication["overlapped"],
        weight_bytes=mesh.weight_bytes,
    )  # fmt: skip


def _estimated_row(
    mesh: CandidateMesh, rows: dict[CandidateMesh, dict[str, Any]], memory_bytes: int
) -> dict[str, Any]:
    compiled = [row for row in rows.values() if row["how"] == "compiled"]
    nearest = min(compiled, key=lambda row: abs(math.log(row["tp"] / mesh.tp)))
    activations = max(0, nearest["temporaries_bytes"] - nearest["weight_bytes"])
    temporaries = activations + mesh.weight_bytes
    peak = mesh.state_bytes + temporaries
    return _row(
        mesh, "estimated", state_bytes=mesh.state_bytes, temporaries_bytes=temporaries,
        peak_bytes=peak, fits=peak <= memory_bytes, link_s=mesh.link_s,
        bound_s=nearest["compute_s"] + mesh.link_s * (1 - nearest["overlapped"]),
        compute_s=nearest["compute_s"], overlapped=nearest["overlapped"],
        weight_bytes=mesh.weight_bytes,
    )  # fmt: skip
