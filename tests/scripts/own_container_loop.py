"""A loop of a user's own: `own_container_loop.py ENGINE RUN NUM_WORKERS`, with large batches."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accbench


def main() -> None:
    engine, run_dir, num_workers = sys.argv[1:]
    model = nn.Linear(50_000, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = TensorDataset(torch.randn(16, 50_000), torch.zeros(16, dtype=torch.long))
    loader = DataLoader(samples, batch_size=4, num_workers=int(num_workers))
    run = accbench.accelerate(
        model, optimizer, loader, engine=engine, device="cpu", output_dir=run_dir, warmup_steps=1,
        threads=1, tensorboard="off",
    )  # fmt: skip
    model, optimizer, loader = run
    for inputs, targets in loader:
        optimizer.zero_grad()
        run.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()


if __name__ == "__main__":
    main()
