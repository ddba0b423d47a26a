"""Which worker this is, and the few things that workers tell each other on the host."""

import atexit
import dataclasses
import gc
import importlib
import os
import socket
import sys
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
    """This worker's place among all: ranks count from 0."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def from_env() -> "Topology":
        """As torchrun says it through the environment; a single worker without it."""
        return Topology(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )


def start(topology: Topology, device: str, timeout_s: float) -> None:
    """Join the process group: gloo for host tensors, NCCL beside it on CUDA.

    One worker alone joins nothing, and what is below then returns its own values.

    Raises:
        NotMetError: not all ranks are there in time, or rank 0 cannot listen.
    """
    if topology.world_size == 1:
        return
    # Gloo looks for its network interface by the host's name, which on a laptop
    # or in a container often leads nowhere.
    if topology.local_world_size == topology.world_size and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Its functions take the process group of the time when it is imported as a default, and
    # so keep the group for ever: DDP's constructor would import it. Before there is a group
    # that is None, and `close` can end gloo's threads.
    importlib.import_module("torch.distributed.nn.functional")
    nccl = device == "cuda" and torch.cuda.is_available()
    meeting = os.environ.get(MEETING_VARIABLE)
    where = meeting or ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if nccl else "gloo",
            timeout=timedelta(seconds=timeout_s),
            **({} if meeting is None else _met(meeting, topology, timeout_s)),
        )
    except (dist.DistError, OSError, ValueError) as error:  # ValueError: a variable is missing
        how = ", with the same MASTER_ADDR and a MASTER_PORT that is free there, as torchrun does"
        if meeting is not None:
            how = ", and see that their machines reach each other"
        raise NotMetError(
            f"rank {topology.rank} of {topology.world_size} did not meet the others at {where}: "
            f"{' '.join(str(error).split())}; start them all within --timeout_s {timeout_s:g}{how}"
        ) from None


def _met(meeting: str, topology: Topology, timeout_s: float) -> dict[str, Any]:
    """The store where the workers of all nodes meet, and this one's place."""
    timeout = timedelta(seconds=timeout_s)
    if meeting.startswith("file:"):
        store: dist.Store = _store_of_rank0(Path(meeting[5:]), topology, timeout_s)
    else:
        where, _, key = meeting.partition("/")
        host, _, port = where.rpartition(":")
        tcp = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        store = dist.PrefixStore(key, tcp)
    return {"store": store, "rank": topology.rank, "world_size": topology.world_size}


def _store_of_rank0(path: Path, topology: Topology, timeout_s: float) -> dist.TCPStore:
    """A store at a free port of rank 0's, which the others read from a file on a shared disk."""
    timeout = timedelta(seconds=timeout_s)
    alone = topology.local_world_size == topology.world_size
    if topology.rank == 0:
        host = network.LOOPBACK if alone else socket.gethostname()
        store = network.create_listening_store(host if alone else "", timeout, advertised_host=host)
        new = path.with_name(f"{path.name}.new")
        new.write_text(f"{host}:{store.port}")
        new.rename(path)
    else:
        until = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > until:
                raise ValueError(f"rank 0 has not written {path}")
            time.sleep(0.1)
        host, _, port = path.read_text().rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    if not alone:
        interface = network.interface_of(network.address_towards(host))
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return store


def own_address() -> str:
    """Where the other ranks reach this one: at the network that Gloo uses between them.

    Raises:
        OSError: there is no way to rank 0's machine.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    found = network.address_of(interface) if interface else None
    return found or network.address_towards(os.environ.get("MASTER_ADDR", socket.getfqdn()))


def close() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        # Gloo's threads let go of the last collective's tensors after it is done, and need
        # Python's lock for that: a process that is just ending they abort ("terminate called
        # without an active exception"). They end with the group, which a DDP that nobody has
        # let go of, a model in a circle of references for one, keeps alive.
        gc.collect()
        dist.destroy_process_group()


def leave_at_once(status: int) -> None:
    """End this process after an error, where a process group would make its end a crash.

    The other ranks may be gone, so the group cannot be closed; and while it is open, Gloo's
    threads abort a process that ends in Python's way, about once in twenty times on a busy machine.
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()  # multiprocessing's among them, which ends loading processes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def is_alone() -> bool:
    """Return whether there are no other workers to tell anything."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def gather_values(values: list[float]) -> list[list[float]]:
    """Every rank's `values`, by rank; all ranks give equally many."""
    if not dist.is_initialized():
        return [values]
    return [t.tolist() for t in gather_tensor(torch.tensor(values, dtype=torch.float64))]


def from_rank0(value: Any) -> Any:
    """Rank 0's `value` (a string, a number or None) on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_rank0_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; on the host, of one shape and of one type, whichever."""
    if not dist.is_initialized():
        return tensor
    # Gloo knows not all types, but bytes.
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone()
    if data.numel():
        dist.broadcast(data.view(torch.uint8), src=0)
    return data.view(tensor.shape)


def gather_tensor(own: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor on the host, by rank; all have one shape and type."""
    if not dist.is_initialized():
        return [own]
    of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, own)
    return of_all


def gather_names(name: str) -> list[str]:
    """Every rank's `name`, by rank."""
    if not dist.is_initialized():
        return [name]
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return names


def broadcast_module(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers; the module is on the host."""
    if is_alone():
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(from_rank0_tensor(tensor))
