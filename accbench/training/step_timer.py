"""Timing of steps in windows, and the only place where the host waits for the device.

A window is a number of steps between two waits. Windows follow each other without gaps, so that
no second of training is left out; an evaluation interrupts them.
"""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from accbench.distributed.process_group import all_gather_values
from accbench.engines import Batch, CompileStats, Engine
from accbench.errors import NonFiniteLossError, RecompiledError, remedy_of_overflow
from accbench.recording.machine_use import MachineWatch
from accbench.recording.records import WindowRecord, finite_or_none
from accbench.system.turns import SOCKET_VARIABLE, Turns
from accbench.training.shapes import ShapeWatch

# A GradScaler below this has halved in about thirty steps in a row: gradients are infinite, not
# large.
# fairseq's --min-loss-scale has the same default.
MIN_LOSS_SCALE = 1e-4


class TimerListener(Protocol):
    """TimerListener for the progress of training."""

    def step(self, num_steps: int) -> None:
        """Handle the `num_steps`th step, which was handed to the device."""

    def window(self, record: WindowRecord) -> None:
        """Handle the end of a window."""


class StepTimer:
    """Times training steps of one run in windows.

    `steady` and `warmup` sum up what the compiler did in windows of each kind.
    """

    def __init__(self, engine: Engine, started: float, listener: TimerListener) -> None:
        self.engine, self.started, self.listener = engine, started, listener
        self.num_steps = 0
        self.num_samples = 0
        """Samples of this rank since its process began."""
        self.num_earlier_samples = 0
        """Samples of all ranks in the processes before this one."""
        self.time_to_first_step_s: float | None = None
        self.step_s: float | None = None
        """Mean seconds a step in the last window after the warm-up."""
        self.warmup, self.steady = CompileStats(), CompileStats()
        self.num_steady_steps = 0
        self.shapes = ShapeWatch()
        self._steps_in_window = self._samples_before = 0
        self._data_wait_s = self._dispatch_s = self._batch_received = 0.0
        self._in_step = False
        self._paused: tuple[float, CompileStats] | None = None
        # Each stays on the device as a result of its step until the window ends: a running sum
        # would be one more operation a step, which XLA would compile.
        self._losses: list[torch.Tensor] = []
        self._window_started = 0.0
        self._stats = CompileStats()
        self._machine = MachineWatch()
        self._turns = Turns(os.environ.get(SOCKET_VARIABLE))
        self.waited_s = 0.0
        """Seconds between windows in which other runs had their turns."""
        self._in_warmup = True

    def start(self, epoch: int, began: tuple[float, CompileStats] | None = None) -> None:
        """Begin a window: at the start, and after anything that was not training.

        Args:
            epoch: the number of the epoch.
            began: `time.perf_counter()` and the compiler's counts at the beginning; None for now.
        """
        self.epoch = epoch
        self._window_started, self._stats = began or (
            time.perf_counter(), self.engine.compile_stats()
        )  # fmt: skip
        self._data_wait_s = self._dispatch_s = 0.0

    @property
    def is_in_warmup(self) -> bool:
        """Return whether the first window is still open."""
        return self._in_warmup

    def pause(self) -> None:
        """Stop the clock within a window, for what is not training."""
        self.engine.wait()
        self._paused = time.perf_counter(), self.engine.compile_stats()

    def resume(self, waits: bool = True) -> None:
        """Continue the clock, as if nothing had happened since `pause`.

        Args:
            waits: wait for the device first; not within a step, which it would cut in two.
        """
        assert self._paused is not None
        if waits:
            self.engine.wait()
        paused, before = self._paused
        self._window_started += time.perf_counter() - paused
        self._stats += self.engine.compile_stats() - before
        self._paused, self._in_step = None, False

    def batches(self, on_device: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches through, timing how long the loop waits for each."""
        iterator = iter(on_device)
        while True:
            requested = time.perf_counter()
            if self._in_step:  # a step of several batches
                self._dispatch_s += requested - self._batch_received
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._batch_received = time.perf_counter()
                self._data_wait_s += self._batch_received - requested
            self.shapes.note(batch)
            self._in_step = True
            yield batch

    @property
    def num_samples_of_all(self) -> int:
        """Samples of all ranks in all steps so far, if each rank takes as many."""
        return self.num_earlier_samples + self.num_samples * self.engine.mesh.num_data_ranks

    def step_done(self, loss: torch.Tensor, num_samples: int | None = None) -> None:
        """Count a step, and close the window when it is full.

        Args:
            loss: the step's loss, on the device.
            num_samples: samples that this rank took in the step; None for those of a batch.
        """
        if self._in_step:
            self._dispatch_s += time.perf_counter() - self._batch_received
        self._in_step = False
        assert self.engine.task.batch_size is not None
        self.num_steps += 1
        self.num_samples += self.engine.task.batch_size if num_samples is None else num_samples
        self._steps_in_window += 1
        self._losses.append(loss)
        if self.time_to_first_step_s is None:
            self.engine.wait()
            self.time_to_first_step_s = time.perf_counter() - self.started
        self.listener.step(self.num_steps)
        task = self.engine.task
        size = task.warmup_steps if self._in_warmup else task.log_interval
        if self._steps_in_window >= size:
            self.close_window()

    def close_window(self) -> None:
        """Wait for the device and report the window, if it has any steps.

        Raises:
            NonFiniteLossError: on all ranks, if the loss of any is not finite, or the loss scale
                has fallen to nothing.
        """
        if not self._losses:
            return
        self.engine.wait()
        now = time.perf_counter()
        local_losses = [loss.cpu().item() for loss in self._losses]
        local_values = [
            local_losses[-1],
            sum(local_losses) / len(local_losses),
            self._data_wait_s,
            self._dispatch_s,
            float(self.engine.peak_memory_bytes()),
            float(self.num_samples - self._samples_before),
            *self._machine.sample(),
        ]
        by_rank = all_gather_values(local_values)
        losses, mean_losses, data_waits_s, dispatches_s, peaks, samples = zip(
            *(values[:6] for values in by_rank), strict=True
        )
        machine_use = self._machine.summarize([values[6:] for values in by_rank])
        world_size, mesh = len(losses), self.engine.mesh
        stats = self.engine.compile_stats()
        in_window, self._stats = stats - self._stats, stats
        window = WindowRecord(
            epoch=self.epoch,
            first_step=self.num_steps - self._steps_in_window,
            num_steps=self._steps_in_window,
            num_samples=int(sum(samples)) * mesh.num_data_ranks // mesh.world_size,
            wall_s=now - self._window_started,
            data_wait_s=sum(data_waits_s) / world_size,
            dispatch_s=sum(dispatches_s) / world_size,
            loss=finite_or_none(sum(losses) / world_size),
            peak_memory_bytes=int(max(peaks)),
            num_compiles=in_window.num_compiles,
            warmup=self._in_warmup,
            mean_loss=finite_or_none(sum(mean_losses) / world_size),
            **machine_use._asdict(),
        )
        if self._in_warmup:
            self.warmup += in_window
        else:
            self.steady += in_window
            self.num_steady_steps += window.num_steps
        if not self._in_warmup:
            self.step_s = window.wall_s / window.num_steps
        if self._in_warmup:
            self.engine.reset_peak_memory()
        self._in_warmup = False
        self._window_started = now
        self._data_wait_s = self._dispatch_s = 0.0
        self._steps_in_window, self._losses = 0, []
        self._samples_before = self.num_samples
        self.listener.window(window)
        self._refuse_recompiles()
        remedy = remedy_of_overflow(self.engine.task.amp_level, self.engine.task.amp_dtype)
        if window.loss is None and self.engine.task.on_nan != "skip":
            raise NonFiniteLossError(
                f"the loss is not finite at step {self.num_steps - 1}: {list(losses)} by rank; "
                + remedy
            )
        scale = self.engine.precision.loss_scale()
        if scale is not None and scale < MIN_LOSS_SCALE:
            raise NonFiniteLossError(
                f"gradients overflow in step after step, the loss scale is down to {scale:.2g} at "
                f"step {self.num_steps - 1}; {remedy}"
            )
        if self._turns.are_given:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Wait as long as other runs have their turns, which no window counts."""
        paused = time.perf_counter()
        self._machine.pause()
        was_shared = self._turns.wait(self.num_steps == self.engine.task.max_steps)
        self._machine.resume()
        wait_s = time.perf_counter() - paused
        self._window_started += wait_s
        if was_shared:
            self.waited_s += wait_s

    def _refuse_recompiles(self) -> None:
        limit, number = self.engine.task.max_recompiles, self.steady.num_compiles
        if limit is not None and number > limit:
            raise RecompiledError(
                f"{number} graphs were compiled after the warm-up, --max_recompiles {limit}: "
                f"{self.shapes.causes()}; pad batches to few lengths, or raise the limit"
            )
