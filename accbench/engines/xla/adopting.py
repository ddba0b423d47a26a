"""A user's own optimizer, made one that never has XLA wait for the host."""

from collections.abc import Callable
from typing import Any

import torch

from accbench.engines.xla import sync_free
from accbench.errors import RequestError

Send = Callable[[torch.Tensor], torch.Tensor]
# Exactly these: a subclass may do anything.
_FORMS: dict[type, type] = {
    torch.optim.AdamW: sync_free.AdamW,
    torch.optim.Adam: sync_free.AdamW,
    torch.optim.SGD: sync_free.SGD,
}


def adopt(optimizer: Any, send: Send, as_vectors: bool) -> None:
    """Give the optimizer the class of its sync-free form, and its state before the first step.

    One of another class stays as it is, with its step counts on the device where it can have
    them there.

    Args:
        send: copies a tensor from the host to the device, with nothing left to compute.
        as_vectors: see `sync_free.AdamW`.

    Raises:
        RequestError: it is set to something that its sync-free form cannot do.
    """
    form = _FORMS.get(type(optimizer))
    if form is None:
        for group in optimizer.param_groups:
            group |= {name: True for name in ("capturable",) if name in group}
            group |= {name: False for name in ("fused", "foreach") if name in group}
        return
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise RequestError(
                    f"{type(optimizer).__name__}({name}=True) has no form that XLA runs without "
                    f"waiting; leave {name} out, or take another --engine"
                )
    optimizer.__class__ = form
    # As its constructor does: or hooks on steps would not be called.
    optimizer._patch_step_function()
    if isinstance(optimizer, sync_free.AdamW):
        optimizer.as_vectors = as_vectors

    def place(optimizer: Any) -> None:
        _place(optimizer, send)

    make_state(optimizer, send)
    place(optimizer)
    optimizer.register_load_state_dict_post_hook(place)


def make_state(optimizer: Any, send: Send) -> None:
    """What parameters lack of their state, which a first step would make another graph by."""
    if not isinstance(optimizer, sync_free.SharedCounts):
        return
    for group in optimizer.param_groups:
        keys = ["exp_avg", "exp_avg_sq"]
        if isinstance(optimizer, sync_free.SGD):
            keys = ["momentum_buffer"] if group["momentum"] else []
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for key in keys:
                if state.get(key) is None:
                    state[key] = send(torch.zeros(parameter.shape, dtype=parameter.dtype))
            if "step" not in state:
                state["step"] = send(torch.zeros(()))


def _place(optimizer: sync_free.SharedCounts, send: Send) -> None:
    """Step counts on the device, where torch does not put them; shared."""
    optimizer.share_counts(send)
    for state in optimizer.state.values():
        if state["step"].device.type == "cpu":
            state["step"] = send(state["step"].float())
