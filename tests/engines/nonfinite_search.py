"""The search for values that are not finite, by one engine.

    python -m tests.engines.nonfinite_search xla|jax

Prints JSON: of each search the value, the gradient that has it, and the result's shape and value.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

Search = Callable[[list[torch.Tensor]], Any]
# Of gradients that are searched together in rows, and ones that are not; each is spoilt once.
SHAPES = [(64, 16, 3, 3), (1024, 32), (7,), (), (3, 5, 7), (2048,), (0, 4)]


def search_by_xla() -> Search:
    from accbench.engines.xla import lazy_import

    device = lazy_import.torch_xla().device()
    from accbench.engines.xla.sync_free import nonfinite

    return lambda gradients: nonfinite([gradient.to(device) for gradient in gradients]).cpu()


def search_by_jax() -> Search:
    import jax

    from accbench.engines.jax.gradient_ops import any_nonfinite

    search = jax.jit(any_nonfinite)
    return lambda gradients: search([jax.numpy.asarray(g.numpy()) for g in gradients])


def main() -> None:
    search = {"xla": search_by_xla, "jax": search_by_jax}[sys.argv[1]]()
    found = []
    for value in (0.0, float("inf"), float("-inf"), float("nan")):
        for place in range(len(SHAPES) - 1):
            gradients = [torch.randn(shape) for shape in SHAPES]
            gradients[1] = gradients[1].half()
            gradients[place].view(-1)[-1] = value
            of_all = search(gradients)
            found.append((str(value), place, list(of_all.shape), float(of_all)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
