"""Models that come wrapped, traced, without shapes or without gradients, through an engine.

    python -m tests.training.wrapped ENGINE FOLDER [KIND ...]

Writes JSON to FOLDER-rank0.json: kind -> the distance of weights from those of the plain loop, or
the error; every worker has the same batches. Without a KIND it is all of them, and of several
workers those with a process group. Functions here are also for `--model`.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import accbench
from accbench.errors import RequestError

STEPS = 3


class Head(nn.Module):
    """Calls a part of itself that may be wrapped."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.last = part, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.part(x))
        return found


def part() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def net() -> nn.Module:
    torch.manual_seed(0)
    return Head(part())


def wrapped_part(wrap: Any) -> nn.Module:
    made = net()
    made.part = wrap(made.part)
    return made


def traced() -> nn.Module:
    return torch.jit.trace(net(), torch.zeros(2, 4))  # type: ignore[no-any-return]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def quantized() -> nn.Module:
    made: nn.Module = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))), {"1.0"}
    )
    return made


def hooked() -> nn.Module:
    made = DistributedDataParallel(net())

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        found.set_result(bucket.buffer())
        return found

    made.register_comm_hook(None, hook)
    return made


def on_meta() -> nn.Module:
    return nn.Linear(4, 2, device="meta")


def compiled_images(num_classes: int) -> nn.Module:
    """For images of 8 pixels, in torch.compile."""
    made: Any = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes)))
    return made  # type: ignore[no-any-return]


KINDS = {
    "DistributedDataParallel": lambda: DistributedDataParallel(net()),
    "DataParallel": lambda: DataParallel(net()),
    "torch.compile": lambda: torch.compile(net()),
    "both": lambda: DistributedDataParallel(torch.compile(net())),  # type: ignore[arg-type]
    "part in DistributedDataParallel": lambda: wrapped_part(DistributedDataParallel),
    "part in torch.compile": lambda: wrapped_part(torch.compile),
    "traced": traced,
    "scripted part": lambda: wrapped_part(torch.jit.script),
    "frozen": lambda: net().requires_grad_(False),
    "lazy": lazy,
    "quantized": quantized,
    "hooked": hooked,
    "on meta": on_meta,
}


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(4 * STEPS, 4, generator=generator)), batch_size=4)


def train(model: Any, optimizer: Any, loader: Any, backward: Any) -> None:
    for (x,) in loader:
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Such as have none are refused before it is used.
    return torch.optim.SGD([*model.parameters()], 0.1)


@functools.cache
def expected() -> nn.Module:
    """Trained plainly; called after `accelerate`, for XLA wants to be opened before."""
    plain = net()
    train(plain, sgd(plain), data(), torch.Tensor.backward)
    return plain


def of_kind(kind: str, engine: str, folder: str) -> Any:
    """(distance of weights, whether names are as before, whether the object is)"""
    model = KINDS[kind]()
    names = [*model.state_dict()]
    run = accbench.accelerate(
        model, sgd(model), data(), engine=engine, device="cpu", tensorboard="off",
        output_dir=f"{folder}-{kind.replace(' ', '-')}", sharded=True,
    )  # fmt: skip
    accelerated, optimizer, loader = run
    train(accelerated, optimizer, loader, run.backward)
    own = {name: tensor.cpu() for name, tensor in accelerated.state_dict().items()}
    pairs = zip(own.values(), expected().state_dict().values(), strict=True)
    far = max(float((tensor - plain).abs().max()) for tensor, plain in pairs)
    run.close()
    return [far, [*own] == names, accelerated is model]


def main() -> None:
    engine, folder, *kinds = sys.argv[1:]
    rank, world_size = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    found = {}
    with tempfile.TemporaryDirectory() as store, contextlib.ExitStack() as stack:
        where = "env://" if world_size > 1 else f"file://{store}/store"
        dist.init_process_group("gloo", where, rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        of_workers = ("DistributedDataParallel", "both")
        for kind in kinds or (KINDS if world_size == 1 else of_workers):
            try:
                found[kind] = of_kind(kind, engine, folder)
            except RequestError as error:
                found[kind] = str(error)
    Path(f"{folder}-rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
