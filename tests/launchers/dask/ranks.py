"""What ranks do in the tests, in modules that Dask workers find."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from distributed import Event, get_worker

ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment() -> dict[str, str]:
    return dict(os.environ)


def place(*args, **kwargs):
    """Who this is, the sum over all ranks of rank + 1, and what was passed."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    os.environ["ONLY_IN_THE_CALL"] = "1"
    names = {name: os.environ[name] for name in ENVIRONMENT}
    return {
        "rank": dist.get_rank(), "address": get_worker().address, "total": total.item(),
        "args": args, "kwargs": kwargs, "environment": names,
    }  # fmt: skip


def token() -> bytes:
    dist.barrier()
    return os.urandom(8)


def listens_at() -> set[str]:
    """The addresses at which this process takes connections."""
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def rank1_raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("planted fault")
    dist.all_reduce(torch.ones(1))


def rank1_raises_and_cannot_leave() -> None:
    dist.barrier()  # or rank 0 may be gone while rank 1 still connects
    if dist.get_rank() == 1:
        dist.destroy_process_group = _cannot_leave
        raise KeyError("planted fault")
    raise RuntimeError("as one that has lost the other")


def _cannot_leave() -> None:
    raise RuntimeError("the group cannot be left")


def can_leave_again() -> None:
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group
    if dist.is_initialized():
        dist.destroy_process_group()


def cannot_join() -> None:
    """As where the other rank has gone before this one has come."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2,
                                timeout=timedelta(seconds=0.2))  # fmt: skip
    except RuntimeError:
        return
    raise AssertionError("there was nobody to join")


def rank1_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def load(start_methods: list[str]) -> tuple[list[int], bool]:
    """What a DataLoader with a process gives, and whether that was another than this one.

    Args:
        start_methods: of the process, by rank.
    """
    start_method = start_methods[dist.get_rank()]
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=1, multiprocessing_context=start_method
    )
    batches = list(loader)
    pids = {pid for _, of_batch in batches for pid in of_batch.tolist()}
    return [n for numbers, _ in batches for n in numbers.tolist()], os.getpid() not in pids


def wait_for(path: Path) -> None:
    """For a file: a task's first Dask event makes its worker a client, which fails if the scheduler
    has something to tell all clients, such as that tasks are cancelled, when that one comes."""
    while not path.exists():
        time.sleep(0.02)


# Results.


def submit_many(handler, num_results: int) -> None:
    for number in range(num_results):
        handler.submit_result(f"rank{dist.get_rank()}/{number}.txt", f"{number}")


def submit(handler, path: str, data: bytes) -> None:
    handler.submit_result(path, data)


def submit_much(handler, num_results: int, num_bytes: int) -> None:
    for number in range(num_results):
        handler.submit_result(f"steady/{number}.txt", f"{number}")
    handler.submit_result("steady/checkpoint", b"accbench" * (num_bytes // 8))


def submit_and_be_killed(handler, num_results: int, killed: Path) -> None:
    """Is killed the first time, by which Dask has another worker do it again."""
    if killed.exists():
        handler.submit_result("killed/again.txt", "again")
        return
    for number in range(num_results):
        handler.submit_result(f"killed/{number}.txt", f"{number}")
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def submit_hostile(handler, path: str) -> None:
    """As a rank would that does not keep to what `submit_result` checks."""
    handler.sender().send("whole", path, b"hostile")
    handler.submit_result("harmless", "text")


def submit_then_raise(handler) -> None:
    handler.submit_result("before", "text")
    raise KeyError("planted fault")


def submit_before_and_after(handler, name: str) -> None:
    for number in range(5):
        handler.submit_result(f"{number}", "text")
    Event(name).wait()
    handler.submit_result("5", "text")


def sleep(seconds: float) -> None:
    time.sleep(seconds)
