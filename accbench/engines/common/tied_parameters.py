"""Tensors that a model keeps in more than one place, such as tied weights."""

from typing import Any

import torch
from torch import nn

from accbench.errors import RequestError

Places = list[list[tuple[Any, str]]]


def names(net: nn.Module) -> set[tuple[str, ...]]:
    """Names of parameters and buffers, those of one tensor together."""
    found: dict[int, list[str]] = {}
    for named in (net.named_parameters, net.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(name)
    return {tuple(of_tensor) for of_tensor in found.values()}


def places(net: nn.Module) -> Places:
    """(owner, key) of each place of the tensors that have more than one."""
    found: dict[int, list[tuple[Any, str]]] = {}
    for module in net.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((owner, name))
    return [of_tensor for of_tensor in found.values() if len(of_tensor) > 1]


def tie(places_before: Places) -> None:
    """Put one tensor into all its places again, where a move made one for each."""
    for (owner, name), *others in places_before:
        for other, its_name in others:
            other[its_name] = owner[name]


def carry_over(given: Any, made: Any) -> None:
    """What a person hung on a parameter, attributes and hooks, for the one in its place."""
    if made is given:
        return
    vars(made).update(vars(given))
    for hook in (given._backward_hooks or {}).values():
        made.register_hook(hook)
    for hook in (getattr(given, "_post_accumulate_grad_hooks", None) or {}).values():
        made.register_post_accumulate_grad_hook(hook)


def refuse_views(net: nn.Module) -> None:
    """Parameters that share their memory without being one come apart in a move, unseen.

    Raises:
        RequestError: there are such.
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
