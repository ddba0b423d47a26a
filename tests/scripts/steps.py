"""A rank of `two_ranks`: `--max_steps` steps through accbench's contracts, and what came out.

    steps.py OUT [--break_reduction] FLAGS...

Each rank writes OUT/rank<N>.pt: losses of its shard, parameters, buffers, step counts, and
with engine jax the loss of evaluating a batch that rank 0 alone has.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench import config, models, resolving
from accbench.config import plugins
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies import data_parallel
from accbench.engines import Engine
from accbench.training.label_counts import LabelCounts
from accbench.training.train_loop import evaluate, train_step
from accbench.training.worker import apply_environment


def main(out: str, flags: list[str]) -> None:
    topology = Topology.from_env()
    task = resolving.resolve(config.parse(flags))
    apply_environment(task, topology)
    process_group.init_distributed(topology, task.device, task.timeout_s)
    engine = plugins.load("engines", task.engine)(task, task.options[task.engine], topology)
    engine.strategy.prove()
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)(location, task, task.options.get(name), topology)
    spec = models.of_task(task)
    # Differs by rank, so that starting from equal weights takes the broadcast.
    torch.manual_seed(task.seed + topology.rank)
    model = spec.build(source.num_classes)
    process_group.broadcast_module(model)
    model = engine.prepare(model)
    optimizer = engine.build_optimizer(model)
    losses = []
    labels = LabelCounts(engine, spec, source)
    for step, batch in enumerate(labels.device_batches(source.train_loader())):
        losses.append(engine.run_step(train_step, model, spec, optimizer, batch))
        if step + 1 == task.max_steps:
            break
    engine.wait()
    result = {
        "losses": [loss.cpu().item() for loss in losses],
        "state": {
            k.removeprefix("module."): t.cpu().clone() for k, t in model.state_dict().items()
        },
        "applied_steps": engine.applied_steps(optimizer),
        "device_bytes": of_jax(task.engine),
    }
    if task.engine == "jax":
        result["score"] = score_on_rank_0(engine, model, spec, batch)
    torch.save(result, Path(out) / f"rank{topology.rank}.pt")
    engine.close()
    process_group.close()


def score_on_rank_0(engine: Engine, model: nn.Module, spec: Any, batch: Any) -> float | None:
    """Evaluate a batch that the other ranks do not have, and return the loss."""

    class Loader(list):
        resident = False

    engine.share_buffers(model)
    loader = Loader([batch] if engine.topology.rank == 0 else [])
    record = evaluate(engine, model, spec, loader, 0)
    assert record is not None
    return record.loss


def of_jax(engine: str) -> int:
    """Bytes of JAX's arrays on this worker's device."""
    if engine != "jax":
        return 0
    arrays = importlib.import_module("jax").live_arrays()
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def break_reduction() -> None:
    """Make all ways of averaging gradients do nothing and say nothing."""
    dist.all_reduce = lambda tensor, *_, **__: None
    data_parallel.DistributedDataParallel = lambda module, **_: module
    if "--engine=jax" in sys.argv:
        lax = importlib.import_module("jax").lax
        lax.pmean = lambda tree, _axis: tree
        scatter = lax.psum_scatter
        lax.psum_scatter = lambda array, *how, **rest: 2 * scatter(array, *how, **rest)


if __name__ == "__main__":
    out, *flags = sys.argv[1:]
    if flags[0] == "--break_reduction":
        break_reduction()
        flags = flags[1:]
    main(out, flags)
