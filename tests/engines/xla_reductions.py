"""Reductions under engine xla beside torch's own, asked in a process of its own.

    python -m tests.engines.xla_reductions

Prints one line of JSON: how many were tried, and those that are not as on the CPU, each in words.
"""

import json
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402

from accbench.engines.xla import lazy_import
from accbench.engines.xla.kernels import reductions  # noqa: E402

DEVICE = lazy_import.torch_xla().device()
reductions.replace_kernels()

REDUCED = {
    "sum": lambda x, d, keep: x.sum(d, keep),
    "sum of integers": lambda x, d, keep: (x * 9).int().sum(d, keep),
    "sum in double": lambda x, d, keep: x.sum(d, keep, dtype=torch.float64),
    "mean of integers": lambda x, d, keep: (x * 9).int().mean(d, keep, dtype=torch.float32),
    "mean": lambda x, d, keep: x.mean(d, keep),
    "var": lambda x, d, keep: x.var(d, keepdim=keep),
    "std": lambda x, d, keep: x.std(d, keepdim=keep, correction=0),
    "var_mean": lambda x, d, keep: torch.stack(torch.var_mean(x, d, keepdim=keep)),
    "std_mean": lambda x, d, keep: torch.stack(torch.std_mean(x, d, keepdim=keep)),
    # torch's own gradient of logsumexp(()) without keepdim is an error.
    "logsumexp": lambda x, d, keep: x.logsumexp(d, True),
    "logsumexp of integers": lambda x, d, keep: (x * 9).int().logsumexp(d, True),
    "amax": lambda x, d, keep: x.amax(d, keep),
    "amin": lambda x, d, keep: x.amin(d, keep),
    "vector_norm": lambda x, d, keep: torch.linalg.vector_norm(x, 3, d, keep),
    "norm": lambda x, d, keep: torch.norm(x, 2, d, keep),
    "count_nonzero": lambda x, d, keep: (x > 0).count_nonzero(d),
}
NAMED = ((), (1,), (-1, 0), (0, 1, 2))
WRONG = ((3,), (-4, 0), (1, 1), (0, -3))


def outcome(reduced, x, dims, keep):
    """What comes of it, with its gradient where it has one; or the error."""
    x = x.detach().requires_grad_()
    try:
        found = reduced(x, dims, keep)
    except (IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not found.requires_grad:
        return found.cpu(), None
    weights = torch.arange(1.0, found.numel() + 1).view(found.shape).to(found.device)
    return found.detach().cpu(), torch.autograd.grad((found * weights).sum(), x)[0].cpu()


def error_of(function, given) -> str:
    try:
        return f"none, but {function(*given)}"
    except RuntimeError as error:
        return str(error)


def same(got, wanted) -> bool:
    if isinstance(got, str) or isinstance(wanted, str):
        return got == wanted
    return all(
        a is b is None
        or (a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-4, 1e-5))
        for a, b in zip(got, wanted, strict=True)
    )


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tried, others = 0, []
    for x in (torch.randn(3, 4, 5, generator=generator), torch.tensor(0.7)):
        for name, reduced in REDUCED.items():
            if x.dim() == 0 and name in ("var", "std", "var_mean", "std_mean"):
                continue  # of one number
            for dims in (*NAMED, *WRONG):
                for keep in (False, True):
                    wanted = outcome(reduced, x, dims, keep)
                    got = outcome(reduced, x.to(DEVICE), dims, keep)
                    tried += 1
                    if not same(got, wanted):
                        others.append(f"{name} of {x.dim()} over {dims}, {keep}: {got}, {wanted}")
    # In bfloat16 itself a sum of ones would stand still at 256.
    many = torch.ones(5000, dtype=torch.bfloat16).to(DEVICE)
    sums = {"sum": 5000, "mean": 1}
    for name, wanted in sums.items():
        for given in ((), ((0,),), ((0,), False)):
            got = float(getattr(many, name)(*given))
            tried += 1
            if abs(got - wanted) > wanted / 256:
                others.append(f"{name}{given} of bfloat16: {got}, {wanted}")
    whole = torch.arange(6).view(2, 3).to(DEVICE)
    for name in ("mean", "var", "std", "norm"):
        for given in ((), ((0,),)) if name != "norm" else ((), (2, (0,))):
            got = error_of(getattr(whole, name), given)
            tried += 1
            if "floating point" not in got:
                others.append(f"{name}{given} of whole numbers: {got}")
    print(json.dumps({"tried": tried, "others": others}))


if __name__ == "__main__":
    main()
