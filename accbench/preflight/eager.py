"""The bound of the baseline: what eager PyTorch moves in one training step, without a GPU.

The training loop's own step runs with engine ddp on fake tensors. Each operation is a launch whose
bytes are the memory traffic if it reads every argument once and writes every result once; views
move nothing. `kernels` counts XLA's programs in the same way, so that the two compare.
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
from accbench.distributed.process_group import Topology
from accbench.engines import ddp
from accbench.engines.common.cuda_autocast import CudaRules, is_tensor, tensors_in
from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import kernels, summary
from accbench.preflight.kernels import Kernel
from accbench.training import train_loop

NOTE = (
    "one GPU at its peak rates, where every operation reads its arguments from memory and writes "
    "its results there, once, but normalisation reads twice what it normalises; launches are "
    "operations, some of which are several kernels"
)
_aten = torch.ops.aten
_ELEMENT_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
# Operation -> index of its input argument; the weights follow it.
_CONVOLUTIONS = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
# Operations that only allocate memory, or run on the host.
_NO_KERNEL = ("empty", "lift")
_TWICE = {"input": 2, "grad_out": 2}
_UNREAD = {"self": 0}
# Operation -> argument -> how often it is read in full, if not once.
_READS: Mapping[str, Mapping[str, int]] = {
    # The first pass computes the statistics (backward: two sums), the second one applies them. A
    # channel is spread over the tensor, so that the second pass reads memory again. Group norm
    # computes its moments in a kernel of their own.
    "native_batch_norm": _TWICE,
    "native_batch_norm_backward": _TWICE,
    "native_group_norm": _TWICE,
    "native_group_norm_backward": _TWICE,
    # A row is normalised where it was read, in registers or the L1 cache, but another kernel sums
    # the gradients of scale and shift over rows. Softmax only works within rows: one read.
    "native_layer_norm_backward": _TWICE,
    # These read nothing of what they overwrite, and only a shape or one number per row of `self`.
    **{name: _UNREAD for name in (
        "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_",
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
        "max_pool2d_with_indices_backward",
    )},
}  # fmt: skip
# Operation -> argument of which it reads as many bytes as it writes.
_GATHERED = {
    "embedding": "weight", "gather": "self", "index_select": "self", "index": "self",
}  # fmt: skip


def count(task: TaskConfig, gpu: GpuSpec, num_classes: int, batch: Any) -> dict[str, Any] | None:
    """Count what one step moves and computes, and bound its speed.

    Args:
        task: the resolved task.
        gpu: the GPU to bound the speed for.
        num_classes: number of classes, or vocabulary size.
        batch: one GPU's batch of a step, as `nested.described` returns it; the first dimension of
            its first tensor is the samples.

    Returns:
        `launches`, `bytes`, `flops`, `bound_s` (the sum over operations of the longer of their
        bytes at full bandwidth and their products at full rate), `samples_per_s_at_most` and a
        `note`. None if the model, the loss or torch needs the tensors' values.

    Raises:
        RequestError: the model is unknown.
    """
    spec = models.of_task(task)
    try:
        with silenced():
            step_kernels = trace_step_kernels(task, spec, num_classes, batch)
    except Exception:  # a model may raise anything
        return None
    bound_s = sum(summary.bound_s(kernel, gpu) for kernel in step_kernels)
    num_samples = len(nested.tensors_of(nested.empty(batch))[0])
    return {
        "launches": len(step_kernels),
        "bytes": sum(kernel.num_bytes for kernel in step_kernels),
        "flops": sum(kernel.flops for kernel in step_kernels),
        "bound_s": bound_s,
        "samples_per_s_at_most": num_samples / bound_s if bound_s else None,
        "note": NOTE,
    }


@contextmanager
def silenced() -> Iterator[None]:
    """Keep warnings, and what FakeTensorMode logs of what it raises, from the terminal."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled


def trace_step_kernels(task: TaskConfig, spec: Any, num_classes: int, batch: Any) -> list[Kernel]:
    """Run the step on fake tensors, and return its operations in order, under torch's names.

    Args:
        task: the resolved task.
        spec: the model and its loss, as `models.of_task` returns them.
        num_classes: number of classes, or vocabulary size.
        batch: as for `count`.

    Raises:
        Exception: whatever the model raises on fake tensors.
    """
    # The engine's device is the CPU, because autograd needs a driver for CUDA tensors.
    task = dataclasses.replace(task, device="cpu", amp_dtype=task.amp_dtype or "float16")
    rules = CudaRules()
    with FakeTensorMode(allow_fallback_kernels=False), rules.active():
        engine = FakeTensorDdpEngine(
            task, task.options.get("ddp", ddp.Engine.Options()), Topology()
        )
        engine.rules = rules
        model = engine.prepared(spec.build(num_classes))
        optimizer = engine.build_optimizer(model)
        model.train()
        on_device = engine.to_device(nested.empty(batch))
        with KernelRecorder(rules) as recorder:
            engine.run_step(train_loop.train_step, model, spec, optimizer, on_device)
    return recorder.kernels


