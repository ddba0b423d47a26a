"""Passes over loaders that a loop leaves by `break`, in eval mode, and of lists of images.

    python -m tests.training.own_passes FOLDER

Writes JSON to FOLDER/found.json: case -> what the record counts, and what is left.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench
from accbench.recording import records
from accbench.training.accelerated_run import Run

FOLDER = Path(sys.argv[1])


def begun(name: str, *loaders: Any) -> tuple[nn.Module, Run]:
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    run = accbench.accelerate(
        net, torch.optim.SGD(net.parameters(), 0.01), *loaders, device="cpu", tensorboard="off",
        warmup_steps=2, log_interval=2, output_dir=str(FOLDER / name),
    )  # fmt: skip
    return net, run


def step(net: nn.Module, run: Run, x: torch.Tensor) -> None:
    run.optimizer.zero_grad()
    run.backward(net(x).square().mean())
    run.optimizer.step()


def counted(name: str, run: Run) -> dict[str, Any]:
    run.close()
    header, *others, end = records.read(FOLDER / name / "records.jsonl")
    assert isinstance(header, records.RunRecord)
    assert isinstance(end, records.EndRecord)
    windows = [one for one in others if isinstance(one, records.WindowRecord)]
    return {
        "windows": [(one.epoch, one.first_step, one.num_steps) for one in windows],
        "wall_s": sum(one.wall_s for one in windows),
        "batch_size": header.batch_size, "num_samples": end.num_samples,
    }  # fmt: skip


def kept() -> tuple[int, int]:
    """Threads that fetch, and processes of loaders."""
    threads = sum(thread.name == "prefetch" for thread in threading.enumerate())
    return threads, len(psutil.Process().children())


def slept() -> float:
    """Sleep, and return how many seconds it was."""
    began = time.perf_counter()
    time.sleep(0.05)
    return time.perf_counter() - began


def numbers(num_workers: int, persistent_workers: bool = False) -> DataLoader[Any]:
    data: Any = torch.arange(6.0).view(6, 1)
    return DataLoader(data, 1, num_workers=num_workers, persistent_workers=persistent_workers)


def left() -> dict[str, Any]:
    """Three steps an epoch; evaluations that are left as well, and other things after an epoch."""
    net, run = begun("left", numbers(1), numbers(0))
    others_s, started = 0.0, time.perf_counter()
    for _ in range(2):
        for index, x in enumerate(run.loaders[0]):
            step(net, run, x)
            net.eval()
            for _ in run.loaders[1]:
                others_s += slept()
                break
            net.train()
            if index == 2:
                break
        others_s += slept()
    ended, what_is_kept = time.perf_counter(), kept()
    found = counted("left", run)
    outside_s = ended - started - found["wall_s"]
    return {**found, "kept": what_is_kept, "outside_windows_s": outside_s, "others_s": others_s}


def one_batch_each() -> dict[str, Any]:
    """A pass for every step: a window is no shorter for it, nor is the warm-up."""
    net, run = begun("one_batch_each", numbers(0))
    for _ in range(5):
        for x in run.loaders[0]:
            step(net, run, x)
            break
    return counted("one_batch_each", run)


def persistent() -> dict[str, Any]:
    """A loop within another over the same loader takes its processes, as in torch."""
    net, run = begun("persistent", numbers(1, persistent_workers=True))
    outer, inner = [], []
    for x in run.loaders[0]:
        outer.append(x.item())
        for y in run.loaders[0]:
            inner.append(y.item())
            step(net, run, y)
            if len(inner) == 3:
                break
    what_is_kept = kept()
    return {**counted("persistent", run), "batches": (outer, inner), "kept": what_is_kept}


def in_eval_mode() -> dict[str, Any]:
    """As layers of BatchNorm are kept as they are."""
    data: Any = torch.arange(5.0).view(5, 1)
    net, run = begun("in_eval_mode", DataLoader(data, 2))
    net.eval()
    slept_s = 0.0
    for _ in range(2):
        for x in run.loaders[0]:
            slept_s += slept()
            step(net, run, x)
    return {**counted("in_eval_mode", run), "slept_s": slept_s}


def lists_of_images() -> dict[str, Any]:
    """Images of 3 rows, of which the loader alone knows how many there are."""
    net, run = begun("lists_of_images", DataLoader(torch.ones(5, 3, 1), 2, collate_fn=list))  # type: ignore[arg-type]
    for images in run.loaders[0]:
        step(net, run, torch.cat(images))
    return counted("lists_of_images", run)


cases = (left, one_batch_each, persistent, in_eval_mode, lists_of_images)
(FOLDER / "found.json").write_text(json.dumps({case.__name__: case() for case in cases}))
