"""Autocast under XLA: torch's own rules for CUDA, on every device.

torch_xla has rules of its own under the dispatch key AutocastXLA, and they differ: BatchNorm, ReLU
and max-pooling in float32, which moves twice the bytes; sums, exponentials, norms and sixty more in
16 bits, which eager computes in float32. And on GPUs its tensors have the key AutocastCUDA instead,
so that the same model is another program there. Here AutocastXLA is active on every device, and
each of its rules calls that of AutocastCUDA, or does nothing where that has none; `half_ops`
replaces the operations that neither computes well for XLA. A model's own
`torch.autocast(x.device.type, enabled=False)` works, for the device's type is xla.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from accbench.engines.xla import lazy_import
from accbench.engines.xla.kernels import reductions
from accbench.engines.xla_common import half_attention, half_ops

_XLA_KEY = "AutocastXLA"  # not in Python's enum of keys
_CUDA_KEY = "AutocastCUDA"
# Kept alive: a library that is collected takes its rules back.
_LIBRARIES: list[torch.library.Library] = []


class _HalfOps:
    """Whether `half_ops` are in use, as in the last forward pass.

    A part of that pass may be computed again in autograd's thread (activation checkpointing).
    """

    enabled = False


@contextmanager
def autocast(dtype: torch.dtype, use_half_ops: bool) -> Iterator[None]:
    """Run the forward pass in `dtype` where torch's autocast for CUDA does.

    Args:
        dtype: float16 or bfloat16.
        use_half_ops: take BatchNorm, ReLU and max-pooling from `half_ops`.
    """
    _replace_rules()
    _HalfOps.enabled = use_half_ops
    was_enabled = torch.is_autocast_enabled("xla")
    previous_dtype = torch.get_autocast_dtype("xla")
    torch.autocast_increment_nesting()
    # Tensors of XLA:CUDA do not carry this key.
    with _key_included(_XLA_KEY):
        try:
            torch.set_autocast_dtype("xla", dtype)
            torch.set_autocast_enabled("xla", True)
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled("xla", was_enabled)
            torch.set_autocast_dtype("xla", previous_dtype)


def rules_active() -> AbstractContextManager[Any]:
    """Activate the rules for a backward pass.

    A backward pass that repeats a part of the forward pass under `torch.autocast("xla")`, as
    activation checkpointing does, then finds them.
    """
    return _key_included(_XLA_KEY)


@cache
def _replace_rules() -> None:
    lazy_import.torch_xla()  # first, or its rules would replace ours
    reductions.replace_kernels()  # for sums in float32 also without a rule, and in backward passes

    def registered_names(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    with_rule = registered_names(_CUDA_KEY)
    library = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(library)
    with warnings.catch_warnings():  # about kernels that are replaced
        warnings.simplefilter("ignore", UserWarning)
        for name in sorted(registered_names(_XLA_KEY) | with_rule):
            operation = _operation(name)
            if operation is not None and operation not in _REPLACEMENTS:
                kernel = _cuda_rule(operation) if name in with_rule else None
                if kernel is not None and _short(name) in _CONVOLUTIONS:
                    kernel = _with_separate_bias(kernel)
                library.impl(_short(name), kernel or torch.library.fallthrough_kernel, _XLA_KEY)
        for operation, function in _REPLACEMENTS.items():
            library.impl(_short(operation.name()), _without_autocast(function), _XLA_KEY)


def _key_included(key: str) -> Any:
    parsed = torch._C._parse_dispatch_key(key)
    assert parsed is not None
    return torch._C._IncludeDispatchKeyGuard(parsed)


def _short(name: str) -> str:
    return name.removeprefix("aten::")


def _operation(name: str) -> Any:
    """Return `aten::add.Tensor` as an object; None if this torch names it without having it."""
    packet, _, overload = _short(name).partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _cuda_rule(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Rules apply to a device type whose autocast is enabled.
        torch.set_autocast_enabled("xla", False)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("xla"))
        try:
            with _key_included(_CUDA_KEY):
                return operation(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_enabled("xla", True)

    return kernel


def _with_separate_bias(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """Make a convolution add its bias in an operation of its own, as eager does on CUDA.

    The bias's gradient is then a sum in float32 (see reductions); torch_xla's is one in 16 bits.
    """

    def kernel(
        batch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any
    ) -> torch.Tensor:
        out: torch.Tensor = convolution(batch, weight, None, *args)
        if bias is None:
            return out
        num_dims = weight.dim() - 2
        return out + bias.to(out.dtype).view(-1, *[1] * num_dims)

    return kernel


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with autocast off inside it, for it checks dtypes itself."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_enabled("xla", False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("xla", True)

    return kernel


def _use_half_ops(batch: torch.Tensor) -> bool:
    return _HalfOps.enabled and half_ops.supports(batch)


def _batch_norm(
    batch: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    if training and weight is not None and bias is not None and _use_half_ops(batch):
        return half_ops.batch_norm(batch, weight, bias, mean, var, momentum, eps)
    # torch_xla would return float32 labelled as 16 bits, which XLA refuses later.
    batch_float = batch.float() if batch.dtype in half_ops.HALF_DTYPES else batch
    out = torch.batch_norm(batch_float, weight, bias, mean, var, training, momentum, eps, cudnn)
    return out.to(batch.dtype)


def _relu(batch: torch.Tensor) -> torch.Tensor:
    return half_ops.relu(batch) if _use_half_ops(batch) else torch.relu(batch)


def _relu_in_place(batch: torch.Tensor) -> torch.Tensor:
    return half_ops.relu_in_place(batch) if _use_half_ops(batch) else torch.relu_(batch)


def _max_pool2d(
    batch: torch.Tensor, size: list[int], stride: list[int] | tuple[()] = (),
    padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False,
) -> torch.Tensor:  # fmt: skip
    if _HalfOps.enabled and half_ops.supports_max_pool2d(batch, size, dilation, ceil_mode):
        return half_ops.max_pool2d(batch, size, stride, padding)
    return torch.max_pool2d(batch, size, stride, padding, dilation, ceil_mode)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    dtype = torch.get_autocast_dtype("xla")
    query, key, value = (
        tensor.to(dtype) if tensor.dtype in (torch.float32, *half_ops.HALF_DTYPES) else tensor
        for tensor in (query, key, value)
    )
    is_supported = mask is None and dropout_p < 1 and not enable_gqa
    # On a CPU too, where XLA would sum weights and their gradients in 16 bits.
    if is_supported and half_ops.supports(query) and key.dtype is value.dtype is query.dtype:
        scale_or_default = query.shape[-1] ** -0.5 if scale is None else scale
        return half_attention.attention(query, key, value, scale_or_default, dropout_p, is_causal)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.batch_norm.default: _batch_norm,
    torch.ops.aten.relu.default: _relu,
    torch.ops.aten.relu_.default: _relu_in_place,
    torch.ops.aten.max_pool2d.default: _max_pool2d,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}

# The convolutions that take (batch, weight, bias, ...).
_CONVOLUTIONS = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
    "convolution", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
)  # fmt: skip
