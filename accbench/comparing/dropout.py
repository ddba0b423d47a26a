"""Dropout for the numerics pass: the same for all engines, and a look at an engine's own.

`given(...)` puts functions in the place of torch's that take their random numbers, uniform
ones drawn on the host by step, rank and call, from a list. Whatever an engine makes of the
model, a compiler too, sees a comparison with an input, and drops what all others drop. What
draws at random in other ways is told by `Draws.others`.

`own_dropout` trains a vector of weights through nothing but dropout: their gradient is the
mask that the engine drew.
"""

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.engines import Batch, Engine
from accbench.training.process_group import Topology, gather_values

Shape = tuple[int, ...]
# Elements a probability that own_dropout looks at; rates are told to about a hundredth.
PROBE_SIZE = 1 << 16
PROBE_STEPS = 3
# Standard deviations from what chance gives; 1e-9 by chance alone.
_MAX_SIGMA = 6.0

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


@contextlib.contextmanager
def given() -> Iterator[None]:
    """Have dropout take what `Draws` has drawn."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in _replacements()]
    try:
        for module, name, function in _replacements():
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
        _uniforms.clear()


class _Probe(nn.Module):
    """Weights behind dropout of each probability, and nothing else."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(PROBE_SIZE)) for _ in probabilities)
        self.dropouts = nn.ModuleList(nn.Dropout(p) for p in probabilities)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # zip(strict=True) is more than dynamo of torch 2.8 can trace.
        dropped = [self.dropouts[i](self.weights[i]).sum() for i in range(len(self.dropouts))]
        # The batch is only looked at because engines expect a model to.
        return torch.stack(dropped).sum() + 0 * images.reshape(-1)[:1].float().sum()


class _ProbeSpec:
    """Its loss, as `accbench.models` has it."""

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0])
        return loss


def own_dropout(
    engine: Engine, topology: Topology, step: Callable[..., torch.Tensor], batch: Batch,
    probabilities: Sequence[float], seed: int,
) -> str | None:  # fmt: skip
    """What is wrong with the dropout that the engine draws itself; None if nothing was found.

    Rate, scale, and that neither steps nor ranks share a mask. All ranks call this.
    """
    net = _Probe(probabilities)
    model = engine.prepare(net)
    optimizer = engine.build_optimizer(model)
    engine.seed(seed + topology.rank)  # as in training
    model.train()
    counts: list[list[torch.Tensor]] = []
    before = [torch.zeros(PROBE_SIZE, dtype=torch.float64) for _ in probabilities]
    for _ in range(PROBE_STEPS):
        engine.run_step(step, model, _ProbeSpec, optimizer, batch)
        engine.wait()
        state = engine.training_state(net, optimizer).optimizer
        moments = [state[f"weights.{i}"]["exp_avg"].double() for i in range(len(probabilities))]
        gradients = [(m - 0.9 * b) / 0.1 for m, b in zip(moments, before, strict=True)]
        # How many ranks kept each weight, for the gradient is averaged over them.
        counts.append(
            [
                g * topology.world_size * (1 - p)
                for g, p in zip(gradients, probabilities, strict=True)
            ]
        )
        before = moments
    problems = [
        problem
        for index, p in enumerate(probabilities)
        if (problem := _problem([of_step[index] for of_step in counts], p, topology.world_size))
    ]
    # Ranks see the same averages, unless averaging is what is wrong; one may see more.
    found = [rank for rank, (bad,) in enumerate(gather_values([float(bool(problems))])) if bad]
    return problems[0] if problems else ("its ranks differ" if found else None)


def _problem(kept: Sequence[torch.Tensor], p: float, world_size: int) -> str | None:
    """Of the numbers of ranks that kept each weight, (PROBE_SIZE,) a step."""
    off = max(float((count - count.round()).abs().max()) for count in kept)
    if off > 1e-3 or min(float(c.min()) for c in kept) < -1e-3:
        return f"dropout of {p:g} does not scale what it keeps by 1 / (1 - p)"
    deviation = math.sqrt(p * (1 - p) / (PROBE_SIZE * world_size))
    for count in kept:
        rate = 1 - float(count.mean()) / world_size
        if abs(rate - p) > _MAX_SIGMA * deviation:
            return f"dropout of {p:g} drops {rate:.3g} of its input"
    variance = p * (1 - p)
    if variance == 0:
        return None
    limit = _MAX_SIGMA / math.sqrt(PROBE_SIZE)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        both = (kept[one] - kept[one].mean()) * (kept[other] - kept[other].mean())
        if abs(float(both.mean())) > limit * variance * world_size:
            return f"dropout of {p:g} repeats itself from step to step"
    # A sum of independent masks varies by their number; of equal ones, by its square.
    spread = float(kept[0].var()) / variance
    # The standard deviation of a variance is about sqrt(2 / n) of it, for any p a few times that.
    if world_size > 1 and abs(spread - world_size) > world_size * 10 * limit / min(p, 1 - p):
        return f"dropout of {p:g} is the same on several ranks"
    return None
