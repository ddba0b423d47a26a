"""Recording one training step as a compiled graph with named inputs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accbench.engines.common import python_snapshot, python_state

Slot = tuple[str, int]
TracedStep = Callable[[], torch.Tensor]


class NotReplayable(Exception):
    """A replay of this step would be wrong; the message says why.

    `loss` is set if the step ran all the same, by tracing.
    """

    def __init__(self, why: str, loss: torch.Tensor | None = None) -> None:
        super().__init__(why)
        self.loss = loss


class PythonStateChanged(NotReplayable):
    """A step, which ran, has changed Python state of the model, which no graph contains."""


class StepStateReplaced(Exception):
    """The training state moved to other tensors; the recording has to start over."""


class StepState:
    """All tensors that a step may change, and where each is stored."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._optimizer = optimizer
        self._optimizer_state = optimizer.state
        owners: list[Any] = [d for m in self.modules for d in (m._parameters, m._buffers)]
        owners += optimizer.state.values()
        if scaler is not None:
            owners.append(vars(scaler))
        self._locations = list(_tensors_in(owners))
        # Tied weights store a tensor twice.
        self.tensors = list({id(tensor): tensor for _, _, tensor in self._locations}.values())

    def is_in_place(self) -> bool:
        """Return whether no tensor was replaced by another since this was made."""
        return self._optimizer.state is self._optimizer_state and all(
            owner.get(name) is tensor for owner, name, tensor in self._locations
        )

    @torch.no_grad()
    def forget_history(self) -> None:
        """Give every tensor a value without a history of writes.

        A tensor that was written to in place keeps a record of the write (functionalization);
        replacing its value then leaves the two inconsistent, and a later backward pass crashes.
        """
        for tensor in self.tensors:
            tensor.data = tensor.detach().clone()


def _tensors_in(owners: list[Any]) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    for owner in owners:
        for name, value in owner.items():
            if isinstance(value, torch.Tensor) and value.device.type == "xla":
                yield owner, name, value


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One recorded step.

    `slots` say what each input of the graph is: ("state", index), ("batch", index),
    ("lr", parameter group), ("seed", 0) or ("constant", index into `constants`).
    """

    graph: Any
    slots: tuple[Slot, ...]
    constants: tuple[torch.Tensor, ...]
    constant_values: tuple[float, ...]
    """The constants: a single number itself, anything larger by its buffer's handle."""
    updated: tuple[int, ...]
    """Indices of the state that the step changes, in the order of the graph's results."""
    lr_dtypes: dict[int, torch.dtype]

    def agrees_with(self, other: "RecordedStep") -> bool:
        """Return whether both recordings are the same step."""
        mine = (self.graph, self.slots, self.constant_values, self.updated)
        return mine == (other.graph, other.slots, other.constant_values, other.updated)


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """A step that was traced and not run."""

    loss: torch.Tensor
    updated: tuple[int, ...]
    roots: list[torch.Tensor]
    """The graph's results: the updated state, then the loss."""
    ids: list[int]
    inputs: list[torch.Tensor]
    handles: list[int]
    """torch_xla's id, a tensor and its buffer's handle for each input of the graph."""


