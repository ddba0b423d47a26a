"""The loop with `accbench.accelerate`."""

import workload
from torch.utils.data import DataLoader

import accbench


def main() -> None:
    case = workload.begin()
    net = workload.build(case)
    optimizer = workload.optimizer(net)
    loader = DataLoader(workload.Samples(case), case.batch_size, shuffle=True)
    run = accbench.accelerate(
        net, optimizer, loader, engine="inductor" if case.compiled else "ddp", device="cpu",
        threads=case.threads, output_dir=f"{case.folder}/run",
    )  # fmt: skip
    net, optimizer, loader = run
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = workload.loss(net(inputs), targets)
        run.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
