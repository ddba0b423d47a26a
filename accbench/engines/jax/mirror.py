"""The state of training in two places: torch's tensors on the host, JAX's arrays on the device.

Steps change the arrays. Torch's tensors are brought up to date when somebody is about to read
them; and what somebody has written to them is found by its version, and taken over before the
next step, tensor by tensor.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from accbench.distributed import process_group
from accbench.engines import optimizers
from accbench.engines.common import optimizer_state
from accbench.engines.jax import arrays
from accbench.engines.jax.workers import Workers

_BUFFERS, _SCALE, _TRACKER, _COUNTS = "buffers", "scale", "tracker", "counts"
_Mark = tuple[int, int, int]


class Mirror:
    """One model's and its optimizer's state.

    Args:
        net: its parameters and buffers stay the tensors that they are.
        optimizer: with a state for every parameter; its tensors may be replaced by others.
        scaler: None, or one whose state is made.
    """

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, keys: list[str],
        workers: Workers,
    ) -> None:  # fmt: skip
        self._parameters, self._net_buffers = list(net.parameters()), list(net.buffers())
        self._optimizer, self._scaler, self._workers, self._keys = optimizer, scaler, workers, keys
        self.state: dict[str, Any] = {}
        """What all workers share, as `step.build` has it."""
        self.own: dict[str, Any] = {_BUFFERS: [None for _ in self._net_buffers]}
        """The worker's own."""
        self._marks: dict[str, list[_Mark | None]] = {}
        self._is_ahead = False
        self._gathered: dict[str, tuple[Any, list[jax.Array]]] = {}

    def renew_buffers(self, net: nn.Module) -> None:
        """After others have taken the place of some."""
        self._net_buffers = list(net.buffers())
        self.own[_BUFFERS] = [None for _ in self._net_buffers]
        self._marks.pop(_BUFFERS, None)

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        """Torch's, by the names of the arrays."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        found: dict[str, list[Any]] = {
            "parameters": self._parameters, _BUFFERS: self._net_buffers,
        }  # fmt: skip
        found |= {key: [state[key] for state in states] for key in self._keys}
        found[_COUNTS] = [state["step"] for state in states]
        if self._scaler is not None:
            found[_SCALE] = [self._scaler._scale]
            found[_TRACKER] = [self._scaler._growth_tracker]
        return found

    def take_over(self) -> None:
        """Have the arrays hold what was written to torch's tensors since the last time."""
        for key, tensors in self._tensors().items():
            marks = self._marks.get(key)
            found: list[_Mark | None] = [_mark(tensor) for tensor in tensors]
            if found == marks:
                continue
            if key in (_COUNTS, _SCALE, _TRACKER):
                self.state[key] = self._single(key, tensors)
            else:
                self._take_over_list(key, tensors, found, marks or [None for _ in tensors])
            self._marks[key] = found

    def _single(self, key: str, tensors: list[torch.Tensor]) -> Any:
        whole = torch.stack(tensors).float() if key == _COUNTS else tensors[0]
        return self._workers.shared(arrays.owned(whole, self._workers.device))

    def _take_over_list(
        self, key: str, tensors: list[torch.Tensor], found: list[Any], marks: list[Any]
    ) -> None:
        holder = self.own if key == _BUFFERS else self.state
        held = holder.setdefault(key, [None for _ in tensors])
        for place, tensor in enumerate(tensors):
            if found[place] == marks[place]:
                continue
            if key == _BUFFERS:
                held[place] = self._workers.own(arrays.owned(tensor, self._workers.device))
                continue
            axis = self._workers.axis_of(tensor.shape)
            part = arrays.owned(self._workers.part(tensor, axis), self._workers.device)
            held[place] = self._workers.shared(part, axis)

    def moved(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """A step has made these of the arrays, which are gone."""
        self.state, self.own, self._is_ahead = state, own, True
        self._gathered.clear()

    @torch.no_grad()
    def bring_back(self) -> None:
        """Have torch's tensors hold what the arrays do; waits for the device.

        All workers call it, where arrays are parted between them.
        """
        if not self._is_ahead:
            return
        self.take_over()  # or what was written to torch's would be lost
        for key, tensors in self._tensors().items():
            for tensor, value in zip(tensors, self._values(key), strict=True):
                if not _holds(tensor, value):
                    tensor.copy_(value)
            self._marks[key] = [_mark(tensor) for tensor in tensors]
        self._is_ahead = False

    def _values(self, key: str) -> list[torch.Tensor]:
        if key == _COUNTS:
            return list(arrays.tensor_of(self._workers.here(self.state[key])))
        if key in (_SCALE, _TRACKER):
            return [arrays.tensor_of(self._workers.here(self.state[key]))]
        if key == _BUFFERS:
            return [arrays.tensor_of(self._workers.here(a, is_own=True)) for a in self.own[key]]
        return [self._whole(array) for array in self.state[key]]

    def _whole(self, array: jax.Array) -> torch.Tensor:
        """Of an array that may be parted between the workers, who all call this."""
        part = arrays.tensor_of(self._workers.here(array))
        axis = self._workers.axis_of(array.shape)
        return part if axis is None else torch.cat(process_group.all_gather_tensor(part), axis)

    def whole(self, key: str) -> list[jax.Array]:
        """All of the arrays of `state[key]`, on the device; all workers call it."""
        held = self.state[key]
        if self._gathered.get(key, (None,))[0] is not held:
            device = self._workers.device
            self._gathered[key] = held, [
                self._workers.here(array) if self._workers.axis_of(array.shape) is None
                else arrays.owned(self._whole(array), device)
                for array in held
            ]  # fmt: skip
        return self._gathered[key][1]

    def scale(self) -> float:
        """The loss scale; waits for the device."""
        self.take_over()
        return float(arrays.tensor_of(self._workers.here(self.state[_SCALE])))

    def wait(self) -> None:
        """Until the arrays are computed."""
        jax.block_until_ready((self.state, self.own))


def _mark(tensor: torch.Tensor) -> _Mark:
    """Changes when anyone writes to the tensor."""
    return id(tensor), tensor._version, tensor.data_ptr()


def _holds(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a tensor that JAX has in fewer bits is as it was, with all of its bits."""
    return tensor.dtype != value.dtype and torch.equal(tensor.to(value.dtype), value)


def keys_of(task: Any) -> list[str]:
    """What the task's optimizer keeps of each parameter, in its shape."""
    average = [optimizer_state.AVERAGE] if task.ema_decay else []
    return [*optimizers.of_task(task).state_keys, *average]


def rates_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return each group's `lr` as a step takes it, (groups,) float32."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"lr": jnp.asarray(rates, jnp.float32)}
