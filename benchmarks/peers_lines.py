"""Lines to change in the plain scripts of examples/ for accbench, Accelerate and Lightning Fabric.

python benchmarks/peers_lines.py FOLDER    # write the changed scripts, to be run
"""

import difflib
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

_IMPORTS = "from torch.utils.data import DataLoader, Dataset\n"
# Peer -> example -> (line, what stands there instead). What two workers need as well.
CHANGES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "a bare loop, for two workers": {
        "vision": [
            ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
            (_IMPORTS, "from torch.nn.parallel import DistributedDataParallel\n"
             "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"),
            ("    model = network()\n", '    dist.init_process_group("gloo")\n'
             "    model = DistributedDataParallel(network())\n"),
            ("    loader = DataLoader(Patterns(), batch_size=32, shuffle=True, drop_last=True)\n",
             "    sampler = DistributedSampler(Patterns())\n    loader = "
             "DataLoader(Patterns(), batch_size=32, sampler=sampler, drop_last=True)\n"),
            ("    for epoch in range(2):\n",
             "    for epoch in range(2):\n        sampler.set_epoch(epoch)\n"),
        ],
        "language": [
            ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
            (_IMPORTS, "from torch.nn.parallel import DistributedDataParallel\n"
             "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"),
            ("    model = Language()\n", '    dist.init_process_group("gloo")\n'
             "    model = DistributedDataParallel(Language())\n"),
            ("    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)\n",
             "    sampler = DistributedSampler(Bytes(TEXT))\n"
             "    loader = DataLoader(Bytes(TEXT), batch_size=8, sampler=sampler)\n"),
            ("    for epoch in range(2):\n",
             "    for epoch in range(2):\n        sampler.set_epoch(epoch)\n"),
        ],
    },
    "Accelerate": {
        "vision": [
            (_IMPORTS, _IMPORTS + "from accelerate import Accelerator\n"),
            ("    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)\n",
             "    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)\n"
             "    accelerator = Accelerator()\n"
             "    model, optimizer, loader, scheduler = accelerator.prepare("
             "model, optimizer, loader, scheduler)\n"),
            ("            loss.backward()\n", "            accelerator.backward(loss)\n"),
        ],
        "language": [
            (_IMPORTS, _IMPORTS + "from accelerate import Accelerator\n"),
            ("    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)\n",
             "    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)\n"
             "    accelerator = Accelerator()\n"
             "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"),
            ("            (loss / 2).backward()\n",
             "            accelerator.backward(loss / 2)\n"),
            ("                nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
             "                accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"),
        ],
    },
    "Lightning Fabric": {
        "vision": [
            (_IMPORTS, _IMPORTS + "from lightning.fabric import Fabric\n"),
            ("    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)\n",
             "    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)\n    fabric = Fabric()\n"
             "    fabric.launch()\n    model, optimizer = fabric.setup(model, optimizer)\n"
             "    loader = fabric.setup_dataloaders(loader)\n"),
            ("            loss.backward()\n", "            fabric.backward(loss)\n"),
        ],
        "language": [
            (_IMPORTS, _IMPORTS + "from lightning.fabric import Fabric\n"),
            ("    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)\n",
             "    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)\n"
             "    fabric = Fabric()\n    fabric.launch()\n"
             "    model, optimizer = fabric.setup(model, optimizer)\n"
             "    loader = fabric.setup_dataloaders(loader)\n"),
            ("            (loss / 2).backward()\n", "            fabric.backward(loss / 2)\n"),
            ("                nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
             "                fabric.clip_gradients(model, optimizer, max_norm=1.0)\n"),
        ],
    },
}  # fmt: skip


def changed(peer: str, example: str) -> str:
    """Return the plain script of an example as a peer wants it."""
    if peer == "accbench.accelerate":
        return (EXAMPLES / example / "accelerated.py").read_text()
    text = (EXAMPLES / example / "plain.py").read_text()
    for line, instead in CHANGES[peer][example]:
        if f"\n{line}" not in text:
            raise SystemExit(f"examples/{example}/plain.py has no line {line!r} any more")
        text = text.replace(f"\n{line}", f"\n{instead}", 1)
    return text


def num_lines(peer: str, example: str) -> int:
    """Count the lines with something on them that a peer's script has and the plain one has not."""
    plain = (EXAMPLES / example / "plain.py").read_text().splitlines()
    diff = difflib.ndiff(plain, changed(peer, example).splitlines())
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in diff)


def table() -> str:
    """Return the counts as a Markdown table."""
    peers = ("accbench.accelerate", *CHANGES)
    rows = [
        f"| {peer} | {num_lines(peer, 'vision')} | {num_lines(peer, 'language')} |"
        for peer in peers
    ]
    head = ("### Lines changed in the plain scripts of examples/\n\n"
            "| for | vision | language |\n| --- | ---: | ---: |\n")  # fmt: skip
    last = (
        "\n\ntimm's train.py and transformers' Trainer have loops of their own in place of these."
    )
    return head + "\n".join(rows) + last


def write_scripts(folder: Path) -> None:
    """Write the changed scripts into `folder`, to be run in an environment that has the peers."""
    folder.mkdir(parents=True, exist_ok=True)
    for peer in ("accbench.accelerate", *CHANGES):
        for example in ("vision", "language"):
            name = f"{example}-{peer.replace(' ', '_').replace(',', '')}.py"
            # The text that the language model reads stands beside examples/.
            text = changed(peer, example)
            text = text.replace("Path(__file__).parents[2]", f"Path({str(EXAMPLES.parent)!r})")
            (folder / name).write_text(text)
