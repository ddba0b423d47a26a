"""The run of a user's own training loop, which `accbench.accelerate` returns."""

import contextlib
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.distributed import complex_parameters, process_group, whole_tensors
from accbench.engines import Batch, CompileStats
from accbench.engines.common import model_state
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError, RunEnded
from accbench.logger import RunLogger
from accbench.models.tasks import trainable
from accbench.recording.terminal import TrainingDisplay, log
from accbench.training import (
    accelerated_loader,
    accelerated_model,
    accelerated_optimizer,
    gathering,
    loop_record,
)
from accbench.training.accelerated_loader import AcceleratedLoader
from accbench.training.current import Worker
from accbench.training.foreign_steps import ForeignSteps
from accbench.training.gathering import BatchPosition
from accbench.training.opening import open_engine
from accbench.training.run_report import Reporter
from accbench.training.step_listener import StepListener
from accbench.training.step_timer import StepTimer


@dataclass(eq=False)
class _LoaderPass:
    """A pass over a loader, of which the loop has asked for a batch.

    It is an evaluation until it is known to train.
    """

    loader: AcceleratedLoader
    epoch: int
    position: BatchPosition
    began: tuple[float, CompileStats] | None = None
    """When its first batch was asked for, and what had been compiled by then."""
    first_step: int = 0
    trains: bool = False
    batch: Batch = None
    """The batch that the loop works on."""
    num_backward: int = 0
    """Backward passes of the run before the batch."""


