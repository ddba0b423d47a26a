"""Tied parameters and buffers: tensors that a model stores more than once."""

from typing import Any

import torch
from torch import nn

from accbench.errors import RequestError

Slots = list[list[tuple[Any, str]]]


def names_by_tensor(net: nn.Module) -> set[tuple[str, ...]]:
    """Return the names of parameters and buffers, those of one tensor together."""
    names_of_tensor: dict[int, list[str]] = {}
    for named_tensors in (net.named_parameters, net.named_buffers):
        for name, tensor in named_tensors(remove_duplicate=False):
            names_of_tensor.setdefault(id(tensor), []).append(name)
    return {tuple(tensor_names) for tensor_names in names_of_tensor.values()}


def find_ties(net: nn.Module) -> Slots:
    """Return for each tensor that is stored more than once the (owner, key) of each slot."""
    slots: dict[int, list[tuple[Any, str]]] = {}
    for module in net.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((owner, name))
    return [tensor_slots for tensor_slots in slots.values() if len(tensor_slots) > 1]


def restore_ties(slots: Slots) -> None:
    """Store one tensor in all of its slots again, where a move to a device made several."""
    for (owner, name), *other_slots in slots:
        for other, other_name in other_slots:
            other[other_name] = owner[name]


def copy_attributes_and_hooks(old: Any, new: Any) -> None:
    """Copy attributes and hooks that a user set on a parameter to its replacement."""
    if new is old:
        return
    vars(new).update(vars(old))
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def refuse_shared_memory(net: nn.Module) -> None:
    """Check that no two parameters share memory, which they would lose in a move.

    Raises:
        RequestError: two parameters share memory without being one tensor.
    """
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in net.named_parameters():
        # By the storage, for some tensors have one without an address.
        other, first = owners.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
        if first is not tensor:
            raise RequestError(
                f"parameters {other} and {name} share memory but are two tensors, which comes "
                "apart on another device; use one nn.Parameter in both places"
            )
