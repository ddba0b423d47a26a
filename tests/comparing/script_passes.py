"""The numerics passes of a script, in one process: what a comparison would say of engine ddp.

    python -m tests.comparing.script_passes FOLDER CASE ...

Writes JSON to FOLDER/found.json: case -> (verdict, reason). The script is this file as well, with
a CASE alone:

- eval: the model is in eval mode;
- halves: two optimizers step by the same gradients, and the one that accelerate has last;
- twice: two steps by a batch;
- bare: no loader.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench


def train(case: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    batches = DataLoader(torch.randn(8, 5), 4)  # type: ignore[arg-type]
    given = net[0] if case == "halves" else net
    optimizer = torch.optim.AdamW(given.parameters(), lr=0.05)
    run = accbench.accelerate(net, optimizer, *([] if case == "bare" else [batches]))
    second = torch.optim.SGD(net[2].parameters(), lr=0.05)
    if case == "eval":
        net.eval()
    for inputs in batches if case == "bare" else run.loaders[0]:
        for _ in range(2 if case == "twice" else 1):
            net.zero_grad()
            run.backward(net(inputs).square().mean())
            if case == "halves":
                second.step()
            optimizer.step()


def verdict(folder: Path, case: str) -> tuple[str, str | None]:
    from accbench import config, resolving
    from accbench.comparing import script_check_pass, script_reference_pass
    from accbench.distributed.process_group import Topology
    from accbench.report import numerics
    from accbench.report import run as runs

    flags = [
        f"--script={__file__}", f"--script_args={case}", "--device=cpu", "--threads=1",
        "--tensorboard=off", "--max_steps=2", "--nproc_per_node=1",
    ]  # fmt: skip
    reference, checked = (
        resolving.resolve(config.parse([*flags, f"--output_dir={folder / name}"]))
        for name in (f"{case}-reference", f"{case}-checked")
    )
    script_reference_pass.run(reference, Topology())
    script_check_pass.run(checked, Topology(), reference.run_dir)
    row = runs.read_if_there(checked.run_dir)
    found = numerics.judge_run(row, runs.read_if_there(reference.run_dir), (row, row))
    return found.verdict, found.reason


def main() -> None:
    first, *cases = sys.argv[1:]
    if not cases:
        train(first)
        return
    found = {case: verdict(Path(first), case) for case in cases}
    Path(first, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
