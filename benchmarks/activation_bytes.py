"""Bytes that a rank keeps between the passes with `--tp`, and with `--sequence_parallel` beside it.

    python benchmarks/activation_bytes.py [--tiny]

A rank's part of each model computes a loss under autocast to bfloat16, on shapes and types alone,
so that it takes neither memory nor other ranks. What autograd keeps for the backward pass is added
up, each memory once; weights, and their copies in bfloat16, are left out. Prints a table.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from benchmarks.smoke import add_tiny  # noqa: E402

# Model, samples and tokens, and the sizes of --tp.
CASES = (
    ("gpt2_medium", 4, 1024, (2, 4, 8)),
    ("llama_1b", 1, 2048, (2, 4)),
    ("llama_8b", 1, 2048, (2, 4, 8)),
)
TINY_CASES = (("llama_tiny", 1, 16, (2,)),)
# Autograd's names of what only turns, views or casts a tensor.
_FORMS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0")


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or a cast or a view of one."""
    step: Any = tensor.grad_fn
    if step is None:
        return isinstance(tensor, torch.nn.Parameter)
    while type(step).__name__ in _FORMS:
        step = step.next_functions[0][0]
    return type(step).__name__ == "AccumulateGrad"


def kept_bytes(name: str, batch: int, tokens: int, tp: int, shares_sequence: bool) -> int:
    """Return the bytes that a rank keeps for the backward pass of a loss."""
    from accbench import models
    from accbench.distributed.collectives import RankGroup
    from accbench.engines.common import sequence_parallel, tensor_parallel

    spec = models.resolve(name, 224, tokens)
    group, kept = RankGroup("", 0, tp), dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not is_weight(tensor):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        net = spec.build(spec.usual_num_classes)
        for path, module in net.named_modules():
            if path.endswith("attn_dropout"):  # a GPU's fast attention keeps no scores for it
                module.p = 0.0
        cut = tensor_parallel.parallelize_by_own_plan(net, group, name)
        if shares_sequence:
            sequence_parallel.parallelize_by_own_plan(net, group, name, cut)
        ids_NT = torch.zeros(batch, tokens, dtype=torch.int64)
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            loss = spec.loss(net, {"input_ids": ids_NT, "labels": ids_NT})
        del loss  # which has kept them until here
    return sum(kept.values())


def main() -> int:
    """Print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    cases = TINY_CASES if parser.parse_args().tiny else CASES
    print("| model, batch | tp | kept, MiB | with sequence_parallel | as a share |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, batch, tokens, sizes in cases:
        for tp in sizes:
            whole, part = (
                kept_bytes(name, batch, tokens, tp, with_it) for with_it in (False, True)
            )
            print(
                f"| {name}, {batch} x {tokens:,} | {tp} | {whole / 2**20:,.1f} | "
                f"{part / 2**20:,.1f} | {part / whole:.0%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
