"""Build a model without holding it: its weights are drawn later, one tensor at a time.

The model is built of fake tensors, which have shapes and no memory, and the operations that would
have filled them are noted. Replaying them in order draws the same random numbers, and so gives the
same weights as building it at once. Draws whose results are overwritten later, such as a layer's
own initialisation before its model's, are repeated for the generator alone and thrown away.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accbench.distributed import process_group
from accbench.engines.common import tied_parameters

_OVERWRITING = {
    torch.ops.aten.normal_, torch.ops.aten.uniform_, torch.ops.aten.zero_, torch.ops.aten.fill_,
    torch.ops.aten.copy_, torch.ops.aten.random_, torch.ops.aten.exponential_,
}  # fmt: skip


@dataclasses.dataclass
class _FakeCall:
    """One operation on fake tensors."""

    function: Any
    args: Any
    kwargs: Any
    outputs: Any
    is_needed: bool = False

    def written(self) -> list[FakeTensor]:
        """Return the tensors that it changes in place."""
        found = []
        for argument, value in zip(self.function._schema.arguments, self.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += _fakes(value)
        return found

    def made(self) -> list[FakeTensor]:
        """Return its results with memory of their own."""
        before = {_storage(tensor) for tensor in _fakes((self.args, self.kwargs))}
        return [tensor for tensor in _fakes(self.outputs) if _storage(tensor) not in before]

    def overwrites(self) -> bool:
        """Return whether nothing is left of what it changes, which is one tensor's memory."""
        if self.function.overloadpacket not in _OVERWRITING:
            return False
        (target,) = self.written()
        return target.nbytes == target.untyped_storage().nbytes()

    def draws(self) -> bool:
        """Return whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags


def _fakes(nest: Any) -> list[FakeTensor]:
    return [leaf for leaf in _pytree.tree_leaves(nest) if isinstance(leaf, FakeTensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _CallRecorder(TorchDispatchMode):
    """Notes the operations on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_FakeCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.calls.append(_FakeCall(func, args, kwargs or {}, outputs))
        return outputs


