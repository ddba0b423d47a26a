"""Calls of a function on every Dask worker, as the ranks of one process group.

The interface follows dask-pytorch-ddp.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accbench.launchers.dask import rank_assignment, rendezvous, watch
from accbench.launchers.dask.rank_assignment import RankAssignment


def run(
    client: Any,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call a function on every Dask worker of a cluster, within one process group of them all.

    Every call runs, also a repeated one; concurrent calls wait for each other. If a worker leaves
    the cluster meanwhile, the call ends: its futures are cancelled with an error that names the
    worker.

    Args:
        client: a synchronous `distributed.Client`.
        pytorch_function: the function to call on each rank.
        *args: arguments of the function; futures among them are replaced by their results.
        backend: of torch.distributed. None: gloo, and NCCL for the tensors of CUDA devices.
        pass_local_rank: pass the function `local_rank`, its rank among the workers of its host.
        **kwargs: keyword arguments of the function, treated like `args`.

    Returns:
        Dask's futures of the function's results, by rank.

    Raises:
        ValueError: the cluster has no workers, or they are threads of this process.
    """
    ranks = rank_assignment.assign_ranks(client)
    if any(assignment.address.startswith("inproc://") for assignment in ranks):
        raise ValueError(_OWN_PROCESSES)
    call_id, asked_at = uuid.uuid4().hex, time.time()
    name = getattr(pytorch_function, "__name__", "function")
    futures = []
    for assignment in ranks:
        extra = {"local_rank": assignment.local_rank} if pass_local_rank else {}
        key = f"{name}-rank{assignment.rank}-{call_id}"
        futures.append(
            client.submit(
                _call_as_rank,
                pytorch_function,
                args,
                {**kwargs, **extra},
                assignment,
                backend,
                (call_id, asked_at),
                key,
                key=key,
                workers=[assignment.address],
                allow_other_workers=False,
                pure=False,
            )  # fmt: skip
        )
    watch.watch(client, call_id, dict(zip(futures, ranks, strict=True)))
    return futures


def _call_as_rank(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    assignment: RankAssignment, backend: str | None, call: tuple[str, float], key: str,
) -> Any:  # fmt: skip
    from distributed import get_worker

    worker = get_worker()
    call_id, asked_at = call
    rank_call = rendezvous.RankCall(call_id, key, worker)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_exclusive_process(call_id, asked_at, rank_call))
            store = stack.enter_context(rendezvous.rendezvous_store(rank_call, assignment))
            interface = rendezvous.interface_env(assignment.host)
            defaults = {name: v for name, v in interface.items() if name not in os.environ}
            stack.enter_context(
                _environment({**defaults, **assignment.env, "TORCHELASTIC_USE_AGENT_STORE": "True"})
            )
            stack.enter_context(_allow_child_processes())
            stack.enter_context(_device_of_rank(store, assignment, backend))
            return dispatch_with_ddp(
                function, store.host, store.port, assignment.rank, assignment.world_size, *args,
                backend=_resolve_backend(backend), **kwargs,
            )  # fmt: skip
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"on {assignment}, {socket.gethostname()}")
        raise


def dispatch_with_ddp(
    pytorch_function: Callable[..., Any], master_addr: Any, master_port: Any, rank: Any,
    world_size: Any, *args: Any, backend: str = "gloo", **kwargs: Any,
) -> Any:  # fmt: skip
    """Call a function as one rank of a process group, and destroy the group afterwards.

    An error of the function is raised even if destroying the group then fails as well.
    """
    # This module's functions capture the default process group at import; see
    # accbench.distributed.process_group.
    importlib.import_module("torch.distributed.nn.functional")
    os.environ.update(
        MASTER_ADDR=str(master_addr), MASTER_PORT=str(master_port), RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )  # fmt: skip
    _reset_group_count()
    dist.init_process_group(backend=backend)
    try:
        value = pytorch_function(*args, **kwargs)
    except BaseException:
        with contextlib.suppress(Exception):  # the other ranks may be gone
            dist.destroy_process_group()
        raise
    gc.collect()  # a DDP wrapper that is still referenced keeps the group's threads
    dist.destroy_process_group()
    return value


def _reset_group_count() -> None:
    """Reset torch's count of process groups, by which it names them.

    Ranks with different names for a group never connect. A group that could not be created counts
    as well, until a group that was created is destroyed.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def _resolve_backend(backend: str | None) -> str:
    if backend is not None:
        return backend
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


_OWN_PROCESSES = (
    "two Dask workers share one process, which can only be one rank: start the cluster with "
    "processes, as LocalCluster(processes=True)"
)
_CHILD_S = 2.0
_CONDITION = threading.Condition()
_running: str | None = None
_waiting: list[tuple[float, str]] = []


@contextlib.contextmanager
def _exclusive_process(call_id: str, asked_at: float, call: rendezvous.RankCall) -> Iterator[None]:
    """Hold this process for one call, in the order of the requests.

    A process can only be in one default process group.

    Raises:
        RuntimeError: another rank of the same call is in this process.
    """
    global _running
    ticket = (asked_at, call_id)
    with _CONDITION:
        if _running == call_id or ticket in _waiting:
            raise RuntimeError(_OWN_PROCESSES)
        _waiting.append(ticket)
        try:
            while _running is not None or min(_waiting) != ticket:
                _CONDITION.wait(timeout=1)
                call.raise_if_ended()
            _running = call_id
        finally:
            _waiting.remove(ticket)
    try:
        yield
    finally:
        with _CONDITION:
            _running = None
            _CONDITION.notify_all()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and on exit undo these and all other changes."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _allow_child_processes() -> Iterator[None]:
    """Allow this process to start child processes, for a DataLoader's workers.

    Dask workers are daemons, and multiprocessing forbids daemons children. A DataLoader's workers
    end by themselves when this process is gone.
    """
    settings: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    was_daemon = settings.get("daemon")
    settings["daemon"] = False
    earlier = multiprocessing.active_children()
    try:
        yield
    finally:
        settings["daemon"] = was_daemon
        for child in multiprocessing.active_children():
            if child not in earlier:
                child.join(_CHILD_S)  # a DataLoader tells its workers to end, but does not wait


def _device_of_rank(
    store: Any, assignment: RankAssignment, backend: str | None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this rank's CUDA device, if any, is torch's current one."""
    visible = rank_assignment.visible_devices(store, assignment)
    if backend == "gloo" or not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.cuda.device(
        rank_assignment.device_index(assignment.local_rank, visible, torch.cuda.device_count())
    )
