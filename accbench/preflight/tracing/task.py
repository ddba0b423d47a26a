"""What the tracing processes of `accbench preflight` share: a run's task in, a program out."""

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
    """The process `FOLDER FLAGS`; returns its exit status, with an error in the folder's facts.

    Args:
        trace: leaves program and facts.
    """
    folder, flags = Path(argv[0]), argv[1:]
    try:
        task = resolving.apply_defaults(config.parse(flags, "accbench preflight"), "cuda")
        resolving.check_data(task)
        trace(task, folder)
    except RequestError as error:
        return failed(folder, str(error))
    except MemoryError:
        return failed(folder, "this machine has not enough memory to build the step")
    except Exception as error:
        traceback.print_exc()
        place = source_location.find_model_line(traceback.extract_tb(error.__traceback__))
        text = " ".join(str(error).split())[:500]
        return failed(folder, f"{type(error).__name__}: {text}{f' at {place}' if place else ''}")
    if not (folder / programs.FACTS_FILE).exists():
        return failed(folder, "the step left nothing for XLA to compile")
    return 0


def failed(folder: Path, why: str) -> int:
    """Leave a reason; returns the exit status."""
    (folder / programs.FACTS_FILE).write_text(json.dumps({"error": why}))
    return 2


def source_of(task: TaskConfig) -> Any:
    """The run's data, for one worker."""
    name, location = config.data_name(task.data)
    return plugins.load("data", name)(location, task, task.options.get(name), Topology())


def model_of(task: TaskConfig, num_classes: int) -> tuple[Any, nn.Module]:
    """(spec, model), as a worker builds them."""
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    return spec, trainable.plain(spec.build(num_classes))


def facts_of(net: nn.Module, batch: Any, num_classes: int) -> dict[str, Any]:
    """What a result tells of the model."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    return {
        "model": type(net).__name__,
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_sizes": sorted({p.numel() for p in parameters}),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "batch": nested.described(batch),
        "num_classes": num_classes,
    }


def leave(folder: Path, program_format: str, program: bytes, facts: dict[str, Any]) -> None:
    """Write what was traced; the formats are those of `preflight.programs`."""
    programs.write(folder, program_format, program)
    (folder / programs.FACTS_FILE).write_text(json.dumps(facts))