class DeferredBuild:
    """A model of fake tensors, and how to fill them."""

    def __init__(
        self, model: nn.Module, calls: list[_FakeCall], random_state: torch.Tensor
    ) -> None:
        self.model, self._calls, self._random_state = model, calls, random_state

    def values(self, wanted: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each wanted tensor's name and value, of which it drops its own reference.

        Torch's global generator then is where building the model at once leaves it.

        Args:
            wanted: fake tensors of the model by name.
        """
        torch.set_rng_state(self._random_state)
        names: dict[int, list[str]] = {}
        for name, tensor in wanted.items():
            names.setdefault(_storage(tensor), []).append(name)
        last = self._mark_needed(set(names))
        memory: dict[int, torch.UntypedStorage] = {}
        ready: dict[int, list[int]] = {}
        for storage, index in last.items():
            ready.setdefault(index, []).append(storage)
        for index, call in enumerate(self._calls):
            if call.is_needed:
                _replay(call, memory)
            elif call.draws():
                _replay(call, {})
            for storage in ready.get(index, ()):
                for name in names.get(storage, ()):
                    yield name, _realised(wanted[name], memory)
                memory.pop(storage, None)
        for storage, waiting in names.items():  # no operation fills them, as those of empty()
            if storage not in last:
                for name in waiting:
                    yield name, _realised(wanted[name], memory)

    def _mark_needed(self, wanted: set[int]) -> dict[int, int]:
        """Mark the calls that wanted memory depends on; returns memory -> its last such call."""
        live = set(wanted)
        last: dict[int, int] = {}
        for index in reversed(range(len(self._calls))):
            call = self._calls[index]
            changed = {_storage(tensor) for tensor in (*call.written(), *call.made())}
            call.is_needed = bool(changed & live)
            if not call.is_needed:
                continue
            if call.overwrites():
                live -= changed
            read = {_storage(tensor) for tensor in _fakes((call.args, call.kwargs))}
            live |= read - (changed if call.overwrites() else set())
            for storage in changed | read:
                last.setdefault(storage, index)
        return last


def _realised(fake: torch.Tensor, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the real tensor in the place of a fake one."""
    storage = memory.get(_storage(fake))
    if storage is None:
        storage = torch.UntypedStorage(fake.untyped_storage().nbytes())
        memory[_storage(fake)] = storage
    real = torch.empty(0, dtype=fake.dtype)
    return real.set_(storage, fake.storage_offset(), fake.shape, fake.stride())


@torch.no_grad()
def _replay(call: _FakeCall, memory: dict[int, torch.UntypedStorage]) -> None:
    def real(leaf: Any) -> Any:
        return _realised(leaf, memory) if isinstance(leaf, FakeTensor) else leaf

    args, kwargs = _pytree.tree_map(real, (call.args, call.kwargs))
    outputs = call.function(*args, **kwargs)
    made = {_storage(tensor) for tensor in call.made()}
    reals = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    for fake, tensor in zip(_fakes(call.outputs), reals, strict=True):
        if _storage(fake) in made:
            _realised(fake, memory).copy_(tensor)


def record(build: Callable[[], nn.Module]) -> DeferredBuild | None:
    """Build a model of fake tensors; return None where its building needs values."""
    recorder, random_state = _CallRecorder(), torch.get_rng_state()
    try:
        with FakeTensorMode(), recorder:
            model = build()
    except Exception:  # whatever a model's own code raises of fake values; it is built at once
        return None
    if any(_fakes(_unfound_attributes(module)) for module in model.modules()):
        return None
    return DeferredBuild(model, recorder.calls, random_state)


def _unfound_attributes(module: nn.Module) -> list[Any]:
    """Return attributes of a module that `replace` does not look into."""
    known = ("_parameters", "_buffers", "_modules")
    return [v for k, v in vars(module).items() if k not in known and not isinstance(v, FakeTensor)]


def replace(
    model: nn.Module, new_of: Callable[[FakeTensor], torch.Tensor]
) -> dict[str, tuple[FakeTensor, torch.Tensor]]:
    """Replace a model's fake tensors in place, each once, so that ties stay.

    Args:
        model: of fake tensors.
        new_of: called with each of them.

    Returns:
        First name -> the fake tensor and its replacement: parameters, buffers and attributes.
    """
    found: dict[int, tuple[str, FakeTensor, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            slots: Any = holder
            for key, fake in [*slots.items()]:
                if isinstance(fake, FakeTensor):
                    name = f"{path}.{key}" if path else key
                    entry = found.get(id(fake)) or (name, fake, new_of(fake))
                    found[id(fake)] = entry
                    slots[key] = entry[2]
    return {name: (fake, new) for name, fake, new in found.values()}


def without_content(fake: FakeTensor) -> torch.Tensor:
    """Return a parameter on the device meta, or a tensor on the host that is yet to be filled."""
    if not isinstance(fake, nn.Parameter):
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    meta = torch.empty(fake.shape, dtype=fake.dtype, device="meta")
    parameter = nn.Parameter(meta, fake.requires_grad)
    tied_parameters.copy_attributes_and_hooks(fake, parameter)
    return parameter


def broadcast_values(
    deferred: DeferredBuild, fakes: dict[str, FakeTensor], rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor's name and value on all ranks, one after the other, as rank 0 draws it.

    Args:
        deferred: the build.
        fakes: fake tensors of the model by name.
        rank: this worker's.
    """
    drawn = deferred.values({**fakes}) if rank == 0 else iter(())
    while True:
        name, whole = next(drawn, (None, None))
        name = process_group.broadcast_value(name)
        if name is None:
            return
        if whole is None:
            whole = torch.empty(fakes[name].shape, dtype=fakes[name].dtype)
        yield name, process_group.broadcast_tensor(whole)
