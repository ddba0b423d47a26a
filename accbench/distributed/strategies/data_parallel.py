"""Data parallel by PyTorch's DistributedDataParallel, which averages in the backward pass."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accbench.distributed import complex_parameters, used_parameters
from accbench.distributed.complex_numbers import real
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.torch_strategy import TorchStrategy
from accbench.errors import RequestError


class DataParallel(TorchStrategy):
    """Each rank has the whole model and a part of the batch.

    Args:
        topology: the ranks.
        device: this rank's.
        engine: the engine's name, for a flag in messages.
        find_unused_parameters: look in every step for parameters that the loss does not depend on.
        group: the ranks, if they are not all of the run's.
    """

    def __init__(
        self, topology: Topology, device: torch.device, engine: str, find_unused_parameters: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(topology, device)
        self.group = group
        self.engine = engine
        self.find_unused_parameters = find_unused_parameters
        self._is_checked = self._will_average = False
        self._averaged: list[bool] = []
        self._in_model = set[nn.Parameter]()  # when it was wrapped
        self._shared = set[nn.Parameter]()  # which have had the same values on all ranks
        self._complex: list[nn.Parameter] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel, or as it is where nothing is averaged."""
        self._note_parameters(model)
        return self._wrap(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.topology.world_size == 1 or not complex_parameters.exclude_from_ddp(model):
            return model
        with _without_notice_of_buffers():
            return DistributedDataParallel(model, **self._settings())

    def _note_parameters(self, model: nn.Module) -> None:
        self._averaged = requires_grad(model)
        self._in_model = {*model.parameters()}
        self._shared |= self._in_model
        self._complex = [p for p in model.parameters() if p.is_complex()]

    def _settings(self) -> dict[str, Any]:
        return {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            "process_group": self.group,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": self.find_unused_parameters,
            # Buffers stay each rank's own, as in the compiled engine: BatchNorm's
            # statistics are those of the rank's shard.
            "broadcast_buffers": False,
        }

    def rebuild(self, wrapper: nn.Module) -> None:
        """Rebuild a DistributedDataParallel wrapper in place, after its parameters changed."""
        if not isinstance(wrapper, DistributedDataParallel):
            return
        model, call = wrapper.module, vars(wrapper).get("_compiled_call_impl")
        with _without_notice_of_buffers():
            DistributedDataParallel.__init__(wrapper, model, **self._settings())
        wrapper.train(model.training)
        wrapper._compiled_call_impl = call
        self._note_parameters(model)

    def before_call(self, model: nn.Module) -> None:
        """Note that a loop of a user's own is about to call what `wrap` returned."""
        if not isinstance(model, DistributedDataParallel) or not torch.is_grad_enabled():
            return
        if requires_grad(model) != self._averaged:
            self.rebuild(model)  # it averages what trained when it was made
        self._will_average |= model.require_backward_grad_sync

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return contextlib.nullcontext()

    def reduce_after_loop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of a loop of a user's own, where its backward pass has not.

        DistributedDataParallel averages in a backward pass if it was called before, and not where
        a loop calls methods of the model, or goes back twice.
        """
        if self.topology.world_size == 1:
            return
        trained = used_parameters.of_loop(model, optimizer)
        left = self._left_out(optimizer) if self._will_average else [*trained]
        used_parameters.share_new(left, self._shared)
        self._average(left)
        if self._will_average:
            self._check_once(trained)
            self._will_average = False

    def _left_out(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return what DistributedDataParallel does not average: complex, or not the model's."""
        in_optimizer = (p for group in optimizer.param_groups for p in group["params"])
        return [*self._complex, *(p for p in in_optimizer if p not in self._in_model)]

    def reduce_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what DistributedDataParallel leaves out in the backward pass of a step."""
        self._average(complex_parameters.in_optimizer(optimizer))
        if self.topology.world_size > 1:
            self._check_once(p for group in optimizer.param_groups for p in group["params"])

    def _average(self, parameters: list[nn.Parameter]) -> None:
        if self.topology.world_size == 1 or not parameters:
            return
        for parameter in used_parameters.fill_missing_grads(
            parameters, used_parameters.has_grad_on_any_rank(parameters)
        ):
            assert parameter.grad is not None
            gradient = complex_parameters.materialize(parameter.grad)
            total = real(gradient).contiguous()  # gloo takes no other
            total = total.clone() if total.data_ptr() == gradient.data_ptr() else total
            dist.all_reduce(total, group=self.group)
            real(gradient).copy_(total / self.topology.world_size)
            parameter.grad = gradient

    def _check_once(self, parameters: Iterable[nn.Parameter]) -> None:
        """Check that every gradient is there: a bucket is sent when all of it have one."""
        if self._is_checked:
            return
        self._is_checked = True
        unused = [tuple(p.shape) for p in parameters if p.requires_grad and p.grad is None]
        if unused and not self.find_unused_parameters:
            raise RequestError(
                f"the loss does not depend on {len(unused)} parameters, the first of shape "
                f"{unused[0]}; with several workers say --{self.engine}.find_unused_parameters"
                ", or freeze them (requires_grad = False)"
            )

    def average_probe(self, value: float) -> Sequence[float]:
        probe = nn.Linear(2, 1, bias=False).to(self.device)
        inputs = torch.full((1, 2), value, device=self.device)
        wrapped = self._wrap(probe)  # kept by name: it averages while it lives
        wrapped(inputs).sum().backward()
        assert probe.weight.grad is not None
        averaged: list[float] = probe.weight.grad.flatten().tolist()
        return averaged


@contextlib.contextmanager
def _without_notice_of_buffers() -> Iterator[None]:
    """Suppress torch 2.15's notice of `forward_sync_buffers`.

    With that flag DistributedDataParallel broadcasts buffers when it is made, and with it all that
    gloo has no type for, and BatchNorm's statistics when it is made again. For ranks that keep
    their own, torch itself recommends the older flag.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        yield


def requires_grad(model: nn.Module) -> list[bool]:
    """Return each parameter's `requires_grad`."""
    return [parameter.requires_grad for parameter in model.parameters()]
