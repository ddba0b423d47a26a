"""What a model's state is: tensors by their first names, and what else its state_dict holds.

The one place that says which entries of a `state_dict()` are parameters and buffers, which are
extra state (`get_extra_state`, or what hooks and overrides add), and how both are put back.
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
_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict",
            "get_extra_state", "set_extra_state")  # fmt: skip
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
          "_load_state_dict_post_hooks")  # fmt: skip


def tensors(net: nn.Module) -> Tensors:
    """Return parameters and buffers by their first names, each once."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def saved_buffers(net: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that are not `persistent=False`, each once."""
    found = {
        id(buffer): buffer
        for module in net.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return [*found.values()]


@dataclasses.dataclass(frozen=True)
class _Entries:
    """A model's `state_dict()`, parted."""

    whole: dict[str, Any]
    """As the model gave it, for modules look there for the version of their tensors."""
    names: dict[str, str]
    """Key -> first name, of entries that are a parameter or buffer."""
    extra: Extra
    """The other ones."""


def _entries(net: nn.Module) -> _Entries:
    first_name = {id(tensor): name for name, tensor in tensors(net).items()}
    whole = _state_dict(net)
    names = {key: first_name[id(v)] for key, v in whole.items() if id(v) in first_name}
    return _Entries(whole, names, {key: v for key, v in whole.items() if key not in names})


def _state_dict(net: nn.Module) -> dict[str, Any]:
    try:
        with torch.no_grad():  # hooks may compute with parameters
            return net.state_dict(keep_vars=True)
    except TypeError:  # one of a user's own that takes no arguments
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
    """Return copies of all extra state on the host, but of what no checkpoint can hold.

    Args:
        wide: as `extra_state.copied` has it.
    """
    found = {}
    for key, value in _entries(net).extra.items():
        with contextlib.suppress(extra_state.NotPlainError):
            found[key] = extra_state.copied(value, wide)
    return found


def load(net: nn.Module, saved: Tensors, extra: Extra | None) -> None:
    """Put tensors and extra state back, by the model's own `load_state_dict` where it takes them.

    Args:
        saved: of all names that `tensors` has now, and of buffers that are None now.
        extra: None leaves what there is.

    Raises:
        ValueError: the model has other tensors, or does not take an entry that it gave.
    """
    _make_buffers(net, saved)
    own, entries = tensors(net), _entries(net)
    if own.keys() != saved.keys():
        other = sorted(own.keys() ^ saved.keys())
        raise ValueError(f"the model has other tensors than the state, such as {other[0]}")
    whole = entries.whole
    # Copies, for XLA on a CPU may take over the memory of a host's tensor, and write to it.
    for key, name in entries.names.items():
        whole[key] = saved[name].clone()
    whole.update({key: extra_state.placed(v, whole.get(key)) for key, v in (extra or {}).items()})
    taken = _load_by_itself(net, entries)
    for name in own.keys() - taken:  # those that are not saved, for one
        _load_tensor(net, own[name], saved[name].clone())


def _load_by_itself(net: nn.Module, entries: _Entries) -> set[str]:
    """Call the model's `load_state_dict`; returns the names of tensors that it took for sure."""
    if type(net).load_state_dict is not nn.Module.load_state_dict:
        net.load_state_dict(entries.whole)
        return set()
    report = net.load_state_dict(entries.whole, strict=False)
    unexpected = set(report.unexpected_keys)
    lost = [key for key in entries.whole if key in unexpected and key not in entries.names]
    if lost:
        raise ValueError(f"its load_state_dict() does not take {lost[0]}, which is saved")
    return {name for key, name in entries.names.items() if key not in unexpected}


def _make_buffers(net: nn.Module, saved: Tensors) -> None:
    """Make the buffers that are None in a new model, and that a forward pass has filled."""
    modules = dict(net.named_modules())
    device = next((parameter.device for parameter in net.parameters()), None)
    for name in saved.keys() - tensors(net).keys():
        path, _, last = name.rpartition(".")
        if path in modules and last in modules[path]._buffers:
            modules[path]._buffers[last] = saved[name].to(device, copy=True)


def _load_tensor(net: nn.Module, own: torch.Tensor, loaded: torch.Tensor) -> None:
    if own.shape == loaded.shape:
        with torch.no_grad():
            own.copy_(loaded)
        return
    if isinstance(own, nn.Parameter):
        raise ValueError(f"a parameter is {tuple(own.shape)}, and {tuple(loaded.shape)} is saved")
    # A forward pass may put another buffer in its place.
    new = loaded.to(own.device, own.dtype)
    for module in net.modules():
        module._buffers.update({n: new for n, other in module._buffers.items() if other is own})


def load_extra(net: nn.Module, extra: Extra) -> None:
    """Put extra state back into the modules that have it, and nothing else."""
    modules = _with_extra_state(net)
    for key, value in extra.items():
        if key in modules and _takes_extra_state(modules[key]):
            current = modules[key].get_extra_state()
            modules[key].set_extra_state(extra_state.placed(value, current))


def _takes_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def share(net: nn.Module) -> None:
    """Give all ranks the extra state of rank 0's modules; all ranks call it."""
    if process_group.is_single_worker():
        return
    if _with_extra_state(net):
        load_extra(net, process_group.broadcast_value(read_extra(net)))


def refuse_unsaved(net: nn.Module) -> None:
    """Look whether a checkpoint can hold all of a model's state.

    Raises:
        RequestError: it cannot; the message names the module.
    """
    for key, value in _entries(net).extra.items():
        problem = extra_state.problem(key, value)
        if problem is not None:
            raise RequestError(f"{problem}; give it so, or save nothing (--save_interval 0)")


def check_loadable(net: nn.Module) -> None:
    """Look whether a checkpoint of a model could be loaded again, before one is written.

    Only models whose classes or hooks have a say in their state are tried.

    Raises:
        RequestError: it could not; the message says why.
    """
    refuse_unsaved(net)
    if not _has_own_ways(net):
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


def _has_own_ways(net: nn.Module) -> bool:
    for module in net.modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return True
        methods = (getattr(type(module), name) for name in _METHODS)
        if not all(method.__module__.startswith("torch.") for method in methods):
            return True
    return False
