"""A task's engine in a worker's process."""

from accbench.config import TaskConfig, plugins
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.system.gc_pause import pause_gc


def engine_of(task: TaskConfig, topology: Topology) -> Engine:
    """The task's engine, opened."""
    kind: type[Engine] = plugins.load("engines", task.engine)
    if task.script is not None:
        kind = kind.for_loops()
    return kind(task, task.options.get(task.engine), topology)


def first_engine_of(task: TaskConfig, topology: Topology) -> Engine:
    """`engine_of`, in a process that is a worker's alone."""
    with pause_gc():
        import torch._dynamo  # noqa: F401  # or the first optimizer does

        return engine_of(task, topology)
