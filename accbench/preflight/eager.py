"""What eager PyTorch moves in one training step on a GPU, operation by operation: the baseline's
bound, with no GPU here and without computing.

The step is the one training loop's with the engine ddp, on tensors that have a shape and no
content. Each operation is a launch, and its bytes those that must cross the memory's bus if it
reads every argument once and writes every result once; views move nothing. `kernels` counts XLA's
programs likewise, so that the two can be compared.
"""

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from accbench import models
from accbench.config import TaskConfig
from accbench.data import nested
from accbench.engines import ddp
from accbench.engines.cuda_rules import CudaRules, is_tensor, tensors_in
from accbench.preflight import kernels, summary
from accbench.preflight.gpu import Gpu
from accbench.preflight.kernels import Kernel
from accbench.training import train_loop
from accbench.training.process_group import Topology

NOTE = (
    "one GPU at its peak rates, where every operation reads its arguments from memory and writes "
    "its results there, once, but normalisation reads twice what it normalises; launches are "
    "operations, some of which are several kernels"
)
_aten = torch.ops.aten
_ELEMENT_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
# Operation -> which argument its input is; weights are the next.
_CONVOLUTIONS = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
# These only reserve memory, or are made on the host.
_NO_KERNEL = ("empty", "lift")
_TWICE = {"input": 2, "grad_out": 2}
_UNREAD = {"self": 0}
# Operation -> argument -> how often all of it is read, where that is not once.
_READS: Mapping[str, Mapping[str, int]] = {
    # Statistics (backward: two sums), then what they are for: a channel lies all over the tensor,
    # so that the second pass is one over memory as well. Likewise groups, whose moments are a
    # kernel of their own.
    "native_batch_norm": _TWICE,
    "native_batch_norm_backward": _TWICE,
    "native_group_norm": _TWICE,
    "native_group_norm_backward": _TWICE,
    # A row is normalised where it was read, in registers or the L1 cache, but gradients of scale
    # and shift are sums over rows, by another kernel. Softmax has rows alone: once.
    "native_layer_norm_backward": _TWICE,
    # What is overwritten is not read, and of these only the shape, or one number of a row, is.
    **{name: _UNREAD for name in (
        "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_",
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
        "max_pool2d_with_indices_backward",
    )},
}  # fmt: skip
# Operation -> argument of which as much is read as comes out.
_GATHERED = {
    "embedding": "weight", "gather": "self", "index_select": "self", "index": "self",
}  # fmt: skip


def count(task: TaskConfig, gpu: Gpu, num_classes: int, batch: Any) -> dict[str, Any] | None:
    """What one step moves and computes, and how fast it is at best.

    Args:
        batch: of one GPU and step, as `nested.described` has it; the first dimension of its first
            tensor are the samples.

    Returns:
        `launches`, `bytes`, `flops`, `bound_s` (the sum over operations of the longer of their
        bytes at full bandwidth and their products at full rate), `samples_per_s_at_most` and a
        `note`. None where the model, the loss or torch needs values that are not there.

    Raises:
        RequestError: there is no such model.
    """
    spec = models.of_task(task)
    try:
        with _in_silence():
            found = of_step(task, spec, num_classes, batch)
    except Exception:  # a model may raise anything
        return None
    bound_s = sum(summary.bound_s(kernel, gpu) for kernel in found)
    num_samples = len(nested.tensors_of(nested.empty(batch))[0])
    return {
        "launches": len(found),
        "bytes": sum(kernel.num_bytes for kernel in found),
        "flops": sum(kernel.flops for kernel in found),
        "bound_s": bound_s,
        "samples_per_s_at_most": num_samples / bound_s if bound_s else None,
        "note": NOTE,
    }


@contextmanager
def _in_silence() -> Iterator[None]:
    # Where it writes what it raises as well.
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled


def of_step(task: TaskConfig, spec: Any, num_classes: int, batch: Any) -> list[Kernel]:
    """The step's operations in their order, named as torch names them.

    Args:
        spec: the model and its loss, as `models.of_task` has them.
        batch: as for `count`.

    Raises:
        Exception: whatever the model raises where tensors have no content.
    """
    # The engine's device is the CPU, whose tensors autograd takes without a driver.
    task = dataclasses.replace(task, device="cpu", amp_dtype=task.amp_dtype or "float16")
    rules = CudaRules()
    with FakeTensorMode(allow_fallback_kernels=False), rules.in_force():
        engine = AbsentGpu(task, task.options.get("ddp", ddp.Engine.Options()), Topology())
        engine.rules = rules
        model = engine.prepared(spec.build(num_classes))
        optimizer = engine.build_optimizer(model)
        model.train()
        on_device = engine.to_device(nested.empty(batch))
        with _Counter(rules) as counter:
            engine.run_step(train_loop.train_step, model, spec, optimizer, on_device)
    return counter.found


class AbsentGpu(ddp.Engine):
    """The engine as on a GPU, but for where its tensors are."""

    rules: CudaRules

    def prepare(self, model: nn.Module) -> nn.Module:
        # `Module.to` makes tensors without content anew, also for two layers that share them.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        return self.rules.autocast(self.autocast_dtype)

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.task.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # On CUDA torch chooses this by itself, and on the CPU one tensor after the other.
            clip_grad.clip_grad_norm_(parameters, self.task.clip_norm, foreach=True)


