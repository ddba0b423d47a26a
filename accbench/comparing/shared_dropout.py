"""Dropout that drops the same elements in every engine, for the numerics pass.

`shared_dropout()` replaces torch's dropout functions by ones that take their random numbers from
a list: uniform numbers, drawn on the host by step, rank and call. Every engine, compiled or not,
then sees a comparison with an input, and drops the same elements as all others. `Draws.num_others`
counts the calls that this does not cover.
"""

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from accbench.engines.common import extra_inputs

Shape = tuple[int, ...]
# The functions below read these. They are plain globals, so that compilers treat the tensors as
# inputs.
_uniforms: list[torch.Tensor] = []
_shapes: list[Shape] = []
_unexpected: list[Shape] = []
_position = [0]


def _take(shape: Shape, device: torch.device) -> torch.Tensor:
    """Return the next uniform numbers; zeros, which drop everything, if the shape is unexpected."""
    index = _position[0]
    _position[0] = index + 1
    if _uniforms:  # restarts with each forward pass: an engine may trace a step more than once
        uniform = _uniforms[index % len(_uniforms)]
        if tuple(uniform.shape) == tuple(shape):
            return uniform
    _unexpected.append(tuple(shape))
    return torch.zeros(tuple(shape), device=device)


def _multiplier(like: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    """Return the dropout multiplier of each element: 1 / (1 - p) or 0."""
    mask = _take(shape, like.device) >= p
    return mask.to(like.dtype) / (1 - p) if p < 1 else torch.zeros_like(mask, dtype=like.dtype)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return input * _multiplier(input, p, tuple(input.shape)) if training else input


def _channel_shape(input: torch.Tensor, num_spatial: int) -> Shape:
    num_leading = input.dim() - num_spatial  # (N, C) or, unbatched, (C,)
    return (*input.shape[:num_leading], *(1 for _ in range(num_spatial)))


def _dropout_of_channels(num_spatial: int) -> Callable[..., torch.Tensor]:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        shape = _channel_shape(input, num_spatial)
        return input * _multiplier(input, p, shape) if training else input

    return dropout


def _drop_alpha(input: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    # Klambauer et al., Self-Normalizing Neural Networks, 2017
    dropped_value = -1.7580993408473766
    mask = (_take(shape, input.device) >= p).to(input.dtype)
    a = ((1 - p) * (1 + p * dropped_value**2)) ** -0.5 if p < 1 else 0.0
    return a * (input * mask + dropped_value * (1 - mask)) - a * dropped_value * p


def _alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    return _drop_alpha(input, p, tuple(input.shape)) if training else input


def _feature_alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    return _drop_alpha(input, p, _channel_shape(input, input.dim() - 2)) if training else input


def _stochastic_depth(
    input: torch.Tensor, p: float, mode: str, training: bool = True
) -> torch.Tensor:
    size = input.shape[0] if mode == "row" else 1
    shape = (size, *(1 for _ in input.shape[1:]))
    return input * _multiplier(input, p, shape) if training else input


def _drop_path(
    x: torch.Tensor, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True
) -> torch.Tensor:
    if not training or drop_prob == 0.0:
        return x
    shape = (x.shape[0], *(1 for _ in x.shape[1:]))
    multiplier = _multiplier(x, drop_prob, shape)
    return x * (multiplier if scale_by_keep else (multiplier > 0).to(x.dtype))


_ATTENTION = functional.scaled_dot_product_attention


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if dropout_p == 0.0:
        return _ATTENTION(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(scores.softmax(-1), dropout_p) @ value


def _traceable(function: Any) -> Any:
    """Copy a function of torch, so that dynamo traces into it."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_MULTI_HEAD = _traceable(functional.multi_head_attention_forward)


def _dropping_nothing(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input


def _attention_dropping_nothing(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    return _ATTENTION(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_KEPT = {_attention: _attention_dropping_nothing, _MULTI_HEAD: _MULTI_HEAD}


def _replacements() -> list[tuple[Any, str, Callable[..., torch.Tensor]]]:
    replacements: list[tuple[Any, str, Callable[..., torch.Tensor]]] = [
        (functional, "dropout", _dropout),
        (functional, "dropout1d", _dropout_of_channels(1)),
        (functional, "dropout2d", _dropout_of_channels(2)),
        (functional, "dropout3d", _dropout_of_channels(3)),
        (functional, "alpha_dropout", _alpha_dropout),
        (functional, "feature_alpha_dropout", _feature_alpha_dropout),
        (functional, "scaled_dot_product_attention", _attention),
        (functional, "multi_head_attention_forward", _MULTI_HEAD),
    ]
    # These two packages draw random numbers themselves; replaced only if the model imported them.
    for module, name, function in (
        ("torchvision.ops.stochastic_depth", "stochastic_depth", _stochastic_depth),
        ("timm.layers.drop", "drop_path", _drop_path),
    ):
        if module in sys.modules:
            replacements.append((sys.modules[module], name, function))
    return replacements


def unexpected_shapes() -> list[Shape]:
    """Return the shapes of the calls since `Draws.begin` that no drawn numbers fitted."""
    return list(_unexpected)


class Draws:
    """The random numbers that one rank's dropout takes in a numerics pass."""

    def __init__(self, seed: int, shapes: Sequence[Shape] | None = None) -> None:
        self.seed = seed
        self.shapes = None if shapes is None else [tuple(shape) for shape in shapes]
        """Shape of each call in a forward pass; None until `learn` has recorded them."""

    def begin(self, step: int, rank: int, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Draw the numbers of a forward pass, and forget all earlier calls.

        Args:
            step: the step's number, part of the seed.
            rank: the worker's rank, part of the seed.
            send: moves a tensor from the host to the model's device.
        """
        _position[0] = 0
        _unexpected.clear()
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 4099 + rank)
        drawn = (torch.rand(shape, generator=generator) for shape in self.shapes or ())
        _uniforms[:] = [send(uniform) for uniform in drawn]

    def learn(self, forward: Callable[[], Any]) -> None:
        """Record the shapes of the calls in a forward pass."""
        self.shapes = []
        self.begin(0, 0, lambda tensor: tensor)
        forward()
        self.shapes = list(_unexpected)

    def num_others(self) -> int:
        """Count the calls since `begin` that `learn` did not record, and recorded ones left out."""
        if not self.shapes:
            return len(_unexpected)
        left_out = len(self.shapes) if _position[0] == 0 else -_position[0] % len(self.shapes)
        return len(_unexpected) + left_out


def _load_dynamo_rules() -> None:
    """Make dynamo look up torch's functions before they are replaced.

    Dynamo treats whatever stands in their places at that time as torch's, and does not trace into
    it.
    """
    from torch._dynamo import trace_rules

    rules = getattr(trace_rules, "get_torch_obj_rule_map", None)  # torch 2.8's name
    if rules is not None:
        rules()


@contextlib.contextmanager
def shared_dropout(drops: bool = True) -> Iterator[None]:
    """Replace torch's dropout functions, so that they take the numbers that `Draws` has drawn.

    Args:
        drops: False has them drop nothing.
    """
    _load_dynamo_rules()
    originals = [(module, name, getattr(module, name)) for module, name, _ in _replacements()]
    try:
        for module, name, function in _replacements():
            kept = _KEPT.get(function, _dropping_nothing)
            setattr(module, name, function if drops else kept)
        with extra_inputs.registered(extra_inputs.TensorSource(_uniforms, _position)):
            yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
        _uniforms.clear()
