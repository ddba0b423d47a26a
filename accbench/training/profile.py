"""`--profile N`: a trace of N steps from every rank, for Perfetto, and XLA's own profile."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

from accbench.engines import Engine
from accbench.recording.terminal import log
from accbench.training.step_timer import StepTimer

FOLDER = "profile"


class StepProfile:
    """A profile that begins after the first window behind the warm-up.

    Profiled steps are slower than others, and so are their windows.
    """

    def __init__(self, engine: Engine, timer: StepTimer, num_steps: int) -> None:
        self.engine, self.timer, self.num_steps = engine, timer, num_steps
        self.folder = engine.task.run_dir / FOLDER
        self._left: int | None = None
        self._end_of_engines: Callable[[], None] = lambda: None

    def after_step(self) -> None:
        """Start, count or stop the profile; called after each step."""
        if self._left is None:
            if self.timer.step_s is not None:
                self._start(self.timer.step_s)
        elif self._left:
            self._left -= 1
            if not self._left:
                self._stop()

    def finish(self) -> None:
        """Write what was traced, if training ended before all steps were done."""
        if self._left is None:
            log.warning(
                "nothing profiled: the run ended before its first window after the warm-up; lower "
                "--warmup_steps or --log_interval"
            )
        elif self._left:
            self._stop()

    def _start(self, step_s: float) -> None:
        self._left = self.num_steps
        self.engine.wait()
        # First the engine's: CUPTI, of which both profilers are made, has one subscriber, and
        # torch's subscribes where there is a GPU, also for the CPU's activities alone.
        try:
            self._end_of_engines = self.engine.start_profile(self.folder, self.num_steps * step_s)
        except OSError as error:
            log.warning(f"the compiler's profile could not be written to {self.folder}: {error}")
        activities = [ProfilerActivity.CPU]
        by_torch = self.engine.task.device == "cuda" and not self.engine.traces_device
        if by_torch and torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _stop(self) -> None:
        assert self._left is not None
        num_done, self._left = self.num_steps - self._left, 0
        self.engine.wait()
        try:
            self._end_of_engines()
        except (OSError, RuntimeError) as error:  # as below
            log.warning(f"the compiler's profile could not be written to {self.folder}: {error}")
        self._profiler.stop()
        path = self.folder / f"rank{self.engine.topology.rank}.json.gz"
        try:
            self.folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # for example a full disk; training goes on
            log.warning(f"the profile could not be written to {path}: {error}")
            return
        log.info(f"profiled {num_done} steps: {path}, to be opened in ui.perfetto.dev")
