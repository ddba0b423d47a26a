"""A script that counts how often accbench sets the number of torch's threads.

Arguments: the folder of the run; the number of threads to ask for.
"""

import sys

import torch

import accbench

numbers_set = []
set_number = torch.set_num_threads


def counted(number: int) -> None:
    numbers_set.append(number)
    set_number(number)


torch.set_num_threads = counted
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
run = accbench.accelerate(
    net, optimizer, engine="ddp", device="cpu", threads=int(sys.argv[2]), output_dir=sys.argv[1]
)
assert torch.get_num_threads() == int(sys.argv[2])
print("set:", numbers_set)
run.close()
