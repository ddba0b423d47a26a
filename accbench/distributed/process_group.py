"""This worker's rank, and the host-side collectives that workers use."""

import dataclasses
import gc
import importlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed import network
from accbench.errors import MEETING_VARIABLE, NotMetError


@dataclasses.dataclass(frozen=True)
class Topology:
    """This worker's rank and the number of workers; ranks count from 0."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def from_env() -> "Topology":
        """Read torchrun's environment variables; without them, there is a single worker."""
        return Topology(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )


def init_distributed(topology: Topology, device: str, timeout_s: float) -> None:
    """Join the process group: gloo for host tensors, and NCCL as well on CUDA.

    A single worker joins no group, and the functions below then return its own values.

    Raises:
        NotMetError: not all ranks join in time, or rank 0 cannot listen.
    """
    if topology.world_size == 1:
        return
    if topology.local_world_size == topology.world_size:
        _use_loopback()
    # The default arguments of this module's functions keep the process group that exists when it is
    # imported, which DDP's constructor would do. Imported before there is a group they are None,
    # so that `close` can end gloo's threads.
    importlib.import_module("torch.distributed.nn.functional")
    meeting = os.environ.get(MEETING_VARIABLE)
    where = meeting or ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
    try:
        dist.init_process_group(
            backend=_backend(device),
            timeout=timedelta(seconds=timeout_s),
            **({} if meeting is None else _rendezvous_arguments(meeting, topology, timeout_s)),
        )
    except (dist.DistError, OSError, ValueError) as error:  # ValueError: a variable is missing
        how = ", with the same MASTER_ADDR and a MASTER_PORT that is free there, as torchrun does"
        if meeting is not None:
            how = ", and see that their machines reach each other"
        raise NotMetError(
            f"rank {topology.rank} of {topology.world_size} did not meet the others at {where}: "
            f"{' '.join(str(error).split())}; start them all within --timeout_s {timeout_s:g}{how}"
        ) from None


def init_alone(device: str) -> None:
    """Make a group of this process alone, for what needs one even where there is one worker."""
    _use_loopback()
    importlib.import_module("torch.distributed.nn.functional")  # see `init_distributed`
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _use_loopback() -> None:
    # Gloo finds its network interface by the host's name, which often resolves to nothing on a
    # laptop or in a container.
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _backend(device: str) -> str:
    nccl = device == "cuda" and torch.cuda.is_available()
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"


def _rendezvous_arguments(meeting: str, topology: Topology, timeout_s: float) -> dict[str, Any]:
    """Return `init_process_group`'s arguments for the rendezvous of the workers of all nodes."""
    timeout = timedelta(seconds=timeout_s)
    if meeting.startswith("file:"):
        store: dist.Store = _open_store(Path(meeting[5:]), topology, timeout_s)
    else:
        where, _, key = meeting.partition("/")
        host, _, port = where.rpartition(":")
        tcp = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        store = dist.PrefixStore(key, tcp)
    return {"store": store, "rank": topology.rank, "world_size": topology.world_size}


def _open_store(path: Path, topology: Topology, timeout_s: float) -> dist.TCPStore:
    """Open the store at a free port of rank 0, which the others read from a shared file."""
    timeout = timedelta(seconds=timeout_s)
    is_one_machine = topology.local_world_size == topology.world_size
    if topology.rank == 0:
        host = network.LOOPBACK if is_one_machine else socket.gethostname()
        store = network.create_listening_store(
            host if is_one_machine else "", timeout, advertised_host=host
        )
        part = path.with_name(f"{path.name}.new")
        part.write_text(f"{host}:{store.port}")
        part.rename(path)
    else:
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise ValueError(f"rank 0 has not written {path}")
            time.sleep(0.1)
        host, _, port = path.read_text().rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    if not is_one_machine:
        interface = network.interface_of(network.address_towards(host))
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return store


def local_address() -> str:
    """Return the address where other ranks reach this one, in the network that Gloo uses.

    Raises:
        OSError: there is no route to rank 0's machine.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = network.address_of(interface) if interface else None
    return address or network.address_towards(os.environ.get("MASTER_ADDR", socket.getfqdn()))


def close() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        # Gloo's threads release the last collective's tensors after it is done, and need Python's
        # lock for that: they abort a process that is just ending ("terminate called without an
        # active exception"). They end with the group. A DDP object that still exists, for example
        # because its model is in a reference cycle, would keep the group alive.
        gc.collect()
        dist.destroy_process_group()


def is_single_worker() -> bool:
    """Return whether this is the only worker."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def missing_ranks(occasion: str, timeout_s: float) -> list[int]:
    """Wait until every rank has called this, and return those that have not in time.

    Unlike a collective, it cannot be taken for another one by the ranks that did not come.

    Args:
        occasion: a name, of which each rank makes use once.
        timeout_s: how long to wait, in seconds.
    """
    if not dist.is_initialized():
        return []
    store = dist.PrefixStore(occasion, dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "")
    ranks, deadline = range(dist.get_world_size()), time.monotonic() + timeout_s
    store.add("came", 1)  # one request asks for all of them
    while store.add("came", 0) < len(ranks):
        if time.monotonic() > deadline:
            return [rank for rank in ranks if not store.check([str(rank)])]
        time.sleep(0.02)
    return []


def all_gather_values(values: list[float]) -> list[list[float]]:
    """Gather every rank's `values`, by rank; all ranks give equally many."""
    if not dist.is_initialized():
        return [values]
    return [t.tolist() for t in all_gather_tensor(torch.tensor(values, dtype=torch.float64))]


def broadcast_value(value: Any) -> Any:
    """Return rank 0's `value` (a string, a number or None) on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's tensor on every rank.

    The tensor is on the host, and has the same shape and type on all ranks.
    """
    if not dist.is_initialized():
        return tensor
    # Gloo does not support all types, but bytes.
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone()
    if data.numel():
        dist.broadcast(data.view(torch.uint8), src=0)
    return data.view(tensor.shape)


def all_gather_tensor(local: torch.Tensor) -> list[torch.Tensor]:
    """Gather every rank's tensor on the host, by rank; all have one shape and type."""
    if not dist.is_initialized():
        return [local]
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return gathered


def all_gather_strings(name: str) -> list[str]:
    """Gather every rank's `name`, by rank."""
    if not dist.is_initialized():
        return [name]
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return names


def broadcast_module(module: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks; the module is on the host."""
    if is_single_worker():
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(broadcast_tensor(tensor))
