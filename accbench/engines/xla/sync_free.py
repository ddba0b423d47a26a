"""torch_xla's sync-free AdamW and GradScaler, in fewer pieces for XLA.

Whether a step is skipped is a tensor, so that nothing waits for the host. torch_xla's AdamW is
one operation a parameter, with a step count of its own and all that follows from it, and the
search for overflows one reduction a parameter: hundreds of kernels that move a few bytes.
"""

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla.amp
import torch_xla.core.xla_model as xm
from torch_xla.amp import syncfree

_ROW = 1024  # elements


class SharedCounts(torch.optim.Optimizer):
    """Of optimizers here: parameters that step together share one step count."""

    @abc.abstractmethod
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """One step where `found_inf` is 0; where it is not, nothing changes."""

    stepped: frozenset[torch.Tensor] | set[torch.Tensor] = frozenset()
    """Parameters that had a gradient in the last step."""

    anew = False
    """Make new tensors of step counts in each step, instead of writing over the old: XLA pairs
    results of one number, the loss among them, with such places by their order, and copies those
    whose place another result has got."""

    @staticmethod
    def is_recorded() -> bool:
        """Whether this step is traced to be kept: then its state has to stay where it is."""
        return False

    def share_counts(self, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have all parameters of one step count share it.

        Args:
            send: copies a tensor from the host to the device, with nothing left to compute.
        """
        shared: dict[float, torch.Tensor] = {}
        for parameter, state in self.state.items():
            if parameter.requires_grad:
                count = float(state["step"])
                if count not in shared:
                    shared[count] = send(torch.tensor(count))
                state["step"] = shared[count]

    def _count(
        self, closure: Any, found_inf: torch.Tensor | None
    ) -> tuple[dict[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Count a step where `found_inf` is 0.

        Returns:
            Of each parameter with a gradient the count that it has if this step is taken, and
            whether it is. The first waits for no search, and is shared as the counts are.
        """
        assert closure is None
        assert found_inf is not None
        taken = found_inf == 0
        active = self.stepped = {p for p in self._parameters() if p.grad is not None}
        if not self.is_recorded():
            self.keep_apart(active, torch.clone)
        counts = {id(count): count for count in (self.state[p]["step"] for p in active)}
        reached = {key: count + 1 for key, count in counts.items()}
        of_active = {p: reached[id(self.state[p]["step"])] for p in active}
        one = taken.float()
        if self.anew:
            new = {key: count + one for key, count in counts.items()}
            for parameter in active:
                state = self.state[parameter]
                state["step"] = new[id(state["step"])]
        else:
            for count in counts.values():
                count.add_(one)
        return of_active, taken

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def keep_apart(
        self,
        active: frozenset[torch.Tensor] | set[torch.Tensor],
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> bool:
        """Give another count to parameters that stay while others of the same count step.

        Returns:
            Whether there were any.
        """
        stepping = {id(self.state[p]["step"]) for p in active}
        left: dict[int, torch.Tensor] = {}
        for parameter in self._parameters():
            count = self.state[parameter]["step"]
            if parameter not in active and id(count) in stepping:
                if id(count) not in left:
                    left[id(count)] = copy(count)
                self.state[parameter]["step"] = left[id(count)]
        return bool(left)


class AdamW(SharedCounts, syncfree.AdamW):
    """The update rule of torch.optim.AdamW, and of Adam where the group's decay is coupled."""

    as_vectors = False
    """Update every parameter as a vector. A convolution's gradient comes with its channels last
    on a GPU, and XLA would lay out the parameter and both moments like it, and all three back;
    on a CPU it is slower."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """One step where `found_inf` is 0; where it is not, nothing changes."""
        counts, taken = self._count(closure, found_inf)
        for group in self.param_groups:
            of_count: dict[int, tuple[torch.Tensor, ...]] = {}
            for parameter in group["params"]:
                if parameter in counts:
                    count = counts[parameter]
                    if id(count) not in of_count:
                        of_count[id(count)] = _factors(group, count)
                    shape = (-1,) if self.as_vectors else parameter.shape
                    factors = of_count[id(count)]
                    _update(group, parameter, self.state[parameter], factors, taken, shape)


class SGD(SharedCounts, torch.optim.SGD):
    """torch.optim.SGD's update rule, for an optimizer that a user built."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """One step where `found_inf` is 0; where it is not, nothing changes."""
        counts, taken = self._count(closure, found_inf)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in counts:
                    _descend(group, parameter, self.state[parameter], taken)


def class_by_rule(entry: Any) -> type[torch.optim.Optimizer]:
    """Return a class that steps as `entry.update` says and skips by a tensor.

    Args:
        entry: an `accbench.engines.optimizers.Optimizer`.
    """

    class ByRule(SharedCounts, entry.torch_class):
        """An optimizer by its formula alone."""

        @torch.no_grad()
        def step(  # type: ignore[override]
            self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
        ) -> None:
            """One step where `found_inf` is 0; where it is not, nothing changes."""
            counts, taken = self._count(closure, found_inf)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter not in counts:
                        continue
                    assert parameter.grad is not None
                    state, count = self.state[parameter], counts[parameter]
                    before = {key: state[key] for key in entry.state_keys}
                    updated, after = entry.update(
                        torch, group, _rate(group, count), parameter, parameter.grad, before, count
                    )
                    for old, new in [(parameter, updated), *((before[k], after[k]) for k in after)]:
                        old.copy_(torch.where(taken, new, old))

    ByRule.__name__ = ByRule.__qualname__ = entry.torch_class.__name__
    return ByRule


def _descend(
    group: dict[str, Any], parameter: torch.Tensor, state: dict[str, torch.Tensor],
    taken: torch.Tensor,
) -> None:  # fmt: skip
    """As torch.optim.sgd._single_tensor_sgd has it."""
    assert parameter.grad is not None
    way = -parameter.grad if group["maximize"] else parameter.grad
    if group["weight_decay"]:
        way = way + group["weight_decay"] * parameter
    if group["momentum"]:
        buffer, part = state["momentum_buffer"], 1 - group["dampening"]
        if group["dampening"]:  # which the first step is without
            part = torch.where(state["step"] == 1, 1.0, part)
        new = group["momentum"] * buffer + part * way
        way = way + group["momentum"] * new if group["nesterov"] else new
        buffer.copy_(torch.where(taken, new, buffer))
    rate = _rate(group, state["step"])
    parameter.copy_(torch.where(taken, parameter - rate * way, parameter))


def _rate(group: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    """The learning rate as a tensor, for what follows must not be recompiled when it changes.

    torch_xla takes a number for an input of the graph, but writes 0 and 1 into it, where many a
    schedule begins or ends: so those are sent.
    """
    rate = group["lr"]
    if not isinstance(rate, torch.Tensor) and rate in (0.0, 1.0):
        (rate,) = xm.send_cpu_data_to_device([torch.tensor(float(rate))], like.device)
    return torch.zeros_like(like) + rate


def _factors(group: dict[str, Any], count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(learning rate, the corrections of both moments' bias)."""
    # Together, which is one kernel; full, for a tensor of the host's would be sent at each step.
    betas = torch.stack([torch.full_like(count, beta) for beta in group["betas"]])
    return _rate(group, count), *(1 - betas**count).unbind()


def _decoupled(group: dict[str, Any]) -> bool:
    """Whether weights decay beside the gradient, as in AdamW, and not in it, as in Adam."""
    return bool(group.get("decoupled_weight_decay", True))


def _update(
    group: dict[str, Any], parameter: torch.Tensor, state: dict[str, torch.Tensor],
    factors: tuple[torch.Tensor, ...], taken: torch.Tensor, shape: Sequence[int],
) -> None:  # fmt: skip
    """As torch.optim.adam._single_tensor_adam has it, but that no number is computed for all
    elements where each can: a GPU would launch a kernel for it."""
    rate, correction1, correction2 = factors
    beta1, beta2 = group["betas"]
    assert parameter.grad is not None
    gradient, weights, mean, square = (
        tensor.reshape(shape)
        for tensor in (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
    )
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"] and not _decoupled(group):
        gradient = gradient + group["weight_decay"] * weights
    new_mean = torch.where(taken, mean + (1 - beta1) * (gradient - mean), mean)
    new_square = torch.where(taken, beta2 * square + (1 - beta2) * gradient * gradient, square)
    denominator = correction1 * ((new_square / correction2).sqrt() + group["eps"])
    kept = weights
    if group["weight_decay"] and _decoupled(group):
        kept = weights - weights * group["weight_decay"] * rate
    moved = torch.where(taken, kept - rate * (new_mean / denominator), weights)
    state["exp_avg"].copy_(new_mean.view_as(parameter))
    state["exp_avg_sq"].copy_(new_square.view_as(parameter))
    parameter.copy_(moved.view_as(parameter))


def nonfinite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """1 if there is a NaN or an infinity in any of them, else 0: float32, (), on the device.

    Looked for in all gradients together, in rows of equal length: XLA would cut each search in two,
    and launch the second part of each alone.
    """
    parts: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        # A convolution's come with its channels last on a GPU.
        flat = gradient.movedim(1, -1).flatten() if gradient.dim() > 2 else gradient.flatten()
        whole = flat.numel() % _ROW == 0
        parts.setdefault((flat.dtype, whole), []).append(flat.view(-1, _ROW) if whole else flat)
    good = []
    for alike in parts.values():
        together = torch.cat(alike)
        # Not `isfinite`, for which torch_xla would compare in float64.
        infinity = torch.full((), math.inf, dtype=together.dtype, device=together.device)
        finite = together.abs() < infinity
        good.append(finite.all(1) if finite.dim() > 1 else finite)
    # The least of numbers, for XLA would make one search of two of a kind, and cut that in two.
    return 1 - torch.cat(good).float().amin(0)


class GradScaler(torch_xla.amp.GradScaler):
    """torch_xla's, which looks for overflows as above."""

    anew = False
    """See `SharedCounts`."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale for the next step, by whether this one has overflowed."""
        super().update(new_scale)
        if self.anew and self.is_enabled():
            # A clone is the same value, but no longer in the place of the old one.
            for name in ("_scale", "_growth_tracker"):
                setattr(self, name, getattr(self, name).clone())

    def _unscale_grads_(self, optimizer: Any, *_others: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        found_inf = nonfinite(gradients)
        torch._foreach_div_(gradients, self._scale)
        return {found_inf.device: found_inf}
