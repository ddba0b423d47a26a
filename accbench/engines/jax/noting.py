"""Tensors that are shapes and dtypes alone, with the dtypes that torch's kernels give.

Under autocast a norm has an input of 16 bits and parameters of 32. torch's kernels save their
statistics in 32 bits then, and give parameters gradients of 32; its decompositions, by which
`FakeTensorMode` tells what comes out on a CPU, have the input's 16 bits, or 32 for the input's
gradient (torch 2.8: `torch/_decomp/decompositions.py`). A graph that notes those would round
what it need not, or not fit together.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Of a norm, the place of its weight among the arguments; the input is the first.
_WEIGHTS = {
    "native_layer_norm": 2, "native_group_norm": 1, "native_batch_norm": 1,
    "_native_batch_norm_legit": 1, "_native_batch_norm_legit_functional": 1,
    "_batch_norm_with_update": 1, "_batch_norm_with_update_functional": 1,
}  # fmt: skip
# Of a norm's backward; the input is the second.
_WEIGHTS_OF_BACKWARD = {
    "native_layer_norm_backward": 5, "native_group_norm_backward": 4,
    "native_batch_norm_backward": 2, "batch_norm_backward": 2,
}  # fmt: skip


class Noting(FakeTensorMode):
    """Those of others are let in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _noted(func, args, super().dispatch(func, types, args, kwargs or {}))


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """As `Noting` has it, of tensors of torch.compile's own mode too."""
    dispatch = FakeTensorMode.dispatch

    def noted(
        self: Any, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _noted(func, args, dispatch(self, func, types, args, kwargs or {}))

    FakeTensorMode.dispatch = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _noted(func: Any, args: Sequence[Any], result: Any) -> Any:
    name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
    if name in _WEIGHTS:
        return _of_norm(result, args[0], args[_WEIGHTS[name]])
    if name in _WEIGHTS_OF_BACKWARD:
        return _of_backward(result, args[1], args[_WEIGHTS_OF_BACKWARD[name]])
    return result


def _of_norm(result: Sequence[Any], x: torch.Tensor, weight: torch.Tensor | None) -> Any:
    y, mean, deviation, *others = result
    if weight is None or weight.dtype != torch.float32 or not mean.numel():
        return result
    return (y, _with(torch.float32, mean), _with(torch.float32, deviation), *others)


def _of_backward(result: Sequence[Any], x: torch.Tensor, weight: torch.Tensor | None) -> Any:
    of_x, *others = result
    if weight is not None:
        others = [_with(weight.dtype, gradient) for gradient in others]
    return (_with(x.dtype, of_x), *others)


def _with(dtype: torch.dtype, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)
