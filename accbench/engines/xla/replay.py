"""Steps without tracing: a step's compiled graph, recorded once, run on new inputs.

torch_xla traces every step anew in Python, which on a fast device takes longer
than the step itself. A step that was recorded runs as one call: the graph's
inputs are the training state (parameters, buffers, optimizer and scaler state),
the batch, the random seed and the learning rates; its results are the new state,
whose old buffers it reuses, and the loss.

A plan holds for one signature (shapes, modes, hyperparameters, the model's own numbers and
functions) and for as long as nobody else writes to the state. Two recordings must agree before a
plan is used. Whatever does not fit is traced, which is always right.
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
    Plan,
    PythonMoved,
    Recorder,
    StateChanged,
    TracedStep,
    TrainingState,
)

# Lazy tensors advance their seed by this rule at every sync (torch/csrc/lazy/core,
# LazyGraphExecutor); a replayed step must, too, or dropout would repeat itself.
_SEED_FACTOR, _SEED_OFFSET, _SEED_MODULUS = 7012063, 1012031, 2**64
# Recordings that may disagree with the one before until replay is given up.
_MAX_DISAGREEMENTS = 3
# Steps between two recordings of a plan in use, which must agree: Python code in a model that
# decides by something other than tensors would be seen by nobody else.
_RECHECK_EVERY = 100
# Steps that may change numbers of the model's, as first ones do that set what is still None.
_MOST_MOVING = 3
# Learning rates that torch_xla writes into the graph instead of passing them in.
_WRITTEN_INTO_GRAPH = (0.0, 1.0)


class StepReplay:
    """Replays steps where that is known to be right, and traces them elsewhere."""

    def __init__(self, device: torch.device, scaler: Any, say: Callable[[str], None]) -> None:
        import torch_xla

        self._lib = torch_xla._XLAC
        self._device, self._scaler, self._say = device, scaler, say
        self.recorder = Recorder(device)
        self.num_replayed = 0
        self.given_up: str | None = None
        self.settle: Callable[[], bool] = lambda: False
        """Called after a step was traced once and taken back; whether it changed the state."""
        self._plans: dict[Any, tuple[Plan, bool]] = {}  # signature -> plan, confirmed
        self._disagreements = self._num_steps = self._num_moving = 0
        self._python: python_state.Watch | None = None
        self._state: TrainingState | None = None
        self._left_as: list[int] = []
        self._learning_rates: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        # Buffers of the last two replays: the host would wait for them to be freed.
        self._kept: list[list[torch.Tensor]] = []

    @property
    def recording(self) -> bool:
        """True while a step is traced to be kept: it then must not sync."""
        return self.recorder.recording

    def run(
        self, step: TracedStep, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """A step, replayed where that is known to be right; the loss, on the device.

        Args:
            loss: whose globals and closures the step depends on, too.
        """
        if self._python is None or self._python.model is not model:
            self._python = python_state.Watch(model, [] if loss is None else [loss])
        rates = [group["lr"] for group in optimizer.param_groups]
        tensors = nested.tensors_of(batch)
        if self.given_up is not None or any(rate in _WRITTEN_INTO_GRAPH for rate in rates):
            return step()
        self._num_steps += 1
        try:
            plan, state = self._plan(step, model, optimizer, batch)
            return self._execute(plan, state.tensors, optimizer, tensors)
        except PythonMoved as why:
            self._num_moving += 1
            if self._num_moving == _MOST_MOVING:
                self.give_up(str(why))
            return step() if why.loss is None else why.loss
        except NotReplayable as why:
            self.give_up(str(why))
            return step() if why.loss is None else why.loss

    def _plan(
        self, step: TracedStep, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> tuple[Plan, TrainingState]:
        """A plan of this step, confirmed or new, and the state that it is for."""
        while True:
            state = self._unchanged_state(model, optimizer)
            assert self._python is not None
            key = _signature(state, optimizer, nested.signature(batch)), self._python.number()
            plan, confirmed = self._plans.get(key, (None, False))
            if plan is not None and confirmed and self._num_steps % _RECHECK_EVERY:
                self.num_replayed += 1
                return plan, state
            try:
                return self._record(key, plan, step, optimizer, nested.tensors_of(batch)), state
            except StateChanged:
                continue

    def give_up(self, why: str) -> None:
        """Trace every step from here on."""
        self.given_up = why
        self._plans.clear()
        self._kept.clear()
        self._say(f"every step is traced, none replayed: {why}")

    def _unchanged_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
        """The training state; all plans are dropped if anyone else wrote to it."""
        state = self._state
        if state is not None and state.is_in_place():
            pending = any(self._lib._check_tensor_need_materialization(state.tensors))
            if not pending and self._fingerprint(state) == self._left_as:
                # What others traced and left may read buffers that the step reuses.
                if any(self._lib._check_device_tensor_need_materialization(str(self._device))):
                    self.recorder.sync_keeping_seed()
                return state
        self._plans.clear()
        self._kept.clear()
        self.recorder.sync_keeping_seed()
        self._state = TrainingState(model, optimizer, self._scaler)
        self._state.forget_history()
        self.recorder.sync_keeping_seed()
        return self._state

    def _fingerprint(self, state: TrainingState) -> list[int]:
        """Changes when anyone writes to the state; asks no buffer, which may not be there yet."""
        number_of = self._lib._xla_get_tensor_id
        return [n for tensor in state.tensors for n in (number_of(tensor), tensor._version)]

    def _record(
        self,
        key: Any,
        before: Plan | None,
        step: TracedStep,
        optimizer: torch.optim.Optimizer,
        batch: list[torch.Tensor],
    ) -> Plan:
        """Record the step; a second recording that agrees with the first confirms the plan."""
        assert self._state is not None
        assert self._python is not None
        plan = self.recorder.record(
            step, self._state.tensors, optimizer, batch, self.settle, self._python
        )
        confirmed = before is not None and plan.agrees_with(before)
        self._plans[key] = (plan, confirmed)
        if before is not None and not confirmed:
            self._disagreements += 1
            if self._disagreements == _MAX_DISAGREEMENTS:
                raise NotReplayable("step after step was another graph")
        return plan

    def _execute(
        self,
        plan: Plan,
        state: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batch: list[torch.Tensor],
    ) -> torch.Tensor:
        """Run a plan's graph and put its results where the state is kept."""
        lib, device = self._lib, str(self._device)
        rates = {
            group: self._learning_rate(optimizer.param_groups[group]["lr"], dtype)
            for group, dtype in plan.lr_dtypes.items()
        }
        sources: dict[str, Any] = {
            "state": state,
            "batch": batch,
            "constant": plan.constants,
            "lr": rates,
            "seed": [lib._get_base_seed_as_tensor(device)],
        }
        results = lib._run_cached_graph(plan.graph, [sources[k][index] for k, index in plan.slots])
        seed = _SEED_OFFSET + _SEED_FACTOR * lib._xla_get_rng_seed()
        lib._xla_set_rng_seed(seed % _SEED_MODULUS, device)
        *updated, loss = results
        self._kept = [*self._kept[-1:], updated]
        for index, result in zip(plan.updated, updated, strict=True):
            lib._replace_xla_tensor(state[index], result)
        assert self._state is not None
        self._left_as = self._fingerprint(self._state)
        return loss

    def _learning_rate(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        key = (value, dtype)
        if key not in self._learning_rates:
            if len(self._learning_rates) > 64:  # a schedule rarely comes back to a value
                self._learning_rates.clear()
            self._learning_rates[key] = torch.tensor(value, dtype=dtype).to(self._device)
        return self._learning_rates[key]


def _signature(state: TrainingState, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    """What a plan holds for: shapes, modes and hyperparameters, the learning rate excepted.

    Raises:
        NotReplayable: a hyperparameter is a tensor, whose changes would not be seen.
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
