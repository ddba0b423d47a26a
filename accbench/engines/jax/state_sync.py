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
        net: its parameters and buffers stay the tensors that they are.
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
        self._parameters, self._net_buffers = list(net.parameters()), list(net.buffers())
        self._optimizer, self._scaler, self._mesh, self._keys = optimizer, scaler, mesh, keys
        self.state: dict[str, Any] = {}
        """Replicated or sharded over the ranks; `step.build_step` describes it."""
        self.local_state: dict[str, Any] = {_BUFFERS: [None for _ in self._net_buffers]}
        """Different on each rank."""
        self._marks: dict[str, list[_Mark | None]] = {}
        self._arrays_are_newer = False
        self._gathered: dict[str, tuple[Any, list[jax.Array]]] = {}

    def reset_buffers(self, net: nn.Module) -> None:
        """Take the buffers from the net again, after other tensors have replaced some."""
        self._net_buffers = list(net.buffers())
        self.local_state[_BUFFERS] = [None for _ in self._net_buffers]
        self._marks.pop(_BUFFERS, None)

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return torch's tensors by the names of the arrays."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        tensors: dict[str, list[Any]] = {
            "parameters": self._parameters, _BUFFERS: self._net_buffers,
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
            old_marks = self._marks.get(key)
            marks: list[_Mark | None] = [_mark(tensor) for tensor in tensors]
            if marks == old_marks:
                continue
            if key in (_COUNTS, _SCALE, _TRACKER):
                self.state[key] = self._replicated(key, tensors)
            else:
                self._copy_changed(key, tensors, marks, old_marks or [None for _ in tensors])
            self._marks[key] = marks

    def _replicated(self, key: str, tensors: list[torch.Tensor]) -> Any:
        tensor = torch.stack(tensors).float() if key == _COUNTS else tensors[0]
        return self._mesh.global_arrays(arrays.copy_from_torch(tensor, self._mesh.device))

    def _copy_changed(
        self, key: str, tensors: list[torch.Tensor], marks: list[Any], old_marks: list[Any]
    ) -> None:
        holder = self.local_state if key == _BUFFERS else self.state
        held = holder.setdefault(key, [None for _ in tensors])
        for index, tensor in enumerate(tensors):
            if marks[index] == old_marks[index]:
                continue
            if key == _BUFFERS:
                array = arrays.copy_from_torch(tensor, self._mesh.device)
                held[index] = self._mesh.per_rank_arrays(array)
                continue
            axis = self._mesh.shard_axis(tensor.shape)
            shard = self._mesh.local_shard(tensor, axis)
            array = arrays.copy_from_torch(shard, self._mesh.device)
            held[index] = self._mesh.global_arrays(array, axis, self._tp_axes[index])

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
            self._marks[key] = [_mark(tensor) for tensor in tensors]
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
        """Gather the arrays of `state[key]` on the device; all ranks call it."""
        held = self.state[key]
        if self._gathered.get(key, (None,))[0] is not held:
            device, pairs = self._mesh.device, zip(held, self._tensors()[key], strict=True)
            self._gathered[key] = held, [
                self._mesh.local_data(array) if self._mesh.shard_axis(tensor.shape) is None
                else arrays.copy_from_torch(self._gather_to_host(array, tensor.shape), device)
                for array, tensor in pairs
            ]  # fmt: skip
        return self._gathered[key][1]

    def loss_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        self.sync_from_torch()
        return float(arrays.to_torch(self._mesh.local_data(self.state[_SCALE])))

    def wait(self) -> None:
        """Wait until the arrays are computed."""
        jax.block_until_ready((self.state, self.local_state))


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
