"""Common parts of the tracing processes of `accbench preflight`: a run's task in, a program out."""

import json
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
from accbench.engines.common import source_location
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.preflight.tracing import programs


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


def build_source(task: TaskConfig) -> Any:
    """Return the run's data source, for one worker."""
    name, location = config.data_name(task.data)
    return plugins.load("data", name)(location, task, task.options.get(name), Topology())


def build_model(task: TaskConfig, num_classes: int) -> tuple[Any, nn.Module]:
    """Return (spec, model), as a worker builds them."""
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    return spec, trainable.plain(spec.build(num_classes))


def model_facts(net: nn.Module, batch: Any, num_classes: int) -> dict[str, Any]:
    """Return what a result tells about the model and its batch."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    return {
        "model": type(net).__name__,
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_sizes": sorted({p.numel() for p in parameters}),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "batch": nested.described(batch),
        "num_classes": num_classes,
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
