"""Loops as users write them, with whole parameters and with `dp_shard`; one of several ranks.

    python -m tests.scripts.own_sharded_loops OUT all|repeated|inductor|alone

Writes OUT/found-RANK.json: case -> [the largest distance of a loss, of a parameter, of a moment].
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accbench
from accbench.errors import RequestError

NUM_SAMPLES, BATCH = 48, 4


class Block(nn.Module):
    """With a number of rows that no number of workers divides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, inputs):
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


class Net(nn.Module):
    """Blocks, a tied weight, BatchNorm, a layer that is frozen at first, and a large embedding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(7, 3)
        self.table = nn.Embedding.from_pretrained(torch.zeros(64, 7), freeze=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs) + torch.tanh(self.again(inputs)))
        hidden = hidden + self.table((8 * inputs.abs()).long().sum(1) % 64)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-3)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def two_groups(net):
    last = [*net.last.parameters()]
    others = [p for p in net.parameters() if all(p is not other for other in last)]
    return torch.optim.AdamW([{"params": last, "lr": 0.03}, {"params": others}], lr=0.01, eps=1e-3)


def fused(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3, fused=True)


CASES = {
    "fused adamw, zero 2": {"make": fused, "zero": 2},
    "sgd, replicas of shards": {"make": sgd, "dp_shard": 2},
    "accumulated and clipped": {"make": sgd, "accumulate": 3, "clip": 0.1},
    "unfrozen on the way, evaluated in between": {"unfreezes": True, "evaluates": True},
    "two groups, read outside of calls": {"make": two_groups, "reads": True},
    "stepped before, saved and loaded": {"steps_before": True, "loads": True},
}  # fmt: skip
# One thing at a time, as it is found in those above.
REPEATED = {
    "adamw": {},
    "rmsprop": {"make": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, eps=1e-3)},
    "two groups": {"make": two_groups},
    "unfrozen on the way": {"unfreezes": True},
    "evaluated in between": {"evaluates": True},
    "stepped before": {"steps_before": True},
    "read outside of calls": {"reads": True},
    "saved and loaded": {"make": sgd, "loads": True},
    "adamw, saved and loaded": {"loads": True},
}  # fmt: skip
# Of optimizers without a fused form one is like another.
OVERFLOWS = {"all": (fused, sgd), "repeated": (adamw,)}


def parts(make):
    torch.manual_seed(0)
    net = Net()
    data = TensorDataset(torch.randn(NUM_SAMPLES, 7), torch.randint(0, 3, (NUM_SAMPLES,)))
    return net, make(net), DataLoader(data, BATCH, shuffle=True)


def state_of(run, net, optimizer):
    """Whole tensors of the model and of the optimizer, on the host."""
    moments = run.to_host(optimizer.state_dict())["state"]
    named = {f"{i} {k}": v for i, state in moments.items() for k, v in state.items()}
    return run.to_host(net.state_dict()), {k: v for k, v in named.items() if torch.is_tensor(v)}


def train(out, name, flags, make=adamw, accumulate=1, clip=None, unfreezes=False,
          evaluates=False, steps_before=False, reads=False, loads=False):  # fmt: skip
    """Train for two epochs; return losses, the model's and the optimizer's state."""
    net, optimizer, loader = parts(make)
    if steps_before:
        net(torch.arange(28.0).view(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    run = begin(out / name, net, optimizer, loader, flags)
    assert isinstance(net, Net)
    losses = []
    for epoch in range(2):
        for index, (inputs, targets) in enumerate(run.loaders[0]):
            loss = F.cross_entropy(net(inputs), targets)
            if reads:
                loss = loss + net(inputs.flip(1)).square().mean() + net.table.weight.cos().mean()
            run.backward(loss / accumulate)
            assert hasattr(net.table.weight, "placements") == bool(flags)
            losses.append(loss.item())
            if (index + 1) % accumulate:
                continue
            if clip:
                losses.append(run.clip_grad_norm_(clip).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if evaluates and index == 1:
                net.eval()
                with torch.no_grad():
                    losses += net(inputs).sum(1).tolist()
                assert all(hasattr(p, "placements") for p in net.parameters()) == bool(flags)
                net.train()
        if unfreezes:
            net.blocks[1].requires_grad_(True)
        if loads and epoch == 0:
            saved = run.to_host((net.state_dict(), optimizer.state_dict()))
            run.close()
            net, optimizer, loader = parts(make)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            run = begin(out / f"{name}, again", net, optimizer, loader, flags)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    assert net.again.weight is net.first.weight
    state = state_of(run, net, optimizer)
    run.close()
    return losses, *state


def begin(folder, net, optimizer, loader, flags):
    return accbench.accelerate(
        net, optimizer, loader, amp_level="O0", threads=1, warmup_steps=2, tensorboard="off",
        device="cpu", output_dir=str(folder).replace(" ", "-").replace(",", ""), **flags,
    )  # fmt: skip


def distance(whole, sharded):
    """The largest distance, by the largest value of each tensor where that is above 1."""
    assert whole.keys() == sharded.keys()
    return max(
        (whole[k].double() - sharded[k].double()).abs().max().item()
        / max(1.0, whole[k].abs().max().item())
        for k in whole
    )


def compare(out, name, engine="ddp", zero=None, dp_shard="auto", **how):
    losses, model, moments = train(out, f"{name} whole", {}, **how)
    flags = {"dp_shard": dp_shard, "zero": zero, "engine": engine}
    of_shards = train(out, f"{name} sharded", flags, **how)
    torch._dynamo.reset()
    assert len(losses) == len(of_shards[0])
    return [
        max(abs(a - b) for a, b in zip(losses, of_shards[0], strict=True)),
        distance(model, of_shards[1]), distance(moments, of_shards[2]),
    ]  # fmt: skip


def overflow(out, make):
    """Steps: one whose float16 gradients overflow on the last rank alone, and one without."""
    net, optimizer, loader = parts(make)
    flags = {"dp_shard": "auto", "amp_level": "O1", "amp_dtype": "float16"}
    run = accbench.accelerate(
        net, optimizer, loader, threads=1, tensorboard="off", device="cpu",
        output_dir=str(out / f"overflow-{make.__name__}"), **flags,
    )  # fmt: skip
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    before, moved = run.to_host(net.state_dict()), []
    for factor in (1e36 if last else 1.0, 1.0):
        inputs, targets = next(iter(run.loaders[0]))
        optimizer.zero_grad()
        run.backward(factor * F.cross_entropy(net(inputs), targets))
        optimizer.step()
        after = run.to_host(net.state_dict())
        moved.append(
            max((after[n] - before[n]).abs().max().item() for n, _ in net.named_parameters())
        )
    run.close()
    return moved


def main():
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if sys.argv[2] == "alone":  # every rank but the first leaves to_host out
        net, optimizer, loader = parts(adamw)
        run = begin(out / "alone", net, optimizer, loader, {"dp_shard": "auto", "timeout_s": 5})
        net.late = nn.Linear(7, 1)
        try:
            run.backward(net.late(torch.ones(2, 7)).mean())
        except RequestError as error:
            (out / f"late-{rank}.txt").write_text(str(error))
        del net.late
        for inputs, targets in run.loaders[0]:
            run.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                run.to_host(net.state_dict())
        return
    found = {}
    if sys.argv[2] == "inductor":
        found["adamw"] = compare(out, "adamw", engine="inductor")
    else:
        cases, makers = {"all": CASES, "repeated": REPEATED}[sys.argv[2]], OVERFLOWS[sys.argv[2]]
        found = {name: compare(out, name, **how) for name, how in cases.items()}
        found |= {f"overflow {make.__name__}": overflow(out, make) for make in makers}
    (out / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # As Python does at the end of a process that was started, and not of one that was forked.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