class Run:
    """One model's training through an engine. Unpacks as (model, optimizer, *loaders)."""

    def __init__(
        self, begun: Worker, model: nn.Module, optimizer: torch.optim.Optimizer,
        loaders: tuple[Any, ...], sharded: bool,
    ) -> None:  # fmt: skip
        self.task, self.topology = begun.task, begun.topology
        self.optimizer_class = type(optimizer)
        """Class of the optimizer as the script built it."""
        self._model_name = type(trainable.plain(model)).__name__
        self._user_model, model = model, trainable.plain(model)
        names = accelerated_optimizer.names_by_id(model)
        accelerated_optimizer.check(optimizer, names)
        shares: list[tuple[Any, Any]] = [
            (loader, None) if sharded
            else accelerated_loader.shard_loader(loader, self.topology, self.task.seed)
            for loader in loaders
        ]  # fmt: skip
        random_state = torch.get_rng_state()
        engine: Any = begun.engine or open_engine(self.task, self.topology)
        self.engine: LoopEngine = engine
        self.model, self.optimizer = model, optimizer
        original_parameters = [*model.parameters()]
        self._prepare(names)
        # Dropout differs by rank; on the first, the script's own random numbers go on.
        self.engine.seed((torch.initial_seed() + self.topology.rank) % 2**32)
        if self.topology.rank == 0:
            torch.set_rng_state(random_state)
        self.loaders = [AcceleratedLoader(loader, self, sampler) for loader, sampler in shares]
        self.at_end = lambda: None
        """Called after the record's last line."""
        self._stack = contextlib.ExitStack()
        display = self._stack.enter_context(
            TrainingDisplay(begun.console, self.task.max_steps, ("samples", 1))
        )
        self.logger = RunLogger(self.task.run_dir, self.topology.rank)
        self.timer = StepTimer(
            self.engine, begun.started,
            Reporter(self.logger, display, self.task, self.engine, optimizer),
        )  # fmt: skip
        self.timer.start(0)
        # Python closes a pass that the loop has left, as nothing else refers to it.
        self._passes: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
        self._losses: list[torch.Tensor] = []
        self._taken: dict[_LoaderPass, int] = {}  # samples taken for the next step
        self._position: BatchPosition | None = None
        self._stepped: set[int] = set()  # optimizers, by the gradients of the last backward passes
        self._training_passes: set[_LoaderPass] = set()  # begun, and not at their end
        self._is_epoch_over = True
        # Passes for which the clock stands still: evaluations, and training that was left.
        self._stopped_for: list[_LoaderPass] = []
        self._num_applied = self._num_backward = 0
        self._error: Exception | None = None
        self._has_header = self._ended = self._is_unscaled = self._without_reduction = False
        self._are_averaged = True  # the gradients
        self._watch: StepListener = begun.watch(self) if begun.watch else StepListener()
        self._hook = optimizer.register_step_post_hook(self._count)
        self._foreign = ForeignSteps(
            model, original_parameters, self._before_foreign_step, self._after_foreign_step
        )
        self._stack.enter_context(self._foreign)

    def _prepare(self, names: accelerated_optimizer.Names) -> None:
        self.engine.strategy.prove()
        self.engine.check_model(self.model)
        if self.engine.strategy.shards_parameters:
            accelerated_optimizer.check_steps_with_shards(self.optimizer)
        if any(parameter.device.type != "cpu" for parameter in self.model.parameters()):
            self.model.to("cpu")
        process_group.broadcast_module(self.model)
        model_state.broadcast_extra(self.model)
        self.prepared = self.engine.prepared(self.model)
        accelerated_model.accelerate(self.model, self.prepared, self.engine)
        if self.engine.strategy.shards_parameters:
            whole_tensors.accept_whole_tensors(self.model, self.optimizer)
        accelerated_optimizer.replace_parameters(self.optimizer, names, self.model)
        self.engine.adopt_optimizer(self.optimizer, self.prepared)
        accelerated_optimizer.accelerate(self.optimizer, self._step)

    def __iter__(self) -> Iterator[Any]:
        return iter((self._user_model, self.optimizer, *self.loaders))

    @property
    def rank(self) -> int:
        """This worker's number; 0 where it is the only one."""
        return self.topology.rank

    @property
    def device(self) -> torch.device:
        """The device of the model and of the loaders' batches."""
        return next(self.model.parameters()).device

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute gradients averaged over all workers, in place of `loss.backward()`.

        With float16 they hold the loss scale until `optimizer.step` or `finish_gradients`. Several
        calls before a step add up.

        Args:
            loss: a tensor of one element.
            retain_graph: keep the graph, to go back through it again.
            create_graph: not supported; the error message says what to call instead.

        Raises:
            RequestError: `create_graph` is set.
        """
        if create_graph:
            raise RequestError(
                "run.backward(loss, create_graph=True) would average gradients and keep their "
                "graph: take them by torch.autograd.grad(..., create_graph=True), and "
                "run.backward what you make of them"
            )
        self._note_training()
        self._num_backward += 1
        self._stepped.clear()
        if self._is_unscaled:  # and no step has followed
            self._is_unscaled = False
            self.engine.precision.rescale(self.optimizer, self._are_averaged)
        with self._foreign.in_backward():
            self.engine.backward(loss, retain_graph)
        complex_parameters.materialize_gradients(self.optimizer)
        self._are_averaged = not self._without_reduction
        if self._are_averaged:
            self.engine.reduce_gradients(self.model, self.optimizer)
        self._losses.append(loss.detach())
        if self._foreign.take_backward_step():
            self._after_step(None)

    def gather(self, nest: Any) -> Any:
        """Return all workers' tensors joined along the first dimension, on the host.

        Called in a loop over a loader on what the last batch of N samples gave, (N, ...), it
        returns each sample once, in the loader's order, and leaves out those that a distributed
        sampler has added so that all workers have equally many. Behind the loop, and of numbers
        (), it returns what every worker has, by rank. Every worker calls it.

        Args:
            nest: tensors in any nesting.

        Raises:
            RequestError: workers have tensors of different types or shapes.
        """
        return gathering.gather(nest, self._position, self.topology.world_size)

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Skip the averaging of gradients in the block.

        It goes around all but the last forward and `backward` of a step. It only saves time:
        gradients that were averaged may be added to, and averaged again.
        """
        self._without_reduction = True
        try:
            with self._engine_without_reduction():
                yield
        finally:
            self._without_reduction = False

    def _engine_without_reduction(self) -> AbstractContextManager[Any]:
        return self.engine.without_reduction(self.prepared)

    def finish_gradients(self) -> None:
        """Remove the loss scale from the gradients, so that they can be read or changed."""
        if not self._is_unscaled:
            self._is_unscaled = True
            self.engine.precision.unscale(self.optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale the model's gradients and clip them by `torch.nn.utils.clip_grad_norm_`."""
        self.finish_gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return whole_tensors.gathered(norm) if self.engine.strategy.shards_parameters else norm

    def to_host(self, nest: Any) -> Any:
        """Copy all tensors of a nest, such as a `state_dict()`, to the host, to be saved.

        With `--dp_shard` every worker calls it, and each gets whole tensors.

        Raises:
            RequestError: tensors are in shards, and not all workers have come in time.
        """
        if self.engine.strategy.shards_parameters:
            return gathering.whole_on_host(nest, self.task.timeout_s)
        return nested.mapped(nest, lambda tensor: tensor.detach().to("cpu", copy=True))

    def _step(self) -> None:
        self._raise_left()
        self._begin_step(self.optimizer)
        with self._foreign.ignored():  # a wrapper's own optimizer steps in here
            accelerated_optimizer.step_unaccelerated(self.optimizer, self.engine)
        self._after_step(self.optimizer)

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that there are gradients, unless the step is part of a counted one."""
        if not self._takes_part(optimizer):
            self._refuse_without_losses()
            self._end_if_done()

    def _takes_part(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the step is part of one that another optimizer has counted.

        That is so if another optimizer has stepped by the same gradients, and this one has not.
        """
        return not self._losses and bool(self._stepped) and id(optimizer) not in self._stepped

    def _refuse_without_losses(self) -> None:
        if not self._losses:
            raise RequestError(
                "optimizer.step() without gradients of run.backward(loss): call that in place of "
                "loss.backward()"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count a step of an optimizer; None stands for those that stepped in a backward pass.

        Several optimizers by the same gradients, each with some of the parameters, are one step.
        """
        takes_part = optimizer is not None and self._takes_part(optimizer)
        self._stepped.add(id(optimizer))
        if takes_part:
            self.engine.end_step()
            return
        loss = self._losses[0]
        for other in self._losses[1:]:
            loss = loss + other
        self.engine.end_step()
        num_samples = sum(self._taken.values())
        self._begin_record(num_samples)
        self._watch.after_step(loss, is_own=optimizer is self.optimizer)
        self._losses, self._taken, self._is_unscaled = [], {}, False
        # No samples: one more optimizer's step on the same batch, or a loop without a loader.
        known = num_samples or (0 if self.loaders else self.task.batch_size)
        self.timer.step_done(loss, known)

    def _before_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the step of another optimizer: a wrapped one, or one of some of the parameters."""
        self._raise_left()
        if not self._foreign.is_in_backward:
            self._begin_step(optimizer)
            self._refuse_float16()
            return
        if self.topology.world_size > 1:
            raise RequestError(
                "an optimizer steps in the backward pass, before gradients are averaged over "
                "workers; step after run.backward(loss), or use one worker"
            )
        self._refuse_float16()
        self._end_if_done()

    def _refuse_float16(self) -> None:
        if self.engine.precision.loss_scale() is not None:
            raise RequestError(
                "an optimizer steps that accbench.accelerate was not given, with gradients that "
                "hold float16's loss scale: give accelerate that optimizer, or use --amp_dtype "
                "bfloat16"
            )

    def _after_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_applied += not self._takes_part(optimizer)
        self._after_step(optimizer)

    def _count(self, *_: Any) -> None:
        self._num_applied += 1

    def batches(self, loader: AcceleratedLoader, on_device: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of one pass over a loader; `on_device` is closed when the pass ends."""
        this = _LoaderPass(loader, loader.epoch - 1, loader.position)
        new_pass = self._pass(this, on_device)
        self._passes.add(new_pass)
        return new_pass

    def _pass(self, this: _LoaderPass, on_device: Any) -> Generator[Batch, None, None]:
        timed = self.timer.batches(on_device)
        end = "failed"
        try:
            while True:
                self._raise_left()
                self._end_if_done()
                self._on_request(this)
                try:
                    this.batch = next(timed if this.trains else on_device)
                except StopIteration:
                    end = "whole"
                    return
                num_steps, this.num_backward = self.timer.num_steps, self._num_backward
                this.position.next(this.batch)
                self._position = this.position
                if this.trains:
                    self._count_batch(this)
                yield self.engine.batch_for_loop(this.batch)
                this.batch = None
                if self.timer.num_steps == num_steps:  # otherwise the step has ended it
                    self.engine.end_step()
        except GeneratorExit:
            end = "left"
            raise
        except RunEnded:
            end = "run ended"
            raise
        finally:
            self._end_pass(this, on_device, end)

    def _on_request(self, this: _LoaderPass) -> None:
        """Handle the loop's request for a batch: is it training, and does a step begin?"""
        is_first, allows_training = this.began is None, torch.is_grad_enabled()
        if is_first:
            this.began = time.perf_counter(), self.engine.compile_stats()
            this.first_step = self.timer.num_steps
        if this.trains:
            self._continue_clock()
        elif is_first and allows_training and self.model.training:
            self._continue_clock()
            self._begin_training(this, None)
        else:
            self._stop_clock(this)
        if self._losses:
            return
        self._taken.pop(this, None)  # of a batch that no step used
        # Of a first batch it shows only later that it is trained on, as of a model in eval mode.
        if this.trains or (is_first and allows_training and not self._taken):
            self._watch.before_step()

    def _begin_training(self, this: _LoaderPass, began: tuple[float, CompileStats] | None) -> None:
        """Count a pass as training, and begin an epoch unless others train beside it."""
        self._leave_earlier(this)
        if self._is_epoch_over:
            self.timer.close_window()
            self.timer.start(this.epoch, began)
            self._is_epoch_over = False
        this.trains = True
        self._training_passes.add(this)

    def _leave_earlier(self, this: _LoaderPass) -> None:
        """Take earlier passes over the same loader for left, and a long one for an epoch.

        By the order of the program, which all ranks share: when Python closes a pass that was left
        depends on who still refers to it.
        """
        earlier = [other for other in self._training_passes if other.loader is this.loader]
        self._training_passes.difference_update(earlier)
        if not earlier or any(map(self._num_steps_in, self._training_passes)):
            return
        if any(map(self._is_long, earlier)):
            self._is_epoch_over = True
        else:
            self.timer.epoch = this.epoch

    def _num_steps_in(self, this: _LoaderPass) -> int:
        return self.timer.num_steps - this.first_step

    def _is_long(self, this: _LoaderPass) -> bool:
        """Return whether a pass that was left ends a window, as an epoch does.

        A loop may begin a pass for every batch, or for a few, which share a window.
        """
        return self._num_steps_in(this) >= self.task.log_interval and not self.timer.is_in_warmup

    def _note_training(self) -> None:
        """Count passes as training that were taken for evaluations: `backward` is called in them.

        The model may be in eval mode to keep BatchNorm's statistics, or since a validation.
        """
        evaluations = [a_pass for a_pass in self._stopped_for if not a_pass.trains]
        self._continue_clock(waits=False)
        for this in evaluations:
            self._begin_training(this, this.began)
            self.timer.shapes.note(this.batch)
            self._count_batch(this)

    def _count_batch(self, this: _LoaderPass) -> None:
        num_samples = this.position.num_in_batch
        self._begin_record(num_samples)
        self._taken[this] = self._taken.get(this, 0) + num_samples
        self._watch.got(this.batch)

    def _stop_clock(self, this: _LoaderPass) -> None:
        if not self._stopped_for:
            self.timer.pause()
        if this not in self._stopped_for:
            self._stopped_for.append(this)

    def _continue_clock(self, waits: bool = True) -> None:
        if self._stopped_for:
            self._stopped_for.clear()
            self.timer.resume(waits)

    def _end_pass(self, this: _LoaderPass, on_device: Any, end: str) -> None:
        """Close a pass; Python closes one that was left, at times that differ between ranks."""
        is_to_do = end == "left" and this.num_backward == self._num_backward
        if not (is_to_do and torch.is_grad_enabled()):  # a batch of next(iter(loader)) is to do
            self.engine.leave_batches()
        on_device.close()
        if self._position is this.position:
            self._position = None
        if end != "left":  # which `_leave_earlier` handles
            self._training_passes.discard(this)
        if self._stopped_for == [this]:
            self.timer.resume()
        if this in self._stopped_for:
            self._stopped_for.remove(this)
        # Not after an error: the other ranks may be gone, which a window waits for.
        if not this.trains or self._ended or end == "failed":
            return
        if end == "left":
            if self._is_long(this):
                with contextlib.suppress(Exception):  # an error in the loop may have closed it
                    self._stop_clock(this)
        elif not self._training_passes:
            self._is_epoch_over = True
            self._close_window(is_run_over=end == "run ended")

    def _close_window(self, is_run_over: bool) -> None:
        try:
            self.timer.close_window()
        except Exception as error:
            if not is_run_over:
                raise
            self._error = error  # the script ends, and would not see it raised

    def _raise_left(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_if_done(self) -> None:
        if self.task.max_steps is not None and self.timer.num_steps >= self.task.max_steps:
            raise RunEnded(0)

    def _begin_record(self, num_samples: int) -> None:
        """Write the record's first line, which has the number of samples in a batch."""
        if self._has_header:
            return
        self._has_header = True
        task = replace(self.task, batch_size=self.task.batch_size or num_samples or 1)
        self.engine.task = self.task = self.timer.listener.task = task  # type: ignore[attr-defined]
        loop_record.write_header(self.logger, task, self.engine, self.topology, self._model_name)

    def let_go(self) -> None:
        """Close the display and all passes over loaders, and wait for no other rank."""
        self._ended = True
        for a_pass in [*self._passes]:
            with contextlib.suppress(ValueError):  # the pass that called this
                a_pass.close()
        self.engine.leave_batches()
        self._stack.close()

    def close(self) -> None:
        """End the run and its record; a script that ends does this by itself.

        Raises:
            NonFiniteLossError: in the last steps' window.
        """
        if self._ended:
            return
        self._raise_left()
        if self._num_backward and not self.timer.num_steps:
            raise RequestError(
                f"run.backward was called {self._num_backward} times, and no optimizer of the "
                "model's parameters has stepped: call the step of the one that accelerate was given"
            )
        self._continue_clock()
        self.timer.close_window()
        self._begin_record(0)
        self.let_go()
        end = loop_record.end_record(self.engine, self.optimizer, self.timer, self._num_applied)
        self.logger.write(end)
        self.engine.close()
        log.info(
            f"done: {end.num_steps} steps, {end.num_samples} samples, records in "
            f"{self.task.run_dir}"
        )
        self.at_end()

    def fail(self, error: BaseException) -> None:
        """End the record with the error that the script ended with."""
        if self._ended:
            return
        self.let_go()
        loop_record.write_failure(
            self.logger, error, self.topology.rank, num_steps=self.timer.num_steps
        )
        self.at_end()
