"""Three steps of a small net through engine inductor, in two types with a cache that they share.

    python -m tests.engines.cached_types FOLDER

All is in one process, which forgets what it has compiled before each start but for what is on disk.
Prints JSON: TYPE-CACHE -> losses.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import accbench


def losses_of(dtype: str, cache: Path, folder: Path) -> list[float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = accbench.accelerate(
        net, optimizer, engine="inductor", amp_level="O1", amp_dtype=dtype, device="cpu",
        tensorboard="off", output_dir=str(folder),
    )  # fmt: skip
    losses, inputs = [], torch.randn(8, 16)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        run.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    run.close()
    return losses


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    for dtype, cache in (("bfloat16", "shared"), ("float16", "shared"), ("float16", "fresh")):
        name = f"{dtype}-{cache}"
        found[name] = losses_of(dtype, folder / cache, folder / name)
    print(json.dumps(found))


main()
