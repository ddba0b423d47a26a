"""An optimizer's update by torch's own kernel, called from a compiled step."""

import pytest
import torch

jax = pytest.importorskip("jax")

from accbench.engines.jax import lowering, torch_adamw  # noqa: E402
from benchmarks.against_torch import to_torch  # noqa: E402

# Of numbers that float32 has, so that nothing is rounded on the way.
SETTINGS = {"betas": (0.875, 0.96875), "eps": 2.0**-20, "weight_decay": 0.125}
LR, SIZES, PLACES = 2.0**-7, ((5,), (33, 7), ()), [2, 0, 1]


def test_adamw_is_torchs_to_the_bit_and_in_place() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True, **SETTINGS)

    def step(changed: list, gradients: list, counts: object) -> list:
        own, means, squares = changed
        states = [
            {"exp_avg": mean, "exp_avg_sq": square}
            for mean, square in zip(means, squares, strict=True)
        ]
        lr = jax.numpy.float32(LR)
        moved = torch_adamw.update_group(SETTINGS, lr, own, gradients, states, counts, PLACES)
        return [[p for p, _ in moved], *([s[key] for _, s in moved] for key in states[0])]

    compiled = jax.jit(step, donate_argnums=0)
    zeros = [[jax.numpy.zeros(size, "float32") for size in SIZES] for _ in range(2)]
    own = [jax.numpy.array(p.detach().numpy(), copy=True) for p in parameters]
    changed = [own, *zeros]
    for number in range(1, 4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        places = [array.unsafe_buffer_pointer() for arrays in changed for array in arrays]
        gradients = [lowering.to_jax(p.grad) for p in parameters]
        changed = compiled(changed, gradients, jax.numpy.full(3, number, "float32"))
        after = [array.unsafe_buffer_pointer() for arrays in changed for array in arrays]
        assert after == places
        for parameter, *arrays in zip(parameters, *changed, strict=True):
            state = optimizer.state[parameter]
            expected = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
            for ours, theirs in zip(arrays, expected, strict=True):
                assert torch.equal(to_torch(ours), theirs)
