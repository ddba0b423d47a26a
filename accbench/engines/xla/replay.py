"""Steps without tracing: a step's compiled graph, recorded once, run on new inputs.

torch_xla traces every step again in Python, which on a fast device takes longer than the step
itself. A step that was recorded runs as one call: the graph's inputs are the training state
(parameters, buffers, optimizer and scaler state), the batch, the random seed and the learning
rates; its results are the new state, whose old buffers it reuses, and the loss.

A recording is valid for one signature (shapes, modes, hyperparameters, the model's own numbers and
functions) and for as long as nobody else writes to the state. Two recordings must agree before one
is used. Whatever does not fit is traced, which is always right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.engines import Batch
from accbench.engines.common import python_state
from accbench.engines.xla.recording import (
    NotReplayable,
    PythonStateChanged,
    RecordedStep,
    Recorder,
    StepState,
    StepStateReplaced,
    TracedStep,
)

# Lazy tensors advance their seed by this rule at every sync (torch/csrc/lazy/core,
# LazyGraphExecutor); a replayed step must, too, or dropout would repeat itself.
_SEED_FACTOR, _SEED_OFFSET, _SEED_MODULUS = 7012063, 1012031, 2**64
# Replay is given up once this many recordings disagreed with the one before.
_MAX_DISAGREEMENTS = 3
# Steps between two recordings of a step in use, which must agree: nothing else notices Python code
# in a model that decides by something other than tensors.
_RECHECK_EVERY = 100
# Replay is given up once this many steps changed Python state of the model; first steps may set
# what is still None.
_MAX_PYTHON_CHANGES = 3
# Learning rates that torch_xla writes into the graph instead of passing them in.
_WRITTEN_INTO_GRAPH = (0.0, 1.0)


class StepReplay:
    """Replays steps where that is known to be right, and traces other steps."""

    def __init__(self, device: torch.device, scaler: Any, say: Callable[[str], None]) -> None:
        import torch_xla

        self._lib = torch_xla._XLAC
        self._device, self._scaler, self._say = device, scaler, say
        self.recorder = Recorder(device)
        self.num_replayed = 0
        self.given_up: str | None = None
        self.correct_state: Callable[[], bool] = lambda: False
        """Called after a step was traced once and undone; returns whether it changed the state."""
        self._recordings: dict[
            Any, tuple[RecordedStep, bool]
        ] = {}  # signature -> (recording, is confirmed)
        self._disagreements = self._num_steps = self._num_python_changes = 0
        self._python: python_state.PythonStateWatch | None = None
        self._state: StepState | None = None
        self._expected_fingerprint: list[int] = []
        self._learning_rates: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        # Buffers of the last two replays: to free them earlier the host would wait.
        self._recent_buffers: list[list[torch.Tensor]] = []

    @property
    def recording(self) -> bool:
        """True while a step is traced to be recorded: it must not sync then."""
        return self.recorder.recording

    def run(
        self, step: TracedStep, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a step, replayed where that is known to be right, and return the loss on the device.

        Args:
            step: runs the step by tracing.
            model: on the device.
            optimizer: of the model's parameters.
            batch: nest of tensors on the device.
            loss: the loss function, whose globals and closures the step depends on, too.
        """
        if self._python is None or self._python.model is not model:
            self._python = python_state.PythonStateWatch(model, [] if loss is None else [loss])
        rates = [group["lr"] for group in optimizer.param_groups]
        tensors = nested.tensors_of(batch)
        if self.given_up is not None or any(rate in _WRITTEN_INTO_GRAPH for rate in rates):
            return step()
        self._num_steps += 1
        try:
            recorded, state = self._recorded_step(step, model, optimizer, batch)
            return self._execute(recorded, state.tensors, optimizer, tensors)
        except PythonStateChanged as why:
            self._num_python_changes += 1
            if self._num_python_changes == _MAX_PYTHON_CHANGES:
                self.give_up(str(why))
            return step() if why.loss is None else why.loss
        except NotReplayable as why:
            self.give_up(str(why))
            return step() if why.loss is None else why.loss

    def _recorded_step(
        self, step: TracedStep, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> tuple[RecordedStep, StepState]:
        """Return a recording of this step, confirmed or new, and the state that it is for."""
        while True:
            state = self._unchanged_state(model, optimizer)
            assert self._python is not None
            key = _signature(state, optimizer, nested.signature(batch)), self._python.state_id()
            recorded, is_confirmed = self._recordings.get(key, (None, False))
            if recorded is not None and is_confirmed and self._num_steps % _RECHECK_EVERY:
                self.num_replayed += 1
                return recorded, state
            try:
                return self._record(key, recorded, step, optimizer, nested.tensors_of(batch)), state
            except StepStateReplaced:
                continue

    def give_up(self, why: str) -> None:
        """Trace every step from here on."""
        self.given_up = why
        self._recordings.clear()
        self._recent_buffers.clear()
        self._say(f"every step is traced, none replayed: {why}")

    def _unchanged_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StepState:
        """Return the training state; drops all recordings if anyone else wrote to it."""
        state = self._state
        if state is not None and state.is_in_place():
            pending = any(self._lib._check_tensor_need_materialization(state.tensors))
            if not pending and self._fingerprint(state) == self._expected_fingerprint:
                # Pending operations of others may read buffers that the step reuses.
                if any(self._lib._check_device_tensor_need_materialization(str(self._device))):
                    self.recorder.sync_keeping_seed()
                return state
        self._recordings.clear()
        self._recent_buffers.clear()
        self.recorder.sync_keeping_seed()
        self._state = StepState(model, optimizer, self._scaler)
        self._state.forget_history()
        self.recorder.sync_keeping_seed()
        return self._state

    def _fingerprint(self, state: StepState) -> list[int]:
        """Return ids that change on a write to the state; reads no buffer, which may be pending."""
        number_of = self._lib._xla_get_tensor_id
        return [n for tensor in state.tensors for n in (number_of(tensor), tensor._version)]

    def _record(
        self,
        key: Any,
        previous: RecordedStep | None,
        step: TracedStep,
        optimizer: torch.optim.Optimizer,
        batch: list[torch.Tensor],
    ) -> RecordedStep:
        """Record the step; a second recording that agrees with the first confirms it."""
        assert self._state is not None
        assert self._python is not None
        recorded = self.recorder.record(
            step, self._state.tensors, optimizer, batch, self.correct_state, self._python
        )
        is_confirmed = previous is not None and recorded.agrees_with(previous)
        self._recordings[key] = (recorded, is_confirmed)
        if previous is not None and not is_confirmed:
            self._disagreements += 1
            if self._disagreements == _MAX_DISAGREEMENTS:
                raise NotReplayable("step after step was another graph")
        return recorded

    def _execute(
        self,
        recorded: RecordedStep,
        state: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batch: list[torch.Tensor],
    ) -> torch.Tensor:
        """Run a recording's graph, and put its results into the state's tensors."""
        lib, device = self._lib, str(self._device)
        rates = {
            group: self._learning_rate(optimizer.param_groups[group]["lr"], dtype)
            for group, dtype in recorded.lr_dtypes.items()
        }
        sources: dict[str, Any] = {
            "state": state,
            "batch": batch,
            "constant": recorded.constants,
            "lr": rates,
            "seed": [lib._get_base_seed_as_tensor(device)],
        }
        results = lib._run_cached_graph(
            recorded.graph, [sources[k][index] for k, index in recorded.slots]
        )
        seed = _SEED_OFFSET + _SEED_FACTOR * lib._xla_get_rng_seed()
        lib._xla_set_rng_seed(seed % _SEED_MODULUS, device)
        *updated, loss = results
        self._recent_buffers = [*self._recent_buffers[-1:], updated]
        for index, result in zip(recorded.updated, updated, strict=True):
            lib._replace_xla_tensor(state[index], result)
        assert self._state is not None
        self._expected_fingerprint = self._fingerprint(self._state)
        return loss

    def _learning_rate(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        key = (value, dtype)
        if key not in self._learning_rates:
            if len(self._learning_rates) > 64:  # a schedule rarely repeats a value
                self._learning_rates.clear()
            self._learning_rates[key] = torch.tensor(value, dtype=dtype).to(self._device)
        return self._learning_rates[key]


def _signature(state: StepState, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    """Return what a recording is valid for: shapes, modes, hyperparameters but the learning rate.

    Raises:
        NotReplayable: a hyperparameter is a tensor, whose changes would go unnoticed.
    """
    groups = []
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        tensors = [name for name, value in settings.items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise NotReplayable(f"the optimizer's {tensors[0]} is a tensor")
        del settings["lr"]
        groups.append((repr(settings), len(group["params"])))
    return (
        batch,
        tuple(module.training for module in state.modules),
        tuple(parameter.requires_grad for parameter in state.parameters),
        tuple(groups),
    )
