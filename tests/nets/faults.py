"""Networks that end, stop or starve a worker."""

import atexit
import ctypes
import math
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from benchmarks.nets import dropping, tiny
from benchmarks.nets import tied as tied


class _Faulty(nn.Module):
    """`tiny`, but in its third forward pass on rank 1 something happens."""

    def __init__(self, num_classes: int, fault) -> None:
        super().__init__()
        self.net, self.fault, self.calls = tiny(num_classes), fault, 0
        self.pipeline_plan = ["net.*"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and os.environ.get("RANK") == "1":
            self.fault()
        return self.net(images)


def _raise() -> None:
    raise ValueError("planted fault")


def raises_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, _raise)


def raises_on_rank1_and_crashes(num_classes: int) -> nn.Module:
    """As above; then the process aborts while it ends."""

    def fault() -> None:
        atexit.register(os.abort)
        _raise()

    return _Faulty(num_classes, fault)


def killed_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleeps_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: time.sleep(3600))


def stopped_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def slow(num_classes: int) -> nn.Module:
    """Takes its time, so that a test can interrupt it; SLOW_NET_S says how many seconds a step."""
    net, seconds = tiny(num_classes), float(os.environ.get("SLOW_NET_S", 0.2))
    net.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return net


def deaf(num_classes: int) -> nn.Module:
    """As `slow`, but in C, as a compiled step is; Python's handlers of signals wait meanwhile."""
    net, seconds = tiny(num_classes), float(os.environ.get("SLOW_NET_S", 0.2))
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def wait(*_: object) -> None:
        fraction, whole = math.modf(time.time() + seconds)
        until = (ctypes.c_long * 2)(int(whole), int(fraction * 1e9))  # struct timespec
        libc.pthread_mutex_timedlock(mutex, until)  # which no signal wakes, unlike a sleep

    net.register_forward_pre_hook(wait)
    return net


def counts_threads(num_classes: int) -> nn.Module:
    """Says how many threads the process had in its forward pass, and has when it ends."""
    net, during = tiny(num_classes), []

    def count(*_: object) -> None:
        during.append(len(os.listdir("/proc/self/task")))

    def tell() -> None:
        count()
        print(f"threads: {max(during[:-1])} then {during[-1]}", flush=True)

    net.register_forward_pre_hook(count)
    atexit.register(tell)
    return net


def counts_loading_processes(num_classes: int) -> nn.Module:
    """Says how many processes this one has for loading data while the model is built."""
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    print(f"loading processes: {sum('spawn_main' in line for line in lines)}", flush=True)
    return tiny(num_classes)


def loud(num_classes: int) -> nn.Module:
    """Its gradients overflow float16 until the loss scale has come down from 2^16."""
    net = tiny(num_classes)
    net.append(_Times(2.0**6))
    return net


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.factor


class _KilledOnce(nn.Module):
    """`dropping`, killed in rank 1's (or the only rank's) n-th forward pass, once.

    KILLED_ONCE is a file that says n, and is gone afterwards.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = dropping(num_classes), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        order = Path(os.environ.get("KILLED_ONCE", "/nowhere"))
        last = int(os.environ.get("WORLD_SIZE", 1)) - 1
        is_last = int(os.environ.get("RANK", 0)) == last
        if is_last and order.exists() and self.calls == int(order.read_text()):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(images)


def killed_once(num_classes: int) -> nn.Module:
    return _KilledOnce(num_classes)


def slow_killed_once(num_classes: int) -> nn.Module:
    """The same net, that takes its time as `slow` does."""
    net = _KilledOnce(num_classes)
    net.register_forward_pre_hook(lambda *_: time.sleep(float(os.environ["SLOW_NET_S"])))
    return net


class _Hungry(nn.Module):
    """Wants 32 TiB for a batch of more than two, which no machine has to give."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = tiny(num_classes), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(images) > 2 and self.calls == 3:
            torch.empty(1 << 45, dtype=torch.uint8)
        return self.net(images)


def hungry(num_classes: int) -> nn.Module:
    return _Hungry(num_classes)


def fetches_beside(num_classes: int) -> nn.Module:
    """A net that fails where a thread fetches batches while it computes."""
    net = tiny(num_classes)

    def look(*_: object) -> None:
        names = [thread.name for thread in threading.enumerate()]
        if "prefetch" in names:
            raise RuntimeError("a thread fetches batches")

    net.register_forward_pre_hook(look)
    return net
