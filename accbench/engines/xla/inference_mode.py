"""torch.inference_mode on XLA's device, where torch_xla 2.8 does not support all of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accbench.data import nested


@contextmanager
def replaced_by_no_grad() -> Iterator[None]:
    """Replace torch.inference_mode, where it is on, by torch.no_grad.

    In inference mode torch_xla 2.8 has no views of tensors that were made outside of it.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def viewable(nest: Any) -> Any:
    """Copy tensors that torch.inference_mode, where it is on, could not take views of."""
    if not torch.is_inference_mode_enabled():
        return nest
    return nested.mapped(nest, torch.clone, doing="copied under torch.inference_mode")
