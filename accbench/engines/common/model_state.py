"""The state of a model: tensors by their first names, and the other entries of its state_dict.

The one module that decides which entries of a `state_dict()` are parameters and buffers, which are
extra state (`get_extra_state`, or what hooks and overrides add), and how both are loaded.
"""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn

from accbench.distributed import process_group
from accbench.engines.common import extra_state
from accbench.errors import RequestError

Tensors = dict[str, torch.Tensor]
Extra = dict[str, Any]
_STATE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict",
            "get_extra_state", "set_extra_state")  # fmt: skip
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
          "_load_state_dict_post_hooks")  # fmt: skip


def tensors(net: nn.Module) -> Tensors:
    """Return parameters and buffers by their first names, each once."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def saved_buffers(net: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that are not `persistent=False`, each once."""
    buffers = {
        id(buffer): buffer
        for module in net.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return [*buffers.values()]


@dataclasses.dataclass(frozen=True)
class _Entries:
    """A model's `state_dict()`, split into tensors and extra state."""

    state_dict: dict[str, Any]
    """As the model returned it, for modules read the version of their tensors from it."""
    names: dict[str, str]
    """Key -> first name, for entries that are a parameter or buffer."""
    extra: Extra
    """The other entries."""


def _entries(net: nn.Module) -> _Entries:
    first_name = {id(tensor): name for name, tensor in tensors(net).items()}
    state_dict = _state_dict(net)
    names = {key: first_name[id(v)] for key, v in state_dict.items() if id(v) in first_name}
    return _Entries(
        state_dict, names, {key: v for key, v in state_dict.items() if key not in names}
    )


def _state_dict(net: nn.Module) -> dict[str, Any]:
    try:
        with torch.no_grad():  # hooks may compute with parameters
            return net.state_dict(keep_vars=True)
    except TypeError:  # a user's own method may take no arguments
        return {key: module.get_extra_state() for key, module in _with_extra_state(net).items()}


def _with_extra_state(net: nn.Module) -> dict[str, nn.Module]:
    """Return modules with extra state of their own, by its key."""
    default = nn.Module.get_extra_state
    return {
        f"{name}.{extra_state.SUFFIX}" if name else extra_state.SUFFIX: module
        for name, module in net.named_modules()
        if type(module).get_extra_state is not default
    }


def first_with_extra_state(net: nn.Module) -> str | None:
    """Return the name of the first module that has extra state; None if there is none."""
    key = next(iter(_with_extra_state(net)), None)
    return None if key is None else key.removesuffix(extra_state.SUFFIX).removesuffix(".")


def read_extra(net: nn.Module, wide: bool = True) -> Extra:
    """Return copies on the host of all extra state that a checkpoint can hold.

    Args:
        net: the model.
        wide: keep float64, as in `extra_state.copy_to_host`.
    """
    extra = {}
    for key, value in _entries(net).extra.items():
        with contextlib.suppress(extra_state.NotPlainError):
            extra[key] = extra_state.copy_to_host(value, wide)
    return extra


def load(net: nn.Module, saved: Tensors, extra: Extra | None) -> None:
    """Load tensors and extra state, by the model's own `load_state_dict` where it takes them.

    Args:
        net: changed in place.
        saved: of all names that `tensors` has now, and of buffers that are None now.
        extra: extra state by key; None leaves it unchanged.

    Raises:
        ValueError: the model has other tensors, or does not take an entry that it gave.
    """
    _make_buffers(net, saved)
    current, entries = tensors(net), _entries(net)
    if current.keys() != saved.keys():
        other = sorted(current.keys() ^ saved.keys())
        raise ValueError(f"the model has other tensors than the state, such as {other[0]}")
    state_dict = entries.state_dict
    # Copies, for XLA on a CPU may take over a host tensor's memory, and write to it.
    for key, name in entries.names.items():
        state_dict[key] = saved[name].clone()
    state_dict.update(
        {
            key: extra_state.copy_to_devices_of(v, state_dict.get(key))
            for key, v in (extra or {}).items()
        }
    )
    loaded = _load_by_own_method(net, entries)
    for name in current.keys() - loaded:  # such as buffers that are not persistent
        _load_tensor(net, current[name], saved[name].clone())


def _load_by_own_method(net: nn.Module, entries: _Entries) -> set[str]:
    """Call the model's `load_state_dict`; returns the names of tensors that it surely took."""
    if type(net).load_state_dict is not nn.Module.load_state_dict:
        net.load_state_dict(entries.state_dict)
        return set()
    report = net.load_state_dict(entries.state_dict, strict=False)
    unexpected = set(report.unexpected_keys)
    lost = [key for key in entries.state_dict if key in unexpected and key not in entries.names]
    if lost:
        raise ValueError(f"its load_state_dict() does not take {lost[0]}, which is saved")
    return {name for key, name in entries.names.items() if key not in unexpected}


def _make_buffers(net: nn.Module, saved: Tensors) -> None:
    """Create the buffers that are None in a new model, and that a forward pass fills."""
    modules = dict(net.named_modules())
    device = next((parameter.device for parameter in net.parameters()), None)
    for name in saved.keys() - tensors(net).keys():
        path, _, last = name.rpartition(".")
        if path in modules and last in modules[path]._buffers:
            modules[path]._buffers[last] = saved[name].to(device, copy=True)


def _load_tensor(net: nn.Module, current: torch.Tensor, loaded: torch.Tensor) -> None:
    if current.shape == loaded.shape:
        with torch.no_grad():
            current.copy_(loaded)
        return
    if isinstance(current, nn.Parameter):
        raise ValueError(
            f"a parameter is {tuple(current.shape)}, and {tuple(loaded.shape)} is saved"
        )
    # A forward pass may put another buffer in its place.
    new = loaded.to(current.device, current.dtype)
    for module in net.modules():
        module._buffers.update({n: new for n, other in module._buffers.items() if other is current})


def load_extra(net: nn.Module, extra: Extra) -> None:
    """Load extra state into the modules that have it, and nothing else."""
    modules = _with_extra_state(net)
    for key, value in extra.items():
        if key in modules and _takes_extra_state(modules[key]):
            current = modules[key].get_extra_state()
            modules[key].set_extra_state(extra_state.copy_to_devices_of(value, current))


def _takes_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def broadcast_extra(net: nn.Module) -> None:
    """Give all ranks the extra state of rank 0's modules; all ranks call it."""
    if process_group.is_single_worker():
        return
    if _with_extra_state(net):
        load_extra(net, process_group.broadcast_value(read_extra(net)))


def refuse_unsaved(net: nn.Module) -> None:
    """Check that a checkpoint can hold all of a model's state.

    Raises:
        RequestError: it cannot; the message names the module.
    """
    for key, value in _entries(net).extra.items():
        problem = extra_state.entry_problem(key, value)
        if problem is not None:
            raise RequestError(f"{problem}; give it so, or save nothing (--save_interval 0)")


def check_loadable(net: nn.Module) -> None:
    """Check that a checkpoint of a model could be loaded again, before one is written.

    Only models whose classes or hooks customise their state are tried.

    Raises:
        RequestError: it could not; the message says why.
    """
    refuse_unsaved(net)
    if not customises_state(net):
        return
    saved = {name: tensor.detach().clone() for name, tensor in tensors(net).items()}
    try:
        load(net, saved, read_extra(net))
    except Exception as error:  # whatever code of the user's raises
        why = " ".join(str(error).split())
        raise RequestError(
            f"a checkpoint of this model could not be loaded again: {type(error).__name__}: {why}; "
            "have its classes take back what their state_dict() gives, or save nothing "
            "(--save_interval 0)"
        ) from error


def customises_state(net: nn.Module) -> bool:
    """Return whether a model's classes or hooks have a say in its state_dict."""
    for module in net.modules():
        if any(getattr(module, hooks, None) for hooks in _STATE_HOOKS):
            return True
        methods = (getattr(type(module), name) for name in _STATE_METHODS)
        if not all(method.__module__.startswith("torch.") for method in methods):
            return True
    return False
