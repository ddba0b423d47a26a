"""Floating-point operations per training sample, counted by torch on fake tensors."""

import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accbench.data import nested
from accbench.system import standard_streams

_NUM_SAMPLES = 2  # BatchNorm wants more than one


def of_sample(spec: Any, num_classes: int) -> float | None:
    """Count the floating-point operations of a sample's forward and backward pass.

    A multiplication and its addition are two operations. `torch.utils.flop_counter` counts the
    matrix products and convolutions that the model itself contains: recomputation by
    `--checkpoint_modules` does not count, and causal attention counts as full attention.

    Returns:
        The operations, or None if torch needs the tensors' values or does not count a layer
        (recurrent ones).
    """
    for has_real_weights in (False, True):  # real weights take memory
        try:
            return _count(spec, num_classes, has_real_weights)
        except Exception:  # a model may raise anything where tensors have no content
            continue
    return None


def _count(spec: Any, num_classes: int, has_real_weights: bool) -> float | None:
    model = spec.build(num_classes) if has_real_weights else None
    batch = spec.synthetic_batch(_NUM_SAMPLES, num_classes, torch.Generator())
    with (
        standard_streams.silence_fake_tensor_log(),
        warnings.catch_warnings(),
        FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=has_real_weights),
        sdpa_kernel(SDPBackend.MATH),  # the products themselves
        FlopCounterMode(display=False) as counter,
    ):
        warnings.simplefilter("ignore")
        model = spec.build(num_classes) if model is None else model
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            return None
        spec.loss(model, nested.empty(nested.described(batch))).backward()
    return counter.get_total_flops() / _NUM_SAMPLES
