"""Floating-point operations per training sample, counted by torch on tensors without content."""

import warnings
from functools import partial
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
    # Meta tensors take a quarter of the time of fake ones, which take part in code that names a
    # device. Real weights take memory.
    for count in (_count_on_meta, _count_on_fake, partial(_count_on_fake, has_real_weights=True)):
        try:
            return count(spec, num_classes)
        except Exception:  # a model may raise anything where tensors have no content
            continue
    return None


def _count_on_meta(spec: Any, num_classes: int) -> float | None:
    batch = spec.synthetic_batch(_NUM_SAMPLES, num_classes, torch.Generator())
    on_meta = nested.mapped(batch, lambda tensor: tensor.to("meta"))
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _count(spec, spec.build(num_classes), on_meta)


def _count_on_fake(spec: Any, num_classes: int, has_real_weights: bool = False) -> float | None:
    model = spec.build(num_classes) if has_real_weights else None
    batch = spec.synthetic_batch(_NUM_SAMPLES, num_classes, torch.Generator())
    with (
        standard_streams.silence_fake_tensor_log(),
        warnings.catch_warnings(),
        FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=has_real_weights),
        sdpa_kernel(SDPBackend.MATH),  # the products themselves
    ):
        warnings.simplefilter("ignore")
        model = spec.build(num_classes) if model is None else model
        return _count(spec, model, nested.empty(nested.described(batch)))


def _count(spec: Any, model: nn.Module, batch: Any) -> float | None:
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return None
    with FlopCounterMode(display=False) as counter:
        spec.loss(model, batch).backward()
    return counter.get_total_flops() / _NUM_SAMPLES
