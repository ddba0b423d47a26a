"""Contiguous layout for models whose `view` joins channels and pixels, which channels_last forbids.

PyTorch's own tutorials have `x.view(x.size(0), -1)` behind convolutions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.errors import REFUSED_VIEWS
from accbench.system import standard_streams


def contiguous(nest: Any) -> Any:
    """Return the nest with its channels_last tensors made contiguous."""
    return nested.mapped(nest, _contiguous)


def _contiguous(tensor: Any) -> Any:
    is_channels_last = tensor.data.dim() == 4 and tensor.is_contiguous(
        memory_format=torch.channels_last
    )
    return tensor.contiguous() if is_channels_last else tensor


def make_contiguous(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Make parameters, buffers and the optimizer's state contiguous in place.

    Gradients do not exist yet.
    """
    states = optimizer.state.values() if optimizer else ()
    optimizer_tensors = [
        t for state in states for t in state.values() if isinstance(t, torch.Tensor)
    ]
    for tensor in (*net.parameters(), *net.buffers(), *optimizer_tensors):
        tensor.data = tensor.data.contiguous()


def watch_first_call(net: nn.Module, fall_back: Callable[[], None]) -> None:
    """Call `fall_back` if the first call of a model is refused a view, and repeat that call.

    From then on all inputs are made contiguous. After a call that succeeds nothing is watched any
    more.
    """
    previous_call_impl = net._compiled_call_impl

    def first_call(*args: Any, **kwargs: Any) -> Any:
        random, buffers = torch.get_rng_state(), [(b, b.detach().clone()) for b in net.buffers()]
        try:
            with standard_streams.silence_fake_tensor_log():
                outputs = (previous_call_impl or net._call_impl)(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSED_VIEWS):
                raise
        else:
            net._compiled_call_impl = previous_call_impl
            return outputs
        with torch.inference_mode(False):  # tensors made under inference_mode could not be trained
            fall_back()
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        net._compiled_call_impl = contiguous_call
        return contiguous_call(*args, **kwargs)

    def contiguous_call(*args: Any, **kwargs: Any) -> Any:
        # Batches that were sent before are in channels_last.
        return (previous_call_impl or net._call_impl)(*contiguous(args), **contiguous(kwargs))

    net._compiled_call_impl = first_call
