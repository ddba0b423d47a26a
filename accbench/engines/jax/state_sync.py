"""Training state held twice: torch's tensors on the host, JAX's arrays on the device.

Steps change the arrays. Torch's tensors are brought up to date when somebody is about to read
them. What somebody has written to a tensor is seen by the tensor's version, and is copied to its
array before the next step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accbench.distributed import process_group
from accbench.engines import optimizers
from accbench.engines.common import optimizer_state
from accbench.engines.jax import arrays
from accbench.engines.jax.data_mesh import Axis, DataMesh

_BUFFERS, _SCALE, _TRACKER, _COUNTS = "buffers", "scale", "tracker", "counts"
_Mark = tuple[int, int, int]


class StateSync:
    """The state of one model and its optimizer, kept equal in torch and JAX.

    Args:
        net: its parameters stay the tensors that they are; other tensors may replace its buffers.
        optimizer: with a state for every parameter; its tensors may be replaced by others.
        scaler: None, or one whose state is made.
        keys: names of the optimizer's state of each parameter, see `state_keys`.
        mesh: places the arrays.
        tp_axes: of each parameter, the axis along which ranks have parts (`--tp`), or None.
    """

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, keys: list[str],
        mesh: DataMesh, tp_axes: list[Axis],
    ) -> None:  # fmt: skip
        self._tp_axes = tp_axes
        self._net, self._parameters = net, list(net.parameters())
        self._optimizer, self._scaler, self._mesh, self._keys = optimizer, scaler, mesh, keys
        self.state: dict[str, Any] = {}
        """Replicated or sharded over the ranks; `step.build_step` describes it."""
        self.local_state: dict[str, Any] = {_BUFFERS: []}
        """Different on each rank."""
        self._marks: dict[str, list[_Mark]] = {}
        # The tensors of `_marks`, kept alive: a mark has a tensor's id.
        self._marked: dict[str, list[torch.Tensor]] = {}
        self._arrays_are_newer = False
        self._gathered: dict[str, list[jax.Array]] = {}

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return torch's tensors by the names of the arrays."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        tensors: dict[str, list[Any]] = {
            "parameters": self._parameters, _BUFFERS: _buffers(self._net),
        }  # fmt: skip
        tensors |= {key: [state[key] for state in states] for key in self._keys}
        tensors[_COUNTS] = [state["step"] for state in states]
        if self._scaler is not None:
            tensors[_SCALE] = [self._scaler._scale]
            tensors[_TRACKER] = [self._scaler._growth_tracker]
        return tensors

    def sync_from_torch(self) -> None:
        """Copy to the arrays what was written to torch's tensors since the last call."""
        for key, tensors in self._tensors().items():
            marks = [_mark(tensor) for tensor in tensors]
            if marks == self._marks.get(key):
                continue
            if key in (_COUNTS, _SCALE, _TRACKER):
                self.state[key] = self._replicated(key, tensors)
            else:
                self._copy_changed(key, tensors, marks)
            self._marks[key], self._marked[key] = marks, tensors

    def _replicated(self, key: str, tensors: list[torch.Tensor]) -> Any:
        tensor = torch.stack(tensors).float() if key == _COUNTS else tensors[0]
        return self._mesh.global_arrays(arrays.copy_from_torch(tensor, self._mesh.device))

    def _copy_changed(self, key: str, tensors: list[torch.Tensor], marks: list[_Mark]) -> None:
        holder = self.local_state if key == _BUFFERS else self.state
        # By mark, not by index: buffers may be added, removed and replaced.
        array_of = dict(zip(self._marks.get(key, ()), holder.get(key, ()), strict=True))
        holder[key] = [
            array_of[mark] if mark in array_of else self._copied(key, index, tensor)
            for index, (mark, tensor) in enumerate(zip(marks, tensors, strict=True))
        ]
        self._gathered.pop(key, None)

    def _copied(self, key: str, index: int, tensor: torch.Tensor) -> Any:
        """Copy one of the model's tensors, or its shard, to a new array."""
        if key == _BUFFERS:
            return self._mesh.per_rank_arrays(arrays.copy_from_torch(tensor, self._mesh.device))
        axis = self._mesh.shard_axis(tensor.shape)
        shard = self._mesh.local_shard(tensor, axis)
        array = arrays.copy_from_torch(shard, self._mesh.device)
        return self._mesh.global_arrays(array, axis, self._tp_axes[index])

    def set_arrays(self, state: dict[str, Any], local_state: dict[str, Any]) -> None:
        """Replace the arrays, which a step has consumed, by the step's results."""
        self.state, self.local_state, self._arrays_are_newer = state, local_state, True
        self._gathered.clear()

    @torch.no_grad()
    def sync_to_torch(self) -> None:
        """Copy the arrays to torch's tensors; waits for the device.

        All ranks call it, where arrays are sharded.
        """
        if not self._arrays_are_newer:
            return
        self.sync_from_torch()  # or what was written to torch's would be lost
        for key, tensors in self._tensors().items():
            for tensor, value in zip(tensors, self._host_values(key), strict=True):
                if not _equals_rounded(tensor, value):
                    tensor.copy_(value)
            self._marks[key], self._marked[key] = [_mark(tensor) for tensor in tensors], tensors
        self._arrays_are_newer = False

    def _host_values(self, key: str) -> list[torch.Tensor]:
        if key == _COUNTS:
            return list(arrays.to_torch(self._mesh.local_data(self.state[key])))
        if key in (_SCALE, _TRACKER):
            return [arrays.to_torch(self._mesh.local_data(self.state[key]))]
        if key == _BUFFERS:
            buffers = self.local_state[key]
            return [arrays.to_torch(self._mesh.local_data(b, is_per_rank=True)) for b in buffers]
        pairs = zip(self.state[key], self._tensors()[key], strict=True)
        return [self._gather_to_host(array, tensor.shape) for array, tensor in pairs]

    def _gather_to_host(self, array: jax.Array, shape: tuple[int, ...]) -> torch.Tensor:
        """Gather an array that may be sharded to this rank's tensor; all ranks call it."""
        shard = arrays.to_torch(self._mesh.local_data(array))
        axis = self._mesh.shard_axis(shape)
        if axis is None:
            return shard
        return self._mesh.join_shards(process_group.all_gather_tensor(shard), axis)

    def gather(self, key: str) -> list[jax.Array]:
        """Return the arrays of `state[key]`, whole, on this rank's device.

        All ranks call it together, unless `sync_to_torch` was called after the last step: then
        torch's tensors are whole on every rank, and nothing is communicated.
        """
        if key not in self._gathered:
            pairs = zip(self.state[key], self._tensors()[key], strict=True)
            self._gathered[key] = [self._whole(array, tensor) for array, tensor in pairs]
        return self._gathered[key]

    def _whole(self, array: jax.Array, tensor: torch.Tensor) -> jax.Array:
        if self._mesh.shard_axis(tensor.shape) is None:
            whole: jax.Array = self._mesh.local_data(array)
            return whole
        if self._arrays_are_newer:
            tensor = self._gather_to_host(array, tensor.shape)
        return arrays.copy_from_torch(tensor, self._mesh.device)

    def loss_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        self.sync_from_torch()
        return float(arrays.to_torch(self._mesh.local_data(self.state[_SCALE])))

    def wait(self) -> None:
        """Wait until the arrays are computed."""
        jax.block_until_ready((self.state, self.local_state))


def _buffers(net: nn.Module) -> list[torch.Tensor]:
    """Return the list of `net.buffers()` in a third of its time, as every step asks for it."""
    held = (buffer for module in net.modules() for buffer in module._buffers.values())
    return [*{id(buffer): buffer for buffer in held if buffer is not None}.values()]


def _mark(tensor: torch.Tensor) -> _Mark:
    """Return what changes when anyone writes to the tensor."""
    has_memory = not isinstance(tensor, FakeTensor)
    return id(tensor), tensor._version, tensor.data_ptr() if has_memory else 0


def _equals_rounded(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `value`, in JAX's narrower dtype, is the tensor rounded.

    The tensor then keeps all of its bits.
    """
    return tensor.dtype != value.dtype and torch.equal(tensor.to(value.dtype), value)


def state_keys(task: Any) -> list[str]:
    """Return the names of what the task's optimizer keeps of each parameter, in its shape."""
    average = [optimizer_state.AVERAGE] if task.ema_decay else []
    return [*optimizers.of_task(task).state_keys, *average]


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return each group's `lr` as a step takes it, (groups,) float32."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"lr": jnp.asarray(rates, jnp.float32)}
