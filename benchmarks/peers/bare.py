"""The loop of PyTorch's tutorials, by itself or under torchrun."""

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    case = workload.begin()
    net, samples, sampler = workload.build(case), workload.Samples(case), None
    if case.compiled:
        net = torch.compile(net)
    if case.workers > 1:
        dist.init_process_group("gloo")
        net, sampler = DistributedDataParallel(net), DistributedSampler(samples)
    loader = DataLoader(samples, case.batch_size, sampler=sampler, shuffle=sampler is None)
    optimizer = workload.optimizer(net)
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = workload.loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
    if case.workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
