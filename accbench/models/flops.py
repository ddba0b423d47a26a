"""What a sample costs to train on: products, counted by torch without computing any."""

import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accbench import standard_streams
from accbench.data import nested

_NUM_SAMPLES = 2  # BatchNorm wants more than one


def of_sample(spec: Any, num_classes: int) -> float | None:
    """Floating point operations of a sample's forward and backward pass, two a multiplication.

    Those of matrix products and convolutions, by `torch.utils.flop_counter`, as the model asks
    for them: what `--checkpoint_modules` computes again is not counted, and attention is counted
    whole, causal or not. None where torch needs values for it that are not there, or does not
    count a layer (recurrent ones).
    """
    for is_built_whole in (False, True):  # the latter takes memory for the weights
        try:
            return _count(spec, num_classes, is_built_whole)
        except Exception:  # a model may raise anything where tensors have no content
            continue
    return None


def _count(spec: Any, num_classes: int, is_built_whole: bool) -> float | None:
    model = spec.build(num_classes) if is_built_whole else None
    batch = spec.synthetic_batch(_NUM_SAMPLES, num_classes, torch.Generator())
    with (
        standard_streams.silence_fake_tensor_log(),
        warnings.catch_warnings(),
        FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=is_built_whole),
        sdpa_kernel(SDPBackend.MATH),  # the products themselves
        FlopCounterMode(display=False) as counter,
    ):
        warnings.simplefilter("ignore")
        model = spec.build(num_classes) if model is None else model
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            return None
        spec.loss(model, nested.empty(nested.described(batch))).backward()
    return counter.get_total_flops() / _NUM_SAMPLES
