"""A small script of a user's: what it does at its end is its first argument.

own_script.py raise|exit|nothing|dead [batch=N] [out=FILE] [spoil=replay] [KEYWORD=VALUE ...]

With spoil=replay its loss is another one under `xla:replay=off`.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accbench

how, *rest = sys.argv[1:] or ["nothing"]
keywords = {}
for argument in rest:
    name, _, value = argument.partition("=")
    keywords[name] = int(value) if value.isdigit() else value
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
batch = keywords.pop("batch", 4)
data = TensorDataset(torch.randn(32, 5), torch.randint(0, 2, (32,)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
out, spoil = keywords.pop("out", None), keywords.pop("spoil", None)
if how != "dead":
    run = accbench.accelerate(net, optimizer, DataLoader(data, batch), **keywords)
    net, optimizer, loader = run
norms = []
for _ in range(2 if how != "dead" else 0):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        if spoil and getattr(run.task.options.get("xla"), spoil, "on") == "off":
            loss = 1.1 * loss
        run.backward(loss)
        norms.append(run.clip_grad_norm_(0.1).item())
        optimizer.step()
if how == "raise":
    raise ValueError("the script's own trouble")
if how == "exit":
    sys.exit(3)
if out is not None and run.rank == 0:
    torch.save({"norms": norms, "net": run.to_host(net.state_dict())}, out)