class _Counter(TorchDispatchMode):
    """Notes what each operation reads, writes and computes."""

    def __init__(self, rules: CudaRules) -> None:
        super().__init__()
        self.rules = rules
        self.found: list[Kernel] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        results = None
        with torch._C._ExcludeDispatchKeyGuard(self.rules.KEYS):
            # Returns nothing, and not every one is known to tensors without content.
            if not _is_fused_optimizer(operation):
                results = operation(*args, **kwargs)
            if operation in _CONVOLUTIONS:
                at = _CONVOLUTIONS[operation]
                results = _as_cudnn_lays_out(args[at : at + 2], results)
        if not self.rules.asking:
            self.found += _kernels(operation, args, kwargs, results)
        return results


def _as_cudnn_lays_out(given: Sequence[torch.Tensor], results: Any) -> Any:
    """Channels last where the input or the weights are; on the CPU it depends on the CPU."""
    layouts = {suggest_memory_format(tensor) for tensor in given}
    wanted = torch.channels_last if torch.channels_last in layouts else torch.contiguous_format

    def laid_out(leaf: Any) -> Any:
        images = is_tensor(leaf) and leaf.dim() == 4
        return leaf.contiguous(memory_format=wanted) if images else leaf

    return tree_map(laid_out, results)


def _kernels(operation: Any, args: Any, kwargs: Any, results: Any) -> list[Kernel]:
    if operation is _aten.convolution_backward.default:
        return _convolution_backward(args, results)
    name = _name(operation)
    if torch.Tag.inplace_view in operation.tags or any(word in name for word in _NO_KERNEL):
        return []
    given = dict(_arguments(operation, args, kwargs))
    written = _written(operation, given, results)
    if not written:  # a view, or nothing on the device
        return []
    flops = _flops(operation, args, kwargs, results)
    found = [_kernel(name, _read(name, given, written) + written, flops, args)]
    if operation is _aten.convolution.default and args[2] is not None and args[8] == 1:
        # cuDNN convolves; what is added to every pixel is added by a kernel of its own.
        found.append(_kernel("add_", _num_bytes(args[2]) + 2 * written, 0, args))
    return found


def _convolution_backward(args: Any, results: Any) -> list[Kernel]:
    """One kernel for each gradient that is asked for; each reads that of the result."""
    gradient, given, weight, _, *settings, mask = args
    reads = {"input": (gradient, weight), "weight": (gradient, given), "bias": (gradient,)}
    # As many products each as the convolution itself; torch's formula for them forgets groups.
    flops = _flops(_aten.convolution.default, (given, weight, None, *settings), {}, gradient)
    return [
        _kernel(
            f"convolution_backward.{of}",
            sum(map(_num_bytes, (*read, result))),
            0 if of == "bias" else flops,
            args,
        )
        for (of, read), result, wanted in zip(reads.items(), results, mask, strict=True)
        if wanted
    ]


def _kernel(name: str, num_bytes: int, flops: int, args: Any) -> Kernel:
    dtypes = [tensor.dtype for tensor in tensors_in(args)]
    factors = _ELEMENT_TYPES.get(dtypes[0], "f32") if dtypes else "f32"
    kind = kernels.OTHER
    if flops:
        kind = kernels.CONVOLUTION if "convolution" in name else kernels.PRODUCT
    return Kernel(name, kind, num_bytes, flops, factors)


def _flops(operation: Any, args: Any, kwargs: Any, results: Any) -> int:
    formula = flop_registry.get(operation._overloadpacket)
    return int(formula(*args, **kwargs, out_val=results)) if formula else 0


def _written(operation: Any, given: Mapping[str, Any], results: Any) -> int:
    """Bytes of arguments that are changed and of results that are not among them."""
    there = {_storage(tensor) for tensor in tensors_in(list(given.values()))}
    fresh = [tensor for tensor in tensors_in(results) if _storage(tensor) not in there]
    changed = {
        argument.name
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if _is_fused_optimizer(operation) and given.get("grad_scale") is None:
        changed.discard("grads")  # written only where they are unscaled
    in_place = tensors_in([given.get(name) for name in sorted(changed)])
    return sum(map(_num_bytes, (*fresh, *in_place)))


def _read(name: str, given: Mapping[str, Any], written: int) -> int:
    """Bytes of arguments, each once where it is given twice."""
    if name.startswith("new_") or name.endswith("_like"):
        return 0
    times = _READS.get(name, {})
    if not given.get("training", given.get("train", True)):
        times = {}  # normalised by statistics that are there
    read: dict[int, int] = {}
    for argument, value in given.items():
        for tensor in tensors_in(value):
            size = _num_bytes(tensor) * times.get(argument, 1)
            if _GATHERED.get(name) == argument:
                size = min(size, written)
            read[id(tensor)] = max(read.get(id(tensor), 0), size)
    return sum(read.values())


def _is_fused_optimizer(operation: Any) -> bool:
    return _name(operation).startswith("_fused_") and not operation._schema.returns


def _name(operation: Any) -> str:
    name: str = operation._schema.name
    return name.removeprefix("aten::")


def _arguments(operation: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Name -> value, of those that are given."""
    names = [argument.name for argument in operation._schema.arguments]
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: torch.Tensor) -> int:
    """In memory, where what is expanded is there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride)
