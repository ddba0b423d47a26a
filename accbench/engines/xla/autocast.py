"""Autocast under XLA: torch's own rules for CUDA, on every device.

torch_xla has rules of its own under the key AutocastXLA, and they are others: BatchNorm, ReLU and
max-pooling in float32, which moves twice the bytes; sums, exponentials, norms and sixty more in 16
bits, which eager computes in float32. And on GPUs its tensors have the key AutocastCUDA instead, so
that the same model is another program there. Here AutocastXLA is in force on every device, and
each of its rules leads to that of AutocastCUDA, or to none where that has none; what those two do
not have well for XLA is in `half_ops`. A model's own `torch.autocast(x.device.type, enabled=False)`
is heeded, for the device's type is xla.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from accbench.engines.xla import importing
from accbench.engines.xla.kernels import reductions
from accbench.engines.xla_common import half_attention, half_ops

_KEY = "AutocastXLA"  # which Python's enum of keys lacks
_RULES = "AutocastCUDA"
# Kept, for its end would take the rules back.
_library: list[torch.library.Library] = []


class _Spelling:
    """Whether `half_ops` are in use: as it was in the last forward pass, for a part of that may
    be computed again in autograd's thread (activation checkpointing)."""

    lean = False


@contextmanager
def autocast(dtype: torch.dtype, lean: bool) -> Iterator[None]:
    """The forward pass in `dtype` where torch's autocast for CUDA has it so.

    Args:
        lean: take BatchNorm, ReLU and max-pooling from `half_ops`.
    """
    _replace_rules()
    _Spelling.lean = lean
    enabled = torch.is_autocast_enabled("xla")
    kept_dtype = torch.get_autocast_dtype("xla")
    torch.autocast_increment_nesting()
    # Tensors of XLA:CUDA do not have the key by themselves.
    with _in_force(_KEY):
        try:
            torch.set_autocast_dtype("xla", dtype)
            torch.set_autocast_enabled("xla", True)
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled("xla", enabled)
            torch.set_autocast_dtype("xla", kept_dtype)


def in_reach() -> AbstractContextManager[Any]:
    """Backward passes run in this: where one repeats a part of the forward pass under autocast,
    by `torch.autocast("xla")`, the rules are found."""
    return _in_force(_KEY)


@cache
def _replace_rules() -> None:
    importing.torch_xla()  # or its rules would come after ours
    reductions.replace_kernels()  # what has no rule, or is in a backward pass, adds up in float32

    def names(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    with_rule = names(_RULES)
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():  # of kernels that are replaced
        warnings.simplefilter("ignore", UserWarning)
        for name in sorted(names(_KEY) | with_rule):
            operation = _operation(name)
            if operation is not None and operation not in _OWN:
                led = _as_on_cuda(operation) if name in with_rule else None
                if led is not None and _short(name) in _CONVOLUTIONS:
                    led = _bias_apart(led)
                library.impl(_short(name), led or torch.library.fallthrough_kernel, _KEY)
        for operation, function in _OWN.items():
            library.impl(_short(operation.name()), _outside(function), _KEY)


def _in_force(key: str) -> Any:
    parsed = torch._C._parse_dispatch_key(key)
    assert parsed is not None
    return torch._C._IncludeDispatchKeyGuard(parsed)


def _short(name: str) -> str:
    return name.removeprefix("aten::")


def _operation(name: str) -> Any:
    """`aten::add.Tensor` as an object; None for what this torch names but does not have."""
    packet, _, overload = _short(name).partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _as_on_cuda(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        # A device's rules are in force where its autocast is enabled.
        torch.set_autocast_enabled("xla", False)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("xla"))
        try:
            with _in_force(_RULES):
                return operation(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_enabled("xla", True)

    return kernel


def _bias_apart(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """The bias added in a step of its own, as eager does it on CUDA. Its gradient is then a sum in
    float32 (see reductions), where torch_xla has one in 16 bits."""

    def kernel(
        given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any
    ) -> torch.Tensor:
        out: torch.Tensor = convolution(given, weight, None, *args)
        if bias is None:
            return out
        num_dims = weight.dim() - 2
        return out + bias.to(out.dtype).view(-1, *[1] * num_dims)

    return kernel


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which looks at types itself."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_enabled("xla", False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("xla", True)

    return kernel


def _lean(given: torch.Tensor) -> bool:
    return _Spelling.lean and half_ops.supports(given)


def _batch_norm(
    batch: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    if training and weight is not None and bias is not None and _lean(batch):
        return half_ops.batch_norm(batch, weight, bias, mean, var, momentum, eps)
    # torch_xla would give float32 back for 16 bits, and call it 16 bits: XLA refuses it later.
    wide = batch.float() if batch.dtype in half_ops.HALF_DTYPES else batch
    out = torch.batch_norm(wide, weight, bias, mean, var, training, momentum, eps, cudnn)
    return out.to(batch.dtype)


def _relu(given: torch.Tensor) -> torch.Tensor:
    return half_ops.relu(given) if _lean(given) else torch.relu(given)


def _relu_in_place(given: torch.Tensor) -> torch.Tensor:
    return half_ops.relu_in_place(given) if _lean(given) else torch.relu_(given)


def _max_pool2d(
    given: torch.Tensor, size: list[int], stride: list[int] | tuple[()] = (),
    padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False,
) -> torch.Tensor:  # fmt: skip
    if _Spelling.lean and half_ops.supports_max_pool2d(given, size, dilation, ceil_mode):
        return half_ops.max_pool2d(given, size, stride, padding)
    return torch.max_pool2d(given, size, stride, padding, dilation, ceil_mode)


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
    plain = mask is None and dropout_p < 1 and not enable_gqa
    # On a CPU too, where XLA would sum weights and their gradients in 16 bits.
    if plain and half_ops.supports(query) and key.dtype is value.dtype is query.dtype:
        wanted = query.shape[-1] ** -0.5 if scale is None else scale
        return half_attention.attention(query, key, value, wanted, dropout_p, is_causal)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.batch_norm.default: _batch_norm,
    torch.ops.aten.relu.default: _relu,
    torch.ops.aten.relu_.default: _relu_in_place,
    torch.ops.aten.max_pool2d.default: _max_pool2d,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}

# Those that take (given, weight, bias, ...).
_CONVOLUTIONS = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
    "convolution", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
)  # fmt: skip
