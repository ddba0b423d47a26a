"""The same model, batch, autocast and optimizer in a loop of plain torch: what an engine adds.

Of accbench it takes the model, its loss and its synthetic batches alone. Ends with a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from accbench import models
from accbench.data import nested


def main() -> None:
    """Measure two windows after the warm-up."""
    begun = time.perf_counter()
    asked = _arguments()
    step = _build(asked)
    on_cuda = asked.device == "cuda"

    def wait() -> None:
        if on_cuda:
            torch.cuda.synchronize()

    first = time.perf_counter()
    step(0).item()
    compile_s, first_step_s = time.perf_counter() - first, time.perf_counter() - begun
    for number in range(1, asked.warmup_steps):
        step(number)
    wait()
    warmup_peak = torch.cuda.max_memory_allocated() if on_cuda else None
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    window_ms, host_ms, losses = [], [], []
    for window in range(2):
        started = time.perf_counter()
        for number in range(asked.window):
            loss = step(asked.warmup_steps + window * asked.window + number)
        host_ms.append(1e3 * (time.perf_counter() - started) / asked.window)
        wait()
        window_ms.append(1e3 * (time.perf_counter() - started) / asked.window)
        losses.append(loss.item())
    step_ms = sum(window_ms) / len(window_ms)
    print(json.dumps({
        "samples_per_s": 1e3 * asked.batch_size / step_ms, "step_ms": step_ms,
        "window_ms": window_ms, "host_ms": sum(host_ms) / len(host_ms), "losses": losses,
        "compile_s": compile_s if asked.how == "compiled" else 0.0, "first_step_s": first_step_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "warmup_peak_bytes": warmup_peak,
    }))  # fmt: skip


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("how", choices=("eager", "compiled"))
    for name, kind in {
        "model": str, "device": str, "amp_dtype": str, "batch_size": int, "image_size": int,
        "seq_len": int, "warmup_steps": int, "window": int,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, required=kind is str, default=1)
    return parser.parse_args()


def _build(asked: Any) -> Callable[[int], torch.Tensor]:
    """Return a training step as a careful user writes it."""
    dtype = getattr(torch, asked.amp_dtype)
    torch.backends.cudnn.benchmark = True
    spec = models.resolve(asked.model, asked.image_size, asked.seq_len)
    torch.manual_seed(0)
    net = spec.build(spec.usual_num_classes).to(asked.device)
    is_image = any(p.dim() == 4 for p in net.parameters())
    layout = torch.channels_last if is_image else torch.preserve_format
    net = net.to(memory_format=layout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=1e-2, fused=True)
    scaler = torch.amp.GradScaler(asked.device, enabled=dtype is torch.float16)
    model = torch.compile(net) if asked.how == "compiled" else net
    model.train()

    def send(tensor: torch.Tensor) -> torch.Tensor:
        of_image = layout if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(asked.device, memory_format=of_image)

    batches = [
        nested.mapped(
            spec.synthetic_batch(
                asked.batch_size, spec.usual_num_classes, torch.Generator().manual_seed(seed)
            ),
            send,
        )
        for seed in range(2)
    ]

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(asked.device, dtype):
            loss = spec.loss(model, batches[number % 2])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
