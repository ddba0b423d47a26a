"""What autograd may be asked for of an accelerated model, each case beside plain torch.

    python -m tests.training.autograd_cases ENGINE AMP_LEVEL FOLDER NET [CASE ...]

Writes JSON to FOLDER-rankN.json: case -> how far the gradients of parameters and of the input are
from plain torch's, relative; or the error. Each of several workers takes an input of its own, and
plain torch the mean of their losses. NET is a number in `NETS`.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import autograd, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import accbench

Backward = Callable[..., Any]
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    """Two layers and a norm between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 8), norm, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(torch.sigmoid(self.norm(self.first(x))))
        return scores


def physics(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """A differential equation and a boundary value (pytorch/pytorch#181581)."""
    u = model(x)
    (du,) = autograd.grad(u.sum(), x, create_graph=True)
    assert du.requires_grad
    boundary = (model(x.detach() * 0.1) - 1).pow(2).mean()
    backward((du.sum(1) + u[:, 0]).pow(2).mean() + boundary)


def gradient_penalty(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """Of a critic (WGAN-GP)."""
    scores = model(x)[:, 0]
    (slope,) = autograd.grad(scores, x, torch.ones_like(scores), create_graph=True)
    backward(scores.mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean())


def third_derivative(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    u = model(x)[:, 0]
    (du,) = autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = autograd.grad(du[:, 0].sum(), x, create_graph=True)
    backward((ddu + u[:, None]).pow(2).mean())


def norm_of_weights_gradient(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """The batch needs no gradient; parameters' are differentiated."""
    loss = model(x.detach()).pow(2).mean()
    slopes = autograd.grad(loss, [*model.parameters()], create_graph=True)
    backward(loss + sum(slope.pow(2).sum() for slope in slopes))


def retained(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    loss = model(x).pow(2).mean()
    backward(loss, retain_graph=True)
    backward(loss)


def hooks(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """On the input, on the result, and while it is differentiated twice."""
    x.register_hook(lambda gradient: gradient * 2)
    scores = model(x)
    scores.register_hook(lambda gradient: gradient * 3)
    (slope,) = autograd.grad(scores.sum(), x, create_graph=True)
    backward(scores.mean() + slope.pow(2).mean())


def module_hooks(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    handles = [
        model.register_forward_hook(lambda module, inputs, output: output * 2),
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
    ]
    backward(model(x).pow(2).mean())
    for handle in handles:
        handle.remove()


def backward_hook(model: Any, x: torch.Tensor, backward: Backward) -> Any:
    handle = model.register_full_backward_hook(
        lambda module, of_inputs, of_outputs: (of_inputs[0] * 2,)
    )
    backward(model(x).pow(2).mean())
    handle.remove()


def written_result(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    scores = model(x)
    scores[:, 0] = 0
    scores.mul_(2)
    backward(scores.pow(2).mean())


def written_view_of_result(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    scores = model(x)
    scores.view(-1)[::2].mul_(3)
    backward(scores.pow(2).mean())


def twice_before_backward(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """Siamese."""
    backward((model(x) - model(x * 2)).pow(2).mean())


def part_without_gradient(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    with torch.no_grad():
        target = model(x)
    backward((model(x) - target * 2).pow(2).mean() + model(x)[:1].detach().sum())


def checkpointed(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    backward(checkpoint(model, x, use_reentrant=False).pow(2).mean())


def saved_on_host(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    with autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(x.device)):
        loss = model(x).pow(2).mean()
    backward(loss)


def forward_mode(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        value, tangent = forward_ad.unpack_dual(model(dual))
    backward(tangent.pow(2).mean() + value.mean())


def functional_grad(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    slope = torch.func.grad(lambda y: model(y).pow(2).mean())(x.detach())
    backward(model(x).mean() + (model(x) * slope.mean()).mean())


def functional_jvp(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    backward(tangent.pow(2).mean())


def replaced_parameters(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    changed = {name: tensor * 2 for name, tensor in model.named_parameters()}
    backward(torch.func.functional_call(model, changed, (x,)).pow(2).mean())


def jacobian(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    found = autograd.functional.jacobian(lambda y: model(y).sum(0), x, create_graph=True)
    backward(found.pow(2).mean() + model(x).mean())


def hessian_vector(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    _, found = autograd.functional.hvp(
        lambda y: model(y).pow(2).mean(), x, torch.ones_like(x), create_graph=True
    )
    backward(found.pow(2).mean() + model(x).mean())


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case for case in (
        physics, gradient_penalty, third_derivative, norm_of_weights_gradient, retained, hooks,
        module_hooks, backward_hook, written_result, written_view_of_result,
        twice_before_backward, part_without_gradient, checkpointed, saved_on_host, forward_mode,
        functional_grad, functional_jvp, replaced_parameters, jacobian, hessian_vector,
    )
}  # fmt: skip


def dropped(model: nn.Module, x: torch.Tensor, backward: Backward) -> Any:
    """Of a model with dropout, whose masks a compiled graph has not kept."""
    (slope,) = autograd.grad(model(x).sum(), x, create_graph=True)
    backward(slope.pow(2).mean())


# (layer between the two, cases)
NETS: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (lambda: nn.LayerNorm(8), tuple(CASES)),
    (lambda: nn.BatchNorm1d(8), ()),
    (lambda: nn.Dropout(0.5), ()),
]
CASES["dropped"] = dropped


def input_of(index: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 2, generator=torch.Generator().manual_seed(100 * index + rank))


def away(own: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest of the distances, relative to the tensor or to a hundredth of all together."""
    whole = sum(float(tensor.double().norm()) ** 2 for tensor in other) ** 0.5
    return max(
        float((a.detach().cpu().double() - b.double()).norm())
        / max(float(b.double().norm()), whole / 100)
        for a, b in zip(own, other, strict=True)
    )


def gradients_of(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of parameters and of the input, zeros where there is none."""
    tensors = [*net.parameters(), x]
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def try_case(name: str, index: int, own: Any, plain: Any, optimizer: Any, run: Any) -> float | str:
    """How far a case is from plain torch, or its error."""
    optimizer.zero_grad()
    x = input_of(index, run.rank).to(run.device).requires_grad_()
    try:
        CASES[name](own, x, run.backward)
        found = [*gradients_of(own, x), *own.buffers()]
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    of_workers = []
    for rank in range(WORLD_SIZE):
        net, x = copy.deepcopy(plain), input_of(index, rank).requires_grad_()
        CASES[name](net, x, torch.Tensor.backward)
        of_workers.append([*gradients_of(net, x), *net.buffers()])
    num = len([*plain.parameters()])
    means = [sum(of) / WORLD_SIZE for of in zip(*of_workers, strict=True)][:num]
    optimizer.step()
    return away(found, [*means, *of_workers[run.rank][num:]])


def main() -> None:
    engine, level, folder, which, *names = sys.argv[1:]
    make, cases = NETS[int(which)]
    torch.manual_seed(0)
    own = Net(make())
    plain = copy.deepcopy(own)
    optimizer = torch.optim.SGD(own.parameters(), 0.0)
    run = accbench.accelerate(
        own, optimizer, engine=engine, amp_level=level, device="cpu", tensorboard="off",
        output_dir=folder,
    )  # fmt: skip
    found = {}
    for index, name in enumerate(names or cases):
        with torch.no_grad():
            for before, buffer in zip(plain.buffers(), own.buffers(), strict=True):
                buffer.copy_(before)
        found[name] = try_case(name, index, own, plain, optimizer, run)
    Path(f"{folder}-rank{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
