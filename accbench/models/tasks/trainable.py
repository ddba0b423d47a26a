"""What of a network can be trained by an engine: wrappers are taken off, the rest is refused.

An engine distributes and compiles by itself. A model that comes wrapped for that is trained as it
was before; what cannot be trained, or would train without a part of it, is refused in one line.
"""

import functools
import re
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from accbench.errors import RequestError
from accbench.recording.terminal import log

# Whose parameters are parts, or are moved by hooks: class's module, what it is called here.
_SHARDED = {
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed._composable": "fully_shard",
    "deepspeed": "DeepSpeed",
    "fairscale": "FairScale",
}
# Weights are whole numbers without gradients, and so none comes to the layers in front of them.
_QUANTIZED = re.compile(r"^torch(\.ao)?\.nn\..*\bquantized\b(?!\.reference)")
# There for models that are yet to be quantized.
_OF_FLOATS = ("FloatFunctional", "FXFloatFunctional")


class Unwrapped(nn.Module):
    """In the place of a wrapper within a model: the names of parameters stay as they were."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was wrapped."""
        return _inner(self)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(_inner(self), name)


def plain(net: nn.Module) -> nn.Module:
    """Return the network without DistributedDataParallel, DataParallel and torch.compile.

    Its buffers have memory of their own, where `expand` has made them, which none can write to.

    A wrapper within the network becomes `Unwrapped` in its place. A wrapper around it stays whole,
    but calls what is returned and does nothing else: whoever holds it may go on calling it.

    Raises:
        RequestError: a wrapper does what an engine would not do.
    """
    names = _wrappers(net)
    if names:
        log.info(
            f"the model came wrapped in {', '.join(names)}, and is trained as it is inside: the "
            "engine distributes and compiles it, by its own flags"
        )
    outer = net
    while _is_wrapper(net):
        net = _inner(net)
    while outer is not net:
        vars(outer)["forward"] = functools.partial(_call, net)
        outer = _inner(outer)
    for module in net.modules():
        if _is_wrapper(module):
            _take_off(module)
        if vars(module).get("_compiled_call_impl") is not None:
            module._compiled_call_impl = None
    _write_out_buffers(net)
    return net


def _write_out_buffers(net: nn.Module) -> None:
    written: dict[int, torch.Tensor] = {}
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not is_lazy(buffer) and 0 in buffer.stride() and buffer.numel() > 1:
                setattr(module, name, written.setdefault(id(buffer), buffer.contiguous()))


def _wrappers(net: nn.Module) -> list[str]:
    """Return the names of all wrappers, each once."""
    found: dict[str, None] = {}
    for module in net.modules():
        if isinstance(module, DistributedDataParallel) and getattr(module, "_comm_hooks", []):
            raise RequestError(
                "the model is in DistributedDataParallel with a communication hook, which engines "
                "do not run; leave out register_comm_hook, or train without accbench"
            )
        if _is_wrapper(module):
            found["torch.compile" if _is_compiled(module) else type(module).__name__] = None
        elif vars(module).get("_compiled_call_impl") is not None:
            found["torch.compile"] = None
    return [*found]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, (DistributedDataParallel, DataParallel)) or _is_compiled(module)


def _inner(module: nn.Module) -> Any:
    found = (module._modules.get(name) for name in ("module", "_orig_mod"))
    return next(inner for inner in found if inner is not None)  # a module's len() may be 0


def _call(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return net(*args, **kwargs)  # of the class that it then has


def _take_off(module: nn.Module) -> None:
    inner = _inner(module)
    vars(module).pop("forward", None)
    object.__setattr__(module, "__class__", Unwrapped)
    vars(module)["training"] = inner.training


def check(net: nn.Module, engine: str, compiles: bool) -> None:
    """Look whether an engine can train a network, before it touches it.

    Args:
        net: the network, on the host and as it was built.
        engine: the engine's name, for messages.
        compiles: whether the engine compiles what it trains.

    Raises:
        RequestError: it cannot; the message says why and what to do.
    """
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        problem = _problem_of_tensor(tensor)
        if problem is not None:
            raise RequestError(f"the model's {name} {problem}")
    for name, module in net.named_modules():
        problem = _problem_of_module(module, engine, compiles)
        if problem is not None:
            raise RequestError(f"the model{f' at {name}' if name else ''} {problem}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise RequestError(
            "the model has no parameter that trains (requires_grad); unfreeze some by "
            "requires_grad_(), or give a model that has any"
        )


def _problem_of_tensor(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return (
            "has no shape yet, as those of LazyLinear and the like: run one batch through the "
            "model where it is built, model(batch) under torch.no_grad(), before any optimizer"
        )
    if tensor.device.type == "meta":
        return (
            "is on the device meta, without content: model.to_empty(device='cpu'), and load or "
            "draw its weights"
        )
    if type(tensor).__module__.startswith("torch.distributed"):
        return (
            f"is a {type(tensor).__name__}, a part of a distributed tensor; give the model as it "
            "was before fully_shard or parallelize_module"
        )
    return None


def _problem_of_module(module: nn.Module, engine: str, compiles: bool) -> str | None:
    kind = type(module)
    for prefix, name in _SHARDED.items():
        if f"{kind.__module__}.".startswith(f"{prefix}."):
            return (
                f"is in {name}, which has distributed its parameters already; give the model as "
                "it was before"
            )
    if _QUANTIZED.match(f"{kind.__module__}.") and kind.__name__ not in _OF_FLOATS:
        return (
            f"is a quantized {kind.__name__}, which has no gradients; train the model before it "
            "is quantized"
        )
    if compiles and isinstance(module, torch.jit.ScriptModule):
        return (
            f"is a {kind.__name__} of torch.jit, a program that --engine {engine} cannot compile; "
            "give the nn.Module that it was made from, or use --engine ddp"
        )
    return None
