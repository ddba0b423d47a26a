"""Dropout for the numerics pass: the same for all engines, and a look at an engine's own.

`given(...)` puts functions in the place of torch's that take their random numbers, uniform
ones drawn on the host by step, rank and call, from a list. Whatever an engine makes of the
model, a compiler too, sees a comparison with an input, and drops what all others drop. What
draws at random in other ways is told by `Draws.others`.
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
# What the functions below read. Plain globals: a compiler then takes the tensors as inputs.
_uniforms: list[torch.Tensor] = []
_shapes: list[Shape] = []
_odd: list[Shape] = []
_position = [0]


def _take(shape: Shape, device: torch.device) -> torch.Tensor:
    """The next uniform numbers; zeros, with which all is dropped, where others are asked for."""
    index = _position[0]
    _position[0] = index + 1
    if _uniforms:  # anew in each forward pass: an engine may trace a step more than once
        uniform = _uniforms[index % len(_uniforms)]
        if tuple(uniform.shape) == tuple(shape):
            return uniform
    _odd.append(tuple(shape))
    return torch.zeros(tuple(shape), device=device)


def _keep(like: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    """1 / (1 - p) or 0."""
    kept = _take(shape, like.device) >= p
    return kept.to(like.dtype) / (1 - p) if p < 1 else torch.zeros_like(kept, dtype=like.dtype)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return input * _keep(input, p, tuple(input.shape)) if training else input


def _channels(input: torch.Tensor, num_spatial: int) -> Shape:
    num_leading = input.dim() - num_spatial  # (N, C) or, unbatched, (C,)
    return (*input.shape[:num_leading], *(1 for _ in range(num_spatial)))


def _dropout_of_channels(num_spatial: int) -> Callable[..., torch.Tensor]:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        shape = _channels(input, num_spatial)
        return input * _keep(input, p, shape) if training else input

    return dropout


def _alpha(input: torch.Tensor, p: float, shape: Shape) -> torch.Tensor:
    # Klambauer et al., Self-Normalizing Neural Networks, 2017
    dropped_value = -1.7580993408473766
    kept = (_take(shape, input.device) >= p).to(input.dtype)
    a = ((1 - p) * (1 + p * dropped_value**2)) ** -0.5 if p < 1 else 0.0
    return a * (input * kept + dropped_value * (1 - kept)) - a * dropped_value * p


def _alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    return _alpha(input, p, tuple(input.shape)) if training else input


def _feature_alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    return _alpha(input, p, _channels(input, input.dim() - 2)) if training else input


def _stochastic_depth(
    input: torch.Tensor, p: float, mode: str, training: bool = True
) -> torch.Tensor:
    size = input.shape[0] if mode == "row" else 1
    shape = (size, *(1 for _ in input.shape[1:]))
    return input * _keep(input, p, shape) if training else input


def _drop_path(
    x: torch.Tensor, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True
) -> torch.Tensor:
    if not training or drop_prob == 0.0:
        return x
    shape = (x.shape[0], *(1 for _ in x.shape[1:]))
    kept = _keep(x, drop_prob, shape)
    return x * (kept if scale_by_keep else (kept > 0).to(x.dtype))


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
    """The same function as one that dynamo looks into, instead of taking it whole."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_MULTI_HEAD = _traceable(functional.multi_head_attention_forward)


def _replacements() -> list[tuple[Any, str, Callable[..., torch.Tensor]]]:
    found: list[tuple[Any, str, Callable[..., torch.Tensor]]] = [
        (functional, "dropout", _dropout),
        (functional, "dropout1d", _dropout_of_channels(1)),
        (functional, "dropout2d", _dropout_of_channels(2)),
        (functional, "dropout3d", _dropout_of_channels(3)),
        (functional, "alpha_dropout", _alpha_dropout),
        (functional, "feature_alpha_dropout", _feature_alpha_dropout),
        (functional, "scaled_dot_product_attention", _attention),
        (functional, "multi_head_attention_forward", _MULTI_HEAD),
    ]
    # Those two packages draw for themselves; looked for only where the model brought them.
    for module, name, function in (
        ("torchvision.ops.stochastic_depth", "stochastic_depth", _stochastic_depth),
        ("timm.layers.drop", "drop_path", _drop_path),
    ):
        if module in sys.modules:
            found.append((sys.modules[module], name, function))
    return found


def taken() -> list[Shape]:
    """Of the calls since `Draws.begin` that were given none: their shapes."""
    return list(_odd)


class Draws:
    """The random numbers of a pass, for one rank."""

    def __init__(self, seed: int, shapes: Sequence[Shape] | None = None) -> None:
        self.seed = seed
        self.shapes = None if shapes is None else [tuple(shape) for shape in shapes]
        """Of each call in a forward pass; None until a first one has told them."""

    def begin(self, step: int, rank: int, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Draw for a forward pass, and have every call since forgotten.

        Args:
            send: a tensor on the host to the model's device.
        """
        _position[0] = 0
        _odd.clear()
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 4099 + rank)
        drawn = (torch.rand(shape, generator=generator) for shape in self.shapes or ())
        _uniforms[:] = [send(uniform) for uniform in drawn]

    def learn(self, forward: Callable[[], Any]) -> None:
        """Have a forward pass tell its calls."""
        self.shapes = []
        self.begin(0, 0, lambda tensor: tensor)
        forward()
        self.shapes = list(_odd)

    def others(self) -> int:
        """Calls since `begin` that were not those of the first forward pass, or were left out."""
        if not self.shapes:
            return len(_odd)
        left_out = len(self.shapes) if _position[0] == 0 else -_position[0] % len(self.shapes)
        return len(_odd) + left_out


def _tell_dynamo() -> None:
    """Have it look up torch's functions while they are torch's: what it finds in their places
    then, it takes for them, and does not look into."""
    from torch._dynamo import trace_rules

    rules = getattr(trace_rules, "get_torch_obj_rule_map", None)  # torch 2.8's name
    if rules is not None:
        rules()


@contextlib.contextmanager
def given() -> Iterator[None]:
    """Have dropout take what `Draws` has drawn."""
    _tell_dynamo()
    kept = [(module, name, getattr(module, name)) for module, name, _ in _replacements()]
    try:
        for module, name, function in _replacements():
            setattr(module, name, function)
        with extra_inputs.registered(extra_inputs.TensorSource(_uniforms, _position)):
            yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
        _uniforms.clear()
