"""The loop with Lightning Fabric."""

import torch
import workload
from lightning.fabric import Fabric
from torch.utils.data import DataLoader


def main() -> None:
    case = workload.begin()
    strategy = "ddp" if case.workers > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=case.workers, strategy=strategy)
    fabric.launch()
    net = workload.build(case)
    optimizer = workload.optimizer(net)
    if case.compiled:
        net = torch.compile(net)
    net, optimizer = fabric.setup(net, optimizer)
    loader = DataLoader(workload.Samples(case), case.batch_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = workload.loss(net(inputs), targets)
        fabric.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
