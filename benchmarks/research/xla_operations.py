#!/usr/bin/env python
"""Runs torch's own samples of its operations on XLA's CPU as engine xla has it, beside eager torch.

    python benchmarks/research/xla_operations.py OUT.jsonl [--samples 5] [--plain] [--only NAME,...]

Outputs and gradients in float32 are held against eager's and float64's, see
benchmarks/against_torch.py. With --plain they are torch_xla's alone. A line of OUT
a function; functions that it has are left out, so that a sweep can be gone on with. Some samples
end the process: that is noted, and another goes on with the next function.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault(  # what is asked is whether it is right
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import torch  # noqa: E402

from benchmarks import against_torch  # noqa: E402
from benchmarks.research.lowering_sweep import BY_CHANCE  # noqa: E402

LEFT_OUT = ("_refs", "sparse", "special.", "torch_ops", "jiterator")
LIMIT_S = 40


class OnDevice(against_torch.Wrapped):
    """A function whose tensors are on XLA's device."""

    def __init__(self, of: against_torch.Wrapped, device: torch.device) -> None:
        super().__init__(of.function, (), {})
        self.spec, self.learned = of.spec, of.learned
        self.leaves = [device if isinstance(leaf, torch.device) else leaf for leaf in of.leaves]
        for name, value in of.named_parameters():
            moved = torch.nn.Parameter(value.detach().to(device), value.requires_grad)
            self.register_parameter(name, moved)
        for name, value in of.named_buffers():
            self.register_buffer(name, value.to(device))

    def results(self) -> against_torch.Results:
        outputs = self.outputs()
        losses = [weighed(output) for output in outputs if output.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        gradients = [p.grad.cpu() for p in self.parameters() if p.grad is not None]
        return against_torch.Results([o.detach().cpu() for o in outputs], gradients)


def weighed(output: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    if output.is_complex():
        return weighed(output.real) + 2 * weighed(output.imag)
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float32).sin()
    return (output.float() * weights.reshape(output.shape).to(output.device)).sum()


def judged(op: Any, device: torch.device, most: int) -> dict[str, Any]:
    """How many samples are right, what is wrong with the others, and what left the compiler."""
    from accbench.engines.xla import recording

    found: dict[str, Any] = {"right": 0, "wrong": [], "errors": [], "num_fallbacks": 0}
    for sample in against_torch.samples(op, torch.float32, most):
        module = against_torch.Wrapped(op.op, (sample.input, *sample.args), sample.kwargs)
        try:
            by_torch = against_torch.eager(module)
        except RuntimeError:
            continue  # a sample whose gradient torch has none of
        try:
            exact = against_torch.in_float64(module)
        except (RuntimeError, TypeError, ValueError):
            exact = None
        before = recording.num_fallbacks()
        signal.alarm(LIMIT_S)
        try:
            ours = OnDevice(module, device).results()
        except Exception as error:  # of any kind: torch_xla's are RuntimeErrors mostly
            found["errors"].append(" ".join(f"{type(error).__name__}: {error}".split())[:200])
            continue
        finally:
            signal.alarm(0)
        found["num_fallbacks"] += recording.num_fallbacks() - before
        problems = against_torch.differences(ours, by_torch, exact)
        found["right"] += not problems
        found["wrong"] += problems[:1]
    return found


def name_of(op: Any) -> str:
    return " ".join(filter(None, (op.name, op.variant_test_name)))


def sweep(args: argparse.Namespace) -> None:
    from accbench.engines.xla import lazy_import
    from accbench.engines.xla.kernels import (
        corrections,
        norms,
        pooling,
        recurrent,
        reductions,
        resizing,
    )

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    against_torch.weighed = weighed
    device = lazy_import.torch_xla().device()
    if not args.plain:
        for module in (corrections, pooling, recurrent, reductions, resizing):
            module.replace_kernels()
        norms.replace_kernels(single_pass=False)

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    signal.signal(signal.SIGALRM, give_up)
    done = {record["name"] for record in read(args.out)}
    only = args.only.split(",") if args.only else None
    for op in against_torch.op_infos():
        name = name_of(op)
        if (
            op.name.startswith(LEFT_OUT) or op.name in BY_CHANCE or name in done
            or torch.float32 not in op.dtypes or (only and op.name not in only)
        ):  # fmt: skip
            continue
        tried(args.out).write_text(name)
        append(args.out, {"name": name, **judged(op, device, args.samples)})
    tried(args.out).unlink(missing_ok=True)


def tried(out: Path) -> Path:
    """Holds the name of the function that is under way."""
    return out.with_suffix(".now")


def append(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def told(records: list[dict[str, Any]]) -> None:
    ended = [r for r in records if "ended" in r]
    others = [r for r in records if "ended" not in r]
    wrong = [r for r in others if r["wrong"]]
    errors = [r for r in others if r["errors"] and not r["wrong"]]
    left = [r for r in others if r["num_fallbacks"]]
    num_right = len(others) - len(wrong) - len(errors)
    print(
        f"{len(records)} functions: all samples of {num_right} are right, {len(wrong)} are wrong, "
        f"{len(errors)} end in errors and {len(ended)} end the process in some; of {len(left)} "
        "something leaves the compiler"
    )
    for record in ended:
        print(f"  {record['name']}: ends the process ({record['ended']})")
    for record in wrong:
        print(f"  {record['name']}: {record['wrong'][0]}")
    for record in errors:
        print(f"  {record['name']}: {record['errors'][0]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=5, help="most samples a function")
    parser.add_argument("--plain", action="store_true", help="torch_xla without accbench's kernels")
    parser.add_argument("--only", help="names of functions, with commas between")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sweep(args)
        return
    while True:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--child"], stderr=subprocess.PIPE, text=True
        )
        if not done.returncode:
            break
        if not tried(args.out).exists():
            sys.exit(done.stderr)
        append(args.out, {"name": tried(args.out).read_text(), "ended": done.returncode})
        tried(args.out).unlink()
    told(read(args.out))


if __name__ == "__main__":
    main()