class FakeTensorDdpEngine(ddp.Engine):
    """Engine ddp as it behaves on a GPU, with fake tensors on the CPU."""

    rules: CudaRules

    def prepare(self, model: nn.Module) -> nn.Module:
        # `Module.to` would replace fake tensors, and so untie parameters that layers share.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        return self.rules.autocast(self.precision.autocast_dtype)

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.task.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # torch chooses foreach by itself on CUDA, but not on the CPU.
            clip_grad.clip_grad_norm_(parameters, self.task.clip_norm, foreach=True)


class KernelRecorder(TorchDispatchMode):
    """A dispatch mode that records what each operation reads, writes and computes."""

    def __init__(self, rules: CudaRules) -> None:
        super().__init__()
        self.rules = rules
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        results = None
        with torch._C._ExcludeDispatchKeyGuard(self.rules.KEYS):
            # Fused optimizers return nothing, and fake tensors do not support all of them.
            if not _is_fused_optimizer(operation):
                results = operation(*args, **kwargs)
            if operation in _CONVOLUTIONS:
                index = _CONVOLUTIONS[operation]
                results = _with_cudnn_layout(args[index : index + 2], results)
        if not self.rules.is_probing:
            self.kernels += _kernels(operation, args, kwargs, results)
        return results


def _with_cudnn_layout(operands: Sequence[torch.Tensor], results: Any) -> Any:
    """Convert results to channels_last if input or weights are, as cuDNN does.

    What the CPU's kernels return depends on the CPU.
    """
    layouts = {suggest_memory_format(tensor) for tensor in operands}
    layout = torch.channels_last if torch.channels_last in layouts else torch.contiguous_format

    def convert(leaf: Any) -> Any:
        is_image = is_tensor(leaf) and leaf.dim() == 4
        return leaf.contiguous(memory_format=layout) if is_image else leaf

    return tree_map(convert, results)


def _kernels(operation: Any, args: Any, kwargs: Any, results: Any) -> list[Kernel]:
    if operation is _aten.convolution_backward.default:
        return _convolution_backward(args, results)
    name = _name(operation)
    if torch.Tag.inplace_view in operation.tags or any(word in name for word in _NO_KERNEL):
        return []
    arguments = dict(_arguments(operation, args, kwargs))
    written = _bytes_written(operation, arguments, results)
    if not written:  # a view, or nothing on the device
        return []
    flops = _flops(operation, args, kwargs, results)
    launched = [_kernel(name, _bytes_read(name, arguments, written) + written, flops, args)]
    if operation is _aten.convolution.default and args[2] is not None and args[8] == 1:
        # cuDNN only convolves; another kernel adds the bias.
        launched.append(_kernel("add_", _num_bytes(args[2]) + 2 * written, 0, args))
    return launched


def _convolution_backward(args: Any, results: Any) -> list[Kernel]:
    """Return a kernel for each requested gradient; each reads the result's gradient."""
    gradient, images, weight, _, *settings, mask = args
    reads = {"input": (gradient, weight), "weight": (gradient, images), "bias": (gradient,)}
    # Each has as many flops as the forward convolution; torch's own formula forgets groups.
    flops = _flops(_aten.convolution.default, (images, weight, None, *settings), {}, gradient)
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


def _bytes_written(operation: Any, arguments: Mapping[str, Any], results: Any) -> int:
    """Return the bytes of new results and of arguments that the operation changes in place."""
    inputs = {_storage(tensor) for tensor in tensors_in(list(arguments.values()))}
    fresh = [tensor for tensor in tensors_in(results) if _storage(tensor) not in inputs]
    changed = {
        argument.name
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if _is_fused_optimizer(operation) and arguments.get("grad_scale") is None:
        changed.discard("grads")  # written only if there is a gradient scale to undo
    in_place = tensors_in([arguments.get(name) for name in sorted(changed)])
    return sum(map(_num_bytes, (*fresh, *in_place)))


def _bytes_read(name: str, arguments: Mapping[str, Any], written: int) -> int:
    """Return the bytes that an operation reads; a tensor passed twice counts once."""
    if name.startswith("new_") or name.endswith("_like"):
        return 0
    times = _READS.get(name, {})
    if not arguments.get("training", arguments.get("train", True)):
        times = {}  # normalised by running statistics
    read: dict[int, int] = {}
    for argument, value in arguments.items():
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
    """Yield the name and value of each argument that was passed."""
    names = [argument.name for argument in operation._schema.arguments]
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes in memory, where an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride)
