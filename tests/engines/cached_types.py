"""Three steps of a small net through engine inductor: `ENGINE-FLAGS... FOLDER`, losses as JSON.

python -m tests.engines.cached_types AMP_DTYPE FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import accbench


def main() -> None:
    dtype, folder = sys.argv[1:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = accbench.accelerate(
        net, optimizer, engine="inductor", amp_level="O1", amp_dtype=dtype, device="cpu",
        tensorboard="off", output_dir=folder,
    )  # fmt: skip
    losses, inputs = [], torch.randn(8, 16)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        run.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    Path(f"{folder}.json").write_text(json.dumps(losses))


main()