class Recorder:
    """Records steps; `recording` is true while a step is traced, which then must not sync."""

    def __init__(self, device: torch.device) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        self._xla, self._xm, self._lib = torch_xla, xm, torch_xla._XLAC
        self._aliasing = alias_with_buffer_donor_config
        self._device = str(device)
        self.recording = False

    def sync_keeping_seed(self, wait: bool = False) -> None:
        """Compute all that is pending, without advancing the random seed."""
        seed = self._lib._xla_get_rng_seed()
        self._xla.sync(wait=wait)
        self._lib._xla_set_rng_seed(seed, self._device)

    def record(
        self,
        step: TracedStep,
        state: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batch: list[torch.Tensor],
        correct_state: Callable[[], bool],
        python: python_state.PythonStateWatch,
    ) -> RecordedStep:
        """Trace a step and compile it; the state is unchanged afterwards.

        Args:
            step: runs one training step.
            state: the tensors that a step may change.
            optimizer: whose learning rates become inputs of the graph.
            batch: the batch's tensors.
            correct_state: corrects the state after a first trace, which was undone; returns
                whether it changed anything.
            python: watches what the step depends on beside tensors.

        Raises:
            NotReplayable: the step cannot be replayed.
            StepStateReplaced: `correct_state` changed the state.
        """
        self.sync_keeping_seed(wait=True)
        self._xm.wait_device_ops()  # handles exist once the buffers do
        seed = self._lib._xla_get_rng_seed()
        slot_of_handle = _slot_of_handle(
            self._lib._get_tensors_handle([*state, *batch]), len(state)
        )
        self._check(step, state, optimizer, slot_of_handle, seed, python)
        if correct_state():
            raise StepStateReplaced
        rates = [group["lr"] for group in optimizer.param_groups]
        # Unlikely numbers, by which the rates are found among the graph's inputs.
        markers = [1.2345678e-3 * (1 + index / 1024) for index in range(len(rates))]
        try:
            _set_learning_rates(optimizer, markers)
            trace = self._trace(step, state)
        finally:
            _set_learning_rates(optimizer, rates)
        slots, constants = self._slots(trace, slot_of_handle, markers)
        self._undo(trace, state, slot_of_handle, seed, compile=True)
        slots_and_inputs = list(zip(slots, trace.inputs, strict=True))
        lr_dtypes = {
            index: tensor.dtype for (kind, index), tensor in slots_and_inputs if kind == "lr"
        }
        if len(lr_dtypes) != len(rates):
            raise NotReplayable("a learning rate is not among the inputs of the step's graph")
        values = tuple(self._constant_value(constant) for constant in constants)
        graph = self._graph
        return RecordedStep(graph, tuple(slots), tuple(constants), values, trace.updated, lr_dtypes)

    def _check(
        self,
        step: TracedStep,
        state: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        slot_of_handle: dict[int, Slot],
        seed: int,
        python: python_state.PythonStateWatch,
    ) -> None:
        """Trace the step as it is, and undo it if it can be replayed.

        Raises:
            NotReplayable: it cannot; the step has run.
        """
        fallbacks = num_fallbacks()
        state_before = python.state_id()
        snapshot = python_snapshot.PythonSnapshot(python.model, python.generators())
        trace = self._trace(step, state)
        num_others = sum(self._lib._check_device_tensor_need_materialization(self._device))
        num_others -= len(trace.roots)
        read = {slot_of_handle[handle] for handle in trace.handles if handle in slot_of_handle}
        problem = None
        if num_fallbacks() != fallbacks:
            problem = "an operation of the step left the compiler for the host"
        elif any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            problem = "the step leaves gradients for the next one"
        elif num_others:
            problem = f"the step changes {num_others} tensors outside of model and optimizer"
        elif any(("state", index) not in read for index in trace.updated):
            problem = "part of the state is overwritten without being read"
        elif snapshot.draws_random_numbers():
            problem = "the step draws random numbers of Python's or numpy's"
        if problem is not None:
            self._xla.sync()
            raise NotReplayable(problem, trace.loss)
        if python.state_id() != state_before:
            self._xla.sync()
            raise PythonStateChanged(
                f"the step changes {', '.join(python.changed[:3])}", trace.loss
            )
        self._undo(trace, state, slot_of_handle, seed, compile=False)

    def _trace(self, step: TracedStep, state: list[torch.Tensor]) -> StepTrace:
        self.recording = True
        try:
            loss = step()
        finally:
            self.recording = False
        pending = self._lib._check_tensor_need_materialization(state)
        updated = tuple(index for index, is_pending in enumerate(pending) if is_pending)
        roots = [*(state[index] for index in updated), loss]
        ids, inputs = self._lib._get_tensors_xla_device_data_node(roots)
        handles = self._lib._get_tensors_handle(inputs)
        return StepTrace(loss, updated, roots, ids, inputs, handles)

    def _undo(
        self,
        trace: StepTrace,
        state: list[torch.Tensor],
        slot_of_handle: dict[int, Slot],
        seed: int,
        compile: bool,
    ) -> None:
        """Undo a trace; first compile it, if asked, so that it reuses the old state's buffers."""
        lib = self._lib
        by_slot = {
            slot_of_handle[handle]: tensor
            for handle, tensor in zip(trace.handles, trace.inputs, strict=True)
            if handle in slot_of_handle
        }
        if compile:
            for index in trace.updated:
                lib._set_buffer_donation(by_slot["state", index], True)
            self.compile_graph(trace.roots)
        for index in trace.updated:
            lib._replace_xla_tensor(state[index], by_slot["state", index])
        lib._clear_pending_irs(self._device)
        lib._xla_set_rng_seed(seed, self._device)

    def compile_graph(self, roots: list[torch.Tensor]) -> None:
        """Compile what computes these tensors, and keep it as the step's graph."""
        with self._aliasing(True):
            self._graph = self._lib._get_graph_hash(roots)
            self._lib._xla_warm_up_cache(roots, [])

    def _slots(
        self, trace: StepTrace, slot_of_handle: dict[int, Slot], markers: list[float]
    ) -> tuple[list[Slot], list[torch.Tensor]]:
        """Return what each input of the graph is, and the inputs that are constant."""
        seed_id = self._lib._get_seed_info_id()
        marked = {torch.tensor(marker).item(): index for index, marker in enumerate(markers)}
        slots: list[Slot] = []
        constants: list[torch.Tensor] = []
        for input_id, handle, tensor in zip(trace.ids, trace.handles, trace.inputs, strict=True):
            if input_id == seed_id:
                slots.append(("seed", 0))
                continue
            if handle in slot_of_handle:
                slots.append(slot_of_handle[handle])
                continue
            value = _single_number(tensor)
            rate = None if value is None else marked.get(torch.tensor(value).item())  # as float32
            if rate is not None:
                slots.append(("lr", rate))
            else:
                slots.append(("constant", len(constants)))
                constants.append(tensor)
        return slots, constants

    def _constant_value(self, constant: torch.Tensor) -> float:
        number = _single_number(constant)
        handle: int = self._lib._get_tensors_handle([constant])[0]
        return handle if number is None else number


def _slot_of_handle(handles: list[int], num_state: int) -> dict[int, Slot]:
    """Return the slot of each buffer handle.

    Raises:
        NotReplayable: two tensors share a buffer, which a replay would reuse twice.
    """
    if len(set(handles)) != len(handles):
        raise NotReplayable("two tensors of the training state or batch share their memory")
    return {
        handle: ("state", index) if index < num_state else ("batch", index - num_state)
        for index, handle in enumerate(handles)
    }


def _set_learning_rates(optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    for group, value in zip(optimizer.param_groups, values, strict=True):
        group["lr"] = value


def num_fallbacks() -> int:
    """Return how many operations have left the compiler for the host so far."""
    import torch_xla.debug.metrics as metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return sum(metrics.counter_value(name) or 0 for name in names)


def _single_number(tensor: torch.Tensor) -> float | None:
    return float(tensor.cpu().item()) if tensor.numel() == 1 else None
