"""What torch 2.8 takes apart wrongly on the way to a compiler.

`multilabel_margin_loss` of labels that end early (with -1) adds up what stands behind their end:
the loss and its gradient are too large, in torch.compile with any backend.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey

Pair = tuple[torch.Tensor, torch.Tensor]
NONE, MEAN = 0, 1


@cache
def mended() -> dict[Any, Callable[..., Any]]:
    """Rules for those operations, which from here on are torch's own in this process, too."""
    operation = torch.ops.aten.multilabel_margin_loss_forward.default
    operation.py_kernels[DispatchKey.Autograd] = _multilabel_margin_loss
    operation._dispatch_cache.clear()
    return {operation: _multilabel_margin_loss}


def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> Pair:
    """Scores and labels (N, C) or (C,); labels until the first that is -1. The formula is that of
    `torch.nn.MultiLabelMarginLoss`."""
    scores_NC, labels_NL = torch.atleast_2d(input), torch.atleast_2d(target)
    num_classes = scores_NC.shape[1]
    classes_C = torch.arange(num_classes, device=target.device)
    counts_NL = (labels_NL < 0).cumsum(1) == 0
    labels_NL = torch.where(counts_NL, labels_NL, 0)
    is_label_NC = ((labels_NL.unsqueeze(2) == classes_C) & counts_NL.unsqueeze(2)).any(1)
    of_labels_NL = scores_NC.gather(1, labels_NL)
    margins_NLC = (1 - of_labels_NL.unsqueeze(2) + scores_NC.unsqueeze(1)).clamp_min(0)
    kept_NLC = counts_NL.unsqueeze(2) & ~is_label_NC.unsqueeze(1)
    losses_N = torch.where(kept_NLC, margins_NLC, 0).sum((1, 2)) / num_classes
    if reduction == NONE:
        loss = losses_N.reshape(input.shape[:-1])
    else:
        loss = losses_N.mean() if reduction == MEAN else losses_N.sum()
    return loss, is_label_NC.to(input.dtype).reshape(target.shape)


def of_complex() -> dict[Any, Callable[..., Any]]:
    """Rules for operations on complex numbers that torch cannot trace in a graph with gradients.

    It refuses to differentiate them, which nobody asks for there; on their parts it does not.
    """
    aten = torch.ops.aten
    scatters = aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter
    return {scatter.default: _on_parts(scatter.default) for scatter in scatters}


def _on_parts(operation: Any) -> Callable[..., Any]:
    dims = ("dim1", "dim2") if operation is torch.ops.aten.diagonal_scatter.default else ("dim",)

    def rule(self: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_complex():
            return NotImplemented
        bound = _bound(operation, args, kwargs)
        for name in dims:
            bound[name] %= self.dim()  # behind the last one are the parts
        parts = torch.view_as_real(self), torch.view_as_real(src.to(self.dtype))
        return torch.view_as_complex(operation(*parts, **bound).contiguous())

    return rule


def _bound(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments behind the first two by their names, with defaults."""
    others = operation._schema.arguments[2:]
    found = {argument.name: argument.default_value for argument in others}
    found.update({a.name: value for a, value in zip(others, args, strict=False)})
    return {**found, **kwargs}
