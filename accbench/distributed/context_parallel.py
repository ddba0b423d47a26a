"""Context parallelism (`--cp`): ranks compute with parts of sequences, and batches are cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accbench.config import TaskConfig
from accbench.distributed.collectives import RankGroup
from accbench.errors import RequestError


def share_sequences(
    task: TaskConfig, spec: Any, net: nn.Module, group: RankGroup, tp: int
) -> Callable[[Any], Any]:
    """Have a model compute with a rank's part of each sequence, and return what cuts a batch.

    Args:
        task: names the model, and how ranks attend to each other's parts.
        spec: the model's.
        net: of this spec.
        group: the ranks that share each sequence.
        tp: ranks that share each of the model's layers.

    Raises:
        RequestError: the model cannot; the message says why.
    """
    if not hasattr(spec, "share_sequences"):
        raise RequestError(
            f"--cp {group.size}: --model {task.model} has no sequences to cut; leave --cp out"
        )
    spec.share_sequences(net, group, tp, task.cp_attention)
    return partial(spec.part_of_sequences, group, algorithm=task.cp_attention)
