"""A tracing process of `accbench preflight`, whatever the engine: a task in, a program out."""

import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import config, models, resolving
from accbench.config import TaskConfig, plugins
from accbench.data import nested
from accbench.distributed import context_parallel, mesh
from accbench.distributed.collectives import RankGroup
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.engines.common import source_location
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.preflight.tracing import programs
from accbench.recording.terminal import log
from accbench.system.gc_pause import pause_gc
from accbench.training import label_counts
from accbench.training.label_counts import LabelCounts


def run(argv: Sequence[str], trace: Callable[[TaskConfig, Path], None]) -> int:
    """Trace a task's step and return the exit status; an error goes to the folder's facts.

    Args:
        argv: FOLDER FLAGS.
        trace: writes program and facts to the folder.
    """
    folder, flags = Path(argv[0]), argv[1:]
    try:
        task = resolving.apply_defaults(config.parse(flags, "accbench preflight"), "cuda")
        resolving.check_data(task)
        trace(task, folder)
    except RequestError as error:
        return report_failure(folder, str(error))
    except MemoryError:
        return report_failure(folder, "this machine has not enough memory to build the step")
    except Exception as error:
        traceback.print_exc()
        line = source_location.find_model_line(traceback.extract_tb(error.__traceback__))
        text = " ".join(str(error).split())[:500]
        return report_failure(
            folder, f"{type(error).__name__}: {text}{f' at {line}' if line else ''}"
        )
    if not (folder / programs.FACTS_FILE).exists():
        return report_failure(folder, "the step left nothing for XLA to compile")
    return 0


def report_failure(folder: Path, why: str) -> int:
    """Write an error to the folder's facts; returns the exit status."""
    (folder / programs.FACTS_FILE).write_text(json.dumps({"error": why}))
    return 2


@dataclasses.dataclass(frozen=True)
class TracedRun:
    """What a worker has built when its first step begins."""

    engine: Any
    spec: Any
    net: nn.Module
    """The model as the spec built it."""
    model: nn.Module
    """The model as the engine prepared it."""
    optimizer: torch.optim.Optimizer
    batch: Any
    """The first batch, on the host."""
    facts: dict[str, Any]
    """What the result tells about the model and its batch, and `build_s`."""


def build(
    task: TaskConfig, engine_class: type[Engine], rank: int = 0,
    without_memory: Callable[[], Any] | None = None,
) -> TracedRun:  # fmt: skip
    """Build what a worker builds where all nodes are complete, up to its first step.

    Args:
        task: the resolved task.
        engine_class: of the engine that traces.
        rank: whose step it is, on the first node.
        without_memory: makes the mode in which the model's tensors have no memory; None for an
            engine that needs their memory. A model whose building looks at values has memory too.
    """
    started = time.perf_counter()
    world_size = mesh.num_workers(task) or task.nproc_per_node
    topology = Topology(rank, rank, world_size, task.nproc_per_node)
    options = task.options.get(task.engine, engine_class.Options())
    with pause_gc():
        engine = engine_class(task, options, topology)
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)(location, task, task.options.get(name), Topology())
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    net = _build_net(spec, source.num_classes, without_memory)
    model = engine.prepared(net)
    optimizer = engine.build_optimizer(model)
    engine.seed(task.seed)
    batch = next(iter(source.train_loader()))
    if engine.mesh.cp > 1:
        group = RankGroup("", 0, engine.mesh.cp)
        batch = context_parallel.share_sequences(task, spec, net, group, engine.mesh.tp)(batch)
    if LabelCounts(engine, spec, source).is_needed:
        (batch,) = label_counts.of_parts(spec, [batch])
    model.train()
    facts = _model_facts(spec, net, batch, source.num_classes)
    facts["build_s"] = time.perf_counter() - started
    return TracedRun(engine, spec, net, model, optimizer, batch, facts)


def _build_net(spec: Any, num_classes: int, without_memory: Callable[[], Any] | None) -> nn.Module:
    def build_plain() -> nn.Module:
        return trainable.plain(spec.build(num_classes))

    if without_memory is not None:
        try:
            with without_memory():
                return build_plain()
        except Exception as error:  # whatever a model's own code raises of tensors without values
            log.info(f"the model is built with memory: {type(error).__name__}: {error}")
    return build_plain()


def _model_facts(spec: Any, net: nn.Module, batch: Any, num_classes: int) -> dict[str, Any]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    return {
        "model": type(net).__name__,
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_sizes": sorted({p.numel() for p in parameters}),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "batch": nested.described(batch),
        "num_classes": num_classes,
        "unit": spec.unit,
        "units_per_sample": spec.units_per_sample,
    }


def environment(xla_flags: str) -> dict[str, str]:
    """Return the environment variables that every tracing process must start with.

    Args:
        xla_flags: more XLA flags than those of this process's environment.
    """
    return {
        "TORCH_WARM_POOL": "0",  # nothing is compiled by inductor
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip(),
    }


def write(folder: Path, program_format: str, program: bytes, facts: dict[str, Any]) -> None:
    """Write a traced program and its facts.

    Args:
        folder: where they go.
        program_format: see `programs`.
        program: serialized.
        facts: for the result.
    """
    programs.write(folder, program_format, program)
    (folder / programs.FACTS_FILE).write_text(json.dumps(facts))
