"""Models that join channels and pixels by `view`, which tensors in channels_last do not let them.

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
    """The nest with tensors that are in channels_last in the order of their axes."""
    return nested.mapped(nest, _contiguous)


def _contiguous(tensor: Any) -> Any:
    is_last = tensor.data.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous() if is_last else tensor


def make_contiguous(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Parameters, buffers and what the optimizer keeps of them; gradients are there later."""
    kept = optimizer.state.values() if optimizer else ()
    of_optimizer = [t for state in kept for t in state.values() if isinstance(t, torch.Tensor)]
    for tensor in (*net.parameters(), *net.buffers(), *of_optimizer):
        tensor.data = tensor.data.contiguous()


def watch_first_call(net: nn.Module, give_in: Callable[[], None]) -> None:
    """Have the first call of `net` that is refused a view go on after `give_in()`, contiguous.

    Once a call went well, nothing is looked at any more.
    """
    before = net._compiled_call_impl

    def first(*args: Any, **kwargs: Any) -> Any:
        random, buffers = torch.get_rng_state(), [(b, b.detach().clone()) for b in net.buffers()]
        try:
            with standard_streams.silence_fake_tensor_log():
                outputs = (before or net._call_impl)(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSED_VIEWS):
                raise
        else:
            net._compiled_call_impl = before
            return outputs
        with torch.inference_mode(False):  # what parameters are now is to be trained
            give_in()
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        net._compiled_call_impl = then
        return then(*args, **kwargs)

    def then(*args: Any, **kwargs: Any) -> Any:
        # Batches that were on their way are in channels_last.
        return (before or net._call_impl)(*contiguous(args), **contiguous(kwargs))

    net._compiled_call_impl = first
