"""Errors of a model's own operations, as plain PyTorch raises them.

Of operands whose shapes do not fit torch_xla 2.8 raises an error of its own, with a stack of C++,
or for products of matrices none at all: it ends the process by abort(). So in the first call of
each signature products are tried on shapes alone, and an operation that fails is tried on the host;
what plain PyTorch raises is raised. The model itself runs once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from accbench.data import nested
from accbench.engines.common import extra_inputs

# Names of functions that contract dimensions, in torch, torch.Tensor and torch.nn.functional.
_PRODUCTS = frozenset({
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm",
    "addbmm", "baddbmm", "addmv", "einsum", "tensordot", "linear", "bilinear", "multi_dot",
    "chain_matmul", "multi_head_attention_forward", "scaled_dot_product_attention",
})  # fmt: skip


def check_calls(model: nn.Module) -> None:
    """Have the first call of each signature of a model raise plain PyTorch's errors."""
    seen: set[Any] = set()
    entered: list[_PlainErrors] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        signature = nested.signature((args, kwargs)), module.training
        # A trial of attention would take dropout's numbers that are there for the call itself.
        if signature not in seen and not entered and not extra_inputs.sources:
            seen.add(signature)
            entered.append(_PlainErrors())
            entered[-1].__enter__()

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


class _PlainErrors(TorchFunctionMode):
    """Raises plain PyTorch's error where an operation on XLA's device fails."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in _PRODUCTS and _on_xla((args, kwargs)):
            is_wrong = _error(function, args, kwargs, "meta") is not None
            plain = _error(function, args, kwargs, "cpu") if is_wrong else None
            if plain is not None:
                raise plain
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            plain = _error(function, args, kwargs, "cpu") if _on_xla((args, kwargs)) else None
            if plain is None:
                raise
            raise plain from None


def _on_xla(nest: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.device.type == "xla" for t in tree_leaves(nest))


def _error(function: Any, args: Any, kwargs: Any, device: str) -> Exception | None:
    """Return what a function raises of copies on another device, of shapes alone on `meta`."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if device == "meta":
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )
        return tensor.detach().cpu()

    try:
        with torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
            function(*args, **kwargs)
    except Exception as error:
        return error
    return None
