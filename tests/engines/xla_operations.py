"""Operations under engine xla beside torch's own, asked in a process of its own.

    python -m tests.engines.xla_operations

Prints one line of JSON: case -> what is not as on the CPU, in words; null where all is.
"""

import json
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402

from accbench.engines.xla import lazy_import, recording
from accbench.engines.xla.kernels import corrections, norms, pooling, reductions, resizing
from tests.engines import operation_cases

DEVICE = lazy_import.torch_xla().device()
for module in (corrections, pooling, reductions, resizing):
    module.replace_kernels()
norms.replace_kernels(single_pass=False)


def outcome(function, x):
    """Results, the gradient, and the results under inference mode."""
    x = x.detach().requires_grad_()
    found = function(x)
    found = found if isinstance(found, tuple) else (found,)
    weights = torch.arange(1.0, found[0].numel() + 1).view(found[0].shape).to(x.device)
    (gradient,) = torch.autograd.grad((found[0] * weights).sum(), x)
    with torch.inference_mode():
        again = function(x.detach().clone())
    again = again if isinstance(again, tuple) else (again,)
    return [tensor.detach().cpu() for tensor in (*found, gradient, *again)]


def problem_of(case, x) -> str | None:
    num_left = recording.num_fallbacks()
    try:
        wanted, got = outcome(case.function, x), outcome(case.function, x.to(DEVICE))
    except RuntimeError as error:
        return str(error)
    same = [a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-4, 1e-4)
            for a, b in zip(got, wanted, strict=True)]  # fmt: skip
    left = recording.num_fallbacks() - num_left
    if not all(same) or (case.stays and left):
        return f"same {same}, {left} left the compiler"
    return None


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    problems = {}
    for case in operation_cases.cases():
        x = torch.randn(case.shape, generator=generator)
        if "True)" in case.name:
            x = x.relu()  # the largest of a window more than once
        problems[case.name] = problem_of(case, x)
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
