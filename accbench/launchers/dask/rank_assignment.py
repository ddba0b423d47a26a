"""The assignment of ranks to Dask workers and devices, and calls of the scheduler."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class RankAssignment:
    """One rank's Dask worker, and its ranks in the cluster and on its host."""

    rank: int
    address: str
    """The Dask worker's address, as tls://10.0.0.2:41235."""
    host: str
    local_rank: int
    """Counted from 0 among the ranks of its host."""
    local_world_size: int
    world_size: int

    def __str__(self) -> str:
        return f"rank {self.rank}'s Dask worker {self.address}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the rank, under torchrun's names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def dask_workers(client: Any) -> dict[str, Any]:
    """Return the cluster's Dask workers: address -> what the scheduler knows of each.

    Dask's own `Client.scheduler_info` may have none of them: a request for none, which the client
    makes every few seconds, writes its answer to the same place. Here it is taken only where the
    scheduler does not answer, for what was known last.

    Args:
        client: a synchronous `distributed.Client`.
    """
    try:
        info = client.sync(client.scheduler.identity)
    except OSError:
        info = client.scheduler_info(n_workers=-1)
    workers: dict[str, Any] = info["workers"]
    return workers


def assign_ranks(client: Any, num_ranks: int | None = None) -> list[RankAssignment]:
    """Assign a rank to each Dask worker; the ranks of a host are consecutive.

    Args:
        client: a synchronous `distributed.Client`.
        num_ranks: use only so many workers; None: all.

    Raises:
        ValueError: there are fewer workers, or none.
    """
    workers = dask_workers(client)
    # Sorted by address, so that ranks follow the workers' port numbers.
    ordered = sorted(workers, key=lambda address: (workers[address]["host"], address))
    num_needed = len(ordered) if num_ranks is None else num_ranks
    if not ordered or len(ordered) < num_needed:
        raise ValueError(
            f"the cluster has {len(ordered)} Dask workers, but {num_needed or 1} are needed"
        )
    hosts: dict[str, list[str]] = defaultdict(list)
    for address in ordered[:num_needed]:
        hosts[workers[address]["host"]].append(address)
    pairs = [(host, n) for host, addresses in hosts.items() for n in range(len(addresses))]
    return [
        RankAssignment(rank, hosts[host][n], host, n, len(hosts[host]), num_needed)
        for rank, (host, n) in enumerate(pairs)
    ]


def device_index(local_rank: int, visible: Sequence[str | None], num_devices: int) -> int:
    """Return the index of a rank's CUDA device among those that the rank sees.

    dask-cuda shows every worker all devices, its own first; other Dask workers all see the same
    order, in which the local rank is the index.

    Args:
        local_rank: the rank among those of its host.
        visible: CUDA_VISIBLE_DEVICES of the host's ranks, by local rank; None if it is unset.
        num_devices: number of devices that this rank sees.

    Raises:
        RuntimeError: the host has more ranks than devices.
    """
    index = 0 if distinct_first_devices(visible) is not None else local_rank
    if index >= num_devices:
        raise RuntimeError(
            f"the host has {len(visible)} ranks and {num_devices} CUDA devices: start as many Dask "
            "workers as devices, or take backend='gloo'"
        )
    return index


def distinct_first_devices(visible: Sequence[str | None]) -> list[str] | None:
    """Return each rank's first visible device if all differ, as dask-cuda sets them; else None."""
    firsts = [names.split(",")[0].strip() for names in visible if names]
    if len(firsts) < len(visible) or len(set(firsts)) < len(firsts):
        return None
    return firsts


def visible_devices(store: Any, assignment: RankAssignment) -> list[str | None]:
    """Exchange CUDA_VISIBLE_DEVICES among the ranks of this host, and return it by local rank.

    Every rank of the host must call this.

    Args:
        store: the TCPStore of the rendezvous.
        assignment: this rank's.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    store.set(f"devices/{assignment.rank}", "-" if names is None else f"={names}")
    first = assignment.rank - assignment.local_rank
    host_ranks = range(first, first + assignment.local_world_size)
    values = [store.get(f"devices/{rank}").decode() for rank in host_ranks]
    return [None if value == "-" else value[1:] for value in values]


def call_scheduler(worker: Any, method: str, **arguments: Any) -> Any:
    """Call a method of the scheduler from a task's thread, and return its answer."""
    from distributed.utils import sync

    return sync(worker.loop, getattr(worker.scheduler, method), **arguments)


def metadata_key(call_id: str) -> list[str]:
    """Return the scheduler's metadata key of a call's shared values."""
    return ["accbench", call_id]
