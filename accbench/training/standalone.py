"""The worker of a script that was started directly or by torchrun, without a launcher."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from accbench import config, resolving
from accbench.distributed import process_end, process_group, slurm_variables
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError
from accbench.recording import terminal
from accbench.system.stop_signals import die_with_parent
from accbench.training import current, worker
from accbench.training.current import Worker

# What to undo when a run that began here ends.
_stacks: dict[int, contextlib.ExitStack] = {}


def start(flags: Mapping[str, Any]) -> Worker:
    """Join the other workers, if there are any, and create the run's folder.

    Raises:
        RequestError: a flag is wrong, or asks for what cannot be done here.
    """
    started = time.perf_counter()
    slurm_variables.adopt()
    topology = Topology.from_env()
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    task = config.task_of_values({**flags, "script": script}, "accbench.accelerate")
    if task.threads is None and topology.local_world_size == 1:
        # Another number of threads would round sums differently from the script alone.
        task = replace(task, threads=torch.get_num_threads())
    task = resolving.resolve(replace(task, nproc_per_node=topology.local_world_size))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(None)
    worker.apply_environment(task, topology)
    if not dist.is_initialized():
        process_group.init_distributed(topology, task.device, task.timeout_s)
        atexit.register(process_group.close)  # also where the script closes its run before it ends
    elif "gloo" not in dist.get_backend_config():
        raise RequestError(
            "the script has made a process group without gloo, which records need: leave "
            "init_process_group out, accbench.accelerate does it"
        )
    with contextlib.ExitStack() as stack:
        task = worker.shared_output_dir(task, topology, stack)
        console = stack.enter_context(terminal.worker_output(task.run_dir, topology.rank))
        begun = Worker(task, topology, started, console)
        _stacks[id(begun)] = stack.pop_all()
    return begun


def give_up(begun: Worker) -> None:
    """Undo `start`; do nothing if a launcher's worker runs the script."""
    stack = _stacks.pop(id(begun), None)
    if stack is not None:
        stack.close()


def watch(begun: Worker) -> None:
    """End the run's record when the process ends, with the error if it failed."""
    stack = _stacks.get(id(begun))
    if stack is None:
        return
    registration = current.use_worker(begun)  # so that a second call finds the first
    before = sys.excepthook

    def failed(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        begun.run.fail(error)
        process_end.leave_at_once(130 if kind is KeyboardInterrupt else 1)

    def ended() -> None:
        try:
            begun.run.close()
        except Exception as error:  # an exception at exit would not be reported
            failed(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)
        process_group.close()

    def undo() -> None:
        atexit.unregister(ended)
        sys.excepthook = before
        _stacks.pop(id(begun), None)

    stack.enter_context(registration)
    sys.excepthook = failed
    atexit.register(ended)
    stack.callback(undo)
    begun.run.at_end = stack.close
