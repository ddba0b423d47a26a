"""Fake tensors with the dtypes that torch's kernels give, where its decompositions differ.

Under autocast a norm has an input of 16 bits and parameters of 32. torch's kernels then save
statistics in 32 bits, and give parameters gradients of 32. Its decompositions, by which
`FakeTensorMode` infers results on a CPU, give the input's 16 bits, or 32 for the input's
gradient (torch 2.8: `torch/_decomp/decompositions.py`). A graph with those dtypes would round
what it need not, or not fit together.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Norm -> index of its weight among the arguments; the input is the first.
_WEIGHT_INDEX = {
    "native_layer_norm": 2, "native_group_norm": 1, "native_batch_norm": 1,
    "_native_batch_norm_legit": 1, "_native_batch_norm_legit_functional": 1,
    "_batch_norm_with_update": 1, "_batch_norm_with_update_functional": 1,
}  # fmt: skip
# A norm's backward -> the same; the input is the second.
_BACKWARD_WEIGHT_INDEX = {
    "native_layer_norm_backward": 5, "native_group_norm_backward": 4,
    "native_batch_norm_backward": 2, "batch_norm_backward": 2,
}  # fmt: skip


class KernelDtypeFakeMode(FakeTensorMode):
    """Fake-tensor mode with the kernels' dtypes, which also accepts real tensors."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _with_kernel_dtypes(func, args, super().dispatch(func, types, args, kwargs or {}))


@contextlib.contextmanager
def patch_fake_mode() -> Iterator[None]:
    """Give every `FakeTensorMode`, torch.compile's own too, the kernels' dtypes."""
    dispatch = FakeTensorMode.dispatch

    def corrected(
        self: Any, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _with_kernel_dtypes(func, args, dispatch(self, func, types, args, kwargs or {}))

    FakeTensorMode.dispatch = corrected  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _with_kernel_dtypes(func: Any, args: Sequence[Any], result: Any) -> Any:
    name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
    if name in _WEIGHT_INDEX:
        return _correct_norm(result, args[0], args[_WEIGHT_INDEX[name]])
    if name in _BACKWARD_WEIGHT_INDEX:
        return _correct_norm_backward(result, args[1], args[_BACKWARD_WEIGHT_INDEX[name]])
    return result


def _correct_norm(result: Sequence[Any], x: torch.Tensor, weight: torch.Tensor | None) -> Any:
    y, mean, rstd, *others = result
    if weight is None or weight.dtype != torch.float32 or not mean.numel():
        return result
    return (y, _cast(torch.float32, mean), _cast(torch.float32, rstd), *others)


def _correct_norm_backward(
    result: Sequence[Any], x: torch.Tensor, weight: torch.Tensor | None
) -> Any:
    x_grad, *others = result
    if weight is not None:
        others = [_cast(weight.dtype, gradient) for gradient in others]
    return (_cast(x.dtype, x_grad), *others)


def _cast(dtype: torch.dtype, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)
