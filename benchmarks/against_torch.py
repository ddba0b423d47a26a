"""Runs torch functions through the table as a training step would, and judges what comes out.

A function's floating inputs become parameters of a module whose loss weighs all outputs with
random numbers; torch captures the joint graph of forward and backward, `run_graph` runs it, and
outputs and gradients are held against eager's in the same dtype and in float64.
"""

import dataclasses
import importlib.util
import os
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._functorch.aot_autograd import aot_export_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

# Units in the last place of the result's dtype that an element may be off by, relative to itself
# and to the largest of its tensor, for sums that cancel.
OF_ELEMENT = 16
OF_LARGEST = 8
# And where eager itself is further from float64 than that: so many times eager's largest error,
# but no more than so many units of the largest element.
OF_EAGER = 4
OF_SUMS = 64


class Wrapped(torch.nn.Module):
    """`function(*args, **kwargs)` with its tensors as parameters and buffers."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.learned = [i for i, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach().clone()
                if leaf.requires_grad:
                    self.register_parameter(f"t{i}", torch.nn.Parameter(value))
                else:
                    self.register_buffer(f"t{i}", value)

    def outputs(self) -> list[torch.Tensor]:
        leaves = [getattr(self, f"t{i}", leaf) for i, leaf in enumerate(self.leaves)]
        # Scaled up and down, each by its own power of two: two parameters may not share one
        # gradient, which aot_export_module can't tell apart.
        for i, leaf in enumerate(leaves):
            if i in self.learned:
                leaves[i] = leaf * 2.0**i * 2.0**-i
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.function(*args, **kwargs))
        return [o for o in found if isinstance(o, torch.Tensor)]

    def forward(self) -> tuple[torch.Tensor, ...]:
        outputs = self.outputs()
        loss = torch.zeros(())
        for output in outputs:
            if output.requires_grad:
                loss = loss + weighed(output)
        return (loss, *(o.detach() for o in outputs))


def weighed(output: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from element to element; float64 for a float64 output."""
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    weights = torch.arange(1, output.numel() + 1, dtype=dtype).sin().reshape(output.shape)
    return (output.to(dtype) * weights).sum()


