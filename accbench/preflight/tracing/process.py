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
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.engines.common import source_location
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.preflight.tracing import programs
from accbench.system.gc_pause import pause_gc


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


def build(task: TaskConfig, engine_class: type[Engine], rank: int = 0) -> TracedRun:
    """Build what a worker of a complete node builds, up to its first step."""
    started = time.perf_counter()
    world_size = task.nproc_per_node
    topology = Topology(rank, rank, world_size, world_size)
    options = task.options.get(task.engine, engine_class.Options())
    with pause_gc():
        engine = engine_class(task, options, topology)
    if engine.mesh.cp > 1:
        raise RequestError("preflight compiles no parts of sequences yet; leave --cp out")
    if engine.mesh.pp > 1:
        raise RequestError("preflight compiles no stages yet; leave --pp out")
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)(location, task, task.options.get(name), Topology())
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    net = trainable.plain(spec.build(source.num_classes))
    model = engine.prepared(net)
    optimizer = engine.build_optimizer(model)
    engine.seed(task.seed)
    batch = next(iter(source.train_loader()))
    model.train()
    facts = _model_facts(net, batch, source.num_classes)
    facts["build_s"] = time.perf_counter() - started
    return TracedRun(engine, spec, net, model, optimizer, batch, facts)


def _model_facts(net: nn.Module, batch: Any, num_classes: int) -> dict[str, Any]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    return {
        "model": type(net).__name__,
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_sizes": sorted({p.numel() for p in parameters}),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "batch": nested.described(batch),
        "num_classes": num_classes,
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
