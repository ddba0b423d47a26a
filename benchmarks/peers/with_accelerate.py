"""The loop with Hugging Face Accelerate."""

import workload
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main() -> None:
    case = workload.begin()
    accelerator = Accelerator(cpu=True, dynamo_backend="inductor" if case.compiled else None)
    net = workload.build(case)
    loader = DataLoader(workload.Samples(case), case.batch_size, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, workload.optimizer(net), loader)
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = workload.loss(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
