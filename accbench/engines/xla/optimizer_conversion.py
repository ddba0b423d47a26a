"""Conversion of a user's own optimizer to one that never has XLA wait for the host."""

from collections.abc import Callable
from typing import Any

import torch

from accbench.engines.xla import sync_free
from accbench.errors import RequestError

Send = Callable[[torch.Tensor], torch.Tensor]
# Exactly these classes: a subclass may do anything.
_SYNC_FREE_CLASSES: dict[type, type] = {
    torch.optim.AdamW: sync_free.SyncFreeAdamW,
    torch.optim.Adam: sync_free.SyncFreeAdamW,
    torch.optim.SGD: sync_free.SyncFreeSGD,
}


def convert(optimizer: Any, send: Send, as_vectors: bool) -> None:
    """Give an optimizer the class of its sync-free form, and its state before the first step.

    An optimizer of another class keeps it, with its step counts on the device where torch allows
    that.

    Args:
        optimizer: of torch.optim; it stays the same object.
        send: copies a tensor from the host to the device, with nothing left to compute.
        as_vectors: see `sync_free.SyncFreeAdamW`.

    Raises:
        RequestError: the optimizer has a setting that its sync-free form does not support.
    """
    sync_free_class = _SYNC_FREE_CLASSES.get(type(optimizer))
    if sync_free_class is None:
        _keep_counts_on_device(optimizer, send)
        return
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                raise RequestError(
                    f"{type(optimizer).__name__}({name}=True) has no form that XLA runs without "
                    f"waiting; leave {name} out, or take another --engine"
                )
    optimizer.__class__ = sync_free_class
    # As the constructor does; without it hooks on steps would not be called.
    optimizer._patch_step_function()
    if isinstance(optimizer, sync_free.SyncFreeAdamW):
        optimizer.as_vectors = as_vectors

    def prepare_state(optimizer: Any) -> None:
        fill_state(optimizer, send)
        share_counts_on_device(optimizer, send)

    prepare_state(optimizer)
    optimizer.register_load_state_dict_post_hook(prepare_state)


def _keep_counts_on_device(optimizer: Any, send: Send) -> None:
    """Have an optimizer of another class keep its step counts on the device.

    What it saves has the settings that it had before.
    """
    on_device = not isinstance(
        optimizer, torch.optim.Adadelta
    )  # torch refuses it `capturable` on XLA
    settings = {"capturable": on_device, "fused": False, "foreach": False}
    original_settings: list[dict[str, Any]] = []

    def use_device_counts(optimizer: Any) -> None:
        original_settings[:] = [
            {n: group[n] for n in settings if n in group} for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group |= {name: value for name, value in settings.items() if name in group}
            if group.get("capturable"):
                _send_counts(optimizer, send)

    def restore_settings(optimizer: Any, saved: dict[str, Any]) -> None:
        # More groups may have been added since.
        for group, original in zip(saved["param_groups"], original_settings, strict=False):
            group |= original

    use_device_counts(optimizer)
    optimizer.register_load_state_dict_post_hook(use_device_counts)
    optimizer.register_state_dict_post_hook(restore_settings)


def _send_counts(optimizer: Any, send: Send) -> None:
    """Send what torch wants on the parameters' device of a state that was loaded earlier."""
    for state in optimizer.state.values():
        for name in ("step", "mu_product"):  # the latter is NAdam's
            if isinstance(state.get(name), torch.Tensor) and state[name].device.type == "cpu":
                state[name] = send(state[name])


def fill_state(optimizer: Any, send: Send) -> None:
    """Create the state that parameters lack.

    State that appears in the first step would make the second step another graph.
    """
    if not isinstance(optimizer, sync_free.SharedStepCounts):
        return
    for group in optimizer.param_groups:
        keys = ["exp_avg", "exp_avg_sq"]
        if isinstance(optimizer, sync_free.SyncFreeSGD):
            keys = ["momentum_buffer"] if group["momentum"] else []
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            # torch's own SGD counts no steps; a momentum buffer shows that there was a first one.
            count = float(any(state.get(key) is not None for key in keys))
            for key in keys:
                if state.get(key) is None:
                    state[key] = send(torch.zeros(parameter.shape, dtype=parameter.dtype))
            if "step" not in state:
                state["step"] = send(torch.tensor(count))


def share_counts_on_device(optimizer: Any, send: Send) -> None:
    """Share step counts, and move them to the device, where torch does not put them."""
    if isinstance(optimizer, sync_free.SharedStepCounts):
        optimizer.share_counts(send)
    for state in optimizer.state.values():
        if state["step"].device.type == "cpu":
            state["step"] = send(state["step"].float())
