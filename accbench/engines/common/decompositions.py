"""Corrections of decompositions that are wrong in torch 2.8.

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
def corrected() -> dict[Any, Callable[..., Any]]:
    """Return corrected decompositions, and register them with torch in this process, too."""
    operation = torch.ops.aten.multilabel_margin_loss_forward.default
    operation.py_kernels[DispatchKey.Autograd] = _multilabel_margin_loss
    operation._dispatch_cache.clear()
    return {operation: _multilabel_margin_loss}


def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> Pair:
    """Compute the loss by the formula of `torch.nn.MultiLabelMarginLoss`.

    Args:
        input: scores (N, C) or (C,).
        target: labels of the same shape, up to the first that is -1.
        reduction: torch's number of it.

    Returns:
        The loss, and whether each class is a label, of the target's shape.
    """
    scores_NC, labels_NL = torch.atleast_2d(input), torch.atleast_2d(target)
    num_classes = scores_NC.shape[1]
    classes_C = torch.arange(num_classes, device=target.device)
    counts_NL = (labels_NL < 0).cumsum(1) == 0
    labels_NL = torch.where(counts_NL, labels_NL, 0)
    is_label_NC = ((labels_NL.unsqueeze(2) == classes_C) & counts_NL.unsqueeze(2)).any(1)
    label_scores_NL = scores_NC.gather(1, labels_NL)
    margins_NLC = (1 - label_scores_NL.unsqueeze(2) + scores_NC.unsqueeze(1)).clamp_min(0)
    is_counted_NLC = counts_NL.unsqueeze(2) & ~is_label_NC.unsqueeze(1)
    losses_N = torch.where(is_counted_NLC, margins_NLC, 0).sum((1, 2)) / num_classes
    if reduction == NONE:
        loss = losses_N.reshape(input.shape[:-1])
    else:
        loss = losses_N.mean() if reduction == MEAN else losses_N.sum()
    return loss, is_label_NC.to(input.dtype).reshape(target.shape)


def for_complex() -> dict[Any, Callable[..., Any]]:
    """Return decompositions for complex operations that torch cannot trace with gradients.

    torch refuses to differentiate them, though no gradient is needed there; on real views it does
    not refuse.
    """
    aten = torch.ops.aten
    scatters = aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter
    return {scatter.default: _on_real_views(scatter.default) for scatter in scatters}


def _on_real_views(operation: Any) -> Callable[..., Any]:
    dims = ("dim1", "dim2") if operation is torch.ops.aten.diagonal_scatter.default else ("dim",)

    def rule(self: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_complex():
            return NotImplemented
        arguments = _bound_arguments(operation, args, kwargs)
        for name in dims:
            arguments[name] %= self.dim()  # real views have one dimension more at the end
        views = torch.view_as_real(self), torch.view_as_real(src.to(self.dtype))
        return torch.view_as_complex(operation(*views, **arguments).contiguous())

    return rule


def _bound_arguments(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments behind the first two by their names, with defaults."""
    others = operation._schema.arguments[2:]
    values = {argument.name: argument.default_value for argument in others}
    values.update({a.name: value for a, value in zip(others, args, strict=False)})
    return {**values, **kwargs}
