#!/usr/bin/env python
"""Runs torch's own samples of its operations through the table of engine jax, and tells which pass.

    python benchmarks/research/lowering_sweep.py --samples 2 --out sweep.jsonl
    python benchmarks/research/lowering_sweep.py --table sweep.jsonl > table.md

Each sample is captured as a training step would be, forward and backward, and held against eager
in the same dtype and in float64; see benchmarks/against_torch.py. A line of
OUT a function and dtype; functions that it has are left out, so that a sweep can be gone on with.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accbench.errors import RequestError  # noqa: E402
from benchmarks import against_torch  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Kinds that training has no use for; the rest is swept whole.
LEFT_OUT = ("fft.", "linalg.", "special.", "_refs", "signal.", "sparse", "torch_ops", "jiterator")
# Other random numbers than torch's, or what stands uninitialized: there is nothing to compare.
BY_CHANCE = (
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform"),
    *("rand_like", "randint_like", "randn", "randn_like", "randint", "multinomial"),
    *("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"),
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout_with_train"),
    *("nn.functional.rrelu", "nn.functional.multi_head_attention_forward", "svd_lowrank"),
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
)


def swept(args: argparse.Namespace) -> Iterator[Any]:
    only = args.only.split(",") if args.only else None
    names = [op for op in against_torch.op_infos() if not op.name.startswith(LEFT_OUT)]
    for op in names[args.part :: args.parts]:
        if op.name not in BY_CHANCE and (only is None or op.name in only):
            yield op


def judged(op: Any, dtype: torch.dtype, most: int) -> dict[str, Any]:
    """Counts of samples by what came out, and the first line of each kind of trouble."""
    begin, passed, wrong, refused = time.perf_counter(), 0, [], []
    for sample in against_torch.samples(op, dtype, most):
        try:
            lines = against_torch.check(op.op, (sample.input, *sample.args), sample.kwargs)
        except RequestError as error:
            refused.append(str(error).split(". Add one")[0])
            continue
        except Exception as error:  # of any kind: capture or the row failed
            lines = [f"{type(error).__name__}: {error}".split("\n")[0]]
        passed += not lines
        wrong += lines[:1]
    return {
        "name": " ".join(filter(None, (op.name, op.variant_test_name))),
        "dtype": str(dtype).removeprefix("torch."),
        "passed": passed,
        "wrong": wrong,
        "refused": refused,
        "wall_s": round(time.perf_counter() - begin, 2),
    }


def sweep(args: argparse.Namespace) -> None:
    out = Path(args.out)
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(record["name"], record["dtype"]) for record in map(json.loads, lines)}
    for op in swept(args):
        name = " ".join(filter(None, (op.name, op.variant_test_name)))
        for dtype in DTYPES:
            if dtype in op.dtypes and (name, str(dtype).removeprefix("torch.")) not in done:
                with out.open("a") as file:
                    file.write(json.dumps(judged(op, dtype, args.samples)) + "\n")


def table(path: str) -> None:
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    by_name: dict[str, dict[str, Any]] = {}
    for record in records:
        by_name.setdefault(record["name"], {})[record["dtype"]] = record
    print("| function | float32 | bfloat16 | float16 | what fails, and why |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name, dtypes in sorted(by_name.items()):
        cells = [_cell(dtypes.get(str(d).removeprefix("torch."))) for d in DTYPES]
        reasons = [line for r in dtypes.values() for line in [*r["wrong"], *r["refused"]]]
        reason = reasons[0].replace("|", "\\|")[:160] if reasons else ""
        print(f"| `{name}` | {' | '.join(cells)} | {reason} |")


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    return f"{record['passed']}/{record['passed'] + len(record['wrong']) + len(record['refused'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2, help="most samples a function and dtype")
    parser.add_argument(
        "--part", type=int, default=0, help="of the functions, every PARTS-th from this"
    )
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--only", help="names of functions, with commas between")
    parser.add_argument("--out", default="lowering_sweep.jsonl", help="where results are appended")
    parser.add_argument("--table", metavar="FILE", help="print a sweep's results in Markdown")
    args = parser.parse_args()
    if args.table:
        table(args.table)
    else:
        torch.set_num_threads(1)
        sweep(args)


if __name__ == "__main__":
    main()
