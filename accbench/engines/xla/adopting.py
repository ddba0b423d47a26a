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
        _have_counts_on_device(optimizer, send)
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
        make_state(optimizer, send)
        _place(optimizer, send)

    place(optimizer)
    optimizer.register_load_state_dict_post_hook(place)


def _have_counts_on_device(optimizer: Any, send: Send) -> None:
    """One of another class; in what is saved of it, its settings are those that it had."""
    on_device = not isinstance(optimizer, torch.optim.Adadelta)  # torch allows it no XLA
    wanted = {"capturable": on_device, "fused": False, "foreach": False}
    had: list[dict[str, Any]] = []

    def change(optimizer: Any) -> None:
        had[:] = [{n: group[n] for n in wanted if n in group} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group |= {name: value for name, value in wanted.items() if name in group}
            if group.get("capturable"):
                _send_counts(optimizer, send)

    def change_back(optimizer: Any, saved: dict[str, Any]) -> None:
        for group, before in zip(saved["param_groups"], had, strict=False):  # of which more come
            group |= before

    change(optimizer)
    optimizer.register_load_state_dict_post_hook(change)
    optimizer.register_state_dict_post_hook(change_back)


def _send_counts(optimizer: Any, send: Send) -> None:
    """Of a state that was loaded before: what torch asks for on the parameters' device."""
    for state in optimizer.state.values():
        for name in ("step", "mu_product"):  # the latter is NAdam's
            if isinstance(state.get(name), torch.Tensor) and state[name].device.type == "cpu":
                state[name] = send(state[name])


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
            # torch's own SGD counts nothing; its buffer tells that there was a first step.
            count = float(any(state.get(key) is not None for key in keys))
            for key in keys:
                if state.get(key) is None:
                    state[key] = send(torch.zeros(parameter.shape, dtype=parameter.dtype))
            if "step" not in state:
                state["step"] = send(torch.tensor(count))


def _place(optimizer: sync_free.SharedCounts, send: Send) -> None:
    """Step counts on the device, where torch does not put them; shared."""
    optimizer.share_counts(send)
    for state in optimizer.state.values():
        if state["step"].device.type == "cpu":
            state["step"] = send(state["step"].float())
