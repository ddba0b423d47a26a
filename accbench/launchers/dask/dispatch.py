"""A function on every Dask worker, as the ranks of one process group.

Of the shape of dask-pytorch-ddp, which this follows.
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

from accbench.launchers.dask import meeting, places, watch
from accbench.launchers.dask.places import Place


def run(
    client: Any,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call a function on every Dask worker of a cluster, within a process group of them all.

    Every call runs, also the same one again; calls at one time wait for each other. A worker that
    leaves the cluster meanwhile ends the call: its futures then are cancelled, by an error that
    names it.

    Args:
        client: of distributed, not an asynchronous one.
        args: of the function, like `kwargs`; futures among them are replaced by their results.
        backend: of torch.distributed. None: gloo, and NCCL for the tensors of CUDA devices.
        pass_local_rank: give the function `local_rank`, counted among the workers of its host.

    Returns:
        Dask's futures of what the function returns, by rank.

    Raises:
        ValueError: the cluster has no workers, or they are threads of this process.
    """
    ranks = places.of_workers(client)
    if any(place.address.startswith("inproc://") for place in ranks):
        raise ValueError(_OWN_PROCESSES)
    call_id, asked_at = uuid.uuid4().hex, time.time()
    name = getattr(pytorch_function, "__name__", "function")
    futures = []
    for place in ranks:
        own = {"local_rank": place.local_rank} if pass_local_rank else {}
        key = f"{name}-rank{place.rank}-{call_id}"
        futures.append(
            client.submit(
                _rank,
                pytorch_function,
                args,
                {**kwargs, **own},
                place,
                backend,
                (call_id, asked_at),
                key,
                key=key,
                workers=[place.address],
                allow_other_workers=False,
                pure=False,
            )  # fmt: skip
        )
    watch.watch(client, call_id, dict(zip(futures, ranks, strict=True)))
    return futures


def _rank(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], place: Place,
    backend: str | None, call: tuple[str, float], key: str,
) -> Any:  # fmt: skip
    from distributed import get_worker

    worker = get_worker()
    call_id, asked_at = call
    of_call = meeting.Call(call_id, key, worker)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_turn(call_id, asked_at, of_call))
            store = stack.enter_context(meeting.held(of_call, place))
            interface = meeting.interface_env(place.host)
            wanted = {name: v for name, v in interface.items() if name not in os.environ}
            stack.enter_context(
                _environment({**wanted, **place.env, "TORCHELASTIC_USE_AGENT_STORE": "True"})
            )
            stack.enter_context(_children_allowed())
            stack.enter_context(_own_device(store, place, backend))
            return dispatch_with_ddp(
                function, store.host, store.port, place.rank, place.world_size, *args,
                backend=_chosen(backend), **kwargs,
            )  # fmt: skip
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"on {place}, {socket.gethostname()}")
        raise


def dispatch_with_ddp(
    pytorch_function: Callable[..., Any], master_addr: Any, master_port: Any, rank: Any,
    world_size: Any, *args: Any, backend: str = "gloo", **kwargs: Any,
) -> Any:  # fmt: skip
    """Call a function as one rank of a process group, which is left afterwards.

    What the function raises comes out of this, whatever then happens as the group is left.
    """
    # Its functions keep the process group of the time when it is imported; see
    # accbench.training.process_group.
    importlib.import_module("torch.distributed.nn.functional")
    os.environ.update(
        MASTER_ADDR=str(master_addr), MASTER_PORT=str(master_port), RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )  # fmt: skip
    _count_groups_anew()
    dist.init_process_group(backend=backend)
    try:
        value = pytorch_function(*args, **kwargs)
    except BaseException:
        with contextlib.suppress(Exception):  # the others may be gone
            dist.destroy_process_group()
        raise
    gc.collect()  # a DDP that nobody has let go of keeps the group's threads
    dist.destroy_process_group()
    return value


def _count_groups_anew() -> None:
    """torch names groups by their number, and ranks that have other names never meet.

    A group that could not be made counts as well, until one that was made is left.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def _chosen(backend: str | None) -> str:
    if backend is not None:
        return backend
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


_OWN_PROCESSES = (
    "two Dask workers are in one process, which can be one rank alone: start the cluster with "
    "processes, as LocalCluster(processes=True)"
)
_CHILD_S = 2.0
_TURN = threading.Condition()
_running: str | None = None
_waiting: list[tuple[float, str]] = []


@contextlib.contextmanager
def _turn(call_id: str, asked_at: float, call: meeting.Call) -> Iterator[None]:
    """This process for one call, for it can be in one process group; the earliest asked goes first.

    Raises:
        RuntimeError: another rank of the same call is in this process.
    """
    global _running
    own = (asked_at, call_id)
    with _TURN:
        if _running == call_id or own in _waiting:
            raise RuntimeError(_OWN_PROCESSES)
        _waiting.append(own)
        try:
            while _running is not None or min(_waiting) != own:
                _TURN.wait(timeout=1)
                call.check()
            _running = call_id
        finally:
            _waiting.remove(own)
    try:
        yield
    finally:
        with _TURN:
            _running = None
            _TURN.notify_all()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables, and all as they were afterwards, whatever was set meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a DataLoader have its processes.

    Dask workers are daemons, which multiprocessing refuses children. A DataLoader's end by
    themselves when this process is gone.
    """
    settings: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    before = settings.get("daemon")
    settings["daemon"] = False
    earlier = multiprocessing.active_children()
    try:
        yield
    finally:
        settings["daemon"] = before
        for child in multiprocessing.active_children():
            if child not in earlier:
                child.join(_CHILD_S)  # one that a DataLoader has told to end, but not waited for


def _own_device(
    store: Any, place: Place, backend: str | None
) -> contextlib.AbstractContextManager[Any]:
    """This rank's CUDA device as torch's current one, where there are any."""
    visible = places.visible_devices(store, place)
    if backend == "gloo" or not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.cuda.device(
        places.device_index(place.local_rank, visible, torch.cuda.device_count())
    )
