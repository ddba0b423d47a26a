"""Which rank is on which Dask worker, and what a rank asks of the scheduler."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank's place in the cluster."""

    rank: int
    address: str
    """Of its Dask worker, as tls://10.0.0.2:41235."""
    host: str
    local_rank: int
    """Counted from 0 among the ranks of its host."""
    local_world_size: int
    world_size: int

    def __str__(self) -> str:
        return f"rank {self.rank}'s Dask worker {self.address}"

    @property
    def env(self) -> dict[str, str]:
        """torchrun's names for it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def of_workers(client: Any, num_ranks: int | None = None) -> list[Place]:
    """A rank for each Dask worker, a host's side by side.

    Args:
        num_ranks: take so many of the workers alone.

    Raises:
        ValueError: there are fewer, or none.
    """
    workers = client.scheduler_info(n_workers=-1)["workers"]
    # Numbers of ports in their order, so that ranks are where the workers were counted up.
    ordered = sorted(workers, key=lambda address: (workers[address]["host"], address))
    wanted = len(ordered) if num_ranks is None else num_ranks
    if not ordered or len(ordered) < wanted:
        raise ValueError(f"the cluster has {len(ordered)} Dask workers, and {wanted or 1} needed")
    hosts: dict[str, list[str]] = defaultdict(list)
    for address in ordered[:wanted]:
        hosts[workers[address]["host"]].append(address)
    pairs = [(host, n) for host, addresses in hosts.items() for n in range(len(addresses))]
    return [
        Place(rank, hosts[host][n], host, n, len(hosts[host]), wanted)
        for rank, (host, n) in enumerate(pairs)
    ]


def device_index(local_rank: int, visible: Sequence[str | None], num_devices: int) -> int:
    """Which of the CUDA devices that a rank sees is its own.

    dask-cuda shows every worker all devices, its own first; other Dask workers see them all in
    one order, and take theirs by their number on the host.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the host's ranks, by local rank; None where it is unset.
        num_devices: that this rank sees.

    Raises:
        RuntimeError: there are more ranks than devices.
    """
    index = 0 if own_first(visible) is not None else local_rank
    if index >= num_devices:
        raise RuntimeError(
            f"the host has {len(visible)} ranks and {num_devices} CUDA devices: start as many Dask "
            "workers as devices, or take backend='gloo'"
        )
    return index


def own_first(visible: Sequence[str | None]) -> list[str] | None:
    """The devices of a host's ranks where each is shown its own first; None where not."""
    firsts = [names.split(",")[0].strip() for names in visible if names]
    if len(firsts) < len(visible) or len(set(firsts)) < len(firsts):
        return None
    return firsts


def visible_devices(store: Any, place: Place) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of the ranks on this host, by local rank; all of them ask.

    Args:
        store: torch's, where the ranks meet.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    store.set(f"devices/{place.rank}", "-" if names is None else f"={names}")
    first = place.rank - place.local_rank
    mates = range(first, first + place.local_world_size)
    told = [store.get(f"devices/{mate}").decode() for mate in mates]
    return [None if names == "-" else names[1:] for names in told]


def ask_scheduler(worker: Any, what: str, **arguments: Any) -> Any:
    """Call the scheduler from a task's thread on a Dask worker, and wait for its answer."""
    from distributed.utils import sync

    return sync(worker.loop, getattr(worker.scheduler, what), **arguments)


def metadata_key(call_id: str) -> list[str]:
    """Where the scheduler keeps what ranks of a call tell each other."""
    return ["accbench", call_id]
