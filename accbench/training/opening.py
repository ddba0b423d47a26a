"""Open a task's engine in a worker's process."""

from accbench.config import TaskConfig, plugins
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.system.gc_pause import pause_gc


def open_engine(task: TaskConfig, topology: Topology) -> Engine:
    """Open the task's engine."""
    kind: type[Engine] = plugins.load("engines", task.engine)
    if task.script is not None:
        kind = kind.for_loops()
    return kind(task, task.options.get(task.engine), topology)


def open_first_engine(task: TaskConfig, topology: Topology) -> Engine:
    """Open the first engine of a worker's process, with garbage collection paused."""
    import_dynamo()
    with pause_gc():
        return open_engine(task, topology)


def import_dynamo() -> None:
    """Import what the first optimizer imports otherwise, with garbage collection paused."""
    with pause_gc():
        import torch._dynamo  # noqa: F401
