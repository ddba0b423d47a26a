"""The baseline: eager PyTorch under DistributedDataParallel, as a careful user sets it up."""

import contextlib
import dataclasses
import inspect
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accbench import engines
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import moving, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed import used_parameters
from accbench.distributed.process_group import Topology
from accbench.engines import optimizers
from accbench.engines.common import complex_parameters, optimizer_state, tied_parameters
from accbench.engines.common.complex_numbers import real
from accbench.engines.ddp import layouts
from accbench.errors import RequestError
from accbench.recording import provenance
from accbench.recording.terminal import log

# The flag's name from torch 2.15 on, and the one before, which warns there.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def peak_resident_bytes() -> int:
    """The process's peak resident size; getrusage counts KiB, on macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def trained(model: nn.Module) -> list[bool]:
    """Which of its parameters do."""
    return [parameter.requires_grad for parameter in model.parameters()]


class Engine(engines.Engine):
    """DDP over NCCL (CUDA) or gloo (CPU), autocast, a fused optimizer."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the engine ddp."""

        channels_last: bool = flag(
            True,
            "Keep images and weights as NHWC in memory, the fastest layout for convolutions. A "
            "model that joins channels and pixels by `view` still gets NCHW. A script decides "
            "memory formats itself.",
        )
        find_unused_parameters: bool = flag(
            False,
            "With several workers: look in every step for parameters that the loss does not depend "
            "on. Models that have such parameters need it; others are slower with it.",
        )

    collectives = "process_group"

    @classmethod
    def find_device(cls, requested: str) -> str:
        if requested != "auto":
            return requested
        return "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        if task.device == "tpu":
            return "engine ddp has no TPU support; use --engine xla or --device cpu"
        if task.device == "cuda":
            num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if num_devices == 0:
                return "PyTorch sees no CUDA device here; use --device cpu"
            if task.nproc_per_node > num_devices:
                return (
                    f"--nproc_per_node {task.nproc_per_node} is more than the "
                    f"{num_devices} CUDA devices here"
                )
        return None

    def __init__(self, task: TaskConfig, options: Options, topology: Topology) -> None:
        super().__init__(task, options, topology)
        self.device = torch.device("cpu")
        self._is_checked = self._will_average = False
        self._optimizer: torch.optim.Optimizer | None = None
        if task.device == "cuda":
            self.device = torch.device("cuda", topology.local_rank)
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True  # shapes do not change
        # Scripts have the numbers of the plain script, to the bit.
        is_last = options.channels_last and task.script is None
        self.memory_format = torch.channels_last if is_last else torch.contiguous_format
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.autocast_dtype is torch.float16
        )

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return provenance.cpu_name()

    def prepare(self, model: nn.Module) -> nn.Module:
        return self._in_channels_last(self._distributed(self._moved(model)))

    def _in_channels_last(self, net: nn.Module) -> nn.Module:
        """What `prepare` gives; contiguous from its first call on, if it cannot be this."""

        def give_in() -> None:
            self.memory_format = torch.contiguous_format
            layouts.make_contiguous(net, self._optimizer)
            self._forget_compiled()
            if isinstance(net, DistributedDataParallel):
                self._distribute_anew(net)  # which has gradients laid out as they were
            if self.topology.rank == 0:
                log.info(
                    "the model views what is not contiguous in channels_last, so that all stays "
                    f"NCHW, as with --{self.task.engine}.no-channels_last; x.flatten(1) in place "
                    "of x.view(len(x), -1) would not mind"
                )

        if self.memory_format is torch.channels_last:
            layouts.watch_first_call(net, give_in)
        return net

    def _moved(self, model: nn.Module) -> nn.Module:
        places = tied_parameters.places(model)
        model = model.to(self.device)
        tied_parameters.tie(places)  # of buffers a move makes one for each place
        for tensor in (*model.parameters(), *model.buffers()):
            # Module.to takes tensors of five dimensions for images too, and fails.
            is_image = tensor.dim() == 4 and not tensor.is_complex()
            if is_image and self.task.script is None:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)
        return model

    def _forget_compiled(self) -> None:
        """What was compiled for parameters in channels_last."""

    def _distributed(self, model: nn.Module) -> nn.Module:
        if self.topology.world_size == 1 or not complex_parameters.leave_out_of_buckets(model):
            return model
        self._averaged = trained(model)
        return DistributedDataParallel(model, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": self.options.find_unused_parameters,
            # Buffers stay each rank's own, as in the compiled engine: BatchNorm's
            # statistics are those of the rank's shard.
            _SYNC_BUFFERS: False,
        }

    def _distribute_anew(self, wrapper: DistributedDataParallel) -> None:
        """For what parameters are by now; whoever holds the wrapper need not know."""
        model, call = wrapper.module, vars(wrapper).get("_compiled_call_impl")
        DistributedDataParallel.__init__(wrapper, model, **self._settings())
        wrapper.train(model.training)
        wrapper._compiled_call_impl = call
        self._averaged = trained(model)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        entry = optimizers.of_task(self.task)
        fused = {"fused": True} if entry.has_fused else {}
        optimizer = complex_parameters.built(
            entry.torch_class, optimizer_state.groups(self.task, model),
            **entry.arguments(self.task), **fused,
        )  # fmt: skip
        optimizer_state.make_state(self.task, optimizer, torch.zeros_like, torch.clone)
        if not entry.counts_steps:
            optimizer_state.count_steps(optimizer)
        self._optimizer = optimizer
        return optimizer

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """See the base class."""
        self._optimizer = optimizer

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        def send(tensor: torch.Tensor) -> torch.Tensor:
            # In a loop of their own people view what they have made.
            if tensor.dim() == 4 and self.task.script is None:
                return tensor.to(self.device, non_blocking=True, memory_format=self.memory_format)
            return tensor.to(self.device, non_blocking=True)

        return moving.moved(batch, self.device, lambda tensors: [*map(send, tensors)])

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE,
            device=self.device, to_device=self.to_device,
        )  # fmt: skip

    def calling(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See the base class."""
        if (
            isinstance(model, DistributedDataParallel)
            and torch.is_grad_enabled()
            and trained(model) != self._averaged
        ):
            self._distribute_anew(model)  # it averages what trained when it was made
        if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
            self._will_average |= model.require_backward_grad_sync
        return self.autocast()

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """See the base class. DDP averages in a backward pass if it was called before, and not
        where a loop calls methods of the model, or goes back twice."""
        if self.topology.world_size == 1:
            return
        if not self._will_average:
            self._average([p for group in optimizer.param_groups for p in group["params"]])
            return
        self._average(complex_parameters.of(optimizer))
        if not self._is_checked:
            self._check_all_reduced(optimizer)
            self._is_checked = True
        self._will_average = False

    def _average(self, parameters: list[nn.Parameter]) -> None:
        if self.topology.world_size == 1 or not parameters:
            return
        for parameter in used_parameters.with_gradients(
            parameters, used_parameters.somewhere(parameters)
        ):
            assert parameter.grad is not None
            gradient = complex_parameters.materialized(parameter.grad)
            total = real(gradient).contiguous()  # gloo takes no other
            total = total.clone() if total.data_ptr() == gradient.data_ptr() else total
            dist.all_reduce(total)
            real(gradient).copy_(total / self.topology.world_size)
            parameter.grad = gradient

    def results(self, nest: Any) -> Any:
        """See the base class."""
        return layouts.contiguous(nest) if self.memory_format is torch.channels_last else nest

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None
        )

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scaler.scale(loss).backward(
            retain_graph=retain_graph
        )  # DDP averages the gradients in here

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return contextlib.nullcontext()

    def _check_all_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """DDP sends a bucket when all of it have a gradient; the other ones are not averaged."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unused = [tuple(p.shape) for p in parameters if p.requires_grad and p.grad is None]
        if unused and not self.options.find_unused_parameters:
            raise RequestError(
                f"the loss does not depend on {len(unused)} parameters, the first of shape "
                f"{unused[0]}; with several workers say --{self.task.engine}.find_unused_parameters"
                ", or freeze them (requires_grad = False)"
            )

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._average(complex_parameters.of(optimizer))
        with complex_parameters.as_real(optimizer):
            self._apply_gradients(optimizer)

    def _apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self.topology.world_size > 1 and not self._is_checked:
            self._check_all_reduced(optimizer)
            self._is_checked = True
        if self.task.on_nan == "skip":
            self.find_nonfinite(optimizer)
            if not self.scaler.is_enabled():  # or it tells the optimizer, in these two
                optimizer.grad_scale, optimizer.found_inf = None, self.found_inf  # type: ignore[attr-defined]
        if self.task.clip_norm is not None:
            self.scaler.unscale_(optimizer)
        self.clip(optimizer)
        # A fused optimizer unscales and skips on overflow by a tensor, so nothing waits.
        if not self._waits_to_skip() or not self.found_inf:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _waits_to_skip(self) -> bool:
        """Return whether a step is skipped on the host: by an optimizer that no tensor tells."""
        fused = optimizers.of_task(self.task).has_fused or self.task.script is not None
        return self.task.on_nan == "skip" and not (fused or self.scaler.is_enabled())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()

    def averaged_probe(self, value: float) -> list[float]:
        probe = nn.Linear(2, 1, bias=False).to(self.device)
        inputs = torch.full((1, 2), value, device=self.device)
        distributed = self._distributed(probe)  # kept by name: it averages while it lives
        distributed(inputs).sum().backward()
        assert probe.weight.grad is not None
        return probe.weight.grad.flatten().tolist()
