"""Reductions under engine xla beside torch's own, asked in a process of its own.

    python -m tests.engines.xla_reductions

Prints one line of JSON: how many were tried, and those that are not as on the CPU, each in words.
"""

import json
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402

from accbench.engines.xla import importing, reductions  # noqa: E402

DEVICE = importing.torch_xla().device()
reductions.replace_kernels()

REDUCED = {
    "sum": lambda x, d, keep: x.sum(d, keep),
    "sum of integers": lambda x, d, keep: (x * 9).int().sum(d, keep),
    "sum in double": lambda x, d, keep: x.sum(d, keep, dtype=torch.float64),
    "mean": lambda x, d, keep: x.mean(d, keep),
    "var": lambda x, d, keep: x.var(d, keepdim=keep),
    "std": lambda x, d, keep: x.std(d, keepdim=keep, correction=0),
    "var_mean": lambda x, d, keep: torch.stack(torch.var_mean(x, d, keepdim=keep)),
    "std_mean": lambda x, d, keep: torch.stack(torch.std_mean(x, d, keepdim=keep)),
    # torch's own gradient of logsumexp(()) without keepdim is an error.
    "logsumexp": lambda x, d, keep: x.logsumexp(d, True),
    "amax": lambda x, d, keep: x.amax(d, keep),
    "amin": lambda x, d, keep: x.amin(d, keep),
    "vector_norm": lambda x, d, keep: torch.linalg.vector_norm(x, 3, d, keep),
    "norm": lambda x, d, keep: torch.norm(x, 2, d, keep),
    "count_nonzero": lambda x, d, keep: (x > 0).count_nonzero(d),
}
NAMED = ((), (1,), (-1, 0), (0, 1, 2))
WRONG = ((3,), (-4, 0), (1, 1), (0, -3))


def outcome(reduced, x, dims, keep):
    """What comes of it, with its gradient where it has one; or the kind of error."""
    x = x.detach().requires_grad_()
    try:
        found = reduced(x, dims, keep)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    if not found.is_floating_point():
        return found.cpu(), None
    weights = torch.arange(1.0, found.numel() + 1).view(found.shape).to(found.device)
    return found.detach().cpu(), torch.autograd.grad((found * weights).sum(), x)[0].cpu()


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
    # 4,096 ones and more: in bfloat16 itself their sum would stand still at 256.
    many = torch.ones(2, 5000, dtype=torch.bfloat16).to(DEVICE)
    for name, dims, wanted in (("sum", (1,), 5000), ("mean", (), 1)):
        got = float(REDUCED[name](many, dims, False).max())
        tried += 1
        if abs(got - wanted) > wanted / 256:
            others.append(f"{name} of bfloat16: {got}, {wanted}")
    print(json.dumps({"tried": tried, "others": others}))


if __name__ == "__main__":
    main()
