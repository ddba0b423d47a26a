"""torch_xla's sync-free AdamW and GradScaler, with fewer kernels.

Whether a step is skipped is a tensor, so that nothing waits for the host. torch_xla's AdamW is
one operation a parameter, with a step count of its own and all that is computed from it, and the
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


class SharedStepCounts(torch.optim.Optimizer):
    """Base of the optimizers here: parameters that step together share one step count."""

    @abc.abstractmethod
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """Take a step where `found_inf` is 0; where it is not, nothing changes."""

    stepped: frozenset[torch.Tensor] | set[torch.Tensor] = frozenset()
    """Parameters that had a gradient in the last step."""

    fresh_step_tensors = False
    """Make new tensors for step counts in each step, instead of overwriting the old ones. XLA pairs
    scalar results, the loss among them, with the buffers of scalar inputs by their order, and
    copies those whose buffer another result has got."""

    @staticmethod
    def is_recorded() -> bool:
        """Return whether this step is being recorded: its state must stay in place then."""
        return False

    def share_counts(self, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have all parameters with the same step count share one tensor.

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
            For each parameter with a gradient the count that it has if this step is taken, and a
            tensor, whether it is taken. The counts don't depend on the search for overflows, and
            are shared as the state's are.
        """
        assert closure is None
        assert found_inf is not None
        is_taken = found_inf == 0
        active = self.stepped = {p for p in self._parameters() if p.grad is not None}
        if not self.is_recorded():
            self.split_counts(active, torch.clone)
        counts = {id(count): count for count in (self.state[p]["step"] for p in active)}
        next_counts = {key: count + 1 for key, count in counts.items()}
        count_if_taken = {p: next_counts[id(self.state[p]["step"])] for p in active}
        increment = is_taken.float()
        if self.fresh_step_tensors:
            new = {key: count + increment for key, count in counts.items()}
            for parameter in active:
                state = self.state[parameter]
                state["step"] = new[id(state["step"])]
        else:
            for count in counts.values():
                count.add_(increment)
        return count_if_taken, is_taken

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def split_counts(
        self,
        active: frozenset[torch.Tensor] | set[torch.Tensor],
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> bool:
        """Give another count to parameters that stay while others of the same count step.

        Args:
            active: the parameters that step.
            copy: copies a count.

        Returns:
            Whether there were any.
        """
        stepping = {id(self.state[p]["step"]) for p in active}
        copies: dict[int, torch.Tensor] = {}
        for parameter in self._parameters():
            count = self.state[parameter]["step"]
            if parameter not in active and id(count) in stepping:
                if id(count) not in copies:
                    copies[id(count)] = copy(count)
                self.state[parameter]["step"] = copies[id(count)]
        return bool(copies)


class SyncFreeAdamW(SharedStepCounts, syncfree.AdamW):
    """The update rule of torch.optim.AdamW, and of Adam where the group's decay is coupled."""

    as_vectors = False
    """Update every parameter as a vector. A convolution's gradient has channels last on a GPU, and
    XLA would convert the parameter and both moments to that layout and back; on a CPU vectors are
    slower."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """Take a step where `found_inf` is 0; where it is not, nothing changes."""
        counts, is_taken = self._count(closure, found_inf)
        for group in self.param_groups:
            factors_of_count: dict[int, tuple[torch.Tensor, ...]] = {}
            for parameter in group["params"]:
                if parameter in counts:
                    count = counts[parameter]
                    if id(count) not in factors_of_count:
                        factors_of_count[id(count)] = _adamw_factors(group, count)
                    shape = (-1,) if self.as_vectors else parameter.shape
                    factors = factors_of_count[id(count)]
                    _adamw_update(group, parameter, self.state[parameter], factors, is_taken, shape)


class SyncFreeSGD(SharedStepCounts, torch.optim.SGD):
    """torch.optim.SGD's update rule, for an optimizer that a user built."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """Take a step where `found_inf` is 0; where it is not, nothing changes."""
        counts, is_taken = self._count(closure, found_inf)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in counts:
                    _sgd_update(group, parameter, self.state[parameter], is_taken)


def class_from_update_rule(entry: Any) -> type[torch.optim.Optimizer]:
    """Return a class that steps as `entry.update` computes, and skips a step by a tensor.

    Args:
        entry: an `accbench.engines.optimizers.Optimizer`.
    """

    class FromUpdateRule(SharedStepCounts, entry.torch_class):
        """An optimizer defined by its update rule alone."""

        @torch.no_grad()
        def step(  # type: ignore[override]
            self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
        ) -> None:
            """Take a step where `found_inf` is 0; where it is not, nothing changes."""
            counts, is_taken = self._count(closure, found_inf)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter not in counts:
                        continue
                    assert parameter.grad is not None
                    state, count = self.state[parameter], counts[parameter]
                    state_before = {key: state[key] for key in entry.state_keys}
                    updated, state_after = entry.update(
                        torch,
                        group,
                        _learning_rate(group, count),
                        parameter,
                        parameter.grad,
                        state_before,
                        count,
                    )
                    for old, new in [
                        (parameter, updated),
                        *((state_before[k], state_after[k]) for k in state_after),
                    ]:
                        old.copy_(torch.where(is_taken, new, old))

    FromUpdateRule.__name__ = FromUpdateRule.__qualname__ = entry.torch_class.__name__
    return FromUpdateRule


def _sgd_update(
    group: dict[str, Any], parameter: torch.Tensor, state: dict[str, torch.Tensor],
    is_taken: torch.Tensor,
) -> None:  # fmt: skip
    """Update one parameter as torch.optim.sgd._single_tensor_sgd does."""
    assert parameter.grad is not None
    direction = -parameter.grad if group["maximize"] else parameter.grad
    if group["weight_decay"]:
        direction = direction + group["weight_decay"] * parameter
    if group["momentum"]:
        buffer, factor = state["momentum_buffer"], 1 - group["dampening"]
        if group["dampening"]:  # which does not apply to the first step
            factor = torch.where(state["step"] == 1, 1.0, factor)
        new = group["momentum"] * buffer + factor * direction
        direction = direction + group["momentum"] * new if group["nesterov"] else new
        buffer.copy_(torch.where(is_taken, new, buffer))
    rate = _learning_rate(group, state["step"])
    parameter.copy_(torch.where(is_taken, parameter - rate * direction, parameter))


def _learning_rate(group: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    """Return the learning rate as a tensor, so that a change does not recompile the graph.

    torch_xla passes a number as an input of the graph, but writes 0 and 1 into it, where many a
    schedule begins or ends: so those two are sent.
    """
    rate = group["lr"]
    if not isinstance(rate, torch.Tensor) and rate in (0.0, 1.0):
        (rate,) = xm.send_cpu_data_to_device([torch.tensor(float(rate))], like.device)
    return torch.zeros_like(like) + rate


def _adamw_factors(group: dict[str, Any], count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (learning rate, bias correction of the first moment, of the second)."""
    # One tensor is one kernel; full_like, for a tensor of the host would be sent in each step.
    betas = torch.stack([torch.full_like(count, beta) for beta in group["betas"]])
    return _learning_rate(group, count), *(1 - betas**count).unbind()


def _is_decoupled(group: dict[str, Any]) -> bool:
    """Return whether weight decay is decoupled, as in AdamW, or in the gradient, as in Adam."""
    return bool(group.get("decoupled_weight_decay", True))


def _adamw_update(
    group: dict[str, Any], parameter: torch.Tensor, state: dict[str, torch.Tensor],
    factors: tuple[torch.Tensor, ...], is_taken: torch.Tensor, shape: Sequence[int],
) -> None:  # fmt: skip
    """Update one parameter as torch.optim.adam._single_tensor_adam does.

    Each number is applied elementwise, instead of being combined with another one first: a GPU
    would launch a kernel for that.
    """
    rate, correction1, correction2 = factors
    beta1, beta2 = group["betas"]
    assert parameter.grad is not None
    gradient, weights, moment1, moment2 = (
        tensor.reshape(shape)
        for tensor in (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
    )
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"] and not _is_decoupled(group):
        gradient = gradient + group["weight_decay"] * weights
    new_moment1 = torch.where(is_taken, moment1 + (1 - beta1) * (gradient - moment1), moment1)
    new_moment2 = torch.where(
        is_taken, beta2 * moment2 + (1 - beta2) * gradient * gradient, moment2
    )
    denominator = correction1 * ((new_moment2 / correction2).sqrt() + group["eps"])
    decayed = weights
    if group["weight_decay"] and _is_decoupled(group):
        decayed = weights - weights * group["weight_decay"] * rate
    updated = torch.where(is_taken, decayed - rate * (new_moment1 / denominator), weights)
    state["exp_avg"].copy_(new_moment1.view_as(parameter))
    state["exp_avg_sq"].copy_(new_moment2.view_as(parameter))
    parameter.copy_(updated.view_as(parameter))


def nonfinite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return 1 if any gradient has a NaN or an infinity, else 0: float32, (), on the device.

    All gradients are searched together, in rows of equal length: XLA would split each search in
    two, and launch the second part of each alone.
    """
    pieces: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        # A convolution's gradient has channels last on a GPU.
        flat = gradient.movedim(1, -1).flatten() if gradient.dim() > 2 else gradient.flatten()
        fills_rows = flat.numel() % _ROW == 0
        pieces.setdefault((flat.dtype, fills_rows), []).append(
            flat.view(-1, _ROW) if fills_rows else flat
        )
    are_finite = []
    for group in pieces.values():
        values = torch.cat(group)
        # Not `isfinite`, for which torch_xla would compare in float64.
        infinity = torch.full((), math.inf, dtype=values.dtype, device=values.device)
        finite = values.abs() < infinity
        are_finite.append(finite.all(1) if finite.dim() > 1 else finite)
    # The minimum of floats, for XLA would merge two searches of one kind, and split that in two.
    return 1 - torch.cat(are_finite).float().amin(0)


class SyncFreeGradScaler(torch_xla.amp.GradScaler):
    """torch_xla's GradScaler with one search for overflows in all gradients together."""

    fresh_step_tensors = False
    """See `SharedStepCounts`."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale for the next step, by whether this one has overflowed."""
        super().update(new_scale)
        if self.fresh_step_tensors and self.is_enabled():
            # A clone has the same value in another buffer.
            for name in ("_scale", "_growth_tracker"):
                setattr(self, name, getattr(self, name).clone())

    def _unscale_grads_(self, optimizer: Any, *_others: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        found_inf = nonfinite(gradients)
        torch._foreach_div_(gradients, self._scale)
        return {found_inf.device: found_inf}