@dataclasses.dataclass
class Results:
    """What a module computed."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    """Of the parameters that have one, in their order."""

    def all(self) -> list[torch.Tensor]:
        return [*self.outputs, *self.gradients]


def eager(module: Wrapped) -> Results:
    """Outputs and gradients by torch. Parameters without a gradient are frozen from here on."""
    loss, *outputs = module()
    if loss.requires_grad:
        loss.backward()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    return Results(outputs, [p.grad for p in module.parameters() if p.grad is not None])


def in_float64(module: Wrapped) -> Results:
    """The same from the same numbers, computed in float64."""
    other = Wrapped(module.function, (), {})
    other.leaves, other.spec, other.learned = module.leaves, module.spec, module.learned
    for name, value in module.named_parameters():
        copy = torch.nn.Parameter(value.detach().double(), requires_grad=value.requires_grad)
        other.register_parameter(name, copy)
    for name, value in module.named_buffers():
        other.register_buffer(name, value.double() if value.is_floating_point() else value)
    return eager(other)


def capture(
    module: torch.nn.Module, joint: bool, whole_attention: bool = False
) -> tuple[torch.fx.GraphModule, Any]:
    """The flat graph of a module without inputs, of forward alone or with backward."""
    from accbench.engines.jax import lowering
    from accbench.engines.jax.kernel_dtypes import KernelDtypeFakeMode  # as the engine captures

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH][not whole_attention :]
    # torch leaves a variable of inductor's behind.
    with mock.patch.dict(os.environ), sdpa_kernel(backends), KernelDtypeFakeMode():
        return aot_export_module(
            module,
            (),
            trace_joint=joint,
            output_loss_index=0 if joint else None,
            decompositions=lowering.decompositions(),
        )


def through_jax(module: Wrapped, rules: Any = None, calls: dict[str, int] | None = None) -> Results:
    """Return outputs and gradients by the table.

    Args:
        module: what is computed.
        rules: precision's; see `lowering`.
        calls: how often the lowered text is to have what; None for any number.
    """
    import jax

    from accbench.engines.jax import lowering

    joint = any(p.requires_grad for p in module.parameters())
    graph_module, signature = capture(module, joint, bool(rules and rules.torch_products))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    placeholders = [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]
    args = [lowering.to_jax(tensors[names[name]]) for name in placeholders]

    def run(*args: Any) -> list[Any]:
        return lowering.run_graph(graph_module, args, jax.random.key(0), rules)

    with jax.default_device(jax.devices("cpu")[0]):
        whole = jax.jit(run)
        if calls is not None:
            text = whole.lower(*args).as_text()
            assert {what: text.count(what) for what in calls} == calls
        found = whole(*args)
    found = found[len(signature.buffers_to_mutate) :]
    num_outputs = len(signature.user_outputs)
    gradients = [g for g in found[num_outputs:] if g is not None]
    return Results([to_torch(o) for o in found[1:num_outputs]], [to_torch(g) for g in gradients])


def to_torch(array: Any) -> torch.Tensor:
    host = np.asarray(array)
    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(host.copy())


def differences(ours: Results, eager: Results, exact: Results | None) -> list[str]:
    """A line for each output and gradient that isn't torch's."""
    lines = []
    if len(ours.all()) != len(eager.all()):
        return [f"{len(ours.all())} outputs and gradients instead of {len(eager.all())}"]
    truths = eager.all() if exact is None else exact.all()
    # Of all results together a unit of float32, in which all is computed: a gradient that is
    # nothing but rounding, such as BatchNorm's of two values, is as small as it is by chance.
    floats = [t.double().abs().nan_to_num(0, 0, 0) for t in eager.all() if t.is_floating_point()]
    floor = torch.finfo(torch.float32).eps * max(
        (float(t.max()) for t in floats if t.numel()), default=0
    )
    for i, (a, b) in enumerate(zip(ours.all(), eager.all(), strict=True)):
        # Where float64 takes another way (an index, a shape), eager in the same dtype is it.
        truth = truths[i] if i < len(truths) and truths[i].shape == b.shape else b
        what = f"output {i}" if i < len(ours.outputs) else f"gradient {i - len(ours.outputs)}"
        problem = difference(a, b, truth, floor)
        if problem:
            lines.append(f"{what}: {problem}")
    return lines


def difference(
    ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, floor: float = 0
) -> str | None:
    """What is wrong with a tensor: near neither eager nor float64, in units of its dtype."""
    if ours.shape != eager.shape or not _stands_for(ours.dtype, eager.dtype):
        return f"{ours.dtype} {[*ours.shape]} instead of {eager.dtype} {[*eager.shape]}"
    if not eager.dtype.is_floating_point:
        wrong = int((ours.long() != eager.long()).sum())
        return f"{wrong} of {ours.numel()} elements differ" if wrong else None
    eps = torch.finfo(eager.dtype).eps
    tiny = torch.finfo(eager.dtype).tiny
    a = ours.double()
    apart = (eager.double() - exact.double()).abs().nan_to_num(0, 0, 0)
    of_eager = apart.max() if apart.numel() else apart.new_zeros(())
    near = torch.zeros_like(a, dtype=torch.bool)
    worst = torch.full_like(a, torch.inf)
    for truth in (eager.double(), exact.double()):
        finite = truth.abs().nan_to_num(0, 0, 0)
        largest = finite.max() if finite.numel() else finite.new_zeros(())
        allowed = eps * (OF_ELEMENT * finite + OF_LARGEST * largest) + tiny + floor
        allowed = allowed + torch.minimum(OF_EAGER * of_eager, OF_SUMS * eps * largest)
        error = (a - truth).abs()
        same = (a == truth) | (a.isnan() & truth.isnan())
        # Beyond the largest number of the dtype float64 goes on.
        over = (a == truth.sign() * torch.inf) & (truth.abs() > torch.finfo(eager.dtype).max)
        near |= same | over | (error <= allowed)
        worst = torch.minimum(worst, torch.where(same, 0, error / allowed))
    wrong = int((~near).sum())
    if wrong:
        most = float(worst[~near].nan_to_num(torch.inf).max())
        return f"{wrong} of {near.numel()} elements off, by up to {most:.3g} of what is allowed"
    return None


def _stands_for(ours: torch.dtype, theirs: torch.dtype) -> bool:
    narrowed = {torch.int64: torch.int32, torch.float64: torch.float32}
    return ours in (theirs, narrowed.get(theirs))


def check(function: Callable[..., Any], args: Any, kwargs: Any, **how: Any) -> list[str]:
    """What is wrong with a function through the table; nothing if it is right."""
    module = Wrapped(function, args, kwargs)
    by_torch = eager(module)
    try:
        exact = in_float64(module)
    except (RuntimeError, TypeError, ValueError):
        exact = None  # a function that float64 hasn't, or a mix of dtypes
    return differences(through_jax(module, **how), by_torch, exact)


def op_infos() -> list[Any]:
    """Return torch's own list of operations, with samples of their arguments."""
    # Its module wants expecttest, for tests of torch's own, which nothing here uses.
    absent = importlib.util.find_spec("expecttest") is None
    if absent:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if absent:
            del sys.modules["expecttest"]
    return [*op_db]


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def samples(op: Any, dtype: torch.dtype, most: int) -> Iterable[Any]:
    """Some of an OpInfo's samples, spread over all of them, with gradients where torch has them."""
    from torch.testing._internal import common_utils

    torch.manual_seed(0)
    wants = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    # For each sample torch seeds devices that are absent too, with a traceback for later.
    with mock.patch.object(common_utils, "set_rng_seed", _seed_cpu):
        found = list(op.sample_inputs("cpu", dtype, requires_grad=wants))
    found = [s for s in found if not s.kwargs.get("dropout_p")]  # which is by chance
    step = max(len(found) / most, 1)
    return [found[int((i + 0.5) * step)] for i in range(min(most, len(found)))]
