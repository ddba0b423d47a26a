"""Loops as users write them, each by plain torch and through `accbench.accelerate`.

    own_loops.py OUT ENGINE [CASE ...]

Writes OUT/found.json: case -> [the largest distance of a loss, of a parameter], relative. Without
a CASE it is all of them.
"""

import copy
import json
import pickle
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accbench

NUM_SAMPLES, BATCH = 24, 4


class Net(nn.Module):
    """With a tied weight, a frozen one, BatchNorm, and an output in a nest."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # whose gradient would be rounding alone
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Linear(6, 8, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs) + torch.tanh(self.again(inputs)))
        return {"logits": self.last(torch.relu(self.frozen(hidden)))}

    def score(self, inputs):
        """Calls the model itself, as `generate` of language models does."""
        return self(inputs)["logits"].argmax(1)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6)


def sgd(net):
    return torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01
    )


OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1),
    "adam that climbs": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, maximize=True),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "sgd with dampening": sgd,
    "sgd of nesterov": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, nesterov=True
    ),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.01),
    "two groups": lambda net: torch.optim.AdamW(
        [
            {"params": [*net.last.parameters()], "lr": 0.03},
            {"params": [*net.first.parameters(), *net.norm.parameters()], "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
}


def loop(run, net, optimizer, loader, scheduler=None, accumulate=1, clip=None, zero_last=False,
         evaluate=False, hold_back=False):  # fmt: skip
    """Two epochs; the losses. `run` is None for plain torch."""
    losses = []
    for _ in range(2):
        for index, (inputs, targets) in enumerate(loader):
            if index % accumulate == 0 and not zero_last:
                optimizer.zero_grad()
            last = (index + 1) % accumulate == 0
            if run and hold_back and not last:
                with run.without_reduction():
                    loss = F.cross_entropy(net(inputs)["logits"], targets)
                    run.backward(loss / accumulate)
            else:
                loss = F.cross_entropy(net(inputs)["logits"], targets)
                run.backward(loss / accumulate) if run else (loss / accumulate).backward()
            losses.append(loss.detach())  # read here, it would cut XLA's step in two
            if not last:
                continue
            if clip:
                norm = (
                    run.clip_grad_norm_(clip)
                    if run
                    else nn.utils.clip_grad_norm_(net.parameters(), clip)
                )
                losses.append(norm.detach())
            optimizer.step()
            if zero_last:
                optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            if evaluate and index % 3 == 2:
                net.eval()
                with torch.no_grad():
                    for held_out, _ in evaluate:
                        losses += net(held_out)["logits"].sum(1).tolist()
                        losses += net.score(held_out).tolist()
                net.train()
    return [float(loss) for loss in losses]


def of_parts(make, seed=0):
    torch.manual_seed(seed)
    net = Net()
    data = TensorDataset(torch.randn(NUM_SAMPLES, 6), torch.randint(0, 3, (NUM_SAMPLES,)))
    return net, make(net), DataLoader(data, BATCH, shuffle=True)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


class Cases:
    def __init__(self, out, engine):
        self.out, self.engine, self.found = out, engine, {}

    def both(self, name, make=adamw, before=None, after=None, early=None, **how):
        """A case in both ways; `early` trains before accelerate is called."""
        losses, nets = [], []
        for accelerated in (False, True):
            net, optimizer, loader = of_parts(make)
            if early:
                early(net, optimizer)
            scheduler = before(optimizer) if before else None
            run, given = None, dict(how)
            if accelerated:
                loaders = [loader, *([how["evaluate"]] if "evaluate" in how else [])]
                run = accbench.accelerate(
                    net, optimizer, *loaders, engine=self.engine, amp_level="O0", threads=1,
                    log_interval=3, warmup_steps=2, tensorboard="off",
                    output_dir=str(self.out / name.replace(" ", "-")),
                )  # fmt: skip
                same, its_own, loader, *others = run
                assert same is net
                assert its_own is optimizer
                assert isinstance(net, Net)
                assert len(loader) == NUM_SAMPLES // BATCH
                if others:
                    given["evaluate"] = others[0]
            scheduler = after(optimizer) if after else scheduler
            losses.append(loop(run, net, optimizer, loader, scheduler, **given))
            nets.append({n: t.detach().cpu() for n, t in net.state_dict().items()})
            assert net.again.weight is net.first.weight
            if run:
                self.look_at_copies(net, run)
                run.close()
                torch._dynamo.reset()  # or it compiles no more after some models
        assert nets[0].keys() == nets[1].keys()
        self.found[name] = [
            max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(*losses, strict=True)),
            max((nets[0][n].double() - nets[1][n].double()).abs().max().item() for n in nets[0]),
        ]

    def look_at_copies(self, net, run):
        copied = copy.deepcopy(net).cpu()
        if self.engine != "xla":  # which hooks BatchNorm layers by a function within one
            copied = pickle.loads(pickle.dumps(copied))
        assert type(copied) is Net
        on_host = run.to_host(net.state_dict())
        assert all(torch.equal(t, on_host[n]) for n, t in copied.state_dict().items())

    def run(self, names):
        """Those of these names, or all."""
        held_out = TensorDataset(torch.randn(9, 6), torch.zeros(9))
        cases = {
            **{name: partial(self.both, make=make) for name, make in OPTIMIZERS.items()},
            "scheduler before": partial(self.both, before=cosine),
            "scheduler after": partial(self.both, after=cosine),
            "accumulation": partial(self.both, accumulate=3),
            "accumulation held back": partial(self.both, accumulate=3, hold_back=True),
            "clipping": partial(self.both, make=sgd, clip=0.1),
            "zero_grad behind the step": partial(self.both, zero_last=True),
            "gradients that add up": partial(self.both, accumulate=NUM_SAMPLES // BATCH),
            "evaluation": partial(self.both, evaluate=DataLoader(held_out, 3)),
            "state from before": partial(self.both, early=self.early),
            "overflow": self.overflow,
            "dropout": self.dropout,
        }
        for name in names or cases:
            cases[name](name)

    def dropout(self, name):
        """Right in rate and scale, another in every step, and the same from the same seed."""
        kept = []
        for attempt in range(2):
            torch.manual_seed(3)
            net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.25))
            with torch.no_grad():
                net[0].weight.copy_(torch.eye(4))
            run = accbench.accelerate(
                net, torch.optim.SGD(net.parameters(), lr=0.0), [torch.ones(5000, 4)] * 2,
                engine=self.engine, amp_level="O0", threads=1, tensorboard="off",
                output_dir=str(self.out / f"dropout-{attempt}"),
            )  # fmt: skip
            for inputs in run.loaders[0]:
                output = net(inputs)
                run.backward(output.sum())
                run.optimizer.step()
                kept.append(run.to_host(output))
            run.close()
            torch._dynamo.reset()
        values = torch.cat(kept).unique()
        torch.testing.assert_close(values, torch.tensor([0, 1 / 0.75]))
        assert not torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0], kept[2])
        rate = (torch.cat(kept[:2]) == 0).double().mean().item()
        self.found[name] = [0.0, 0.0 if abs(rate - 0.25) < 0.01 else rate]

    def overflow(self, name):
        """A step whose float16 gradients are infinite changes nothing, the next one does.

        Norms are right where a loop leaves out a step that it has clipped for, or clips twice.
        """
        net, optimizer, loader = of_parts(adamw)
        run = accbench.accelerate(
            net, optimizer, loader, engine=self.engine, amp_dtype="float16", threads=1,
            tensorboard="off", output_dir=str(self.out / "overflow"),
        )  # fmt: skip
        before = run.to_host([*net.parameters()])
        moved = []
        for factor in (1e36, 1.0):
            inputs, targets = next(iter(run.loaders[0]))
            optimizer.zero_grad()
            logits = net(inputs)["logits"]
            assert logits.dtype is torch.float32
            run.backward(factor * F.cross_entropy(logits, targets))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            after = run.to_host([*net.parameters()])
            moved.append(
                max((a - b).abs().max().item() for a, b in zip(before, after, strict=True))
            )
        norms = []
        for zeroes in (True, True, False):
            if zeroes:
                optimizer.zero_grad()
            run.backward(F.cross_entropy(net(inputs)["logits"], targets))
            norms += [run.clip_grad_norm_(1e9).item() for _ in range(2)]
        optimizer.step()
        run.close()
        once = norms[0]
        wrong = [abs(n / once - k) for n, k in zip(norms, (1, 1, 1, 1, 2, 2), strict=True)]
        self.found[name] = [moved[0], max(0.0 if moved[1] > 0 else 1.0, *wrong)]

    def early(self, net, optimizer):
        for _ in range(2):
            net(torch.ones(4, 6) * torch.arange(4)[:, None])["logits"].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    out, engine, *names = Path(sys.argv[1]), *sys.argv[2:]
    if engine == "xla":  # which has to be there before a process's first backward pass
        import torch_xla

        torch_xla.device()
    cases = Cases(out, engine)
    cases.run(names)
    (out / "found.json").write_text(json.dumps(cases.found))
